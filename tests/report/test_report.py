"""One model of rows; markdown that a model's text cannot break; a versioned document."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from flow_records import make_round
from markdown_it import MarkdownIt
from report_records import hostile_trace, rich_trace

from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.records import Evaluation, Feedback, Guard, Status, Trace, Usage, Verification
from pytest_cudaforge.report import json as report_json
from pytest_cudaforge.report import markdown
from pytest_cudaforge.report.rows import geometric_mean, row, totals

HOSTILE = "`|`<script>alert(1)</script> **x** [a](http://b) @octocat #12 | new cell\n# heading\n![i](http://evil/i.png)"


def forged(speedup: float = 2.0, compiled: float | None = 1.5) -> Trace:
    rounds = (make_round(1, status=Status.BUILD_ERROR), make_round(2, "correction", 1, speedup=speedup))
    rounds = (rounds[0], replace(rounds[1], feedback=Feedback("correction", HOSTILE, "why", "fix")))
    final = rounds[1].evaluation
    assert final is not None
    assert final.timing is not None
    final = replace(final, timing=replace(final.timing, speedup_compile=compiled))
    return Trace(
        "layers.py::Scale", "cpp", "forged", "2.00x", rounds, 2, final, Usage(10, 20, 0, 0.5), 12.0, ("f/k.cpp",)
    )


KEPT = Trace("a.py::K", "cpp", "kept_reference", "nothing was faster", (make_round(1, speedup=0.7),))
FAILED = Trace("a.py::F", "cpp", "failed", "no correct candidate", (make_round(1, status=Status.TIMEOUT),))
SKIPPED = Trace("a.py::S", "cpp", "skipped", "no headroom")


def test_the_report_holds_what_a_reviewer_asks_for() -> None:
    text = markdown.report(forged())
    for part in ("Grade **B**", "2.00× (1.96–2.04)", "worst error ratio 0.9", "BUILD_ERROR", "kernel.cpp:1: error: no"):
        assert part in text
    assert "What the Judge said" in text
    assert "$0.5000" in text


def test_hostile_text_renders_as_text() -> None:
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(markdown.report(forged()))
    assert "<script" not in rendered
    assert "<img" not in rendered
    assert "<a " not in rendered
    assert rendered.count("<h1>") == 1
    assert not re.search(r"@\w", rendered)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in rendered


@pytest.mark.parametrize(
    "text",
    [
        "# h",
        "- item",
        "1. item",
        "12) item",
        "> quote",
        "==",
        "--",
        "+ x",
        "*a* _b_ __c__ ~~d~~",
        "&lt;b>",
        "$x$",
        "a\\",
    ],
)
def test_every_line_renders_as_itself(text: str) -> None:
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(markdown.escape(text))
    plain = html.unescape(rendered.removeprefix("<p>").removesuffix("</p>\n"))
    assert plain == text


def test_text_cannot_hide_or_turn_around() -> None:
    assert markdown.escape("a\x1b[31m\u202eb") == "a\\[31mb"
    assert "\u202e" not in markdown.fence("x\u202ey")


def test_a_profile_is_told_and_cannot_break_out() -> None:
    text = markdown.report(rich_trace(), picture="report.svg")
    for part in (
        "## Profile",
        "hardware counters of the GPU",
        "**memory bandwidth**",
        "| void gemm<float>".replace("<", "&lt;"),
        "## Speed of light",
        "| default | round 3 | 0.50 µs | 0.20 µs | 40 % |",
        "![Speedup by round, roofline, time by kernel](report.svg)",
        "| metric | round 2 | round 3 |",
        "| kernel.cpp:7 | 61% |",
        "estimated gain 31 %",
        "- Brought: 2.00× vs eager, round 2 had 0.80×: 2.50 times as fast (expected: 1.50)",
        "- Evidence: ncu, scale: memory bandwidth (dram",
    ):
        assert part in text, part
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(markdown.report(hostile_trace()))
    assert not re.search(r"<(script|img|a)[ >]", rendered)
    assert rendered.count("<h1>") == 1 and not re.search("[\x1b\u202e\u200f]", rendered)
    for table in re.findall(r"<table>.*?</table>", rendered, re.DOTALL):
        assert len({len(re.findall("<t[hd]", line)) for line in table.split("<tr>")[1:]}) == 1, "a cell broke its row"


@pytest.mark.parametrize("text", ["a", "```\nb\n```", "````"])
def test_a_fence_is_longer_than_what_it_holds(text: str) -> None:
    tokens = MarkdownIt().parse(markdown.fence(text))
    assert [(token.type, token.content.rstrip("\n")) for token in tokens] == [("fence", text)]


def test_the_guard_is_explained() -> None:
    trace = forged()
    assert trace.final is not None
    assert trace.final.verification is not None
    guard = Guard(contiguous_only=True, align_bytes=16, reasons=("failed on strided input",))
    found: Verification = replace(trace.final.verification, guard=guard)
    final: Evaluation = replace(trace.final, verification=found)
    text = markdown.report(replace(trace, final=final))
    assert "Used for contiguous tensors only, aligned to 16 bytes" in text


def test_totals_are_over_the_targets_tried() -> None:
    total = totals([forged(), KEPT, FAILED, SKIPPED], Usage(10, 20, 0, 0.5), 60.0)
    assert (total.targets, total.tried, total.forged) == (4, 3, 1)
    assert total.correct == pytest.approx(2 / 3)
    assert total.fast_1_eager == pytest.approx(1 / 3)
    assert total.fast_1_compile == pytest.approx(1 / 3)
    assert total.median_eager == pytest.approx(1.5), "a kept reference counts as 1.0"
    assert total.geomean_eager == pytest.approx(2**0.5)
    assert total.geomean_compile == pytest.approx(1.5)


def test_totals_of_nothing_are_nothing() -> None:
    total = totals([], Usage(), 0.0)
    assert total.correct is None
    assert total.geomean_eager is None
    assert geometric_mean([0.0]) is None
    assert "0 forged of 0 tried" in markdown.summary([], total)


def test_the_summary_has_a_line_for_each_target() -> None:
    traces = [forged(), KEPT, FAILED, SKIPPED]
    text = markdown.summary(traces, totals(traces, Usage(10, 20, 0, None), 60.0))
    assert text.count("\n| ") == 1 + len(traces), "the rule under the header, then the targets"
    assert "kept reference" in text
    assert "price unknown" in text


def test_a_replayed_round_shows_both_verdicts() -> None:
    trace = forged()
    played = replace(trace.rounds[0], recorded_status="PASSED 1.31x")
    text = markdown.report(replace(trace, rounds=(played, trace.rounds[1])))
    assert "| recorded |" in text
    assert "PASSED 1.31x" in text


def test_the_document_is_versioned_and_strict_json(tmp_path: Path) -> None:
    traces = [forged(), KEPT]
    data = report_json.document(traces, totals(traces, Usage(), 1.0), environment={"device": "cpu"})
    report_json.write(tmp_path / "out" / "forge.json", data)
    loaded = json.loads((tmp_path / "out" / "forge.json").read_text())
    assert (loaded["format"], loaded["version"]) == ("cudaforge-report", 1)
    assert loaded["targets"][0]["final"]["status"] == "PASSED"
    assert len(loaded["targets"][0]["rounds"][0]["candidate"]) == 64


def test_a_document_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--forge-json"):
        report_json.write(tmp_path / "file" / "forge.json", {})


def test_a_target_without_rounds_has_a_row() -> None:
    assert row(SKIPPED).speedup_eager is None
    assert row(SKIPPED).isolation == ""


def test_what_only_the_compiler_won_is_not_called_a_kernel() -> None:
    trace = rich_trace()
    assert trace.final is not None
    assert "**Forged: the winner is correct and faster.**" in markdown.report(trace)
    won = replace(trace, final=replace(trace.final, work="compiler"))
    assert "**A compiler configuration, not a kernel, is correct and faster.**" in markdown.report(won)
