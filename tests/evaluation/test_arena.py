"""Shared memory: layout with red zones, sealed memfds."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import resource
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaforge.errors import DeviceError, UsageError
from pytest_cudaforge.evaluation.arena import (
    ALIGN_BYTES,
    DeviceArena,
    HostArena,
    lay_out,
    lay_out_edged,
    lay_out_guarded,
)


@given(
    st.lists(st.integers(0, 5000), max_size=20),
    st.sampled_from([0, 1, 64, 256]),
    st.sampled_from([1, 16, 256]),
    st.sampled_from([0, 4]),
)
def test_regions_and_red_zones_tile_the_arena(sizes: list[int], redzone: int, align: int, skew: int) -> None:
    layout = lay_out(
        [(str(i), n) for i, n in enumerate(sizes)], redzone_bytes=redzone, align_bytes=align, skew_bytes=skew
    )
    pieces = sorted([*((r.offset, r.nbytes) for r in layout.regions if r.nbytes), *layout.redzones])
    end = 0
    for offset, nbytes in pieces:
        assert offset == end
        end += nbytes
    assert end == layout.nbytes
    for region in layout.regions:
        assert region.offset % align == skew % align
    if redzone:
        for before, after in zip(layout.regions, layout.regions[1:], strict=False):
            assert after.offset - before.offset - before.nbytes >= redzone


def test_a_region_is_found_by_name() -> None:
    layout = lay_out([("x", 10), ("y", 20)])
    assert layout.offset("x") == 256 and layout.offset("y") == 768
    with pytest.raises(KeyError):
        layout.offset("z")


def test_two_mappings_share_their_bytes() -> None:
    with HostArena.create(5000) as first, HostArena.attach(os.dup(first.fd), 5000, readonly=True) as second:
        ctypes.memset(first.address + 4999, 7, 1)
        assert ctypes.string_at(second.address + 4999, 1) == b"\7"
        with first.memory() as memory:
            assert memory[4999] == 7 and len(memory) == 5000


def test_its_size_can_never_change() -> None:
    with HostArena.create(5000) as arena:
        for size in (0, 10_000):
            with pytest.raises(PermissionError):
                os.ftruncate(arena.fd, size)


def test_a_sealed_arena_is_read_only_for_all_but_its_maker() -> None:
    with HostArena.create(4096) as arena:
        arena.seal_readonly()
        with pytest.raises(PermissionError):
            mmap.mmap(arena.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(arena.fd, b"x", 0)
        ctypes.memset(arena.address, 9, 1)
        with HostArena.attach(os.dup(arena.fd), 4096, readonly=True) as reader, reader.memory() as memory:
            assert memory[0] == 9 and memory.readonly


def test_bad_arenas_are_refused_in_words() -> None:
    with pytest.raises(UsageError, match="at least 1 byte"):
        HostArena.create(0)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(UsageError, match="no sealed arena"):
        HostArena.attach(unsealed, 4096, readonly=True)
    os.close(unsealed)
    with HostArena.create(4096) as arena, pytest.raises(UsageError, match="8192 bytes"):
        HostArena.attach(arena.fd, 8192, readonly=True)


def test_close_twice_and_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        arena = HostArena.create(4096)
        arena.close()
        arena.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_device_arena_without_a_device_says_so() -> None:
    try:
        DeviceArena.create(4096, 0).close()
    except DeviceError as error:
        assert "CUDA" in str(error) or "cuda" in str(error)
    else:
        pytest.skip("there is a CUDA device here")


@pytest.mark.parametrize("sizes", [[1], [64, 4096, 4100], [0, 12, 8191], [1 << 20, 60]])
def test_guarded_regions_touch_their_guard_pages(sizes: list[int]) -> None:
    page = mmap.PAGESIZE
    named = [(str(i), n) for i, n in enumerate(sizes)]
    layout = lay_out_guarded(named, {"0"})
    assert layout.nbytes % page == 0 and all(o % page == 0 and n == page for o, n in layout.guards)
    pieces = sorted([*((r.offset, r.nbytes) for r in layout.regions if r.nbytes), *layout.redzones, *layout.guards])
    assert pieces[0][0] == 0 and sum(n for _, n in pieces) == layout.nbytes
    assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(pieces))
    starts = [o for o, _ in layout.guards]
    for region in layout.regions:
        assert region.offset % 64 == 0
        if region.name == "0":
            assert region.offset - page in starts
        elif region.nbytes:
            assert min(s for s in starts if s >= region.offset) - region.offset - region.nbytes < 64


@pytest.mark.parametrize("sizes", [[1], [64, 4096, 4100], [2 << 20, 12, 8191], [(1 << 20) + 60, 60]])
def test_edged_regions_lie_where_memory_begins_and_ends(sizes: list[int]) -> None:
    named = [(str(i), n) for i, n in enumerate(sizes)]
    for at, (last, nbytes) in enumerate(named):
        first = named[at - 1][0]
        layout = lay_out_edged(named, first, last)
        assert layout.nbytes % (2 << 20) == 0 and sorted(r.name for r in layout.regions) == sorted(dict(named))
        assert layout.nbytes - layout.offset(last) - nbytes < ALIGN_BYTES
        assert first == last or layout.offset(first) == 0
        assert all(region.offset % ALIGN_BYTES == 0 for region in layout.regions)
        pieces = sorted([*((r.offset, r.nbytes) for r in layout.regions), *layout.redzones])
        assert pieces[0][0] == 0 and sum(n for _, n in pieces) == layout.nbytes
        assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(pieces))


def test_a_guarded_page_ends_who_touches_it() -> None:
    layout = lay_out_guarded([("x", 4096)], ())
    with HostArena.create(layout.nbytes) as arena:
        child = os.fork()
        if not child:
            arena.guard(layout.guards)
            ctypes.string_at(arena.address + layout.offset("x"), 4096)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(arena.address + layout.offset("x") + 4096, 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGSEGV
