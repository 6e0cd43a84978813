"""The CPU's rung of profiling: one cpp candidate, kernel by kernel, in a sandboxed worker that the supervisor watches.

Hardware counters and samples are taken of the worker's process from outside (:mod:`hardware.perf`); g++ says what
became of each loop; the same calls with fewer threads show how the work scales. Nothing of it needs a privilege, and
what is refused is left out with a note. Native code can behave while it is looked at: a profile is advice, no verdict.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_cudaforge.errors import LaunchFailure, WorkerFailure
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout, call_layout
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.host_samples import LEAST_SAMPLES, loop_of, mapped_files, summarise
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.parties import SlopeParty
from pytest_cudaforge.evaluation.pressure import ForeignLoad
from pytest_cudaforge.evaluation.profiling import ProfiledCall, static_profile
from pytest_cudaforge.evaluation.timing import FOREIGN
from pytest_cudaforge.evaluation.worker import Binding, Worker
from pytest_cudaforge.hardware import perf
from pytest_cudaforge.hardware.host_diagnosis import IMPOSSIBLE_PERCENT, host_rules
from pytest_cudaforge.hardware.perf import Counts, PerfRefused
from pytest_cudaforge.hardware.roofline import bandwidth
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.languages.cpp import SOURCE_NAME, Place
from pytest_cudaforge.languages.remarks import LoopRemark, remark_of
from pytest_cudaforge.plan import Launch, LaunchPlan, LibraryCall, Step, TracedPlan, step_buffers
from pytest_cudaforge.records import Depth, HotLine, Profile, ProfiledKernel

__all__ = ["HostSeat", "profile"]

#: How long a kernel is looked at, how often again where the samples were few, and one turn by the clock.
_LOOK_NS = {"quick": 4e7, "full": 2e8}
_LOOKS = 8
_TURN_NS = 2e6
_TURNS = 3
#: Calls so long are timed one by one; with fewer threads they are not made where they would take longer than this.
_LONG_NS, _LONGEST_NS = 2e7, 1e9
#: Kernels looked at one by one, and for how long in all; the others are part of the call only.
_PATIENCE_S = 10.0
_MOST_KERNELS = 8
_MOST_REMARKS = 16
_MOST_CALLS = 20_000
_MOST_SAMPLED_THREADS = 64
#: A thread with less than this of the work was not asked to take part.
_IDLE = 0.01

Figure = tuple[str, float, str]


@dataclass(frozen=True)
class HostSeat:
    """What a look needs of the evaluator. ``places`` resolves instructions in the sandbox; ``frames`` as in a sitting,
    so that caches are as warm as there; ``threads`` is how many a parallel region gets."""

    oracle: OracleClient
    worker_of: Callable[[Product], Worker]
    places: Callable[[Binary, Sequence[int]], tuple[Place, ...]]
    frames: int
    threads: int
    hang_limit_s: float


def profile(call: ProfiledCall, depth: Depth, seat: HostSeat) -> Profile:
    """The highest rung that this machine lets us stand on: "counters", or "static" with times, samples and remarks.

    Call it inside the lease's timing: nothing else may use the cores. A candidate that fails under the profile keeps
    the lowest rung, with a note. Raises OracleError and TargetError where its inputs cannot be drawn.
    """
    began = time.monotonic()
    base = static_profile(call, depth)
    look = _Look(call, depth, seat)
    try:
        look.measure()
    except (WorkerFailure, LaunchFailure) as error:
        return replace(base, notes=(*base.notes, f"the candidate failed under the profile: {error}"))
    facts = (*base.facts, *look.facts(base))
    known = {name: value for name, value, _ in facts}
    return replace(
        base,
        rung="counters" if look.counted else "static",
        kernels=tuple(look.kernels) or base.kernels,
        rules=tuple(rule for kernel in look.kernels if kernel.own for rule in host_rules(kernel, known)),
        lines=tuple(look.lines),
        facts=facts,
        remarks=tuple(str(remark) for remark in look.remarks()),
        notes=(*base.notes, *dict.fromkeys(look.notes)),
        seconds=round(time.monotonic() - began, 3),
    )


@dataclass(frozen=True)
class _Group:
    """All steps of one call that run the same kernel (or the same library operator)."""

    name: str
    own: bool
    steps: tuple[Step, ...]
    binary: Binary | None


@dataclass
class _Look:
    """One look at a candidate; what was found so far."""

    call: ProfiledCall
    depth: Depth
    seat: HostSeat
    kernels: list[ProfiledKernel] = field(default_factory=list)
    lines: list[HotLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    by_hand: set[LoopRemark] = field(default_factory=set)
    counted: bool = False
    call_ns: float = 0.0
    _binaries: tuple[Binary, ...] = ()
    _lost: bool = False

    @property
    def main(self) -> LaunchPlan:
        return self.call.product.traced.main

    def measure(self) -> None:
        """Raises WorkerFailure and LaunchFailure where the candidate fails."""
        product, seat = self.call.product, self.seat
        self._binaries = tuple(self.call.lined(binary) or binary for binary in product.binaries)
        layout = call_layout(product.traced, frames=seat.frames)
        bench, arena = seat.oracle.open_bench(self.call.target, product.workload.name, "", layout.data)
        try:
            seat.oracle.fill_all(bench, [CHANCE.fresh_seed() for _ in range(seat.frames)], 0)
            with seat.worker_of(replace(product, binaries=self._binaries)) as worker:
                worker.attach(0, arena)
                load = ForeignLoad()
                with seat.oracle.paused():
                    self._look_at(worker, layout)
                self._note_load(load.share())
        finally:
            arena.close()
            seat.oracle.close_bench(bench)

    def _note_load(self, share: float) -> None:
        if share > FOREIGN:
            self.figures.append(("foreign_load", 100.0 * share, "%"))
            self.notes.append(f"other processes kept the cores busy: somebody waited {share:.0%} of the time")

    def _look_at(self, worker: Worker, layout: CallLayout) -> None:
        seat = self.seat
        # Before the first call: threads that it starts inherit the counters.
        with _counters_of(worker.pgid, self.notes) as counters:
            if self.call.product.traced.prepare is not None:
                worker.run("prepare", layout.prepare_bindings(), timeout_s=seat.hang_limit_s)
            desk = _Desk(worker, [layout.bindings(frame) for frame in range(seat.frames)], seat.hang_limit_s, counters)
            self.call_ns = desk.time_ns()
            self._scale(desk)
            groups = _groups(self.main, self._binaries)
            if len(groups) > _MOST_KERNELS:
                self.notes.append(f"the first {_MOST_KERNELS} of {len(groups)} kernels were looked at one by one")
            began = time.monotonic()
            for group in groups[:_MOST_KERNELS]:
                if time.monotonic() - began > _PATIENCE_S:
                    self.notes.append(f"after {_PATIENCE_S:g} s no further kernels were looked at: calls take long")
                    break
                self._look_at_group(desk, group, alone=len(groups) == 1)

    def _scale(self, desk: _Desk) -> None:
        """The whole call with fewer threads."""
        most = self.seat.threads
        for count in (1 << i for i in range(most.bit_length()) if 1 << i < most):
            if self.call_ns * most / count > _LONGEST_NS:
                self.notes.append(f"{count} of {most} threads would take long: how that scales was not measured")
                continue
            taken_ns = desk.time_with(count, most)
            self.figures.append((f"time_with_{count}_thread{'s' if count > 1 else ''}", taken_ns, "ns"))
            self.figures += [("thread_speedup", taken_ns / self.call_ns, "")] if count == 1 else []
        if most == 1:
            self.notes.append("there is one core: how the work scales over threads cannot be seen")

    def _look_at_group(self, desk: _Desk, group: _Group, *, alone: bool) -> None:
        """Time, scaling, counters and samples of one kernel's launches by themselves."""
        part = replace(self.main, steps=group.steps)
        desk.load(TracedPlan(part), () if group.binary is None else (group.binary,))
        taken_ns = self.call_ns if alone else desk.time_ns()
        launches = sum(isinstance(step, (Launch, LibraryCall)) for step in group.steps)
        metrics: list[Figure] = [("time", taken_ns, "ns"), ("time_per_launch", taken_ns / launches, "ns")]
        metrics += self._traffic(group, taken_ns)
        if self.seat.threads > 1 and not alone and taken_ns * self.seat.threads <= _LONGEST_NS:
            metrics.append(("thread_speedup", desk.time_with(1, self.seat.threads) / taken_ns, ""))
        seen = desk.look(_LOOK_NS[self.depth], self.notes)
        metrics += seen.figures
        if seen.counts is not None and seen.counts.values:
            self.counted = True
            metrics += _counted(seen.counts, seen.calls)
        sampled = self._summarised(desk.worker.pgid, group, seen.samples) if any(seen.samples) else ()
        # Samples tell work from waiting, time on a core does not.
        better = {name for name, _, _ in sampled}
        metrics = [*(figure for figure in metrics if figure[0] not in better), *sampled]
        self.kernels.append(ProfiledKernel(group.name, group.own, launches, taken_ns, metrics=tuple(metrics)))

    def _summarised(self, pid: int, group: _Group, samples: Sequence[Sequence[int]]) -> tuple[Figure, ...]:
        binary = group.binary
        source = dict(self.call.candidate.files).get(SOURCE_NAME, "")
        summary = summarise(
            group.name,
            source,
            _loops(binary) if binary is not None else (),
            samples,
            mapped_files(pid),
            lambda offsets: self._places(binary, offsets),
        )
        self.lines += summary.lines
        self.by_hand |= summary.by_hand
        return summary.figures

    def _places(self, binary: Binary | None, offsets: Sequence[int]) -> Sequence[Place]:
        """Where sampled instructions come from; nowhere for all that follow once looking them up has failed."""
        if binary is not None and offsets and not self._lost:
            try:
                return self.seat.places(binary, offsets)
            except WorkerFailure as error:
                self._lost = True
                self.notes.append(f"no hot lines: instructions could not be looked up: {error}")
        return tuple(Place() for _ in offsets)

    def _traffic(self, group: _Group, taken_ns: float) -> list[Figure]:
        """What its steps move where each touches each of its buffers once, and how fast that is."""
        moved = sum(self.main.buffers[i].spec.extent_bytes for step in group.steps for i in set(step_buffers(step)))
        reached, ceiling = moved / taken_ns * 1e9, bandwidth(self.call.device, self.call.working_set_bytes)
        share = 100.0 * reached / ceiling if ceiling else 0.0
        found: list[Figure] = [("bytes_of_its_buffers", float(moved), "byte")]
        if share > IMPOSSIBLE_PERCENT:
            self.notes.append("some kernels are too fast to touch all of their buffers: what they move is not known")
            return found
        found.append(("bandwidth_reached", reached, "byte/s"))
        return [*found, ("bandwidth_share", share, "%")] if ceiling else found

    # -- what it comes to

    def facts(self, base: Profile) -> tuple[Figure, ...]:
        """Figures of the whole call beside those of the lowest rung."""
        known = {name: value for name, value, _ in base.facts}
        per_s = 1e9 / self.call_ns
        found: list[Figure] = [("time_per_call", self.call_ns, "ns"), ("threads", float(self.seat.threads), "")]
        found.append(("bandwidth_reached", known["minimal_bytes"] * per_s, "byte/s"))
        if "bandwidth_ceiling" in known:
            share = 100.0 * known["minimal_bytes"] * per_s / known["bandwidth_ceiling"]
            found.append(("bandwidth_share", share, "%"))
        if known.get("flops"):
            found.append(("flops_reached", known["flops"] * per_s, "FLOP/s"))
            peaks, precision = dict(self.call.device.peak_flops), self.call.facts.precision
            peak = peaks.get("fp32" if precision == "default" else precision)
            found += [("peak_share", 100.0 * known["flops"] * per_s / peak, "%")] if peak else []
        if "speed_of_light" in known:
            found.append(("speed_of_light_share", 100.0 * known["speed_of_light"] / self.call_ns, "%"))
        return (*found, *self.figures)

    def remarks(self) -> list[LoopRemark]:
        """The loops that matter first: those with most of the samples, then those that were not vectorized. Where their
        author wrote vectors, the compiler's word on them leads astray."""
        said = dict.fromkeys(remark for binary in self._binaries for remark in _loops(binary))
        found = [remark for remark in said if remark not in self.by_hand]
        heat: Counter[LoopRemark] = Counter()
        for line in self.lines:
            loop = loop_of(found, line.line)
            if loop is not None:
                heat[loop] += round(1e6 * (line.share or 0.0))
        found.sort(key=lambda remark: (-heat[remark], remark.vector_bytes, remark.line))
        return found[:_MOST_REMARKS]


# -- at the worker -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """Of so many ``calls``: counters over all threads, sampled addresses by thread (the calling one first), what the
    process took of the machine."""

    calls: int
    counts: Counts | None
    samples: list[list[int]]
    figures: tuple[Figure, ...]


@dataclass
class _Desk:
    """A worker over its buffer sets, timed and watched by this process."""

    worker: Worker
    sets: Sequence[Sequence[Binding]]
    limit_s: float
    counters: perf.Counters | None

    def load(self, traced: TracedPlan, binaries: Sequence[Binary]) -> None:
        self.worker.start(traced, binaries, timeout_s=self.limit_s)
        # A new program knows no bindings, and the same object would not be sent again.
        self.sets = [list(bindings) for bindings in self.sets]

    def _run(self, calls: int, first: int = 0) -> int:
        return self.worker.run_many(self.sets, calls, timeout_s=self.limit_s, first_set=first)

    def time_ns(self) -> float:
        """ns per call, the least of a few turns: what others do to the machine only makes it longer."""
        once_ns = self._run(1)
        if once_ns > _LONG_NS:
            # What a request costs besides is nothing beside it.
            return float(min(once_ns, self._run(1)))
        party = SlopeParty(self._run, len(self.sets))
        return max(1.0, min(party.turn(_TURN_NS) for _ in range(_TURNS)))

    def time_with(self, threads: int, usual: int) -> float:
        """The same with so many threads."""
        self.worker.set_threads(threads)
        try:
            return self.time_ns()
        finally:
            self.worker.set_threads(usual)

    def _run_for(self, span_ns: float) -> int:
        """Run calls for about ``span_ns``, in requests that double; how many. Threads may wait for each other a
        thousand times longer now than they did a moment ago, where others use the cores."""
        began_ns, made, calls = time.perf_counter_ns(), 0, 1
        while time.perf_counter_ns() - began_ns < span_ns:
            self._run(calls)
            made += calls
            calls = min(2 * calls, _MOST_CALLS)
        return made

    def look(self, span_ns: float, notes: list[str]) -> _Seen:
        """Watch calls for about ``span_ns``, and again where that gave few samples."""
        pid, made = self.worker.pgid, 0
        self._run(1)
        before = _Usage.of(pid)
        with contextlib.ExitStack() as stack:
            counted = stack.enter_context(self.counters.counting()) if self.counters is not None else []
            samplers = [stack.enter_context(sampler) for sampler in _samplers(pid, notes)]
            samples: list[list[int]] = [[] for _ in samplers]
            for _ in range(_LOOKS):
                with contextlib.ExitStack() as sampled:
                    found = [sampled.enter_context(sampler.sampling()) for sampler in samplers]
                    made += self._run_for(span_ns)
                for kept, new in zip(samples, found, strict=True):
                    kept += new
                if not samplers or sum(map(len, samples)) >= 8 * LEAST_SAMPLES:
                    break
        return _Seen(made, counted[0] if counted else None, samples, _Usage.of(pid).since(before, pid, made))


def _samplers(pid: int, notes: list[str]) -> Iterator[perf.Sampler]:
    """One for each thread that the process has by now, as far as the kernel allows."""
    try:
        # The calling thread first: it is the process's first one.
        for thread in sorted(_threads(pid), key=lambda thread: thread != pid)[:_MOST_SAMPLED_THREADS]:
            yield perf.sampler(thread)
    except PerfRefused as error:
        notes.append(_refused("no samples of some threads, and so fewer hot lines", error))


@contextlib.contextmanager
def _counters_of(pid: int, notes: list[str]) -> Iterator[perf.Counters | None]:
    try:
        opened = perf.counters(pid)
    except PerfRefused as error:
        notes.append(_refused("kernels were timed and sampled, but no hardware counters read", error))
        yield None
        return
    with opened:
        yield opened


def _refused(what: str, error: PerfRefused) -> str:
    return f"{what}: {error.reason}" + (f"; to do: {error.remedy}" if error.remedy else "")


def _groups(main: LaunchPlan, binaries: Sequence[Binary]) -> list[_Group]:
    """The plan's steps by kernel and constants, library calls by operator, in the order of their first step."""
    found: dict[tuple[str, Binary | None], list[Step]] = {}
    by_constants = {binary.constants: binary for binary in binaries}
    for step in main.steps:
        if isinstance(step, Launch):
            found.setdefault((step.kernel, by_constants[step.constants]), []).append(step)
        elif isinstance(step, LibraryCall):
            found.setdefault((step.op, None), []).append(step)
    return [_Group(name, binary is not None, tuple(steps), binary) for (name, binary), steps in found.items()]


def _loops(binary: Binary) -> tuple[LoopRemark, ...]:
    """What g++ said of the loops in a binary built with line numbers; none for any other."""
    return tuple(remark for line in binary.log.splitlines() if (remark := remark_of(line)) is not None)


def _counted(counts: Counts, calls: int) -> list[Figure]:
    """Counters of one call, and the ratios that are read first."""
    found = [(name, value / calls, "") for name, value in counts.values]
    ratios = (
        ("instructions_per_cycle", "instructions", "cycles", 1.0, "instruction/cycle"),
        ("cache_miss_rate", "cache-misses", "cache-references", 100.0, "%"),
        ("branch_miss_rate", "branch-misses", "branches", 100.0, "%"),
    )
    for name, above, below, factor, unit in ratios:
        numerator, denominator = counts.get(above), counts.get(below)
        if numerator is not None and denominator:
            found.append((name, factor * numerator / denominator, unit))
    return found


# -- what the kernel says of the process ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Usage:
    """What a process took so far, from /proc: no privilege, no performance counters. ``busy_ns`` by thread."""

    at_ns: int
    busy_ns: dict[int, int]
    faults: int

    @classmethod
    def of(cls, pid: int) -> _Usage:
        busy = {}
        for thread in _threads(pid):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii")
                busy[thread] = int(text.split()[0])
        return cls(time.perf_counter_ns(), busy, _faults(pid))

    def since(self, before: _Usage, pid: int, calls: int) -> tuple[Figure, ...]:
        """Cores kept busy (a thread that spins is busy), how many of them others than the calling thread's, and page
        faults per call. ``thread_imbalance``: the busiest thread's time over the mean of all that did anything."""
        spent = {thread: value - before.busy_ns.get(thread, 0) for thread, value in self.busy_ns.items()}
        total = sum(spent.values())
        if not total:
            return ()
        working = [value for value in spent.values() if value >= _IDLE * total]
        return (
            ("cores_busy", total / max(1, self.at_ns - before.at_ns), ""),
            ("work_on_other_threads", 100.0 * (total - spent.get(pid, 0)) / total, "%"),
            ("thread_imbalance", max(working) * len(working) / sum(working), ""),
            ("page_faults_per_call", (self.faults - before.faults) / max(1, calls), ""),
        )


def _threads(pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return []


def _faults(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(text.rpartition(")")[2].split()[7])
    except (OSError, ValueError, IndexError):
        return 0
