"""How many threads OpenMP's parallel regions get here, of the reference and of candidates alike."""

from __future__ import annotations

import os

__all__ = ["openmp_threads"]


def openmp_threads() -> int:
    """What ``OMP_NUM_THREADS`` says, else one for each core that may be used, as libgomp reckons: a container's quota
    does not count."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(told) if told.isdigit() and int(told) else len(os.sched_getaffinity(0))
