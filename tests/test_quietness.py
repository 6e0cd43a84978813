"""Locks between processes, for real: who is alone is alone, and gets its turn."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Event
from pathlib import Path

from quietness import Quietness

_SPAWN = multiprocessing.get_context("spawn")
_SHORT_S = 0.2


def _come_and_go(folder: Path, inside: Event, stop: Event) -> None:
    """One test after another, until told to stop."""
    quietness = Quietness(folder)
    while not stop.is_set():
        with quietness.among_others():
            inside.set()
            time.sleep(0.01)
            inside.clear()


def _be_alone(folder: Path, times: int) -> None:
    quietness = Quietness(folder)
    for _ in range(times):
        with quietness.among_others(), quietness.alone():
            pass


def test_who_wants_to_be_alone_gets_its_turn_among_tests_that_never_pause(tmp_path: Path) -> None:
    quietness, inside, stop = Quietness(tmp_path), _SPAWN.Event(), _SPAWN.Event()
    other = _SPAWN.Process(target=_come_and_go, args=(tmp_path, inside, stop))
    other.start()
    try:
        assert inside.wait(30)
        for _ in range(3):
            with quietness.among_others(), quietness.alone():
                assert not inside.wait(_SHORT_S)
            assert inside.wait(30)
    finally:
        stop.set()
        other.join()
    assert other.exitcode == 0


def test_two_that_want_to_be_alone_do_not_wait_for_each_other(tmp_path: Path) -> None:
    two = [_SPAWN.Process(target=_be_alone, args=(tmp_path, 50)) for _ in range(2)]
    for process in two:
        process.start()
    for process in two:
        process.join(60)
        assert process.exitcode == 0
