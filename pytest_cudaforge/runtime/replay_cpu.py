"""Replay on the CPU: shared objects through ctypes."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import os
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

from pytest_cudaforge.errors import LaunchFailure
from pytest_cudaforge.languages.binary import Binary, KernelInfo
from pytest_cudaforge.plan import Constants, Launch, TensorSpec
from pytest_cudaforge.runtime.limits import check_cpu_launch
from pytest_cudaforge.runtime.replay import Call, Parameters, Pointers

#: Type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment of an ELF segment.
_SEGMENT = struct.Struct("<IIQQQQQQ")
_LOAD, _THREAD_LOCAL, _EXECUTE, _WRITE = 1, 7, 1, 2
#: dlinfo's RTLD_DI_TLS_DATA.
_TLS_DATA = 10
#: Names of functions whose static objects count for glibc: half of what it keeps there is no sum of calls.
_WAITING = (b"pthread_cond_", b"pthread_barrier_", b"condition_variable", b"sem_wait", b"sem_post", b"sem_timedwait")


class _CpuLaunch:
    def __init__(self, function: Any, parameters: Parameters) -> None:
        self.point, self.moves = parameters.point, parameters.moves
        self.call: Call = functools.partial(function, parameters.addresses)

    def queue_on(self, stream: int) -> None:
        pass


class _CpuZero:
    def __init__(self, function: Any, buffer: int, nbytes: int) -> None:
        self._buffer = buffer
        self._address = ctypes.c_void_p()
        self.call: Call = functools.partial(function, self._address, 0, nbytes)

    moves = True

    def point(self, buffers: Sequence[int]) -> None:
        self._address.value = buffers[self._buffer]

    def queue_on(self, stream: int) -> None:
        pass


class CpuDevice:
    """Candidate code runs with this process's full power: only a sandboxed worker or production may load it."""

    def __init__(self) -> None:
        self._libraries: dict[Constants, ctypes.CDLL] = {}
        self._code: dict[Constants, bytes] = {}
        self._memset = ctypes.CDLL(None)["memset"]
        self._memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._memset.restype = None

    def load(self, launches: Sequence[Launch], binaries: Sequence[Binary]) -> None:
        for launch in launches:
            check_cpu_launch(launch)
        used = {launch.constants for launch in launches}
        for binary in binaries:
            if binary.constants in used:
                self._libraries[binary.constants] = _open_library(binary)
                self._code[binary.constants] = binary.code

    def bind_launch(
        self, launch: Launch, kernel: KernelInfo, binary: Binary, itemsizes: Sequence[int], pointers: Pointers
    ) -> _CpuLaunch:
        function = _function(self._libraries[binary.constants], kernel)
        return _CpuLaunch(function, Parameters(launch, kernel.params, itemsizes, pointers))

    def bind_zero(self, buffer: int, nbytes: int) -> _CpuZero:
        return _CpuZero(self._memset, buffer, nbytes)

    def tensor(self, address: int, spec: TensorSpec) -> Any:
        import torch

        dtype = getattr(torch, spec.dtype)
        if spec.extent == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer((ctypes.c_char * spec.extent_bytes).from_address(address), dtype=dtype)

    def library_scope(self, stream: int) -> contextlib.AbstractContextManager[Any]:
        import torch

        return torch.no_grad()

    def explain(self, code: int) -> str:
        return f"code {code}"

    def recover(self, call: Call, code: object) -> object:
        return code

    def variables(self) -> Sequence[tuple[int, int]]:
        found = []
        for constants, library in self._libraries.items():
            code = self._code[constants]
            if not any(name in code for name in _WAITING):
                base = _base_of(library)
                found += [(base + offset, nbytes) for offset, nbytes in _segments(code, _LOAD, _WRITE)]
                found += _of_this_thread(library, code)
        return found

    def code(self) -> Sequence[tuple[int, int]]:
        return [
            (_base_of(library) + offset, nbytes)
            for constants, library in self._libraries.items()
            for offset, nbytes in _segments(self._code[constants], _LOAD, _EXECUTE)
        ]

    def close(self) -> None:
        for library in self._libraries.values():
            _ctypes.dlclose(library._handle)
        self._libraries.clear()
        self._code.clear()


def _base_of(library: ctypes.CDLL) -> int:
    """Where it is mapped: a handle points to its link_map, whose first member says so (link.h; musl's alike)."""
    return ctypes.c_uint64.from_address(library._handle).value


def _of_this_thread(library: ctypes.CDLL, code: bytes) -> list[tuple[int, int]]:
    """Where the calling thread has the library's thread_local variables, once it has touched one of them."""
    place = ctypes.c_void_p()
    for _, nbytes in _segments(code, _THREAD_LOCAL):
        if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), _TLS_DATA, ctypes.byref(place)) == 0:
            return [(place.value, nbytes)] if place.value and nbytes else []
    return []


def _segments(code: bytes, wanted: int, flag: int = 0) -> list[tuple[int, int]]:
    """(address, bytes) of the parts of this kind of a 64-bit ELF file, as they lie beside each other."""
    (table,) = struct.unpack_from("<Q", code, 0x20)
    step, count = struct.unpack_from("<HH", code, 0x36)
    headers = [_SEGMENT.unpack_from(code, table + index * step) for index in range(count)]
    found = [header for header in headers if header[0] == wanted and header[1] & flag == flag]
    return [(address, taken) for _, _, _, address, _, _, taken, _ in found]


def _function(library: ctypes.CDLL, kernel: KernelInfo) -> Any:
    try:
        function = library[kernel.symbol]
    except AttributeError:
        raise LaunchFailure(f'kernel "{kernel.expression}" is not in its binary ({kernel.symbol})') from None
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


def _open_library(binary: Binary) -> ctypes.CDLL:
    """Map the code from a file of its own: the loader would give a file it has already mapped a second time back."""
    if binary.language != "cpp":
        raise LaunchFailure(f"a {binary.language} binary cannot be loaded on the CPU", expected="one of language cpp")
    handle, path = tempfile.mkstemp(prefix="forge-", suffix=".so")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(binary.code)
        return ctypes.CDLL(path)
    except OSError as error:
        raise LaunchFailure(
            f"the compiled kernels cannot be loaded: {error}",
            remedy="if the temporary directory is mounted noexec, set TMPDIR to one that is not",
        ) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
