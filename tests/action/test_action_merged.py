"""What all jobs of a workflow reported, as one; and what of it is not believed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from cudaforge_action.harvest import harvest
from cudaforge_action.merged import read_document, write_merged
from cudaforge_action.records import ForgedShard
from cudaforge_action.shards import ShardError, write_forged
from cudaforge_action.story import Origin, kernel_of
from history_records import measurement
from report_records import HOSTILE, hostile_trace, rich_trace
from shard_records import forged, target, trace, verified

from pytest_cudaforge import history
from pytest_cudaforge.records import Usage
from pytest_cudaforge.report.json import document
from pytest_cudaforge.report.rows import totals


def reported(name: str = "layers.py::Scale") -> str:
    traces = [rich_trace(name)]
    return json.dumps(document(traces, totals(traces, Usage(10, 20, 0, 0.5), 12.0)))


def jobs(folder: Path, name: str, *targets: str) -> Path:
    made = [target(folder, one) for one in targets]
    forged(folder / "forged" / name, made)
    verified(folder / "verified" / name, made)
    return folder / "forged" / name


def test_all_shards_become_one_of_each(tmp_path: Path) -> None:
    for number, name in enumerate(("a", "b")):
        place = jobs(tmp_path, f"0{number}-cpu", name)
        (place / "report.json").write_text(reported(f"layers.py::{name}"))
        (place / "junit.xml").write_text(
            '<testsuites><testsuite name="pytest"><testcase name="t"/></testsuite></testsuites>'
        )
        history.append(place / "history.jsonl", [measurement(1, {"candidate": 10.0})])
    folder = tmp_path / "published"
    assert write_merged(folder, harvest(tmp_path)) == ()
    data = json.loads((folder / "forge.json").read_text())
    assert [(one["target"], one["shard"]) for one in data["targets"]] == [
        ("layers.py::a", "00-cpu"),
        ("layers.py::b", "01-cpu"),
    ]
    assert (data["totals"]["targets"], data["totals"]["forged"], data["totals"]["usage"]["usd"]) == (2, 2, 1.0)
    assert [one["target"] for one in data["published"]] == ["layers.py::a", "layers.py::b"]
    assert (folder / "junit.xml").read_text().count("<testcase") == 2
    assert len(history.read(folder / "history.jsonl").measurements) == 1
    assert "layers.py::b" in (folder / "report.html").read_text()


HEAD = '{"format": "cudaforge-report", "version": 1, "totals": {}, "targets": '


@pytest.mark.parametrize(
    "text", ["", "[]", HEAD.replace("1", "2") + "[]}", *(f"{HEAD}[{one}]}}" for one in ("1", "{}"))]
)
def test_a_document_that_is_none_costs_a_word(tmp_path: Path, text: str) -> None:
    place = jobs(tmp_path, "01-cpu", "a")
    (place / "report.json").write_text(text)
    with pytest.raises(ShardError):
        read_document(place / "report.json")
    (note,) = write_merged(tmp_path / "published", harvest(tmp_path))
    assert note.startswith("shard 01-cpu: ")
    assert (tmp_path / "published/forge.json").is_file()


def test_shards_that_are_lost_or_not_ours_are_named(tmp_path: Path) -> None:
    jobs(tmp_path, "01-cpu", "a")
    jobs(tmp_path, "02-cpu", "b")
    (tmp_path / "forged/02-cpu/.hidden").write_text("x")
    forged(tmp_path / "forged/03-cpu", [])
    write_forged(tmp_path / "forged/05-cpu", ForgedShard("05-cpu", "", error="killed"), {})
    verified(tmp_path / "verified/05-cpu", [])
    found = harvest(tmp_path, [f"0{number}-cpu" for number in range(1, 6)])
    assert list(found.lost) == ["02-cpu", "03-cpu", "04-cpu", "05-cpu"]
    assert found.lost["03-cpu"] == "its verify job left nothing"
    assert found.lost["04-cpu"] == "its forge job left nothing"
    assert found.lost["05-cpu"] == "its forge job ended early: killed"
    # Without its story, but verified all the same.
    assert [kernel.entry.target for kernel in found.kernels] == ["layers.py::a", "layers.py::b"]
    assert found.usd is None


def test_the_story_of_a_hostile_forge_job_is_told_by_ours(tmp_path: Path) -> None:
    """Nothing of what the verify job's report says is taken over, and nothing of the trace's is markup."""
    jobs(tmp_path, "01-cpu", "a")
    found = harvest(tmp_path)
    (shard,), (kernel,) = found.verified.values(), found.verified["01-cpu"].shard.kernels
    (told, _) = found.forged["01-cpu"].kernels[0]
    evil = replace(hostile_trace(), language=f"cpp\n\n<b>{HOSTILE}")
    models = replace(told, models=(HOSTILE,), prompts=("ab" * 32,))
    made = kernel_of(shard, kernel, Origin(models, evil, HOSTILE)).files
    report = made["report.md"].decode()
    prose = re.sub(r"(?ms)^(`{3,})[^\n]*\n.*?^\1$", "", report)
    assert "<script>" not in prose and "<b>" not in prose and "@octocat" not in prose
    assert "- prompts: abababababab" in report
    assert set(made) == {"kernel.cpp", "plan.py", "evaluation.json", "report.md", "report.svg"}
    assert b"<script" not in made["report.svg"]


def test_figures_that_cannot_be_reckoned_with_cost_the_story_alone(tmp_path: Path) -> None:
    made = target(tmp_path, "a")
    told = trace(made)
    last = told.rounds[-1]
    assert last.evaluation is not None and last.evaluation.timing is not None
    timing = last.evaluation.timing
    zero = replace(
        timing.workloads[0], roofline_ns=1.0, candidate=replace(timing.workloads[0].candidate, median_ns=0.0)
    )
    broken = replace(last, evaluation=replace(last.evaluation, timing=replace(timing, workloads=(zero,))))
    jobs(tmp_path, "01-cpu", "a")
    found = harvest(tmp_path)
    (shard,), (kernel,) = found.verified.values(), found.verified["01-cpu"].shard.kernels
    origin = Origin(found.forged["01-cpu"].kernels[0][0], replace(told, rounds=(*told.rounds[:-1], broken)))
    report = kernel_of(shard, kernel, origin).files["report.md"].decode()
    assert "the story of its making could not be told" in report
    assert "## Accuracy" in report and "## Provenance" in report
