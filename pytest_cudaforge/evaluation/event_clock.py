"""Device time of one call by CUDA events, cold, with the host's side hidden (program 1 of the timing rules).

Per sample: reset persisting L2, overwrite the L2, read what was written, queue a spin kernel, the start event, the
call, the end event. While the device spins the host queues the rest, so that launch overhead stays out of the figure.
The spin is bounded in time: one that waited for the host would deadlock once the launch queue is full.

Reading leaves clean lines in the L2. After the overwriting alone they are modified, and every line that the call brings
in has to wait for one to be written back: time that is not the call's (tests/benchmarks/cold_clock.py shows how much).

A process has its own page tables, and its own places for code and events. What they add to a cold call is some 100 ns
more or less than in the next process, and much of it is the same for every kernel of the process: a *probe* shows it, a
kernel of ours that does nothing but wait for memory twice (tests/benchmarks/placement.py).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.evaluation.arena import checked, driver_of

if TYPE_CHECKING:
    from pytest_cudaforge.runtime.replay import Bound

__all__ = ["EventClock"]

#: Our own device code, small enough for the driver's own translator: no compiler is needed in the worker.
_KERNELS = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry cudaforge_spin(.param .u64 span_ns)
{
    .reg .u64 %begin, %now, %span;
    .reg .pred %early;
    ld.param.u64 %span, [span_ns];
    mov.u64 %begin, %globaltimer;
again:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %early, %now, %span;
    @%early bra again;
    ret;
}
.visible .entry cudaforge_read(.param .u64 buffer, .param .u64 vectors)
{
    .reg .u64 %at, %end, %index, %step, %count;
    .reg .u32 %thread, %block, %threads, %blocks, %a, %b, %c, %d;
    .reg .pred %more;
    ld.param.u64 %at, [buffer];
    ld.param.u64 %count, [vectors];
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %blocks, %nctaid.x;
    mad.wide.u32 %index, %block, %threads, 0;
    cvt.u64.u32 %step, %thread;
    add.u64 %index, %index, %step;
    mul.wide.u32 %step, %blocks, %threads;
    shl.b64 %step, %step, 4;
    shl.b64 %count, %count, 4;
    add.u64 %end, %at, %count;
    shl.b64 %index, %index, 4;
    add.u64 %at, %at, %index;
next:
    setp.lt.u64 %more, %at, %end;
    @!%more bra done;
    ld.volatile.global.v4.u32 {%a, %b, %c, %d}, [%at];
    add.u64 %at, %at, %step;
    bra next;
done:
    ret;
}
.visible .entry cudaforge_probe(.param .u64 place)
{
    .reg .u64 %at, %to, %step;
    .reg .u32 %block, %thread, %line, %a, %b, %c, %d;
    ld.param.u64 %at, [place];
    mov.u32 %block, %ctaid.x;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %step, %block, 4096;
    add.u64 %at, %at, %step;
    add.u64 %to, %at, 1048576;
    ld.volatile.global.v4.u32 {%a, %b, %c, %d}, [%at];
    and.b32 %line, %a, 16;
    cvt.u64.u32 %step, %line;
    add.u64 %at, %at, %step;
    ld.volatile.global.v4.u32 {%a, %b, %c, %d}, [%at+2048];
    mul.wide.u32 %step, %thread, 16;
    add.u64 %to, %to, %step;
    st.volatile.global.v4.u32 [%to], {%a, %b, %c, %d};
    ret;
}
"""
#: The reading kernel's grid: enough to use the whole memory of any GPU.
_READ_BLOCKS, _READ_THREADS = 2048, 256
#: The probe's grid, and in how many places of 2 MB it works by turns: where memory lies is a part of what it shows.
_PROBE_BLOCKS, _PROBE_THREADS = 64, 32
_PROBE_PLACES, _PROBE_BYTES = 8, 2 << 20
_FIRST_SPIN_NS = 20_000
_MAX_SPIN_NS = 20_000_000
_STREAM = 0
_RUNNING = "running main"


class EventClock:
    """Events, flush memory and the spin kernel of one device, in its primary context. Raises DeviceError throughout."""

    def __init__(self, device: int) -> None:
        self._driver = driver_of(device)
        self._spin_ns = _FIRST_SPIN_NS
        self._flush: Any = 0
        self._flush_bytes = 0
        self._module = checked(self._driver.cuModuleLoadData(_KERNELS + b"\0"), "loading the clock's kernels")
        self._function = checked(self._driver.cuModuleGetFunction(self._module, b"cudaforge_spin"), "the spin kernel")
        self._reader = checked(self._driver.cuModuleGetFunction(self._module, b"cudaforge_read"), "the reading kernel")
        self._start = checked(self._driver.cuEventCreate(0), "an event")
        self._end = checked(self._driver.cuEventCreate(0), "an event")
        self._span = ctypes.c_uint64(0)
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(self._span))
        self._region = (ctypes.c_uint64 * 2)()
        at = ctypes.addressof(self._region)
        self._region_params = (ctypes.c_void_p * 2)(at, at + ctypes.sizeof(ctypes.c_uint64))
        self._probes: list[_Probe] = []

    def synchronize(self) -> None:
        """Wait for everything on the device; the place where a kernel's fault shows, by its CUDA name."""
        checked(self._driver.cuCtxSynchronize(), _RUNNING)

    def sample(
        self, bounds: Sequence[Bound], samples: int, flush_bytes: int, *, warm: bool = True, probed: bool = False
    ) -> list[int]:
        """``samples`` times in ns, rotating over ``bounds``; then the largest lateness in ns and the exposed count.

        ``warm``: run each of ``bounds`` once before, untimed; without it none is run again where the host came late.
        ``probed``: as many times of the probe follow, one taken after each of the others.
        """
        self._provide_flush(flush_bytes)
        if probed and not self._probes:
            self._probes = self._made_probes()
        for bound in bounds if warm else ():
            bound.run()
        self.synchronize()
        times_ns: list[int] = []
        probe_ns: list[int] = []
        late_ns = exposed = 0
        for index in range(samples):
            taken_ns, late, hidden = self._one(bounds[index % len(bounds)])
            while not hidden and self._spin_ns < _MAX_SPIN_NS:
                self._spin_ns *= 2
                if not warm:
                    break
                taken_ns, late, hidden = self._one(bounds[index % len(bounds)])
            times_ns.append(taken_ns)
            late_ns = max(late_ns, late)
            exposed += not hidden
            if probed:
                probe_ns.append(self._one(self._probes[index % _PROBE_PLACES])[0])
        return [*times_ns, late_ns, exposed, *probe_ns]

    def around(self, bounds: Sequence[Bound], calls: int) -> int:
        """ns from the first to the last of ``calls`` calls one after another, rotating over ``bounds``: host time that
        the device waits for is in it. The same work, and the same waiting, as the supervisor's clock sees."""
        self.synchronize()
        checked(self._driver.cuEventRecord(self._start, _STREAM), "recording an event")
        for index in range(calls):
            bounds[index % len(bounds)].run()
        checked(self._driver.cuEventRecord(self._end, _STREAM), _RUNNING)
        self.synchronize()
        elapsed_ms = float(checked(self._driver.cuEventElapsedTime(self._start, self._end), "reading the events"))
        return max(round(elapsed_ms * 1e6), 0)

    def _made_probes(self) -> list[_Probe]:
        function = checked(self._driver.cuModuleGetFunction(self._module, b"cudaforge_probe"), "the probe")
        probes = []
        for _ in range(_PROBE_PLACES):
            place = checked(self._driver.cuMemAlloc(_PROBE_BYTES), f"{_PROBE_BYTES} bytes for the probe")
            checked(self._driver.cuMemsetD32(place, 0, _PROBE_BYTES // 4), "clearing the probe's memory")
            probes.append(_Probe(self._driver, function, int(place)))
            probes[-1].run()
        return probes

    def _one(self, bound: Bound | _Probe) -> tuple[int, int, bool]:
        """Device ns, ns that a device-wide wait still took after the end event, whether the host was hidden."""
        driver = self._driver
        self._queue_flush()
        self._queue_spin(self._spin_ns)
        checked(driver.cuEventRecord(self._start, _STREAM), "recording an event")
        bound.run()
        # From here to the end of the wait, whatever goes wrong is the call's doing.
        checked(driver.cuEventRecord(self._end, _STREAM), _RUNNING)
        hidden = driver.cuEventQuery(self._start)[0] == driver.CUresult.CUDA_ERROR_NOT_READY
        checked(driver.cuEventSynchronize(self._end), _RUNNING)
        before_ns = time.perf_counter_ns()
        self.synchronize()
        late_ns = time.perf_counter_ns() - before_ns
        elapsed_ms = float(checked(driver.cuEventElapsedTime(self._start, self._end), "reading the events"))
        return max(round(elapsed_ms * 1e6), 0), late_ns, hidden

    def empty_caches(self, nbytes: int) -> None:
        """Overwrite ``nbytes`` and read them, as before each sample, and wait for it."""
        self._provide_flush(nbytes)
        self._queue_flush()
        self.synchronize()

    def _queue_flush(self) -> None:
        driver = self._driver
        driver.cuCtxResetPersistingL2Cache()  # devices before sm_80 have none; another error shows at the next call
        if self._flush_bytes:
            checked(driver.cuMemsetD32Async(self._flush, 0, self._flush_bytes // 4, _STREAM), "overwriting the L2")
            self._queue_read()

    def _queue_read(self) -> None:
        address = ctypes.addressof(self._region_params)
        launched = self._driver.cuLaunchKernel(
            self._reader, _READ_BLOCKS, 1, 1, _READ_THREADS, 1, 1, 0, _STREAM, address, 0
        )
        checked(launched, "reading the overwritten memory")

    def _queue_spin(self, span_ns: int) -> None:
        self._span.value = span_ns
        address = ctypes.addressof(self._params)
        launched = self._driver.cuLaunchKernel(self._function, 1, 1, 1, 1, 1, 1, 0, _STREAM, address, 0)
        checked(launched, "launching the spin kernel")

    def _provide_flush(self, nbytes: int) -> None:
        if nbytes == self._flush_bytes:
            return
        if self._flush_bytes:
            checked(self._driver.cuMemFree(self._flush), "freeing flush memory")
        self._flush_bytes = 0
        if nbytes:
            self._flush = checked(self._driver.cuMemAlloc(nbytes), f"{nbytes} bytes of flush memory")
            self._flush_bytes = nbytes
            self._region[0], self._region[1] = int(self._flush), nbytes // 16


class _Probe:
    """The probe at one place in memory, to be run like a bound program."""

    def __init__(self, driver: Any, function: Any, place: int) -> None:
        self._driver, self._function = driver, function
        self._place = ctypes.c_uint64(place)
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(self._place))

    def run(self) -> None:
        address = ctypes.addressof(self._params)
        launched = self._driver.cuLaunchKernel(
            self._function, _PROBE_BLOCKS, 1, 1, _PROBE_THREADS, 1, 1, 0, _STREAM, address, 0
        )
        checked(launched, "launching the probe")
