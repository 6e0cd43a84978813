"""The guard's run as text, Markdown and JSON: worst first, nothing hostile gets through."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import fastjsonschema

from pytest_cudaforge.guard import Finding
from pytest_cudaforge.guarded import Change, GuardRecord, GuardReport
from pytest_cudaforge.records import Ratio, Usage, from_json, to_json
from pytest_cudaforge.report import json as json_report
from pytest_cudaforge.report import schema
from pytest_cudaforge.report.guarded import markdown, properties_of, record_text, summary_lines
from pytest_cudaforge.report.html_guarded import page
from pytest_cudaforge.report.rows import totals

SLOWER = Finding(
    question="base",
    workload="default",
    what="forward",
    outcome="regression",
    slowdown=Ratio(1.25, 1.22, 1.28),
    lost_ns=25_000.0,
    confirmed=True,
    text="25.0 % slower (99 % interval 22.0 % to 28.0 %) than at the base: 100 us -> 125 us a call",
    candidate_ns=125_000.0,
    against_ns=100_000.0,
    processes=4,
)
FASTER = replace(SLOWER, question="eager", outcome="pass", slowdown=Ratio(3.0, 2.9, 3.1), lost_ns=-1.0, promised=2.5)


def record(name: str, outcome: str, **rest: object) -> GuardRecord:
    place = f"forged/{name}-3f9a1c/cpu/plan.py"
    made = GuardRecord(
        f"{place}::guard[default]", f"layers.py::{name}", "default", "pass", command="pytest --forge-guard"
    )
    return replace(made, outcome=outcome, **rest)  # type: ignore[arg-type]


GOOD = record("good", "pass", findings=(FASTER,), since="1f2e3d4c5", reason="3.00x eager")
SLOW = record("slow", "regression", findings=(SLOWER, FASTER), reason=SLOWER.text, text="how much: 25.0 % slower")
WRONG = record(
    "wrong",
    "failed",
    reason="INCORRECT_NUMERICAL | `<b>`",
    text="INCORRECT_NUMERICAL\x1b[31m\n```\n<script>@somebody</script>",
    changes=(Change("layers.py::wrong", "atol", "1e-06", "0.5"),),
)
ODD = record("odd", "inconclusive", reason="nothing was decided: other processes kept the cores busy")
CASE = replace(GOOD, id=GOOD.id.replace("guard[", "case["), raced=False, reason="correct", findings=())
REPORT = GuardReport(
    (GOOD, CASE, ODD, SLOW, WRONG),
    base='main at 1f2e3d4c5 (2026-11-20, "feat: a norm")',
    base_sha="1f2e3d4c5" + "0" * 31,
    machine="NVIDIA H200",
    runner="fit; false alarms 0 of 60",
    changes=(Change("cudaforge.yaml", "guard.relative", "0.03", "5"),),
    removed=("layers.py::Gone (cpp, cpu)",),
    alarms=("toolchain: slower than its reference since torch 2.14", "  to do: re-forge"),
    seconds=12.3,
)


def test_the_table_is_sorted_worst_first_and_says_the_rest() -> None:
    lines = summary_lines(REPORT)
    table = [line for line in lines if line.startswith("forged/")]
    assert [line.split("-")[0] for line in table] == ["forged/wrong", "forged/slow", "forged/odd", "forged/good"]
    assert "+25.0%" in table[1] and "3.00x" in table[1] and "125 us" in table[1]
    assert "unchanged since 1f2e3d4c5" in table[3]
    text = "\n".join(lines)
    for wanted in (
        "runner: fit; false alarms 0 of 60",
        "cudaforge.yaml: guard.relative 5, at the merge base 0.03: not obeyed",
        "layers.py::wrong: atol 0.5, at the merge base 1e-06: not obeyed",
        "removed: layers.py::Gone",
        "to do: re-forge",
        "1 failed, 1 regression, 1 inconclusive, 1 pass in 12 s",
    ):
        assert wanted in text
    assert "\x1b" not in text


def test_a_failure_says_how_to_see_it_again_and_what_was_changed() -> None:
    text = record_text(WRONG, REPORT)
    assert "reproduce: pytest --forge-guard" in text and "changed: layers.py::wrong: atol 0.5" in text
    assert "alarm: toolchain" in record_text(SLOW, REPORT) and "alarm" not in record_text(WRONG, REPORT)


def test_junit_gets_figures_by_question() -> None:
    found = dict(properties_of(SLOW, REPORT))
    assert (found["guard"], found["slowdown_base"], found["speedup_eager"]) == ("regression", "1.25", "3")
    assert found["lost_ns"] == "2.5e+04" and found["machine"] == "NVIDIA H200"
    assert dict(properties_of(GOOD, REPORT))["unchanged_since"] == "1f2e3d4c5"


def test_markdown_takes_nothing_as_markup() -> None:
    text = markdown(REPORT)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(line.replace(r"\|", "").count("|") == 9 for line in rows), rows
    assert "````" in text, "what holds a fence is fenced with more"
    outside = text.split("````")[0] + text.split("````")[2]
    assert "<script>" not in outside and "@somebody" not in outside and "<b>" not in outside
    assert "**Removed kernels**" in text and "**Changed by this branch**" in text
    assert "Nothing was guarded" in markdown(GuardReport(base="main"))
    assert "could not run" in markdown(GuardReport(error="no device"))
    assert summary_lines(GuardReport(error="no device")) == ["no device"]


HOSTILE = (
    "::error::x\n## h\n\n/merge\n<script>alert(1)</script> @everyone fixes #1 GH-2 acme/repo#3 !4 | a | b |\u202e\r\n"
    "```\n</details>\n[x](https://evil.example) ![y](https://evil.example/y.png)"
)


def hostile(limit_bytes: int) -> str:
    """500 answers, all bad news of the worst kind."""
    records = [
        replace(WRONG, id=f"{number}{HOSTILE * 9}", reason=HOSTILE * 99, text=HOSTILE * 99) for number in range(500)
    ]
    lists = [HOSTILE * 99] * 500
    changes = tuple(Change(f"{place}{text}", HOSTILE, text, text) for place, text in enumerate(lists))
    report = replace(
        REPORT, records=tuple(records), changes=changes, removed=tuple(lists), alarms=tuple(lists), notes=tuple(lists)
    )
    return markdown(replace(report, base=HOSTILE * 999, machine=HOSTILE * 999), limit_bytes=limit_bytes)


def test_what_is_too_long_is_cut_and_counted_worst_first() -> None:
    text = hostile(60_000)
    assert 30_000 < len(text.encode()) <= 60_000
    assert "more, none of them worse" in text and "more that fail" in text and text.count("- … and ") == 4
    many = tuple(replace(GOOD, id=f"{number}::guard[default]") for number in range(500))
    told = markdown(replace(REPORT, records=(*many, SLOW, WRONG)), limit_bytes=16_384)
    assert len(told.encode()) <= 16_384 and told.index("wrong-3f9a1c") < told.index("slow-3f9a1c") < told.index("0::")
    assert "how much: 25.0 % slower" in told and "**Removed kernels**" in told
    assert told.count("<details>") == told.count("</details>") == 2


def test_what_others_wrote_stays_text_in_every_place() -> None:
    text = hostile(60_000)
    prose = re.sub(r"(?ms)^(`{4,})\n.*?^\1$", "", text)
    assert "@everyone" not in prose and "<script>" not in prose and "\u202e" not in text
    assert not re.search(r"(?<!\\)\]\(", prose)
    for word in ("#1", "GH-2", "#3", "!4", "https:/"):
        assert word not in prose
    assert not re.search(r"(?m)^(## h|/merge|::)", prose)


def test_inconclusive_fails_where_that_is_asked_for() -> None:
    assert "inconclusive" not in REPORT.failing and "unfit" not in replace(REPORT, strict=True).failing
    assert "inconclusive" in replace(REPORT, strict=True).failing


def test_it_goes_to_json_and_back() -> None:
    assert from_json(GuardReport, to_json(REPORT)) == REPORT
    data = json_report.document((), totals((), Usage(), 12.3), guard=REPORT)
    fastjsonschema.validate(schema.schema(), data)
    assert from_json(GuardReport, json.loads(json.dumps(data))["guard"]) == REPORT


def test_the_page_escapes_everything_and_opens_what_failed() -> None:
    text = page(REPORT)
    assert "<script>" not in text and "&lt;script&gt;" in text and "\x1b" not in text
    assert text.count("<details open>") == 2 and text.count("<details>") == 2
    assert "not obeyed" in text and "Removed kernels" in text
    assert "no device" in page(GuardReport(error="no device"))
