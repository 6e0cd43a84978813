"""Targets and cpp candidates for the tests of the evaluator: one repo on disk, honest kernels, wrong ones."""

from __future__ import annotations

from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate, Target

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(33, 512)], init=lambda: [512])
class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        h = x.to(torch.float32)
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


@forge_target(inputs=lambda: [torch.randn(16, 300)])
def softmax(x):
    return torch.softmax(x, -1)


@forge_target(inputs=lambda: {"x": torch.randn(8, 64)}, workloads={"wide": lambda: {"x": torch.randn(8, 256)}})
def pair(x):
    return {"top": x.amax(-1), "count": (x > 0).sum(-1)}


@forge_target(inputs=lambda: [torch.randn(8, 64), 2.0])
def scale_(x, factor):
    x.mul_(factor)
    return x


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def only_fp32(x):
    if x.dtype != torch.float32:
        raise TypeError("this function takes float32")
    return x * 2 + 1


@forge_target(inputs=lambda: [torch.randn(4, 100)], index_outputs=["out.1"])
def top2(x):
    values, indices = x.topk(2, dim=-1)
    return values, indices
"""

BROKEN = """
import os
import torch
from torch import nn
from pytest_cudaforge import forge_target


def bad_inputs():
    raise ValueError("no data here")


@forge_target(inputs=bad_inputs)
def inputs_raise(x):
    return x


@forge_target(inputs=lambda: [torch.ones(3)])
def forward_raises(x):
    return x @ torch.ones(4)


@forge_target(inputs=lambda: [torch.ones(3)])
def returns_text(x):
    return "three"


@forge_target(inputs=lambda: [torch.ones(3)])
def exits(x):
    os._exit(7)


@forge_target(inputs=lambda: [torch.ones(3)])
def constant(x):
    return torch.zeros(3)


@forge_target
def no_inputs(x):
    return x


@forge_target(inputs=lambda: [torch.ones(3)], init=lambda: [1, 2, 3])
class WrongInit(nn.Module):
    def __init__(self):
        super().__init__()
"""

KERNELBENCH = '''
import torch
import torch.nn as nn

class Model(nn.Module):
    """Simple model that performs a ReLU."""
    def __init__(self, slope: float):
        super().__init__()
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.leaky_relu(x, self.slope)

def get_inputs():
    return [torch.rand(16, 128)]

def get_init_inputs():
    return [0.1]
'''

PACKAGE_LAYERS = """
import torch
from pytest_cudaforge import forge_target
from .parts.scales import FACTOR


@forge_target(inputs=lambda: [torch.randn(4, 8)])
def scaled(x):
    return x * FACTOR
"""


def write_repo(root: Path) -> None:
    """The targets' files: plain ones, a KernelBench file, a package with relative imports."""
    package = root / "mypkg" / "parts"
    package.mkdir(parents=True)
    (root / "layers.py").write_text(LAYERS)
    (root / "broken.py").write_text(BROKEN)
    (root / "36_relu.py").write_text(KERNELBENCH)
    (root / "mypkg" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "scales.py").write_text("FACTOR = 3.0\n")
    (root / "mypkg" / "layers.py").write_text(PACKAGE_LAYERS)


def find(root: Path, name: str) -> Target:
    """The target whose id ends in ``name``."""
    found = discover([root, *root.glob("*_relu.py")], root).targets
    return next(target for target in found if target.id.endswith(name))


NORM_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("norm", args=(x, module.weight, y, rows, cols, module.eps))
    return y
"""

NORM = """
#include <cmath>
#include <cstring>
void norm(const float* x, const float* w, float* y, long long rows, long long cols, float eps) {
  #pragma omp parallel for
  for (long long r = 0; r < ROWS; ++r) {
    const float* p = x + r * cols; float* q = y + r * cols; float s = 0;
    for (long long c = 0; c < COLS; ++c) s += p[c] * p[c];
    float k = 1.0f / std::sqrt(s / cols + eps);
    for (long long c = 0; c < WIDTH; ++c) q[c] = p[c] * k * w[c];
  }
  AFTER
}
"""


def norm(
    rows: str = "rows", cols: str = "cols", width: str = "cols", after: str = "", plan: str = NORM_PLAN
) -> Candidate:
    """An RMSNorm kernel with one thing changed."""
    source = NORM.replace("ROWS", rows).replace("COLS", cols).replace("WIDTH", width).replace("AFTER", after)
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan})


#: Targets whose outputs hold nothing but rounding or a constant: a trivial kernel passes them.
TRIVIAL = """
@forge_target(inputs=lambda: [torch.randn(8, 64)])
def uniform_mean(x):
    return torch.softmax(x, -1).mean(-1)

@forge_target(inputs=lambda: [torch.randn(64, 64)])
def nothing_but_rounding(x):
    return F.layer_norm(x, (64,)).sum(-1)

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def below_rounding(x):
    return x + 1e-12
"""
