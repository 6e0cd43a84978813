"""Which parent, and which kind of feedback next: the strategies of the loop.

An extension is one small protocol, a name map and a dotted path: ``strategy: refine`` or
``strategy: mypackage.search:Beam`` in cudaforge.yaml. A strategy is pure: it sees the rounds so far and the limits,
and says what it wants next. It never calls a model, a compiler or a clock.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.records import Proposal, Round, Stop, Timing

__all__ = ["NAMES", "Limits", "Strategy", "best_round", "load", "speed_of_light", "speedup_of", "worthwhile"]

#: Short names; anything else is read as ``package.module:attribute``.
NAMES: dict[str, str] = {"refine": "pytest_cudaforge.strategies.refine:Refine"}


@dataclass(frozen=True)
class Limits:
    """What a strategy has to respect.

    ``patience``: rounds without a new best before it stops (0: never). ``roofline_stop``: share of the speed of light
    at which more work is not worth its price. ``corrections``: failed corrections of one broken optimization before
    going back to the best. ``restart_after``: failed corrections in a row, with nothing correct yet, before starting
    from an empty page.
    """

    rounds: int = 10
    patience: int = 4
    roofline_stop: float = 0.9
    corrections: int = 2
    restart_after: int = 5


class Strategy(Protocol):
    """What the loop asks before each round."""

    def propose(self, rounds: Sequence[Round], limits: Limits) -> Proposal | Stop:
        """The next parent (a round's number) and kind, or a stop with its reason in plain words."""


def load(name: str) -> Strategy:
    """The strategy of that name or dotted path. Raises :class:`ConfigError`."""
    path = NAMES.get(name, name)
    module_name, colon, attribute = path.partition(":")
    known = ", ".join(sorted(NAMES))
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"strategy {name!r} is not known", expected=f"one of {known}, or package.module:attribute", remedy=""
        )
    try:
        factory: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"strategy {name!r} cannot be imported: {error}",
            expected=f"one of {known}, or package.module:attribute",
            remedy="check the dotted path and that the package is installed here",
        ) from error
    strategy = factory() if isinstance(factory, type) else factory
    if not callable(getattr(strategy, "propose", None)):
        raise ConfigError(
            f"strategy {name!r} has no propose(rounds, limits)", expected="a class or object with propose"
        )
    return strategy  # type: ignore[no-any-return]


def speedup_of(timing: Timing | None) -> float:
    """Speedup against the faster baseline: what a user gains over the best they have today. 0.0 without a timing."""
    if timing is None:
        return 0.0
    speedups = [timing.speedup_eager]
    if timing.speedup_compile is not None:
        speedups.append(timing.speedup_compile)
    return min(speedups)


def speed_of_light(timing: Timing | None) -> float | None:
    """Geometric mean over workloads of roofline / measured time; None where a roofline is not known."""
    if timing is None or not timing.workloads:
        return None
    logs: list[float] = []
    for workload in timing.workloads:
        if not workload.roofline_ns or workload.candidate.median_ns <= 0:
            return None
        logs.append(math.log(workload.roofline_ns / workload.candidate.median_ns))
    return math.exp(sum(logs) / len(logs))


def worthwhile(entry: Round) -> bool:
    """Whether the round left a correct, timed candidate."""
    verdict = entry.evaluation
    return entry.candidate is not None and verdict is not None and verdict.passed and verdict.timing is not None


def best_round(rounds: Sequence[Round]) -> Round | None:
    """The fastest correct round; of equals the earliest, so that a duplicate never takes the place of its original.

    A round that was timed beside the best of its day takes its place only where that sitting says so; rounds that met
    in no sitting are compared by their ratios to baselines.
    """
    best: Round | None = None
    for entry in rounds:
        if not worthwhile(entry) or entry.duplicate_of is not None:
            continue
        if best is None or _beats(entry, best):
            best = entry
    return best


def _beats(entry: Round, best: Round) -> bool:
    timing = entry.evaluation.timing if entry.evaluation is not None else None
    if entry.incumbent == best.number and timing is not None and timing.vs_incumbent is not None:
        return timing.vs_incumbent.low > 1.0
    return _speed(entry) > _speed(best)


def _speed(entry: Round) -> float:
    return speedup_of(entry.evaluation.timing) if entry.evaluation is not None else 0.0
