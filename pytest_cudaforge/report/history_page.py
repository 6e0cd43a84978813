"""A history as one page that needs nothing else: no network, no script. All text is escaped on its way in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_cudaforge.alarms import Alarm
from pytest_cudaforge.guard import duration
from pytest_cudaforge.report.escaping import one_line
from pytest_cudaforge.report.frame import framed
from pytest_cudaforge.report.history_rows import Event, PartyRow, SeriesRow
from pytest_cudaforge.report.html_words import badge, bullets, figure, table
from pytest_cudaforge.report.markup import Markup, joined, tag
from pytest_cudaforge.report.svg import Picture

__all__ = ["page", "timeline"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _BELOW = 84, 30, 760, 190, 44
#: The plot's height stands for this share of a time at least: noise is to look like noise.
_LEAST_RANGE = 0.10
_STEPS = 4
_COLOURS = {"candidate": "var(--one)", "eager": "var(--library)", "compile": "var(--two)"}
_HEADINGS = {"sick_runner": "sick runner?", "toolchain": "toolchain", "drift": "slow drift"}
_MARKS = {"toolchain": "T", "kernel": "K", "reference": "S", "regression": "R"}


def page(rows: Sequence[SeriesRow], found: Sequence[Alarm], notes: Sequence[str]) -> str:
    """The page: what is alarming in the newest run, then a picture and a table for each workload and machine."""
    return framed(
        "The guard's history",
        _told(rows),
        tag("main", _alarms(found), bullets(notes), _overview(rows), [_section(*each) for each in enumerate(rows)]),
        "Written by pytest-cudaforge. Times are medians of a call; each run timed its parties in turns.",
    )


def _told(rows: Sequence[SeriesRow]) -> str:
    runs = {run.id: run for row in rows for run in row.runs}
    if not runs:
        return "Nothing was measured yet."
    days = sorted(run.time[:10] for run in runs.values())
    machines = len({run.machine.key for run in runs.values()})
    return f"{len(runs)} runs on {machines} kind{'' if machines == 1 else 's'} of machine, {days[0]} to {days[-1]}."


def _alarms(found: Sequence[Alarm]) -> Markup | None:
    if not found:
        return None
    told = [
        tag(
            "div",
            tag("p", badge(_HEADINGS[one.kind], "bad"), " ", one.text),
            tag("p", "To do: ", one.advice),
            class_="said",
        )
        for one in found
    ]
    return joined(tag("h3", "In the newest run"), told)


def _overview(rows: Sequence[SeriesRow]) -> Markup | None:
    header = ["~workload", "~machine", ">runs", ">kernel", ">last", ">change", ">eager", ">compile"]
    cells = [
        (
            tag("a", row.last.name, href=f"#s{index}"),
            row.machine.hardware,
            len(row.runs),
            *_figures(row, "candidate"),
            _figures(row, "eager")[1],
            _figures(row, "compile")[1],
        )
        for index, row in enumerate(rows)
    ]
    return joined(tag("h3", "Overview"), table(header, cells)) if cells else None


def _figures(row: SeriesRow, party: str) -> tuple[str, str, str]:
    """Median of the earlier runs, the last one, its change."""
    found = next((one for one in row.parties if one.party == party), None)
    if found is None or found.median_ns is None or found.last_ns is None:
        return "", "", ""
    return duration(found.median_ns), duration(found.last_ns), _change(found)


def _change(party: PartyRow) -> str:
    return "" if party.change is None else f"{100 * party.change:+.1f} %"


def _section(index: int, row: SeriesRow) -> Markup:
    language = f" ({row.last.language})" if row.last.language else ""
    lines = [
        (
            row.noun if party.party == "candidate" else party.party,
            *_figures(row, party.party),
        )
        for party in row.parties
    ]
    events = [f"{row.runs[one.index].time[:10]} {row.runs[one.index].commit[:10]}: {one.text}" for one in row.events]
    return tag(
        "section",
        tag("h2", f"{row.last.name}{language}", id=f"s{index}"),
        tag("p", row.machine.text, class_="faint"),
        None if row.calm else tag("p", f"None of these sittings was calm, the last: {row.last.disturbed}."),
        figure(
            timeline(row), "Median time of a call by run. T: toolchain, K: kernel, S: source changed; R: regression."
        ),
        table(["party", ">median", ">last", ">change"], lines),
        bullets(events),
    )


# -- the picture ------------------------------------------------------------------------------------------------------


def timeline(row: SeriesRow) -> Picture | None:
    """Times over runs, a line with its own marks for each party; what changed stands on top. None without times."""
    shown = [party for party in row.parties if party.party in _COLOURS]
    known = [point for party in shown for point in party.points if point is not None]
    if not known:
        return None
    scale = _Scale.over(known)
    places = [_LEFT + (_WIDTH - _LEFT - 20) * (index + 0.5) / len(row.runs) for index in range(len(row.runs))]
    body = joined(
        _legend(shown, row.noun),
        _grid(scale),
        [_event(row, event, places[event.index]) for event in row.events],
        [_line(party, row, places, scale) for party in shown],
        _dates(row, places),
    )
    title = f"{row.last.name}: " + ", ".join(f"{one.party} last {duration(one.last_ns or math.nan)}" for one in shown)
    return Picture(title, _WIDTH, _TOP + _HEIGHT + _BELOW, body)


class _Scale:
    """Times from ``low`` to ``high`` onto the plot's pixels, upwards."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    @classmethod
    def over(cls, known: Sequence[float]) -> _Scale:
        low, high = min(known), max(known)
        room = max(0.05 * (high - low), (_LEAST_RANGE * low - (high - low)) / 2.0)
        return cls(low - room, high + room)

    def at(self, time_ns: float) -> float:
        return _TOP + _HEIGHT * (1.0 - (time_ns - self.low) / (self.high - self.low))

    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * step / _STEPS for step in range(_STEPS + 1)]


def _grid(scale: _Scale) -> Markup:
    parts = []
    for value in scale.ticks():
        y = scale.at(value)
        parts.append(tag("line", x1=_LEFT, y1=y, x2=_WIDTH - 8, y2=y, class_="grid"))
        parts.append(tag("text", duration(value), x=_LEFT - 8, y=y + 4, class_="end faint"))
    return joined(parts)


def _legend(shown: Sequence[PartyRow], noun: str) -> Markup:
    parts, left = [], _LEFT
    for party in shown:
        name = noun if party.party == "candidate" else party.party
        parts.append(tag("g", _mark(party.party, left + 6, 12), tag("text", name, x=left + 16, y=16)))
        left += 40 + 7 * len(name)
    return joined(parts)


def _mark(party: str, x: float, y: float) -> Markup:
    """A shape of its own for each: colours alone are not for everybody."""
    fill = _COLOURS[party]
    if party == "candidate":
        return tag("circle", cx=x, cy=y, r=3.5, fill=fill)
    if party == "eager":
        return tag("path", d=f"M{x - 4:.1f} {y + 3.5:.1f}h8l-4 -7z", fill=fill)
    return tag("rect", x=x - 3, y=y - 3, width=6, height=6, fill=fill)


def _line(party: PartyRow, row: SeriesRow, places: Sequence[float], scale: _Scale) -> Markup:
    timed = [(index, point) for index, point in enumerate(party.points) if point is not None]
    points = " ".join(f"{places[index]:.1f},{scale.at(point):.1f}" for index, point in timed)
    marks = [
        tag("g", tag("title", _hint(party, row, index, point)), _mark(party.party, places[index], scale.at(point)))
        for index, point in timed
    ]
    colour = _COLOURS[party.party]
    return joined(tag("polyline", points=points, fill="none", stroke=colour, stroke_width="1.5"), marks)


def _hint(party: PartyRow, row: SeriesRow, index: int, point: float) -> str:
    run = row.runs[index]
    return f"{run.time[:16].replace('T', ' ')} {run.commit[:10]}: {party.party} {duration(point)}"


def _event(row: SeriesRow, event: Event, x: float) -> Markup:
    told = tag("title", f"{row.runs[event.index].time[:10]}: {one_line(event.text, 200)}")
    style = "mid bad strong" if event.kind == "regression" else "mid faint"
    line = tag("line", x1=x, y1=_TOP, x2=x, y2=_TOP + _HEIGHT, class_="grid", stroke_dasharray="2 3")
    return tag("g", told, line, tag("text", _MARKS[event.kind], x=x, y=_TOP - 2, class_=style))


def _dates(row: SeriesRow, places: Sequence[float]) -> Markup:
    """The first run's date, the last one's, and what fits between."""
    every = max(1, math.ceil(len(places) * 90 / (_WIDTH - _LEFT)))
    shown = sorted({*range(0, len(places), every)})
    return joined(
        tag("text", row.runs[index].time[:10], x=places[index], y=_TOP + _HEIGHT + 20, class_="mid faint")
        for index in shown
    )
