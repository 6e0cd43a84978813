"""Who may use the device: shared work or exclusive timing, in this process and on this host.

``work`` is shared: builds, checks and traces of several targets overlap. ``timing`` is exclusive: it waits until all
work has drained, holds a file lock per device so that other runs on the host wait too, and stops the registered
process groups (on a CPU they would steal cores from the timed block).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from pytest_cudaforge.errors import DeviceError

__all__ = ["DeviceLease"]


class DeviceLease:
    """The lease of one device. ``device`` names it ("cpu", "cuda:0"); ``identity`` is what all processes of the host
    agree on (a GPU's UUID). Thread-safe; a thread inside ``timing`` may enter ``work`` and ``timing`` again.

    A waiting ``timing`` holds new ``work`` back, so that a stream of builds cannot starve it.
    """

    def __init__(
        self, device: str, *, identity: str = "", lock_dir: Path | None = None, timeout_s: float = 1800.0
    ) -> None:
        self.device = device
        self.timeout_s = timeout_s
        name = hashlib.sha256((identity or device).encode()).hexdigest()[:16]
        directory = lock_dir or Path(tempfile.gettempdir())
        self.lock_path = directory / f"cudaforge-device-{name}.lock"
        self._condition = threading.Condition()
        self._workers: dict[int, int] = {}
        self._owner: int | None = None
        self._depth = 0
        self._waiting = 0
        self._groups: set[int] = set()

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Shared: any number of threads, but none while another thread times."""
        me = threading.get_ident()
        with self._condition:
            inside = self._owner == me or me in self._workers
            while not inside and (self._owner is not None or self._waiting):
                self._condition.wait()
            self._workers[me] = self._workers.get(me, 0) + 1
        try:
            yield
        finally:
            with self._condition:
                self._workers[me] -= 1
                if not self._workers[me]:
                    del self._workers[me]
                self._condition.notify_all()

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Exclusive, also against other processes on this host. Raises DeviceError after ``timeout_s``."""
        me = threading.get_ident()
        if self._owner == me:
            yield
            return
        deadline = time.monotonic() + self.timeout_s
        self._enter(me, deadline)
        try:
            with self._host_lock(deadline), self._stopped_groups():
                yield
        finally:
            with self._condition:
                self._owner = None
                self._condition.notify_all()

    def _enter(self, me: int, deadline: float) -> None:
        with self._condition:
            self._waiting += 1
            try:
                while self._owner is not None or any(thread != me for thread in self._workers):
                    if not self._condition.wait(timeout=deadline - time.monotonic()):
                        raise self._timed_out("other work in this process does not end")
                self._owner = me
            finally:
                self._waiting -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def _host_lock(self, deadline: float) -> Iterator[None]:
        try:
            lock = FileLock(self.lock_path, timeout=max(0.0, deadline - time.monotonic()), mode=0o666)
            with lock:
                yield
        except Timeout as error:
            raise self._timed_out(f"another process on this host holds {self.lock_path}") from error
        except PermissionError as error:
            raise DeviceError(
                f"the device lock {self.lock_path} cannot be written", remedy="remove the file, or set TMPDIR"
            ) from error

    def _timed_out(self, why: str) -> DeviceError:
        return DeviceError(
            f"no exclusive use of {self.device} within {self.timeout_s:g} s: {why}",
            remedy="end the other run, or wait for it",
        )

    # -- process groups

    def register(self, pgid: int) -> None:
        """Stop this process group whenever the device is timed. Call it right after starting the group."""
        with self._condition:
            self._groups.add(pgid)
            if self._owner is not None and self.device == "cpu":
                _signal(pgid, signal.SIGSTOP)

    def unregister(self, pgid: int) -> None:
        """Forget a group; it is let go on if it was stopped."""
        with self._condition:
            if pgid in self._groups:
                self._groups.discard(pgid)
                _signal(pgid, signal.SIGCONT)

    @contextlib.contextmanager
    def _stopped_groups(self) -> Iterator[None]:
        if self.device != "cpu":
            yield
            return
        with self._condition:
            for pgid in self._groups:
                _signal(pgid, signal.SIGSTOP)
        try:
            yield
        finally:
            with self._condition:
                for pgid in self._groups:
                    _signal(pgid, signal.SIGCONT)


def _signal(pgid: int, number: signal.Signals) -> None:
    # A group that is gone needs no stopping.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)
