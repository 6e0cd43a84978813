"""The door on a real GPU: build, verify and time CUDA candidates; big cases stay on the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation, Status, Target

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(2048, 4096)], init=lambda: [4096])
class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        h = x.to(torch.float32)
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


@forge_target(inputs=lambda: [torch.randn(2048, 4096, dtype=torch.bfloat16)])
def gelu16(x):
    return torch.nn.functional.gelu(x)


@forge_target(inputs=lambda: [torch.randn(512, 1024)], init=lambda: [1024, 512], allow=("kernel", "mixed", "library"))
class Project(nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x))


def labels():
    drawn = torch.randint(0, 8192, (512,))
    return [torch.randn(512, 8192), drawn.masked_fill(torch.rand(512) < 0.1, -100)]


@forge_target(inputs=labels, grad=True)
def loss(logits, labels):
    z = torch.logsumexp(logits, dim=-1).square().masked_fill(labels == -100, 0.0)
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="none") + 1e-4 * z


@forge_target(inputs=lambda: [torch.randn(8, 3000), torch.randint(0, 3000, (8, 64))])
def gathered(x, places):
    assert_far = 3000 * (places.float().mean(-1, keepdim=True) > 2000).long()
    return x.gather(1, places + assert_far)
"""

#: KernelBench level 1 task 36, as published: 7.5 GB in, 7.5 GB out.
LEVEL1_36 = '''
import torch
import torch.nn as nn

class Model(nn.Module):
    """Simple model that performs RMS Normalization."""
    def __init__(self, num_features: int, eps: float = 1e-5):
        super(Model, self).__init__()
        self.num_features = num_features
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rms = torch.sqrt(torch.mean(x ** 2, dim=1, keepdim=True) + self.eps)
        return x / rms

batch_size = 112
features = 64
dim1 = 512
dim2 = 512

def get_inputs():
    x = torch.rand(batch_size, features, dim1, dim2)
    return [x]

def get_init_inputs():
    return [features]
'''

NORM = """
__device__ float block_sum(float v) {
  __shared__ float part[32];
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.f;
  if (threadIdx.x < 32) for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  if (threadIdx.x == 0) part[0] = v;
  __syncthreads();
  return part[0];
}
__global__ void norm(const float* x, const float* w, float* y, int cols, float eps) {
  const float* p = x + (long long)blockIdx.x * cols; float* q = y + (long long)blockIdx.x * cols;
  float s = 0;
  for (int c = threadIdx.x; c < CEND; c += blockDim.x) s += p[c] * p[c];
  float k = rsqrtf(block_sum(s) / cols + eps);
  for (int c = threadIdx.x; c < cols; c += blockDim.x) q[c] = p[c] * k * w[c];
  AFTER
}
"""

NORM_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("norm", grid=(rows,), block=(256,), args=(x, module.weight, y, cols, module.eps))
    return y
"""

CHANNEL_NORM = """
__global__ void norm(const float4* x, float4* y, long long inner, int channels, float eps) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const float4* p = x + (long long)blockIdx.y * channels * inner + i;
  float4* q = y + (long long)blockIdx.y * channels * inner + i;
  if (i >= inner) return;
  float a = 0, b = 0, c = 0, d = 0;
  for (int k = 0; k < channels; ++k) {
    float4 v = p[k * inner]; a += v.x * v.x; b += v.y * v.y; c += v.z * v.z; d += v.w * v.w;
  }
  a = rsqrtf(a / channels + eps); b = rsqrtf(b / channels + eps);
  c = rsqrtf(c / channels + eps); d = rsqrtf(d / channels + eps);
  for (int k = 0; k < channels; ++k) {
    float4 v = p[k * inner]; v.x *= a; v.y *= b; v.z *= c; v.w *= d; q[k * inner] = v;
  }
}
"""

CHANNEL_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    n, c, h, w = x.shape
    inner = h * w // 4
    y = empty(x.shape, x.dtype)
    launch("norm", grid=((inner + 255) // 256, n), block=(256,), args=(x, y, inner, c, module.eps))
    return y
"""

GELU = """
#include <cuda_bf16.h>
__global__ void gelu(const __nv_bfloat16* x, __nv_bfloat16* y, long long n) {
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) { float v = __bfloat162float(x[i]); y[i] = __float2bfloat16(BODY); }
}
"""

GELU_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("gelu", grid=((x.numel() + 255) // 256,), block=(256,), args=(x, y, x.numel()))
    return y
"""


def _norm(cend: str = "cols", after: str = "") -> Candidate:
    source = NORM.replace("CEND", cend).replace("AFTER", after)
    return Candidate.of("cuda", {"kernel.cu": source, "plan.py": NORM_PLAN})


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    (root / "layers.py").write_text(LAYERS)
    (root / "36_RMSNorm_.py").write_text(LEVEL1_36)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=tmp_path_factory.mktemp("cache"))) as opened:
        yield opened


def _target(root: Path, name: str) -> Target:
    found = discover([root, root / "36_RMSNorm_.py"], root).targets
    return next(target for target in found if target.id.endswith(name))


def _show(evaluation: Evaluation) -> None:
    print(f"\n{evaluation.status.value} {evaluation.reason}")
    print(f"  {evaluation.seconds:.2f} s, grade {evaluation.isolation.grade}")
    if evaluation.build is not None:
        print(f"  build {evaluation.build.seconds:.3f} s")
    if evaluation.timing is not None:
        print(f"  {evaluation.timing}")
    if evaluation.verification is not None:
        print(f"  worst ratio {evaluation.verification.worst_ratio}, guard {evaluation.verification.guard}")


def test_a_small_module(evaluator: Evaluator, repo: Path) -> None:
    target = _target(repo, "::RMSNorm")
    print(evaluator.baselines(target))
    evaluator.evaluate(_norm(after="// warm"), target)
    evaluation = evaluator.evaluate(_norm(), target)
    _show(evaluation)
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert evaluation.timing is not None and evaluation.timing.clock == "events"
    # A plain kernel beats eager by far; whether it beats the compiler is not this test's matter.
    assert evaluation.timing.speedup_eager > 2


@pytest.mark.parametrize(
    ("candidate", "status"),
    [
        (_norm(cend="cols - 41"), Status.INCORRECT_NUMERICAL),
        (_norm(after="if (blockIdx.x == gridDim.x - 1) q[threadIdx.x] = 0;"), Status.INCORRECT_NUMERICAL),
        (_norm(after="if (blockIdx.x == gridDim.x - 1 && !threadIdx.x) q[cols] = 7;"), Status.REJECTED),
        (_norm(after="const_cast<float*>(p)[0] = 3;"), Status.REJECTED),
        (_norm(after="*(volatile int*)nullptr = 1;"), Status.RUNTIME_ERROR),
        (_norm(after="nonsense"), Status.BUILD_ERROR),
    ],
)
def test_wrong_kernels_are_refused_and_the_next_is_unharmed(
    evaluator: Evaluator, repo: Path, candidate: Candidate, status: Status
) -> None:
    target = _target(repo, "::RMSNorm")
    evaluation = evaluator.evaluate(candidate, target, timing=False)
    _show(evaluation)
    assert evaluation.status is status, evaluation.reason
    assert evaluator.evaluate(_norm(), target, timing=False).status is Status.PASSED


#: Every row keeps a hash of 64 of its values in device memory, by the place of its output, and rests where it is known.
MEMO = """
__device__ unsigned seen[1 << 21];
__device__ bool known(const float* p, const float* q) {
    unsigned hash = 2166136261u;
    for (int i = 0; i < 64; ++i) hash = (hash ^ __float_as_uint(p[i * 64])) * 16777619u;
    unsigned* entry = &seen[((unsigned long long)q >> 14) & ((1 << 21) - 1)];
    const bool same = *entry == hash;
    __syncthreads();
    if (!threadIdx.x) *entry = hash;
    return same;
}
"""


def test_a_kernel_that_remembers_answers_in_device_memory_is_refused(evaluator: Evaluator, repo: Path) -> None:
    source = MEMO + _norm().file("kernel.cu").replace("  float s = 0;", "  if (known(p, q)) return;\n  float s = 0;")
    candidate = Candidate.of("cuda", {"kernel.cu": source, "plan.py": NORM_PLAN})
    evaluation = evaluator.evaluate(candidate, _target(repo, "::RMSNorm"))
    _show(evaluation)
    assert evaluation.status in (Status.REJECTED, Status.INCORRECT_NUMERICAL), evaluation.reason
    reasons = ("it remembers answers", "of a timed call is wrong", "exchanged:", "never written")
    assert any(reason in evaluation.reason for reason in reasons), evaluation.reason


def test_half_precision(evaluator: Evaluator, repo: Path) -> None:
    target = _target(repo, "::gelu16")
    good = GELU.replace("BODY", "0.5f * v * (1.f + erff(v * 0.70710678f))")
    bad = GELU.replace("BODY", "fmaxf(v, 0.f)")
    for source, status in [(good, Status.PASSED), (bad, Status.INCORRECT_NUMERICAL)]:
        candidate = Candidate.of("cuda", {"kernel.cu": source, "plan.py": GELU_PLAN})
        evaluation = evaluator.evaluate(candidate, target, timing=False)
        _show(evaluation)
        assert evaluation.status is status, evaluation.reason


RELU = "__global__ void relu(const float* x, float* y) { const int i = blockIdx.x * 256 + threadIdx.x; FROM }"
PRODUCT_PLAN = """
from pytest_cudaforge.plan import empty, launch, op

def plan(module, x):
    h = op("aten.addmm", module.bias, x, module.weight.t())
    y = empty(h.shape, h.dtype)
    launch("relu", grid=(h.numel() // 256,), block=(256,), args=(h, y))
    return y
"""


@pytest.mark.parametrize("name", ["loss", "gathered"])
def test_no_redraw_ends_a_context_twice(evaluator: Evaluator, repo: Path, name: str) -> None:
    """A label that is no class, or an index beyond the end, is an assertion on a device, after which its process is of
    no use: one that held a verdict's benches would take them along."""
    target = _target(repo, f"::{name}")
    found = evaluator.oracle.families(target, "default")
    generation = evaluator.oracle.generation
    assert {"large", "faint"} <= set(found) and ("highest" in found) is (name == "loss")
    assert evaluator.oracle.families(target, "default") == found and evaluator.oracle.generation == generation


def test_a_plan_with_a_library_product(evaluator: Evaluator, repo: Path) -> None:
    target = _target(repo, "::Project")
    for body, status in [("y[i] = fmaxf(x[i], 0.f);", Status.PASSED), ("y[i] = x[i];", Status.INCORRECT_NUMERICAL)]:
        candidate = Candidate.of("cuda", {"kernel.cu": RELU.replace("FROM", body), "plan.py": PRODUCT_PLAN})
        evaluation = evaluator.evaluate(candidate, target)
        _show(evaluation)
        assert evaluation.status is status, evaluation.reason
        assert evaluation.work in ("kernel", "mixed", "library") or not evaluation.passed


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 100 << 30,
    reason="needs 100 GB of GPU memory",
)
def test_kernelbench_level1_36(evaluator: Evaluator, repo: Path) -> None:
    target = _target(repo, "36_RMSNorm_.py::Model")
    print(evaluator.baselines(target))
    candidate = Candidate.of("cuda", {"kernel.cu": CHANNEL_NORM, "plan.py": CHANNEL_PLAN})
    evaluation = evaluator.evaluate(candidate, target)
    _show(evaluation)
    assert evaluation.status is Status.PASSED, evaluation.reason
    loop = "k < %s; ++k) {\n    float4 v = p[k * inner]; a"
    short = CHANNEL_NORM.replace(loop % "channels", loop % "channels - 1")
    assert short != CHANNEL_NORM
    wrong = Candidate.of("cuda", {"kernel.cu": short, "plan.py": CHANNEL_PLAN})
    refused = evaluator.evaluate(wrong, target)
    _show(refused)
    assert refused.status is Status.INCORRECT_NUMERICAL
