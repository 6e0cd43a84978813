"""Values that change between two calls of a burst: when, where, and that they arrive."""

from __future__ import annotations

import ctypes
import random

import pytest

from pytest_cudaforge.evaluation.changes import (
    Change,
    changed_burst,
    decode_changes,
    drawn_calls,
    encode_changes,
    last_calls,
    writers,
)


@pytest.mark.parametrize(("sets", "calls"), [(1, 1), (1, 7), (3, 3), (3, 5), (4, 17)])
def test_the_last_call_at_each_set_is_found(sets: int, calls: int) -> None:
    visits: dict[int, int] = {}
    for call in range(calls):
        visits[call % sets] = call
    assert last_calls(sets, calls) == tuple(visits[number] for number in range(sets))


def test_no_number_of_calls_can_be_waited_for_and_none_takes_long() -> None:
    chance = random.Random(3)
    short = [drawn_calls(chance, 3, 500.0) for _ in range(400)]
    assert min(short) < 12 and max(short) > 2000 and len(set(short)) > 200
    assert {drawn_calls(chance, 3, 1e8) for _ in range(9)} == {6}  # every set twice, whatever it takes
    assert max(drawn_calls(chance, 1, 1e6) for _ in range(99)) <= 8


def test_changes_survive_the_way_to_a_worker() -> None:
    changes = [Change(5, 0, 64, b"abc"), Change(2, 1, 0, b""), Change(5, 0, 80, bytes(range(9)))]
    assert decode_changes(*encode_changes(changes)) == changes


def test_what_is_written_lies_where_it_should_and_is_sorted_by_call() -> None:
    memory = ctypes.create_string_buffer(b"." * 16, 16)
    changes = [Change(3, 0, 2, b"ab"), Change(1, 0, 9, b"c"), Change(3, 0, 5, b"d")]
    with writers(changes, lambda slot, offset: ctypes.addressof(memory) + offset) as written:
        assert sorted(written) == [1, 3] and memory.raw == b"." * 16
        for write in written[3]:
            write()
    assert memory.raw == b"..ab.d.........."


class _Asked:
    def __init__(self) -> None:
        self.changes: list[Change] = []

    def run_changed(self, sets: object, calls: int, changes: object, *, timeout_s: float) -> None:
        assert isinstance(changes, list)
        self.changes = changes


def test_values_change_right_before_the_last_call_at_their_set() -> None:
    worker = _Asked()
    sets = [[(2, 0)], [(2, 64)], [(2, 128)]]
    changed_burst(worker, sets, 8, {0: [(0, b"a")], 2: [(128, b"b"), (140, b"c")]}, slot=2, timeout_s=1.0)
    assert worker.changes == [Change(6, 2, 0, b"a"), Change(5, 2, 128, b"b"), Change(5, 2, 140, b"c")]
