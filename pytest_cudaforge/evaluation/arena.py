"""Memory shared between oracle and worker: sealed memfds on the host, VMM allocations on a CUDA device.

The oracle creates an arena and hands its descriptor to the supervisor, which passes it on; the worker attaches it.
A read-only host arena is sealed (F_SEAL_FUTURE_WRITE), so that native candidate code cannot map it writable
whatever it does; a read-only device mapping is refused by the GPU's page tables.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

from pytest_cudaforge.errors import DeviceError, UsageError

__all__ = [
    "ALIGN_BYTES",
    "HOST_ALIGN_BYTES",
    "ArenaLayout",
    "DeviceArena",
    "HostArena",
    "Region",
    "checked",
    "driver_of",
    "lay_out",
    "lay_out_edged",
    "lay_out_guarded",
]

#: fcntl's numbers; the fcntl module has them only from Python 3.13 on.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 1, 2, 4, 16
#: What device memory is mapped in, as a rule.
_DEVICE_PAGE_BYTES = 2 << 20
#: What a region starts at a multiple of, and what torch's own tensors on a host do.
ALIGN_BYTES, HOST_ALIGN_BYTES = 256, 64
_NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Region:
    """One buffer's place: its first byte and its size, both in bytes from the start of the arena."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ArenaLayout:
    """Where regions and the red zones between them lie. ``redzones`` are (offset, nbytes), in order.

    ``guards`` are so, too: whole pages that nobody may touch.
    """

    nbytes: int
    regions: tuple[Region, ...]
    redzones: tuple[tuple[int, int], ...]
    guards: tuple[tuple[int, int], ...] = ()

    def offset(self, name: str) -> int:
        """Byte offset of region ``name``. Raises KeyError."""
        for region in self.regions:
            if region.name == name:
                return region.offset
        raise KeyError(name)


def lay_out(
    sizes: Iterable[tuple[str, int]],
    *,
    redzone_bytes: int = 256,
    align_bytes: int = ALIGN_BYTES,
    skew_bytes: int = 0,
    skews: Mapping[str, int] = _NONE,
    paged: Collection[str] = (),
) -> ArenaLayout:
    """Place (name, bytes) pairs one after another with a red zone before, between and after them.

    Each region starts ``skew_bytes`` past a multiple of ``align_bytes``, or as many as ``skews`` has under its name;
    those named in ``paged`` as malloc places large blocks for torch, at the first aligned byte behind its own header. A
    red zone begins at the byte after its region, padding included, so that the first byte written out of bounds is
    seen.
    """
    regions: list[Region] = []
    redzones: list[tuple[int, int]] = []
    end = 0
    for name, nbytes in sizes:
        step = mmap.PAGESIZE if name in paged else align_bytes
        skew = HOST_ALIGN_BYTES if name in paged else skews.get(name, skew_bytes)
        start = -(-(end + redzone_bytes) // step) * step + skew
        if start > end:
            redzones.append((end, start - end))
        regions.append(Region(name, start, nbytes))
        end = start + nbytes
    total = max(-(-(end + redzone_bytes) // align_bytes) * align_bytes, align_bytes)
    if total > end:
        redzones.append((end, total - end))
    return ArenaLayout(total, tuple(regions), tuple(redzones))


def lay_out_guarded(
    sizes: Iterable[tuple[str, int]], first: Collection[str], *, aligns: Mapping[str, int] = _NONE
) -> ArenaLayout:
    """Place (name, bytes) pairs on pages of their own with a guard page before, between and after them.

    Regions named in ``first`` begin where their pages do, the others end where theirs do, as far as a start at a
    multiple of what ``aligns`` has under their names allows, or else of ``HOST_ALIGN_BYTES``; what is left of their
    pages is a red zone.
    """
    page = mmap.PAGESIZE
    regions: list[Region] = []
    redzones: list[tuple[int, int]] = []
    guards = [(0, page)]
    end = page
    for name, nbytes in sizes:
        room = max(page, -(-nbytes // page) * page)
        align_bytes = aligns.get(name, HOST_ALIGN_BYTES)
        start = end if name in first else end + room - -(-nbytes // align_bytes) * align_bytes
        regions.append(Region(name, start, nbytes))
        pieces = ((end, start - end), (start + nbytes, end + room - start - nbytes))
        redzones += [piece for piece in pieces if piece[1]]
        guards.append((end + room, page))
        end += room + page
    return ArenaLayout(end, tuple(regions), tuple(redzones), tuple(guards))


def lay_out_edged(sizes: Iterable[tuple[str, int]], first: str, last: str) -> ArenaLayout:
    """As :func:`lay_out`, on whole pages of a device: region ``first`` begins where the arena does, and ``last`` ends
    where it does, as far as its alignment allows."""
    named = dict(sizes)
    inner = lay_out((name, nbytes) for name, nbytes in named.items() if name not in (first, last))
    start = -(-named[first] // ALIGN_BYTES) * ALIGN_BYTES if first != last else 0
    least = start + inner.nbytes + ALIGN_BYTES + named[last]
    total = -(-least // _DEVICE_PAGE_BYTES) * _DEVICE_PAGE_BYTES
    regions = [
        *([Region(first, 0, named[first])] if first != last else []),
        *(Region(region.name, start + region.offset, region.nbytes) for region in inner.regions),
        Region(last, total - -(-named[last] // ALIGN_BYTES) * ALIGN_BYTES, named[last]),
    ]
    ends = [(0, 0), *((region.offset, region.offset + region.nbytes) for region in regions), (total, total)]
    zones = tuple((end, begin - end) for (_, end), (begin, _) in itertools.pairwise(ends) if begin > end)
    return ArenaLayout(total, tuple(regions), zones)


class HostArena:
    """A sealed memfd mapped into this process from ``address`` on; ``fd`` stays open until close."""

    def __init__(self, fd: int, nbytes: int, readonly: bool) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.readonly = readonly
        prot = mmap.PROT_READ if readonly else mmap.PROT_READ | mmap.PROT_WRITE
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, prot)
        self.address = _address_of(self._map, nbytes, prot)

    @classmethod
    def create(cls, nbytes: int) -> HostArena:
        """``nbytes`` zeroed bytes whose size can never change. Raises UsageError for a size below 1."""
        if nbytes < 1:
            raise UsageError(f"an arena of {nbytes} bytes", expected="at least 1 byte")
        fd = os.memfd_create("cudaforge-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
            return cls(fd, nbytes, readonly=False)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int, readonly: bool) -> HostArena:
        """Map an arena made elsewhere; takes ownership of ``fd``. Raises UsageError where it is not such an arena."""
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        if os.fstat(fd).st_size < nbytes or not seals & _SEAL_SHRINK:
            raise UsageError(
                f"descriptor {fd} is no sealed arena of {nbytes} bytes", expected="one made by HostArena.create"
            )
        return cls(fd, nbytes, readonly)

    def seal_readonly(self) -> None:
        """From now on nobody can map or write it, through any descriptor; this object's own mapping stays writable."""
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_FUTURE_WRITE | _SEAL_SEAL)

    def guard(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take all access to these (offset, bytes) away, in this process's mapping: whole pages. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        for offset, nbytes in ranges:
            if libc.mprotect(ctypes.c_void_p(self.address + offset), ctypes.c_size_t(nbytes), 0):
                raise OSError(ctypes.get_errno(), f"no guard page at byte {offset} of the arena")

    def memory(self) -> memoryview:
        """Its bytes; writable unless attached read-only. Release it before :meth:`close`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap and close the descriptor; a second call does nothing."""
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> HostArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _address_of(mapping: mmap.mmap, nbytes: int, prot: int) -> int:
    # ctypes' from_buffer needs a writable buffer and would pin it; Python's C API gives the address of any buffer.
    class PyBuffer(ctypes.Structure):
        _fields_ = [("buf", ctypes.c_void_p), ("rest", ctypes.c_byte * 128)]

    buffer = PyBuffer()
    get, release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
    get(ctypes.py_object(mapping), ctypes.byref(buffer), 0)
    address = int(buffer.buf or 0)
    release(ctypes.byref(buffer))
    return address


class DeviceArena:
    """Memory of a CUDA device shared through a POSIX file descriptor (CUDA's virtual memory management).

    ``nbytes`` is rounded up to the device's granularity (2 MiB as a rule). Nothing is mapped right before and behind
    it. The primary context of the device is made current if none is.
    """

    def __init__(self, fd: int, nbytes: int, device: int, readonly: bool, handle: Any) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.device = device
        self.readonly = readonly
        self._handle = handle
        self.address, self._reserved = _map_device(handle, nbytes, device, readonly)

    @classmethod
    def create(cls, nbytes: int, device: int = 0) -> DeviceArena:
        """At least ``nbytes`` bytes, undefined contents. Raises DeviceError (out of memory included)."""
        driver = driver_of(device)
        prop, step = _allocation_properties(driver, device), _granularity(driver, device)
        size = max(-(-nbytes // step) * step, step)
        handle = checked(driver.cuMemCreate(size, prop, 0), f"allocating {size} bytes")
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        fd = int(checked(driver.cuMemExportToShareableHandle(handle, kind, 0), "exporting a descriptor"))
        os.set_inheritable(fd, False)
        return cls(fd, size, device, False, handle)

    @classmethod
    def attach(cls, fd: int, nbytes: int, device: int = 0, readonly: bool = False) -> DeviceArena:
        """Map an exported arena; ``nbytes`` as the creator's ``.nbytes``. Takes ownership of ``fd``."""
        driver = driver_of(device)
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = checked(driver.cuMemImportFromShareableHandle(fd, kind), "importing a descriptor")
        return cls(fd, nbytes, device, readonly, handle)

    def close(self) -> None:
        """Unmap, release and close the descriptor; a second call does nothing. No kernel may still use it."""
        if self.fd < 0:
            return
        driver = driver_of(self.device)
        checked(driver.cuMemUnmap(self.address, self.nbytes), "unmapping")
        checked(driver.cuMemAddressFree(*self._reserved), "freeing addresses")
        checked(driver.cuMemRelease(self._handle), "releasing memory")
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> DeviceArena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def driver_of(device: int) -> Any:
    """cuda.bindings' driver module with a context current in this thread. Raises DeviceError."""
    try:
        from cuda.bindings import driver

        checked(driver.cuInit(0), "starting the CUDA driver")
    except ImportError as error:
        raise DeviceError("cuda.bindings cannot be imported", remedy='pip install "pytest-cudaforge[cuda]"') from error
    except RuntimeError as error:
        # cuda.bindings finds no driver library.
        raise DeviceError(
            f"no CUDA driver: {error}", expected="an NVIDIA driver on this machine", remedy="run `cudaforge doctor`"
        ) from error
    if not int(checked(driver.cuCtxGetCurrent(), "current context")):
        handle = checked(driver.cuDeviceGet(device), f"device {device}")
        context = checked(driver.cuDevicePrimaryCtxRetain(handle), "primary context")
        checked(driver.cuCtxSetCurrent(context), "setting the context")
    return driver


def _allocation_properties(driver: Any, device: int) -> Any:
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    return prop


def _granularity(driver: Any, device: int) -> int:
    flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    prop = _allocation_properties(driver, device)
    return int(checked(driver.cuMemGetAllocationGranularity(prop, flag), "granularity"))


def _map_device(handle: Any, nbytes: int, device: int, readonly: bool) -> tuple[int, tuple[int, int]]:
    """Where it is mapped, and the addresses that are reserved for it: (first, bytes), a page more at both ends."""
    driver = driver_of(device)
    page = _granularity(driver, device)
    reserved_bytes = nbytes + 2 * page
    reserved = int(checked(driver.cuMemAddressReserve(reserved_bytes, 0, 0, 0), "reserving addresses"))
    address = reserved + page
    checked(driver.cuMemMap(address, nbytes, 0, handle, 0), "mapping")
    access = driver.CUmemAccessDesc()
    access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    flags = driver.CUmemAccess_flags
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READ if readonly else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    checked(driver.cuMemSetAccess(address, nbytes, [access], 1), "setting access")
    return address, (reserved, reserved_bytes)


def checked(result: tuple[Any, ...], doing: str) -> Any:
    """cuda.bindings returns (error, value...); the value, or DeviceError with the error's name."""
    status, *values = result
    if int(status) != 0:
        raise DeviceError(f"CUDA: {status.name} while {doing}")
    return values[0] if values else None
