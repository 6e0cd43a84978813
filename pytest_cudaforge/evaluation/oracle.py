"""The supervisor's handle to the oracle: a trusted, long-lived child with torch that serves many targets.

The process itself is :mod:`pytest_cudaforge.evaluation.oracle_child`; nothing here imports torch. A child that dies
(a target may call ``os._exit``) is reported with what it last printed and started anew at the next request.
"""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from pytest_cudaforge import errors
from pytest_cudaforge.errors import ForgeError, OracleError, TargetError
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.nursery import ForkedOracle, Nursery
from pytest_cudaforge.evaluation.teams import openmp_threads
from pytest_cudaforge.records import LintFinding, Mismatch, Target, TargetFacts, WorkloadFacts, from_json, to_json

__all__ = [
    "FATAL_FAMILY",
    "FATAL_VARIANT",
    "FOLLOWS_STATE",
    "NO_ROOM",
    "Check",
    "ExportedArena",
    "OracleClient",
    "TrialCase",
    "compiler_caches",
    "oracle_environment",
]

_LENGTH = struct.Struct("<Q")
_MAX_REPLY_BYTES = 1 << 30

#: What the oracle inherits. No token, key or proxy credential is on this list.
_ENVIRONMENT = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CC", "CXX", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
)

#: Operations that run a target's own code before anything else may have: a death there is the target's.
_TARGET_CODE = (
    *("facts", "backward", "lint", "structures", "families", "shortcuts", "hundreds"),
    *("variants", "landmarks", "rotation", "version", "guarded"),
)


#: Among what :meth:`OracleClient.mutates` tells.
FOLLOWS_STATE = "outputs follow state"
#: How a DeviceError begins that says nothing of the device but that the call is too large for it.
NO_ROOM = "the device has too little memory"
#: How an error begins that says on which kind of variant the device failed; so many kinds are left out, at most.
FATAL_VARIANT, _MOST_FATAL = "the reference makes the device fail, as a call that is ", 6
#: What precedes the name of a redraw on which the reference made the device fail.
FATAL_FAMILY = "the reference makes the device fail on values that are "
#: How the names of variants begin that have other strides, as in ``variants``, which needs torch.
STRIDED, SIZE = "strided", "size"


@dataclass(frozen=True)
class TrialCase:
    """How one trial's values come about; ``weights_seed`` None means the weights as constructed."""

    seed: int
    family: str = "drawn"
    weights_seed: int | None = None
    #: State paths that stay as constructed whatever the seed: a module candidate has no tensor of that name.
    kept: tuple[str, ...] = ()
    #: State and inputs that forward writes are as so many calls of the reference's left them: fewer where they take
    #: long, or where they cease to be finite.
    advanced: int = 0
    #: State paths whose values are those of another seed: as where a step changed these alone.
    others: tuple[str, ...] = ()
    others_seed: int | None = None
    #: What the weights add to channels is zero.
    unbiased: bool = False


@dataclass(frozen=True)
class Check:
    """The oracle's judgement of one call. ``partial``: fp64 was not possible everywhere."""

    mismatches: tuple[Mismatch, ...]
    error_ratio: float | None
    bound: float | None
    partial: bool


@dataclass(frozen=True)
class ExportedArena:
    """An arena the oracle made, as a worker's ``attach`` wants it. The descriptor is ours to close."""

    fd: int
    nbytes: int

    @contextlib.contextmanager
    def mapped(self) -> Iterator[mmap.mmap]:
        """Its bytes, writable: of an arena in host memory."""
        with mmap.mmap(self.fd, self.nbytes) as memory:
            yield memory

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


@dataclass
class _Deadly:
    """Redraws of a workload that took the reference's process down: nobody asks for them again, or a process would end
    in the middle of a verdict, with all that it holds. ``rare``: it did not say which, and those of rare values went
    first; ``all``: then the others. Other ``kinds`` of values, and sizes ``near`` to a number, are asked for on their
    own."""

    families: list[str] = field(default_factory=list)
    rare: bool = False
    all: bool = False
    kinds: set[str] = field(default_factory=set)
    near: bool = False

    def learn(self, what: str) -> None:
        family = what.removeprefix(FATAL_FAMILY)
        if family != what and family not in self.families and len(self.families) < _MOST_FATAL:
            self.families.append(family)
        elif not self.rare:
            self.rare = True
        else:
            self.all = True


class OracleClient:
    """Starts the oracle on first use. Thread-safe; requests are served one after another.

    Every method raises TargetError where the target's own code fails, DeviceError where the device does, OracleError
    where the child died, stayed silent or broke the protocol.
    """

    def __init__(
        self,
        device: str = "cpu",
        *,
        cache_dir: Path,
        threads: int | None = None,
        python_paths: Sequence[str] = (),
        timeout_s: float = 900.0,
        environment: Sequence[tuple[str, str]] = (),
        nursery: Nursery | None = None,
    ) -> None:
        """``nursery``: where to have the child from in milliseconds; its environment is then the nursery's."""
        self.device, self.nursery = device, nursery
        self.threads = threads or openmp_threads()
        self.cache_dir, self.python_paths, self.timeout_s = cache_dir, tuple(python_paths), timeout_s
        self.extra_environment = dict(environment)
        self.generation = 0
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | ForkedOracle | None = None
        self._socket: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._ended = False
        self._hello: dict[str, Any] = {}
        self._variants: dict[tuple[str, ...], tuple[tuple[str, WorkloadFacts], ...]] = {}
        self._deadly: dict[tuple[str, ...], _Deadly] = {}
        #: Which target's and workload's each bench is.
        self._benches: dict[int, tuple[str, ...]] = {}

    # -- the process

    def start(self) -> None:
        """Start the child now (it would start by itself); returns at once, imports go on in the child."""
        with self._lock:
            if self._process is not None:
                return
            if self._ended:
                raise OracleError("the oracle was ended", expected="a run that goes on")
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            # The log stays open as long as the child lives.
            self._log = tempfile.TemporaryFile(prefix="cudaforge-oracle-")  # noqa: SIM115
            try:
                self._process = self._launched(theirs.fileno(), self._log.fileno())
            except OSError as error:
                raise OracleError(f"the oracle could not be started: {error}") from error
            finally:
                theirs.close()
            self._socket = ours
            self.generation += 1

    def _launched(self, channel: int, log: int) -> subprocess.Popen[bytes] | ForkedOracle:
        if self.nursery is not None:
            paths = self.python_paths
            return self.nursery.fork(channel, log, device=self.device, threads=self.threads, paths=paths)
        argv = [sys.executable, "-m", "pytest_cudaforge.evaluation.oracle_child", str(channel)]
        return subprocess.Popen(
            [*argv, self.device, str(self.threads), *self.python_paths],
            env=oracle_environment(self.device, self.cache_dir, self.extra_environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[channel],
            **_own_group(),
        )

    @property
    def pid(self) -> int | None:
        """The child's process and group id, None where it does not run."""
        return self._process.pid if self._process is not None else None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """SIGSTOP the child's group while another party is timed; no request may be made meanwhile."""
        with self._lock:
            pid = self.pid
            if pid is not None:
                _signal_group(pid, signal.SIGSTOP)
                _wait_until_stopped(pid)
            try:
                yield
            finally:
                if pid is not None:
                    _signal_group(pid, signal.SIGCONT)

    def close(self) -> None:
        """End the child; a second call does nothing, and a later request would start a new one."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if self._process is not None:
                _end(self._process)
                self._process = None
            if self._log is not None:
                self._log.close()
                self._log = None

    def end(self) -> None:
        """End the child now and for good, also while another thread waits for its answer: that request and all later
        ones raise OracleError."""
        self._ended = True
        process = self._process
        if process is not None:
            _signal_group(process.pid, signal.SIGKILL)
        self.close()

    def __enter__(self) -> OracleClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- requests

    def request(self, op: str, *, timeout_s: float | None = None, **args: Any) -> Any:
        """One request; its reply's data."""
        return self._request(op, timeout_s, args)[0]

    def timed_request(self, op: str, **args: Any) -> int:
        """One request by this process's clock: ns from sending it to having the reply."""
        with self._lock:
            begin = time.perf_counter_ns()
            self._request(op, None, args)
            return time.perf_counter_ns() - begin

    def _request(self, op: str, timeout_s: float | None, args: Mapping[str, Any]) -> tuple[Any, int | None]:
        with self._lock:
            self.start()
            sock = self._socket
            assert sock is not None
            try:
                sock.settimeout(timeout_s or self.timeout_s)
                data = json.dumps({"op": op, "args": args, "chance": CHANCE.fresh_seed()}).encode()
                sock.sendall(_LENGTH.pack(len(data)) + data)
                header, descriptor = _receive_with_descriptor(sock)
                (length,) = _LENGTH.unpack(header)
                if length > _MAX_REPLY_BYTES:
                    raise OracleError(f"the oracle announced a reply of {length} bytes to {op}")
                reply = json.loads(_receive(sock, length))
            except TimeoutError:
                self._abandon()
                message = f"the oracle did not answer {op} within {timeout_s or self.timeout_s:g} s"
                raise OracleError(message, remedy="see whether the target's reference hangs") from None
            except (EOFError, ConnectionError, ValueError):
                raise self._death(op, args) from None
            except BaseException:
                # An interrupt in the middle of a message: the stream cannot be used any more.
                self._abandon()
                raise
            if reply.get("fatal"):
                # Its CUDA context is lost, and it ends by itself: the next request starts a fresh one.
                self._abandon()
        if "error" in reply:
            raise _rebuilt(reply["error"])
        return reply["data"], descriptor

    def _death(self, op: str, args: Mapping[str, Any]) -> ForgeError:
        process, tail = self._process, self._log_tail()
        code = process.wait(timeout=10) if process is not None else None
        self._abandon()
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit status {code}"
        target = args.get("target")
        if op in _TARGET_CODE and isinstance(target, Mapping):
            what = f"{target.get('id')}: its own code ended the process ({how}) at {op}"
            return TargetError(
                what + tail, expected="code that returns or raises", remedy="remove the exit or the crash"
            )
        return OracleError(f"the oracle died ({how}) at {op}{tail}", remedy="it is started anew with the next request")

    def _abandon(self) -> None:
        if self._process is not None:
            _signal_group(self._process.pid, signal.SIGKILL)
        self.close()

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 2000))
        text = self._log.read().decode("utf-8", "replace").strip()
        return f"\nit last printed:\n{text}" if text else ""

    # -- operations

    def hello(self) -> dict[str, Any]:
        """Versions of torch, CUDA and Python in the child, and its thread count."""
        if not self._hello:
            self._hello = self.request("hello")
        return self._hello

    def facts(self, target: Target) -> TargetFacts:
        """Import the target and run every workload once."""
        facts: TargetFacts = from_json(TargetFacts, self.request("facts", target=to_json(target)))
        return facts

    def terms(self, target: Target) -> tuple[tuple[str, Any], ...]:
        """Its options that are plain data (target.TERMS), by name. Imports and constructs it, runs no workload."""
        found = self.request("terms", target=to_json(target))
        return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in found.items())

    def guarded(self, target: Target) -> bool:
        """Does the target ask for a guard (``guard=True``)? Imports its file; for those whose ``guard`` is None."""
        return bool(self.request("guarded", target=to_json(target)))

    def backward(self, target: Target) -> tuple[str, tuple[WorkloadFacts, ...]]:
        """Why the target's backward cannot be verified ("" where it can), and the facts of each workload's backward."""
        found = self.request("backward", target=to_json(target))
        return found["reason"], tuple(from_json(WorkloadFacts, facts) for facts in found["workloads"])

    def initial(self, target: Target) -> Any:
        """``{"init": [args, kwargs] as plain data, "seed": …}``: what a candidate's ModelNew is constructed with.

        Raises TargetError where an argument is no plain data.
        """
        return self.request("initial", target=to_json(target))

    def lint(self, target: Target, workload: str) -> tuple[LintFinding, ...]:
        """What is wrong with this workload as a task, refusals first; empty where nothing was found."""
        found = self.request("lint", target=to_json(target), workload=workload)
        return tuple(from_json(LintFinding, finding) for finding in found)

    def structures(self, target: Target, workload: str) -> dict[str, str]:
        """By input path: a ``Structure`` of :mod:`pytest_cudaforge.evaluation.structures`."""
        args = {"target": to_json(target), "workload": workload}
        try:
            found: dict[str, str] = self.request("structures", **args)
        except (TargetError, OracleError):
            # Values out of range may take a reference's process down (an index made of them): keep what was drawn.
            found = self.request("structures", **args, widen=False)
        return found

    def families(self, target: Target, workload: str, most: int | None = None) -> tuple[str, ...]:
        """Redraws that this workload's reference takes, at most ``most``, those first that show most."""
        self.structures(target, workload)
        deadly = self._deadly.setdefault((target.key, workload), _Deadly())
        while not deadly.all:
            args: dict[str, Any] = {"target": to_json(target), "workload": workload, "most": most}
            try:
                return tuple(self.request("families", **args, fatal=list(deadly.families), rare=not deadly.rare))
            except (TargetError, OracleError) as error:
                self._require_ended(error)
                deadly.learn(error.what)
                self.structures(target, workload)
        return ()

    def shortcuts(self, target: Target, workload: str) -> tuple[str, ...]:
        """Redraws that leave an operation nothing to do, and that this workload's reference takes."""
        return self._of_kind("shortcuts", target, workload)

    def hundreds(self, target: Target, workload: str) -> tuple[str, ...]:
        """Redraws that are worth drawing by the hundred, and that this workload's reference takes."""
        return self._of_kind("hundreds", target, workload)

    def _of_kind(self, kind: Literal["shortcuts", "hundreds"], target: Target, workload: str) -> tuple[str, ...]:
        self.structures(target, workload)
        deadly = self._deadly.setdefault((target.key, workload), _Deadly())
        if kind in deadly.kinds:
            return ()
        try:
            return tuple(self.request(kind, target=to_json(target), workload=workload))
        except (TargetError, OracleError) as error:
            self._require_ended(error)
            deadly.kinds.add(kind)
            self.structures(target, workload)
            return ()

    def _require_ended(self, error: ForgeError) -> None:
        """Raises ``error`` unless the process is gone: what it says itself is a mistake of its own, and nobody may go
        on with fewer values than a verdict asks for."""
        if self.pid is not None:
            raise error

    def variants(self, target: Target, workload: str) -> tuple[tuple[str, WorkloadFacts], ...]:
        """Probes the reference itself answers: other strides, neighbouring sizes."""
        key = (target.key, workload)
        if key not in self._variants:
            found = self._tried_variants({"target": to_json(target), "workload": workload})
            self._variants[key] = tuple((name, from_json(WorkloadFacts, facts)) for name, facts in found)
        return self._variants[key]

    def variants_near(
        self, target: Target, workload: str, marks: Sequence[int]
    ) -> tuple[tuple[str, WorkloadFacts], ...]:
        """Some probes with sizes next to numbers that a candidate names, and multiples of those that the target does;
        drawn anew each time."""
        deadly = self._deadly.setdefault((target.key, workload), _Deadly())
        if deadly.near:
            return ()
        try:
            found = self.request("landmarks", target=to_json(target), workload=workload, marks=list(marks))
        except (TargetError, OracleError) as error:
            self._require_ended(error)
            deadly.near = True
            return ()
        return tuple((name, from_json(WorkloadFacts, facts)) for name, facts in found)

    def _tried_variants(self, args: Mapping[str, Any]) -> Any:
        """A reference may take its process down on strides or sizes that it was not written for (places that one input
        tells of another, where these are not as long); the others remain."""
        fatal: list[str] = []
        for _ in range(_MOST_FATAL):
            try:
                return self.request("variants", **args, fatal=fatal)
            except (TargetError, OracleError) as error:
                kind = error.what.removeprefix(FATAL_VARIANT)
                if kind == error.what or kind.startswith(SIZE):
                    break
                # Of sizes that are apart, say, it may take none: each one would cost a process.
                fatal.append(kind if kind.startswith(STRIDED) else kind.partition(" ")[0])
        return self.request("variants", **args, sizes=False, fatal=fatal)

    def open_bench(
        self, target: Target, workload: str, variant: str, layout: Mapping[str, Any]
    ) -> tuple[int, ExportedArena]:
        """An arena laid out as ``layout`` says, for :meth:`fill` and :meth:`check`."""
        args = {"target": to_json(target), "workload": workload, "variant": variant, "layout": layout}
        data, descriptor = self._request("bench", None, args)
        if descriptor is None:
            raise OracleError("the oracle sent no descriptor for its arena")
        self._benches[data["bench"]] = (target.key, workload)
        return data["bench"], ExportedArena(descriptor, data["nbytes"])

    def fill(self, bench: int, frame: int, case: TrialCase, poison: int) -> None:
        """Write the case's inputs and weights, and poison everything else."""
        try:
            self.request("fill", bench=bench, frame=frame, case=to_json(case), poison=poison)
        except (TargetError, OracleError):
            if self.pid is None and case.family != "drawn" and bench in self._benches:
                # Some of its values ended the process, though not those that it was tried on.
                self._deadly.setdefault(self._benches[bench], _Deadly()).families.append(case.family)
            raise

    def fill_all(
        self,
        bench: int,
        seeds: Sequence[int],
        poison: int,
        *,
        weights_seed: int | None = None,
        kept: Sequence[str] = (),
    ) -> None:
        """Draw every frame's inputs from its own seed, and weights but those ``kept`` (None: all as constructed);
        everything else is poisoned."""
        self.request(
            "fill_all", bench=bench, seeds=list(seeds), poison=poison, weights_seed=weights_seed, kept=list(kept)
        )

    def snapshot(self, bench: int) -> ExportedArena:
        """A copy of the bench's arena in host memory, as it is now."""
        data, descriptor = self._request("snapshot", None, {"bench": bench})
        if descriptor is None:
            raise OracleError("the oracle sent no descriptor for its copy")
        return ExportedArena(descriptor, data["nbytes"])

    def renew(self, bench: int, seeds: Sequence[int], family: str = "drawn") -> None:
        """Give all filled frames other inputs, by one seed each; outputs keep what the last call left."""
        self.request("renew", bench=bench, seeds=list(seeds), family=family)

    def rewrite(self, bench: int) -> None:
        """Write all filled frames' inputs once more, as they are; outputs keep what the last call left."""
        self.request("rewrite", bench=bench)

    def follow(self, bench: int, frame: int, calls: int) -> bool:
        """Judge the frame from now on as after so many calls more, on what each one left of inputs and state; nothing
        is written. False, and all is as it was, where the reference need not take what it has written."""
        return bool(self.request("follow", bench=bench, frame=frame, calls=calls))

    def edit(self, bench: int, frame: int, seed: int) -> bool:
        """Judge the frame from now on as after one call more, and write what that one leaves, but for a few elements
        that have changed places. False, and all is as it was, as in :meth:`follow`."""
        return bool(self.request("edit", bench=bench, frame=frame, seed=seed))

    def mutates(self, target: Target, workload: str) -> frozenset[str]:
        """``input/<path>`` and ``state/<path>`` of the tensors that the reference's forward writes, and
        :data:`FOLLOWS_STATE` where its outputs depend on the state that earlier calls wrote."""
        return frozenset(self.request("mutates", target=to_json(target), workload=workload))

    def keeps_places(self, target: Target, workload: str) -> bool:
        """Does the reference's forward write whole numbers that may come to an end, as a cache's places do?"""
        return bool(self.request("keeps_places", target=to_json(target), workload=workload))

    def draws(self, target: Target, workload: str) -> bool:
        """Does the reference's forward draw torch's random numbers?"""
        return bool(self.request("draws", target=to_json(target), workload=workload))

    def exchange(self, bench: int, frame: int, seed: int, *, alone: str = "", moved: str = "") -> None:
        """Let a few elements of each input that may be redrawn, and of each parameter, change places, or two of one
        "weight" or "input" ``alone``; or have them ``moved`` (Trial). Outputs keep what the last call left."""
        if moved == "together":
            self.request("exchange_together", bench=bench, frame=frame, seed=seed)
        else:
            self.request("exchange", bench=bench, frame=frame, seed=seed, alone=alone, moved=moved or None)

    def stage(self, bench: int, frame: int, seed: int, *, renewed: bool = False) -> tuple[tuple[int, bytes], ...]:
        """Other values for the frame's inputs, all of them where ``renewed``, which the caller has somebody write:
        (offset in the arena, bytes) of what differs. From now on the frame is judged by them."""
        found = self.request("stage", bench=bench, frame=frame, seed=seed, renewed=renewed)
        return tuple((offset, bytes.fromhex(data)) for offset, data in found)

    def touch(self, bench: int, frame: int, seed: int) -> None:
        """Change one element of each floating input in the frame; outputs stay as they are."""
        self.request("touch", bench=bench, frame=frame, seed=seed)

    def check(
        self, bench: int, frame: int, outputs: Mapping[str, Any], *, zones: bool = True, told: bool = False
    ) -> Check:
        """Judge what a worker left in the frame. ``told``: ``outputs`` are the very tensors that it returned."""
        data = self.request("check", bench=bench, frame=frame, outputs=outputs, zones=zones, told=told)
        check: Check = from_json(Check, data)
        return check

    def recheck(self, bench: int, frame: int, outputs: Mapping[str, Any]) -> Check:
        """Judge one more call on the values of the last :meth:`check`; cheap where its outputs are the same."""
        check: Check = from_json(Check, self.request("recheck", bench=bench, frame=frame, outputs=outputs))
        return check

    def look(self, bench: int, outputs: Mapping[int, Mapping[str, Any]]) -> Check:
        """Judge ordinary calls by frame, quickly: only what is plainly wrong is told, of the first such call."""
        check: Check = from_json(Check, self.request("look", bench=bench, outputs=outputs))
        return check

    def smudge(self, bench: int, frame: int, outputs: Mapping[str, Any], seed: int, count: int) -> None:
        """Change ``count`` elements of each answer that lies in ``frame``, as a caller does that writes into it."""
        self.request("smudge", bench=bench, frame=frame, outputs=outputs, seed=seed, count=count)

    def close_bench(self, bench: int) -> None:
        """Give the arena back; nothing where the child that held it is gone."""
        self._benches.pop(bench, None)
        if self._process is not None:
            self.request("close", bench=bench)


def oracle_environment(device: str, cache_dir: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """What an oracle's process inherits: an allow-list, and what keeps its references fast and its caches apart."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    # A pool of compile workers would outlive the compilation and share the cores with what is timed.
    alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if device == "cpu" else {}
    return {
        # torch asks for the user's name, and not every user id of a container has one.
        "LOGNAME": kept.get("USER", "cudaforge"),
        **kept,
        **alone,
        **extra,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict(compiler_caches(cache_dir)),
        # Fresh pages at every call would slow the baseline down: let malloc keep what was freed.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(64 << 20),
    }


def compiler_caches(cache_dir: Path) -> tuple[tuple[str, str], ...]:
    """Where torch.compile keeps what it compiled, as variables: for processes that run no code of a candidate's. Where
    a user's TORCHINDUCTOR_CACHE_DIR says, if there is one; in ``cache_dir`` otherwise."""
    # Absolute: these processes have working directories of their own.
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_dir / "inductor").absolute()
    return (("TORCHINDUCTOR_CACHE_DIR", str(folder)), ("TRITON_CACHE_DIR", str(folder / "triton")))


def _own_group() -> dict[str, Any]:
    """Out of the terminal's group (Ctrl-C is the supervisor's), but in its session: the kernel then lets a stopped
    child go on, and ends it, when the supervisor is killed."""
    if sys.version_info >= (3, 11):
        return {"process_group": 0}
    return {"start_new_session": True}


def _rebuilt(error: Mapping[str, str]) -> ForgeError:
    kind = getattr(errors, str(error["kind"]), OracleError)
    if not (isinstance(kind, type) and issubclass(kind, ForgeError)):
        kind = OracleError
    rebuilt: ForgeError = kind(error["what"], expected=error["expected"], remedy=error["remedy"])
    return rebuilt


def _receive_with_descriptor(sock: socket.socket) -> tuple[bytes, int | None]:
    data, ancillary, _, _ = sock.recvmsg(_LENGTH.size, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError
    descriptor: int | None = None
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(payload[:4])
            descriptor = received[0]
    return data + _receive(sock, _LENGTH.size - len(data)), descriptor


def _receive(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(min(count - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _wait_until_stopped(pid: int) -> None:
    """A signal sent is not yet a process stopped: until it is, it runs beside what is timed, and would outlive us."""
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return
        if text.rpartition(")")[2].split()[0] in "TtZX":
            return


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _end(process: subprocess.Popen[bytes] | ForkedOracle) -> None:
    """It ends by itself when its socket closes; a hanging one is killed with its whole group."""
    try:
        process.wait(timeout=3)
    except subprocess.TimeoutExpired:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
    # Helpers it started (compile workers) belong to its group and go with it.
    _signal_group(process.pid, signal.SIGKILL)
