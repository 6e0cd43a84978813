"""Follow a recorded conversation: its parents, not our own judgement.

A recording is keyed by role and ordinal, so replies must be asked for in the recorded order, with the recorded kind:
a Judge's reply about a correction cannot be read as one about an optimization, whatever is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from pytest_cudaforge.records import Proposal, Round, Stop
from pytest_cudaforge.strategies import Limits, worthwhile

__all__ = ["Recorded", "RecordedRound"]


@dataclass(frozen=True)
class RecordedRound:
    """What a recording says of one round; ``status`` and ``speedup`` are shown beside what is measured here.

    ``kind`` "" (a recording written by hand): read from the measured verdict of the parent.
    """

    number: int
    parent: int | None
    kind: str = ""
    status: str = ""
    speedup: float | None = None


class Recorded:
    """Plays ``rounds`` of a recording in order, then stops. Patience and roofline do not cut it short."""

    def __init__(self, recording: Sequence[RecordedRound]) -> None:
        self._recording = tuple(sorted(recording, key=lambda entry: entry.number))

    def propose(self, rounds: Sequence[Round], limits: Limits) -> Proposal | Stop:
        played = len(rounds)
        if played >= limits.rounds:
            return Stop(f"all {limits.rounds} rounds are played")
        if played >= len(self._recording):
            return Stop(f"the recorded conversation ends after round {played}")
        recorded = self._recording[played]
        return (
            Proposal("first", None) if recorded.parent is None else _following(rounds, recorded.parent, recorded.kind)
        )


def _following(rounds: Sequence[Round], parent: int, kind: str) -> Proposal:
    """The recorded parent; where it left no candidate here, the last round that did."""
    known = {entry.number: entry for entry in rounds if entry.candidate is not None}
    chosen = known.get(parent) or (known[max(known)] if known else None)
    if chosen is None:
        return Proposal("first", None)
    if kind not in ("correction", "optimization"):
        kind = "optimization" if worthwhile(chosen) else "correction"
    return Proposal(cast(Literal["correction", "optimization"], kind), chosen.number)
