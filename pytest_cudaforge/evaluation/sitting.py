"""Is it faster? One sitting measures baselines and candidate in turn, several fresh workers, until the answer is clear.

CPU (native candidate code): the supervisor's clock by slope, over calls that rotate over buffers; whoever is not being
timed is stopped. CUDA plans: device events in the worker, whose host code is ours.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pytest_cudaforge.errors import LaunchFailure, OracleError, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout, call_layout, output_leaves
from pytest_cudaforge.evaluation.contract import status_of
from pytest_cudaforge.evaluation.novelty import REFUSED_ABOVE, Round, lag_of, play_rounds
from pytest_cudaforge.evaluation.oracle import ExportedArena, OracleClient, TrialCase
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.timing import (
    Block,
    abba,
    block_of,
    disturbed,
    faster_baseline,
    narrow_enough,
    quiet_blocks,
    ratio_of,
    sample_of,
    slope_ns,
    slowed,
)
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.plan import LibraryCall
from pytest_cudaforge.records import Sample, Status, Target, WorkloadFacts, WorkloadTiming, to_json

__all__ = ["Pace", "Rotation", "Sitting", "open_rotation"]

#: Buffers a sitting may rotate over, and how much memory they may take.
_MAX_FRAMES = 32
#: A turn that takes so many times its slice is taken as it is.
_CRAWL = 6.0
_MAX_CALLS = 20_000
#: Blocks of one worker when time has run out.
_FEWEST_BLOCKS = 3
_MAX_ROTATION_BYTES = {"cpu": 192 << 20, "cuda": 2 << 30}


@dataclass(frozen=True)
class Pace:
    """How long to measure. ``slice_ns``: one party's turn. Blocks are counted per fresh worker."""

    budget_s: float
    slice_ns: float
    processes: int
    min_blocks: int
    max_blocks: int

    @classmethod
    def of(cls, device: str, budget_s: float) -> Pace:
        """Turns of a few ms: long against a request's own cost, short against the machine's drift."""
        if device == "cpu":
            return cls(budget_s, 2.0e6, 2, 5, 60)
        return cls(budget_s, 8.0e6, 2, 5, 60)


class Party(Protocol):
    """Something that can be timed. ``turn`` gives ns per call; it makes ``least`` calls or more, over the buffer sets
    in order from the first. ``calls`` is how many the last turn made at once. ``once`` gives ns per call of exactly
    ``calls`` calls without a warm-up, whatever they cost."""

    calls: int

    def turn(self, slice_ns: float, least: int = 1) -> float: ...

    def once(self, calls: int) -> float: ...


class _SlopeParty:
    """Timed by this process's clock: ``run(calls)`` returns the ns of one request."""

    def __init__(self, run: Callable[[int], int], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._run, self._before, self._after = run, before, after
        self._per_call_ns = 0.0
        self.calls = 0

    def turn(self, slice_ns: float, least: int = 1) -> float:
        self._before()
        try:
            if not self._per_call_ns:
                self._calibrate()
            calls = max(least, min(_MAX_CALLS, math.ceil(slice_ns / max(self._per_call_ns, 1.0))))
            once = self._run(calls)
            # Too few calls (the last turn was a slow one) would leave a slope of nothing but noise.
            while once < slice_ns / 2 and calls < _MAX_CALLS:
                calls = min(_MAX_CALLS, calls * max(2, min(16, round(slice_ns / once))))
                once = self._run(calls)
            self.calls = calls
            # A machine that is busy elsewhere can make threads wait for each other a thousand times longer: then the
            # request's own cost is nothing beside it, and repeating it would only burn the budget.
            crawling = once > _CRAWL * slice_ns
            per_call = once / calls if crawling else slope_ns(once, self._run(2 * calls), calls)
        finally:
            self._after()
        if per_call > 0:
            self._per_call_ns = max(per_call, self._per_call_ns / 4)
        return per_call

    def once(self, calls: int) -> float:
        self._before()
        try:
            return self._run(calls) / calls
        finally:
            self._after()

    def _calibrate(self) -> None:
        self._run(2)
        calls = 1
        while True:
            once, twice = self._run(calls), self._run(2 * calls)
            if twice - once > 5e5 or calls > 1 << 14:
                self._per_call_ns = max(1.0, slope_ns(once, twice, calls))
                return
            calls *= 4


class _EventParty:
    """Timed by device events: ``sample(count, warm)`` returns that many times in ns; a turn is their median."""

    def __init__(self, sample: Callable[[int, bool], Sequence[int]]) -> None:
        self._sample = sample
        self._per_call_ns = 0.0
        self.calls = 0

    def turn(self, slice_ns: float, least: int = 1) -> float:
        if not self._per_call_ns:
            self._per_call_ns = float(sorted(self._sample(3, True))[1])
        self.calls = count = max(3, least, min(15, int(slice_ns / max(self._per_call_ns, 1.0))))
        value = statistics.median(self._sample(count, True))
        self._per_call_ns = max(value, 1.0)
        return value

    def once(self, calls: int) -> float:
        return float(statistics.median(self._sample(calls, False)))


@dataclass
class Rotation:
    """Baselines of one workload in the oracle's process, over ``frames`` input sets."""

    number: int
    generation: int
    workload: WorkloadFacts
    frames: int
    parties: tuple[str, ...]
    compile_note: str


def open_rotation(oracle: OracleClient, target: Target, workload: WorkloadFacts, frames: int) -> Rotation:
    """Draw the input sets and compile the reference; where torch.compile fails the note says why."""
    args = {"target": to_json(target), "workload": workload.name, "frames": frames, "compiled": True}
    data = oracle.request("rotation", **args)
    return Rotation(data["rotation"], oracle.generation, workload, frames, tuple(data["parties"]), data["compile_note"])


def frame_count(workload: WorkloadFacts, device: str, cache_bytes: int) -> int:
    """How many input sets to rotate over, so that together they pass twice the cache."""
    per_call = max(1, workload.input_bytes + workload.output_bytes)
    if device != "cpu":
        return max(1, min(4, _MAX_ROTATION_BYTES["cuda"] // per_call))
    wanted = math.ceil(2 * cache_bytes / per_call) + 1
    return max(1, min(wanted, _MAX_FRAMES, max(2, _MAX_ROTATION_BYTES["cpu"] // per_call)))


class Sitting:
    """Times one product against its baselines. Raises Refusal where the candidate fails under the clock."""

    def __init__(
        self,
        target: Target,
        product: Product,
        rotation: Rotation,
        oracle: OracleClient,
        worker_of: Callable[[Product], Worker],
        *,
        device: str,
        pace: Pace,
        flush_bytes: int,
        hang_limit_s: float,
    ) -> None:
        self.target, self.product, self.rotation, self.oracle = target, product, rotation, oracle
        self.worker_of, self.device, self.pace = worker_of, device, pace
        self.flush_bytes, self.hang_limit_s = flush_bytes, hang_limit_s
        #: The candidate's own kernels' share of the time, measured where the plan has library calls as well.
        self.own_share: float | None = None
        #: How many times longer new values take than values seen before; 1.0 within noise.
        self.lag = 1.0

    def measure(self) -> tuple[Block, ...]:
        """Blocks from several fresh workers on one arena; outputs of calls chosen afterwards are judged."""
        layout = call_layout(self.product.traced, frames=self.rotation.frames)
        name = self.product.workload.name
        bench, arena = self.oracle.open_bench(self.target, name, "", layout.data)
        blocks: list[Block] = []
        try:
            for frame in range(self.rotation.frames):
                self.oracle.fill(bench, frame, TrialCase(random.SystemRandom().getrandbits(62)), 0)
            deadline = time.monotonic() + self.pace.budget_s
            for process in range(self.pace.processes):
                left = self.pace.processes - process
                share_s = max(0.0, deadline - time.monotonic()) / left
                blocks += self._one_worker(process, layout, bench, arena, time.monotonic() + share_s)
            self._measure_own_share(blocks, layout, arena)
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, f"{name}, timed: {error}") from error
        except (WorkerFailure, LaunchFailure) as error:
            raise Refusal(Status.RUNTIME_ERROR, f"{name}, timed: {error}") from error
        finally:
            arena.close()
            self.oracle.close_bench(bench)
        return tuple(slowed(block, "candidate", self.lag) for block in quiet_blocks(blocks))

    def _measure_own_share(self, blocks: Sequence[Block], layout: CallLayout, arena: ExportedArena) -> None:
        """Time the plan without its library calls; what they left in scratch stays there as plausible input."""
        main = self.product.traced.main
        if not blocks or not main.library_calls or not main.launches:
            return
        steps = tuple(step for step in main.steps if not isinstance(step, LibraryCall))
        own = replace(self.product, traced=replace(self.product.traced, main=replace(main, steps=steps)))
        total_ns = sample_of([block.of("candidate") for block in blocks], 1).median_ns
        with self.worker_of(own) as worker:
            worker.attach(0, arena)
            party = self._candidate(worker, [layout.bindings(frame) for frame in range(self.rotation.frames)])
            own_ns = sample_of([party.turn(self.pace.slice_ns) for _ in range(3)], 1).median_ns
        self.own_share = max(0.0, min(1.0, own_ns / total_ns))

    def _one_worker(
        self, process: int, layout: CallLayout, bench: int, arena: ExportedArena, deadline: float
    ) -> list[Block]:
        with self.worker_of(self.product) as worker:
            worker.attach(0, arena)
            if self.product.traced.prepare is not None:
                worker.run("prepare", layout.prepare_bindings(), timeout_s=self.hang_limit_s)
            sets = [layout.bindings(frame) for frame in range(self.rotation.frames)]
            parties = self._parties(worker, sets)
            for party in parties.values():
                party.turn(self.pace.slice_ns / 4)  # warm-up: page faults, thread pools, clocks
            blocks = self._blocks(process, parties, deadline)
            if blocks and not self._writes_inputs():
                call_ns = statistics.median(block.of("candidate") for block in blocks)
                if process % 2 == 0:
                    self._check_new_values(bench, layout, parties["candidate"], call_ns)
                else:
                    self._check_touched(bench, layout, parties["candidate"])
            return blocks

    def _blocks(self, process: int, parties: dict[str, Party], deadline: float) -> list[Block]:
        blocks: list[Block] = []
        for count in range(self.pace.max_blocks):
            order = abba(list(parties))
            load = _ForeignLoad()
            measured = [(name, parties[name].turn(self.pace.slice_ns)) for name in order]
            block = block_of(process, measured, load.share() if self.device == "cpu" else 0.0)
            blocks += [block] if block is not None else []
            late = time.monotonic() > deadline
            enough = _FEWEST_BLOCKS if late else self.pace.min_blocks
            if count + 1 >= enough and blocks and (late or self._clear(blocks)):
                break
        return blocks

    def _clear(self, blocks: Sequence[Block]) -> bool:
        medians = {party: sample_of([b.of(party) for b in blocks], 1).median_ns for party in self.rotation.parties}
        return narrow_enough(ratio_of(blocks, faster_baseline(medians)))

    def _parties(self, worker: Worker, sets: list[list[tuple[int, int]]]) -> dict[str, Party]:
        parties: dict[str, Party] = {"candidate": self._candidate(worker, sets)}
        for name in self.rotation.parties:
            parties[name] = baseline_party(self.oracle, self.rotation, name, self.device, self.flush_bytes, worker)
        return parties

    def _candidate(self, worker: Worker, sets: list[list[tuple[int, int]]]) -> Party:
        limit_s = self.hang_limit_s
        if self.device != "cpu":
            return _EventParty(
                lambda count, warm: (
                    worker.time_events(sets, count, flush_bytes=self.flush_bytes, timeout_s=limit_s, warm=warm).ns
                )
            )

        def run(calls: int) -> int:
            with self.oracle.paused():
                return worker.run_many(sets, calls, timeout_s=limit_s)

        return _SlopeParty(run, worker.cont, worker.stop)

    def _writes_inputs(self) -> bool:
        """Then so many calls have changed their own inputs that no single answer can be expected any more;
        verification judged one call after another."""
        mutated = self.oracle.mutates(self.target, self.product.workload.name)
        return any(path.startswith("input/") for path in mutated)

    def _check_touched(self, bench: int, layout: CallLayout, candidate: Party) -> None:
        """One more turn, like all others, after a single element of an input was changed behind the kernel's back.

        A kernel that works while it is being checked and rests while it is timed leaves the old answer there, and so
        does one that knows its inputs by their address or by a sample of them. Outputs keep what the last call left:
        nothing but that element tells this turn from the others.
        """
        chance = random.SystemRandom()
        frame = chance.randrange(min(self.rotation.frames, max(1, candidate.calls)))
        self.oracle.touch(bench, frame, chance.getrandbits(62))
        candidate.turn(self.pace.slice_ns, least=frame + 1)
        self._judge(bench, layout, frame)

    def _check_new_values(self, bench: int, layout: CallLayout, candidate: Party, call_ns: float) -> None:
        """All values change at once: is every answer new, and does it take no longer than before? See the module
        ``novelty``. What a memory saves up to the limit is charged in :meth:`measure`."""
        chance = random.SystemRandom()
        frames = range(self.rotation.frames)
        # One answer of the first round is judged, which an honest kernel does not outlast: judging may cost a second.
        unjudged = [chance.choice(frames)]

        def play() -> Round:
            for frame in frames:
                self.oracle.renew(bench, frame, chance.getrandbits(62))
            new_ns = candidate.once(len(frames))
            if unjudged:
                self._judge(bench, layout, unjudged.pop())
            for frame in frames:
                self.oracle.rewrite(bench, frame)
            return Round(new_ns, candidate.once(len(frames)))

        rounds = play_rounds(play, call_ns)
        lag = lag_of(rounds, call_ns)
        self.lag = max(self.lag, lag)
        if lag > REFUSED_ABOVE:
            raise Refusal(
                Status.REJECTED,
                f"{self.product.workload.name}: a call takes {call_ns / 1e3:.3g} us on values it has seen before and "
                f"{lag:.1f} times that on new ones, in each of {len(rounds)} rounds: it remembers answers",
            )

    def _judge(self, bench: int, layout: CallLayout, frame: int) -> None:
        """Raise Refusal where the frame's outputs are not those of the values that stand there now."""
        name = self.product.workload.name
        check = self.oracle.check(bench, frame, output_leaves(self.product.traced.main, layout, frame))
        # State that the reference updates has had many updates by now; verification compares it after one.
        updated = {path.replace("/", " ", 1) for path in self.oracle.mutates(self.target, name)}
        found = [m for m in check.mismatches if m.output not in updated]
        if found:
            reason = f"{name}: an output of a timed call is wrong: {found[0].output}: {found[0].detail}"
            raise Refusal(status_of(tuple(found)), reason)


class _ForeignLoad:
    """Linux's own account of tasks that waited for a core (pressure stall information), where there is one."""

    def __init__(self) -> None:
        self._begin, self._began_ns = _stalled_us(), time.perf_counter_ns()

    def share(self) -> float:
        """Share of the time since construction in which some task waited."""
        elapsed_us = (time.perf_counter_ns() - self._began_ns) / 1e3
        return max(0.0, (_stalled_us() - self._begin) / max(elapsed_us, 1.0))


def _pressure(name: str) -> float:
    try:
        text = Path("/proc/pressure/cpu").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return float(text.split(f"{name}=", 1)[1].split()[0])


def _stalled_us() -> int:
    return int(_pressure("total"))


def stalled_share() -> float:
    """Share of the last minute in which some task of this machine waited for a core; 0 where Linux does not tell."""
    return _pressure("avg60") / 100.0


def baseline_party(
    oracle: OracleClient, rotation: Rotation, name: str, device: str, flush_bytes: int, worker: Worker | None = None
) -> Party:
    """Eager or compiled reference; on the CPU the worker stays stopped while it runs."""
    number = rotation.number
    if device != "cpu":
        return _EventParty(
            lambda count, warm: oracle.request(
                "time_events", rotation=number, party=name, samples=count, flush_bytes=flush_bytes
            )
        )

    def nothing() -> None: ...

    before = worker.stop if worker is not None else nothing
    return _SlopeParty(
        lambda calls: oracle.timed_request("run_many", rotation=number, party=name, calls=calls), before, nothing
    )


def time_alone(
    oracle: OracleClient, rotation: Rotation, device: str, pace: Pace, flush_bytes: int, turns: int = 9
) -> dict[str, Sample]:
    """Each baseline by itself, before a candidate exists."""
    samples = {}
    for name in rotation.parties:
        party = baseline_party(oracle, rotation, name, device, flush_bytes)
        party.turn(pace.slice_ns / 4)
        values = [value for value in (party.turn(pace.slice_ns) for _ in range(turns)) if value > 0]
        if not values:
            raise OracleError(
                f"the {name} reference could not be timed: no turn gave a positive time",
                remedy="the machine is too busy; try again when it is idle",
            )
        samples[name] = sample_of(values, len(values))
    return samples


def summarise(rotation: Rotation, blocks: Sequence[Block], launches: int, roofline_ns: float | None) -> WorkloadTiming:
    """Samples and ratios of one workload's sitting."""
    samples = {p: sample_of([b.of(p) for b in blocks], len(blocks), 2) for p in ("candidate", *rotation.parties)}
    compiled = "compile" in samples
    return WorkloadTiming(
        workload=rotation.workload.name,
        candidate=samples["candidate"],
        eager=samples["eager"],
        compile=samples["compile"] if compiled else None,
        vs_eager=ratio_of(blocks, "eager"),
        vs_compile=ratio_of(blocks, "compile") if compiled else None,
        launches=launches,
        roofline_ns=roofline_ns,
    )


def was_disturbed(alone: dict[str, Sample], timing: WorkloadTiming) -> bool:
    """Did a baseline run slower in this sitting than by itself?"""
    inside = {"eager": timing.eager, **({"compile": timing.compile} if timing.compile else {})}
    return any(disturbed(alone[name], sample) for name, sample in inside.items() if name in alone)
