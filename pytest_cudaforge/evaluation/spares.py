"""Workers that are made ready while another one is at work.

A CUDA context takes as long as some dozens of checks. It says nothing of a candidate, so that the next worker's may be
made before anybody asks for it; it is a fresh process all the same, and serves one product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pytest_cudaforge.evaluation.worker import Worker

__all__ = ["Spares"]


class Spares:
    """At most one worker ahead of need, between ``begin`` and ``end``. Thread-safe.

    ``make``: a fresh worker that has no product yet. What it raises is raised by the :meth:`take` that gets its worker;
    of a worker that nobody takes nobody hears.
    """

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._next: Future[Worker] | None = None

    def begin(self) -> None:
        """Make one now, and the next one whenever one is taken. A second call does nothing."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="cudaforge-spare")
                self._next = self._pool.submit(self._make)

    def take(self) -> Worker:
        """The one that was made ahead, or a new one. Raises what ``make`` does."""
        with self._lock:
            taken = self._next
            self._next = self._pool.submit(self._make) if self._pool is not None else None
        return taken.result() if taken is not None else self._make()

    def end(self) -> None:
        """Close what nobody took, and make no more ahead. A second call does nothing."""
        with self._lock:
            pool, left, self._pool, self._next = self._pool, self._next, None, None
        if pool is None:
            return
        pool.shutdown()
        if left is not None and left.exception() is None:
            left.result().close()
