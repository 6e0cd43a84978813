"""Variables that count calls: found where they are, and moved to where more calls bring them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
from native_children import BINDINGS, compile_act, started

from pytest_cudaforge.evaluation.ageing import Counted, HostMemory, Region, advance, counted, counters
from pytest_cudaforge.evaluation.zygote import ForkServers

MEMORY = HostMemory()


class _Code:
    """Eight words, and what a call does to them."""

    def __init__(self, change: Callable[[list[int]], None], words: int = 8) -> None:
        self.words = (ctypes.c_uint32 * words)()
        self.change = change

    @property
    def regions(self) -> list[Region]:
        return [(ctypes.addressof(self.words), ctypes.sizeof(self.words))]

    def call(self, calls: int) -> None:
        for _ in range(calls):
            values = list(self.words)
            self.change(values)
            self.words[:] = [value % 2**32 for value in values]


def _adds(*steps: int) -> Callable[[list[int]], None]:
    def change(values: list[int]) -> None:
        for index, step in enumerate(steps):
            values[index] += step

    return change


@pytest.mark.parametrize("step", [1, 30000, -1, 1 << 31])
def test_what_grows_alike_is_moved_by_any_number_of_calls(step: int) -> None:
    code, twin = (_Code(_adds(0, step)) for _ in range(2))
    found = counters(MEMORY, code.regions, code.call, 100)
    assert [(one.address - code.regions[0][0], one.step) for one in found] == [(4, step % 2**32)]
    advance(MEMORY, found, 5000)
    twin.call(2 + 100 + 5000)
    assert list(code.words) == list(twin.words)


def test_all_are_moved_together() -> None:
    code = _Code(_adds(1, 132, 0, 0, 7))
    found = counters(MEMORY, code.regions, code.call, 64)
    advance(MEMORY, found, 1000)
    assert list(code.words)[:5] == [1066, 132 * 1066, 0, 0, 7 * 1066]


@pytest.mark.parametrize("size", [2, 3, 48, 64])
def test_a_ring_is_no_counter(size: int) -> None:
    def turn(values: list[int]) -> None:
        values[2] = (values[2] + 1) % size

    code = _Code(turn)
    # Two places are a step of 2^31 to nobody.
    assert counters(MEMORY, code.regions, code.call, 64 if size != 64 else 65) == ()


def test_what_stays_and_what_jumps_is_no_counter() -> None:
    def jump(values: list[int]) -> None:
        values[0], values[1] = 7, values[1] * 5 + 1

    code = _Code(jump)
    assert counters(MEMORY, code.regions, code.call, 64) == ()


def test_a_word_below_one_that_never_changes_may_be_half_a_number() -> None:
    code = _Code(_adds(30000))
    at = ctypes.addressof(code.words)
    shift = 4 if at % 8 else 0  # the pair that counts is an aligned one
    found = counters(MEMORY, [(at + shift, 16)], _Code(lambda values: None).call, 64)
    assert found == ()

    def grow(values: list[int]) -> None:
        values[shift // 4] += 30000

    code.change = grow
    found = counters(MEMORY, code.regions, code.call, 64)
    assert [one.wide for one in found] == [True]
    assert counted(MEMORY, found, 1 << 28) == Counted(1, (2**32 - 1 - 66 * 30000) // 30000, 0)


def test_the_calls_until_a_word_wraps() -> None:
    code = _Code(_adds(30000, 1))
    found = counters(MEMORY, code.regions, code.call, 64)
    assert counted(MEMORY, found, 1 << 28).wrap_calls == (2**32 - 1 - 66 * 30000) // 30000
    advance(MEMORY, found, None)
    before = code.words[0]
    code.call(1)
    assert code.words[0] == before + 30000
    code.call(1)
    assert code.words[0] < 30000
    assert code.words[1] == 143165 + 1


def test_downwards_it_wraps_at_zero() -> None:
    code = _Code(_adds(-1))
    code.words[0] = 1000
    found = counters(MEMORY, code.regions, code.call, 64)
    advance(MEMORY, [one for one in found if not one.wide] or found, 1000 - 66)
    assert code.words[0] == 0


def test_no_more_than_a_mebibyte_of_a_region_is_looked_at() -> None:
    code = _Code(_adds(1), words=(1 << 18) + 4)
    at, nbytes = code.regions[0]
    assert len(counters(MEMORY, [(at, nbytes)], code.call, 8)) == 1
    last = len(code.words) - 1

    def grow(values: list[int]) -> None:
        values[last] += 1

    code.change = grow
    assert counters(MEMORY, [(at, nbytes)], code.call, 8) == ()


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    with ForkServers() as opened:
        yield opened


def test_in_a_worker(servers: ForkServers) -> None:
    source = "static int calls; static float kept[64]; kept[++calls % 64] = in[0]; out[0] = calls;"
    with started(servers, compile_act(servers, source)) as act:
        found = act.worker.count_calls(BINDINGS, most_calls=1 << 28, timeout_s=10)
        assert found.words == 1
        before = act.run()[0]
        act.worker.advance_calls(1 << 20, timeout_s=10)
        assert act.run()[0] == before + (1 << 20) + 1


def test_what_glibc_counts_in_a_condition_variable_is_left_alone(servers: ForkServers) -> None:
    source = """
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; static pthread_cond_t over = PTHREAD_COND_INITIALIZER;
    static int calls; struct timespec at; clock_gettime(CLOCK_REALTIME, &at);
    pthread_mutex_lock(&lock); pthread_cond_timedwait(&over, &lock, &at); pthread_mutex_unlock(&lock); out[0] = ++calls;
    """
    with started(servers, compile_act(servers, source)) as act:
        assert act.worker.count_calls(BINDINGS, most_calls=1 << 28, timeout_s=10).words == 0


def test_a_worker_without_variables_counts_nothing(servers: ForkServers) -> None:
    with started(servers, compile_act(servers, "out[0] = in[0];")) as act:
        assert act.worker.count_calls(BINDINGS, most_calls=1 << 28, timeout_s=10).words == 0
        act.worker.advance_calls(1, timeout_s=10)
