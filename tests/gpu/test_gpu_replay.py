"""Replay on a real GPU: NVRTC binaries, plans written by hand, torch only to hold the memory."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from pytest_cudaforge.errors import LaunchFailure
from pytest_cudaforge.evaluation.ageing import DeviceMemory, advance, counters
from pytest_cudaforge.evaluation.arena import driver_of
from pytest_cudaforge.languages import Binary, load, units_of
from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, LibraryCall, TensorSpec, TracedPlan, View, Zero
from pytest_cudaforge.runtime.replay import Program, load_program

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here (torch.cuda.is_available() is False)"),
]

SOURCE = """
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef BIAS
#define BIAS 0
#endif
template <class T> __global__ void scale(const T* x, T* y, int64_t n, float factor) {
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) y[i] = T(float(x[i]) * factor + BIAS);
}
__global__ void add_bf16(const __nv_bfloat16* x, __nv_bfloat16* y, __nv_bfloat16 b, bool twice, double d, short s) {
  y[threadIdx.x] = __float2bfloat16(float(x[threadIdx.x]) + float(b) * (twice ? 2 : 1) + float(d) + s);
}
__device__ int calls;
extern "C" __global__ void count(float* y) { y[0] = ++calls; }
extern "C" __global__ void reverse(const float* x, float* y, int n) {
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = tile[n - 1 - i];
}
"""
GROUPS = """
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
extern "C" __global__ void grid_sum(float* parts, float* y) {
  parts[blockIdx.x] = blockIdx.x;
  cg::this_grid().sync();
  if (blockIdx.x == 0) { float s = 0; for (int i = 0; i < gridDim.x; ++i) s += parts[i]; y[0] = s; }
}
extern "C" __global__ void cluster_rank(float* parts, float* y) {
  __shared__ float own;
  auto cluster = cg::this_cluster();
  own = 1 + cluster.block_rank();
  cluster.sync();
  if (cluster.block_rank() == 0) {
    float s = 0;
    for (unsigned i = 0; i < cluster.num_blocks(); ++i) s += *cluster.map_shared_rank(&own, i);
    y[blockIdx.x / cluster.num_blocks()] = s;
  }
  cluster.sync();
}
"""


def arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def vector(n: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec((n,), dtype, (1,))


def view(buffer: int, n: int, offset: int = 0) -> View:
    return View(buffer, (n,), (1,), offset)


def compile_all(plan: LaunchPlan, source: str = SOURCE) -> list[Binary]:
    return [load("cuda").compile(source, unit, arch()) for unit in units_of(TracedPlan(plan))]


def program(plan: LaunchPlan, source: str = SOURCE) -> Program:
    return load_program(plan, compile_all(plan, source), "cuda:0")


def run(plan: LaunchPlan, *tensors: Any, source: str = SOURCE) -> None:
    with program(plan, source) as loaded:
        loaded.bind([t.data_ptr() for t in tensors]).run()
        torch.cuda.synchronize()


def two(step: Any, n: int = 1000, dtype: str = "float32") -> LaunchPlan:
    steps = step if isinstance(step, tuple) else (step,)
    return LaunchPlan((Buffer("input", vector(n, dtype), "0"), Buffer("scratch", vector(n, dtype))), steps, view(1, n))


def scale(factor: float, kernel: str = "scale<float>", n: int = 1000, **more: Any) -> Launch:
    return Launch(kernel, (view(0, n), view(1, n), n, factor), grid=(4, 1, 1), block=(256, 1, 1), **more)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("scale<float>", "float32"), ("scale<__half>", "float16"), ("scale<__nv_bfloat16>", "bfloat16")],
)
def test_a_template_runs_in_each_dtype(kernel: str, dtype: str) -> None:
    x = torch.randn(1000, device="cuda").to(getattr(torch, dtype))
    y = torch.empty_like(x)
    run(two(scale(2.0, kernel, constants=(("BIAS", 3),)), dtype=dtype), x, y)
    assert torch.equal(y, (x.float() * 2 + 3).to(x.dtype))


def test_every_scalar_type_arrives() -> None:
    x = torch.zeros(32, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    step = Launch("add_bf16", (view(0, 32), view(1, 32), 1.5, True, 0.25, -2), block=(32, 1, 1))
    run(two(step, 32, "bfloat16"), x, y)
    assert y.tolist() == [1.25] * 32


def test_globals_begin_afresh_with_every_load_and_zero_fills() -> None:
    plan = two((Zero(1), Launch("count", (view(0, 1),))))
    binaries = compile_all(plan)
    for _ in range(2):
        x, y = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda")
        with load_program(plan, binaries, "cuda:0") as loaded:
            bound = loaded.bind([x.data_ptr(), y.data_ptr()])
            bound.run()
            bound.run()
            torch.cuda.synchronize()
        assert x[0].item() == 2
        assert not y.any()


def test_the_static_variables_of_the_code_are_found() -> None:
    source = """
    __device__ unsigned tickets[3]; static __device__ long long total = 5;
    extern "C" __global__ void count(float* y) {
      static __device__ int inner; tickets[1] += 1; total += 2; inner += 3; y[0] = tickets[1] + total + inner; }
    """
    plan = LaunchPlan((Buffer("scratch", vector(1)),), (Launch("count", (view(0, 1),)),), view(0, 1))
    y = torch.zeros(1, device="cuda")
    memory = DeviceMemory(driver_of(0))
    with program(plan, source) as loaded:
        bound = loaded.bind([y.data_ptr()])

        def call(calls: int) -> None:
            for _ in range(calls):
                bound.run()
            torch.cuda.synchronize()

        assert sorted(nbytes for _, nbytes in loaded.variables()) == [4, 8, 12]
        found = counters(memory, loaded.variables(), call, 64)
        assert sorted(one.step for one in found) == [1, 2, 3]
        advance(memory, found, 1000)
        call(1)
        assert y.item() == 6 * 1067 + 5


def test_dynamic_shared_memory_above_48_kb() -> None:
    n = 40_000
    x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    run(two(Launch("reverse", (view(0, n), view(1, n), n), block=(1024, 1, 1), shared_bytes=4 * n), n), x, y)
    assert torch.equal(y, x.flip(0))


def test_a_cooperative_launch_synchronises_the_grid() -> None:
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    parts, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    step = Launch("grid_sum", (view(0, 1000), view(1, 1)), grid=(blocks, 1, 1), cooperative=True)
    run(two(step), parts, y, source=GROUPS)
    assert y[0].item() == sum(range(blocks))


@pytest.mark.parametrize("size", [2, 8, 16])
def test_clusters_share_memory(size: int) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    parts, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    step = Launch("cluster_rank", (view(0, 1), view(1, 8)), grid=(2 * size, 1, 1), cluster=(size, 1, 1))
    run(two(step), parts, y, source=GROUPS)
    assert y[:2].tolist() == [size * (size + 1) / 2] * 2


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch("count", (view(0, 1),), block=(2048, 1, 1)), "block.x is 2048"),
        (Launch("count", (view(0, 1),), grid=(1, 70000, 1)), "grid.y is 70000"),
        (Launch("count", (view(0, 1),), grid=(0, 1, 1)), "grid.x is 0"),
        (Launch("count", (view(0, 1),), shared_bytes=1 << 20), "1048576 bytes of dynamic"),
        (Launch("count", (view(0, 1),), grid=(3, 1, 1), cluster=(2, 1, 1)), "cluster"),
        (Launch("count", (view(0, 1),), grid=(100_000, 1, 1), block=(1024, 1, 1), cooperative=True), "cooperatively"),
    ],
)
def test_limits_are_named_before_the_launch(launch: Launch, message: str) -> None:
    with pytest.raises(LaunchFailure, match=message):
        program(two(launch))


def test_a_binary_for_another_architecture_is_named() -> None:
    plan = two(scale(1.0))
    other = "sm_80" if arch() == "sm_75" else "sm_120" if arch() != "sm_120" else "sm_90"
    binaries = [load("cuda").compile(SOURCE, unit, other) for unit in units_of(TracedPlan(plan))]
    with pytest.raises(LaunchFailure, match=f"compiled for {other} cannot be loaded"):
        load_program(plan, binaries, "cuda:0")


def test_streams_rebinding_and_a_captured_graph() -> None:
    x, y = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    other = torch.zeros(1000, device="cuda")
    stream = torch.cuda.Stream()
    with program(two(scale(3.0))) as loaded:
        bound = loaded.bind([x.data_ptr(), y.data_ptr()], stream)
        with torch.cuda.stream(stream):
            bound.run()
        stream.synchronize()
        assert torch.equal(y, x * 3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bound.rebind([x.data_ptr(), other.data_ptr()], torch.cuda.current_stream().cuda_stream)
            bound.run()
        assert not other.any()
        x.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(other, x * 3)
        del graph


def test_another_thread_can_run_a_bound_program() -> None:
    x, y = torch.randn(1000, device="cuda"), torch.zeros(1000, device="cuda")
    with program(two(scale(3.0))) as loaded:
        bound = loaded.bind([x.data_ptr(), y.data_ptr()])
        torch.cuda.synchronize()
        thread = threading.Thread(target=bound.run)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
    assert torch.equal(y, x * 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_library_calls_between_launches_share_memory_and_stream(dtype: str) -> None:
    spec = TensorSpec((64, 64), dtype, (64, 1))
    whole = View(0, (64, 64), (64, 1))
    kernel = "scale<float>" if dtype == "float32" else "scale<__nv_bfloat16>"
    args = (View(1, (4096,), (1,)), View(2, (4096,), (1,)), 4096, 2.0)
    plan = LaunchPlan(
        (Buffer("input", spec, "0"), Buffer("scratch", spec), Buffer("scratch", spec)),
        (
            LibraryCall("aten.mm", (whole, View(0, (64, 64), (1, 64))), (), (1,)),
            Launch(kernel, args, grid=(16, 1, 1), block=(256, 1, 1)),
        ),
        View(2, (64, 64), (64, 1)),
    )
    x = torch.randn(64, 64, device="cuda").to(getattr(torch, dtype))
    t, y = torch.empty_like(x), torch.empty_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with program(plan) as loaded:
        loaded.bind([b.data_ptr() for b in (x, t, y)], stream.cuda_stream).run()
        stream.synchronize()
    assert torch.equal(y, (x @ x.T) * 2)


def test_instructions_of_this_architecture_alone_are_let_in() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma exists on compute capability 9.0 alone")
    source = 'extern "C" __global__ void f(float* y) { asm volatile("wgmma.fence.sync.aligned;"); y[0] = 7; }'
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    run(two(Launch("f", (view(1, 1),), block=(128, 1, 1))), x, y, source=source)
    assert y[0].item() == 7


def test_launches_and_library_calls_on_memory_of_an_arena() -> None:
    """Memory of the driver's virtual memory calls, as a worker sees it, read-only for the input."""
    from pytest_cudaforge.evaluation.arena import DeviceArena

    spec, whole = TensorSpec((64, 64), "bfloat16", (64, 1)), (64, 64)
    args = (View(1, (4096,), (1,)), View(2, (4096,), (1,)), 4096, 2.0)
    plan = LaunchPlan(
        (Buffer("input", spec, "0"), Buffer("scratch", spec), Buffer("scratch", spec)),
        (
            Zero(1),
            LibraryCall("aten.mm", (View(0, whole, (64, 1)), View(0, whole, (1, 64))), (), (1,)),
            Launch("scale<__nv_bfloat16>", args, grid=(16, 1, 1), block=(256, 1, 1)),
        ),
        View(2, whole, (64, 1)),
    )
    with (
        DeviceArena.create(1 << 21) as inputs,
        DeviceArena.create(1 << 21) as outputs,
        DeviceArena.attach(os.dup(inputs.fd), inputs.nbytes, readonly=True) as readonly,
        program(plan) as loaded,
    ):
        filled = loaded._device.tensor(inputs.address, spec).as_strided((64, 64), (64, 1))
        filled.copy_(torch.randn(64, 64).bfloat16())
        expected = (filled @ filled.T) * 2
        loaded.bind([readonly.address, outputs.address, outputs.address + 65536]).run()
        torch.cuda.synchronize()
        result = loaded._device.tensor(outputs.address + 65536, spec).as_strided((64, 64), (64, 1))
        assert torch.equal(result, expected)
        del filled, result
