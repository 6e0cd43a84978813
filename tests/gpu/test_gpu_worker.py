"""CUDA workers in the sandbox: device arenas, device times, faults and hangs, on a real GPU."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from pytest_cudaforge.errors import DeviceError, LaunchFailure, WorkerTimeout
from pytest_cudaforge.evaluation.arena import DeviceArena, checked, driver_of
from pytest_cudaforge.evaluation.worker import Binding, Worker
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import units_of
from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, TensorSpec, TracedPlan, View

pytestmark = pytest.mark.gpu

COUNT = 16 << 20
_SPEC = TensorSpec((COUNT,), "float32", (1,))
_VIEWS = (View(0, (COUNT,), (1,)), View(1, (COUNT,), (1,)))
SOURCE = """
__device__ int calls;
extern "C" __global__ void twice(const float* x, float* y, long long n) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
        y[i] = 2 * x[i];
}
extern "C" __global__ void spoil(const float* x, float* y, long long n) { const_cast<float*>(x)[0] = 7; }
extern "C" __global__ void hang(const float* x, float* y, long long n) { while (*(volatile const float*)x < 1e30f) {} }
extern "C" __global__ void count(const float* x, float* y, long long n) {
    if (blockIdx.x == 0 && threadIdx.x == 0) y[0] = ++calls;
}
__device__ int here, most, gone;
extern "C" __global__ void meet(const float* x, float* y, long long n) {
    __shared__ float part[64];
    part[threadIdx.x % 64] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x) return;
    atomicMax(&most, atomicAdd(&here, 1) + 1);
    __nanosleep(4000);
    y[1] = part[5];
    atomicSub(&here, 1);
    if (atomicAdd(&gone, 1) % gridDim.x == gridDim.x - 1) y[0] = atomicExch(&most, 0);
}
extern "C" __global__ void steps(const float* x, float* y, long long n) {
    unsigned long long begin, end;
    float s = x[threadIdx.x];
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    for (int k = 0; k < 8192; ++k) s = fmaf(s, 0.5f, 1.f);
    if (s == 7.f) y[2] = s;
    __syncthreads();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(end));
    if (!threadIdx.x && !blockIdx.x) y[0] = end - begin;
}
"""


@pytest.fixture(scope="module")
def device() -> int:
    try:
        driver_of(0)
    except DeviceError as error:
        pytest.skip(f"no CUDA device: {error.what}")
    return 0


@pytest.fixture(scope="module")
def servers(device: int) -> Iterator[ForkServers]:
    with ForkServers() as opened:
        print(opened.isolation("cuda"))
        yield opened


def _plan(kernel: str, launches: int = 1, grid: int = 1056) -> TracedPlan:
    launch = Launch(kernel, (*_VIEWS, COUNT), grid=(grid, 1, 1), block=(256, 1, 1))
    buffers = (Buffer("input", _SPEC, "0"), Buffer("scratch", _SPEC))
    return TracedPlan(LaunchPlan(buffers, (launch,) * launches, _VIEWS[1]))


def _arch(device: int) -> str:
    driver = driver_of(device)
    attribute = driver.CUdevice_attribute
    major = checked(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "")
    minor = checked(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "")
    return f"sm_{major}{minor}"


@contextmanager
def _worker(servers: ForkServers, traced: TracedPlan, arenas: Sequence[tuple[DeviceArena, bool]]) -> Iterator[Worker]:
    begun = time.perf_counter()
    binaries = [servers.builder().compile("cuda", SOURCE, unit, _arch(0)) for unit in units_of(traced)]
    built = time.perf_counter()
    with servers.worker("cuda") as worker:
        spawned = time.perf_counter()
        worker.start(traced, binaries, "cuda:0")
        print(
            f"build {1e3 * (built - begun):.0f} ms, spawn {1e3 * (spawned - built):.1f} ms, "
            f"context and load {1e3 * (time.perf_counter() - spawned):.0f} ms"
        )
        for slot, (arena, readonly) in enumerate(arenas):
            worker.attach(slot, arena, readonly=readonly)
        yield worker


@contextmanager
def _arenas(device: int, sets: int = 1) -> Iterator[tuple[list[DeviceArena], list[DeviceArena]]]:
    inputs = [DeviceArena.create(4 * COUNT, device) for _ in range(sets)]
    outputs = [DeviceArena.create(4 * COUNT, device) for _ in range(sets)]
    driver = driver_of(device)
    for arena in inputs:
        checked(driver.cuMemsetD32(arena.address, 0x3FC00000, COUNT), "filling with 1.5")
    for arena in outputs:
        checked(driver.cuMemsetD32(arena.address, 0, COUNT), "filling with 0")
    checked(driver.cuCtxSynchronize(), "filling")
    yield inputs, outputs
    for arena in [*inputs, *outputs]:
        arena.close()


def _value(arena: DeviceArena, index: int) -> float:
    value = ctypes.c_float()
    driver = driver_of(arena.device)
    checked(driver.cuMemcpyDtoH(ctypes.addressof(value), arena.address + 4 * index, 4), "reading back")
    return value.value


ONE: tuple[Binding, ...] = ((0, 0), (1, 0))


def test_it_computes_in_memory_shared_with_this_process(servers: ForkServers, device: int) -> None:
    with (
        _arenas(device) as ((x,), (y,)),
        _worker(servers, _plan("twice"), [(x, True), (y, False)]) as worker,
    ):
        worker.run("main", ONE, timeout_s=10)
        assert [_value(y, index) for index in (0, COUNT // 2, COUNT - 1)] == [3.0] * 3


def test_a_read_only_input_cannot_be_written(servers: ForkServers, device: int) -> None:
    with _arenas(device) as ((x,), (y,)):
        refused = pytest.raises(LaunchFailure, match=r"CUDA_ERROR_\w+ while running main")
        with _worker(servers, _plan("spoil"), [(x, True), (y, False)]) as worker, refused as caught:
            worker.run("main", ONE, timeout_s=10)
        print(caught.value)
        assert _value(x, 0) == 1.5
        with _worker(servers, _plan("spoil"), [(x, False), (y, False)]) as worker:
            worker.run("main", ONE, timeout_s=10)
        assert _value(x, 0) == 7.0


def test_an_endless_kernel_ends_in_time_and_the_next_worker_works(servers: ForkServers, device: int) -> None:
    with _arenas(device) as ((x,), (y,)):
        begun = time.monotonic()
        with _worker(servers, _plan("hang"), [(x, True), (y, False)]) as worker, pytest.raises(WorkerTimeout):
            worker.run("main", ONE, timeout_s=2)
        print(f"hang ended after {time.monotonic() - begun:.1f} s")
        assert time.monotonic() - begun < 15
        with _worker(servers, _plan("twice"), [(x, True), (y, False)]) as worker:
            worker.run("main", ONE, timeout_s=10)
        assert _value(y, 5) == 3.0


def test_a_clean_phase_forgets_device_state(servers: ForkServers, device: int) -> None:
    with _arenas(device) as ((x,), (y,)), _worker(servers, _plan("count"), [(x, True), (y, False)]) as worker:
        worker.run("main", ONE, timeout_s=10)
        first = _value(y, 0)
        worker.reload("a second look")
        worker.run("main", ONE, timeout_s=10)
        assert first > 0 and _value(y, 0) == first


def test_device_times_are_close_to_bandwidth_and_agree_with_the_slope(servers: ForkServers, device: int) -> None:
    with _arenas(device, 2) as (inputs, outputs):
        sets: list[tuple[Binding, ...]] = [((0, 0), (1, 0)), ((2, 0), (3, 0))]
        arenas = [(inputs[0], True), (outputs[0], False), (inputs[1], True), (outputs[1], False)]
        with _worker(servers, _plan("twice"), arenas) as worker:
            cold = worker.time_events(sets, 60, flush_bytes=128 << 20, timeout_s=30)
            hot = worker.time_events(sets, 60, flush_bytes=0, timeout_s=30)
            worker.run_many(sets, 100, timeout_s=30)
            slopes = [_slope_us(worker, sets, 1000) for _ in range(5)]
        cold_us, hot_us = (statistics.median(samples.ns) / 1e3 for samples in (cold, hot))
        print(f"cold {cold_us:.1f} us, hot {hot_us:.1f} us, slope {statistics.median(slopes):.1f} us, {cold.late_ns=}")
        assert cold.exposed == 0 and len(cold.ns) == 60
        assert cold.late_ns < 1_000_000
        # 128 MiB moved at no more than 8 TB/s, no less than 0.1 TB/s
        assert 16 < cold_us < 1400
        assert abs(statistics.median(slopes) / cold_us - 1) < 0.2


def _slope_us(worker: Worker, sets: list[tuple[Binding, ...]], calls: int) -> float:
    once = worker.run_many(sets, calls, timeout_s=30)
    return (worker.run_many(sets, 2 * calls, timeout_s=30) - once) / calls / 1e3


def test_many_launches_stay_hidden_behind_the_spin(servers: ForkServers, device: int) -> None:
    with (
        _arenas(device) as ((x,), (y,)),
        _worker(servers, _plan("count", 100), [(x, True), (y, False)]) as worker,
    ):
        samples = worker.time_events([ONE], 30, flush_bytes=128 << 20, timeout_s=30)
        print(f"100 launches: {statistics.median(samples.ns) / 1e3:.1f} us, {samples.exposed} exposed")
        assert samples.exposed == 0


def test_blocks_run_one_after_another_beside_a_busy_device(servers: ForkServers, device: int) -> None:
    with _arenas(device) as (inputs, outputs):
        traced = _plan("meet", grid=64)
        with _worker(servers, traced, [(inputs[0], True), (outputs[0], False)]) as worker:
            together = []
            for room in (None, 0, 512, 256, None):
                worker.run("main", ONE, timeout_s=30, room=room)
                together.append(_value(outputs[0], 0))
    print(together)
    assert min(together[0], together[-1]) > 16 and together[1] <= 8 and together[2:4] == [2.0, 1.0]


def test_a_block_waits_for_its_turns_beside_others_at_work(servers: ForkServers, device: int) -> None:
    took_ns = []
    with (
        _arenas(device) as ((x,), (y,)),
        _worker(servers, _plan("steps", grid=4), [(x, True), (y, False)]) as worker,
    ):
        for at_work in (False, False, True, True):
            worker.run("main", ONE, timeout_s=30, room=512, at_work=at_work)
            took_ns.append(_value(y, 0))
    print(took_ns)
    assert min(took_ns[2:]) > 3 * took_ns[1]
