"""CUDA candidates with one fault each, and the bound and source lines by which a profile has to name it.

Lines that are the fault end in ``// FAULT``. Every candidate's answer is right: the faults cost time only.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_cudaforge.records import Candidate

LAYERS = """
import torch
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(4096, 4096)])
def transposed(x):
    return 2 * x.t()


@forge_target(inputs=lambda: [torch.randn(64, 1 << 18)])
def scaled(x):
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5)


@forge_target(inputs=lambda: [torch.randn(4096, 4096)])
def chain(x):
    return torch.relu(2 * x + 1)
"""

_HEAD = "from pytest_cudaforge.plan import empty, launch\n\n\ndef plan(x):\n    rows, cols = x.shape\n"

SCATTERED = """
__global__ void scatter(const float* __restrict__ x, float* __restrict__ y, int rows, int cols) {
  const int col = blockIdx.x * 32 + threadIdx.x % 32;
  const int row = blockIdx.y * 8 + threadIdx.x / 32;
  const float v = 2.f * x[(long long)row * cols + col];
  y[(long long)col * rows + row] = v;  // FAULT
}
"""
SCATTERED_PLAN = (
    _HEAD
    + """    y = empty((cols, rows), x.dtype)
    launch("scatter", grid=(cols // 32, rows // 8), block=256, args=(x, y, rows, cols))
    return y
"""
)

CONFLICTING = """
__global__ void tiles(const float* __restrict__ x, float* __restrict__ y, int rows, int cols) {
  __shared__ float tile[32][32];
  const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
  const int left = blockIdx.x * 32, top = blockIdx.y * 32;
  for (int i = ty; i < 32; i += 8)
    tile[i][tx] = 2.f * x[(long long)(top + i) * cols + left + tx];
  __syncthreads();
  for (int i = ty; i < 32; i += 8) {
    const float v = tile[tx][i];  // FAULT
    y[(long long)(left + i) * rows + top + tx] = v;
  }
}
"""
CONFLICTING_PLAN = (
    _HEAD
    + """    y = empty((cols, rows), x.dtype)
    launch("tiles", grid=(cols // 32, rows // 32), block=256, args=(x, y, rows, cols))
    return y
"""
)

#: 64 values a thread in 32 registers.
SPILLING = """
__global__ void __launch_bounds__(256, 8)
columns(const float* __restrict__ x, float* __restrict__ y, int cols) {
  const int c = blockIdx.x * 256 + threadIdx.x;
  float v[64], s = 0.f;
#pragma unroll
  for (int r = 0; r < 64; ++r)
    v[r] = x[(long long)r * cols + c];  // FAULT
#pragma unroll
  for (int r = 0; r < 64; ++r)
    s += v[r] * v[r];  // FAULT
  const float k = rsqrtf(s / 64 + 1e-5f);
#pragma unroll
  for (int r = 0; r < 64; ++r)
    y[(long long)r * cols + c] = v[r] * k;  // FAULT
}
"""
SPILLING_PLAN = (
    _HEAD
    + """    y = empty(x.shape, x.dtype)
    launch("columns", grid=cols // 256, block=256, args=(x, y, cols))
    return y
"""
)

LONELY = """
__global__ void few(const float* __restrict__ x, float* __restrict__ y, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    y[i] = fmaxf(2.f * x[i] + 1.f, 0.f);  // FAULT
}
"""
LONELY_PLAN = (
    _HEAD
    + """    y = empty(x.shape, x.dtype)
    launch("few", grid=4, block=256, args=(x, y, x.numel()))
    return y
"""
)

TRAVELLING = """
__global__ void twice(const float* __restrict__ x, float* __restrict__ y) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  y[i] = 2.f * x[i];  // FAULT
}
__global__ void increment(const float* __restrict__ x, float* __restrict__ y) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  y[i] = x[i] + 1.f;  // FAULT
}
__global__ void positive(const float* __restrict__ x, float* __restrict__ y) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  y[i] = fmaxf(x[i], 0.f);  // FAULT
}
"""
TRAVELLING_PLAN = (
    _HEAD
    + """    a, b, y = empty(x.shape, x.dtype), empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    launch("twice", grid=x.numel() // 256, block=256, args=(x, a))
    launch("increment", grid=x.numel() // 256, block=256, args=(a, b))
    launch("positive", grid=x.numel() // 256, block=256, args=(b, y))
    return y
"""
)

#: What the third target's kernel should be: nothing is wrong with it.
HONEST = """
__global__ void chain(const float4* __restrict__ x, float4* __restrict__ y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) {
    const float4 v = x[i];
    y[i] = make_float4(fmaxf(2.f * v.x + 1.f, 0.f), fmaxf(2.f * v.y + 1.f, 0.f), fmaxf(2.f * v.z + 1.f, 0.f),
                       fmaxf(2.f * v.w + 1.f, 0.f));
  }
}
"""
HONEST_PLAN = (
    _HEAD
    + """    y = empty(x.shape, x.dtype)
    launch("chain", grid=x.numel() // 1024, block=256, args=(x, y, x.numel() // 4))
    return y
"""
)


@dataclass(frozen=True)
class Fault:
    """``target`` is a function of :data:`LAYERS`; ``bound`` one of ``hardware.diagnosis``'s."""

    name: str
    target: str
    bound: str
    source: str
    plan: str

    @property
    def candidate(self) -> Candidate:
        return Candidate.of("cuda", {"kernel.cu": self.source, "plan.py": self.plan})

    @property
    def lines(self) -> frozenset[int]:
        """Numbers of the lines that are the fault."""
        lines = self.source.splitlines()
        return frozenset(number for number, line in enumerate(lines, 1) if line.endswith("// FAULT"))


FAULTS = (
    Fault("scattered", "transposed", "uncoalesced access", SCATTERED, SCATTERED_PLAN),
    Fault("conflicting", "transposed", "shared memory bank conflicts", CONFLICTING, CONFLICTING_PLAN),
    Fault("spilling", "scaled", "register spills", SPILLING, SPILLING_PLAN),
    Fault("lonely", "chain", "tiny grid", LONELY, LONELY_PLAN),
    Fault("travelling", "chain", "redundant global traffic", TRAVELLING, TRAVELLING_PLAN),
)
HONEST_ONE = Fault("honest", "chain", "memory bandwidth", HONEST, HONEST_PLAN)
