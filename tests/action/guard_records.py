"""What runs of the guard found, made up: good and bad news, in numbers, and from somebody who means harm."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from cudaforge_action import guard_result
from cudaforge_action.guard_result import GuardResult
from cudaforge_action.records import GuardRun

from pytest_cudaforge.guard import Finding
from pytest_cudaforge.guarded import Change, GuardRecord, GuardReport
from pytest_cudaforge.records import Ratio, Usage
from pytest_cudaforge.report import json as json_report
from pytest_cudaforge.report.rows import totals

HOSTILE = (
    "::error file=a::x\n## h\n/merge\n  /approve\n<script>alert(1)</script><!-- cudaforge-guard:0 --> @everyone fixes"
    " #1 GH-2 acme/repo#3 !4 | a | b |\u202e\r\n```\n````\n</details>\n[x](https://evil.example)"
    " ![y](https://evil.example/y.png)##[error]y\x1b[31m%0A::set-output name=a::b"
)
LAYERS = """\
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [])
class {name}(nn.Module):
    pass
"""


def finding(slowdown: float, outcome: str = "regression", question: str = "base") -> Finding:
    return Finding(
        question=question,  # type: ignore[arg-type]
        workload="default",
        what="forward",
        outcome=outcome,  # type: ignore[arg-type]
        slowdown=Ratio(slowdown, slowdown - 0.02, slowdown + 0.02),
        lost_ns=1e5 * (slowdown - 1.0),
        text=f"{slowdown - 1.0:.1%} slower than at the base",
        candidate_ns=1e5 * slowdown,
        against_ns=1e5,
        processes=4,
    )


def record(name: str, outcome: str = "pass", **rest: object) -> GuardRecord:
    made = GuardRecord(
        f"forged/{name.lower()}-3f9a1c/cpu/plan.py::guard[default]",
        f"layers.py::{name}",
        "default",
        "pass",
        reason=f"{outcome}: so it is",
        text=f"{outcome}: so it is\n  to do: mend it",
        language="cpp",
        command=f"pytest --forge-guard -k {name}",
        seconds=2.0,
    )
    return replace(made, outcome=outcome, **rest)  # type: ignore[arg-type]


SAME = record("Same", since="1f2e3d4c5", findings=(finding(3.0, "pass", "eager"),))
FASTER = record("Faster", findings=(finding(0.8, "pass"),))
SLOW = record("Slow", "regression", findings=(finding(1.25),), text="how much: 25.0 % slower")
WRONG = record("Wrong", "failed", text="INCORRECT_NUMERICAL: row 3")
ODD = record("Odd", "inconclusive", since="1f2e3d4c5")
STALE = record("Stale", "skipped", cause="stale", changes=(Change("layers.py::Stale", "source", "a", "b", True),))
ABSENT = record("Absent", "skipped", cause="absent", reason="this kernel was made for sm_90; no GPU is here")
PLAIN = GuardReport(base='main at 1f2e3d4c5 (2026-11-20, "feat: a norm")', machine="H200", seconds=12.3)


def report(*records: GuardRecord, **rest: object) -> GuardReport:
    return replace(PLAIN, records=records, **rest)  # type: ignore[arg-type]


def result(*records: GuardRecord, status: int = 0, **rest: object) -> GuardResult:
    """As a guard job would have judged it."""
    told = report(*records, **rest)
    run = GuardRun(
        guard_result.judge(told, status),
        guard_result.exit_status(told, status),
        status,
        seconds=(("measuring", 10.0), ("preparing", 1.5)),
        unchecked=tuple(guard_result.unchecked(told)),
    )
    return GuardResult(run, told)


def write(folder: Path, made: GuardResult) -> Path:
    """The files of a guard job."""
    folder.mkdir(parents=True, exist_ok=True)
    guard_result.write_run(folder, made.run)
    if made.report is not None:
        figures = totals((), Usage(), made.report.seconds)
        (folder / guard_result.JSON).write_text(json.dumps(json_report.document((), figures, guard=made.report)))
    return folder


def hostile(count: int = 500) -> GuardResult:
    """So many answers, each the worst that text can be."""
    bad = [
        replace(
            WRONG,
            id=f"{number}{HOSTILE}.py::guard[{HOSTILE}]",
            target=f"{HOSTILE}{number}",
            workload=HOSTILE,
            reason=HOSTILE,
            text=HOSTILE * 20,
            outcome=("failed", "regression", "inconclusive", "skipped")[number % 4],
            notes=(HOSTILE,),
            changes=(Change(f"{HOSTILE}{number}", HOSTILE, HOSTILE, HOSTILE),),
        )
        for number in range(count)
    ]
    lists = tuple(f"{number}{HOSTILE}" for number in range(count))
    return result(
        *bad, status=1, base=HOSTILE, machine=HOSTILE, runner=HOSTILE, removed=lists, alarms=lists, notes=lists
    )
