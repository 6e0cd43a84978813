"""The fork server's own process: preloads modules, then forks one confined child per request.

Three processes make one child, so that nobody the candidate can reach decides over life, death or exit status:
the *guardian* (in the server's namespaces) enters new ones and waits; the *first process* inside them builds the view
of the file system, reports the child's start and end to the supervisor and ends everything with it; the *child* is
confined and serves requests. Death runs downwards: supervisor -> server (its control socket closes) -> guardian ->
first process (PR_SET_PDEATHSIG) -> everything in the process namespace (the kernel).

Single-threaded by design: fork in a process with threads is not safe. Nothing secret ever enters this process.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from pytest_cudaforge.evaluation import kernel_calls, sandbox
from pytest_cudaforge.evaluation.abilities import find_abilities
from pytest_cudaforge.evaluation.channel import Channel, ChannelClosed
from pytest_cudaforge.evaluation.confinement import confine, enter_namespaces, has_view, leave_low_numbers
from pytest_cudaforge.evaluation.first_calls import settle_vector_math
from pytest_cudaforge.evaluation.settings import operators_at_first
from pytest_cudaforge.evaluation.view import build_view
from pytest_cudaforge.records import to_json

__all__ = ["ENDED", "FAILED", "MAX_MESSAGE_BYTES", "PRELOADS", "READY", "STARTED", "main"]

#: First byte of a message on the status socket; STARTED carries a descriptor of the child (pidfd).
STARTED, READY, FAILED, ENDED = b"S", b"R", b"F", b"X"
MAX_MESSAGE_BYTES = 1 << 18

_PLAIN = (
    "pytest_cudaforge.evaluation.worker",
    "pytest_cudaforge.evaluation.builder",
    "pytest_cudaforge.languages.cpp",
    "pytest_cudaforge.runtime.trace",
    "pytest_cudaforge.runtime.replay",
    "pytest_cudaforge.runtime.replay_cpu",
)
_CUDA = (
    "cuda.bindings.driver",
    "cuda.bindings.nvrtc",
    "cuda.core",
    "pytest_cudaforge.evaluation.event_clock",
    "pytest_cudaforge.languages.cuda",
    "pytest_cudaforge.runtime.replay_cuda",
)
_TRITON = "pytest_cudaforge.languages.triton"
_LIBRARY = "pytest_cudaforge.runtime.library"
_PROCESSOR = "torch._inductor.cpu_vec_isa"
_MODULE = (
    "pytest_cudaforge.evaluation.module_service",
    "pytest_cudaforge.evaluation.initial",
    "pytest_cudaforge.evaluation.precision",
    "pytest_cudaforge.evaluation.tensors",
    "torch.utils.cpp_extension",
    "triton",  # a third of a second in every child of a candidate that uses it
)
#: Where configurations of torch.compile run; what that imports takes a worker three seconds and more.
COMPILERS = ("compiler", "compiler_cpu")
_INDUCTOR = ("torch._dynamo", "torch._inductor.compile_fx")
#: What each kind of server has in memory before it forks. A module missing here is missed by the child, which says so.
PRELOADS: dict[str, tuple[str, ...]] = {
    "plain": _PLAIN,
    "cuda": (*_PLAIN, *_CUDA),
    "torch": (*_PLAIN, "torch", _LIBRARY, *_MODULE, _TRITON, *_CUDA),
    "shapes": (*_PLAIN, "torch", _LIBRARY),
    "triton": (*_PLAIN, "triton.compiler", _TRITON),
    "compiler": (*_PLAIN, "torch", *_MODULE),
    "compiler_cpu": (*_PLAIN, "torch", *_MODULE, *_INDUCTOR, "torch._inductor.codegen.cpp", _PROCESSOR),
}

#: How long one trial may take.
_TRIAL_S = 40
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
#: User ids for children of a server that runs as root: systemd's range for short-lived users.
_FIRST_UID, _UIDS = 61184, 4000


def main(control_fd: int, kind: str) -> NoReturn:
    """Serve until the supervisor closes its end of the control socket."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    _preload(kind)
    abilities = find_abilities()
    control.send(json.dumps(to_json(abilities)).encode())
    gc.collect()
    gc.freeze()
    _Server(control, abilities).serve()
    os._exit(0)


def _preload(kind: str) -> None:
    if kind == "shapes":
        # Its children never use a GPU. What torch's meta kernels import looks for one, and a driver that was asked
        # before a fork is lost to the child: hence a server of its own, and no compile workers either.
        os.environ.update(CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_COMPILE_THREADS="1")
    if kind in COMPILERS:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _import_all(PRELOADS[kind])
    if kind == "compiler" and _compiles_after_a_fork():
        _import_all(_INDUCTOR)
    if "torch" in sys.modules:
        settle_vector_math(sys.modules["torch"])
    if kind == "torch" and "torch" in sys.modules:
        operators_at_first(sys.modules["torch"])
    if kind in ("triton", "torch") and {"triton", _TRITON} <= sys.modules.keys():
        with _no_question_to_the_driver():
            sys.modules[_TRITON].warm_up()
    if kind == "compiler_cpu" and _PROCESSOR in sys.modules:
        # Finding out takes programs, and torch remembers it by process.
        sys.modules[_PROCESSOR].valid_vec_isa_list()
    if kind == "shapes" and "torch" in sys.modules:
        sys.modules[_LIBRARY].warm_up()


def _import_all(names: Iterable[str]) -> None:
    for name in names:
        try:
            with _no_question_to_the_driver():
                importlib.import_module(name)
        except ImportError:
            continue


def _compiles_after_a_fork() -> bool:
    """Whether a child can use the GPU once its parent has imported Inductor: a parent that asks the driver anything
    loses it to all its children. Tried in a process of its own, on a real kernel."""

    def importing() -> None:
        _import_all(_INDUCTOR)
        if not _succeeds(_compile_something):
            raise ChildProcessError("no compilation after a fork")

    return _succeeds(importing)


def _compile_something() -> None:
    torch = sys.modules["torch"]
    ones = torch.ones(8, device="cuda")
    torch.compile(lambda x: x * 2 + 1)(ones)
    torch.cuda.synchronize()


def _succeeds(action: Callable[[], None]) -> bool:
    """Whether ``action`` ends well, in time, in a forked child."""
    child = os.fork()
    if child == 0:
        signal.alarm(_TRIAL_S)
        try:
            action()
        except BaseException:  # noqa: BLE001 - the outermost frame: the exit status says it
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@contextlib.contextmanager
def _no_question_to_the_driver() -> Iterator[None]:
    """torch.utils.cpp_extension asks whether there is a GPU while it is imported, which would lose the GPU to every
    child ("Cannot re-initialize CUDA in forked subprocess"); the answer only decides on a warning."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        yield
        return
    asked, cuda.is_available = cuda.is_available, lambda: True
    try:
        yield
    finally:
        cuda.is_available = asked


class _Server:
    def __init__(self, control: socket.socket, abilities: sandbox.Abilities) -> None:
        self._control = control
        self._abilities = abilities
        self._guardians: dict[int, int] = {}
        self._folders: dict[int, str] = {}
        self._pid = os.getpid()
        self._forked = 0

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        while True:
            message, descriptors = _receive(self._control)
            if message is None:
                break
            if "kill" in message:
                self._kill(int(message["kill"]))
                continue
            channel, status = descriptors
            self._fork(message, channel, status)
            os.close(channel)
            os.close(status)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for guardian in list(self._guardians):
            os.kill(guardian, signal.SIGKILL)
        for guardian in list(self._guardians):
            os.waitpid(guardian, 0)
            self._forget(guardian)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._forget(pid)

    def _forget(self, guardian: int) -> None:
        """A guardian that was killed could not remove its child's temporary directory."""
        self._guardians.pop(guardian, None)
        shutil.rmtree(self._folders.pop(guardian, ""), ignore_errors=True)

    def _kill(self, child_id: int) -> None:
        for guardian, served in list(self._guardians.items()):
            if served == child_id:
                os.kill(guardian, signal.SIGKILL)

    def _fork(self, message: dict[str, Any], channel: int, status: int) -> None:
        self._forked += 1
        spec = sandbox.spec_from_json(message["spec"])
        uid = _FIRST_UID + (self._pid * 64 + self._forked) % _UIDS
        spec = sandbox.with_uid(spec, self._abilities, uid)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        folder = "" if has_view(spec, self._abilities) else tempfile.mkdtemp(prefix="cudaforge-")
        pid = os.fork()
        if pid == 0:
            guardian = _Guardian(spec, self._abilities, channel, status, self._pid, folder)
            _outermost(lambda: guardian.run(self._control), status)
        self._guardians[pid] = int(message["id"])
        if folder:
            self._folders[pid] = folder
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


class _Guardian:
    """The processes of one child, each a method that ends in ``os._exit``."""

    def __init__(
        self, spec: sandbox.ChildSpec, abilities: sandbox.Abilities, channel: int, status: int, server: int, folder: str
    ) -> None:
        self._spec = spec
        self._abilities = abilities
        self._channel = channel
        self._status = status
        self._server = server
        self._grouped = spec.defences.group
        self._tmp = folder or "/tmp"

    def run(self, control: socket.socket) -> None:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if self._grouped:
            kernel_calls.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            kernel_calls.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if os.getppid() != self._server:
            return
        if not self._views() and self._spec.uid:
            os.chown(self._tmp, self._spec.uid, self._spec.uid)
        fresh_proc = self._views() and self._abilities.fresh_proc
        enter_namespaces(self._spec, self._abilities.namespaces, fresh_proc=fresh_proc)
        alive, held = os.pipe()
        first = os.fork()
        if first == 0:
            os.close(held)
            _outermost(lambda: self._first(alive), self._status)
        os.close(self._channel)
        os.close(self._status)
        kernel_calls.prctl(_PR_SET_DUMPABLE, 0)
        os.waitpid(first, 0)
        self._end_strays()
        if not self._views():
            shutil.rmtree(self._tmp, ignore_errors=True)

    def _views(self) -> bool:
        return has_view(self._spec, self._abilities)

    def _first(self, alive: int) -> None:
        """Process 1 of the new process namespace, where there is one."""
        if self._grouped:
            kernel_calls.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            kernel_calls.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if select.select([alive], [], [], 0)[0]:
            return  # the guardian died before the line above took effect
        if self._spec.defences.limits:
            _offer_to_the_kernel()
        leave_low_numbers()
        if self._views():
            build_view(self._spec, self._abilities.fresh_proc)
        child = os.fork()
        if child == 0:
            _outermost(self._child, self._status)
        os.close(self._channel)
        kernel_calls.prctl(_PR_SET_DUMPABLE, 0)
        status = socket.socket(fileno=self._status)
        _send_started(status, child)
        # WNOWAIT keeps the child's process id, and with it its group's, from being reused until the group is gone.
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        if self._grouped:
            _signal_group(child, signal.SIGKILL)
        _, ended = os.waitpid(child, 0)
        self._end_strays()
        try:
            status.send(ENDED + ended.to_bytes(4, "little"))
        except OSError:
            return  # nobody waits any more

    def _end_strays(self) -> None:
        """Kill what the child left behind and this process inherited as subreaper, generation by generation."""
        while self._grouped:
            pids = _children()
            if not pids:
                return
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)

    def _child(self) -> None:
        if self._spec.defences.group:
            os.setsid()
        os.environ["TMPDIR"] = os.environ["HOME"] = self._tmp
        tempfile.tempdir = None
        os.chdir(self._tmp)
        confine(self._spec, self._abilities, [self._channel, self._status], self._tmp)
        if self._grouped:
            # Only now: a change of user id clears it.
            kernel_calls.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.write(self._status, READY)
        os.close(self._status)
        role = importlib.import_module(f"pytest_cudaforge.evaluation.{self._spec.role}")
        try:
            role.serve(Channel(socket.socket(fileno=self._channel)))
        except ChannelClosed:
            return


def _offer_to_the_kernel() -> None:
    """Where memory runs out, this child and what it starts are the first to go, whoever took most of it."""
    try:
        with open("/proc/self/oom_score_adj", "w") as stream:
            stream.write("1000")
    except OSError:
        return


def _outermost(body: Any, status: int) -> NoReturn:
    """Run a forked process's body; whatever goes wrong is reported on the status socket, if that is still open."""
    try:
        body()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - outermost frame of a forked process
        text = traceback.format_exc()[-3000:]
        with contextlib.suppress(OSError):
            os.write(status, FAILED + text.encode("utf-8", "replace"))
        os._exit(70)


def _send_started(status: socket.socket, child: int) -> None:
    """With a descriptor of the child, where the kernel gives one."""
    try:
        pidfd = os.pidfd_open(child)
    except OSError:
        status.send(STARTED)
        return
    status.sendmsg([STARTED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))])
    os.close(pidfd)


def _signal_group(pgid: int, number: int) -> None:
    try:
        os.killpg(pgid, number)
    except (ProcessLookupError, PermissionError):
        return


def _children() -> list[int]:
    """Process ids of this process's children; empty where /proc is not there (a process namespace ends them then)."""
    try:
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as stream:
            return [int(word) for word in stream.read().split()]
    except OSError:
        return []


def _receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    space = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    data, ancillary, _, _ = control.recvmsg(MAX_MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for _, kind, payload in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload)
    return (json.loads(data) if data else None), list(descriptors)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
