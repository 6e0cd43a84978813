"""A history as rows to show: what was measured over time, machine by machine, and where something changed. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_cudaforge.alarms import Alarm, alarms
from pytest_cudaforge.machine import Machine
from pytest_cudaforge.measurements import REFERENCES, GuardRun, Measurement

__all__ = ["Event", "EventKind", "PartyRow", "SeriesRow", "document", "last_alarms", "last_runs", "series_rows"]

EventKind = Literal["toolchain", "kernel", "reference", "regression"]


@dataclass(frozen=True)
class Event:
    """Something that changed before the measurement ``index`` of its row, or that it showed."""

    index: int
    kind: EventKind
    text: str


@dataclass(frozen=True)
class PartyRow:
    """One party's medians, oldest first; None where it was not timed, or in a disturbed sitting beside calm ones.
    ``median_ns`` is that of all but the last, ``change`` the last one's share above it."""

    party: str
    points: tuple[float | None, ...]

    @property
    def last_ns(self) -> float | None:
        return next((point for point in reversed(self.points) if point is not None), None)

    @property
    def median_ns(self) -> float | None:
        known = [point for point in self.points if point is not None]
        return statistics.median(known[:-1] or known) if known else None

    @property
    def change(self) -> float | None:
        """None with fewer than two points."""
        if sum(point is not None for point in self.points) < 2 or not self.median_ns or self.last_ns is None:
            return None
        return self.last_ns / self.median_ns - 1.0


@dataclass(frozen=True)
class SeriesRow:
    """One workload on one kind of machine, a measurement of each run."""

    measurements: tuple[Measurement, ...]
    parties: tuple[PartyRow, ...]
    events: tuple[Event, ...]

    @property
    def last(self) -> Measurement:
        return self.measurements[-1]

    @property
    def machine(self) -> Machine:
        return self.last.run.machine

    @property
    def calm(self) -> bool:
        """Was any sitting not disturbed? On a busy machine there may be none; then what there is is shown."""
        return any(not one.disturbed for one in self.measurements)

    @property
    def runs(self) -> tuple[GuardRun, ...]:
        return tuple(measurement.run for measurement in self.measurements)

    @property
    def noun(self) -> str:
        """What the candidate is: a plain module is raced against nothing but itself."""
        return "kernel" if any(one.references for one in self.measurements) else "module"


def series_rows(
    measurements: Iterable[Measurement], *, target: str = "", most: int | None = None
) -> tuple[SeriesRow, ...]:
    """Sorted by target, workload and machine. ``target``: only those whose id holds this text. ``most``: only the last
    so many runs of each."""
    groups: dict[tuple[str, ...], dict[str, Measurement]] = defaultdict(dict)
    for measurement in sorted(measurements, key=lambda each: each.run.time):
        if target in measurement.target:
            # One of each run: its last, which is the confirmation where there was one.
            groups[_place(measurement)][measurement.run.id] = measurement
    ordered = sorted(groups.items(), key=lambda item: item[0])
    return tuple(_row(list(by_run.values())[-most if most else 0 :]) for _, by_run in ordered)


def _place(measurement: Measurement) -> tuple[str, ...]:
    return (*measurement.series, measurement.run.machine.key)


def _row(runs: Sequence[Measurement]) -> SeriesRow:
    named = dict.fromkeys(party for one in runs for party, _ in one.parties)
    order = [party for party in ("candidate", "base", *REFERENCES) if party in named]
    row = SeriesRow(tuple(runs), (), tuple(_events(runs)))
    shown = [None if one.disturbed and row.calm else one for one in runs]
    parties = tuple(PartyRow(party, tuple(one.median_ns(party) if one else None for one in shown)) for party in order)
    return dataclasses.replace(row, parties=tuple(party for party in parties if party.last_ns is not None))


def _events(runs: Sequence[Measurement]) -> list[Event]:
    found: list[Event] = []
    for index, one in enumerate(runs):
        if index:
            found += _changes(index, runs[index - 1], one)
        if one.outcome == "regression":
            asked = [each for each in one.judgements if each.outcome == "regression"]
            told = ", ".join(f"against {each.question} ({each.ratio.speedup:.3g}×)" for each in asked)
            found.append(Event(index, "regression", f"regression {told}".rstrip()))
    return found


def _changes(index: int, before: Measurement, now: Measurement) -> list[Event]:
    found = []
    changed = now.run.machine.toolchain.changes(before.run.machine.toolchain)
    if changed:
        found.append(Event(index, "toolchain", "toolchain: " + ", ".join(changed)))
    if before.kernel != now.kernel:
        found.append(Event(index, "kernel", f"kernel: {before.kernel[:12]} → {now.kernel[:12]}"))
    elif before.target_digest != now.target_digest:
        found.append(Event(index, "reference", "the target's own source"))
    return found


# -- the last run -----------------------------------------------------------------------------------------------------


def last_runs(measurements: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """What was measured last: of the newest run's commit, every workload on every kind of machine once. Disturbed
    measurements are none. Without a commit it is the newest run alone."""
    calm = [one for one in measurements if not one.disturbed]
    if not calm:
        return ()
    newest = max(calm, key=lambda each: each.run.time).run
    same = [one for one in calm if (one.run.commit == newest.commit if newest.commit else one.run.id == newest.id)]
    found: dict[tuple[str, ...], Measurement] = {}
    for one in sorted(same, key=lambda each: each.run.time):
        found[_place(one)] = one
    return tuple(found.values())


def last_alarms(measurements: Sequence[Measurement]) -> tuple[Alarm, ...]:
    """What is to be said of the newest run beside those before it."""
    calm = [one for one in measurements if not one.disturbed]
    if not calm:
        return ()
    newest = max(calm, key=lambda each: each.run.time).run
    return alarms(measurements, [one for one in calm if one.run.id == newest.id])


# -- JSON -------------------------------------------------------------------------------------------------------------


def document(rows: Sequence[SeriesRow], found: Sequence[Alarm], notes: Sequence[str]) -> dict[str, Any]:
    """The history as the stable JSON contract: within a version fields are added, never renamed or removed."""
    return {
        "format": "cudaforge-history-report",
        "version": 1,
        "series": [_row_data(row) for row in rows],
        "alarms": [dataclasses.asdict(alarm) for alarm in found],
        "notes": list(notes),
    }


def _row_data(row: SeriesRow) -> dict[str, Any]:
    return {
        "target": row.last.target,
        "language": row.last.language,
        "workload": row.last.workload,
        "what": row.last.what,
        "clock": row.last.clock,
        "machine": {**dataclasses.asdict(row.machine), "key": row.machine.key},
        "parties": {
            party.party: {"median_ns": party.median_ns, "last_ns": party.last_ns, "change": party.change}
            for party in row.parties
        },
        "runs": [
            {
                "time": one.run.time,
                "commit": one.run.commit,
                "kernel": one.kernel,
                "outcome": one.outcome,
                "disturbed": one.disturbed,
                "median_ns": {party: sample.median_ns for party, sample in one.parties},
            }
            for one in row.measurements
        ],
        "events": [dataclasses.asdict(event) for event in row.events],
    }
