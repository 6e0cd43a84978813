"""Is it slower? The guard's decision, from the blocks of a race. Pure: no clock, no process, standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_cudaforge.records import Ratio

__all__ = ["Finding", "GuardOutcome", "Question", "Thresholds"]

#: What a kernel is held against: its version at the merge base, its reference in eager mode or compiled.
Question = Literal["base", "eager", "compile"]
GuardOutcome = Literal["pass", "regression", "inconclusive"]


@dataclass(frozen=True)
class Thresholds:
    """A regression passes all of them. ``relative``: share of the base's time. ``noise``: what two sittings of one
    kernel differ by on this runner (``cudaforge calibrate`` measures it). ``promise_margin``: how far a speedup over
    the reference may fall below the manifest's."""

    relative: float = 0.03
    absolute_ns: float = 1_000.0
    noise: float = 0.005
    promise_margin: float = 0.10


@dataclass(frozen=True)
class Finding:
    """One question about one workload, answered. ``slowdown``: candidate / base (1.0 is unchanged), as a Ratio whose
    ``speedup`` is that quotient; for a reference reference / candidate against ``promised``. ``lost_ns``: per call."""

    question: Question
    workload: str
    what: Literal["forward", "backward"]
    outcome: GuardOutcome
    slowdown: Ratio
    lost_ns: float
    promised: float | None = None
    confirmed: bool = False
    text: str = ""
