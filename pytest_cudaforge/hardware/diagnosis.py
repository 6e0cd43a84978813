"""What bounds a kernel, told from a profile's metrics. Pure.

Each bound is shown by two or three figures that stand in the profile as they are (ratios are reckoned when the profile
is made, see :mod:`hardware.derived`), so that whatever is cited can be looked up. Tests go from faults that hide
everything else (a grid of a few blocks, spilled registers) to what is left when there is none (a full memory bus).
Thresholds are those of Nsight Compute's own rules where it has one: 60 % of a unit's peak is "high", below it the
kernel waits rather than works. A pattern (scattered accesses, spills, bank conflicts, round trips) is a bound only by
what it costs: its share of a unit's work times how busy that unit is. A few bad accesses bound nothing.

A profiler empties the caches before each kernel. Where a call has several, what a kernel moves through device memory is
taken from inside the call (``in_call__...``), where what the kernel before it wrote may still be in the L2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_cudaforge.hardware.host_diagnosis import HOST_BOUNDS, host_findings
from pytest_cudaforge.records import HotLine, Profile, ProfiledKernel, Timing

__all__ = ["BOUNDS", "IN_CALL_BYTES", "Bound", "Diagnosis", "diagnose", "spared", "telling_metrics"]

Bound = Literal[
    "launch overhead",
    "tiny grid",
    "register spills",
    "shared memory bank conflicts",
    "uncoalesced access",
    "redundant global traffic",
    "compute",
    "memory bandwidth",
    "cache bandwidth",
    "math pipe",
    "small grid",
    "occupancy",
    "memory latency",
    "synchronization",
    "instruction latency",
    "unknown",
]

#: What each bound means, in words without a figure.
BOUNDS: Mapping[str, str] = {
    "launch overhead": "the kernel is so short that launching it costs as much as running it",
    "tiny grid": "the grid has too few blocks: most SMs stay idle",
    "register spills": "registers spill to local memory, and that traffic competes with the kernel's own",
    "shared memory bank conflicts": "threads of a warp hit the same banks of shared memory and are served in turn",
    "uncoalesced access": "a warp's accesses to global memory are spread over many sectors, of which little is used",
    "redundant global traffic": "the call moves far more bytes through device memory than its inputs and outputs have",
    "compute": "the SMs' own pipelines are busy with instructions, memory is not",
    "memory bandwidth": "device memory is busy: what counts is how many bytes are moved, and whether all are needed",
    "cache bandwidth": "caches or shared memory are busy, device memory is not",
    "math pipe": "warps wait for a pipe, such as that of the tensor cores, which other warps are using",
    "small grid": "all blocks are on the SMs at once and leave room for more: too few warps to hide latency",
    "occupancy": "too few warps fit on an SM to hide latency",
    "memory latency": "warps wait for loads from global memory, and no unit is busy",
    "synchronization": "warps wait for each other at barriers",
    "instruction latency": "warps wait for results of their own instructions, and no unit is busy",
    "unknown": "the metrics at hand show no bound",
}

Figure = tuple[str, float, str]

_HIGH, _SHARED_HIGH = 60.0, 40.0
#: A bound that the time must allow: below this a launch itself is what counts.
_SHORT_NS = 3000.0
#: Bytes moved by bytes needed from which on they are too many.
_REDUNDANT = 1.5
_LOW_OCCUPANCY = 40.0
#: In percent: what a pattern must cost of a unit's time to be the bound, and what is most of something.
_COSTLY, _HALF = 25.0, 50.0
#: A kernel that moves less of the call's bytes than this is not the one whose traffic is too much.
_PART = 0.15
#: In percent: a unit that is this busy hardly gains from more warps; a tensor pipe below it runs no tensor code (a
#: compiler makes constants there: HFMA2.MMA, 0.2 to 0.9 % of ordinary kernels on an H200).
_NEAR_FULL, TENSOR_USED = 70.0, 2.0
#: In percent of the call's time: a library's kernel from here on counts.
_LIBRARY_PART = 10.0
#: Of a thread, where their traffic was not measured.
_SPILLED_BYTES = 64.0
_LIMIT = "launch__occupancy_limit_{}"
_STALL = "smsp__warp_issue_stalled_{}_per_warp_active.pct"


@dataclass(frozen=True)
class Diagnosis:
    """One kernel's bound. ``figures`` stand in the profile (the kernel's metrics, or facts of the call) as they are.

    ``share``: of the call's time, where that is known. ``lines``: the source lines that show it, hottest first.
    ``host``: a kernel on a CPU, whose bounds are those of :mod:`.host_diagnosis`. ``own``: the candidate's; a library's
    can only be replaced, or fused with what is around it.
    """

    kernel: str
    bound: str
    figures: tuple[Figure, ...]
    share: float | None = None
    lines: tuple[HotLine, ...] = ()
    host: bool = False
    own: bool = True

    @property
    def explanation(self) -> str:
        words: dict[str, str] = {**BOUNDS, **(HOST_BOUNDS if self.host else {})}
        return words[self.bound]


def diagnose(profile: Profile) -> tuple[Diagnosis, ...]:
    """A diagnosis of each of the candidate's own kernels, and of a library's that take much of the time and were
    counted; those first in which most of the time goes."""
    total_ns = sum(kernel.duration_ns or 0.0 for kernel in profile.kernels)
    found = []
    for kernel in sorted(profile.kernels, key=lambda k: -(k.duration_ns or 0.0)):
        seen = _Seen(kernel, profile)
        host = seen.has("threads")
        share = kernel.duration_ns / total_ns if kernel.duration_ns is not None and total_ns else None
        if not kernel.own and (host or not kernel.metrics or 100.0 * (share or 0.0) < _LIBRARY_PART):
            continue
        bound, names = _host_bound(kernel, profile) if host else _bound(seen)
        lines = tuple(line for line in profile.lines if line.kernel == kernel.function) if kernel.own else ()
        found.append(
            Diagnosis(kernel.function, bound, seen.figures(names), share, _ordered(lines, bound), host, kernel.own)
        )
    return tuple(found)


def spared(profile: Profile | None, timing: Timing | None) -> tuple[Figure, Figure] | None:
    """Of a candidate that is faster than its roofline: the bytes that went through device memory and the more of them
    that the roofline counts, where those were counted and tell why."""
    lines = timing.workloads if timing is not None and profile is not None else ()
    below = any(line.roofline_ns and line.candidate.median_ns < line.roofline_ns for line in lines)
    facts = {figure[0]: figure for figure in (profile.facts if profile is not None else ())}
    moved, counted = facts.get(MOVED), facts.get("minimal_bytes")
    return (moved, counted) if below and moved and counted and moved[1] < counted[1] else None


def telling_metrics(kernel: ProfiledKernel) -> tuple[tuple[str, float, str], ...]:
    """Its metrics without those that mislead: instructions issued to the tensor pipe, which take it several cycles
    each, where its cycles were counted, and what of its use is not tensor code."""
    counted = {name for name, _, _ in kernel.metrics}
    return tuple(
        metric
        for metric in kernel.metrics
        if "pipe_tensor" not in metric[0]
        or (metric[1] >= TENSOR_USED and (metric[0] != TENSOR_ISSUED or TENSOR not in counted))
    )


def _host_bound(kernel: ProfiledKernel, profile: Profile) -> tuple[str, tuple[str, ...]]:
    """On a CPU: what counts most of all that holds."""
    found = host_findings(kernel, {name: value for name, value, _ in profile.facts})
    return (found[0].bound, found[0].figures) if found else ("unknown", ("time", "bandwidth_share"))


class _Seen:
    """Figures of one kernel by name; where it has none of that name, those of the call."""

    def __init__(self, kernel: ProfiledKernel, profile: Profile) -> None:
        self.kernel, self.profile = kernel, profile
        self._figures: dict[str, Figure] = {figure[0]: figure for figure in (*profile.facts, *kernel.metrics)}

    def get(self, name: str, default: float = 0.0) -> float:
        found = self._figures.get(name)
        return found[1] if found is not None else default

    def has(self, name: str) -> bool:
        return name in self._figures

    def figures(self, names: Sequence[str]) -> tuple[Figure, ...]:
        return tuple(self._figures[name] for name in names if name in self._figures)

    @property
    def dram(self) -> str:
        """The figure that tells how busy device memory is, in percent: inside the call, where that was counted."""
        return IN_CALL_DRAM if self.has(IN_CALL_DRAM) else DRAM

    @property
    def memory_busy(self) -> float:
        """How near the busiest part of the memory system is to its peak, in percent."""
        return max(self.get(self.dram), self.get(L1), self.get(L2))

    @property
    def moved(self) -> float:
        """Bytes of the kernel's launch through device memory, inside the call where that was counted."""
        return self.get(IN_CALL_BYTES, self.get(READ) + self.get(WRITTEN))

    def stall(self, *reasons: str) -> float:
        return sum(self.get(_STALL.format(reason)) for reason in reasons)

    def longest_stall(self) -> str:
        """The reason for which warps wait longest; "" where none is known."""
        prefix, suffix = _STALL.split("{}")
        waits = {
            name[len(prefix) : -len(suffix)]: figure[1]
            for name, figure in self._figures.items()
            if name.startswith(prefix) and name.endswith(suffix)
        }
        for working in ("selected", "not_selected"):
            waits.pop(working, None)
        return max(waits, key=lambda reason: waits[reason], default="")


DRAM = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
SM = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
L1 = "l1tex__throughput.avg.pct_of_peak_sustained_active"
L2 = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
THEORETICAL = "sm__maximum_warps_per_active_cycle_pct"
WAVES = "launch__waves_per_multiprocessor"
GRID = "launch__grid_size"
SM_COUNT = "device__attribute_multiprocessor_count"
DURATION = "gpu__time_duration.sum"
IN_CALL_BYTES, IN_CALL_DRAM = "in_call__dram_bytes", "in_call__dram_share_of_ceiling"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
TENSOR_ISSUED = "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"
FMA = "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active"
SPILLED = "static__spill_bytes_per_thread"
LOCAL_SHARE = "derived__local_sectors_share"
CONFLICTS = "derived__shared_conflict_cycles_share"
EXCESS = "derived__global_excess_sectors_share"
LOADS, STORES = "derived__global_load_sectors_per_request", "derived__global_store_sectors_per_request"
READ, WRITTEN, MOVED = "dram__bytes_read.sum", "dram__bytes_write.sum", "dram_bytes"
REDUNDANCY = "derived__dram_bytes_by_minimal"
PLANNED = "derived__plan_bytes_by_minimal"
ISSUE = "smsp__issue_active.avg.per_cycle_active"


def _bound(seen: _Seen) -> tuple[Bound, tuple[str, ...]]:
    """The first bound whose test holds, and the names of the figures that show it."""
    for test in _TESTS:
        found = test(seen)
        if found is not None:
            return found
    return "unknown", (DURATION, "speed_of_light", "arithmetic_intensity")


def _tiny_grid(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    blocks = seen.get(GRID)
    few = bool(blocks) and blocks < seen.get(SM_COUNT) / 2
    if few and seen.get(DURATION, _SHORT_NS) >= _SHORT_NS:
        return "tiny grid", (GRID, SM_COUNT, WAVES)
    return None


def _launch(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    if seen.has(DURATION) and seen.get(DURATION) < _SHORT_NS:
        return "launch overhead", (DURATION, "launches", GRID)
    return None


def _spills(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    # A few spilled bytes outside of loops cost nothing: it is their traffic that counts, where it was measured.
    if seen.has(LOCAL_SHARE):
        costly = seen.get(LOCAL_SHARE) * seen.memory_busy / 100.0 >= _COSTLY or (
            seen.get(LOCAL_SHARE) >= _HALF and seen.stall("lg_throttle", "long_scoreboard") >= _HALF
        )
    else:
        costly = seen.get(SPILLED) >= _SPILLED_BYTES
    if seen.get(SPILLED) and costly:
        return "register spills", (SPILLED, LOCAL_SHARE, "launch__registers_per_thread")
    return None


def _conflicts(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    if seen.get(CONFLICTS) < _COSTLY:
        return None
    stall = max(("short_scoreboard", "mio_throttle"), key=lambda reason: seen.stall(reason))
    return "shared memory bank conflicts", (CONFLICTS, _STALL.format(stall), L1)


def _uncoalesced(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    excess = seen.get(EXCESS)
    waiting = seen.stall("long_scoreboard", "lg_throttle", "drain") >= _HALF
    if excess * seen.memory_busy / 100.0 < _COSTLY and not (excess >= _HALF and waiting):
        return None
    worse = LOADS if seen.get(LOADS) >= seen.get(STORES) else STORES
    return "uncoalesced access", (EXCESS, worse, max((L1, L2, seen.dram), key=seen.get))


def _redundant(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    # From empty caches every byte is the memory's; inside the call the L2 is busy with what it keeps, too.
    busy = seen.get(IN_CALL_DRAM) if seen.has(IN_CALL_DRAM) else max(seen.get(DRAM), seen.get(L2))
    mine = seen.moved >= _PART * seen.get(MOVED) and not _emptied(seen)
    if seen.get(REDUNDANCY) >= _REDUNDANT and mine and busy >= max(seen.get(SM), _SHARED_HIGH):
        return "redundant global traffic", (REDUNDANCY, seen.dram, "minimal_bytes")
    # Where nothing was counted, the plan tells of buffers between its kernels (on a CPU caches take them).
    if not seen.has(DRAM) and seen.has(GRID) and seen.get(PLANNED) >= _REDUNDANT and seen.get("scratch_bytes"):
        return "redundant global traffic", (PLANNED, "scratch_bytes", "minimal_bytes")
    return None


def _emptied(seen: _Seen) -> bool:
    """May the kernel's bytes be there only because the profiler emptied the caches before it? It was not looked at
    inside its call, and what it moves would fit the L2 that the kernels before it left."""
    alone = not seen.has(IN_CALL_BYTES) and len(seen.profile.kernels) > 1
    return alone and 0.0 < seen.moved <= seen.get("l2_bytes")


def _full(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    """A unit near its peak: arithmetic, device memory or a cache, whichever is nearest."""
    arithmetic, cache = seen.get(SM), max(seen.get(L1), seen.get(L2))
    memory = 0.0 if _emptied(seen) else seen.get(seen.dram)
    if max(memory, arithmetic, cache) < (_NEAR_FULL if _roomy(seen) else _HIGH):
        return None
    if arithmetic >= max(memory, cache):
        return "compute", (SM, seen.dram, _busy_pipe(seen) or ISSUE)
    nearer = L1 if seen.get(L1) > seen.get(L2) else L2
    # A large cache takes some of the writes that device memory would have to.
    if memory >= _HIGH or (nearer == L2 and memory >= _SHARED_HIGH):
        return "memory bandwidth", (seen.dram, L2 if seen.get(L2) > memory else SM, REDUNDANCY)
    return "cache bandwidth", (nearer, SM) if _emptied(seen) else (nearer, seen.dram, SM)


def _roomy(seen: _Seen) -> bool:
    """Are all blocks resident at once, with few warps? Then no resource of an SM keeps more of them away."""
    return seen.has(OCCUPANCY) and seen.get(OCCUPANCY) < _LOW_OCCUPANCY and 0.0 < seen.get(WAVES) <= 1.0


def _busy_pipe(seen: _Seen) -> str:
    """The arithmetic pipe that is used most, "" where none is known to be used."""
    tensor = TENSOR if seen.has(TENSOR) else TENSOR_ISSUED
    used = [name for name, least in ((tensor, TENSOR_USED), (FMA, 0.0)) if seen.get(name) > least]
    return max(used, key=seen.get, default="")


def _pipe(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    """More warps would only wait longer for it."""
    longest = seen.longest_stall()
    if longest not in ("math_pipe_throttle", "gmma"):
        return None
    return "math pipe", (_STALL.format(longest), _busy_pipe(seen) or ISSUE, SM)


def _occupancy(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    if _roomy(seen):
        return "small grid", (WAVES, GRID, OCCUPANCY)
    if seen.has(OCCUPANCY) and seen.get(OCCUPANCY) < _LOW_OCCUPANCY and seen.get(THEORETICAL, 100.0) <= 50.0:
        return "occupancy", (OCCUPANCY, THEORETICAL, _tightest(seen))
    return None


def _tightest(seen: _Seen) -> str:
    """Which of an SM's resources fits fewest blocks."""
    limits = [name for name in map(_LIMIT.format, ("registers", "shared_mem", "warps", "blocks")) if seen.has(name)]
    return min(limits, key=seen.get, default="launch__registers_per_thread")


def _latency(seen: _Seen) -> tuple[Bound, tuple[str, ...]] | None:
    longest = seen.longest_stall()
    if not longest:
        return None
    name = _STALL.format(longest)
    if longest in ("long_scoreboard", "lg_throttle", "drain", "tex_throttle", "membar"):
        return "memory latency", (name, seen.dram, OCCUPANCY)
    if longest in ("barrier", "warpgroup_arrive"):
        return "synchronization", (name, OCCUPANCY, ISSUE)
    return "instruction latency", (name, ISSUE, SM)


_TESTS: tuple[Callable[[_Seen], tuple[Bound, tuple[str, ...]] | None], ...] = (
    _tiny_grid,
    _launch,
    _spills,
    _conflicts,
    _uncoalesced,
    _redundant,
    _full,
    _pipe,
    _occupancy,
    _latency,
)

#: Figures of a line that show a bound, by Nsight Compute's column; lines are ordered by the first that any line has.
_LINE_FIGURES: Mapping[str, tuple[str, ...]] = {
    "register spills": ("L2 Theoretical Sectors Local", "stall_lg"),
    "shared memory bank conflicts": ("L1 Wavefronts Shared Excessive",),
    "uncoalesced access": ("L2 Theoretical Sectors Global Excessive",),
    "redundant global traffic": ("L2 Theoretical Sectors Global", "stall_long_sb"),
    "memory bandwidth": ("L2 Theoretical Sectors Global", "stall_long_sb"),
    "memory latency": ("stall_long_sb",),
    "math pipe": ("stall_math", "stall_gmma"),
    "synchronization": ("stall_barrier",),
}


def _ordered(lines: tuple[HotLine, ...], bound: str) -> tuple[HotLine, ...]:
    for name in _LINE_FIGURES.get(bound, ()):
        marked = [line for line in lines if _of(line, name) > 0]
        if marked:
            rest = [line for line in lines if line not in marked]
            return (*sorted(marked, key=lambda line: -_of(line, name)), *rest)
    return lines


def _of(line: HotLine, name: str) -> float:
    return next((value for figure, value, _ in line.figures if figure == name), 0.0)
