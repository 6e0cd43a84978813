"""The whole run as one page that needs nothing else: no network, no script. Everything a model wrote is escaped.

The page refuses scripts and requests by its own policy as well, so that a hole in the escaping would still do nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytest_cudaforge.records import Outcome, Trace
from pytest_cudaforge.report import amounts, files
from pytest_cudaforge.report.frame import framed
from pytest_cudaforge.report.html_target import target_section
from pytest_cudaforge.report.html_words import badge, definitions, table, tiles
from pytest_cudaforge.report.markup import Markup, joined, tag
from pytest_cudaforge.report.rows import Row, Totals, rows

__all__ = ["document", "write"]

_SHADES: Mapping[Outcome, str] = {"forged": "good", "failed": "bad", "error": "bad"}


def document(
    traces: Sequence[Trace],
    totals: Totals,
    *,
    environment: Mapping[str, str] | None = None,
    notes: Iterable[str] = (),
    made: datetime.datetime | None = None,
) -> str:
    """The page. ``made``: when the run ended, now without it."""
    when = (made or datetime.datetime.now().astimezone()).strftime("%Y-%m-%d %H:%M %Z")
    lines = rows(traces)
    return framed(
        "Forged kernels",
        f"{_told(totals)} {when}",
        tag(
            "main",
            _tiles(totals),
            [tag("p", note) for note in notes],
            _contents(lines),
            _overview(lines),
            [target_section(f"t{index}", trace, lines[index]) for index, trace in enumerate(traces)],
            _environment(environment or {}),
        ),
        "Written by pytest-cudaforge. Speedups: median over paired blocks of baseline ÷ kernel.",
    )


def write(path: Path, page: str) -> None:
    """Raises :class:`UsageError` where the path cannot be written."""
    files.write(path, page, "--forge-html")


def _told(total: Totals) -> str:
    if not total.targets:
        return "No target was forged."
    return f"{total.forged} of {total.targets} targets forged, {total.tried} tried."


def _tiles(total: Totals) -> Markup:
    shown = [
        (amounts.times(total.geomean_eager), "geometric mean vs eager"),
        (amounts.times(total.geomean_compile), "geometric mean vs torch.compile"),
        ("" if total.correct is None else f"{total.correct:.0%}", "of the tried have a correct candidate"),
        ("" if total.fast_1_eager is None else f"{total.fast_1_eager:.0%}", "faster than eager"),
        ("" if total.fast_1_compile is None else f"{total.fast_1_compile:.0%}", "faster than torch.compile"),
        (amounts.money(total.usage), "cost"),
        (f"{total.seconds:.0f} s" if total.seconds else "", "wall time"),
    ]
    return tiles(shown)


def _contents(lines: Sequence[Row]) -> Markup | None:
    if len(lines) < 2:
        return None
    entries = [tag("li", tag("a", _name(line), href=f"#t{index}")) for index, line in enumerate(lines)]
    return tag("nav", tag("h3", "Targets"), tag("ol", entries), aria_label="Targets")


def _overview(lines: Sequence[Row]) -> Markup:
    header = ["~target", "outcome", ">vs eager", ">vs compile", ">speed of light", ">rounds", ">cost", ">time"]
    cells = [
        (
            tag("a", _name(line), href=f"#t{index}"),
            _outcome(line),
            amounts.times(line.speedup_eager),
            amounts.times(line.speedup_compile),
            amounts.percent(line.sol_percent_now),
            line.rounds,
            amounts.money(line.usage),
            f"{line.seconds:.0f} s",
        )
        for index, line in enumerate(lines)
    ]
    return joined(tag("h3", "Overview"), table(header, cells) if cells else tag("p", "There is nothing to show."))


def _outcome(line: Row) -> Markup:
    won = line.outcome == "forged"
    words = "compiler configuration" if won and line.work == "compiler" else line.outcome.replace("_", " ")
    return badge(words, _SHADES.get(line.outcome, "calm"))


def _name(line: Row) -> str:
    return f"{line.target} ({line.language})"


def _environment(environment: Mapping[str, str]) -> Markup | None:
    told = definitions(environment.items())
    return tag("section", tag("h2", "Environment"), told) if told else None
