"""Is it slower than it was? What is checked in now, its version at the merge base and their reference in one sitting,
interleaved, over fresh processes. It measures and keeps every block; :mod:`pytest_cudaforge.guard` decides.

Candidate and base are treated alike, so that two identical ones cannot be told apart: they change places from block to
block and from process to process, work on the very same memory where their plans allow it, and neither is charged for
what only one of them is asked (the candidate's answers are judged, after its blocks).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from pytest_cudaforge.errors import LaunchFailure, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation.cases import call_layout
from pytest_cudaforge.evaluation.parties import Party, request_ns
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.sitting import Pace, Sitting, Table
from pytest_cudaforge.evaluation.timing import Block, block_of, crowded
from pytest_cudaforge.records import Status

__all__ = ["BaseFailed", "Contest", "Reference", "block_order", "race_pace"]

#: Processes of candidate and base each. A CPU's take milliseconds to start, a GPU's a third of a second, a module's
#: seconds.
_PROCESSES = {"cpu": 6, "cuda": 4}
_BUDGET_S = {"cpu": 2.4, "cuda": 2.4}
#: Blocks of one process, and the fewest where time has run out.
_BLOCKS, _FEWEST_BLOCKS = 8, 3

_PARTIES = ("candidate", "base", "eager", "compile")

_Result = TypeVar("_Result")
#: What a candidate's promises are about.
Reference = Literal["eager", "compile"]


def race_pace(device: str, processes: int | None, budget_s: float | None) -> Pace:
    """``budget_s``: of the blocks of one workload; None: what suffices on that kind of device."""
    usual = Pace.of(device, budget_s or _BUDGET_S[device])
    return replace(usual, processes=processes or _PROCESSES[device], min_blocks=_BLOCKS, max_blocks=_BLOCKS)


def block_order(references: Sequence[str], base: bool, turned: bool) -> tuple[str, ...]:
    """Everybody forward and backward, so that a linear drift cancels; ``turned``: the base stands where the candidate
    does otherwise. What follows whom costs something on a machine with caches and sleeping threads."""
    racing = ["candidate", "base"] if base else ["candidate"]
    order = [*(reversed(racing) if turned else racing), *references]
    return (*order, *reversed(order))


class BaseFailed(Exception):
    """The version at the merge base failed under the clock: no fault of the candidate's."""


class _BaseParty:
    """The base, whose failures are its own."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self.calls = 0

    def turn(self, slice_ns: float, least: int = 1) -> float:
        value = _base_s(lambda: self._party.turn(slice_ns, least))
        self.calls = self._party.calls
        return value

    def once(self, calls: int) -> float:
        return _base_s(lambda: self._party.once(calls))


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

    def measure(self) -> tuple[Block, ...]:
        """Every block of every process, disturbed ones included. Parties: "candidate", "base", the rotation's."""
        name, began = self.product.workload.name, time.monotonic()
        if self.clock == "supervisor":
            self._spare_ns = request_ns(self.oracle, self.rotation.number, "eager")
        blocks: list[Block] = []
        try:
            with self._tables() as (table, beside):
                for process in range(self.pace.processes):
                    left = self.pace.processes - process
                    deadline = time.monotonic() + max(0.0, self.pace.budget_s - (time.monotonic() - began)) / left
                    blocks += self._one_process(process, table, beside, deadline)
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, f"{name}, timed: {error}") from error
        except (WorkerFailure, LaunchFailure) as error:
            raise Refusal(Status.RUNTIME_ERROR, f"{name}, timed: {error}") from error
        self.crowded |= crowded(blocks)
        return tuple(blocks)

    @property
    def disturbance(self) -> str:
        """Why nothing may be decided from what was measured; "" where it was calm."""
        if not self.crowded:
            return ""
        if self.device == "cpu":
            return "other processes kept the cores busy in nearly every block"
        notes = self.watch.notes if self.watch is not None else []
        return "; ".join(["the device was slowed down or used by others in nearly every block", *notes])

    @contextlib.contextmanager
    def _tables(self) -> Iterator[tuple[Table, Table | None]]:
        """The candidate's and the base's arena: one and the same where both plans lay it out alike."""
        with contextlib.ExitStack() as stack:
            table = stack.enter_context(self._table(self.product, self.worker_of))
            other = self.incumbent
            if other is None:
                yield table, None
                return
            plans = (self.product.traced, other.product.traced)
            prepared = any(traced.prepare is not None for traced in plans)
            if not prepared and call_layout(plans[1], frames=self.rotation.frames) == table.layout:
                yield table, replace(table, product=other.product, worker_of=other.worker_of)
                return
            yield table, stack.enter_context(self._table(other.product, other.worker_of))

    def _one_process(self, process: int, table: Table, beside: Table | None, deadline: float) -> list[Block]:
        with contextlib.ExitStack() as stack:
            parties = self._seat(stack, table, beside, turned=bool(process % 2))
            for name in self.rotation.parties:
                parties[name] = self._baseline(name)
            for party in parties.values():
                party.turn(self.pace.slice_ns / 4)  # warm-up: page faults, thread pools, clocks
            blocks = self._race_blocks(process, parties, deadline)
            if blocks and not self._writes_inputs():
                self._check_timed_calls(process, table, parties, blocks)
            return blocks

    def _seat(
        self, stack: contextlib.ExitStack, table: Table, beside: Table | None, *, turned: bool
    ) -> dict[str, Party]:
        """A fresh worker for each, started in turn; the last one started is last in no other respect."""
        parties: dict[str, Party] = {}
        seats = [("candidate", table), *([("base", beside)] if beside is not None else [])]
        for name, place in reversed(seats) if turned else seats:
            if name == "base":
                parties[name] = _BaseParty(_base_s(lambda: stack.enter_context(self._seated(place))))  # noqa: B023
            else:
                parties[name] = stack.enter_context(self._seated(place))
        return parties

    def _race_blocks(self, process: int, parties: dict[str, Party], deadline: float) -> list[Block]:
        blocks: list[Block] = []
        for count in range(self.pace.max_blocks):
            order = block_order(self.rotation.parties, "base" in parties, bool((count + process) % 2))
            load = self._load()
            measured = [(name, parties[name].turn(self.pace.slice_ns)) for name in order]
            foreign = load.share() if load is not None else 0.0
            block = block_of(process, sorted(measured, key=lambda pair: _PARTIES.index(pair[0])), foreign)
            blocks += [block] if block is not None else []
            if len(blocks) >= _FEWEST_BLOCKS and time.monotonic() > deadline:
                break
        return blocks

    def _check_timed_calls(
        self, process: int, table: Table, parties: Mapping[str, Party], blocks: Sequence[Block]
    ) -> None:
        """As in any sitting, but once each: in other processes one changed element tells a kernel that rests."""
        if process < 2:
            super()._check_timed_calls(process, table, parties, blocks)
        else:
            self._check_touched(table, parties["candidate"])
