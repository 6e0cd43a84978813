"""What code keeps in variables of its own, moved to where very many more calls would bring it.

A kernel that counts its calls may do less once it has made more of them than a verdict does, and a ticket that is never
set back may be right until it wraps. Both take hours to be seen; but a word that grows by as much in every call is soon
known, and what it will be after any number of calls is arithmetic. Only words that do so for as long as is affordable
are moved, all by the same number of calls, so that what the code finds is what those calls would have left: a
ring of eight places is no counter. What else the code keeps stays as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pytest_cudaforge.evaluation.arena import checked

__all__ = ["Counted", "Counter", "DeviceMemory", "HostMemory", "Memory", "Region", "advance", "counted", "counters"]

#: (address, bytes) of variables.
Region = tuple[int, int]

_WORD_BYTES, _WORDS = 4, 1 << 32
#: Of each region; what is larger holds values.
_READ_BYTES = 1 << 20
_CHUNK_BYTES = 4096


class Memory(Protocol):
    """Where the variables lie."""

    def read(self, address: int, nbytes: int) -> bytes: ...

    def write(self, address: int, data: bytes) -> None: ...


class HostMemory:
    """This process's own."""

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))


class DeviceMemory:
    """A GPU's, through ``cuda.bindings``' driver module; nothing may be running there. Raises DeviceError."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def read(self, address: int, nbytes: int) -> bytes:
        found = bytearray(nbytes)
        checked(self._driver.cuMemcpyDtoH(found, address, nbytes), "reading a kernel's variables")
        return bytes(found)

    def write(self, address: int, data: bytes) -> None:
        checked(self._driver.cuMemcpyHtoD(address, data, len(data)), "writing a kernel's variables")


@dataclass(frozen=True)
class Counter:
    """A 32-bit word at ``address`` to which every call adds ``step`` (modulo 2^32). ``wide``: it may be the lower half
    of a longer number, which nobody must carry into."""

    address: int
    step: int
    wide: bool


@dataclass(frozen=True)
class Counted:
    """``words``: how many counters there are. ``most_calls``: by so many calls they may be moved. ``wrap_calls``: after
    so many the first of them wraps that is surely no longer than a word; 0 where none is."""

    words: int
    most_calls: int
    wrap_calls: int


def counters(memory: Memory, regions: Sequence[Region], call: Callable[[int], None], calls: int) -> tuple[Counter, ...]:
    """The words in ``regions`` that each of three calls changed by as much, and ``calls`` further ones by so many
    times that. ``call(n)`` makes n calls and waits for their end."""
    regions = [(address, min(nbytes, _READ_BYTES)) for address, nbytes in regions]
    states = [_read(memory, regions)]
    for _ in range(2):
        call(1)
        states.append(_read(memory, regions))
    found = [
        (place, step)
        for place, first, second in _changed(*states[:2])
        if (step := (second - first) % _WORDS) == (_word(states[2], place) - second) % _WORDS
    ]
    if not found:
        return ()
    call(calls)
    last = _read(memory, regions)
    return tuple(
        Counter(regions[place[0]][0] + place[1], step, _may_be_longer(regions, (states[0], last), place))
        for place, step in found
        if (_word(states[2], place) + calls * step) % _WORDS == _word(last, place)
    )


def counted(memory: Memory, found: Sequence[Counter], most_calls: int) -> Counted:
    """What is to be known before they are moved."""
    rooms = [(one.wide, _room(memory, one)) for one in found]
    wraps = [room for wide, room in rooms if not wide]
    return Counted(len(found), min([most_calls, *(room for wide, room in rooms if wide)]), min(wraps, default=0))


def advance(memory: Memory, found: Sequence[Counter], calls: int | None) -> None:
    """Write what ``calls`` further calls would. None: what is there two calls before a word wraps."""
    if calls is None:
        calls = max(0, min((_room(memory, one) for one in found if not one.wide), default=0) - 1)
    for one in found:
        value = (int.from_bytes(memory.read(one.address, _WORD_BYTES), "little") + calls * one.step) % _WORDS
        memory.write(one.address, value.to_bytes(_WORD_BYTES, "little"))


def _room(memory: Memory, one: Counter) -> int:
    """So many calls are made before the word wraps, upwards or downwards."""
    value = int.from_bytes(memory.read(one.address, _WORD_BYTES), "little")
    if one.step < _WORDS // 2:
        return (_WORDS - 1 - value) // one.step
    return value // (_WORDS - one.step)


Place = tuple[int, int]


def _read(memory: Memory, regions: Sequence[Region]) -> list[bytes]:
    return [memory.read(address, nbytes) for address, nbytes in regions]


def _word(state: Sequence[bytes], place: Place) -> int:
    region, offset = place
    return int.from_bytes(state[region][offset : offset + _WORD_BYTES], "little")


def _changed(before: Sequence[bytes], after: Sequence[bytes]) -> list[tuple[Place, int, int]]:
    """(place, old, new) of every aligned word that is another one."""
    found = []
    for region, (old, new) in enumerate(zip(before, after, strict=True)):
        for chunk in range(0, len(old), _CHUNK_BYTES):
            if old[chunk : chunk + _CHUNK_BYTES] == new[chunk : chunk + _CHUNK_BYTES]:
                continue
            for offset in range(chunk, min(chunk + _CHUNK_BYTES, len(old) - _WORD_BYTES + 1), _WORD_BYTES):
                words = [int.from_bytes(state[offset : offset + _WORD_BYTES], "little") for state in (old, new)]
                if words[0] != words[1]:
                    found.append(((region, offset), words[0], words[1]))
    return found


def _may_be_longer(regions: Sequence[Region], states: Sequence[Sequence[bytes]], place: Place) -> bool:
    """An aligned pair of words of which the upper one has not changed."""
    region, offset = place
    address, nbytes = regions[region]
    if (address + offset) % 8 or offset + 8 > nbytes:
        return False
    upper = [state[region][offset + _WORD_BYTES : offset + 8] for state in states]
    return upper[0] == upper[1]
