"""How many threads OpenMP's parallel regions get here, of the reference and of candidates alike."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

__all__ = ["one_thread", "openmp_threads"]


def openmp_threads() -> int:
    """What ``OMP_NUM_THREADS`` says, else one for each core that may be used, as libgomp reckons: a container's quota
    does not count."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(told) if told.isdigit() and int(told) else len(os.sched_getaffinity(0))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For many small calls of torch's: a team of threads would wait for each of them beside other processes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
