"""A history for a terminal: a line of blocks for each party, marks below it where something changed. No colour."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_cudaforge.alarms import Alarm, lines
from pytest_cudaforge.guard import duration
from pytest_cudaforge.report.escaping import one_line, plain
from pytest_cudaforge.report.history_rows import Event, EventKind, PartyRow, SeriesRow

__all__ = ["text"]

#: So many runs fit beside their figures in 100 columns.
MOST_RUNS = 40
_BLOCKS = "▁▂▃▄▅▆▇█"
#: The full height of a line of blocks is at least this share: what differs by noise alone is to look flat.
_LEAST_RANGE = 0.10
_MARKS: dict[EventKind, str] = {"reference": "S", "kernel": "K", "toolchain": "T", "regression": "R"}
_LEGEND = "T toolchain, K kernel, S the target's source changed; R regression; · disturbed or not timed"
_MOST_EVENTS = 6


def text(rows: Sequence[SeriesRow], found: Sequence[Alarm], notes: Sequence[str]) -> str:
    """All of it. ``rows`` with :data:`MOST_RUNS` runs at most."""
    parts = ["\n".join(_series(row)) for row in rows]
    if any(row.events for row in rows):
        parts.append(_LEGEND)
    if found:
        parts.append("\n".join(["In the newest run:", *lines(found)]))
    if notes:
        parts.append("\n".join(f"note: {note}" for note in notes))
    return plain("\n\n".join(parts))


def _series(row: SeriesRow) -> list[str]:
    first, last = row.runs[0].time[:10], row.runs[-1].time[:10]
    days = first if first == last else f"{first} to {last}"
    count = f"{len(row.runs)} run{'' if len(row.runs) == 1 else 's'}"
    language = f" ({row.last.language})" if row.last.language else ""
    told = [f"{one_line(row.last.name, 200)}{language}", f"  on {row.machine.hardware}; {count}, {days}"]
    told += [_party(party, row.noun) for party in row.parties if party.party != "base"]
    marks = _marked(row.events, len(row.runs))
    told += [f"  {'':8}{marks}".rstrip()] if marks.strip() else []
    if not row.calm:
        told.append(
            f"  none of these sittings was calm, the last: {one_line(row.last.disturbed, 120)}; no alarm uses them"
        )
    return told + [f"  {_told(row, event)}" for event in row.events[-_MOST_EVENTS:]]


def _party(party: PartyRow, noun: str) -> str:
    name = noun if party.party == "candidate" else party.party
    figures = f"median {_time(party.median_ns)}, last {_time(party.last_ns)}"
    change = "" if party.change is None else f", {100 * party.change:+.1f} %"
    return f"  {name:8}{blocks(party.points)}  {figures}{change}"


def blocks(points: Sequence[float | None]) -> str:
    """``▁▁▂▁▇``: a block for each value, from the lowest to the highest; ``·`` for what is None."""
    known = [point for point in points if point is not None]
    if not known:
        return "·" * len(points)
    low, high = min(known), max(known)
    # Values that differ by less than the least range lie in its middle.
    spare = max(0.0, _LEAST_RANGE * low - (high - low)) / 2.0
    low, high = low - spare, high + spare
    step = (high - low) / len(_BLOCKS) or 1.0
    return "".join("·" if point is None else _BLOCKS[min(int((point - low) / step), 7)] for point in points)


def _marked(events: Sequence[Event], count: int) -> str:
    marks = [" "] * count
    for event in sorted(events, key=lambda each: list(_MARKS).index(each.kind)):
        marks[event.index] = _MARKS[event.kind]
    return "".join(marks)


def _told(row: SeriesRow, event: Event) -> str:
    run = row.runs[event.index]
    commit = f" at {run.commit[:10]}" if run.commit else ""
    return f"{_MARKS[event.kind]} {run.time[:10]}{commit}: {one_line(event.text, 160)}"


def _time(time_ns: float | None) -> str:
    return "?" if time_ns is None else duration(time_ns)
