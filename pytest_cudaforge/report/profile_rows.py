"""What profiles say, as rows: time by kernel, metrics before and after, hot lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_cudaforge.hardware.diagnosis import Diagnosis, diagnose, spared, telling_metrics
from pytest_cudaforge.records import Evaluation, HotLine, Profile, ProfiledKernel, RuleFinding, Trace
from pytest_cudaforge.report import amounts
from pytest_cudaforge.report.standings import judged_round

__all__ = [
    "RUNGS",
    "SHOWN_METRICS",
    "KernelRow",
    "MetricRow",
    "Profiles",
    "beyond_roofline",
    "bounds",
    "further_rules",
    "kernel_rows",
    "longest_own",
    "metric_rows",
    "place_of",
    "profiles",
]

#: How many metrics stand open in a report; Nsight Compute knows some seventy of a kernel.
SHOWN_METRICS = 14
#: What each rung of the ladder of profiles rests on.
RUNGS = {
    "ncu": "hardware counters of the GPU (Nsight Compute)",
    "cupti": "kernel times (CUPTI), without hardware counters",
    "counters": "hardware counters of the CPU (perf)",
    "static": "no hardware counters: binary and roofline, and times where they could be taken",
}


@dataclass(frozen=True)
class Profiles:
    """The first and the last candidate that were looked at; ``before`` is None where they are the same one."""

    after: Profile
    after_name: str
    before: Profile | None = None
    before_name: str = ""


@dataclass(frozen=True)
class KernelRow:
    """One kernel's part of a call. ``share``: of the time of all kernels (0 to 1); None where no time was seen."""

    function: str
    own: bool
    launches: int
    duration_ns: float | None
    share: float | None
    shape: str


@dataclass(frozen=True)
class MetricRow:
    """One figure of the longest own kernel, or of the whole call; None where a profile does not have it."""

    name: str
    unit: str
    before: float | None
    after: float | None


def profiles(trace: Trace) -> Profiles | None:
    """What was profiled of a target's candidates; None where nothing was."""
    seen = [
        (f"round {entry.number}", _profile(entry.evaluation)) for entry in trace.rounds if _passed(entry.evaluation)
    ]
    judged = judged_round(trace)
    if _profile(trace.final) is not None:
        seen.append((f"round {judged.number}" if judged is not None else "the winner", _profile(trace.final)))
    elif judged is not None and _profile(judged.evaluation) is not None:
        seen.append((f"round {judged.number}", _profile(judged.evaluation)))
    found = [(name, profile) for name, profile in seen if profile is not None]
    if not found:
        return None
    (first_name, first), (last_name, last) = found[0], found[-1]
    if first.candidate == last.candidate:
        return Profiles(last, last_name)
    return Profiles(last, last_name, first, first_name)


def _profile(verdict: Evaluation | None) -> Profile | None:
    return verdict.profile if verdict is not None else None


def _passed(verdict: Evaluation | None) -> bool:
    return verdict is not None and verdict.passed


def beyond_roofline(final: Evaluation) -> str:
    """Why a candidate may be faster than its roofline, in words; "" where nothing of it is known."""
    less = spared(final.profile, final.timing)
    if less is None:
        return ""
    moved, counted = (amounts.quantity(value, unit) for _, value, unit in less)
    return (
        f"Of the {counted} that the roofline counts, {moved} went through device memory: the rest was not touched, or "
        "stayed in a cache."
    )


def place_of(line: HotLine, lines: Sequence[HotLine]) -> str:
    """``kernel.cu:12``, with its kernel where lines of several are shown."""
    place = f"{line.file}:{line.line}"
    return place if len({one.kernel for one in lines}) < 2 else f"{line.kernel}, {place}"


def kernel_rows(profile: Profile) -> tuple[KernelRow, ...]:
    """The longest first."""
    whole_ns = sum(kernel.duration_ns or 0.0 for kernel in profile.kernels)
    ordered = sorted(profile.kernels, key=lambda kernel: -(kernel.duration_ns or 0.0))
    return tuple(
        KernelRow(
            kernel.function,
            kernel.own,
            kernel.launches,
            kernel.duration_ns,
            kernel.duration_ns / whole_ns if kernel.duration_ns is not None and whole_ns else None,
            _shape(kernel),
        )
        for kernel in ordered
    )


def _shape(kernel: ProfiledKernel) -> str:
    """``grid 128×1×1, block 256``; trailing ones say nothing."""
    sides = [(name, list(extent)) for name, extent in (("grid", kernel.grid), ("block", kernel.block)) if extent]
    for _, extent in sides:
        while len(extent) > 1 and extent[-1] == 1:
            extent.pop()
    return ", ".join(f"{name} {'×'.join(map(str, extent))}" for name, extent in sides)


def bounds(profile: Profile) -> tuple[tuple[Diagnosis, float | None], ...]:
    """What bounds each own kernel, and a library's that takes much of the time, with the profiler's estimate of the
    gain in percent where a rule of that name has one."""
    gains = {(rule.kernel, rule.rule): rule.speedup_percent for rule in profile.rules}
    found = (one for one in diagnose(profile) if one.bound != "unknown")
    return tuple((one, gains.get((one.kernel, one.bound))) for one in found)


def further_rules(profile: Profile) -> tuple[RuleFinding, ...]:
    """The rules that say more than :func:`bounds`: on a CPU rules are called like bounds."""
    said = {(found.kernel, found.bound) for found, _ in bounds(profile)}
    return tuple(rule for rule in profile.rules if (rule.kernel, rule.rule) not in said)


def longest_own(profile: Profile) -> ProfiledKernel | None:
    """The own kernel that takes longest: the first one where no time was seen."""
    return max(
        (kernel for kernel in profile.kernels if kernel.own), key=lambda one: one.duration_ns or 0.0, default=None
    )


def metric_rows(found: Profiles) -> tuple[MetricRow, ...]:
    """Facts of the call and metrics of the longest own kernel: first those that show its bound, then those that changed
    most, then the others in the profiler's order."""
    before, after = _figures(found.before), _figures(found.after)
    lines = [
        MetricRow(name, unit, before.get((name, unit)), after.get((name, unit))) for name, unit in {**after, **before}
    ]
    cited = [name for profile in (found.after, found.before) if profile for name in _cited(profile)]
    return tuple(sorted(lines, key=lambda line: (_place(line.name, cited), -_change(line))))


def _cited(profile: Profile) -> list[str]:
    return [name for kernel in diagnose(profile) for name, _, _ in kernel.figures if kernel.bound != "unknown"]


def _place(name: str, cited: Sequence[str]) -> int:
    return cited.index(name) if name in cited else len(cited)


def _change(line: MetricRow) -> float:
    """How far the figures lie apart, in powers of e; 0 where there is nothing to compare."""
    if line.before is None or line.after is None or line.before == line.after:
        return 0.0
    if line.before <= 0 or line.after <= 0:
        return 10.0 if (line.before == 0) != (line.after == 0) else 0.0
    return abs(math.log(line.after / line.before))


def _figures(profile: Profile | None) -> dict[tuple[str, str], float]:
    if profile is None:
        return {}
    kernel = longest_own(profile)
    figures = (*profile.facts, *(telling_metrics(kernel) if kernel is not None else ()))
    return {(name, unit): value for name, value, unit in figures}
