"""Targets and ModelNew candidates for the tests of the module tier: one repo on disk, one extension for all."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate, Target

#: For an attack: host code sees on its own stack whether a call's answer will be fetched, and where it goes then.
STACK = """
import sys
def place():
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_run_many":
        frame = frame.f_back
    at = frame.f_locals if frame is not None else {}
    return (at["bound"].outputs["out"] if at["i"] >= at["calls"] - at["count"] else None) if at else at
"""
LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(33, 512)], init=lambda: [512, 1e-6])
class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@forge_target(inputs=lambda: [torch.randn(8, 64)], init=lambda: {"sizes": (64, 32), "dtype": torch.float32})
class Affine(nn.Module):
    def __init__(self, sizes, dtype=None):
        super().__init__()
        self.first = nn.Linear(*sizes, dtype=dtype)
        self.scale = nn.Parameter(torch.randn(sizes[1]))

    def forward(self, x):
        return self.first(x) * self.scale


@forge_target(inputs=lambda: [torch.randn(16, 8, 4)], init=lambda: [8], mode="train")
class Norm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x):
        return self.norm(x)


@forge_target(inputs=lambda: [torch.randn(8, 64), torch.randn(64, 64)])
def product(x, w):
    return x @ w


@forge_target(inputs=lambda: [torch.randn(8, 64), torch.randn(64, 64)])
def bent_product(x, w):
    return torch.relu(x @ w)


@forge_target(inputs=lambda: [torch.randn(8, 64), torch.randn(64, 64)])
def bent_twice(x, w):
    return 2 * torch.relu(x @ w)


@forge_target(inputs=lambda: [torch.randn(8, 64), torch.randn(64, 64)])
def doubled_product(x, w):
    return 2 * (x @ w)


@forge_target(workloads={"short": lambda: [torch.randn(8, 64)], "long": lambda: [torch.randn(8, 600)]})
def sums(x):
    return x.sum(-1)


@forge_target(inputs=lambda: {"x": torch.randn(8, 64), "low": 0.25})
def pair(x, low):
    return {"top": x.amax(-1), "count": (x > low).sum(-1), "parts": [x[:, :8] * 2, 3]}


@forge_target(inputs=lambda: [torch.randn(8, 64)])
def single_and_double(x):
    return x.clone(), x * 2


@forge_target(inputs=lambda: [torch.randn(8, 64)])
def twice(x):
    return x * 2


@forge_target(inputs=lambda: [torch.randn(8, 64)])
def clipped(x):
    return x.clamp(-1.5, 1.5)


@forge_target(inputs=lambda: [torch.randn(512, 1024)])
def waves(x):
    return torch.sin(x) * x + 1


@forge_target(inputs=lambda: [torch.randn(8, 64)])
def flat(x):
    return x.view(-1)


@forge_target(inputs=lambda: [torch.randn(8, 64), 2.0])
def scale_(x, factor):
    x.mul_(factor)
    return x


class Plain:
    pass


@forge_target(inputs=lambda: [torch.randn(8, 64)], init=lambda: [Plain()])
class Strange(nn.Module):
    def __init__(self, plain):
        super().__init__()

    def forward(self, x):
        return x + 1
"""

KERNELBENCH = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.shift = nn.Parameter(torch.randn(features))

    def forward(self, x):
        return torch.relu(self.linear(x)) + self.shift


batch_size, features = 16, 64


def get_inputs():
    return [torch.rand(batch_size, features)]


def get_init_inputs():
    return [features]
"""

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.cpp_extension import load_inline

"""

#: The one extension of these tests: functions that return, one that writes, one that is wrong about its input.
EXTENSION = '''
cpp_source = """
#include <cmath>
torch::Tensor rms_norm(torch::Tensor x, torch::Tensor w, double eps) {
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  auto y = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  const float* g = w.data_ptr<float>();
  float* b = y.data_ptr<float>();
  const int64_t rows = x.size(0), cols = x.size(1);
  #pragma omp parallel for
  for (int64_t r = 0; r < rows; ++r) {
    float sum = 0;
    for (int64_t c = 0; c < cols; ++c) sum += a[r * cols + c] * a[r * cols + c];
    const float k = 1.0f / std::sqrt(sum / cols + (float)eps);
    for (int64_t c = 0; c < cols; ++c) b[r * cols + c] = a[r * cols + c] * k * g[c];
  }
  return y;
}
torch::Tensor twice(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  float* b = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = 2 * a[i];
  return y;
}
void twice_into(torch::Tensor x, torch::Tensor y) {
  const float* a = x.data_ptr<float>();
  float* b = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = 2 * a[i];
}
torch::Tensor torch_twice(torch::Tensor x) { return x.mul(2).relu() - x.mul(-2).relu(); }
static void scale(torch::Tensor x, double by) {
  float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) a[i] *= by;
}
torch::Tensor product(torch::Tensor x, torch::Tensor w, double before, double after) {
  auto v = w.clone();
  scale(v, before);
  auto y = x.mm(v);
  scale(y, after);
  return y;
}
torch::Tensor called(py::object f, torch::Tensor x) { return py::cast<torch::Tensor>(f(x)); }
"""
ext = load_inline(
    name="forge_test_ext",
    cpp_sources=[cpp_source],
    functions=["rms_norm", "twice", "twice_into", "torch_twice", "product", "called"],
    extra_cflags=["-O2", "-fopenmp"],
    extra_ldflags=["-fopenmp"],
    verbose=False,
)

'''


def write_repo(root: Path) -> None:
    (root / "layers.py").write_text(LAYERS)
    (root / "bench_task.py").write_text(KERNELBENCH)
    (root / "pytest.ini").write_text("[pytest]\n")


def find(root: Path, name: str) -> Target:
    """The target whose id ends in ``name``."""
    files = [root / "layers.py", root / "bench_task.py"]
    return next(target for target in discover(files, root).targets if target.id.endswith(name))


def model(forward: str, init: str = "", extension: bool = False, before: str = "") -> Candidate:
    """A ModelNew whose ``forward(self, *args, **kwargs)`` has this body; ``x`` is the first argument."""
    body = textwrap.indent(textwrap.dedent(forward).strip("\n"), " " * 8)
    init = textwrap.dedent(init).strip("\n") or "def __init__(self, *args, **kwargs):\n    super().__init__()"
    source = (
        f"{HEAD}{EXTENSION if extension else ''}{textwrap.dedent(before)}\n\n"
        f"class ModelNew(nn.Module):\n{textwrap.indent(init, ' ' * 4)}\n\n"
        f"    def forward(self, *args, **kwargs):\n        x = args[0] if args else kwargs['x']\n{body}\n"
    )
    return Candidate.of("module", {"candidate.py": source})


NORM_INIT = """
def __init__(self, dim, eps=1e-6):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(dim))
    self.eps = eps
"""
