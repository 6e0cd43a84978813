"""Who is timed goes first, where the system lets us say so: on a machine whose cores others want as well, a kernel of
two threads that loses one of them takes twice as long, or a hundred times.

Linux divides cores among sessions first (autogroups, see sched(7)) and among the threads of one by their nice values,
so both are raised. That takes privileges (CAP_SYS_NICE, CAP_SYS_ADMIN); without them nothing happens.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["NICE", "favoured"]

#: A share of a core of 97 % beside a process of the usual priority; real-time classes could starve the system itself.
NICE = -15


@contextlib.contextmanager
def favoured(pids: Iterable[int]) -> Iterator[None]:
    """Within, all threads of these processes, and those that they begin, go before others'. Afterwards those that are
    still there are as they were."""
    pids = tuple(pids)
    sessions = {pid: nice for pid in pids if (nice := _session_nice(pid)) is not None}
    threads = {thread: nice for pid in pids for thread in _threads(pid) if (nice := _nice(thread)) is not None}
    _raise_sessions(dict.fromkeys(sessions, NICE))
    _raise_threads(dict.fromkeys(threads, NICE))
    try:
        yield
    finally:
        _raise_threads(threads)
        _raise_sessions(sessions)


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _nice(thread: int) -> int | None:
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except OSError:
        return None


def _session_nice(pid: int) -> int | None:
    """Of its autogroup; None where the system has none, and for our own: whoever sits at the terminal has it, too, and
    would keep it if we were killed."""
    try:
        if os.getsid(pid) == os.getsid(0):
            return None
        match = re.search(r"nice (-?\d+)", Path(f"/proc/{pid}/autogroup").read_text())
    except OSError:
        return None
    return int(match.group(1)) if match else None


def _raise_threads(values: dict[int, int]) -> None:
    for thread, nice in values.items():
        # Refused without the privilege, or the thread has ended.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)


def _raise_sessions(values: dict[int, int]) -> None:
    for pid, nice in values.items():
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
