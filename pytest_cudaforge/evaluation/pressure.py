"""Are others busy on this machine? Linux's pressure stall information: how long some task waited for a core.

Nobody waits where the timed party has the cores to itself. Where the kernel does not tell, nothing is known and every
share is 0.
"""

from __future__ import annotations

import time
from pathlib import Path

__all__ = ["ForeignLoad", "stalled_share", "wait_for_quiet"]

_WINDOW_S = 0.25


class ForeignLoad:
    """Linux's own account of tasks that waited for a core (pressure stall information), where there is one."""

    def __init__(self) -> None:
        self._begin, self._began_ns = _stalled_us(), time.perf_counter_ns()

    def share(self) -> float:
        """Share of the time since construction in which some task waited."""
        elapsed_us = (time.perf_counter_ns() - self._began_ns) / 1e3
        return max(0.0, (_stalled_us() - self._begin) / max(elapsed_us, 1.0))


def _pressure(name: str) -> float:
    try:
        text = Path("/proc/pressure/cpu").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return float(text.split(f"{name}=", 1)[1].split()[0])


def _stalled_us() -> int:
    return int(_pressure("total"))


def stalled_share() -> float:
    """Share of the last minute in which some task of this machine waited for a core; 0 where Linux does not tell."""
    return _pressure("avg60") / 100.0


def wait_for_quiet(limit_s: float, most: float) -> None:
    """Return once nobody waited for a core for more than the share ``most`` of a moment, or after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        load = ForeignLoad()
        time.sleep(_WINDOW_S)
        if load.share() <= most:
            return
