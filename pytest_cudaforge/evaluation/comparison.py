"""How much longer does one party take than another, and how sure is that? From the blocks of a race, for the guard.
Pure: no clock, no process, standard library only.

**The unit is the process.** Blocks of one process share its pages, the placement of its threads and its place in the
device's memory; they are autocorrelated, and however many there are they say nothing of the next process (Kalibera and
Jones, *Rigorous benchmarking in reasonable time*, ISMM 2013: repeat at the highest level that varies). A bootstrap over
two to four processes alone is too narrow: it cannot draw a process that was not there, and its tails are normal.

**Few processes, so borrow.** With three processes Student's t has a quantile of 9.9, and their spread may be small by
luck. What is known beforehand of processes of this runner enters as so many further degrees of freedom (the moderated
t of Smyth, *Linear models and empirical Bayes methods*, 2004): the variance is ``(d0 s0^2 + (n - 1) s^2) / d`` with
``d = d0 + n - 1`` degrees. One process out of step widens the interval and never narrows it.

**Two kinds of noise.** Device events see the device alone: each process gives the median of its paired log-ratios (a
drift cancels within a block), and ``s`` is their standard deviation. The supervisor's clock also sees who else wants
the cores, and that only ever adds: threads that wait for each other crawl to a hundredfold. There the quotient is that
of low quantiles of all blocks of each party, what both take where nobody disturbs them (Chen and Revels, *Robust
benchmarking in noisy environments*, 2016), and ``s`` comes from a bootstrap over processes and, within them, blocks. On
two crowded cores medians of one kernel against itself were apart by 30 % and more, low quantiles by 1 %.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_cudaforge.distributions import student_t
from pytest_cudaforge.evaluation.timing import CAPPED_PLACEMENT, IN_ONE_PROCESS, Block, quiet_blocks, steady_blocks
from pytest_cudaforge.records import Ratio

__all__ = ["Placement", "compare", "process_values", "usable"]

CONFIDENCE = 0.99
#: Of a party's blocks, by the supervisor's clock: the one of these at which the processes agree best. A kernel may have
#: two speeds there (threads that share a core, or do not), and a quantile between them says nothing.
LOW = (0.05, 0.1, 0.25, 0.5)
TYPICAL = 0.25
RESAMPLES = 200
#: Variance of a median over that of a mean, of normal values.
_MEDIAN_VARIANCE = math.pi / 2.0


@dataclass(frozen=True)
class Placement:
    """How much one process's time of a call differs from another's of the same program (standard deviation), known
    beforehand: ``ns`` of any call, ``share`` of it. It counts as ``degrees`` processes."""

    ns: float = 120.0
    share: float = 0.0005
    degrees: float = 4.0

    @classmethod
    def usual(cls, kind: str) -> Placement:
        """Of a runner of ``kind`` ("cpu", "cuda") that nobody calibrated."""
        return cls() if kind == "cuda" else cls(ns=120.0, share=0.01)

    def at_power_limit(self, clock: str) -> Placement:
        """On a GPU that ran at its power limit (see ``timing.CAPPED_PLACEMENT``)."""
        return replace(self, share=max(self.share, CAPPED_PLACEMENT[clock]))

    def variance(self, call_ns: float) -> float:
        """Of the logarithm of a call of ``call_ns``."""
        return self.share**2 + (self.ns / call_ns) ** 2


def usable(blocks: Sequence[Block], clock: str) -> tuple[Block, ...]:
    """What is reckoned with. By events: without blocks that others disturbed or that are far off in their process; by
    the supervisor's clock all of them, since their low quantiles choose for themselves."""
    return steady_blocks(quiet_blocks(blocks)) if clock == "events" else tuple(blocks)


def compare(blocks: Sequence[Block], over: str, under: str, clock: str, placement: Placement) -> tuple[Ratio, int]:
    """``over``'s time / ``under``'s with its 99 % interval, and the number of processes it rests on; see the module.
    Raises ValueError without blocks."""
    if not blocks:
        raise ValueError("no blocks were measured")
    groups = _by_process(blocks)
    count = len(groups)
    center, spread = _by_medians(groups, over, under) if clock == "events" else _by_low(groups, over, under)
    shared, placed = 0.0, 0.0
    for party in (over, under):
        variance = placement.variance(typical_ns(blocks, party, clock))
        if party in IN_ONE_PROCESS:
            # No number of workers averages it out.
            shared += variance
        else:
            placed += variance
    if clock == "events":
        placed += statistics.fmean(_median_variance(_log_ratios(group, over, under)) for group in groups)
    degrees = placement.degrees + count - 1
    variance = (placement.degrees * placed + (count - 1) * spread) / degrees
    half = student_t((1.0 + CONFIDENCE) / 2.0, degrees) * math.sqrt(variance / count + shared)
    # Nothing is known beyond "any number" where an exponent gets this large.
    half = min(half, 30.0)
    return Ratio(math.exp(center), math.exp(center - half), math.exp(center + half), CONFIDENCE), count


def typical_ns(blocks: Sequence[Block], party: str, clock: str) -> float:
    """A call of ``party``: the median by events; by the supervisor's clock where little disturbs it."""
    values = sorted(block.of(party) for block in blocks)
    return statistics.median(values) if clock == "events" else _quantile(values, TYPICAL)


def process_values(blocks: Sequence[Block], over: str, under: str, clock: str) -> list[float]:
    """Log of ``over``'s time / ``under``'s of each process by itself."""
    groups = _by_process(blocks)
    if clock == "events":
        return [statistics.median(_log_ratios(group, over, under)) for group in groups]
    pairs = [[(block.of(over), block.of(under)) for block in group] for group in groups]
    return [_low_ratios([group])[LOW.index(TYPICAL)] for group in pairs]


def _by_process(blocks: Sequence[Block]) -> list[list[Block]]:
    found: dict[int, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.process, []).append(block)
    return list(found.values())


def _log_ratios(group: Sequence[Block], over: str, under: str) -> list[float]:
    return [math.log(block.of(over) / block.of(under)) for block in group]


def _by_medians(groups: Sequence[Sequence[Block]], over: str, under: str) -> tuple[float, float]:
    """The mean of the processes' values, and their variance."""
    values = [statistics.median(_log_ratios(group, over, under)) for group in groups]
    return statistics.fmean(values), _variance(values)


def _by_low(groups: Sequence[Sequence[Block]], over: str, under: str) -> tuple[float, float]:
    """The log of the low quantiles' quotient, and the variance that one process more or less would have: the
    bootstrap's, scaled to one process, and by what it is short of for so few."""
    pairs = [[(block.of(over), block.of(under)) for block in group] for group in groups]
    chance, count = random.Random(0), len(groups)
    drawn = [
        _low_ratios([chance.choices(group, k=len(group)) for group in chance.choices(pairs, k=count)])
        for _ in range(RESAMPLES)
    ]
    variances = [_inner_variance([values[place] for values in drawn]) for place in range(len(LOW))]
    best = min(range(len(LOW)), key=lambda place: variances[place])
    return _low_ratios(pairs)[best], variances[best] * count * count / max(1, count - 1)


def _inner_variance(values: Sequence[float]) -> float:
    """Of a normal variable whose middle 80 % are as wide: a few draws of nothing but crawling blocks say nothing of how
    well the others agree."""
    ordered = sorted(values)
    return ((_quantile(ordered, 0.9) - _quantile(ordered, 0.1)) / 2.563) ** 2


def _low_ratios(groups: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """The log-quotient at each of ``LOW``."""
    pairs = [pair for group in groups for pair in group]
    over, under = sorted(pair[0] for pair in pairs), sorted(pair[1] for pair in pairs)
    return [math.log(_quantile(over, share) / _quantile(under, share)) for share in LOW]


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def _median_variance(values: Sequence[float]) -> float:
    """Of the median of a process's blocks, as if they were independent; where they are not, the processes' spread
    has it. Their scale comes from the median of absolute deviations: single far blocks do not move a median either."""
    center = statistics.median(values)
    scale = 1.4826 * statistics.median(abs(value - center) for value in values)
    return _MEDIAN_VARIANCE * scale**2 / len(values)


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0
