"""A history as people see it: terminal, page, JSON, and the export's format field by field; and the command."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from history_records import H200, NEWER, NORM, days, measurement, noisy

from pytest_cudaforge import cli, history
from pytest_cudaforge.history import Measurement
from pytest_cudaforge.records import Ratio
from pytest_cudaforge.report import github_benchmark, history_page
from pytest_cudaforge.report.history_rows import last_alarms, last_runs, series_rows
from pytest_cudaforge.report.history_text import blocks, text

CALM = {"candidate": 80_000.0, "eager": 120_000.0, "compile": 100_000.0}
LOST = {"candidate": 104_000.0, "eager": 120_000.0, "compile": 96_000.0}


@pytest.fixture(scope="module")
def story() -> list[Measurement]:
    """Thirty days: another kernel on the 12th, a disturbed one on the 17th, another toolchain from the 25th on."""
    shake = noisy(0.005)
    found = []
    for day in range(30):
        times = {party: shake(time) for party, time in (LOST if day >= 25 else CALM).items()}
        found.append(
            measurement(
                day,
                times,
                machine=NEWER if day >= 25 else H200,
                kernel=("b" if day >= 12 else "a") * 64,
                disturbed="others" if day == 17 else "",
            )
        )
    plain = days(30, lambda _: {"candidate": shake(8e6), "base": shake(8e6)}, target="plain.py::Plain")
    told = replace(plain[20].judgements[0], outcome="regression", ratio=Ratio(1.2, 1.1, 1.3))
    plain[20] = replace(plain[20], outcome="regression", judgements=(told,))
    return found + plain


def test_rows_follow_each_workload_on_each_machine(story: list[Measurement]) -> None:
    other = replace(story[3], run=replace(story[3].run, machine=replace(H200, device="NVIDIA B200")))
    rows = series_rows([*story, other])
    assert {(row.last.target, row.machine.device, len(row.runs)) for row in rows} == {
        (NORM, "NVIDIA H200", 30),
        (NORM, "NVIDIA B200", 1),
        ("plain.py::Plain", "NVIDIA H200", 30),
    }
    assert len(rows) == 3 and rows[2].last.target == "plain.py::Plain"
    norm = next(row for row in rows if len(row.runs) == 30)
    assert [(event.index, event.kind) for event in norm.events] == [(12, "kernel"), (25, "toolchain")]
    kernel = norm.parties[0]
    assert kernel.points[17] is None and kernel.change == pytest.approx(0.3, abs=0.03)
    assert len(series_rows(story, target="RMSN", most=7)[0].runs) == 7


def test_the_terminal_shows_the_course_the_changes_and_the_alarm(story: list[Measurement]) -> None:
    shown = text(series_rows(story), last_alarms(story), ["history.jsonl: line 3 is skipped: damaged\x1b[31m"])
    assert "layers.py::RMSNorm [w0] (cuda)" in shown and "on NVIDIA H200 (sm_90" in shown and "30 runs" in shown
    assert re.search(r"kernel  [▁▂]{17}·[▁▂]{7}[▇█]{5}  median 80[.\d]* us, last 10\d us, \+\d\d\.\d %", shown)
    assert re.search(r"\n {22}K {12}T\n", shown)
    assert "T 2026-09-26" in shown and "R 2026-09-21" in shown and "regression against base (1.2×)" in shown
    assert "toolchain: layers.py::RMSNorm [w0]: the kernel did not change" in shown and "to do: re-forge" in shown
    assert "note: history.jsonl: line 3" in shown and "\x1b" not in shown
    assert not re.search(r"module  .*[▁█]", shown), "noise of half a percent is flat"


def test_a_workload_that_was_only_disturbed_says_so(story: list[Measurement]) -> None:
    rows = series_rows([story[17], replace(story[18], disturbed="others")])
    shown = text(rows, (), ())
    assert "none of these sittings was calm, the last: others" in shown and re.search("kernel  [▁-█]{2}  med", shown)
    assert "None of these sittings was calm" in history_page.page(rows, (), ())


@pytest.mark.parametrize(
    "points, shown",
    [
        ([1.0, 2.0, 3.0], "▁▅█"),
        ([None, 5.0, None], "·▅·"),
        ([None], "·"),
        ([100.0, 101.0], "▄▅"),
        ([], ""),
    ],
)
def test_blocks(points: list[float | None], shown: str) -> None:
    assert blocks(points) == shown


def test_the_page_is_whole_and_harmless(story: list[Measurement]) -> None:
    evil = "a.py::<script>alert(1)</script>"
    hostile = [replace(one, target=evil) for one in story[:3]]
    page = history_page.page(series_rows([*story, *hostile]), last_alarms(story), ["<b>note</b>"])
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>\n"))
    assert {"script", "b", "link", "iframe"}.isdisjoint(element.tag for element in root.iter())
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert len(root.findall(".//section")) == 3 and len(root.findall(".//svg")) == 3
    told = "".join(root.itertext())
    assert evil in told and "<b>note</b>" in told and "toolchain" in told and "2026-09-26 " in told
    norm = next(picture for picture in root.iter("svg") if (picture.findtext("title") or "").startswith(NORM + " [w0]"))
    assert len(norm.findall(".//circle")) == 29 + 1, "a mark for each calm run, and the legend's"


def test_an_empty_history_is_a_page_too() -> None:
    page = history_page.page((), (), ())
    assert "Nothing was measured yet." in page


# -- the export -------------------------------------------------------------------------------------------------------


def test_the_export_has_the_fields_that_the_action_documents(story: list[Measurement]) -> None:
    """Its README: an array; ``name``, ``unit`` and ``value`` required, ``range`` and ``extra`` optional text. Its
    schema: nothing else, ``value`` a number."""
    entries = json.loads(github_benchmark.render(story))
    assert isinstance(entries, list) and entries
    for entry in entries:
        assert set(entry) <= {"name", "unit", "value", "range", "extra"} and {"name", "unit", "value"} <= set(entry)
        assert isinstance(entry["value"], float) and entry["value"] > 0
        assert all(isinstance(entry[key], str) and entry[key] for key in ("name", "unit", "range", "extra"))
        assert "\n" not in entry["name"] and entry["unit"] == "ns"
    assert len({entry["name"] for entry in entries}) == len(entries) == 4


def test_names_stay_the_same_and_are_unique(story: list[Measurement]) -> None:
    today = github_benchmark.entries(story)
    before = github_benchmark.entries([one for one in story if one.run.time < "2026-09-10"])
    assert [entry["name"] for entry in today] == [entry["name"] for entry in before]
    last = next(one for one in story if one.run.time >= "2026-09-30")
    twins = [
        replace(last, language="triton"),
        replace(last, workload="w1"),
        replace(last, what="backward"),
        replace(last, run=replace(last.run, machine=replace(NEWER, cores=8), id="another")),
    ]
    names = [entry["name"] for entry in github_benchmark.entries([last, *twins])]
    assert len(set(names)) == len(names) == 3 * 5


def test_only_the_newest_commit_is_exported(story: list[Measurement]) -> None:
    newest = last_runs(story)
    assert {one.run.time for one in newest} == {"2026-09-30T06:00:00Z"}
    nowhere = [replace(one, run=replace(one.run, commit="")) for one in story]
    assert {one.run.id for one in last_runs(nowhere)} == {"run000000029"}
    assert last_runs([replace(one, disturbed="yes") for one in story]) == ()


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def kept(story: list[Measurement], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDAFORGE_HISTORY", raising=False)
    path = tmp_path / ".cudaforge" / "history.jsonl"
    history.append(path, story)
    (tmp_path / "pyproject.toml").write_text("")
    return path


def test_the_command_finds_the_history_where_runs_leave_it(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["history"]) == 0
    shown = capsys.readouterr().out
    assert "layers.py::RMSNorm" in shown and "plain.py::Plain" in shown and "In the newest run:" in shown
    assert cli.main(["history", "--target", "Plain"]) == 0
    assert "RMSNorm" not in capsys.readouterr().out


def test_the_environment_says_where_it_lies(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = kept.rename(kept.parent / "elsewhere.jsonl")
    assert cli.main(["history"]) == 0
    assert "no measurements in" in capsys.readouterr().err
    monkeypatch.setenv("CUDAFORGE_HISTORY", str(moved))
    assert cli.main(["history", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["version"], len(document["series"])) == ("cudaforge-history-report", 1, 2)
    assert document["alarms"][0]["kind"] == "toolchain" and len(document["series"][0]["runs"]) == 30
    assert set(document["series"][0]["parties"]["eager"]) == {"median_ns", "last_ns", "change"}


def test_files_are_written_on_request(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "history",
        str(kept),
        "--html",
        "out/page.html",
        "--export",
        "github-action-benchmark",
        "out/bench.json",
    ]
    assert cli.main(arguments) == 0
    assert Path("out/page.html").read_text().startswith("<!doctype html>")
    assert len(json.loads(Path("out/bench.json").read_text())) == 4
    assert capsys.readouterr().out


def test_histories_are_merged_on_request(
    kept: Path, story: list[Measurement], capsys: pytest.CaptureFixture[str]
) -> None:
    branch = kept.parent / "branch.jsonl"
    history.append(branch, [*story[:5], measurement(40, CALM)])
    assert cli.main(["history", "--merge", str(branch)]) == 0
    assert "1 line came into" in capsys.readouterr().err
    assert len(history.read(kept).measurements) == len(story) + 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["gone.jsonl"], "there is no history"),
        (["--export", "junit", "x"], "no format 'junit'"),
        (["--merge", "gone.jsonl"], "there is no history"),
        (["--target", "nobody", "--export", "github-action-benchmark", "x"], "no measurement to write"),
        (["--html", "pyproject.toml/page.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_an_error(
    kept: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["history", *arguments]) == 2
    assert said in capsys.readouterr().err
