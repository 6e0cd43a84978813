"""Is hand-written code slower than it was? A plain module as it is checked in now against its version at the merge
base: interleaved, each in fresh processes of its own. It measures; :mod:`pytest_cudaforge.guard` decides.

Both are the repo's own code, run as references are run: eager, by device events on a GPU and by the supervisor's slope
on a CPU, where the one that is not being timed stands still. Both get the values that the merge base's version draws:
what the other draws by itself where that is the same, which it is unless somebody changed it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pytest_cudaforge.errors import ConfigError, DeviceError, OracleError, TargetError
from pytest_cudaforge.evaluation.oracle import NO_ROOM, OracleClient
from pytest_cudaforge.evaluation.parties import (
    Clock,
    EventParty,
    EventTimes,
    Party,
    SlopeParty,
    request_ns,
    turn_of,
)
from pytest_cudaforge.evaluation.pressure import DeviceWatch, ForeignLoad
from pytest_cudaforge.evaluation.priority import favoured
from pytest_cudaforge.evaluation.race import Diary, RacePace, Turn, block_order, quiet, quiet_block, settled
from pytest_cudaforge.evaluation.sitting import frame_count, kept_blocks
from pytest_cudaforge.evaluation.timing import FOREIGN, Block, block_of, crowded
from pytest_cudaforge.hardware.nvml import DeviceMonitor
from pytest_cudaforge.lease import DeviceLease
from pytest_cudaforge.records import Race, Target, WorkloadFacts, from_json, to_json

__all__ = ["PlainRace", "plain_pace"]

_HEAD, _BASE = "candidate", "base"
_PARTY = "eager"
_MOST_PROCESSES = 10
#: Values of more than this are not handed from one version to the other.
_MOST_HANDED_BYTES = 1 << 30
#: So many input sets a CPU's calls rotate over: two versions draw them anew in every process.
_MOST_SETS = 16
#: As in a race of kernels.
_WARMING_TURNS = {"cpu": 3, "cuda": 1}
_QUIET_TURNS, _MOST_ROUNDS = 8, 20
_MOST_NOTES = 3

_CROWDED = {
    "cpu": "other processes kept the cores busy nearly all the time",
    "cuda": "the device was slowed down or used by others in nearly every block",
}

_Result = TypeVar("_Result")


def plain_pace(device: str, processes: int | None, budget_s: float | None) -> RacePace:
    """As for kernels, but more processes at most: a forked one costs a third of a second on a GPU, and modules of many
    small kernels differ from process to process by a few per cent there."""
    return replace(RacePace.racing(device, processes, budget_s, hosted=False), processes=processes or _MOST_PROCESSES)


class _BaseFailed(Exception):
    """The version at the merge base cannot be run: nothing to compare with, and no fault of what is checked in now."""


@dataclass
class _Case:
    """One workload, forward or backward, and what has been found out about it."""

    workload: WorkloadFacts
    backward: bool
    frames: int = 1
    blocks: list[Block] = field(default_factory=list)
    #: Why there is nothing to compare.
    incomparable: str = ""
    #: How many calls a turn makes.
    calls: int = 1
    #: Clear enough, so that no further process measures it.
    done: bool = False
    diary: Diary = field(default_factory=Diary)

    def say(self, text: str) -> None:
        if text not in self.diary.notes:
            self.diary.notes.append(text)


@dataclass(frozen=True)
class _Facts:
    """One version, as its first process tells."""

    workloads: tuple[WorkloadFacts, ...]
    state: Mapping[str, Any]
    init: Any
    mode: str
    grad: bool
    copies: tuple[str, ...]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> _Facts:
        workloads = tuple(from_json(WorkloadFacts, one) for one in told["workloads"])
        return cls(**{**told, "workloads": workloads, "copies": tuple(told["copies"])})

    def of_name(self, name: str) -> WorkloadFacts | None:
        return next((one for one in self.workloads if one.name == name), None)


@dataclass
class _Pair:
    """A fresh process of each version. ``together``: both may be busy at once."""

    head: OracleClient
    base: OracleClient
    together: bool

    def both(self, of_base: Callable[[], Any], of_head: Callable[[], Any]) -> tuple[Any, Any]:
        """What each does, at the same time where that is no slower: on a CPU their threads would wait for each other.
        Where both fail, what is checked in now does."""
        if not self.together:
            own = _heads(of_head)
            return _bases(of_base), own
        with ThreadPoolExecutor(1) as pool:
            promised = pool.submit(_bases, of_base)
            own = _heads(of_head)
            return promised.result(), own


class PlainRace:
    """One target's race. ``client_of``: a client of an oracle that is still to be started, for these import paths.
    ``users``: other processes of ours that use the device."""

    def __init__(
        self,
        target: Target,
        base: Target,
        client_of: Callable[[Sequence[str]], OracleClient],
        *,
        device: str,
        clock: Clock,
        pace: RacePace,
        lease: DeviceLease,
        python_paths: Sequence[str] = (),
        cache_bytes: int = 0,
        flush_bytes: int = 0,
        monitor: DeviceMonitor | None = None,
        users: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self.target, self.base, self._client_of = target, base, client_of
        self.device, self.clock, self.pace, self.lease = device, clock, pace, lease
        self._paths = tuple(python_paths)
        self._cache_bytes, self._flush_bytes = cache_bytes, flush_bytes
        self._pids: set[int] = set()
        self._shared = Diary()
        self._watch = DeviceWatch(monitor, lambda: self._pids | set(users())) if monitor is not None else None

    def run(self, workloads: Sequence[str] | None = None) -> tuple[Race, ...]:
        """Raises TargetError where what is checked in now cannot be imported or run, ConfigError for a workload that it
        does not have."""
        cases: list[_Case] = []
        try:
            for process in range(self.pace.processes):
                with self._pair(process) as pair:
                    cases = cases or self._cases(pair, workloads)
                    for case in cases:
                        self._measure(process, pair, case)
                if all(case.done or case.incomparable for case in cases):
                    break
        except _BaseFailed as error:
            return self._without_base(cases, str(error))
        return tuple(self._race(case, len(cases)) for case in cases)

    # -- processes

    @contextlib.contextmanager
    def _pair(self, process: int) -> Iterator[_Pair]:
        """A fresh process of each, started by turns the one or the other first."""
        moved = [_moved(path, self.target.root, self.base.root) for path in self._paths]
        with self._client_of(self._paths) as head, self._client_of(moved) as base:
            with self.lease.work(), self._shared.phase("starting"):
                for client in (head, base) if process % 2 else (base, head):
                    client.start()
                head.request("relocate", **_relocation(self.base, self.target))
                base.request("relocate", **_relocation(self.target, self.base))
            pids = {client.pid for client in (head, base) if client.pid is not None}
            self._pids |= pids
            # Before they begin threads, which are then as they are; this process holds the clock.
            goes_first = favoured({*pids, os.getpid()}) if self.device == "cpu" else contextlib.nullcontext()
            try:
                with goes_first:
                    yield _Pair(head, base, together=self.device != "cpu")
            finally:
                self._pids -= pids

    # -- what is compared

    def _cases(self, pair: _Pair, workloads: Sequence[str] | None) -> list[_Case]:
        with self.lease.work(), self._shared.phase("facts"):
            told = pair.both(
                lambda: pair.base.request("version", target=to_json(self.base)),
                lambda: pair.head.request("version", target=to_json(self.target)),
            )
        base, head = (_Facts.of(one) for one in told)
        known = {w.name: w for w in head.workloads}
        for name in workloads or ():
            if name not in known:
                raise ConfigError(f"{self.target.id} has no workload {name!r}", expected=", ".join(known))
        gone = [w for w in base.workloads if w.name not in known and workloads is None]
        cases = []
        for workload in (*known.values(), *gone):
            if workloads is None or workload.name in workloads:
                backward = (False, True) if head.grad or base.grad else (False,)
                cases += [self._case(workload, wanted, head, base) for wanted in backward]
        return cases

    def _case(self, workload: WorkloadFacts, backward: bool, head: _Facts, base: _Facts) -> _Case:
        case = _Case(workload, backward, self._frames(workload), incomparable=_incomparable(workload, head, base))
        if not case.incomparable:
            case.diary.notes += _notes(head, base)
        return case

    def _frames(self, workload: WorkloadFacts) -> int:
        return min(_MOST_SETS, frame_count(workload, self.device, self._cache_bytes, self.clock))

    # -- one process of each

    def _measure(self, process: int, pair: _Pair, case: _Case) -> None:
        if case.incomparable or case.done:
            return
        with self.lease.work(), case.diary.phase("values"):
            numbers = self._opened(process, pair, case)
        if not case.incomparable:
            with self.lease.timing(), case.diary.phase("blocks"):
                case.blocks += self._blocks(process, pair, case, numbers)
        _bases(lambda: pair.base.request("end_rotation", rotation=numbers[0]))
        pair.head.request("end_rotation", rotation=numbers[1])
        usable = {block.process for block in case.blocks if block.foreign <= FOREIGN}
        case.done = len(usable) >= self.pace.fewest and settled(case.blocks, self.clock, self.device)

    def _opened(self, process: int, pair: _Pair, case: _Case) -> tuple[int, int]:
        """A rotation of each, base first, on the same values and ready to be timed."""
        args: dict[str, Any] = {"workload": case.workload.name, "frames": case.frames, "backward": case.backward}
        base, head = pair.both(
            lambda: pair.base.request("open_version", target=to_json(self.base), **args),
            lambda: pair.head.request("open_version", target=to_json(self.target), **args),
        )
        numbers = base["rotation"], head["rotation"]
        self._hand_over(pair, case, numbers, base["prints"], head["prints"])
        if process == 0 and not case.backward:
            self._compare_answers(pair, case, numbers)
        try:
            _bases(lambda: pair.base.request("prepare_version", rotation=numbers[0]))
        except _BaseFailed as error:
            if not case.backward:
                raise
            # A forward that runs need not have a backward.
            case.incomparable = f"the merge base's version has no backward here: {_first_line(error)}"
            return numbers
        _heads(lambda: pair.head.request("prepare_version", rotation=numbers[1]))
        return numbers

    def _hand_over(
        self, pair: _Pair, case: _Case, numbers: tuple[int, int], base: Mapping[str, Any], head: Mapping[str, Any]
    ) -> None:
        """The base's values to the other version, where that has others in the same places."""
        wanted = [place for place in base if place in head and base[place] != head[place] and _alike(base, head, place)]
        if not wanted:
            return
        total = sum(_nbytes(base[place]) for place in wanted)
        if total > _MOST_HANDED_BYTES:
            case.say(f"each version has values of its own: {total} bytes are too many to hand over")
            return
        with tempfile.TemporaryDirectory(prefix="cudaforge-values-") as folder:
            path = str(Path(folder) / "values")
            places = _bases(lambda: pair.base.request("give", rotation=numbers[0], path=path, wanted=wanted))
            pair.head.request("take", rotation=numbers[1], path=path, places=places)
        case.say(f"{_named(wanted)} of the merge base's version were given to the other, which makes others")

    def _compare_answers(self, pair: _Pair, case: _Case, numbers: tuple[int, int]) -> None:
        """A note where the results are not what they were: that is no regression of the performance."""
        base, head = pair.both(
            lambda: pair.base.request("answer", rotation=numbers[0], path=""),
            lambda: pair.head.request("answer", rotation=numbers[1], path=""),
        )
        if base == head:
            return
        shapes = [
            {path: told[0][:2] if len(told) > 1 else told for path, told in side.items()} for side in (base, head)
        ]
        if shapes[0] != shapes[1]:
            case.say(f"results changed: {shapes[0]} at the merge base, {shapes[1]} now")
            return
        if sum(_nbytes(told) for told in base.values()) > _MOST_HANDED_BYTES:
            case.say("whether results changed was not looked at: too many bytes")
            return
        with tempfile.TemporaryDirectory(prefix="cudaforge-values-") as folder:
            path = str(Path(folder) / "answer")
            pair.head.request("answer", rotation=numbers[1], path=path)
            found = _bases(lambda: pair.base.request("disagreements", rotation=numbers[0], path=path))
        if found:
            case.say(f"results changed beyond the tolerance: {'; '.join(found[:_MOST_NOTES])}")

    # -- the clock

    def _blocks(self, process: int, pair: _Pair, case: _Case, numbers: tuple[int, int]) -> list[Block]:
        blocks: list[Block] = []
        with _Gate(pair) as gate:
            parties: dict[str, Party] = {
                _HEAD: self._party(pair.head, gate, numbers[1], _heads),
                _BASE: self._party(pair.base, gate, numbers[0], _bases),
            }
            self._warmed(parties, case)
            deadline = time.monotonic() + self.pace.budget_s / self.pace.fewest
            for count in range(self.pace.max_blocks):
                taking = self._quiet_block if self.device == "cpu" else self._event_block
                block = taking(process + count, parties, case.calls, deadline)
                blocks += [replace(block, process=process)] if block is not None else []
                if count + 1 >= self.pace.min_blocks and time.monotonic() > deadline:
                    break
        return blocks

    def _warmed(self, parties: Mapping[str, Party], case: _Case) -> None:
        """Page faults, thread pools and clocks; and how many calls a turn makes, of both equally many."""
        for _ in range(_WARMING_TURNS[self.device]):
            for party in parties.values():
                party.turn(self.pace.slice_ns)
                # A disturbed turn makes too few: what was found in any process counts.
                case.calls = max(case.calls, party.calls)

    def _event_block(self, number: int, parties: Mapping[str, Party], calls: int, deadline: float) -> Block | None:
        load = self._watch.load() if self._watch is not None else None
        order = block_order((), True, bool(number % 2))
        taken = [turn_of(name, parties[name], parties[name].measure(calls)) for name in order]
        share = load.share() if load is not None else 0.0
        return block_of(0, sorted(taken, key=lambda turn: turn.party != _HEAD), share)

    def _quiet_block(self, number: int, parties: Mapping[str, Party], calls: int, deadline: float) -> Block | None:
        """As in a race of kernels: turns of each until enough of them had the machine to themselves."""
        turns: dict[str, list[Turn]] = {_HEAD: [], _BASE: []}
        for count in range(_MOST_ROUNDS):
            for name in block_order((), True, bool((count + number) % 2)):
                load = ForeignLoad()
                ns = parties[name].measure(calls)
                turns[name] += [Turn(ns, load.share())] if ns > 0 else []
            late = count + 1 >= 2 and time.monotonic() > deadline
            if late or (count % 2 and all(len(quiet(taken)) >= _QUIET_TURNS for taken in turns.values())):
                break
        return quiet_block(0, turns)

    def _party(self, own: OracleClient, gate: _Gate, rotation: int, ask: Callable[[Callable[[], Any]], Any]) -> Party:
        """``ask`` makes a request, and says whose failure its failure is."""
        args: dict[str, Any] = {"rotation": rotation, "party": _PARTY}
        if self.clock == "events":
            args["flush_bytes"] = self._flush_bytes

            def sample(count: int, warm: bool, probed: bool) -> EventTimes:
                return EventTimes(*ask(lambda: own.request("time_events", samples=count, probed=probed, **args)))

            return EventParty(sample)

        def run(calls: int, first: int) -> int:
            # The rotation itself goes on where it ended.
            gate.open_for(own)
            return int(ask(lambda: own.timed_request("run_many", calls=calls, **args)))

        gate.open_for(own)
        return SlopeParty(run, 1, spare_ns=ask(lambda: request_ns(own, rotation, _PARTY)))

    # -- the record

    def _race(self, case: _Case, cases: int) -> Race:
        notes = [*case.diary.notes, *(self._watch.notes if self._watch is not None else ())]
        shared = {name: seconds / cases for name, seconds in self._shared.told}
        spent = tuple((name, round(seconds, 3)) for name, seconds in {**shared, **dict(case.diary.told)}.items())
        disturbed = case.incomparable
        if not disturbed and (not case.blocks or crowded(case.blocks)):
            disturbed = _CROWDED[self.device]
        return Race(
            workload=case.workload.name,
            clock=self.clock,
            blocks=kept_blocks(case.blocks) if not case.incomparable else (),
            what="backward" if case.backward else "forward",
            disturbed=disturbed,
            capped=self._watch is not None and self._watch.capped,
            notes=tuple(dict.fromkeys(notes)),
            seconds=round(sum(seconds for _, seconds in spent), 3),
            spent=spent,
        )

    def _without_base(self, cases: Sequence[_Case], why: str) -> tuple[Race, ...]:
        """One race without blocks for each case, or for the target where its cases are not known."""
        text = f"the version at the merge base cannot be run here: {why}"
        named = [(case.workload.name, case.backward) for case in cases] or [("", False)]
        return tuple(
            Race(
                name,
                self.clock,
                (),
                "backward" if backward else "forward",
                text,
                seconds=round(self._shared.seconds, 3),
            )
            for name, backward in named
        )


class _Gate:
    """On a CPU only one of a pair runs at a time; the other stands still."""

    def __init__(self, pair: _Pair) -> None:
        self._pair = pair
        self._running: OracleClient | None = None
        self._stack = contextlib.ExitStack()

    def open_for(self, client: OracleClient) -> None:
        """Let ``client`` run, and the other one stand still."""
        if self._pair.together or self._running is client:
            return
        self._stack.close()
        other = self._pair.base if client is self._pair.head else self._pair.head
        self._stack.enter_context(other.paused())
        self._running = client

    def __enter__(self) -> _Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _bases(action: Callable[[], _Result]) -> _Result:
    """``action`` of the base alone. Raises _BaseFailed for what goes wrong with it."""
    try:
        return action()
    except (TargetError, OracleError, DeviceError) as error:
        raise _BaseFailed(str(error)) from error


def _heads(action: Callable[[], _Result]) -> _Result:
    """``action`` of what is checked in now. Raises TargetError also for a fault of its kernels: its process is its own,
    and the device goes on; _BaseFailed where there is no room for two."""
    try:
        return action()
    except DeviceError as error:
        if error.what.startswith(NO_ROOM):
            raise _BaseFailed(f"there is no room for two versions at once: {error.what}") from error
        raise TargetError(f"it failed on the device: {error.what}") from error


def _moved(path: str, root: str, other: str) -> str:
    """``path`` in the other checkout, where it lies in this one."""
    return str(Path(other) / Path(path).relative_to(root)) if Path(path).is_relative_to(root) else path


def _relocation(foreign: Target, own: Target) -> dict[str, Any]:
    package = own.module_name.partition(".")[0] if "." in own.module_name else ""
    return {"foreign": foreign.root, "own": own.root, "package": package, "import_root": own.import_root}


# -- two versions ------------------------------------------------------------------------------------------------


def _incomparable(workload: WorkloadFacts, head: _Facts, base: _Facts) -> str:
    """Why a workload of the two says nothing of their speed; "" where it does."""
    at_base, now = base.of_name(workload.name), head.of_name(workload.name)
    if now is None:
        return "this workload is gone: there is nothing to compare with the merge base's"
    if at_base is None:
        return "this workload is new since the merge base: there is nothing to compare with"
    if dict(now.inputs) != dict(at_base.inputs):
        return f"its inputs changed, so it is another workload: {_shown(at_base)} at the merge base, {_shown(now)} now"
    if head.mode != base.mode:
        return f"its mode changed, so it is another workload: {base.mode} at the merge base, {head.mode} now"
    if head.init != base.init and head.state != base.state:
        return "it is constructed with other arguments than at the merge base, and is another size: another workload"
    return ""


def _notes(head: _Facts, base: _Facts) -> list[str]:
    notes = [
        f"{name} is an installed copy, not this checkout's: changes of it are not seen (pip install -e . shows them)"
        for name in head.copies
    ]
    if head.init != base.init:
        notes.append("it is constructed with other arguments than at the merge base")
    only = [path for path in head.state if head.state[path] != base.state.get(path)]
    if only:
        notes.append(f"weights that the merge base's version does not have are as constructed: {_listed(only)}")
    return notes


def _shown(workload: WorkloadFacts) -> str:
    told = [f"{path}: {getattr(v, 'dtype', '')}{list(getattr(v, 'shape', [v]))}" for path, v in workload.inputs]
    return ", ".join(told)


def _alike(base: Mapping[str, Any], head: Mapping[str, Any], place: str) -> bool:
    """Tensors of one shape and dtype? Prints are ``[spec, checksum]``."""
    return len(base[place]) == len(head[place]) == 2 and bool(base[place][0][:2] == head[place][0][:2])


def _nbytes(told: Sequence[Any]) -> int:
    """Of a tensor, by its print; at least, since a dtype's name need not tell its width."""
    if len(told) < 2:
        return 0
    count = 1
    for size in told[0][0]:
        count *= size
    width = next((int(bits) // 8 for bits in ("128", "64", "32", "16", "8") if bits in told[0][1]), 1)
    return count * max(1, width)


def _named(places: Sequence[str]) -> str:
    kinds = dict.fromkeys("weights" if place.startswith("state/") else "inputs" for place in places)
    return " and ".join(kinds)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NOTES
    return ", ".join(names[:_MOST_NOTES]) + (f" and {rest} more" if rest > 0 else "")


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
