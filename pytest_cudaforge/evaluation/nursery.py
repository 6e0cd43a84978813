"""Where fresh oracles come from in milliseconds: a process with torch loaded that forks them. No torch in here."""

from __future__ import annotations

import array
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from pytest_cudaforge.errors import OracleError

__all__ = ["ForkedOracle", "Nursery"]

_START_LIMIT_S = 120.0
_ANSWER_LIMIT_S = 30.0
_POLL_S = 0.002
_MAX_MESSAGE_BYTES = 1 << 16


class ForkedOracle:
    """An oracle's process that is not our child: what ``subprocess.Popen`` offers of one, as far as it is needed."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        self._nursery, self._status = nursery, None

    _status: int | None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._status is None:
            self._status = self._nursery.status_of(self.pid)
            if self._status is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("oracle", timeout or 0.0)
                time.sleep(_POLL_S)
        return self._status


class Nursery:
    """One nursery process, started on first use. Thread-safe; a context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self, channel: int, log: int, *, device: str, threads: int, paths: Sequence[str]) -> ForkedOracle:
        """A fresh oracle that serves on ``channel`` and prints to ``log``. Raises OracleError."""
        message = {"device": device, "threads": threads, "paths": list(paths)}
        return ForkedOracle(int(self._ask(message, (channel, log))["pid"]), self)

    def status_of(self, pid: int) -> int | None:
        """How a child ended, None while it runs; 0 where the nursery itself is gone."""
        try:
            status = self._ask({"ended": pid})["status"]
        except OracleError:
            return 0
        return None if status is None else int(status)

    def _ask(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            control = self._started()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                control.sendmsg([json.dumps(message).encode()], rights)
                answer = control.recv(_MAX_MESSAGE_BYTES)
            except OSError as error:
                self._end()
                raise OracleError(f"the process that oracles are forked from is gone: {error}") from error
            if not answer:
                self._end()
                raise OracleError("the process that oracles are forked from ended", remedy="is memory short?")
            return json.loads(answer)

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", "pytest_cudaforge.evaluation.nursery_child", str(theirs.fileno())]
        with theirs, tempfile.TemporaryFile(prefix="cudaforge-nursery-") as log:
            try:
                self._process = subprocess.Popen(
                    argv,
                    env=self._environment,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise OracleError(f"the process that oracles are forked from cannot be started: {error}") from error
            theirs.close()
            self._control = ours
            ours.settimeout(_START_LIMIT_S)
            try:
                ready = ours.recv(_MAX_MESSAGE_BYTES)
            except OSError:
                ready = b""
            ours.settimeout(_ANSWER_LIMIT_S)
            if not ready:
                self._end()
                log.seek(0)
                said = log.read()[-800:].decode("utf-8", "replace").strip()
                raise OracleError(f"the process that oracles are forked from did not start: {said or 'no answer'}")
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the process; its children end by themselves when nobody asks them any more."""
        with self._lock:
            self._end()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
