"""Is it faster? Blocks, ratios, intervals and the decision. Pure: no clock, no process, standard library only.

One *block* measures every party once forward and once backward (A B C C B A), so that a linear drift cancels. The
ratio is the median of the blocks' paired log-ratios; its interval comes from a bootstrap over processes and, within
each, over blocks, because two processes differ more than two blocks of one (page placement, address layout).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_cudaforge.records import Decision, Ratio, Sample

__all__ = [
    "IN_ONE_PROCESS",
    "PROBED_BELOW_NS",
    "Block",
    "Turned",
    "abba",
    "block_of",
    "clear_enough",
    "combine",
    "decide",
    "disturbed",
    "gpu_placement_ns",
    "levelled",
    "narrow_enough",
    "quiet_blocks",
    "ratio_of",
    "sample_of",
    "slope_ns",
    "slowed",
    "steady_blocks",
    "typical_ns",
]

CONFIDENCE = 0.99
#: Of the normal distribution, for that confidence on both sides.
_QUANTILE = 2.576
RESAMPLES = 2000
#: Ratios this near to 1 are "same": less than anybody would change a kernel for, more than layout noise.
MARGIN = 0.005
SAME_WITHIN = 0.02
#: Half an interval's width below which two kernels that look alike are not looked at any longer.
_ALIKE = 0.003
#: ``placement_ns`` of :func:`ratio_of` for cold calls on a GPU. Processes differ by some 90 ns (standard deviation) in
#: any short call, all through their lives: page tables, code and buffers lie elsewhere. Levelled by the probe, over a
#: dozen buffer sets, A/A ratios of two processes had a standard deviation of 46 ns at 4.5 us, 67 at 7.5, 75 at 18:
#: per process those divided by the root of two (tests/benchmarks/README.md).
GPU_PLACEMENT_NS = 60.0
#: ... where a GPU ran at its power limit, of a call: what a process does between its turns decides how fast the clock
#: runs in them. Two H200s, the same bf16 product of 1.5 ms as candidate and as reference: 1.054 and 1.079 by the
#: supervisor's clock, as a module; 0.999 and 0.990 by device events, as a plan.
CAPPED_PLACEMENT = {"supervisor": 0.03, "events": 0.006}
#: Shorter calls are probed: a process's own share of the time matters there.
PROBED_BELOW_NS = 50_000.0
#: Processes differ by some 70 ns (standard deviation). What a probe shows beyond this is not believed: device code
#: shares its process with it.
_MOST_SHARED_NS = 250.0
#: Of a turn's times in order, what is left out on either side.
_TRIMMED = 0.2
#: All their turns are in one process, the oracle's.
IN_ONE_PROCESS = ("eager", "compile")
#: A baseline slower than alone by more than this (beyond both spreads) throws the sitting away.
DISTURBANCE = 0.03
#: A block in which a party takes so many times its median is unsteady.
UNSTEADY = 1.2
#: Blocks in which somebody waited for a core for more than this share of the time are discarded, if others remain.
FOREIGN = 0.3


@dataclass(frozen=True)
class Block:
    """ns per call by party, in one process of the candidate. ``foreign`` is the share of the block's time in which
    some process of the machine waited for a core: others were busy there. On a GPU it is the share in which others used
    it, and 1.0 where it was slowed down."""

    process: int
    ns: tuple[tuple[str, float], ...]
    foreign: float = 0.0

    def of(self, party: str) -> float:
        return dict(self.ns)[party]

    @property
    def parties(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.ns)


def abba(parties: Sequence[str]) -> tuple[str, ...]:
    """The order in which one block measures its parties."""
    return (*parties, *reversed(parties))


def slope_ns(total_n_ns: float, total_2n_ns: float, calls: int) -> float:
    """ns per call by (T2n - Tn) / n: what a request costs besides its calls cancels."""
    return (total_2n_ns - total_n_ns) / calls


@dataclass(frozen=True)
class Turned:
    """One party's turn: ns per call, and what the event clock's probe took beside it, if there was one."""

    party: str
    ns: float
    probe_ns: float | None = None


def block_of(process: int, turns: Iterable[Turned], foreign: float = 0.0) -> Block | None:
    """A block from its turns, averaged by party and levelled; None where one is not positive (the clock was
    disturbed)."""
    by_party: dict[str, list[Turned]] = {}
    for turn in turns:
        by_party.setdefault(turn.party, []).append(turn)
    if any(turn.ns <= 0 for taken in by_party.values() for turn in taken):
        return None
    probes = {party: [turn.probe_ns for turn in taken] for party, taken in by_party.items()}
    shares = levelled({party: [ns for ns in taken if ns is not None] for party, taken in probes.items()})
    means = ((party, statistics.fmean(turn.ns for turn in taken)) for party, taken in by_party.items())
    return Block(process, tuple((party, max(1.0, ns - shares[party])) for party, ns in means), foreign)


def levelled(probes: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """By party, how many ns more than in the others' processes a cold call takes in its own, whichever it is: by the
    probe, a kernel of ours that is timed beside each of theirs. 0.0 for who was not probed, and nobody among them."""
    means = {party: statistics.fmean(taken) for party, taken in probes.items() if taken}
    level = statistics.fmean(means.values()) if means else 0.0
    shares = {party: max(-_MOST_SHARED_NS, min(_MOST_SHARED_NS, mean - level)) for party, mean in means.items()}
    return {party: shares.get(party, 0.0) for party in probes}


def typical_ns(times_ns: Sequence[float]) -> float:
    """Of a turn's times by events: the mean of those in the middle. A median falls on one of the steps of 32 ns that
    events count in, or on one of the speeds that a call has on different memory."""
    ordered = sorted(times_ns)
    left_out = math.ceil(_TRIMMED * len(ordered)) if len(ordered) > 2 else 0
    return statistics.fmean(ordered[left_out : len(ordered) - left_out])


def gpu_placement_ns(call_ns: float, clock: str, capped: bool) -> float:
    """``placement_ns`` of :func:`ratio_of` for calls of ``call_ns`` on a GPU by ``clock`` ("events", "supervisor");
    ``capped``: at its power limit."""
    return max(GPU_PLACEMENT_NS, CAPPED_PLACEMENT[clock] * call_ns if capped else 0.0)


def steady_blocks(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Without the blocks in which some party, whichever, took far longer than it did in most of its process's: an
    interrupt, a page, a thread that lost its core. At most a third of a process's go, those that are furthest off."""
    found: list[Block] = []
    for process in dict.fromkeys(block.process for block in blocks):
        own = [block for block in blocks if block.process == process]
        medians = {party: statistics.median(block.of(party) for block in own) for party in own[0].parties}
        off = {id(block): max(block.of(party) / medians[party] for party in medians) for block in own}
        kept = sorted(own, key=lambda block: off[id(block)])[: len(own) - len(own) // 3]
        found += [block for block in own if block in kept or off[id(block)] <= UNSTEADY]
    return tuple(found)


def slowed(block: Block, party: str, times: float) -> Block:
    """``block`` with ``party``'s time taken ``times`` as long: what it saved by remembering answers."""
    return replace(block, ns=tuple((name, ns * times if name == party else ns) for name, ns in block.ns))


def quiet_blocks(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks that no foreign load disturbed; all of them where too few are left to say anything."""
    return tuple(blocks) if crowded(blocks) else tuple(block for block in blocks if block.foreign <= FOREIGN)


def crowded(blocks: Sequence[Block]) -> bool:
    """Did foreign load leave too few blocks alone? Under A/A such sittings called a kernel four times as fast as
    itself: threads that wait for each other crawl when one of them has lost its core."""
    quiet = sum(1 for block in blocks if block.foreign <= FOREIGN)
    return quiet < len(blocks) and quiet < max(4, len(blocks) // 3)


def sample_of(values: Sequence[float], blocks: int, calls: int = 1) -> Sample:
    """Median, 5th and 95th percentile of per-call times. ``calls`` is how many calls each value stands for."""
    ordered = sorted(values)
    return Sample(
        median_ns=statistics.median(ordered),
        low_ns=_quantile(ordered, 0.05),
        high_ns=_quantile(ordered, 0.95),
        samples=len(ordered) * calls,
        blocks=blocks,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def ratio_of(
    blocks: Sequence[Block],
    baseline: str,
    candidate: str = "candidate",
    *,
    seed: int = 0,
    placement_ns: float = 0.0,
) -> Ratio:
    """Speedup of the candidate over ``baseline`` with its 99 % interval. Raises ValueError without blocks.

    ``placement_ns``: how much (standard deviation, of a call) one process's time differs from another's of the same
    program, all through their lives. Two processes cannot show it, so it widens the interval. Baselines stay in one
    process; however many the candidate has, theirs is not averaged out.
    """
    if not blocks:
        raise ValueError("no blocks were measured")
    by_process: dict[int, list[float]] = {}
    for block in blocks:
        by_process.setdefault(block.process, []).append(math.log(block.of(baseline) / block.of(candidate)))
    groups = list(by_process.values())
    center = statistics.median([value for group in groups for value in group])
    low, high = _interval(groups, seed)
    processes = {baseline: 1 if baseline in IN_ONE_PROCESS else len(groups), candidate: len(groups)}
    shares = [
        placement_ns / statistics.median(block.of(party) for block in blocks) / math.sqrt(count)
        for party, count in processes.items()
    ]
    doubt = _QUANTILE * math.hypot(*shares)
    below, above = math.hypot(max(center - low, 0.0), doubt), math.hypot(max(high - center, 0.0), doubt)
    return Ratio(math.exp(center), math.exp(center - below), math.exp(center + above), CONFIDENCE)


def _interval(groups: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    generator = random.Random(seed)
    medians = []
    for _ in range(RESAMPLES):
        pooled: list[float] = []
        for group in generator.choices(groups, k=len(groups)):
            pooled += generator.choices(group, k=len(group))
        medians.append(statistics.median(pooled))
    medians.sort()
    tail = (1.0 - CONFIDENCE) / 2.0
    return _quantile(medians, tail), _quantile(medians, 1.0 - tail)


def combine(ratios: Sequence[Ratio]) -> Ratio:
    """Geometric mean over workloads; half-widths add in quadrature, since workloads are measured independently."""
    count = len(ratios)
    logs = [math.log(ratio.speedup) for ratio in ratios]
    below = math.sqrt(sum((math.log(r.speedup) - math.log(r.low)) ** 2 for r in ratios)) / count
    above = math.sqrt(sum((math.log(r.high) - math.log(r.speedup)) ** 2 for r in ratios)) / count
    center = sum(logs) / count
    return Ratio(math.exp(center), math.exp(center - below), math.exp(center + above), ratios[0].confidence)


def decide(ratio: Ratio) -> Decision:
    """ "faster" or "slower" where the whole interval says so, "same" where it lies within 2 % of 1."""
    if ratio.low > 1.0 + MARGIN:
        return "faster"
    if ratio.high < 1.0 - MARGIN:
        return "slower"
    if ratio.low > 1.0 - SAME_WITHIN and ratio.high < 1.0 + SAME_WITHIN:
        return "same"
    return "inconclusive"


def narrow_enough(ratio: Ratio) -> bool:
    """May measuring stop? Within 1 %, or within 4 % where the decision cannot change any more."""
    width = math.log(ratio.high / ratio.low) / 2.0
    if width < 0.01:
        return True
    far = min(abs(math.log(ratio.low)), abs(math.log(ratio.high))) > 2 * width
    return width < 0.04 and far and decide(ratio) in ("faster", "slower")


def clear_enough(ratio: Ratio) -> bool:
    """Would further processes tell nothing that matters? Decided and narrow, or alike within 0.3 %."""
    if decide(ratio) in ("faster", "slower"):
        return narrow_enough(ratio)
    return math.log(ratio.high / ratio.low) / 2.0 < _ALIKE


def disturbed(alone: Sample, inside: Sample) -> bool:
    """Was the baseline slower within the sitting than alone, beyond both spreads and 3 %?"""
    return inside.median_ns > alone.high_ns * (1.0 + DISTURBANCE) and inside.low_ns > alone.median_ns * (
        1.0 + DISTURBANCE
    )


def faster_baseline(medians_ns: Mapping[str, float]) -> str:
    """Which baseline the decision is against."""
    return min(medians_ns, key=lambda party: medians_ns[party])
