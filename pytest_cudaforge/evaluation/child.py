"""The supervisor's end of one sandboxed child: ask, wait, stop, kill."""

from __future__ import annotations

import array
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pytest_cudaforge.errors import SandboxError, WorkerCrash, WorkerProtocol, WorkerTimeout
from pytest_cudaforge.evaluation.channel import (
    Channel,
    ChannelClosed,
    ChannelGarbage,
    ChannelTimeout,
    Reply,
    ReplyCaps,
    wait_readable,
)
from pytest_cudaforge.evaluation.fork_server import ENDED, FAILED, READY, STARTED

__all__ = ["Child"]

_START_LIMIT_S = 30.0
_END_LIMIT_S = 5.0
_STOP_LIMIT_S = 1.0
#: struct ucred: process, user and group id
_CREDENTIALS = struct.Struct("3i")


class Child:
    """One child process. ``ask`` serves one request at a time, from any thread; ``kill`` may come from another.

    ``end_guardian`` asks the fork server to kill the child's guardian, the last resort.
    """

    def __init__(
        self, channel: Channel, status: socket.socket, end_guardian: Callable[[], None], grace_s: float
    ) -> None:
        self._channel = channel
        self._status = status
        self._end_guardian = end_guardian
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._state_lock = threading.Lock()
        self._pidfd = -1
        self._started = False
        # READY comes from the child itself; the kernel adds its process id as this process's namespace numbers it.
        status.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._wait_status: int | None = None
        self._closed = False
        self.pid = 0
        self.phase = "start"

    # -- life

    def wait_until_ready(self) -> None:
        """Return once the child is confined and serves. Raises SandboxError with what went wrong."""
        deadline = time.monotonic() + _START_LIMIT_S
        ready = False
        while not (ready and self._started):
            message = self._next_status(deadline)
            ready = ready or message[:1] == READY
            if message[:1] not in (READY, STARTED):
                self.close()
                text = message[1:].decode("utf-8", "replace") if message[:1] == FAILED else "it ended or did not answer"
                raise SandboxError(
                    f"a sandboxed child could not be started: {text.strip()}",
                    expected="namespaces, limits and filters as the probe found them",
                    remedy="run `cudaforge doctor`; --isolation none runs without them (never published)",
                )
        self.phase = "ready"

    def _next_status(self, deadline: float) -> bytes:
        """The next message of the status socket; b"" at its end or at the deadline."""
        if not wait_readable(self._status, deadline - time.monotonic()):
            return b""
        space = socket.CMSG_SPACE(array.array("i").itemsize) + socket.CMSG_SPACE(_CREDENTIALS.size)
        data, ancillary, _, _ = self._status.recvmsg(4096, space, socket.MSG_CMSG_CLOEXEC)
        self._started = self._started or data[:1] == STARTED
        for _, kind, payload in ancillary:
            if kind == socket.SCM_RIGHTS:
                self._pidfd = array.array("i", payload)[0]
            elif data[:1] == READY and kind == socket.SCM_CREDENTIALS:
                self.pid = _CREDENTIALS.unpack(payload)[0]
        if data[:1] == ENDED:
            self._wait_status = int.from_bytes(data[1:5], "little")
        return data

    def _wait_for_end(self, limit_s: float) -> bool:
        """Whether the child and all it started are gone within ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while self._wait_status is None:
            if not self._next_status(deadline):
                return time.monotonic() < deadline
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the child; nothing where it is gone."""
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
            elif self.pid and self._wait_status is None:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped, so that nothing is computed from here on."""
        self.signal(signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_LIMIT_S
        while not _all_stopped(self.pid) and time.monotonic() < deadline:
            time.sleep(20e-6)

    def terminate(self) -> None:
        """SIGTERM, a moment of grace, then :meth:`kill`."""
        with self._state_lock:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)
            ended = self._wait_for_end(self._grace_s)
        if not ended:
            self.kill()

    def kill(self) -> None:
        """End the child and everything it started; returns when they are gone (or unkillable in the kernel)."""
        with self._state_lock:
            if self._wait_status is not None:
                return
            self.signal(signal.SIGKILL)
            if not self._wait_for_end(_END_LIMIT_S):
                self._end_guardian()
                self._wait_for_end(_END_LIMIT_S)

    def close(self) -> None:
        """Kill and release every descriptor; a second call does nothing."""
        if self._closed:
            return
        self.kill()
        with self._state_lock:
            self._closed = True
            self._channel.close()
            self._status.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1

    # -- requests

    def ask(
        self,
        operation: int,
        payload: Any,
        *,
        phase: str,
        caps: ReplyCaps,
        timeout_s: float,
        blob: bytes = b"",
        descriptors: Sequence[int] = (),
    ) -> Reply:
        """One request and its reply. The child is dead after anything this raises.

        Raises WorkerTimeout, WorkerCrash or WorkerProtocol.
        """
        with self._lock:
            if self._closed or self._wait_status is not None:
                raise WorkerCrash(f"the process is gone; it cannot {phase}", phase=self.phase)
            self.phase = phase
            started = time.monotonic()
            try:
                nonce = self._channel.send_request(
                    operation, payload, blob=blob, descriptors=descriptors, timeout_s=timeout_s
                )
                left_s = max(timeout_s - (time.monotonic() - started), 1e-3)
                return self._channel.receive_reply(nonce, caps, left_s)
            except ChannelTimeout:
                self.terminate()
                raise WorkerTimeout(
                    f"no answer within {timeout_s:g} s during {phase}; the process was ended",
                    phase=phase,
                    limit_s=timeout_s,
                ) from None
            except ChannelClosed:
                raise self._crash(phase) from None
            except ChannelGarbage as error:
                self.kill()
                raise WorkerProtocol(f"a malformed answer during {phase}: {error}", phase=phase) from None

    def _crash(self, phase: str) -> WorkerCrash:
        # Its channel may be closed while it lives on: a candidate can close any descriptor.
        with self._state_lock:
            ended = self._wait_for_end(0.2)
        if not ended:
            self.kill()
            return WorkerCrash(f"the process closed its channel during {phase}", phase=phase)
        return crash_of(self._wait_status, phase)


def crash_of(wait_status: int | None, phase: str) -> WorkerCrash:
    """What a wait status says, as the error to raise."""
    if wait_status is None:
        return WorkerCrash(f"the process vanished during {phase}", phase=phase)
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        text = f"the process exited with status {code} during {phase} instead of answering"
        return WorkerCrash(text, phase=phase, status=code)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return WorkerCrash(f"{name} during {phase}{_HINTS.get(name, '')}", phase=phase, signal=name)


_HINTS = {
    "SIGSEGV": ": it read or wrote memory that is not there, or not writable",
    "SIGBUS": ": it touched memory behind the end of a mapping",
    "SIGFPE": ": an integer division by zero or overflow",
    "SIGABRT": ": abort() was called (an assertion, an uncaught C++ exception, or memory ran out)",
    "SIGILL": ": an illegal instruction",
    "SIGKILL": ": the kernel killed it, as a rule because memory ran out",
    "SIGXCPU": ": its limit of processor time was used up",
    "SIGXFSZ": ": a file grew over its limit",
    "SIGSYS": ": a system call that the sandbox forbids",
}


def _all_stopped(pid: int) -> bool:
    """Whether every thread of ``pid`` is stopped or gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    return all(_thread_state(pid, thread) in "TtZX" for thread in threads)


def _thread_state(pid: int, thread: str) -> str:
    try:
        with open(f"/proc/{pid}/task/{thread}/stat") as stream:
            # The name before the state may hold spaces and brackets.
            return stream.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
