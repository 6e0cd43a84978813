"""Is it faster? One sitting measures baselines and candidate in turn, several fresh workers, until the answer is clear.

CPU (native candidate code): the supervisor's clock by slope, over calls that rotate over buffers; whoever is not being
timed is stopped. CUDA plans: device events in the worker, whose host code is ours.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from pytest_cudaforge.errors import LaunchFailure, OracleError, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import BIG_CALL_BYTES, CallLayout, call_layout, output_leaves
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.changes import changed_burst, drawn_calls
from pytest_cudaforge.evaluation.contract import status_of
from pytest_cudaforge.evaluation.novelty import (
    EVENT_SLACK_NS,
    MAX_ROUNDS,
    REFUSED_ABOVE,
    SINGLE_REFUSED_ABOVE,
    SINGLE_SLACK_NS,
    Round,
    doubtful_above,
    lag_of,
    pass_share_ns,
    play_rounds,
    single_of,
    undisturbed,
)
from pytest_cudaforge.evaluation.oracle import FOLLOWS_STATE, ExportedArena, OracleClient, TrialCase
from pytest_cudaforge.evaluation.parties import (
    Clock,
    EventParty,
    Party,
    baseline_party,
    request_ns,
    turn_of,
    worker_party,
)
from pytest_cudaforge.evaluation.pressure import DeviceWatch, ForeignLoad, Load
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.timing import (
    GPU_PLACEMENT_NS,
    Block,
    abba,
    block_of,
    clear_enough,
    crowded,
    disturbed,
    faster_baseline,
    narrow_enough,
    quiet_blocks,
    ratio_of,
    sample_of,
    slowed,
    steady_blocks,
)
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.hardware.nvml import DeviceMonitor
from pytest_cudaforge.plan import LibraryCall
from pytest_cudaforge.records import (
    HostTiming,
    Sample,
    Status,
    Target,
    TimedBlock,
    WorkloadFacts,
    WorkloadTiming,
    to_json,
)

__all__ = ["MOST_PROCESSES", "Incumbent", "Pace", "Rotation", "Sitting", "Table", "open_rotation", "pass_sets"]

#: Buffers a sitting may rotate over, and how much memory they may take.
_MAX_FRAMES = 256
#: By events, beside an incumbent: fresh processes at most, where two leave it unclear which is faster. Calls that are
#: longer than this differ by too little from process to process.
MOST_PROCESSES, _PLACED_BELOW_NS = 8, 1e6
#: ... and the memory of the buffer sets that a call rotates over: one set's places in memory say little of another's.
_EVENT_SETS, _MOST_EVENT_SETS, _EVENT_ROTATION_BYTES = 4, 12, 32 << 20
#: Blocks of one worker when time has run out.
_FEWEST_BLOCKS = 3
#: A baseline that was slowed flatters the candidate: one that takes twice its time all the same is slower. (It may be
#: what slowed it, by the caches it leaves behind, and any other sitting would find the same.)
_HOPELESS = 0.5
#: How long the answers of one pass may be judged, once one of them was.
_JUDGING_S = 0.1
#: No call with an answer of so many bytes takes less than this share of what writing it to new memory does: caches may
#: hold it, and there are stores that go round them.
_LARGE_ANSWER_BYTES = 1 << 20
_WRITTEN_ABOVE = 0.4
_WRITTEN_AT_ONCE_BYTES = 256 << 20
#: Passes, and measurements, of the reference whose fastest counts.
_PASSES = 4
#: Input sets whose values change in a burst, of as many as can be visited twice in so long; how many bursts.
_CHANGED_SETS, _CHANGED_NS, _CHANGED_BURSTS = 4, 1e7, 2
#: A request during which values are written from outside takes so long, and they come after this share of it. It says
#: something only where they were there before half of it was over; and where processes wait for their turn, the other
#: half may have been nothing but the way of the answer, though hardly three times in a row.
_WRITTEN_NS, _WRITTEN_AFTER, _WRITTEN_BEFORE = 1.2e7, (0.1, 0.4), 0.5
_WRITTEN_VISITS, _WRITTEN_TRIES, _WRITTEN_WRONG = 6, 6, 3
#: A process whose calls take less than this share of what they did in those whose calls were held against new values
#: is looked at in the same way.
_AS_FAST = 0.9
#: Turns of which the fastest tells how much slower a machine is now.
_SLOWDOWN_TURNS = 3
#: Below this a call's launch may take longer than the call.
LAUNCH_BOUND_NS = 20_000.0
#: Above this host time is nothing beside a call, and two clocks take their time.
_LONG_CALL_NS = 2e6
_MAX_ROTATION_BYTES = {"cpu": 192 << 20, "cuda": 2 << 30}
#: How long a pass over values drawn anew shall take; its buffers, and their share of a device's memory at most; and
#: what drawing them may take.
_PASS_NS = 5e6
_MAX_PASS_BYTES = {"cpu": 192 << 20, "cuda": 4 << 30}
_PASS_MEMORY_SHARE = 16
_PASS_DRAWING_S = {"cpu": 0.03, "cuda": 0.1}


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
            return cls(budget_s, 1.2e6, 2, 6, 60)
        return cls(budget_s, 8.0e6, 2, 5, 60)


@dataclass
class Rotation:
    """Baselines of one workload in the oracle's process, over ``frames`` input sets."""

    number: int
    generation: int
    workload: WorkloadFacts
    frames: int
    parties: tuple[str, ...]
    compile_note: str
    generated: str = ""
    #: Was torch.compile tried?
    compiled: bool = True
    #: What drawing one input set takes.
    draw_s: float = 0.0


def open_rotation(
    oracle: OracleClient, target: Target, workload: WorkloadFacts, frames: int, *, compiled: bool = True
) -> Rotation:
    """Draw the input sets and compile the reference; where torch.compile fails the note says why."""
    args = {"target": to_json(target), "workload": workload.name, "frames": frames, "compiled": compiled}
    data = oracle.request("rotation", **args)
    parties, note = tuple(data["parties"]), data["compile_note"]
    generated, draw_s = data["generated"], data["draw_s"]
    number, generation = data["rotation"], oracle.generation
    return Rotation(number, generation, workload, frames, parties, note, generated, compiled, draw_s)


def frame_count(workload: WorkloadFacts, device: str, cache_bytes: int, clock: Clock) -> int:
    """How many input sets to rotate over, so that together they pass twice the cache; events flush it themselves."""
    per_call = max(1, workload.input_bytes + workload.output_bytes)
    if clock == "events":
        wanted = max(_EVENT_SETS, min(_MOST_EVENT_SETS, _EVENT_ROTATION_BYTES // per_call))
        return max(1, min(wanted, _MAX_ROTATION_BYTES["cuda"] // per_call))
    wanted = math.ceil(2 * cache_bytes / per_call) + 1
    return max(1, min(wanted, _MAX_FRAMES, max(2, _MAX_ROTATION_BYTES[device] // per_call)))


def pass_sets(rotation: Rotation, device: str, memory_bytes: int, call_ns: float) -> int:
    """Over how many input sets a pass goes by the supervisor's clock: so many that what it costs besides its calls, of
    ``call_ns`` each, is little beside them, as far as memory and the drawing of values allow."""
    workload = rotation.workload
    per_call = max(1, workload.input_bytes + workload.output_bytes)
    room = min(_MAX_PASS_BYTES[device], memory_bytes // _PASS_MEMORY_SHARE)
    drawn = int(_PASS_DRAWING_S[device] / max(rotation.draw_s, 1e-6))
    wanted = math.ceil(_PASS_NS / max(call_ns, 1.0))
    return max(rotation.frames, min(wanted, _MAX_FRAMES, room // per_call, drawn))


@dataclass(frozen=True)
class Incumbent:
    """Another candidate of the same target and workload, to be timed beside the one in question."""

    product: Product
    worker_of: Callable[[Product], Worker]
    #: State that it does not take over, and has as constructed.
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """One product and the arena it works on: everything of a sitting that outlives its workers."""

    entrant: Incumbent
    layout: CallLayout
    bench: int
    arena: ExportedArena

    @property
    def product(self) -> Product:
        return self.entrant.product


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
        clock: Clock,
        pace: Pace,
        flush_bytes: int,
        hang_limit_s: float,
        memory_bytes: int = 0,
        alone_ns: float = math.inf,
        incumbent: Incumbent | None = None,
        monitor: DeviceMonitor | None = None,
        kept: tuple[str, ...] = (),
    ) -> None:
        """``alone_ns``: a call of the first baseline by itself. ``kept``: state that the candidate does not take."""
        self._pids: set[int] = set()
        #: By the bench of the table that they sit at.
        self._workers: dict[int, Worker] = {}
        self.watch = DeviceWatch(monitor, self._users) if monitor is not None else None
        self.target, self.product, self.rotation, self.oracle = target, product, rotation, oracle
        self.entrant, self.incumbent = Incumbent(product, worker_of, kept), incumbent
        #: Trained weights are seldom as constructed: a gain of zero would leave nothing to be done.
        self._weights_seed = CHANCE.fresh_seed()
        self.worker_of, self.device, self.clock, self.pace = worker_of, device, clock, pace
        self.flush_bytes, self.hang_limit_s, self.memory_bytes = flush_bytes, hang_limit_s, memory_bytes
        #: Input sets of a pass over values drawn anew; turns rotate over the rotation's.
        self.sets = rotation.frames
        if clock == "supervisor" and self._hosted:
            self.sets = pass_sets(rotation, device, memory_bytes, alone_ns)
        #: The candidate's own kernels' share of the time, measured where the plan has library calls as well.
        self.own_share: float | None = None
        self._spare_ns = 0.0
        #: Calls by the supervisor's clock, where device events decide.
        self.host: HostTiming | None = None
        #: Were other processes busy in nearly every block, so that none could be left out?
        self.crowded = False
        #: How many times longer new values take than values seen before; 1.0 within noise.
        self.lag = 1.0
        #: A repeated call in the fastest of the processes that were asked for it.
        self._looked_at_ns = math.inf

    @property
    def _hosted(self) -> bool:
        """Is the host code the candidate's, too? It sees which of its answers are fetched, and when."""
        return not self.product.traced.main.steps

    def measure(self) -> tuple[Block, ...]:
        """Blocks from several fresh workers; outputs of calls chosen afterwards are judged.

        Parties: "candidate", "incumbent" where there is one, and the rotation's baselines.
        """
        name = self.product.workload.name
        blocks: list[Block] = []
        if self.clock == "supervisor":
            self._spare_ns = request_ns(self.oracle, self.rotation.number, self.rotation.parties[0])
        try:
            with contextlib.ExitStack() as stack:
                table = stack.enter_context(self._table(self.entrant))
                beside = None
                if self.incumbent is not None:
                    beside = stack.enter_context(self._table(self.incumbent))
                for process in range(max(MOST_PROCESSES, self.pace.processes)):
                    if process >= self.pace.processes and not self._unclear(blocks):
                        break
                    if process and beside is not None and _alike(table, beside):
                        table, beside = self._exchanged(table, beside)
                    blocks += self._one_worker(process, table, beside)
                self._measure_own_share(blocks, table)
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, f"{name}, timed: {error}") from error
        except (WorkerFailure, LaunchFailure) as error:
            raise Refusal(Status.RUNTIME_ERROR, f"{name}, timed: {error}") from error
        self.crowded |= crowded(blocks)
        return tuple(slowed(block, "candidate", self.lag) for block in steady_blocks(quiet_blocks(blocks)))

    def _unclear(self, blocks: Sequence[Block]) -> bool:
        """Would more processes tell more of candidate and incumbent?"""
        if self.incumbent is None or self.clock != "events" or not blocks:
            return False
        kept = steady_blocks(quiet_blocks(blocks))
        placed = statistics.median(block.of("incumbent") for block in kept) < _PLACED_BELOW_NS
        return placed and not clear_enough(ratio_of(kept, "incumbent", placement_ns=GPU_PLACEMENT_NS))

    def _exchanged(self, table: Table, beside: Table) -> tuple[Table, Table]:
        """Candidate and incumbent on each other's arena, with new values in both: neither has the better place."""
        for one, comes in ((table, beside), (beside, table)):
            self._fill(one.bench, comes.entrant)
        return replace(beside, entrant=table.entrant), replace(table, entrant=beside.entrant)

    @contextlib.contextmanager
    def _table(self, entrant: Incumbent) -> Iterator[Table]:
        """Its arena with values in every frame, for as long as the sitting lasts."""
        layout = call_layout(entrant.product.traced, frames=self.sets)
        bench, arena = self.oracle.open_bench(self.target, entrant.product.workload.name, "", layout.data)
        try:
            self._fill(bench, entrant)
            yield Table(entrant, layout, bench, arena)
        finally:
            arena.close()
            self.oracle.close_bench(bench)

    def _fill(self, bench: int, entrant: Incumbent) -> None:
        """Secret values in every frame, and the sitting's weights."""
        seeds, kept = _seeds(self.sets), entrant.kept
        self.oracle.fill_all(bench, seeds, 0, weights_seed=self._weights_seed, kept=kept)

    @contextlib.contextmanager
    def _seated(self, table: Table) -> Iterator[Party]:
        """A fresh worker at ``table``, ready to be timed; for the supervisor's clock it is stopped."""
        with table.entrant.worker_of(table.product) as worker, contextlib.ExitStack() as stack:
            self._pids.add(worker.pgid)
            stack.callback(self._pids.discard, worker.pgid)
            self._workers[table.bench] = worker
            worker.attach(0, table.arena)
            if table.product.traced.prepare is not None:
                worker.run("prepare", table.layout.prepare_bindings(), timeout_s=self.hang_limit_s)
            if self.clock == "supervisor":
                worker.stop()
            sets = [table.layout.bindings(frame) for frame in range(self.sets)]
            yield worker_party(
                self.oracle,
                worker,
                sets,
                clock=self.clock,
                flush_bytes=self.flush_bytes,
                limit_s=self.hang_limit_s,
                among=self.rotation.frames,
                spare_ns=self._spare_ns,
                output_bytes=table.product.workload.output_bytes,
            )

    def _measure_own_share(self, blocks: Sequence[Block], table: Table) -> None:
        """Time the plan's library calls alone: trusted code, which a kernel cannot slow down for a better share. What
        the kernels left in scratch stays there as plausible input."""
        main = self.product.traced.main
        if not blocks or not main.library_calls or not main.launches:
            return
        steps = tuple(step for step in main.steps if isinstance(step, LibraryCall))
        traced = replace(self.product.traced, main=replace(main, steps=steps), prepare=None)
        total_ns = sample_of([block.of("candidate") for block in blocks], 1).median_ns
        # On the whole plan's table: the same buffers, prepared values included.
        library = replace(self.entrant, product=replace(self.product, traced=traced, binaries=()))
        with self._seated(replace(table, entrant=library)) as party:
            library_ns = sample_of([party.turn(self.pace.slice_ns) for _ in range(3)], 1).median_ns
        self.own_share = max(0.0, min(1.0, 1.0 - library_ns / total_ns))

    def _one_worker(self, process: int, table: Table, beside: Table | None) -> list[Block]:
        with contextlib.ExitStack() as stack:
            seats = [("candidate", table), *([("incumbent", beside)] if beside is not None else [])]
            started = self._seat_all(stack, dict(seats[::-1] if process % 2 else seats))
            parties = {name: started[name].result() for name, _ in seats}
            # Further processes are for the one comparison that is not clear.
            for name in self.rotation.parties if process < self.pace.processes else ():
                parties[name] = self._baseline(name)
            # Warm-up: page faults, thread pools, clocks; and memory, which who comes first has in other places.
            for name in self._order(parties, process)[: len(parties)]:
                parties[name].turn(self.pace.slice_ns / 4)
            # What is looked at besides the blocks takes nothing of their time.
            blocks = self._blocks(process, parties, time.monotonic() + self.pace.budget_s / self.pace.processes)
            if blocks:
                self._check_timed_calls(process, table, parties, blocks)
            if blocks and process == self.pace.processes - 1:
                self.host = self._host_times(table, parties["candidate"], blocks)
            return blocks

    def _seat_all(self, stack: contextlib.ExitStack, tables: Mapping[str, Table]) -> dict[str, Future[Party]]:
        """A fresh worker at each, all started at once, the first one first. Whatever becomes of one, the others are
        closed with ``stack``."""
        own = {name: stack.enter_context(contextlib.ExitStack()) for name in tables}
        with ThreadPoolExecutor(len(tables)) as pool:
            return {name: pool.submit(own[name].enter_context, self._seated(table)) for name, table in tables.items()}

    def _host_times(self, table: Table, candidate: Party, blocks: Sequence[Block]) -> HostTiming | None:
        """Calls back to back by both clocks, and the baselines' where host time may be what a caller waits for. They
        are on new values, and answers are judged: no call by events comes so soon after another."""
        medians = {party: statistics.median(block.of(party) for block in blocks) for party in blocks[0].parties}
        if not isinstance(candidate, EventParty) or medians["candidate"] > _LONG_CALL_NS:
            return None
        judged = not self._goes_on
        if judged:
            self.oracle.renew(table.bench, _seeds(self.sets))
        found = candidate.by_both_clocks(self.pace.slice_ns / 2)
        if found is None:
            return None
        if judged:
            self._judge(table, CHANCE.randrange(self.rotation.frames))
        others: dict[str, float] = {}
        if min(medians["candidate"], medians["eager"]) < LAUNCH_BOUND_NS:
            for name in self.rotation.parties:
                party = baseline_party(self.oracle, self.rotation.number, name, clock="supervisor", flush_bytes=0)
                others[name] = party.turn(self.pace.slice_ns / 2)
        return HostTiming(found[0], found[1], others.get("eager"), others.get("compile"))

    def _baseline(self, name: str) -> Party:
        number = self.rotation.number
        return baseline_party(self.oracle, number, name, clock=self.clock, flush_bytes=self.flush_bytes)

    def _blocks(self, process: int, parties: dict[str, Party], deadline: float) -> list[Block]:
        blocks: list[Block] = []
        for count in range(self.pace.max_blocks):
            load = self._load()
            taken = [
                turn_of(name, parties[name], parties[name].turn(self.pace.slice_ns))
                for name in self._order(parties, process + count)
            ]
            block = block_of(process, taken, load.share() if load is not None else 0.0)
            blocks += [block] if block is not None else []
            late = time.monotonic() > deadline
            enough = _FEWEST_BLOCKS if late else self.pace.min_blocks
            if count + 1 >= enough and blocks and (late or self._clear(blocks)):
                break
        return blocks

    @staticmethod
    def _order(parties: Mapping[str, Party], number: int) -> tuple[str, ...]:
        """Of one block. Candidate and incumbent change places: what follows whom costs something."""
        names = list(parties)
        if "incumbent" in parties and number % 2:
            names[:2] = names[1::-1]
        return abba(names)

    def _users(self) -> set[int]:
        """Processes of this sitting that use the device now."""
        return self._pids | ({self.oracle.pid} if self.oracle.pid is not None else set())

    def _load(self) -> Load | None:
        """What others do from now on; None where nobody tells."""
        if self.device == "cpu":
            return ForeignLoad()
        return self.watch.load() if self.watch is not None else None

    def _clear(self, blocks: Sequence[Block]) -> bool:
        present = [party for party in self.rotation.parties if party in blocks[0].parties]
        medians = {party: sample_of([b.of(party) for b in blocks], 1).median_ns for party in present}
        against = [faster_baseline(medians)] if medians else []
        against += ["incumbent"] if self.incumbent is not None else []
        return all(narrow_enough(ratio_of(steady_blocks(blocks), party)) for party in against)

    def _check_timed_calls(
        self, process: int, table: Table, parties: Mapping[str, Party], blocks: Sequence[Block]
    ) -> None:
        """Were the timed calls' answers right, and new?"""
        candidate = parties["candidate"]
        call_ns = statistics.median(block.of("candidate") for block in blocks)
        if process % 2:
            self._check_values(table, candidate, call_ns)
            # A kernel may rest in some processes only.
            if not self._hosted and call_ns >= _AS_FAST * self._looked_at_ns:
                return
        self._looked_at_ns = min(self._looked_at_ns, call_ns)
        name = self.rotation.parties[0]
        baseline_ns = statistics.median(block.of(name) for block in blocks) if name in parties else math.inf

        def slowdown() -> float:
            # Of a trusted party: the candidate's own repeated calls may be slow because values have just changed.
            if self.device != "cpu":
                return 1.0
            turns = [parties[name].turn(self.pace.slice_ns) for _ in range(_SLOWDOWN_TURNS)]
            return min(turns) / max(baseline_ns, 1.0)

        self._check_new_values(table, candidate, call_ns, baseline_ns, slowdown)

    def _check_values(self, table: Table, candidate: Party, call_ns: float) -> None:
        """Other values, some of them or all: are the answers to these?"""
        if not self._goes_on:
            self._check_touched(table, candidate)
            if self.device == "cpu":
                self._check_changed(table, call_ns)
                self._check_written(table, call_ns)
        self._check_families(table, candidate)

    def _check_families(self, table: Table, candidate: Party) -> None:
        """Every kind of values once more, in a process that was timed: a kernel that tells by the number of its calls,
        or by their places, that it is no longer verified may take short cuts that drawn values do not show."""
        workload = self.product.workload
        families = self.oracle.families(self.target, workload.name)
        if workload.input_bytes + workload.output_bytes > BIG_CALL_BYTES:
            families = tuple(CHANCE.sample(families, min(1, len(families))))
        for family in families:
            case = TrialCase(CHANCE.fresh_seed(), family, self._weights_seed, table.entrant.kept)
            self.oracle.fill(table.bench, 0, case, 0)
            candidate.once(1)
            self._judge(table, 0)

    @functools.cached_property
    def _mutated(self) -> frozenset[str]:
        return self.oracle.mutates(self.target, self.product.workload.name)

    @property
    def _writes_inputs(self) -> bool:
        """Then repeated calls work on what they have left there."""
        return any(path.startswith("input/") for path in self._mutated)

    @property
    def _follows_state(self) -> bool:
        return FOLLOWS_STATE in self._mutated

    @property
    def _goes_on(self) -> bool:
        """Calls have changed their own inputs, or the state that they answer from: no answer can be expected any more
        but that to a first call on what was written since, and none where state went on."""
        return self._writes_inputs or self._follows_state

    def _check_touched(self, table: Table, candidate: Party) -> None:
        """One more turn, like all others, after a single element of an input was changed behind the kernel's back.

        A kernel that works while it is being checked and rests while it is timed leaves the old answer there, and so
        does one that knows its inputs by their address or by a sample of them. Outputs keep what the last call left:
        nothing but that element tells this turn from the others.
        """
        frame = CHANCE.randrange(self.rotation.frames)
        self.oracle.touch(table.bench, frame, CHANCE.fresh_seed())
        candidate.turn(self.pace.slice_ns, least=self.rotation.frames)
        self._judge(table, frame)

    def _check_changed(self, table: Table, call_ns: float) -> None:
        """Calls as they are timed, but that values change between two of them, without a pause: a kernel that works
        where somebody may look, and rests in a run of calls, leaves old answers there."""
        for _ in range(_CHANGED_BURSTS):
            visited = self._visited(call_ns)
            chosen = CHANCE.sample(range(len(visited)), min(_CHANGED_SETS, len(visited)))
            pieces = {at: self._staged(table, visited[at], renewed=bool(number)) for number, at in enumerate(chosen)}
            sets = [table.layout.bindings(frame) for frame in visited]
            with self._awake(table) as worker:
                calls = drawn_calls(CHANCE, len(sets), call_ns)
                changed_burst(worker, sets, calls, pieces, timeout_s=self.hang_limit_s)
            self._judge_all(table, [visited[at] for at in chosen])

    def _check_written(self, table: Table, call_ns: float) -> None:
        """The same by this process, while the candidate's is calling: host code sees who writes in its own process, and
        how many calls it was asked for, but not when somebody else does."""
        wrong = 0
        for _ in range(_WRITTEN_TRIES):
            visited = self._visited(call_ns)
            calls = max(_WRITTEN_VISITS * len(visited), math.ceil(_WRITTEN_NS / max(call_ns, 1.0)))
            chosen = CHANCE.sample(visited, min(_CHANGED_SETS, len(visited)))
            if not self._write_meanwhile(table, visited, chosen, calls):
                continue
            try:
                return self._judge_all(table, chosen)
            except Refusal:
                wrong += 1
                if wrong == _WRITTEN_WRONG:
                    raise

    def _write_meanwhile(self, table: Table, visited: Sequence[int], chosen: Sequence[int], calls: int) -> bool:
        """``calls`` over the frames ``visited``, while new values are written into those ``chosen``. Were they there
        long before the calls ended?"""
        sets = [table.layout.bindings(frame) for frame in visited]
        pieces = [piece for frame in chosen for piece in self._staged(table, frame, renewed=frame % 2 == 0)]
        share = CHANCE.uniform(*_WRITTEN_AFTER)
        with self._awake(table) as worker, ThreadPoolExecutor(1) as thread, table.arena.mapped() as memory:
            # How long it takes now, with these very sets.
            wait_s = share * worker.run_many(sets, calls, timeout_s=self.hang_limit_s) / 1e9
            began_ns = time.perf_counter_ns()
            request = thread.submit(worker.run_many, sets, calls, timeout_s=self.hang_limit_s)
            time.sleep(wait_s)
            for offset, data in pieces:
                memory[offset : offset + len(data)] = data
            written_ns = time.perf_counter_ns() - began_ns
            return written_ns < _WRITTEN_BEFORE * request.result()

    def _visited(self, call_ns: float) -> list[int]:
        """The frames that turns rotate over, or some of them where that would take long."""
        most = max(1, int(_CHANGED_NS / max(2 * call_ns, 1.0)))
        frames = range(self.rotation.frames)
        return sorted(CHANCE.sample(frames, min(most, len(frames))))

    def _staged(self, table: Table, frame: int, *, renewed: bool) -> tuple[tuple[int, bytes], ...]:
        return self.oracle.stage(table.bench, frame, CHANCE.fresh_seed(), renewed=renewed)

    @contextlib.contextmanager
    def _awake(self, table: Table) -> Iterator[Worker]:
        """The worker at ``table``, which stands still otherwise."""
        worker = self._workers[table.bench]
        worker.cont()
        try:
            yield worker
        finally:
            worker.stop()

    def _judge_all(self, table: Table, frames: Sequence[int]) -> None:
        """As :meth:`_judge`; judging goes on for a while only."""
        until = time.monotonic() + _JUDGING_S
        for frame in frames:
            self._judge(table, frame)
            if time.monotonic() > until:
                return

    def _check_new_values(
        self, table: Table, candidate: Party, call_ns: float, trusted_ns: float, slowdown: Callable[[], float]
    ) -> None:
        """All values change at once: is every answer new, and does it take no longer than before? See the module
        ``novelty``. What a memory saves up to the limit is charged in :meth:`measure`. ``trusted_ns``: a call of the
        first baseline. ``slowdown``: how many times slower than in the blocks the machine is now."""
        frames = self.sets
        # Answers of the first round are judged, in a drawn order: a kernel may rest at some places only, or in some
        # passes. Judging may cost a second each; the other rounds are there for the time, and for one answer each.
        unjudged = CHANCE.sample(range(frames), frames)

        def play() -> Round:
            self.oracle.renew(table.bench, _seeds(frames))
            new_ns, new_foreign = self._watched_pass(candidate)
            until = time.monotonic() + _JUDGING_S
            while unjudged and not self._follows_state:
                self._judge(table, unjudged.pop())
                if time.monotonic() > until:
                    unjudged.clear()
            unjudged.append(CHANCE.randrange(frames))
            self.oracle.rewrite(table.bench)
            seen_ns, seen_foreign = self._watched_pass(candidate)
            return Round(new_ns, seen_ns, new_foreign, seen_foreign)

        rounds = play_rounds(play, call_ns)
        lag = lag_of(rounds, call_ns)
        own_lag = min(lag, lag_of(undisturbed(rounds), call_ns))
        if lag > 1.0 and own_lag <= 1.0:
            self.crowded = True  # others may have made the difference: a pass is as short as a time slice of theirs
            return
        self.lag = max(self.lag, lag)
        if own_lag > REFUSED_ABOVE:
            raise Refusal(
                Status.REJECTED,
                f"{self.product.workload.name}: a call takes {call_ns / 1e3:.3g} us on values it has seen before and "
                f"{own_lag:.1f} times that on new ones, in each of {len(rounds)} rounds: it remembers answers",
            )
        self._check_no_call_skipped(rounds, play, call_ns, trusted_ns, slowdown)

    def _check_no_call_skipped(
        self,
        rounds: tuple[Round, ...],
        play: Callable[[], Round],
        call_ns: float,
        trusted_ns: float,
        slowdown: Callable[[], float],
    ) -> None:
        """Native code sees which answers are fetched, and any kernel which values have been there for long: does a call
        take as long where all of them are, and none has? What it saves below the limit is charged, too."""
        workload = self.product.workload
        limit, slack_ns, spare_ns = REFUSED_ABOVE, EVENT_SLACK_NS, 0.0
        if self.clock == "supervisor":
            limit, spare_ns = SINGLE_REFUSED_ABOVE, pass_share_ns(self.sets)
            # On a CPU what a pass costs besides may be twice as much, and grow with it.
            slack_ns = SINGLE_SLACK_NS if self.device == "cuda" else pass_share_ns(self.rotation.frames)
        doubtful = doubtful_above(limit, slack_ns, call_ns)

        slower: list[float] = []

        def times(found: Sequence[Round]) -> float:
            # The fastest pass, and the machine at its fastest since.
            return single_of(found, call_ns * max(1.0, min(slower, default=1.0)), spare_ns)

        # A launch plan writes its answers where they are judged; a module's are copied there.
        if self.clock == "supervisor" and self._hosted and times(rounds) > doubtful:
            spare_ns += self._fetching_ns(trusted_ns)
            # Host code that finds where an answer is copied to may write it there at once, and save the copying.
            self._check_writing(call_ns)
        while times(rounds) > doubtful and len(rounds) < MAX_ROUNDS:
            rounds = (*rounds, play())
            slower.append(slowdown())
        if times(rounds) <= doubtful:
            return
        own_times = times(undisturbed(rounds))
        if own_times <= doubtful:
            self.crowded = True
            return
        if self._writes_inputs:
            # What repeated calls leave there may be quicker to work on, for everybody.
            trusted = max(1.0, self._trusted_times(trusted_ns))
            self.lag = max(self.lag, times(rounds) / trusted if own_times / trusted > doubtful else 1.0)
            return
        if own_times > limit:
            raise Refusal(
                Status.REJECTED,
                f"{workload.name}: a call takes {call_ns / 1e3:.3g} us in a run of repeated calls and {own_times:.1f} "
                f"times that where all values are new and every answer is fetched, in each of {len(rounds)} rounds: it "
                "skips calls or remembers answers",
            )
        self.lag = max(self.lag, times(rounds))

    def _trusted_times(self, trusted_ns: float) -> float:
        """How many times ``trusted_ns``, its time among repeated ones, a call of the reference takes on new values."""
        number, name, taken = self.rotation.number, self.rotation.parties[0], list[float]()
        for seed in _seeds(_PASSES):
            self.oracle.request("redraw_sets", rotation=number, seed=seed)
            taken.append(self._baseline(name).once(self.rotation.frames))
        spare_ns = self._spare_ns / self.rotation.frames if self.clock == "supervisor" else 0.0
        return (min(taken) - spare_ns) / max(trusted_ns, 1.0)

    def _fetching_ns(self, trusted_ns: float) -> float:
        """What a call of a reference takes more than ``trusted_ns``, its time among repeated ones, in passes in which
        every answer is copied to a place of its own. By code that no candidate has touched."""
        number, party = self.rotation.number, self.rotation.parties[0]

        def passed_ns() -> float:
            return self.oracle.timed_request("run_many", rotation=number, calls=self.sets, party=party, fetched=True)

        with self._places():
            taken = [passed_ns() for _ in range(_PASSES)]
        fastest_ns = min(taken[1:]) - self._spare_ns  # the first touches pages
        return max(0.0, fastest_ns / self.sets - trusted_ns)

    def _check_writing(self, call_ns: float) -> None:
        """A call takes no less than to write its answer into new memory, the least that any call does. One slow
        measurement of that refuses nobody: the fastest of several counts."""
        size_bytes = self.product.workload.output_bytes
        if size_bytes < _LARGE_ANSWER_BYTES:
            return
        answers = max(1, min(self.sets, _WRITTEN_AT_ONCE_BYTES // size_bytes))
        with self._places():
            for _ in range(_PASSES):
                taken_ns = self.oracle.request("writing_ns", rotation=self.rotation.number, answers=answers)
                if call_ns >= _WRITTEN_ABOVE * taken_ns:
                    return
        told = f"a call takes {call_ns / 1e3:.3g} us, and to write its answer {taken_ns / 1e3:.3g} us"
        raise Refusal(Status.REJECTED, f"{self.product.workload.name}: faster than physics allows: {told}")

    @contextlib.contextmanager
    def _places(self) -> Iterator[None]:
        """The oracle holds memory for the answers of every set."""
        self.oracle.request("hold_places", rotation=self.rotation.number, wanted=True)
        try:
            yield
        finally:
            self.oracle.request("hold_places", rotation=self.rotation.number, wanted=False)

    def _watched_pass(self, candidate: Party) -> tuple[float, float]:
        """ns per call of one pass over every buffer set, and the share of it that others took."""
        load = self._load()
        per_call_ns = candidate.once(self.sets)
        return per_call_ns, load.share() if load is not None else 0.0

    def _judge(self, table: Table, frame: int) -> None:
        """Raise Refusal where the frame's outputs are not those of the values that stand there now."""
        name = self.product.workload.name
        outputs = output_leaves(self.product.traced.main, table.layout, frame)
        check = self.oracle.check(table.bench, frame, outputs)
        # State that the reference updates has had many updates by now; verification compares it after one.
        updated = {path.removeprefix("state/") for path in self._mutated if path.startswith("state/")}
        # A mismatch names them as their author does: "buffer bn.running_mean".
        found = [m for m in check.mismatches if m.output.partition(" ")[2] not in updated]
        if found:
            reason = f"{name}: an output of a timed call is wrong: {found[0].output}: {found[0].detail}"
            raise Refusal(status_of(tuple(found)), reason)


def _alike(table: Table, beside: Table) -> bool:
    """May two products work on each other's arena? What a plan prepares lies in its own."""
    prepared = any(one.product.traced.prepare is not None for one in (table, beside))
    return not prepared and table.layout == beside.layout


def _seeds(count: int) -> list[int]:
    """Secret seeds, as many as there are frames."""
    return [CHANCE.fresh_seed() for _ in range(count)]


def time_alone(
    oracle: OracleClient, rotation: Rotation, clock: Clock, pace: Pace, flush_bytes: int, turns: int = 9
) -> dict[str, Sample]:
    """Each baseline by itself, before a candidate exists."""
    samples = {}
    for name in rotation.parties:
        party = baseline_party(oracle, rotation.number, name, clock=clock, flush_bytes=flush_bytes)
        party.turn(pace.slice_ns / 4)
        values = [value for value in (party.turn(pace.slice_ns) for _ in range(turns)) if value > 0]
        if not values:
            raise OracleError(
                f"the {name} reference could not be timed: no turn gave a positive time",
                remedy="the machine is too busy; try again when it is idle",
            )
        samples[name] = sample_of(values, len(values))
    return samples


def summarise(
    rotation: Rotation,
    blocks: Sequence[Block],
    launches: int,
    roofline_ns: float | None,
    placement_ns: float = 0.0,
) -> WorkloadTiming:
    """Samples and ratios of one workload's sitting; ``placement_ns`` as in ``ratio_of``."""
    parties = blocks[0].parties
    timed = {p: [block for block in blocks if p in block.parties] for p in parties}
    samples = {p: sample_of([block.of(p) for block in timed[p]], len(timed[p]), 2) for p in parties}
    ratios = {p: ratio_of(timed[p], p, placement_ns=placement_ns) for p in parties if p != "candidate"}
    return WorkloadTiming(
        workload=rotation.workload.name,
        candidate=samples["candidate"],
        eager=samples["eager"],
        compile=samples.get("compile"),
        vs_eager=ratios["eager"],
        vs_compile=ratios.get("compile"),
        launches=launches,
        roofline_ns=roofline_ns,
        incumbent=samples.get("incumbent"),
        vs_incumbent=ratios.get("incumbent"),
    )


def kept_blocks(blocks: Sequence[Block]) -> tuple[TimedBlock, ...]:
    """The blocks as records."""
    return tuple(TimedBlock(block.process, block.ns, block.foreign) for block in blocks)


def was_disturbed(alone: dict[str, Sample], timing: WorkloadTiming) -> bool:
    """Did a baseline run slower in this sitting than by itself, so that nothing follows from it?"""
    if timing.vs_eager.high < _HOPELESS:
        return False
    inside = {"eager": timing.eager, **({"compile": timing.compile} if timing.compile else {})}
    return any(disturbed(alone[name], sample) for name, sample in inside.items() if name in alone)
