"""The guard's run beside its history: what is kept of it, and what a sick runner excuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import guard_repo
import pytest
from history_records import H200, days, noisy

from pytest_cudaforge import history
from pytest_cudaforge.guard import Finding, Question, Thresholds
from pytest_cudaforge.guard_run import _with_history
from pytest_cudaforge.guard_session import Raced, Runner
from pytest_cudaforge.guarded import GuardRecord, GuardReport
from pytest_cudaforge.merge_base import MergeBase, find_merge_base
from pytest_cudaforge.records import DeviceFacts, Race, Ratio, Target, TimedBlock

KERNEL = "layers.py::RMSNorm"
PAST_NS = {"candidate": 80_000.0, "eager": 120_000.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> MergeBase:
    made = guard_repo.repo(tmp_path_factory.mktemp("repo").resolve())
    made.write({"kept.jsonl": "{}\n"})
    made.commit("first")
    made.write({"kept.jsonl": "{}\n{}\n"})
    made.commit("second")
    return find_merge_base(made.root, "HEAD^", {})


def raced(factor: float, question: Question = "eager") -> tuple[GuardReport, list[Raced]]:
    """A run in which the reference takes ``factor`` times what it took, and the guard found a regression."""
    times = (("candidate", 200_000.0), ("eager", 120_000.0 * factor))
    race = Race("w0", "events", tuple(TimedBlock(process, times) for process in range(4) for _ in range(8)))
    finding = Finding(question, "w0", "forward", "regression", Ratio(0.6, 0.59, 0.61), 8e4, confirmed=True)
    target = Target(KERNEL, "/r", "layers.py", "RMSNorm", "class", 1, "layers", "/r", "rms_norm", "", "d" * 64)
    runner = Runner(DeviceFacts("cuda", "NVIDIA H200", "sm_90"), H200, Thresholds(), "")
    records = (GuardRecord("item", KERNEL, "w0", "regression", reason="slower", text="slower", findings=(finding,)),)
    return GuardReport(records=records), [Raced(target, "a" * 64, "cuda", runner, (race,), (finding,))]


def remembered(path: Path) -> Path:
    shake = noisy(0.005)
    history.append(path, days(10, lambda _: {party: shake(time) for party, time in PAST_NS.items()}))
    return path


def test_a_run_is_kept_with_its_commits(base: MergeBase, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    report, runs = raced(1.0)
    assert _with_history(report, runs, base, path, 20.0) == report
    (kept,) = history.read(path).measurements
    assert (kept.target, kept.kernel, kept.outcome, kept.processes) == (KERNEL, "a" * 64, "regression", 4)
    assert (kept.run.commit, kept.run.base_commit, kept.run.machine) == (base.head, base.sha, H200)


def test_on_a_sick_runner_a_broken_promise_is_no_regression(base: MergeBase, tmp_path: Path) -> None:
    report, runs = raced(1.3)
    told = _with_history(report, runs, base, remembered(tmp_path / "history.jsonl"), 20.0)
    assert told.records[0].outcome == "inconclusive" and "may be at fault" in told.records[0].reason
    assert told.alarms[0].startswith("sick runner?: ")


@pytest.mark.parametrize("factor, question", [(1.0, "eager"), (1.3, "base")], ids=["a runner in health", "the base"])
def test_what_a_sick_runner_does_not_explain_stands(
    factor: float, question: Question, base: MergeBase, tmp_path: Path
) -> None:
    report, runs = raced(factor, question)
    told = _with_history(report, runs, base, remembered(tmp_path / "history.jsonl"), 20.0)
    assert told.records == report.records


def test_a_history_that_the_change_brings_along_excuses_nothing(base: MergeBase) -> None:
    report, runs = raced(1.3)
    told = _with_history(report, runs, base, remembered(base.top / "kept.jsonl"), 20.0)
    assert told.records == report.records and told.alarms
    assert any("is not what it is at the merge base" in note for note in told.notes)


def test_a_history_that_cannot_be_written_fails_nothing(base: MergeBase, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report, runs = raced(1.0)
    told = _with_history(report, runs, base, tmp_path / "file" / "history.jsonl", 20.0)
    assert told.records == report.records and "the history was not kept" in told.notes[0]


def test_a_run_without_a_race_leaves_nothing(base: MergeBase, tmp_path: Path) -> None:
    report, runs = raced(1.0)
    empty = [replace(runs[0], races=())]
    assert _with_history(report, empty, base, tmp_path / "history.jsonl", 20.0) == report
    assert not (tmp_path / "history.jsonl").exists()
