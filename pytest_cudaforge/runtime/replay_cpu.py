"""Replay on the CPU: shared objects through ctypes."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from pytest_cudaforge.errors import LaunchFailure
from pytest_cudaforge.languages.binary import Binary, KernelInfo
from pytest_cudaforge.plan import Constants, Launch, TensorSpec
from pytest_cudaforge.runtime.limits import check_cpu_launch
from pytest_cudaforge.runtime.replay import Call, Parameters, Pointers


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

    def close(self) -> None:
        for library in self._libraries.values():
            _ctypes.dlclose(library._handle)
        self._libraries.clear()


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
