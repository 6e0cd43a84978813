"""The file: what is appended comes back, whoever writes beside it, and damage costs the damaged line only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from history_records import H200, NEWER, days, measurement

from pytest_cudaforge import history
from pytest_cudaforge.errors import StoreError
from pytest_cudaforge.guard import Finding
from pytest_cudaforge.measurements import line_of, parse
from pytest_cudaforge.records import Race, Ratio, TimedBlock

CALM = {"candidate": 80_000.0, "eager": 120_000.0, "compile": 100_000.0, "base": 80_500.0}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "history.jsonl"


# -- one measurement --------------------------------------------------------------------------------------------------


def test_a_line_says_all_of_a_measurement() -> None:
    one = measurement(3, CALM, outcome="inconclusive", disturbed="others", machine=NEWER)
    line = line_of(one)
    assert "\n" not in line and parse(json.loads(line)) == one


def test_fields_of_later_writers_are_read_over() -> None:
    data = json.loads(line_of(measurement(3, CALM)))
    data |= {"colour": "blue"}
    data["machine"]["rack"] = 7
    data["machine"]["toolchain"]["ptxas"] = "13.1"
    data["parties"]["candidate"]["mean_ns"] = 1
    assert parse(data) == measurement(3, CALM)


def race(*blocks: tuple[int, float, float], disturbed: str = "") -> Race:
    timed = tuple(
        TimedBlock(process, (("candidate", ns), ("eager", ns * 2)), foreign) for process, ns, foreign in blocks
    )
    return Race("w0", "supervisor", timed, disturbed=disturbed)


def test_a_race_becomes_a_measurement() -> None:
    findings = [
        Finding("eager", "w0", "forward", "regression", Ratio(1.9, 1.8, 2.0), 12.3, promised=3.0, confirmed=True),
        Finding("base", "w0", "forward", "pass", Ratio(1.0, 0.99, 1.01), 0.0),
        Finding("base", "other", "forward", "inconclusive", Ratio(1.0, 0.5, 2.0), 0.0),
    ]
    blocks = [(process, 100.0 + block, 0.0) for process in range(3) for block in range(4)]
    run = history.new_run(H200, "c" * 40)
    kept = history.measured(
        race(*blocks), findings, run=run, target="a.py::T", target_digest="d", kernel="k", language="cpp"
    )
    assert kept is not None and (kept.outcome, kept.processes, kept.clock) == ("regression", 3, "supervisor")
    sample = kept.sample("candidate")
    assert sample is not None and (sample.median_ns, sample.blocks) == (101.5, 12)
    assert [each.question for each in kept.judgements] == ["eager", "base"]
    assert kept.judgements[0].confirmed and kept.judgements[0].promised == 3.0
    assert kept.speedup("eager") == Ratio(1.9, 1.8, 2.0) and kept.speedup("compile") is None
    assert parse(json.loads(line_of(kept))) == kept


def test_a_race_without_blocks_leaves_nothing() -> None:
    run = history.new_run(H200, "")
    assert history.measured(race(), [], run=run, target="t", target_digest="d", kernel="k", language="cpp") is None


def test_the_time_of_a_run_is_utc() -> None:
    late = datetime(2026, 11, 21, 23, 30, tzinfo=timezone(timedelta(hours=-3)))
    one, other = history.new_run(H200, "", now=late), history.new_run(H200, "", now=late)
    assert one.time == "2026-11-22T02:30:00Z" and one.id != other.id


# -- appending and reading --------------------------------------------------------------------------------------------


def test_what_is_appended_comes_back_in_order_of_time(path: Path) -> None:
    runs = days(5, lambda _: CALM)
    history.append(path, runs[3:])
    history.append(path, runs[:3])
    assert history.read(path) == history.History(tuple(runs))


def test_the_usual_folder_is_hidden_from_git_and_no_other(tmp_path: Path) -> None:
    usual, chosen = tmp_path / ".cudaforge" / "history.jsonl", tmp_path / "perf" / "history.jsonl"
    for path in (usual, chosen):
        history.append(path, days(1, lambda _: CALM))
    assert (usual.parent / ".gitignore").read_text() == "*\n" and not (chosen.parent / ".gitignore").exists()


def test_no_file_is_an_empty_history(path: Path) -> None:
    assert history.read(path) == history.History()
    history.append(path, [])
    assert not path.exists()


def test_damage_costs_the_damaged_lines_only(path: Path) -> None:
    runs = days(4, lambda _: CALM)
    history.append(path, runs[:2])
    newer = json.loads(line_of(runs[0])) | {"version": 2}
    with path.open("ab") as stream:
        stream.write(b'{"some": "other tool"}\n\xff\xfe\x00\n\n' + json.dumps(newer).encode() + b"\n")
        stream.write(b"[" * 100_000 + b"\n")
        stream.write(line_of(runs[2]).encode()[:300])
    history.append(path, runs[3:])
    found = history.read(path)
    assert found.measurements == (*runs[:2], runs[3])
    assert [note.partition(": ")[2] for note in found.notes] == [
        "line 3 is skipped: not a measurement of the guard",
        "3 lines (the first: 4) are skipped: damaged (a run that was killed while it wrote?)",
        "line 6 is skipped: of another version of pytest-cudaforge",
    ]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data["parties"].pop("candidate"),
        lambda data: data["parties"]["candidate"].update(median_ns=-1),
        lambda data: data["parties"]["candidate"].update(median_ns=float("nan")),
        lambda data: data["parties"]["candidate"].update(median_ns="1"),
        lambda data: data["parties"]["candidate"].update(median_ns=10**400),
        lambda data: data["parties"].update(eager=[]),
        lambda data: data.update(target=None),
        lambda data: data.update(what="sideways"),
        lambda data: data.update(outcome=[]),
        lambda data: data.update(findings=[1]),
        lambda data: data["findings"][0].update(ratio=[1.0]),
        lambda data: data["machine"].update(cores="16"),
        lambda data: data.update(machine=[]),
    ],
)
def test_a_line_that_is_not_as_it_should_be_is_passed_over(path: Path, spoil: object) -> None:
    data = json.loads(line_of(measurement(1, CALM)))
    spoil(data)  # type: ignore[operator]
    path.parent.mkdir()
    path.write_text(json.dumps(data) + "\n" + line_of(measurement(2, CALM)) + "\n")
    found = history.read(path)
    assert found.measurements == (measurement(2, CALM),) and len(found.notes) == 1


_WRITER = """
import sys
from pathlib import Path
from history_records import measurement
from pytest_cudaforge import history
me, path = int(sys.argv[1]), Path(sys.argv[2])
sys.stdin.read(1)
for turn in range(15):
    samples = [measurement(100 * me + turn, {"candidate": 1.0 + part}) for part in range(3)]
    history.append(path, samples, max_bytes=10**7)
"""


def test_runs_that_append_at_once_lose_nothing(path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(me), str(path)], env=environment, stdin=subprocess.PIPE)
        for me in range(3)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"x")
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    found = history.read(path)
    assert len(found.measurements) == 3 * 15 * 3 and not found.notes
    assert path.read_bytes().count(b"\n") == 3 * 15 * 3


def test_a_file_that_grew_too_large_loses_its_oldest_lines(path: Path) -> None:
    runs = days(60, lambda _: CALM)
    size = len(line_of(runs[0])) + 1
    for one in runs:
        history.append(path, [one], max_bytes=20 * size)
    kept = history.read(path).measurements
    assert kept == tuple(runs[60 - len(kept) :]) and 14 <= len(kept) <= 20
    assert path.stat().st_size <= 20 * size + 100


def test_a_history_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"history.jsonl cannot be written.*(\n.*)*--forge-history"):
        history.append(tmp_path / "file" / "history.jsonl", days(1, lambda _: CALM))
    with pytest.raises(StoreError, match="cannot be read"):
        history.read(tmp_path)


# -- merging ----------------------------------------------------------------------------------------------------------


def test_two_histories_become_one_without_doubles(tmp_path: Path) -> None:
    runs = days(9, lambda _: CALM)
    cache, branch = tmp_path / "cache.jsonl", tmp_path / "branch.jsonl"
    history.append(cache, runs[:6])
    history.append(branch, runs[3:])
    # Another writer's order of keys and a newer version's line are lines like any.
    shuffled = json.loads(line_of(runs[0]))
    newer = json.loads(line_of(runs[4])) | {"version": 2}
    with branch.open("a") as stream:
        stream.write(json.dumps(dict(reversed(shuffled.items()))) + "\n" + json.dumps(newer) + "\nnonsense\n")
    assert history.merge(cache, [branch]) == 4
    assert history.read(cache).measurements == tuple(runs)
    assert cache.read_text().count('"version":2') == 1
    before = cache.stat().st_mtime_ns
    assert history.merge(cache, [branch]) == 0 and cache.stat().st_mtime_ns == before


def test_merging_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no history .*gone.jsonl"):
        history.merge(tmp_path / "history.jsonl", [tmp_path / "gone.jsonl"])


def test_two_runs_of_one_second_are_two(tmp_path: Path) -> None:
    one = measurement(1, CALM)
    other = replace(one, run=replace(one.run, id="otherrun0001"))
    first, second = tmp_path / "a", tmp_path / "b"
    history.append(first, [one])
    history.append(second, [other])
    assert history.merge(first, [second]) == 1
