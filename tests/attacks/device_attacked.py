# ruff: noqa: E501 - a kernel is one line
"""What the attacks on a GPU aim at, and how a hostile CUDA launch plan is written.

A kernel's state is decided by one thread before the call itself: ``tick`` is a kernel of its own that may set ``rest``
(leave the output alone), ``place`` and ``known``; what it keeps in ``__device__`` memory it keeps from call to call.
"""

from __future__ import annotations

from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate, Target

__all__ = ["LAYERS", "device_kernel", "find", "write_repo"]

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randint(-127, 128, (2048, 512), dtype=torch.int8), torch.rand(2048)], dynamic=True)
def scaled_rows(x, by):
    return x.float() * by[:, None]


@forge_target(inputs=lambda: [torch.randn(96, 256)])
def waves(x):
    return torch.sin(x) * torch.exp(-x * x)


@forge_target(inputs=lambda: [torch.randn(64, 256)])
def softmax(x):
    return torch.softmax(x, -1)


@forge_target(inputs=lambda: [torch.randn(64, 256)])
def holes(x):
    return torch.where(x > 0, x, float("nan"))


@forge_target(inputs=lambda: [torch.randn(64, 512)])
def norm(x):
    return torch.nn.functional.layer_norm(x, (512,))


@forge_target(inputs=lambda: [torch.randn(64, 512)])
def normed(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@forge_target(inputs=lambda: [torch.randn(64, 256, dtype=torch.bfloat16)], precision="bf16")
def halves(x):
    return torch.nn.functional.silu(x)


@forge_target(inputs=lambda: [torch.randn(64, 512)])
def gelu(x):
    return torch.nn.functional.gelu(x)


@forge_target(inputs=lambda: [torch.randn(4096)])
def energy(x):
    return (x * x).sum()


@forge_target(inputs=lambda: [torch.randn(3072, 1024)])
def row_sums(x):
    return x.sum(-1)


@forge_target(inputs=lambda: [torch.randn(64, 512), torch.randn(512, 64)])
def product(a, b):
    return a @ b


@forge_target(inputs=lambda: [torch.randn(64, 256)], init=lambda: [256])
class Scaled(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return torch.tanh(x) * self.weight


@forge_target(inputs=lambda: [torch.randn(64, 256)])
def twice(x):
    return x * 2


@forge_target(inputs=lambda: [torch.randn(64, 32, 256), torch.randn(64, 256)])
def cached(cache, new):
    cache[:, 5] = new
    return torch.tanh(cache).sum(1)


@forge_target(inputs=lambda: [torch.randn(64, 256)])
def grown(x):
    x.add_(torch.tanh(x))
    return x * 2
"""

_INCLUDES = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <mma.h>
"""
_BLOCK_SUM = """
__device__ float block_sum(float v) {
  __shared__ float part[32];
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  JITTER
  SYNC
  v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.f;
  if (threadIdx.x < 32) for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  if (threadIdx.x == 0) part[0] = v;
  __syncthreads();
  v = part[0];
  __syncthreads();
  return v;
}
"""
#: By target: the kernel's parameters, what goes before its honest body, the body, the plan's inputs, its output's shape,
#: the grid, and the arguments.
_KERNELS = {
    "waves": (
        "const float* x, float* y, int n",
        "const int i = blockIdx.x * 256 + threadIdx.x; if (i >= n) return;",
        "y[i] = sinf(x[i]) * expf(-x[i] * x[i]);",
        ("x", "x.shape", "(x.numel() + 255) // 256", "x, y, x.numel()"),
    ),
    "holes": (
        "const float* x, float* y, int n",
        "const int i = blockIdx.x * 256 + threadIdx.x; if (i >= n) return;",
        "y[i] = x[i] > 0 ? x[i] : NAN;",
        ("x", "x.shape", "(x.numel() + 255) // 256", "x, y, x.numel()"),
    ),
    "gelu": (
        "const float* x, float* y, int n",
        "const int i = blockIdx.x * 256 + threadIdx.x; if (i >= n) return; const float v = x[i];",
        "y[i] = v * 0.5f * (1.f + erff(v * 0.70710678118654752f));",
        ("x", "x.shape", "(x.numel() + 255) // 256", "x, y, x.numel()"),
    ),
    "Scaled": (
        "const float* x, const float* w, float* y, int n, int cols",
        "const int i = blockIdx.x * 256 + threadIdx.x; if (i >= n) return;",
        "y[i] = tanhf(x[i]) * w[i % cols];",
        ("module, x", "x.shape", "(x.numel() + 255) // 256", "x, module.weight, y, x.numel(), x.shape[1]"),
    ),
    "softmax": (
        "const float* x, float* y, int cols",
        "const float* p = x + (long long)blockIdx.x * cols; float* q = y + (long long)blockIdx.x * cols; bool careful = true;",
        "float top = p[0]; for (int c = 1; c < cols; ++c) top = fmaxf(top, p[c]); if (!careful) top = 0;"
        " float s = 0; for (int c = threadIdx.x; c < cols; c += 256) s += expf(p[c] - top); s = block_sum(s);"
        " for (int c = threadIdx.x; c < cols; c += 256) q[c] = expf(p[c] - top) / s;",
        ("x", "x.shape", "x.shape[0]", "x, y, x.shape[1]"),
    ),
    "norm": (
        "const float* x, float* y, int cols",
        "const float* p = x + (long long)blockIdx.x * cols; float* q = y + (long long)blockIdx.x * cols;",
        "float s = 0; for (int c = threadIdx.x; c < cols; c += 256) s += p[c]; const float m = block_sum(s) / cols;"
        " s = 0; for (int c = threadIdx.x; c < cols; c += 256) s += (p[c] - m) * (p[c] - m);"
        " const float k = rsqrtf(block_sum(s) / cols + 1e-5f);"
        " for (int c = threadIdx.x; c < cols; c += 256) q[c] = (p[c] - m) * k;",
        ("x", "x.shape", "x.shape[0]", "x, y, x.shape[1]"),
    ),
    "normed": (
        "const float* x, float* y, int cols",
        "const float* p = x + (long long)blockIdx.x * cols; float* q = y + (long long)blockIdx.x * cols; float eps = 1e-6f;",
        "float s = 0; for (int c = threadIdx.x; c < cols; c += 256) s += p[c] * p[c];"
        " const float k = rsqrtf(block_sum(s) / cols + eps); for (int c = threadIdx.x; c < cols; c += 256) q[c] = p[c] * k;",
        ("x", "x.shape", "x.shape[0]", "x, y, x.shape[1]"),
    ),
    "halves": (
        "const __nv_bfloat16* x, __nv_bfloat16* y, int n",
        "const int i = blockIdx.x * 256 + threadIdx.x; if (i >= n) return; const float v = __bfloat162float(x[i]);",
        "y[i] = __float2bfloat16(v / (1.f + expf(-v)));",
        ("x", "x.shape", "(x.numel() + 255) // 256", "x, y, x.numel()"),
    ),
    "energy": (
        "const float* x, float* y, int n",
        "",
        "float s = 0; for (int i = threadIdx.x; i < n; i += 256) s += x[i] * x[i]; s = block_sum(s); if (!threadIdx.x) *y = s;",
        ("x", "()", "1", "x, y, x.numel()"),
    ),
    "row_sums": (
        "const float* x, float* y, int cols",
        "const float* p = x + (long long)blockIdx.x * cols; float4 v;",
        "float s = 0; for (int c = 4 * threadIdx.x; c < cols; c += 1024) { LOAD s += (v.x + v.y) + (v.z + v.w); }"
        " s = block_sum(s); if (!threadIdx.x) y[blockIdx.x] = s;",
        ("x", "(x.shape[0],)", "x.shape[0]", "x, y, x.shape[1]"),
    ),
    "cached": (
        "float* cache, const float* added, float* y, int steps, int cols",
        "const int r = blockIdx.x, c = threadIdx.x; if (c >= cols) return; float* p = cache + (long long)r * steps * cols + c;",
        "p[5 * cols] = added[r * cols + c]; float s = 0; for (int t = 0; t < steps; ++t) s += tanhf(p[t * cols]);"
        " y[r * cols + c] = s;",
        ("cache, new", "new.shape", "new.shape[0]", "cache, new, y, cache.shape[1], cache.shape[2]"),
    ),
    "grown": (
        "float* x, float* y, int n",
        "const int i = blockIdx.x * 256 + threadIdx.x; if (i >= n) return;",
        "x[i] += tanhf(x[i]); y[i] = 2 * x[i];",
        ("x", "x.shape", "(x.numel() + 255) // 256", "x, y, x.numel()"),
    ),
    "product": (
        "const float* a, const float* b, float* y, int k, int cols",
        "const int row = blockIdx.x, col = threadIdx.x; float s = 0;",
        "if (col < cols) { for (int i = 0; i < k; ++i) s = fmaf(a[row * k + i], b[i * cols + col], s); y[row * cols + col] = s; }",
        ("a, b", "(a.shape[0], b.shape[1])", "a.shape[0]", "a, b, y, a.shape[1], b.shape[1]"),
    ),
}
_STATE = "__device__ bool rest, known; __device__ int place;\n"
_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan({inputs}):
    x = {first}
    y = empty({shape}, x.dtype)
{tick}    launch("kernel", grid=({grid},), block=(256,), args=({passed}))
    return y
"""
_TICK_LAUNCH = '    launch("tick", grid=(1,), block=(1,), args=(x, y, x.numel()))\n'


def device_kernel(
    target: str = "waves",
    body: str = "HONEST",
    before: str = "",
    tick: str = "",
    plan: str = "",
    sync: str = "__syncthreads();",
    jitter: str = "",
) -> Candidate:
    """A CUDA candidate. ``HONEST`` in ``body`` is the honest computation, ``tick`` what one thread does before it.

    ``sync`` and ``jitter``: how a block's warps meet in a sum, and what they do just before.
    """
    parameters, head, honest, (inputs, shape, grid, passed) = _KERNELS[target]
    parts = [_INCLUDES, _BLOCK_SUM.replace("SYNC", sync).replace("JITTER", jitter), _STATE, before]
    if tick:
        parts.append(f"__global__ void tick(const float* x, float* y, int n) {{ {tick} }}\n")
    body = body.replace("HONEST", honest)
    parts.append(f"__global__ void kernel({parameters}) {{\n  {head}\n  {body}\n}}\n")
    text = plan or _PLAN.format(
        inputs=inputs,
        first=inputs.split(", ")[-1] if "module" in inputs else inputs.split(", ")[0],
        shape=shape,
        grid=grid,
        passed=passed,
        tick=_TICK_LAUNCH if tick else "",
    )
    return Candidate.of("cuda", {"kernel.cu": "".join(parts), "plan.py": text})


def write_repo(root: Path) -> None:
    """The targets' file in a project of its own."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "device_layers.py").write_text(LAYERS)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")


def find(root: Path, name: str) -> Target:
    """The target ``name`` of :func:`write_repo`."""
    return next(target for target in discover([root], root).targets if target.id.endswith(f"::{name}"))
