"""A run of the guard as one page that needs nothing else: no network, no script. All text is escaped on its way in."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from pytest_cudaforge.guarded import GuardRecord, GuardReport, Verdict
from pytest_cudaforge.report.escaping import plain
from pytest_cudaforge.report.frame import framed
from pytest_cudaforge.report.guarded import HEADER, changes_of, counted, record_text, row_of, shown
from pytest_cudaforge.report.html_words import badge, bullets, definitions, folded, table
from pytest_cudaforge.report.markup import Markup, Part, tag

__all__ = ["page"]

_SHADES: Mapping[Verdict, str] = {"pass": "good", "regression": "bad", "failed": "bad"}


def page(report: GuardReport, *, made: datetime.datetime | None = None) -> str:
    """``made``: when the run ended, now without it."""
    when = (made or datetime.datetime.now().astimezone()).strftime("%Y-%m-%d %H:%M %Z")
    told = report.error or (counted(report) if report.records else "Nothing was guarded.")
    return framed(
        "Guarded kernels",
        f"{plain(told)} {when}",
        tag("main", _circumstances(report), _overview(report), _answers(report), _lists(report)),
        "Written by pytest-cudaforge. Against the merge base: time now / time there; else speedups.",
    )


def _circumstances(report: GuardReport) -> Markup | None:
    return definitions([("against", report.base), ("machine", report.machine), ("runner", report.runner)])


def _overview(report: GuardReport) -> Markup | None:
    rows = [_cells(record) for record in shown(report)]
    name, outcome, *figures, call, remark = HEADER
    header = [f"~{name}", outcome, *(f">{figure}" for figure in figures), f">{call}", f"~{remark}"]
    return table(header, rows) if rows else None


def _cells(record: GuardRecord) -> tuple[Part, ...]:
    name, outcome, *rest = row_of(record)
    return (name, badge(outcome, _SHADES.get(record.outcome, "calm")), *rest)


def _answers(report: GuardReport) -> list[Markup]:
    """Each answer in full; those that fail a build are open."""
    return [
        folded(record.id, tag("pre", record_text(record, report)), shown=record.outcome in report.failing)
        for record in shown(report)
    ]


def _lists(report: GuardReport) -> list[Part]:
    named = (
        ("Changed by this branch", [change.text for change in changes_of(report)]),
        ("Removed kernels", report.removed),
        ("Alarms", report.alarms),
        ("Notes", report.notes),
    )
    return [part for title, lines in named if lines for part in (tag("h3", title), bullets(lines))]
