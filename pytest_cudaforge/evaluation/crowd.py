"""A GPU that is busy but for one multiprocessor, and a call in what is left of it.

Blocks that else run side by side run one after another there: a kernel that takes it for granted that the others are
done, or have begun, is right on an idle GPU and wrong in production, beside another stream's kernels.

Sleeping blocks hold the device. One on each multiprocessor but one takes all of its shared memory, of which every
block needs a little; where less than a whole multiprocessor is left, blocks without any hold the rest of its threads.
They prefer shared memory to L1: a multiprocessor at work keeps its division, and what needs more shared memory than the
division has would wait until they are gone.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.evaluation.arena import checked, driver_of

if TYPE_CHECKING:
    from pytest_cudaforge.runtime.replay import Bound

__all__ = ["Crowd"]

_KERNEL = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry cudaforge_hold(.param .u64 span_ns)
{
    .reg .u64 %begin, %now, %span;
    .reg .pred %early;
    ld.param.u64 %span, [span_ns];
    mov.u64 %begin, %globaltimer;
again:
    nanosleep.u32 2000;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %early, %now, %span;
    @%early bra again;
    ret;
}
"""
#: For how long the device is held, at most: a call that does not fit beside is run after that.
_HELD_NS = 4_000_000
#: What blocks need to get into their places.
_SETTLE_S = 1e-4
_MAX_BLOCK, _WARP = 1024, 32
_ALL_SHARED = 100  # percent
_HOLDING = "holding multiprocessors"


class Crowd:
    """Holds one device of its process's primary context. Raises DeviceError throughout."""

    def __init__(self, device: int) -> None:
        driver = self._driver = driver_of(device)
        function, attribute = driver.CUfunction_attribute, driver.CUdevice_attribute
        self._shared_bytes = self._ask(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self._threads = self._ask(attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)
        self._count = self._ask(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self._module = checked(driver.cuModuleLoadData(_KERNEL + b"\0"), "loading the kernel that holds the device")
        self._hold = checked(driver.cuModuleGetFunction(self._module, b"cudaforge_hold"), "that kernel")
        for name, value in (
            (function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self._shared_bytes),
            (function.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _ALL_SHARED),
        ):
            checked(driver.cuFuncSetAttribute(self._hold, name, value), "shared memory")

    def _ask(self, attribute: Any) -> int:
        device = checked(self._driver.cuCtxGetDevice(), "the device")
        return int(checked(self._driver.cuDeviceGetAttribute(attribute, device), "the device's limits"))

    def around(self, bound: Bound, room: int) -> None:
        """Run ``bound`` while one multiprocessor is free, or ``room`` threads of it where that is not 0, and wait."""
        checked(self._driver.cuCtxSynchronize(), _HOLDING)
        held = max(0, self._threads - _warps(room)) if room else 0
        blocks = [_MAX_BLOCK] * (held // _MAX_BLOCK) + [held % _MAX_BLOCK] * (held % _MAX_BLOCK > 0)
        with self._streams(1 + len(blocks)) as (others, *rest):
            if self._count > 1:
                self._queue(self._count - 1, _MAX_BLOCK, self._shared_bytes, others)
            if blocks:
                time.sleep(_SETTLE_S)  # they must not get where the others belong
            for threads, stream in zip(blocks, rest, strict=True):
                self._queue(1, threads, 0, stream)
            time.sleep(_SETTLE_S)
            bound.run()
            checked(self._driver.cuCtxSynchronize(), "running main on a busy device")

    @contextmanager
    def _streams(self, count: int) -> Iterator[list[Any]]:
        """Streams beside that of the call, each for one launch."""
        flag = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        streams = [checked(self._driver.cuStreamCreate(flag), "a stream") for _ in range(count)]
        try:
            yield streams
        finally:
            for stream in streams:
                self._driver.cuStreamDestroy(stream)  # after a fault it fails as well, and says nothing new

    def _queue(self, blocks: int, threads: int, shared_bytes: int, stream: Any) -> None:
        span = ctypes.c_uint64(_HELD_NS)
        params = (ctypes.c_void_p * 1)(ctypes.addressof(span))
        launched = self._driver.cuLaunchKernel(
            self._hold, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(params), 0
        )
        checked(launched, _HOLDING)


def _warps(threads: int) -> int:
    """``threads``, rounded up to whole warps."""
    return -(-threads // _WARP) * _WARP
