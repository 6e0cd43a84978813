"""Is it slower than it was? What is checked in now, its version at the merge base and their reference in one sitting,
interleaved, over fresh processes. It measures and keeps every block; :mod:`pytest_cudaforge.guard` decides.

Candidate and base are treated alike, so that two identical ones cannot be told apart: they change places from block to
block and from process to process, work on the very same memory where their plans allow it, and neither is charged for
what only one of them is asked (the candidate's answers are judged, after its blocks).
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pytest_cudaforge.errors import LaunchFailure, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation import comparison
from pytest_cudaforge.evaluation.cases import call_layout
from pytest_cudaforge.evaluation.parties import Clock, Party, request_ns, rough_call_ns, turn_of
from pytest_cudaforge.evaluation.pressure import CoreUsers, ForeignLoad
from pytest_cudaforge.evaluation.priority import favoured
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.sitting import Incumbent, Pace, Sitting, Table, pass_sets
from pytest_cudaforge.evaluation.timing import (
    FOREIGN,
    Block,
    block_of,
    crowded,
)
from pytest_cudaforge.records import Status

__all__ = ["BaseFailed", "Contest", "Diary", "RacePace", "Reference", "block_order", "settled"]

#: What a candidate's promises are about.
Reference = Literal["eager", "compile"]
#: The candidate's arena and the base's.
_Tables = tuple[Table, "Table | None"]
_PARTIES = ("candidate", "base", "eager", "compile")

_Result = TypeVar("_Result")
#: Blocks of one process: the most, and the fewest where time has run out.
_BLOCKS = {"cpu": (4, 2), "cuda": (4, 3)}
#: One turn on a CPU: shorter than what a scheduler gives somebody else at once.
_SLICE_NS = 0.6e6
#: What a turn of native code takes is never too little. A module's is: its answers are fetched in every request, which
#: costs as much as many calls and only cancels in the slope. So its turns are longer, and their median counts.
_FAST_SHARE, _HOSTED_SLICE_NS = 0.1, 2.4e6
_WARMING_TURNS = {"cpu": 5, "cuda": 1}
#: A turn in which somebody waited for a core for no longer than this share of it had the machine to itself. So many of
#: them make a block, at least so many; they are looked for in at most so many rounds of two turns each.
_QUIET, _QUIET_TURNS, _FEWEST_QUIET, _MOST_ROUNDS = 0.02, 8, 4, 20
#: Buffers up to so many bytes are drawn anew for each process where candidate and base cannot share them.
_REDRAWN_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
#: Two arenas beside a reference's own inputs and outputs may take so much of the memory.
_MEMORY_SHARE = 0.5
#: A race's candidate was verified; what takes so long on a busy machine is not yet a hang.
HANG_LIMIT_S = 60.0
#: What is worth a thought, as a log-ratio and in ns (see guard.Thresholds); near it more processes may tell.
_WORTH, _WORTH_NS = 0.03, 1_000.0


@dataclass(frozen=True)
class RacePace(Pace):
    """``fewest``: processes of candidate and base each before measuring may stop; ``processes`` is the most."""

    fewest: int = 1
    #: The quantile of a block's quiet turns on a CPU.
    share: float = _FAST_SHARE

    @classmethod
    def racing(cls, device: str, processes: int | None, budget_s: float | None, hosted: bool) -> RacePace:
        """``budget_s``: of the blocks of ``fewest`` processes. ``processes`` None: as many as it takes. A worker starts
        in milliseconds on a CPU, in a third of a second on a GPU, in seconds where it loads a module (``hosted``)."""
        fewest, most = (2, 4) if hosted else (4, 10) if device == "cpu" else (3, 6)
        slice_ns = Pace.of(device, 0.0).slice_ns
        if device == "cpu":
            slice_ns = _HOSTED_SLICE_NS if hosted else _SLICE_NS
        most_blocks, fewest_blocks = _BLOCKS[device]
        return cls(
            budget_s=budget_s or (6.0 if device == "cpu" else 1.5),
            slice_ns=slice_ns,
            processes=processes or most,
            min_blocks=fewest_blocks,
            max_blocks=most_blocks,
            fewest=processes or fewest,
            share=0.5 if hosted else _FAST_SHARE,
        )


@dataclass(frozen=True)
class Turn:
    """ns per call of one turn on a CPU, and the share of its time in which some process waited for a core."""

    ns: float
    foreign: float


def quiet(turns: Sequence[Turn]) -> list[Turn]:
    """Those that had the machine to themselves."""
    return [turn for turn in turns if turn.foreign <= _QUIET]


def quiet_block(process: int, turns: Mapping[str, Sequence[Turn]], share: float = _FAST_SHARE) -> Block | None:
    """A block of each party's quiet turns, of all parties equally many; None where a party has no turn at all.

    Of those the fast tenth (``share``): pressure shows who waited for a core and not what else (caches, a hypervisor,
    threads that slept too long), all of which takes longer and nothing shorter. Where two threads share a barrier with
    a third process a median is anything up to a thousand times the kernel's time.
    Where there were too few of them all turns are taken, and the block's ``foreign`` is 1.0: it is of no use.
    """
    if not all(turns.values()):
        return None
    fewest = min(len(quiet(taken)) for taken in turns.values())
    if fewest < _FEWEST_QUIET:
        return Block(process, tuple((name, _fast_ns(taken, share)) for name, taken in turns.items()), 1.0)
    kept = {name: sorted(taken, key=lambda turn: turn.foreign)[:fewest] for name, taken in turns.items()}
    foreign = max(statistics.fmean(turn.foreign for turn in taken) for taken in kept.values())
    return Block(process, tuple((name, _fast_ns(taken, share)) for name, taken in kept.items()), foreign)


def _fast_ns(turns: Sequence[Turn], share: float) -> float:
    ordered = sorted(turn.ns for turn in turns)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def settled(blocks: Sequence[Block], clock: Clock, device: str) -> bool:
    """May measuring stop? Where candidate and base are clearly apart by more than what is worth a thought, or clearly
    by less. It decides nothing: the guard does, from all of the blocks."""
    if crowded(blocks):
        return False
    if not blocks or "base" not in blocks[0].parties:
        return True
    kept = comparison.usable(blocks, clock)
    slower, processes = comparison.compare(kept, "candidate", "base", clock, comparison.Placement.usual(device))
    worth = 1.0 + max(_WORTH, _WORTH_NS / comparison.typical_ns(kept, "base", clock))
    return processes > 1 and (slower.high < worth or slower.low > worth)


def block_order(references: Sequence[str], base: bool, turned: bool) -> tuple[str, ...]:
    """Everybody forward and backward, so that a linear drift cancels; ``turned``: the base stands where the candidate
    does otherwise. What follows whom costs something on a machine with caches and sleeping threads."""
    racing = ["candidate", "base"] if base else ["candidate"]
    order = [*(reversed(racing) if turned else racing), *references]
    return (*order, *reversed(order))


class Diary:
    """What a race has to tell besides its blocks: notes for a person, and where its time went."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._began = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Since the diary was begun."""
        return time.perf_counter() - self._began

    @property
    def told(self) -> tuple[tuple[str, float], ...]:
        """Seconds by phase, in the order in which they came first."""
        return tuple((name, round(seconds, 3)) for name, seconds in self._spent.items())


class BaseFailed(Exception):
    """The version at the merge base failed under the clock: no fault of the candidate's."""


class _BaseParty:
    """The base, whose failures are its own."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self.calls = 0
        self.probe_ns: float | None = None

    def turn(self, slice_ns: float, least: int = 1) -> float:
        value = _base_s(lambda: self._party.turn(slice_ns, least))
        self.calls = self._party.calls
        return value

    def once(self, calls: int) -> float:
        return _base_s(lambda: self._party.once(calls))

    def measure(self, calls: int) -> float:
        value = _base_s(lambda: self._party.measure(calls))
        self.probe_ns = self._party.probe_ns
        return value


def _base_s(action: Callable[[], _Result]) -> _Result:
    """``action``, which only the base takes part in. Raises BaseFailed for what it does wrong."""
    try:
        return action()
    except (WorkerFailure, WorkerTimeout, LaunchFailure) as error:
        raise BaseFailed(str(error)) from error


class Contest(Sitting):
    """One workload's sitting of a race; ``incumbent`` is the version at the merge base.

    :meth:`measure` raises Refusal where the candidate fails under the clock, BaseFailed where the base does.
    """

    pace: RacePace

    def __init__(self, *args: Any, diary: Diary, memory_bytes: int, **options: Any) -> None:
        super().__init__(*args, memory_bytes=memory_bytes, **options)
        self._diary = diary
        #: Every turn of the process at hand, by party.
        self._usual: dict[str, list[float]] = {}
        #: How many calls a turn of each party makes, by what was found so far.
        self._calls: dict[str, int] = {}
        #: Who else used the cores, where they were crowded.
        self._busiest: list[str] = []

    def measure(self) -> tuple[Block, ...]:
        """Every block of every process, disturbed ones included. Parties: "candidate", "base", the rotation's."""
        name = self.product.workload.name
        if self.clock == "supervisor":
            self._spare_ns = request_ns(self.oracle, self.rotation.number, "eager")
            if self._hosted and self.rotation.parties:
                trusted_ns = rough_call_ns(self.oracle, self.rotation.number, "eager", self.rotation.frames)
                self.sets = pass_sets(self.rotation, self.device, self.memory_bytes, trusted_ns)
        blocks: list[Block] = []
        users = CoreUsers() if self.device == "cpu" else None
        try:
            with contextlib.ExitStack() as stack:
                kept = self._kept_tables(stack)
                for process in range(self.pace.processes):
                    blocks += self._one_process(process, kept)
                    if self._enough(blocks):
                        break
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, f"{name}, timed: {error}") from error
        except (WorkerFailure, LaunchFailure) as error:
            raise Refusal(Status.RUNTIME_ERROR, f"{name}, timed: {error}") from error
        # A check that found no quiet moment is no reason: what it would have charged is charged to nobody here.
        self.crowded = crowded(blocks)
        self._busiest = users.busiest() if users is not None and self.crowded else []
        return tuple(blocks)

    def _enough(self, blocks: Sequence[Block]) -> bool:
        usable = {block.process for block in blocks if block.foreign <= FOREIGN}
        return len(usable) >= self.pace.fewest and settled(blocks, self.clock, self.device)

    @property
    def capped(self) -> bool:
        """Did a GPU run at its power limit?"""
        return self.watch is not None and self.watch.capped

    @property
    def disturbance(self) -> str:
        """Why nothing may be decided from what was measured; "" where it was calm."""
        if not self.crowded:
            return ""
        if self.device == "cpu":
            told = "other processes kept the cores busy nearly all the time"
            return f"{told}: {', '.join(self._busiest)}" if self._busiest else told
        notes = self.watch.notes if self.watch is not None else []
        return "; ".join(["the device was slowed down or used by others in nearly every block", *notes])

    def _kept_tables(self, stack: contextlib.ExitStack) -> _Tables | None:
        """One arena for all processes, and for both candidate and base where their plans lay it out alike; None where
        each process shall have its own two, because where they lie would favour the one or the other."""
        other = self.incumbent
        if other is None:
            with self._diary.phase("arenas"):
                return stack.enter_context(self._table(self.entrant)), None
        plans = (self.product.traced, other.product.traced)
        prepared = any(traced.prepare is not None for traced in plans)
        layouts = [call_layout(traced, frames=self.sets) for traced in plans]
        if not prepared and layouts[0] == layouts[1]:
            with self._diary.phase("arenas"):
                both = tuple({*self.entrant.kept, *other.kept})
                table = stack.enter_context(self._table(replace(self.entrant, kept=both)))
            return table, replace(table, entrant=other)
        both_bytes = sum(int(layout.data["nbytes"]) for layout in layouts)
        if both_bytes > _MEMORY_SHARE * self.memory_bytes:
            what = f"its buffers and the candidate's take {both_bytes / 1e9:.1f} GB"
            raise BaseFailed(f"{what}, of {self.memory_bytes / 1e9:.1f} GB that the device has")
        if both_bytes > _REDRAWN_BYTES[self.device]:
            return self._two_tables(stack, other, turned=False)
        return None

    def _two_tables(self, stack: contextlib.ExitStack, other: Incumbent, *, turned: bool) -> _Tables:
        """An arena for each; ``turned``: the base's comes first."""
        entrants = [self.entrant, other]
        with self._diary.phase("arenas"):
            found = [
                stack.enter_context(self._table(entrant)) for entrant in (reversed(entrants) if turned else entrants)
            ]
        return (found[1], found[0]) if turned else (found[0], found[1])

    def _one_process(self, process: int, kept: _Tables | None) -> list[Block]:
        turned = bool(process % 2)
        with contextlib.ExitStack() as stack:
            if kept is None:
                assert self.incumbent is not None
                kept = self._two_tables(stack, self.incumbent, turned=turned)
            table, beside = kept
            with self._diary.phase("starting workers"):
                parties = self._seat(stack, table, beside, turned=turned)
            for name in self.rotation.parties:
                parties[name] = self._baseline(name)
            if self.device == "cpu":
                # Before the first call: threads begin as whoever begins them. This process holds the clock.
                stack.enter_context(favoured({*self._users(), os.getpid()}))
            with self._diary.phase("warming up"):
                calls = self._warmed(parties)
            with self._diary.phase("blocks"):
                deadline = time.monotonic() + self.pace.budget_s / self.pace.fewest
                blocks = self._race_blocks(process, parties, calls, deadline)
            if blocks:
                with self._diary.phase("judging"):
                    self._check_timed_calls(process, table, parties, blocks)
            return blocks

    def _warmed(self, parties: Mapping[str, Party]) -> dict[str, int]:
        """Page faults, thread pools and clocks; then how many calls a turn of each makes, candidate and base equally
        many: what a turn costs besides its calls must weigh the same."""
        for _ in range(_WARMING_TURNS[self.device]):
            for name, party in parties.items():
                party.turn(self.pace.slice_ns)
                # A disturbed turn makes too few: then what a request costs is most of what is seen.
                self._calls[name] = max(self._calls.get(name, 1), party.calls)
        racing = [name for name in ("candidate", "base") if name in parties]
        return {**self._calls, **dict.fromkeys(racing, max(self._calls[name] for name in racing))}

    def _seat(
        self, stack: contextlib.ExitStack, table: Table, beside: Table | None, *, turned: bool
    ) -> dict[str, Party]:
        """A fresh worker for each, both started at once; ``turned``: the base's is asked for first."""
        seats = [("candidate", table), *([("base", beside)] if beside is not None else [])]
        started = self._seat_all(stack, dict(seats[::-1] if turned else seats))
        parties: dict[str, Party] = {"candidate": started["candidate"].result()}
        if "base" in started:
            parties["base"] = _BaseParty(_base_s(started["base"].result))
        return parties if not turned else dict(reversed(parties.items()))

    def _race_blocks(
        self, process: int, parties: Mapping[str, Party], calls: Mapping[str, int], deadline: float
    ) -> list[Block]:
        blocks: list[Block] = []
        self._usual.clear()
        for count in range(self.pace.max_blocks):
            if self.device == "cpu":
                block = self._quiet_block(process, parties, calls, deadline)
            else:
                order = block_order(self.rotation.parties, "base" in parties, bool((count + process) % 2))
                load = self._load()
                taken = [turn_of(name, parties[name], parties[name].measure(calls[name])) for name in order]
                foreign = load.share() if load is not None else 0.0
                block = block_of(process, sorted(taken, key=lambda turn: _PARTIES.index(turn.party)), foreign)
                for turn in taken:
                    self._usual.setdefault(turn.party, []).append(turn.ns)
            blocks += [block] if block is not None else []
            if count + 1 >= self.pace.min_blocks and time.monotonic() > deadline:
                break
        return blocks

    def _quiet_block(
        self, process: int, parties: Mapping[str, Party], calls: Mapping[str, int], deadline: float
    ) -> Block | None:
        """Short turns until each party had enough of them to itself: on a busy machine most are not. How long a turn
        took has no say in that, so no party is favoured."""
        turns: dict[str, list[Turn]] = {name: [] for name in _PARTIES if name in parties}
        late = False
        for number in range(_MOST_ROUNDS):
            for name in block_order(self.rotation.parties, "base" in parties, bool((number + process) % 2)):
                load = ForeignLoad()
                ns = parties[name].measure(calls[name])
                self._usual.setdefault(name, []).append(ns)
                turns[name] += [Turn(ns, load.share())] if ns > 0 else []
                late = number > 1 and time.monotonic() > deadline
                if late:
                    break
            if late or (number % 2 and all(len(quiet(taken)) >= _QUIET_TURNS for taken in turns.values())):
                break
        return quiet_block(process, turns, self.pace.share)

    def _check_timed_calls(
        self, process: int, table: Table, parties: Mapping[str, Party], blocks: Sequence[Block]
    ) -> None:
        """As in any sitting, but once each: in a fresh process no kernel knows which one it is."""
        candidate = parties["candidate"]
        if process == 0 and self.rotation.parties:
            trusted = self.rotation.parties[0]
            candidate_ns, trusted_ns = (statistics.median(self._usual[name]) for name in ("candidate", trusted))

            def slowdown() -> float:
                if self.device != "cpu":
                    return 1.0
                return parties[trusted].turn(self.pace.slice_ns) / max(trusted_ns, 1.0)

            self._check_new_values(table, candidate, candidate_ns, trusted_ns, slowdown)
        elif process <= 1:
            if not self._goes_on:
                self._check_touched(table, candidate)
            self._check_families(table, candidate)
