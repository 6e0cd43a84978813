"""Values that change between two calls of a burst, without a pause that a kernel could notice.

A kernel that works at the first call after a pause, and rests until the next one, is right wherever values are written
while it waits: its old answers are the right ones until then. So a worker is given the bytes that change together with
the number of the call before which they do, and the answer of that call is judged. Only a few elements change as a
rule: to write megabytes would be a pause.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol

from pytest_cudaforge.evaluation.arena import checked

__all__ = [
    "Change",
    "Changeable",
    "changed_burst",
    "decode_changes",
    "drawn_calls",
    "encode_changes",
    "last_calls",
    "writers",
]

#: How long a burst may take, by what a call takes among few, and its calls at most.
_BURST_NS, _MOST_CALLS = 8e6, 4096


@dataclass(frozen=True)
class Change:
    """``data``, from byte ``offset`` of the arena in ``slot`` on, right before the call number ``call``."""

    call: int
    slot: int
    offset: int
    data: bytes


def last_calls(sets: int, calls: int) -> tuple[int, ...]:
    """The number of the last call at each of the buffer sets, where ``calls`` of them visit all in order."""
    last = calls - 1
    return tuple(last - (last - number) % sets for number in range(sets))


def drawn_calls(chance: Random, sets: int, call_ns: float) -> int:
    """How many calls a burst has: every set is visited twice at least, and no number of calls can be waited for."""
    fewest = 2 * sets
    most = max(fewest, min(_MOST_CALLS, int(_BURST_NS / max(call_ns, 1.0))))
    # As likely between 10 and 20 as between 1000 and 2000.
    return round(fewest * math.pow(most / fewest, chance.random()))


class Changeable(Protocol):
    """A worker with an arena attached."""

    def run_changed(
        self,
        sets: Sequence[Sequence[tuple[int, int]]],
        calls: int,
        changes: Sequence[Change],
        *,
        timeout_s: float,
    ) -> None: ...


def changed_burst(
    worker: Changeable,
    sets: Sequence[Sequence[tuple[int, int]]],
    calls: int,
    pieces: Mapping[int, Sequence[tuple[int, bytes]]],
    *,
    slot: int = 0,
    timeout_s: float,
) -> None:
    """``calls`` over ``sets``, where the inputs of some change before the last call at each: by its place among
    ``sets`` what is to be written (:meth:`OracleClient.stage`). Raises the worker's failures."""
    last = last_calls(len(sets), calls)
    changes = [Change(last[at], slot, offset, data) for at, found in pieces.items() for offset, data in found]
    worker.run_changed(sets, calls, changes, timeout_s=timeout_s)


def encode_changes(changes: Sequence[Change]) -> tuple[list[list[int]], bytes]:
    """As the payload and the blob of a request."""
    places = [[change.call, change.slot, change.offset, len(change.data)] for change in changes]
    return places, b"".join(change.data for change in changes)


def decode_changes(places: Sequence[Sequence[int]], blob: bytes) -> list[Change]:
    """The inverse of :func:`encode_changes`."""
    found, begin = [], 0
    for call, slot, offset, size in places:
        found.append(Change(call, slot, offset, blob[begin : begin + size]))
        begin += size
    return found


@contextlib.contextmanager
def writers(
    changes: Sequence[Change], address_of: Callable[[int, int], int], driver: Any = None
) -> Iterator[Mapping[int, Sequence[Callable[[], object]]]]:
    """By call number what has to be called before it; all is made ready here. ``address_of``: of a byte in an arena,
    in this process's memory.

    ``driver``: CUDA's, where the arenas are a GPU's. The bytes lie there beforehand, and are written in the order of
    the default stream; the calls have to be done when this ends.
    """
    with _device_bytes(driver, b"".join(change.data for change in changes)) as staged:
        found: dict[int, list[Callable[[], object]]] = {}
        for change in changes:
            size, address = len(change.data), address_of(change.slot, change.offset)
            if driver is None:
                write = partial(ctypes.memmove, address, ctypes.create_string_buffer(change.data, size), size)
            else:
                write = partial(driver.cuMemcpyDtoDAsync, address, staged, size, 0)
            found.setdefault(change.call, []).append(write)
            staged += size
        yield found


@contextlib.contextmanager
def _device_bytes(driver: Any, data: bytes) -> Iterator[int]:
    """The address of ``data`` on the device; 0 where there is none."""
    if driver is None or not data:
        yield 0
        return
    address = checked(driver.cuMemAlloc(len(data)), "taking memory for values that change")
    try:
        checked(driver.cuMemcpyHtoD(address, data, len(data)), "copying values that change")
        yield int(address)
    finally:
        driver.cuMemFree(address)
