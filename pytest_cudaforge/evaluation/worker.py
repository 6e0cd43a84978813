"""The untrusted child that runs one candidate, and the supervisor's handle to it.

On CUDA the host code in the child is ours alone; with cpp the candidate's native code shares it, so nothing the child
says is believed: outputs are compared by the oracle and time is taken by the supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pytest_cudaforge import languages, plan
from pytest_cudaforge.errors import DeviceError, ForgeError, LaunchFailure, WorkerProtocol
from pytest_cudaforge.evaluation import ageing, images
from pytest_cudaforge.evaluation.arena import DeviceArena, HostArena, checked, driver_of
from pytest_cudaforge.evaluation.changes import Change, decode_changes, encode_changes, writers
from pytest_cudaforge.evaluation.channel import WORKER_CAPS, Channel, Reply, Request
from pytest_cudaforge.evaluation.child import Child
from pytest_cudaforge.evaluation.clockless import clockless
from pytest_cudaforge.evaluation.settings import (
    OPENMP_REGIONS,
    OPENMP_THREADS,
    allocated_bytes,
    changed,
    openmp_counts,
    openmp_regions,
    thread_settings,
)
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.plan import LaunchPlan, TracedPlan

if TYPE_CHECKING:
    from pytest_cudaforge.evaluation.crowd import Crowd
    from pytest_cudaforge.evaluation.event_clock import EventClock
    from pytest_cudaforge.runtime.replay import Bound, Program

__all__ = ["Arena", "Binding", "EventSamples", "Which", "Worker", "serve"]

Which = Literal["main", "prepare"]
#: (slot of an attached arena, byte offset of the buffer's first element); one per buffer of the plan, in order
Binding = tuple[int, int]

_START, _ATTACH, _DETACH, _RELOAD, _RUN, _RUN_MANY, _TIME_EVENTS, _TIME_RUN, _THREADS = range(1, 10)
_RUN_CHANGED, LEFT, _RUN_BESIDE, ALLOCATED, _RUN_REPEATED = 10, 11, 12, 13, 14
_COUNT, _ADVANCE, _RUN_TOGETHER, _OPEN = 18, 19, 20, 21
_OK, _LAUNCH_REFUSED, _BROKEN, _DEVICE_REFUSED = range(4)
MAX_SLOT = 1023
_TEAM_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
#: Calls of two threads that were under way at once, to tell how they get on with each other.
_MET = 64
#: Calls that a variable has to grow in alike before it is a counter: at least, at most, and how long they may take.
_COUNTED, _COUNTED_S = (64, 4096), 0.03


class Arena(Protocol):
    """What :meth:`Worker.attach` needs of an arena."""

    @property
    def fd(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class EventSamples:
    """Program 1 of the timing rules. ``ns`` is device time per sample, from event to event.

    ``late_ns`` is what a device-wide synchronise after the end event still waited (largest sample): time that the
    events did not see. ``exposed`` counts samples whose host side was not hidden behind the spin kernel. ``probe_ns``:
    the probe's time after each sample, where it was asked for.
    """

    ns: tuple[int, ...]
    late_ns: int
    exposed: int
    probe_ns: tuple[int, ...] = ()


class Worker:
    """A handle to one sandboxed process. Thread-safe: calls are served one after another. A context manager.

    Every operation raises WorkerCrash, WorkerTimeout or WorkerProtocol where the process fails (the handle is dead
    afterwards and only ``close`` may be called), and LaunchFailure where replay or CUDA refuses (a sticky CUDA error is
    named in it; close the worker then too).
    DeviceError comes from ``open``, ``start`` and ``attach`` only: the machine's fault, before any candidate code ran.
    ``timeout_s`` is the limit of that operation: SIGTERM at the limit, SIGKILL of everything a moment later.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self._on_gpu = False
        self._sets: Sequence[Sequence[Binding]] | None = None

    @property
    def pgid(self) -> int:
        """Host process group (the child leads its own), for ``lease.register``."""
        return self._child.pid

    def open(self, device: str, *, timeout_s: float = 60) -> None:
        """Make the context on ``device`` ("cuda:0") before there is anything to load: it takes its time."""
        self._ask(_OPEN, {"device": device}, "making a context", timeout_s)

    def start(
        self, traced: TracedPlan, binaries: Sequence[Binary], device: str = "cpu", *, timeout_s: float = 60
    ) -> None:
        """Send the plan and its binaries and load them on ``device`` ("cpu", "cuda:0")."""
        self._on_gpu = device != "cpu"
        encoded = [languages.binary_to_bytes(binary) for binary in binaries]
        payload = {"traced": plan.encode(traced), "device": device, "sizes": [len(part) for part in encoded]}
        self._ask(_START, payload, "loading the kernels", timeout_s, blob=b"".join(encoded))

    def attach(
        self,
        slot: int,
        arena: Arena,
        *,
        readonly: bool = False,
        guards: Sequence[tuple[int, int]] = (),
        timeout_s: float = 30,
    ) -> None:
        """Map ``arena`` in the worker under ``slot`` (0 to 1023), replacing what was there.

        ``guards``: (offset, bytes) of pages of a host arena that it must not touch.
        Seal a host arena first (``seal_readonly``) where native code must not be able to map it writable.
        """
        if not 0 <= slot <= MAX_SLOT:
            raise ValueError(f"slot {slot} is not in 0..{MAX_SLOT}")
        self._sets = None
        payload = {"slot": slot, "nbytes": arena.nbytes, "readonly": readonly, "guards": [list(g) for g in guards]}
        self._ask(_ATTACH, payload, "attaching memory", timeout_s, descriptors=(arena.fd,))

    def detach(self, slot: int, *, timeout_s: float = 30) -> None:
        """Unmap ``slot``; nothing where it is empty."""
        self._sets = None
        self._ask(_DETACH, {"slot": slot}, "detaching memory", timeout_s)

    def reload(self, phase: str, *, timeout_s: float = 30) -> None:
        """Begin a clean phase: unload every module and load it again, so that ``__device__`` state is fresh."""
        self._sets = None
        self._ask(_RELOAD, {}, f"loading the kernels again for {phase}", timeout_s)

    def run(
        self,
        which: Which,
        bindings: Sequence[Binding],
        *,
        timeout_s: float,
        room: int | None = None,
        at_work: bool = False,
        late: bool = False,
        elsewhere: str = "",
    ) -> LaunchPlan | None:
        """Run the main or the prepare plan once and synchronise the device. ``room``: while all of a GPU but
        one multiprocessor (0), or so many threads of it, is busy, asleep or ``at_work`` (see ``crowd``).
        ``elsewhere``: a CPU's kernels where libraries' "images" are closed (see ``images``), or "clockless", or of
        a module, as ``late`` is; a plan's launches follow whatever is in their stream, and have one caller.

        Returns None: outputs lie where the plan says. (A module's worker tells what the call returned.)
        """
        asked: dict[str, Any] = {"which": which, "bindings": [list(b) for b in bindings], "elsewhere": elsewhere}
        asked |= {"room": room, "at_work": at_work}
        self._ask(_RUN, asked, f"running {which}", timeout_s)
        return None

    def run_many(
        self,
        sets: Sequence[Sequence[Binding]],
        calls: int,
        *,
        timeout_s: float,
        first_set: int = 0,
        among: int | None = None,
        shows_state: bool = False,
    ) -> int:
        """Run the main plan ``calls`` times, rotating over buffer ``sets`` from ``first_set`` on, then synchronise.
        ``among``: over so many of them only, the first ones. ``shows_state``: what a module has written into its state
        is where the oracle compares it afterwards, as a plan's always is.

        Returns the time in ns from sending the request to having the answer, by *this* process's clock; two call
        counts give the slope (T2n - Tn) / n. The first call with new sets also binds them: warm up first.
        """
        # The same object again: the worker has bound them, and to do so again would cost every request.
        plain = None if sets is self._sets else _plain(sets)
        payload = {"sets": plain, "calls": calls, "first_set": first_set, "among": among, "shows_state": shows_state}
        self._sets = sets
        started_ns = time.perf_counter_ns()
        self._ask(_RUN_MANY, payload, "timed calls", timeout_s)
        return time.perf_counter_ns() - started_ns

    def run_changed(
        self, sets: Sequence[Sequence[Binding]], calls: int, changes: Sequence[Change], *, timeout_s: float
    ) -> None:
        """As :meth:`run_many`, with ``changes`` written between calls, which visit every set at least once.

        The candidate's process writes them: what lies there afterwards is for the oracle to compare.
        """
        places, blob = encode_changes(changes)
        payload = {"sets": _plain(sets), "calls": calls, "changes": places}
        self._ask(_RUN_CHANGED, payload, "calls on changing values", timeout_s, blob=blob)

    def run_repeated(self, bindings: Sequence[Binding], calls: int, *, most_s: float, timeout_s: float) -> None:
        """CPU only: the main plan with ``bindings``, up to ``calls`` times without a pause and for ``most_s``.

        Ends with the first call whose outputs are other bytes than the first one's: threads that race each other are
        right most of the time. Whether it is wrong is for the oracle to say.
        """
        payload = {"bindings": _plain([bindings])[0], "calls": calls, "most_s": most_s}
        self._ask(_RUN_REPEATED, payload, "repeated calls", timeout_s)

    def run_beside(
        self, bindings: Sequence[Binding], others: Sequence[Binding], least: int, most: int, *, timeout_s: float
    ) -> None:
        """CPU only: the main plan with ``bindings``, while another thread runs it with ``others``: ``least`` calls, and
        up to ``most`` until enough of them have met another.

        Ends early with the first call whose outputs are other bytes than a call alone left: which of the
        two, if any, is right is for the oracle to say. The last call with ``bindings`` was not alone.
        """
        payload = {"sets": _plain([bindings, others]), "least": least, "most": most}
        self._ask(_RUN_BESIDE, payload, "calls of two threads at once", timeout_s)

    def run_together(
        self, bindings: Sequence[Binding], others: Sequence[Binding], calls: int, *, endless: bool, timeout_s: float
    ) -> None:
        """CPU only: two threads begin together; one runs the main plan ``calls`` times with ``bindings``, the other one
        with ``others``, as often, or (``endless``) until the first one has done."""
        payload = {"sets": _plain([bindings, others]), "calls": calls, "endless": endless}
        self._ask(_RUN_TOGETHER, payload, "calls that two threads begin together", timeout_s)

    def count_calls(self, bindings: Sequence[Binding], *, most_calls: int, timeout_s: float) -> ageing.Counted:
        """Calls of the main plan with ``bindings``, on the same values, to find variables of the candidate's that grow
        by as much in each of them. ``most_calls``: as they may be moved by, by :meth:`advance_calls`."""
        asked = {"bindings": _plain([bindings])[0], "most_calls": most_calls}
        values = self._ask(_COUNT, asked, "looking for variables that count calls", timeout_s).values
        if len(values) != 3:
            self._child.kill()
            raise WorkerProtocol(f"3 values expected, {len(values)} came", phase="counting calls")
        return ageing.Counted(*values)

    def advance_calls(self, calls: int | None, *, timeout_s: float) -> None:
        """Have those variables as ``calls`` further calls would leave them; None: shortly before the first wraps."""
        self._ask(_ADVANCE, {"calls": calls}, "moving variables that count calls", timeout_s)

    def time_events(
        self,
        sets: Sequence[Sequence[Binding]],
        samples: int,
        *,
        flush_bytes: int,
        timeout_s: float,
        first_set: int = 0,
        warm: bool = True,
        probed: bool = False,
    ) -> EventSamples:
        """CUDA only: ``samples`` cold device times of one call each, set ``(first_set + i) % len(sets)`` for sample i.

        ``flush_bytes`` is twice the L2 (0: hot). ``warm``: every set is run once before, untimed.
        ``probed``: with the clock's probe after each.
        """
        payload = {
            "sets": _plain(sets),
            "samples": samples,
            "flush_bytes": flush_bytes,
            "first_set": first_set,
            "warm": warm,
            "probed": probed,
        }
        reply = self._ask(_TIME_EVENTS, payload, "device timing", timeout_s)
        values, expected = reply.values, samples * (2 if probed else 1) + 2
        if len(values) != expected:
            self._child.kill()
            raise WorkerProtocol(f"{expected} values expected, {len(values)} came", phase="device timing")
        return EventSamples(values[:samples], values[samples], values[samples + 1], values[samples + 2 :])

    def time_run(
        self, sets: Sequence[Sequence[Binding]], calls: int, *, timeout_s: float, first_set: int = 0
    ) -> tuple[int, int]:
        """CUDA only: as :meth:`run_many`, by both clocks: (ns by this process's clock, ns by device events)."""
        payload = {"sets": _plain(sets), "calls": calls, "first_set": first_set}
        started_ns = time.perf_counter_ns()
        reply = self._ask(_TIME_RUN, payload, "calls by two clocks", timeout_s)
        taken_ns = time.perf_counter_ns() - started_ns
        if len(reply.values) != 1:
            self._child.kill()
            raise WorkerProtocol(f"one value asked, {len(reply.values)} came", phase="calls by two clocks")
        return taken_ns, reply.values[0]

    def set_threads(self, count: int, *, alone: bool = False, limit: int = 0) -> None:
        """CPU only: how many threads OpenMP's parallel regions get from now on, where they do not say themselves.
        ``alone``: as many at most, but only one in fact, as within another's parallel region. ``limit``: so many in
        fact where it is not 0, as where OMP_THREAD_LIMIT says so, or a busy machine gives no more."""
        asked = {"count": count, "alone": alone, "limit": limit}
        self._ask(_THREADS, asked, "setting the number of threads", 30)

    def own_bytes(self) -> int:
        """Memory that the process has to itself, arenas left out; 0 where /proc does not tell."""
        try:
            # By the pages themselves: the counters in statm lag behind by hundreds of them.
            with open(f"/proc/{self._child.pid}/smaps_rollup", encoding="ascii") as stream:
                found = next((line.split()[1] for line in stream if line.startswith("Anonymous:")), "0")
        except OSError:
            return 0
        return int(found) * 1024

    def allocated_bytes(self, *, timeout_s: float) -> int:
        """What malloc has given out in the process, by its own words; 0 where it does not say."""
        return next(iter(self._ask(ALLOCATED, {}, "asking what is allocated", timeout_s).values), 0)

    def processor_ns(self) -> int:
        """The time that its threads have been running or waiting for a processor, ended ones left out; 0 where /proc
        does not tell. A wait counts when it is over: see ``at_work``."""
        taken_ns = 0
        for path in glob.glob(f"/proc/{self._child.pid}/task/*/schedstat"):
            with contextlib.suppress(OSError), open(path, encoding="ascii") as stream:
                taken_ns += sum(map(int, stream.read().split()[:2]))
        return taken_ns

    def at_work(self) -> bool:
        """Does a thread of its run at this moment, or wait for a processor?"""
        for path in glob.glob(f"/proc/{self._child.pid}/task/*/stat"):
            with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as stream:
                if stream.read().rpartition(")")[2].split()[:1] == ["R"]:
                    return True
        return False

    def processors(self) -> frozenset[str]:
        """Which ones its threads may run on, as /proc has it: one set for all of them, as a rule."""
        found = set()
        for path in glob.glob(f"/proc/{self._child.pid}/task/*/status"):
            with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as stream:
                found |= {line.split()[1] for line in stream if line.startswith("Cpus_allowed_list:")}
        return frozenset(found)

    def open_files(self) -> int:
        """How many descriptors the process has; 0 where /proc does not tell."""
        try:
            return len(os.listdir(f"/proc/{self._child.pid}/fd"))
        except OSError:
            return 0

    def left_changed(self, *, timeout_s: float) -> tuple[str, ...]:
        """The names of the settings (see ``settings``) that calls have left otherwise than they found them."""
        names = tuple(thread_settings(team=False))
        reply = self._ask(LEFT, {}, "asking what calls have left changed", timeout_s)
        return tuple(name for index, name in enumerate(names) if index in reply.values)

    def stop(self) -> None:
        """SIGSTOP; returns once every thread has stopped.

        For while another party is timed, and before outputs are looked at: a call may have left threads behind that
        still compute.
        """
        self._child.stop()

    def cont(self) -> None:
        """SIGCONT."""
        self._child.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill everything in the sandbox and wait until it is gone; a second call does nothing."""
        self._child.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(
        self,
        operation: int,
        payload: Any,
        phase: str,
        timeout_s: float,
        *,
        blob: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> Reply:
        reply = self._child.ask(
            operation,
            payload,
            phase=phase,
            caps=WORKER_CAPS,
            timeout_s=timeout_s,
            blob=blob,
            descriptors=descriptors,
        )
        if reply.status == _OK:
            return reply
        text = "".join(c if c.isprintable() or c == "\n" else "?" for c in reply.text)
        if reply.status == _LAUNCH_REFUSED:
            raise LaunchFailure(text or f"refused during {phase}")
        if reply.status == _DEVICE_REFUSED and self._on_gpu:
            raise DeviceError(f"{phase}: {text}")
        self._child.kill()
        raise WorkerProtocol(f"the worker failed during {phase}: {text}", phase=phase)


def _plain(sets: Sequence[Sequence[Binding]]) -> list[list[list[int]]]:
    return [[list(binding) for binding in bindings] for bindings in sets]


# -- in the child ----------------------------------------------------------------------------------------------


def serve(channel: Channel) -> None:
    """Answer requests until the supervisor is gone."""
    service = _Service()
    while True:
        request = channel.receive_request()
        try:
            values = service.answer(request)
        except DeviceError as error:
            # Before the candidate ran it is the machine's fault, afterwards a fault of the kernel's shows this way.
            status = _DEVICE_REFUSED if request.operation in (_OPEN, _START, _ATTACH) else _LAUNCH_REFUSED
            channel.send_reply(request.nonce, status, text=str(error)[:4000])
        except (ForgeError, ValueError) as error:
            channel.send_reply(request.nonce, _LAUNCH_REFUSED, text=str(error)[:4000])
        except (ImportError, OSError, MemoryError, KeyError, AttributeError, TypeError) as error:
            channel.send_reply(request.nonce, _BROKEN, text=f"{type(error).__name__}: {error}"[:4000])
        else:
            channel.send_reply(request.nonce, _OK, values)


class _Service:
    """The candidate's programs, the attached arenas and what is bound of them."""

    def __init__(self) -> None:
        self._device = "cpu"
        self._traced: TracedPlan | None = None
        self._binaries: list[Binary] = []
        self._programs: dict[Which, Program] = {}
        self._arenas: dict[int, HostArena | DeviceArena] = {}
        self._bound: dict[tuple[Which, tuple[Binding, ...]], Bound] = {}
        self._rotation: list[Bound] = []
        self._clock: EventClock | None = None
        self._crowd: Crowd | None = None
        self._driver: Any = None
        self._settings: dict[str, object] = {}
        self._counters: tuple[ageing.Counter, ...] = ()
        #: Of OpenMP's threads, where it is not 0.
        self._limit = 0

    @property
    def _index(self) -> int:
        return int(self._device.partition(":")[2] or 0)

    def answer(self, request: Request) -> Sequence[int]:
        asked = request.payload
        if request.operation == _OPEN:
            self._open(asked["device"])
        elif request.operation == _START:
            self._start(asked, request.blob)
        elif request.operation == _ATTACH:
            self._attach(asked, request.descriptors[0])
        elif request.operation == _DETACH:
            self._detach(asked["slot"])
        elif request.operation == _RELOAD:
            self._load()
        elif request.operation == _RUN:
            bound = self._bind(asked["which"], asked["bindings"])
            if asked["room"] is not None and self._device != "cpu":
                self._crowded().around(bound, asked["room"], at_work=asked["at_work"])
            else:
                if self._device != "cpu":
                    self._crowded().soil()
                if asked["elsewhere"]:
                    with self._without(asked["elsewhere"]):
                        bound.run()
                elif self._limit:
                    _run_limited(bound.run, self._limit)
                else:
                    bound.run()
            self._synchronize(f"running {asked['which']}")
        elif request.operation == _RUN_MANY:
            self._run_many(asked["sets"], asked["calls"], asked["first_set"], asked["among"])
        elif request.operation == _RUN_CHANGED:
            self._run_changed(asked, request.blob)
        elif request.operation == _RUN_BESIDE:
            self._run_beside(asked["sets"], asked["least"], asked["most"])
        elif request.operation == _RUN_TOGETHER:
            self._run_together(asked["sets"], asked["calls"], asked["endless"])
        elif request.operation == _RUN_REPEATED:
            self._run_repeated(asked["bindings"], asked["calls"], asked["most_s"])
        elif request.operation == _THREADS:
            _set_openmp_threads(asked["count"], alone=asked["alone"])
            self._limit = asked["limit"]
            self._settings |= {OPENMP_THREADS: openmp_counts(), OPENMP_REGIONS: openmp_regions()}
        elif request.operation == LEFT:
            left = changed(self._settings, thread_settings(self._device == "cpu"))
            return [index for index, name in enumerate(self._settings) if name in left]
        elif request.operation == ALLOCATED:
            return (allocated_bytes(),)
        elif request.operation == _COUNT:
            return self._count(asked)
        elif request.operation == _ADVANCE:
            ageing.advance(self._memory(), self._counters, asked["calls"])
        elif request.operation == _TIME_EVENTS:
            return self._time_events(asked)
        elif request.operation == _TIME_RUN:
            return (self._event_clock().around(self._rotated(asked), asked["calls"]),)
        return ()

    def _open(self, device: str) -> None:
        self._device = device
        if device != "cpu":
            # Keeps the context, and with it the arenas, when a reload closes every program.
            self._driver = driver_of(self._index)

    def _start(self, asked: Any, blob: bytes) -> None:
        self._open(asked["device"])
        self._traced = plan.decode(asked["traced"])
        self._binaries = []
        offset = 0
        for size in asked["sizes"]:
            self._binaries.append(languages.binary_from_bytes(blob[offset : offset + size]))
            offset += size
        self._settings = thread_settings(self._device == "cpu")
        self._load()

    def _without(self, what: str) -> contextlib.AbstractContextManager[None]:
        """What a CPU's kernels may lack."""
        if what == "images":
            return images.closed()
        return clockless([part for program in self._programs.values() for part in program.code()])

    def _load(self) -> None:
        from pytest_cudaforge.runtime.replay import load_program

        assert self._traced is not None
        self._bound.clear()
        for program in self._programs.values():
            program.close()
        self._programs = {"main": load_program(self._traced.main, self._binaries, self._device)}
        if self._traced.prepare is not None:
            self._programs["prepare"] = load_program(self._traced.prepare, self._binaries, self._device)

    def _attach(self, asked: Any, fd: int) -> None:
        self._detach(asked["slot"])
        if self._device == "cpu":
            arena = HostArena.attach(fd, asked["nbytes"], asked["readonly"])
            self._arenas[asked["slot"]] = arena
            arena.guard(asked["guards"])
        else:
            self._arenas[asked["slot"]] = DeviceArena.attach(fd, asked["nbytes"], self._index, asked["readonly"])

    def _detach(self, slot: int) -> None:
        arena = self._arenas.pop(slot, None)
        if arena is not None:
            self._bound.clear()
            arena.close()

    def _bind(self, which: Which, bindings: Sequence[Sequence[int]]) -> Bound:
        key = (which, tuple((slot, offset) for slot, offset in bindings))
        if key not in self._bound:
            if which not in self._programs:
                raise LaunchFailure(f"the candidate has no {which} plan")
            program = self._programs[which]
            addresses = [self._address(slot, offset) for slot, offset in key[1]]
            self._check(program, key[1])
            self._bound[key] = program.bind(addresses)
        return self._bound[key]

    def _address(self, slot: int, offset: int) -> int:
        if slot not in self._arenas:
            raise LaunchFailure(f"no arena is attached under slot {slot}")
        return self._arenas[slot].address + offset

    def _check(self, program: Program, bindings: Sequence[Binding]) -> None:
        """Every buffer of the plan lies inside its arena; a mistake of the caller, not of the candidate."""
        for buffer, (slot, offset) in zip(program.plan.buffers, bindings, strict=True):
            if offset < 0 or offset + buffer.spec.extent_bytes > self._arenas[slot].nbytes:
                raise LaunchFailure(f"a buffer of {buffer.spec.extent_bytes} bytes at {offset} is outside its arena")

    def _run_many(self, sets: Sequence[Any] | None, calls: int, first: int, among: int | None) -> None:
        if sets is not None:
            self._rotation = [self._bind("main", bindings) for bindings in sets]
        rotation = self._rotation[:among]
        runs = [bound.run for bound in (*rotation[first:], *rotation[:first])]
        whole, rest = divmod(calls, max(1, len(runs)))
        for _ in range(whole):
            for run in runs:
                run()
        for run in runs[:rest]:
            run()
        self._synchronize("running main")

    def _count(self, asked: Any) -> Sequence[int]:
        bound, memory = self._bind("main", asked["bindings"]), self._memory()

        def call(calls: int) -> None:
            for _ in range(calls):
                bound.run()
            self._synchronize("running main")

        call(1)  # a thread's own variables have a place from here on
        variables = self._programs["main"].variables()
        if not variables:
            return (0, 0, 0)
        began = time.monotonic()
        call(2)
        least, most = _COUNTED
        calls = min(most, max(least, int(2 * _COUNTED_S / max(1e-9, time.monotonic() - began))))
        self._counters = ageing.counters(memory, variables, call, calls)
        found = ageing.counted(memory, self._counters, asked["most_calls"])
        return (found.words, found.most_calls, found.wrap_calls)

    def _memory(self) -> ageing.Memory:
        return ageing.HostMemory() if self._device == "cpu" else ageing.DeviceMemory(self._driver)

    def _run_changed(self, asked: Any, blob: bytes) -> None:
        runs = [self._bind("main", bindings).run for bindings in asked["sets"]]
        count = len(runs)
        driver = None if self._device == "cpu" else self._driver
        with writers(decode_changes(asked["changes"], blob), self._address, driver) as written:
            for call in range(asked["calls"]):
                for write in written.get(call, ()):
                    write()
                runs[call % count]()
            self._synchronize("running main")

    def _run_beside(self, sets: Sequence[Any], least: int, most: int) -> None:
        bound, other = (self._bind("main", bindings) for bindings in sets)
        bound.run()
        alone = self._outputs(sets[0])
        done, met, ended = 0, 0, threading.Event()

        def beside() -> None:
            nonlocal done
            while not ended.is_set():
                other.run()
                done += 1

        with ThreadPoolExecutor(1) as pool:
            task = pool.submit(beside)
            try:
                # Its first call builds a team of threads.
                while not (done or task.done()):
                    bound.run()
                for call in range(most):
                    before = done
                    bound.run()
                    met += done > before
                    if self._outputs(sets[0]) != alone or (call >= least and met >= _MET):
                        break
            finally:
                ended.set()
            task.result()

    def _run_together(self, sets: Sequence[Any], calls: int, endless: bool) -> None:
        bound, other = (self._bind("main", bindings) for bindings in sets)
        ready, ended = threading.Barrier(2), threading.Event()

        def beside() -> None:
            ready.wait()
            for call in itertools.count():
                if ended.is_set() if endless else call == calls:
                    return
                other.run()

        with ThreadPoolExecutor(1) as pool:
            task = pool.submit(beside)
            ready.wait()
            try:
                for _ in range(calls):
                    bound.run()
            finally:
                ended.set()
            task.result()

    def _run_repeated(self, bindings: Any, calls: int, most_s: float) -> None:
        bound, until = self._bind("main", bindings), time.monotonic() + most_s
        bound.run()
        first = self._outputs(bindings)
        for _ in range(calls):
            bound.run()
            if self._outputs(bindings) != first or time.monotonic() > until:
                break

    def _outputs(self, bindings: Sequence[Sequence[int]]) -> list[bytes]:
        plan_ = self._programs["main"].plan
        places = [(plan_.buffers[index].spec, bindings[index]) for index in sorted(plan_.output_buffers)]
        return [ctypes.string_at(self._address(slot, offset), spec.extent_bytes) for spec, (slot, offset) in places]

    def _synchronize(self, doing: str) -> None:
        """Wait for the device before anything of ours touches it: a fault that shows here is the candidate's."""
        if self._device != "cpu":
            checked(self._driver.cuCtxSynchronize(), doing)

    def _time_events(self, asked: Any) -> Sequence[int]:
        rotated = self._rotated(asked)
        return self._event_clock().sample(
            rotated, asked["samples"], asked["flush_bytes"], warm=asked["warm"], probed=asked["probed"]
        )

    def _rotated(self, asked: Any) -> list[Bound]:
        """The buffer sets asked for, bound, from the first one on."""
        if self._device == "cpu":
            raise LaunchFailure("device events were asked of the CPU")
        bounds = [self._bind("main", bindings) for bindings in asked["sets"]]
        first = asked["first_set"] % len(bounds)
        return [*bounds[first:], *bounds[:first]]

    def _event_clock(self) -> EventClock:
        if self._clock is None:
            from pytest_cudaforge.evaluation.event_clock import EventClock

            self._clock = EventClock(self._index)
        return self._clock

    def _crowded(self) -> Crowd:
        if self._crowd is None:
            from pytest_cudaforge.evaluation.crowd import Crowd

            self._crowd = Crowd(self._index)
        return self._crowd


def _set_openmp_threads(count: int, *, alone: bool) -> None:
    """Of the OpenMP runtime that the kernels brought along; nothing where they brought none."""
    with contextlib.suppress(OSError):
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        library.omp_set_num_threads(ctypes.c_int(count))
        library.omp_set_max_active_levels(ctypes.c_int(0 if alone else _usual_levels()))


def _run_limited(run: Callable[[], None], limit: int) -> None:
    """Where OpenMP's teams have so many threads at most, whatever omp_get_max_threads says: within a region of
    ``teams thread_limit(limit)``, whose entry point in libgomp this is. Plainly where the kernels brought no libgomp,
    or an old one (before GCC 9)."""
    try:
        teams = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_teams_reg
    except (OSError, AttributeError):
        run()
        return
    failed: list[LaunchFailure] = []

    def body(_: object) -> None:
        try:
            run()
        except LaunchFailure as failure:  # which could not leave a callback of C's
            failed.append(failure)

    teams(_TEAM_BODY(body), None, ctypes.c_uint(1), ctypes.c_uint(limit), ctypes.c_uint(0))
    for failure in failed:
        raise failure


@functools.lru_cache(maxsize=1)
def _usual_levels() -> int:
    library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return max(1, int(library.omp_get_max_active_levels()))
