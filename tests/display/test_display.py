"""What is shown while forging and afterwards."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from report_records import rich_trace
from rich.console import Console

from pytest_cudaforge.display import (
    PlainLines,
    columns,
    evaluation_text,
    event_line,
    properties_of,
    round_table,
    sol_text,
    summary_lines,
    trace_text,
    usage_text,
)
from pytest_cudaforge.events import EventKind, ForgeEvent
from pytest_cudaforge.live import LiveTable
from pytest_cudaforge.records import (
    Build,
    CaseResult,
    Evaluation,
    Isolation,
    Mismatch,
    Ratio,
    Round,
    Sample,
    Status,
    Timing,
    Trace,
    Usage,
    Verification,
    WorkloadTiming,
)
from pytest_cudaforge.report.rows import totals

SAMPLE = Sample(100.0, 90.0, 110.0, 20, 5)


def timed(eager: float, compiled: float | None) -> Timing:
    ratio = Ratio(eager, eager, eager)
    workload = WorkloadTiming("default", SAMPLE, SAMPLE, None, ratio, None, 1)
    return Timing("faster", "supervisor", eager, compiled, (workload,), note="calm")


def verdict(status: Status = Status.PASSED, reason: str = "", timing: Timing | None = None) -> Evaluation:
    cases = (
        CaseResult("default", "drawn", True, status is Status.PASSED, 1.0, 2.0, (Mismatch("out", "values", "off"),)),
        CaseResult("default", "strided", False, False, None, None),
    )
    build = Build("cpu", 0.1, False, "kernel.cpp:3: error: no")
    isolation = Isolation("B", ("native code",))
    return Evaluation(
        status,
        reason,
        "c",
        "a.py::A",
        isolation,
        build=build,
        verification=Verification(cases, "fp64", 1.0),
        timing=timing,
    )


FAILED_ROUND = Round(1, "first", None, None, verdict(Status.BUILD_ERROR, "g++ refused\nthe source"))
GOOD_ROUND = Round(2, "correction", 1, None, verdict(timing=timed(1.5, 1.25)))
LOST_ROUND = Round(3, "optimization", 2, None, None, failure="no code in the reply")
REPEATED = Round(4, "optimization", 2, None, None, duplicate_of=2)
FORGED = Trace(
    "a.py::A",
    "cpp",
    "forged",
    "round 2 won",
    (FAILED_ROUND, GOOD_ROUND, LOST_ROUND, REPEATED),
    2,
    GOOD_ROUND.evaluation,
    Usage(1000, 500, usd=0.021),
    12.0,
    ("forged/a-123456/cpu/kernel.cpp",),
)
LOST = Trace("a.py::B", "cpp", "failed", "no correct candidate", (FAILED_ROUND,), usage=Usage(10, 5))
PENDING = Trace("a.py::C", "cpp", "pending", "no reply yet")


# -- text ----------------------------------------------------------------------------------------------------------


def test_columns_align_and_do_not_trail() -> None:
    assert columns(("a", "bb"), [("ccc", "d")]) == ["a    bb", "ccc  d"]


def test_round_table_marks_the_winner() -> None:
    lines = round_table(FORGED.rounds, 2)
    assert lines[0].split() == ["round", "kind", "status", "vs", "eager", "vs", "compile", "roofline", "remark"]
    assert lines[1].startswith("1 ") and "BUILD_ERROR" in lines[1] and "g++ refused the source" in lines[1]
    assert lines[2].startswith("2*") and "1.50x" in lines[2] and "1.25x" in lines[2]
    assert "no code in the reply" in lines[3] and "same as round 2" in lines[4]
    assert round_table(()) == []


def test_trace_text_of_a_failure_shows_the_last_verdict() -> None:
    text = trace_text([LOST], failed=True)
    assert "a.py::B (cpp): failed: no correct candidate" in text
    assert "build log:" in text and "kernel.cpp:3: error: no" in text


def test_trace_text_of_a_winner_lists_files() -> None:
    text = trace_text([FORGED])
    assert "forged/a-123456/cpu/kernel.cpp" in text and "build log" not in text


def test_evaluation_text() -> None:
    text = evaluation_text(verdict(Status.INCORRECT_NUMERICAL, "wrong values"))
    assert text.startswith("INCORRECT_NUMERICAL: wrong values\nisolation B (native code)")
    assert "workload default: 0 of 1 cases right" in text and "drawn: out: off" in text
    timed_text = evaluation_text(verdict(timing=timed(2.0, None)))
    assert "faster: 2.00x vs eager, - vs compile (calm)" in timed_text and "build log" not in timed_text


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (Usage(), "-"),
        (Usage(10, 5, usd=0.0), "$0.00"),
        (Usage(10, 5), "15 tokens"),
        (Usage(10, 5, usd=0.0021), "$0.0021"),
        (Usage(10, 5, usd=1.2), "$1.20"),
    ],
)
def test_usage_text(usage: Usage, expected: str) -> None:
    assert usage_text(usage) == expected


def test_properties() -> None:
    found = dict(properties_of([FORGED]))
    assert found == {
        "status": "forged",
        "rounds": "4",
        "speedup_eager": "1.5",
        "speedup_compile": "1.25",
        "usd": "0.021",
        "isolation": "B",
        "files": "forged/a-123456/cpu/kernel.cpp",
    }
    assert properties_of([]) == []
    assert dict(properties_of([LOST, FORGED]))["status"] == "forged"
    assert "usd" not in dict(properties_of([LOST]))


def test_summary_of_one_target_has_no_totals() -> None:
    lines = summary_lines([FORGED], totals([FORGED], FORGED.usage, 12.0))
    assert "a.py::A" in lines[1] and "1.50x" in lines[1] and "$0.02" in lines[1]
    assert "  forged/a-123456/cpu/" in lines
    assert not any("geomean" in line for line in lines)


def test_summary_of_several_targets_has_totals() -> None:
    traces = [FORGED, LOST, PENDING]
    text = "\n".join(summary_lines(traces, totals(traces, Usage(1010, 505, usd=0.021), 75.0)))
    assert "1 of 3 targets forged, 2 tried; a correct candidate for 50%" in text
    assert "fast_1" in text and "median" in text and "geomean" in text and "50%" in text and "1.50x" in text
    assert text.endswith("cost $0.02, 75 s")


# -- plain lines ---------------------------------------------------------------------------------------------------

KINDS: tuple[EventKind, ...] = ("asked", "round", "finished", "done", "stopping", "note")


@pytest.mark.parametrize(
    ("verbosity", "shown"),
    [(-1, ["done", "stopping"]), (0, ["finished", "done", "stopping", "note"]), (1, list(KINDS))],
)
def test_plain_lines_by_verbosity(verbosity: int, shown: list[str]) -> None:
    lines: list[str] = []
    observer = PlainLines(lines.append, verbosity)
    for kind in KINDS:
        observer.on_event(ForgeEvent("a.py::A", kind))
    assert [line.split()[-1].replace("begins", "round") for line in lines] == shown


def test_event_lines() -> None:
    event = ForgeEvent("a.py::A", "finished", "cpp", 3, "PASSED", 1.43, 1.5, 0.02)
    assert event_line(event) == "a.py::A [cpp] round 3 finished: PASSED 1.43x (best 1.50x, $0.02)"
    assert event_line(ForgeEvent("", "stopping", text="Ctrl-C")) == "cudaforge stopping: Ctrl-C"


# -- the live table ------------------------------------------------------------------------------------------------


def console(height: int = 30, *, no_color: bool = False, terminal: bool = True) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=100, height=height, no_color=no_color, _environ={}
    )


def drawn(screen: Console, table: LiveTable) -> str:
    with screen.capture() as capture:
        screen.print(table.table())
    return capture.get()


def test_live_table_follows_the_events() -> None:
    screen = console()
    table = LiveTable(screen, ["a.py::A", "a.py::B"])
    assert "waiting" in drawn(screen, table) and "forging 0/2" in drawn(screen, table)
    table.on_event(ForgeEvent("a.py::A", "evaluating", "cpp", 2, usd=0.5))
    table.on_event(ForgeEvent("a.py::A", "finished", "cpp", 2, "PASSED", 1.4, 1.4, 0.5))
    table.on_event(ForgeEvent("a.py::B", "done", "cpp", 1, "forged", 2.0, 2.0, 0.25))
    text = drawn(screen, table)
    assert "forging 1/2" in text and "$0.75" in text and "PASSED" in text and "1.40x" in text and "[cpp]" in text
    assert "waiting" not in text
    assert text.index("a.py::A") < text.index("a.py::B"), "what is being worked on comes first"


def test_live_table_fits_the_terminal() -> None:
    screen = console(height=12)
    table = LiveTable(screen, [f"a.py::T{number}" for number in range(40)])
    text = drawn(screen, table)
    assert "... and 35 more" in text and len(text.splitlines()) <= 12


def test_live_table_without_colour() -> None:
    screen = console(no_color=True)
    table = LiveTable(screen, ["a.py::A"])
    table.on_event(ForgeEvent("a.py::A", "done", "cpp", 1, "failed"))
    assert "\x1b[31m" not in drawn(screen, table)
    coloured = console()
    other = LiveTable(coloured, ["a.py::A"])
    other.on_event(ForgeEvent("a.py::A", "done", "cpp", 1, "failed"))
    assert "\x1b[31m" in drawn(coloured, other)


def test_live_table_runs_and_keeps_notes() -> None:
    screen = console()
    with LiveTable(screen, ["a.py::A"]) as table:
        table.on_event(ForgeEvent("a.py::A", "note", "cpp", text="resumed [not markup]"))
    output = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "resumed [not markup]" in output and "\x1b[?25h" in output, "the cursor is shown again"


def test_names_with_brackets_are_no_markup() -> None:
    screen = console()
    table = LiveTable(screen, ["a.py::[red]A"])
    assert "[red]A" in drawn(screen, table)


def test_display_itself_needs_no_rich() -> None:
    import subprocess
    import sys

    code = "import sys, pytest_cudaforge.display; print('rich' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path("/"))
    assert done.stdout.split() == ["False", "False"]


def test_how_near_the_roofline_is_shown_where_it_is_known() -> None:
    timing = timed(2.0, None)
    timing = replace(timing, workloads=(replace(timing.workloads[0], roofline_ns=87.0),))
    won = Round(1, "first", None, None, verdict(timing=timing))
    trace = Trace("a.py::A", "cpp", "forged", "", (won,), 1, won.evaluation)
    assert "87%" in round_table([won], 1)[1] and "87%" in summary_lines([trace], totals([trace], Usage(), 1.0))[1]
    assert "%" not in round_table([GOOD_ROUND])[1]


def test_the_bound_of_a_profiled_winner_is_told() -> None:
    text = trace_text([rich_trace()])
    assert "profile of round 3, ncu, scale: memory bandwidth (dram__throughput" in text and "80 %" in text
    assert "profile of" not in trace_text([FORGED])


def test_no_terminal_acts_on_what_a_model_or_a_candidate_wrote() -> None:
    attack = "\x1b[31mred\x1b]0;title\x07 \u202eback \u200b\x9b2J"
    broken = replace(verdict(Status.BUILD_ERROR, attack), build=Build("cpu", 0.1, False, attack))
    lost = Round(1, "first", None, None, broken, failure=attack, notes=(attack,))
    trace = Trace("a.py::A", "cpp", "failed", attack, (lost,), notes=(attack,), files=(attack,))
    event = ForgeEvent("a.py::A", "note", "cpp", text=attack)
    shown = [trace_text([trace], failed=True), evaluation_text(broken), event_line(event)]
    shown += summary_lines([trace], totals([trace], Usage(), 1.0))
    assert "red" in shown[0] and not [text for text in shown if set(text) & set("\x1b\x07\x9b\u202e\u200b")]


def test_what_runs_faster_than_its_bound_has_none():
    assert [sol_text(value) for value in (None, 86.6, 104.0, 226.0)] == ["-", "87%", "104%", ">100%"]
