"""Workers that are made ready ahead of need: real ones, of native code."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from pytest_cudaforge.errors import SandboxError
from pytest_cudaforge.evaluation.spares import Spares
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.evaluation.zygote import ForkServers


class _Workshop:
    """Makes workers, and remembers all of them."""

    def __init__(self, servers: ForkServers) -> None:
        self._servers = servers
        self.made: list[Worker] = []
        self.one_more = threading.Semaphore(0)

    def make(self) -> Worker:
        worker = self._servers.worker("cpp")
        worker.open("cpu")
        self.made.append(worker)
        self.one_more.release()
        return worker


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    with ForkServers() as opened:
        yield opened


@pytest.fixture
def workshop(servers: ForkServers) -> Iterator[_Workshop]:
    shop = _Workshop(servers)
    yield shop
    for worker in shop.made:
        worker.close()


def _lives(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_is_there_before_it_is_asked_for_and_another_one_after(workshop: _Workshop) -> None:
    spares = Spares(workshop.make)
    spares.begin()
    assert workshop.one_more.acquire(timeout=30)
    assert len(workshop.made) == 1
    assert spares.take() is workshop.made[0]
    assert workshop.one_more.acquire(timeout=30)
    assert spares.take() is workshop.made[1]
    spares.end()


def test_no_two_get_the_same(workshop: _Workshop) -> None:
    spares = Spares(workshop.make)
    spares.begin()
    taken: list[Worker] = []
    threads = [threading.Thread(target=lambda: taken.append(spares.take())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spares.end()
    assert len({worker.pgid for worker in taken}) == 4
    assert all(_lives(worker.pgid) for worker in taken)


def test_what_nobody_took_is_closed(workshop: _Workshop) -> None:
    spares = Spares(workshop.make)
    spares.begin()
    taken = spares.take()
    spares.end()
    spares.end()
    assert _lives(taken.pgid)
    assert [_lives(worker.pgid) for worker in workshop.made if worker is not taken] == [False]


def test_none_is_made_ahead_before_it_begins_and_after_it_ends(workshop: _Workshop) -> None:
    spares = Spares(workshop.make)
    spares.take()
    assert len(workshop.made) == 1
    spares.begin()
    spares.end()
    spares.take()
    assert len(workshop.made) == 3


def test_who_takes_one_that_could_not_be_made_hears_why() -> None:
    def make() -> Worker:
        raise SandboxError("no more processes")

    spares = Spares(make)
    spares.begin()
    with pytest.raises(SandboxError, match="no more processes"):
        spares.take()
    spares.end()  # of the next one, which failed as well, nobody hears
