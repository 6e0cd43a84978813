"""What bounds a kernel on a CPU, told from a profile's figures, and what mending it may bring. Pure.

The counterpart of Nsight Compute's rules: each names the figures that show it and an estimate (how much of the kernel's
time goes if only that fault is mended). Faults that hide all others come first: a single thread, waiting threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pytest_cudaforge.records import ProfiledKernel, RuleFinding

__all__ = ["HOST_BOUNDS", "IMPOSSIBLE_PERCENT", "HostFinding", "host_findings", "host_rules"]

#: What each bound means, in words without a figure.
HOST_BOUNDS: Mapping[str, str] = {
    "one thread": "one core does the work while the others are idle",
    "waiting threads": "threads wait for each other: uneven shares, or regions so short that starting them counts",
    "page faults": "the kernel touches memory fresh from the system at every call",
    "call overhead": "the call is so short that getting to the kernel costs as much as running it",
    "strided access": "neighbouring iterations touch distant memory: most of each cache line goes unused",
    "library calls": "the time goes into scalar functions of the mathematical library, one element a call",
    "scalar code": "the loop that takes the time runs one element at a time: g++ did not vectorize it",
    "branches": "branches are mispredicted so often that the core mostly discards what it began",
    "compute": "the arithmetic units are busy",
    "redundant traffic": "the call's kernels move far more bytes than its inputs and outputs have",
    "memory bandwidth": "memory is busy moving bytes that have to be moved",
    "memory latency": "the cores wait for caches and memory, neither of which is busy",
    "instruction latency": "the cores wait for results of their own instructions",
    "latency": "no unit is near its peak: the cores wait for caches, memory or their own results, and without hardware "
    "counters nobody can tell for which",
}

_SHORT_NS = 3000.0
_HIGH = 60.0
_REDUNDANT = 1.5
#: So much of the bandwidth is more than a ceiling measured too low explains.
IMPOSSIBLE_PERCENT = 200.0
#: The same of all that a plan's steps could touch, which caches may serve many times faster than memory.
_SHARED_OUT_PERCENT = 1000.0
#: A share of the samples that is most of the kernel.
_MOST = 40.0
_WAITING = 25.0
#: Less than this of the work on other threads is none.
_ALONE = 5.0

Figures = Mapping[str, float]


@dataclass(frozen=True)
class HostFinding:
    """``figures``: names of those that show it. ``gain_percent``: of the kernel's time, None where nobody can tell."""

    bound: str
    figures: tuple[str, ...]
    gain_percent: float | None = None


def host_findings(kernel: ProfiledKernel, facts: Figures) -> tuple[HostFinding, ...]:
    """Everything that holds for this kernel, what counts most first. ``facts`` are the whole call's."""
    seen = {**facts, **{name: value for name, value, _ in kernel.metrics}}
    found = [finding for test in _TESTS if (finding := test(seen)) is not None]
    return tuple(found) or tuple(filter(None, (_latency(seen),)))


def host_rules(kernel: ProfiledKernel, facts: Figures) -> tuple[RuleFinding, ...]:
    """:func:`host_findings` as a profiler's rules, with their figures in words."""
    units = {name: unit for name, _, unit in kernel.metrics}
    seen = {**facts, **{name: value for name, value, _ in kernel.metrics}}
    rules = []
    for finding in host_findings(kernel, facts):
        shown = [f"{name} {seen[name]:.4g} {units.get(name, '')}".strip() for name in finding.figures if name in seen]
        text = f"{HOST_BOUNDS[finding.bound]} ({', '.join(shown)})"
        rules.append(RuleFinding(kernel.function, finding.bound, text, finding.gain_percent))
    return tuple(rules)


def _one_thread(seen: Figures) -> HostFinding | None:
    threads = seen.get("threads", 1.0)
    if threads < 2 or seen.get("work_on_other_threads", 100.0) >= _ALONE or _short(seen):
        return None
    figures = ("work_on_other_threads", "threads", "thread_speedup")
    return HostFinding("one thread", figures, 100.0 * (1.0 - 1.0 / threads))


def _waiting(seen: Figures) -> HostFinding | None:
    # Threads that wait spin in OpenMP's runtime, or sleep and so take less of the cores than others.
    uneven = 100.0 * (1.0 - 1.0 / max(1.0, seen.get("thread_imbalance", 1.0)))
    # Where others use the cores, a thread spins for one that was not let run.
    spinning = seen.get("time_in_openmp_runtime", 0.0) if "foreign_load" not in seen else 0.0
    if max(uneven, spinning) < _WAITING or seen.get("work_on_other_threads", 100.0) < _ALONE:
        return None
    figures = ("time_in_openmp_runtime", "thread_imbalance", "thread_speedup")
    return HostFinding("waiting threads", figures, max(uneven, spinning))


def _faults(seen: Figures) -> HostFinding | None:
    # One fault costs about half a microsecond, and the kernel clears the page.
    cost = 100.0 * seen.get("page_faults_per_call", 0.0) * 700.0 / max(seen.get("time", 0.0), 1.0)
    if cost < 10.0:
        return None
    return HostFinding("page faults", ("page_faults_per_call", "time"), min(cost, 90.0))


def _short(seen: Figures) -> HostFinding | None:
    if seen.get("time_per_launch", _SHORT_NS) >= _SHORT_NS:
        return None
    return HostFinding("call overhead", ("time_per_launch", "time", "launches"))


def _strided(seen: Figures) -> HostFinding | None:
    if seen.get("strided_loops_share", 0.0) < _MOST and seen.get("element_moves_share", 0.0) < _WAITING:
        return None
    figures = ("strided_loops_share", "element_moves_share", "bandwidth_share", "cache_miss_rate")
    return HostFinding("strided access", figures, _room(seen))


def _library(seen: Figures) -> HostFinding | None:
    share = seen.get("time_in_libm", 0.0)
    if share < _WAITING:
        return None
    # Vectors of eight do in one step what eight calls do.
    return HostFinding("library calls", ("time_in_libm", "scalar_loops_share"), share * 0.75)


def _scalar(seen: Figures) -> HostFinding | None:
    share = seen.get("scalar_loops_share", 0.0)
    if share < _MOST or _memory(seen) >= _HIGH:
        return None
    return HostFinding("scalar code", ("scalar_loops_share", "bandwidth_share", "instructions_per_cycle"), share * 0.5)


def _branches(seen: Figures) -> HostFinding | None:
    if seen.get("branch_miss_rate", 0.0) < 5.0:
        return None
    return HostFinding("branches", ("branch_miss_rate", "instructions_per_cycle"))


def _full(seen: Figures) -> HostFinding | None:
    """A unit near its peak, whichever is nearest."""
    memory, arithmetic = _memory(seen), seen.get("peak_share", 0.0)
    if max(memory, arithmetic) < _HIGH:
        return None
    if arithmetic > memory:
        return HostFinding("compute", ("peak_share", "bandwidth_share"), max(0.0, 100.0 - arithmetic))
    if _redundancy(seen) >= _REDUNDANT:
        return None
    return HostFinding("memory bandwidth", ("bandwidth_share", "minimal_bytes"), max(0.0, 100.0 - memory))


def _redundant(seen: Figures) -> HostFinding | None:
    redundancy = _redundancy(seen)
    if redundancy < _REDUNDANT or _planned(seen) > _SHARED_OUT_PERCENT:
        return None
    busy = _memory(seen) >= _HIGH
    gain = 100.0 * (1.0 - 1.0 / redundancy) if busy else None
    return HostFinding("redundant traffic", ("plan_bytes", "minimal_bytes", "bandwidth_share"), gain)


def _redundancy(seen: Figures) -> float:
    """Bytes that the plan's steps move by bytes that the call has to."""
    return seen.get("plan_bytes", 0.0) / max(1.0, seen.get("minimal_bytes", 0.0))


def _planned(seen: Figures) -> float:
    """How busy memory would be if each step touched each of its buffers, in percent: beyond what is possible, steps
    share out buffers among themselves, and nobody knows what they move."""
    possible = seen.get("bandwidth_ceiling", 0.0) * seen.get("time_per_call", 0.0) / 1e9
    return 100.0 * seen.get("plan_bytes", 0.0) / possible if possible else 0.0


def _latency(seen: Figures) -> HostFinding | None:
    cycles = seen.get("instructions_per_cycle")
    if cycles is None:
        return HostFinding("latency", ("bandwidth_share", "peak_share", "thread_speedup")) if _idle(seen) else None
    if cycles >= 1.0:
        return None
    if seen.get("cache_miss_rate", 0.0) >= 20.0:
        return HostFinding("memory latency", ("instructions_per_cycle", "cache_miss_rate", "bandwidth_share"))
    return HostFinding("instruction latency", ("instructions_per_cycle", "cache_miss_rate"))


def _idle(seen: Figures) -> bool:
    """Whether no unit is near its peak, as far as ceilings are known."""
    return 0.0 < _memory(seen) < _HIGH and seen.get("peak_share", 0.0) < _HIGH


def _room(seen: Figures) -> float | None:
    """What is left below the bandwidth, where it is known."""
    return max(0.0, 100.0 - _memory(seen)) if "bandwidth_share" in seen else None


def _memory(seen: Figures) -> float:
    """How busy memory is, in percent of its bandwidth; 0 where the kernel cannot have touched all of its buffers."""
    share = seen.get("bandwidth_share", 0.0)
    return share if share <= IMPOSSIBLE_PERCENT else 0.0


_TESTS: tuple[Callable[[Figures], HostFinding | None], ...] = (
    _one_thread,
    _waiting,
    _faults,
    _short,
    _strided,
    _library,
    _scalar,
    _branches,
    _full,
    _redundant,
)
