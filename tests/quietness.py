"""A machine to oneself, among the processes of this test run: what is timed for real must not race our own other tests.

Every test holds a shared lock while it runs. One that times something for real takes it alone: it waits for the end of
those that the other xdist workers run now, and no further one begins. Other users of the machine are not kept away.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Quietness"]


class Quietness:
    """Two files in ``folder``, the same one for all processes of the run. A process that dies lets go of its locks."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        # Who waits to be alone stands in the gate: nobody else comes in meanwhile, so that its turn does come.
        self._gate = os.open(folder / "quietness-gate.lock", flags)
        self._room = os.open(folder / "quietness-room.lock", flags)

    @contextmanager
    def among_others(self) -> Iterator[None]:
        """Beside tests that do the same."""
        self._enter()
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within :meth:`among_others`: nobody else is inside."""
        # Not both at once: two that changed their shared locks into sole ones would wait for each other.
        fcntl.flock(self._room, fcntl.LOCK_UN)
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX)
            yield
        finally:
            # Before the gate opens: who came in there to be alone would wait for this one, and this one at the gate.
            fcntl.flock(self._room, fcntl.LOCK_SH)
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def _enter(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_SH)
        fcntl.flock(self._room, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
