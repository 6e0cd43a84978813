"""Which targets are worth a forge job, and how they are spread over runners. Pure: no file, no clock, no process.

A target is worth one where it has no kernel for a runner's device (*new*), where its kernel is one that production no
longer uses (*stale*), or where that kernel gains less than is wanted over the faster baseline (*thin*). What only
importing the target tells (a workload of another shape, say) is not told here: the cases of plain ``pytest`` do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cudaforge_action.inputs import Runner
from cudaforge_action.records import Shard
from pytest_cudaforge.measurements import REFERENCES, GuardRun, Measurement
from pytest_cudaforge.records import Target, to_json
from pytest_cudaforge.runtime.manifest import Entry

__all__ = ["MATRIX_CHARS", "Known", "Reason", "Work", "matrix", "select", "shards"]

Reason = Literal["stale", "new", "thin"]

#: "A matrix will generate a maximum of 256 jobs per workflow run":
#: https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax
_MOST_JOBS: Final = 256
#: A job's outputs are "a maximum of 1 MB", reckoned in UTF-16; the rest of it is the other outputs'.
#: https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax#jobsjob_idoutputs
MATRIX_CHARS: Final = 400_000
#: A shard reaches its job in one environment variable, which Linux cuts off at 128 KiB (MAX_ARG_STRLEN).
_SHARD_BYTES: Final = 100_000
_ORDER: Final[Mapping[Reason, int]] = {"stale": 0, "new": 1, "thin": 2}


@dataclass(frozen=True)
class Known:
    """A kernel that lies somewhere already. ``where``: "forged/manifest.json", or a branch. ``damage``: why its files
    are not those that were verified, "" where they are. ``digest``: of its sources, "" where it is not known.
    ``proposed``: it lies on the branch of the open pull request, not here."""

    entry: Entry
    where: str = ""
    damage: str = ""
    digest: str = ""
    proposed: bool = False


@dataclass(frozen=True)
class Work:
    """A target that is worth a job on one kind of runner. ``weight``: what it may take beside others, without unit.
    ``speedup``: of the kernel that it has, over the faster baseline, where that is why."""

    target: str
    runner: Runner
    reason: Reason
    why: str
    weight: float = 1.0
    speedup: float | None = None


# -- which targets ----------------------------------------------------------------------------------------------


def select(
    targets: Sequence[Target],
    kernels: Sequence[Known],
    runners: Sequence[Runner],
    *,
    min_headroom: float = 1.1,
    measured: Sequence[Measurement] = (),
) -> tuple[Work, ...]:
    """The targets that are worth a job on each of the runners; most useful first: stale, new, thin (the least gain
    first). ``measured``: the guard's history, oldest first, which knows today's speedups and the runners' torch."""
    by_target: dict[str, list[Known]] = {}
    for kernel in kernels:
        by_target.setdefault(kernel.entry.target, []).append(kernel)
    past = _Past.of(measured)
    found = [
        work
        for runner in dict.fromkeys(runners)
        for target in targets
        if (work := _judged(target, by_target.get(target.id, ()), runner, min_headroom, past)) is not None
    ]
    places = {runner: place for place, runner in enumerate(runners)}
    found.sort(key=lambda work: (_ORDER[work.reason], work.speedup or 0.0, work.target, places[work.runner]))
    return tuple(found)


@dataclass(frozen=True)
class _Past:
    """What the guard measured, by target, and its last run on each arch."""

    by_target: Mapping[str, Sequence[Measurement]]
    runs: Mapping[str, GuardRun]

    @classmethod
    def of(cls, measured: Sequence[Measurement]) -> _Past:
        by_target: dict[str, list[Measurement]] = {}
        for one in measured:
            by_target.setdefault(one.target, []).append(one)
        return cls(by_target, {one.run.machine.arch: one.run for one in measured})


def _judged(target: Target, kernels: Sequence[Known], runner: Runner, least: float, past: _Past) -> Work | None:
    own = [kernel for kernel in kernels if _serves(kernel.entry.arch, runner)]
    weight = 1.0 + 0.5 * max((len(kernel.entry.workloads) - 1 for kernel in kernels), default=0)
    if not own:
        others = ", ".join(sorted({kernel.entry.arch for kernel in kernels}))
        why = f"it has a kernel for {others} only" if others else "it has no kernel yet"
        return Work(target.id, runner, "new", why, weight)
    faults = [(kernel, _fault(kernel, target, past)) for kernel in own]
    valid = [kernel for kernel, fault in faults if not fault]
    if any(kernel.proposed for kernel in valid):
        return None
    if not valid:
        # What lies here tells more than what some branch proposed once.
        return Work(target.id, runner, "stale", min(faults, key=lambda fault: fault[0].proposed)[1], weight)
    gains = [gain for kernel in valid if (gain := _gain(kernel, past)) is not None]
    if not gains or max(gains)[0] >= least:
        return None
    speedup, source = max(gains)
    why = f"{speedup:.2f}x over the faster baseline ({source}), less than {least:g}x"
    return Work(target.id, runner, "thin", why, weight, speedup)


def _serves(arch: str, runner: Runner) -> bool:
    if runner.arch:
        return arch == runner.arch
    return not runner.device or (arch == "cpu") == (runner.device == "cpu")


def _fault(kernel: Known, target: Target, past: _Past) -> str:
    """Why production or the guard would not use the kernel, as far as files tell; "" where nothing speaks against."""
    entry = kernel.entry
    if entry.source_digest != target.digest:
        return "its source has changed since its kernel was verified"
    if kernel.damage:
        return kernel.damage
    run = past.runs.get(entry.arch)
    torch = run.machine.toolchain.torch if run is not None else ""
    if run is not None and torch and entry.torch and _major(torch) != _major(entry.torch):
        return f"its kernel was verified with torch {entry.torch}, the runners have {torch} (measured {run.time[:10]})"
    return ""


def _major(version: str) -> str:
    return version.partition(".")[0]


def _gain(kernel: Known, past: _Past) -> tuple[float, str] | None:
    """Speedup over the faster baseline, and who measured it: the guard's last look at this very kernel, else what was
    promised when it was published. None where nothing was timed."""
    entry = kernel.entry
    runs = [one for one in past.by_target.get(entry.target, ()) if _is_of(one, kernel)]
    if runs:
        last = [one for one in runs if one.run.id == runs[-1].run.id]
        gain = _mean(_smallest(*(_speedup(one, reference) for reference in REFERENCES)) for one in last)
        if gain is not None:
            return gain, f"measured {last[-1].run.time[:10]}"
    gain = _mean(_smallest(one.speedup_eager, one.speedup_compile) for one in entry.workloads)
    return (gain, "when it was verified") if gain is not None else None


def _is_of(one: Measurement, kernel: Known) -> bool:
    said = (one.language, one.run.machine.arch, one.kernel)
    if said != (kernel.entry.language, kernel.entry.arch, kernel.digest):
        return False
    return one.what == "forward" and not one.disturbed


def _speedup(one: Measurement, reference: str) -> float | None:
    ratio = one.speedup(reference)
    return ratio.speedup if ratio is not None else None


def _smallest(*speedups: float | None) -> float | None:
    return min((speedup for speedup in speedups if speedup is not None), default=None)


def _mean(speedups: Iterable[float | None]) -> float | None:
    known = [speedup for speedup in speedups if speedup is not None and speedup > 0]
    return math.exp(sum(math.log(speedup) for speedup in known) / len(known)) if known else None


# -- how they are spread ------------------------------------------------------------------------------------------


def shards(work: Sequence[Work], runners: Sequence[Runner], max_shards: int) -> tuple[Shard, ...]:
    """The jobs: each target on its kind of runner, the longest first onto the least loaded.

    At most ``max_shards`` and 256, at most :attr:`Runner.shards` of a kind, all of them together short enough for a
    job's outputs. What does not fit is in none of them: the least useful targets, which the next run finds again.
    """
    by_runner = {runner: [one for one in work if one.runner == runner] for runner in dict.fromkeys(runners)}
    counts = _counts(by_runner, min(max_shards, _MOST_JOBS))
    room = MATRIX_CHARS - 400 * sum(counts.values())
    fitting: list[Work] = []
    for one in work:
        # Twice escaped: as JSON within a string of the matrix's own JSON.
        room -= len(json.dumps(json.dumps(one.target))) + 4
        if room > 0 and counts.get(one.runner):
            fitting.append(one)
    made: list[Shard] = []
    for runner, count in counts.items():
        own = [one for one in fitting if one.runner == runner]
        for bin_ in _bins(own, count):
            label = re.sub(r"[^A-Za-z0-9_]+", "_", runner.arch or runner.device or "any")[:40]
            name = f"{len(made) + 1:0{3 if sum(counts.values()) > 99 else 2}d}-{label}"
            made.append(_shard(name, runner, bin_))
    return tuple(made)


def matrix(made: Sequence[Shard]) -> str:
    """The value of ``strategy.matrix`` as JSON. Of no shards it is one without rows, which a job must not be given:
    GitHub calls an empty matrix an error, so the workflow asks first whether there are any."""
    rows = [{"shard": json.dumps(to_json(shard)), "name": shard.name, "runs-on": list(shard.runs_on)} for shard in made]
    return json.dumps({"include": rows})


def _counts(by_runner: Mapping[Runner, Sequence[Work]], most: int) -> dict[Runner, int]:
    """How many jobs each kind of runner gets: what it may have, cut where all together would be too many."""
    wanted = {runner: min(runner.shards, len(own)) for runner, own in by_runner.items() if own}
    counts = dict.fromkeys(list(wanted)[:most], 1)
    while sum(counts.values()) < most:
        # The next job goes where the load of one is highest.
        open_ = [runner for runner in counts if counts[runner] < wanted[runner]]
        if not open_:
            break
        heaviest = max(open_, key=lambda runner: sum(one.weight for one in by_runner[runner]) / counts[runner])
        counts[heaviest] += 1
    return counts


def _bins(work: Sequence[Work], count: int) -> list[list[Work]]:
    """Longest first onto the least loaded that has room; inside a bin in the order of usefulness again."""
    bins: list[list[int]] = [[] for _ in range(count)]
    loads, sizes = [0.0] * count, [0] * count
    for place, one in sorted(enumerate(work), key=lambda pair: (-pair[1].weight, pair[0])):
        size = len(json.dumps(one.target)) + 2
        fitting = [number for number in range(count) if sizes[number] + size <= _SHARD_BYTES]
        if fitting:
            number = min(fitting, key=lambda number: loads[number])
            bins[number].append(place)
            loads[number] += one.weight
            sizes[number] += size
    return [[work[place] for place in sorted(bin_)] for bin_ in bins if bin_]


def _shard(name: str, runner: Runner, work: Sequence[Work]) -> Shard:
    device = runner.device or ("cpu" if runner.arch == "cpu" else "cuda" if runner.arch else "")
    return Shard(
        name, runner.labels, device, tuple(one.target for one in work), round(sum(one.weight for one in work), 3)
    )
