"""A GPU that is busy but for one multiprocessor, and a call in what is left of it.

Blocks that else run side by side run one after another there: a kernel that takes it for granted that the others are
done, or have begun, is right on an idle GPU and wrong in production, beside another stream's kernels.

Sleeping blocks hold the device. One on each multiprocessor but one takes all of its shared memory, of which every
block needs a little; where less than a whole multiprocessor is left, blocks without any hold the rest of its threads.
They prefer shared memory to L1: a multiprocessor at work keeps its division, and what needs more shared memory than the
division has would wait until they are gone. Where the blocks that hold the rest are at work instead of asleep, they
take the turns of the call's warps as well, every other warp those of its stores (into 32 words of one bank): what waits
by the clock for a neighbour that else is done comes too soon.
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
.extern .shared .align 16 .b8 all[];
.visible .entry cudaforge_scribble(.param .u64 shared_bytes)
{
    .reg .u64 %at, %end;
    .reg .u32 %thread, %place;
    .reg .pred %more;
    ld.param.u64 %end, [shared_bytes];
    mov.u32 %thread, %tid.x;
    cvt.u64.u32 %at, %thread;
    shl.b64 %at, %at, 2;
again:
    setp.ge.u64 %more, %at, %end;
    @%more bra done;
    cvt.u32.u64 %place, %at;
    mov.u32 %thread, all;
    add.u32 %place, %place, %thread;
    st.volatile.shared.u32 [%place], 0x7f800000;
    add.u64 %at, %at, 4096;
    bra again;
done:
    ret;
}
.visible .entry cudaforge_work(.param .u64 span_ns)
{
    .shared .align 4 .b8 column[4096];
    .reg .u64 %begin, %now, %span;
    .reg .u32 %left, %low, %high, %thread, %place;
    .reg .pred %more, %storing;
    ld.param.u64 %span, [span_ns];
    mov.u64 %begin, %globaltimer;
    cvt.u32.u64 %low, %begin;
    mov.u32 %thread, %tid.x;
    mov.u32 %high, %thread;
    and.b32 %place, %thread, 32;
    setp.ne.u32 %storing, %place, 0;
    and.b32 %place, %thread, 31;
    shl.b32 %place, %place, 7;
    mov.u32 %left, column;
    add.u32 %place, %place, %left;
again:
    @%storing bra stores;
    mov.u32 %left, 256;
work:
    mad.lo.u32 %low, %low, %left, %high;
    mad.lo.u32 %high, %high, %left, %left;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %more, %left, 0;
    @%more bra work;
    bra look;
stores:
    mov.u32 %left, 16;
store:
    st.volatile.shared.u32 [%place], %left;
    sub.u32 %left, %left, 1;
    setp.ne.u32 %more, %left, 0;
    @%more bra store;
look:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.ne.u32 %more, %low, 0;
    @%more bra told;
    add.u64 %now, %now, 1;
told:
    setp.lt.u64 %more, %now, %span;
    @%more bra again;
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
        self._scribble = checked(driver.cuModuleGetFunction(self._module, b"cudaforge_scribble"), "that kernel")
        self._work = checked(driver.cuModuleGetFunction(self._module, b"cudaforge_work"), "that kernel")
        dynamic = function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        carveout = function.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        checked(driver.cuFuncSetAttribute(self._hold, dynamic, self._shared_bytes), "shared memory")
        checked(driver.cuFuncSetAttribute(self._scribble, dynamic, self._shared_bytes), "shared memory")
        for kernel in (self._hold, self._work):
            checked(driver.cuFuncSetAttribute(kernel, carveout, _ALL_SHARED), "shared memory")

    def _ask(self, attribute: Any) -> int:
        device = checked(self._driver.cuCtxGetDevice(), "the device")
        return int(checked(self._driver.cuDeviceGetAttribute(attribute, device), "the device's limits"))

    def soil(self) -> None:
        """Queue what leaves no multiprocessor's shared memory as the call before left it, or as it is at first: zeros,
        as a rule, which a kernel that forgets to clear its sums may count on. All of it is infinite then: a NaN is lost
        in a maximum."""
        self._queue(self._scribble, 2 * self._count, _MAX_BLOCK, self._shared_bytes, 0, self._shared_bytes)

    def around(self, bound: Bound, room: int, *, at_work: bool = False) -> None:
        """Run ``bound`` while one multiprocessor is free, or ``room`` threads of it where that is not 0 (who holds the
        others is asleep, or ``at_work``), and wait."""
        checked(self._driver.cuCtxSynchronize(), _HOLDING)
        held = max(0, self._threads - _warps(room)) if room else 0
        blocks = [_MAX_BLOCK] * (held // _MAX_BLOCK) + [held % _MAX_BLOCK] * (held % _MAX_BLOCK > 0)
        with self._streams(1 + len(blocks)) as (others, *rest):
            # Nobody finds shared memory as the call before left it, where other kernels run.
            self._queue(self._scribble, 2 * self._count, _MAX_BLOCK, self._shared_bytes, others, self._shared_bytes)
            checked(self._driver.cuCtxSynchronize(), _HOLDING)
            if self._count > 1:
                self._queue(self._hold, self._count - 1, _MAX_BLOCK, self._shared_bytes, others)
            if blocks:
                time.sleep(_SETTLE_S)  # they must not get where the others belong
            for threads, stream in zip(blocks, rest, strict=True):
                self._queue(self._work if at_work else self._hold, 1, threads, 0, stream)
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

    def _queue(
        self, kernel: Any, blocks: int, threads: int, shared_bytes: int, stream: Any, argument: int = _HELD_NS
    ) -> None:
        span = ctypes.c_uint64(argument)
        params = (ctypes.c_void_p * 1)(ctypes.addressof(span))
        launched = self._driver.cuLaunchKernel(
            kernel, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, ctypes.addressof(params), 0
        )
        checked(launched, _HOLDING)


def _warps(threads: int) -> int:
    """``threads``, rounded up to whole warps."""
    return -(-threads // _WARP) * _WARP
