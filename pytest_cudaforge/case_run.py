"""The cases of one pytest process: while an item waits for its verdict, those of the items behind it are under way."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from pytest_cudaforge.errors import OracleError
from pytest_cudaforge.items import CaseItem
from pytest_cudaforge.kernel_cases import Inspector, Verdict

if TYPE_CHECKING:
    from pytest_cudaforge.evaluation.evaluator import Evaluator

__all__ = ["CaseRun"]

#: One oracle serves all, so that more than this would only wait for it.
_MOST_AT_ONCE = 4


class CaseRun:
    """A plugin that is registered where cases were collected. Nothing starts before the first of them runs.

    Only cases that follow each other without another test in between are verified side by side: whatever else a repo
    tests has the machine to itself. Under xdist each worker has its own.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._inspector = Inspector(config.rootpath, self._evaluator)
        self._evaluators: dict[str, Evaluator] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._verdicts: dict[CaseItem, Future[Verdict]] = {}
        self._places: dict[pytest.Item, int] = {}
        self._closed = False
        config.add_cleanup(self.close)

    @classmethod
    def of(cls, config: pytest.Config) -> CaseRun:
        """The one of this process."""
        found = config.pluginmanager.get_plugin("cudaforge-cases")
        if found is None:
            found = cls(config)
            config.pluginmanager.register(found, "cudaforge-cases")
        assert isinstance(found, cls)
        return found

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if isinstance(item, CaseItem):
            self._begin(item)
            for following in itertools.islice(self._following(item, nextitem), self._ahead):
                self._begin(following)

    def verdict(self, item: CaseItem) -> Verdict:
        """Wait for it. Raises what ``Inspector.check`` raises."""
        future = self._verdicts.pop(item, None) or self._submitted(item)
        try:
            return future.result()
        except OracleError:
            # Another case's reference may have taken the oracle down: whose fault it was shows alone.
            concurrent.futures.wait(self._verdicts.values())
            return self._inspector.check(item.case)

    def close(self) -> None:
        """End all children, those at work included; a second call does nothing."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            opened = list(self._evaluators.values())
            self._evaluators.clear()
        for evaluator in opened:
            evaluator.oracle.end()
            evaluator.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    # -- what is under way

    @property
    def _at_once(self) -> int:
        """So many cores as this process may take for itself."""
        others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        return min(_MOST_AT_ONCE, max(1, len(os.sched_getaffinity(0)) // others))

    @property
    def _ahead(self) -> int:
        return 2 * self._at_once - 1 if self._at_once > 1 else 0

    def _following(self, item: CaseItem, nextitem: pytest.Item | None) -> Iterator[CaseItem]:
        """The cases right behind ``item``, up to the next other test. A worker of xdist knows of one only."""
        following: Sequence[pytest.Item | None] = (nextitem,)
        if not hasattr(self._config, "workerinput"):
            items = item.session.items
            if not self._places:
                self._places = {one: place for place, one in enumerate(items)}
            following = items[self._places[item] + 1 :][: self._ahead] if item in self._places else (nextitem,)
        for one in following:
            if not isinstance(one, CaseItem):
                return
            yield one

    def _begin(self, item: CaseItem) -> None:
        if item not in self._verdicts:
            self._verdicts[item] = self._submitted(item)

    def _submitted(self, item: CaseItem) -> Future[Verdict]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._at_once, thread_name_prefix="cudaforge-case")
        return self._pool.submit(self._inspector.check, item.case)

    def _evaluator(self, device: str) -> Evaluator:
        from pytest_cudaforge.forging import forge_config
        from pytest_cudaforge.wiring import open_evaluator

        with self._lock:
            if device not in self._evaluators:
                if self._closed:
                    raise OracleError("the run has ended")
                paths = (*self._config.getini("pythonpath"), self._config.rootpath)
                self._evaluators[device] = open_evaluator(
                    forge_config(self._config), device=device, python_paths=paths, times=False
                )
            return self._evaluators[device]
