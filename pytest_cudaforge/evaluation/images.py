"""The images of a process's libraries, closed while native code runs.

Whoever finds a library's image in memory (from the address of a function, or along the loader's list) finds all of its
functions by its symbol table, the clock among them, and asks the dynamic loader for nothing. Headers and symbol tables
lie in pages that no code needs once everything is bound (``LD_BIND_NOW``); what the kernel maps for the time of day
(vdso(7)) no kernel of ours needs at all. Both can be taken away for the length of a call.

Standard library only, in the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from collections.abc import Iterator

__all__ = ["closed"]

_LOADED, _READ = 1, 4
_VDSO = b"linux-vdso.so.1"


class _Segment(ctypes.Structure):
    """Elf64_Phdr."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("physical", ctypes.c_uint64),
        ("file_bytes", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    ]


class _Image(ctypes.Structure):
    """The beginning of struct dl_phdr_info (dl_iterate_phdr(3))."""

    _fields_ = [
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    ]


_Visit = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Image), ctypes.c_size_t, ctypes.c_void_p)


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Nobody reads headers and symbol tables, or calls into the vDSO: who does gets SIGSEGV. Raises OSError where a
    library's pages cannot be closed: a call would look as if it had needed none. The vDSO stays open where the kernel
    has sealed it (mseal of system mappings, Linux 6.15)."""
    libc = ctypes.CDLL(None, use_errno=True)
    protect = libc.mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pages = _pages(libc)
    try:
        failed = [protect(address, nbytes, 0) and rights == mmap.PROT_READ for address, nbytes, rights in pages]
        if any(failed):
            raise OSError(ctypes.get_errno(), "the images of libraries cannot be closed (mprotect)")
        yield
    finally:
        for address, nbytes, rights in pages:
            protect(address, nbytes, rights)


def _pages(libc: ctypes.CDLL) -> list[tuple[int, int, int]]:
    """(address, bytes, protection) of what can be closed."""
    found: list[tuple[int, int, int]] = []

    def visit(image: ctypes._Pointer[_Image], size: int, data: object) -> int:
        one = image.contents
        loaded = [one.segments[index] for index in range(one.count) if one.segments[index].kind == _LOADED]
        if loaded:
            found.extend(_closable(one.base, one.name or b"", loaded))
        return 0

    visited = _Visit(visit)
    libc.dl_iterate_phdr(visited, None)
    return found


def _closable(base: int, name: bytes, loaded: list[_Segment]) -> Iterator[tuple[int, int, int]]:
    """The first segment, where it holds no code; all of the vDSO. Pages that another segment shares are left."""
    if os.path.basename(name) == _VDSO:
        for segment in loaded:
            start, end = _whole(base + segment.address, base + segment.address + segment.nbytes)
            yield start, end - start, mmap.PROT_READ | mmap.PROT_EXEC
        return
    first = loaded[0]
    start, end = _whole(base + first.address, base + first.address + first.nbytes)
    others = (base + segment.address for segment in itertools.islice(loaded, 1, None))
    end = min([end, *(other // mmap.PAGESIZE * mmap.PAGESIZE for other in others)])
    if first.flags == _READ and end > start:
        yield start, end - start, mmap.PROT_READ


def _whole(start: int, end: int) -> tuple[int, int]:
    return start // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
