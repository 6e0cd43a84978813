"""Targets that ask for gradients, and cpp candidates for them whose backward can be changed for the worse."""

from __future__ import annotations

from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate, Target

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(33, 64)], init=lambda: [64], grad=True, mode="train")
class Gate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return torch.sigmoid(x) * self.weight + self.bias


@forge_target(inputs=lambda: [torch.randn(16, 300)], workloads={"wide": lambda: [torch.randn(4, 512)]}, grad=True)
def softmax(x):
    return torch.softmax(x, -1)


@forge_target(inputs=lambda: [torch.randn(48, 64)], grad=True)
def unit(x):
    return nn.functional.normalize(x, dim=-1, eps=1e-6)


@forge_target(inputs=lambda: [torch.randn(48, 8), torch.randn(48, 8)], grad=True)
def apart(x, y):
    return (x - y).norm(dim=-1)


@forge_target(inputs=lambda: [torch.randn(12, 16)], grad=True)
def peak(x):
    return x.amax(-1)


@forge_target(inputs=lambda: {"x": torch.randn(8, 64), "scale": 2.0, "shift": torch.randn(64)}, grad=True)
def parts(x, scale, shift):
    return {"moved": x * scale + shift, "count": (x > 0).sum(-1), "square": x * x}


@forge_target(inputs=lambda: [torch.randn(2, 4, 48, 32) for _ in range(3)], grad=True)
def attention(q, k, v):
    return nn.functional.scaled_dot_product_attention(q, k, v)


@forge_target(inputs=lambda: [torch.randint(0, 20000, (2, 8))], init=lambda: [20000, 16, 1234], grad=True)
class Words(nn.Module):
    def __init__(self, count, dim, padding):
        super().__init__()
        self.weight, self.padding = nn.Parameter(torch.randn(count, dim)), padding

    def forward(self, ids):
        return nn.functional.embedding(ids, self.weight, padding_idx=self.padding)


@forge_target(inputs=lambda: [torch.randn(8, 64)], grad=True)
def scale_(x):
    return x.mul_(2)


@forge_target(inputs=lambda: [torch.randn(8, 64)], grad=True)
def signs(x):
    return torch.sign(x.detach())


@forge_target(inputs=lambda: [torch.randn(8, 64, requires_grad=True), torch.randn(8, 64)], grad=True)
def product(x, mask):
    return x * mask
"""

GATE_SOURCE = """
#include <cmath>

void gate(const float* x, const float* w, const float* b, float* y, long long rows, long long cols) {
  for (long long i = 0; i < rows * cols; ++i) y[i] = w[i % cols] / (1 + std::exp(-x[i])) + b[i % cols];
}

void gate_backward(const float* x, const float* w, const float* out, const float* g, float* dx, float* dw, float* db,
                   long long rows, long long cols) {
  for (long long c = 0; c < cols; ++c) {
    double sum_w = 0, sum_b = 0;
    for (long long r = 0; r < rows; ++r) {
      long long i = r * cols + c;
      float s = 1 / (1 + std::exp(-x[i]));
      dx[i] = g[i] * w[c] * s * (1 - s);
      sum_w += (double)g[i] * s; sum_b += g[i];
    }
    dw[c] = (float)sum_w; db[c] = (float)sum_b;
  }
}
"""

GATE_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("gate", args=(x, module.weight, module.bias, y, *x.shape))
    return y

def plan_backward(module, x, out, grad_out):
    dx = empty(x.shape, x.dtype)
    dw = empty(module.weight.shape, x.dtype)
    db = empty(module.bias.shape, x.dtype)
    launch("gate_backward", args=(x, module.weight, out, grad_out, dx, dw, db, *x.shape))
    return {"x": dx, "weight": dw, "bias": db}
"""

SOFTMAX_SOURCE = """
#include <algorithm>
#include <cmath>

void softmax(const float* x, float* y, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols; float* q = y + r * cols;
    float top = *std::max_element(p, p + cols); double sum = 0;
    for (long long c = 0; c < cols; ++c) { q[c] = std::exp(p[c] - top); sum += q[c]; }
    for (long long c = 0; c < cols; ++c) q[c] = (float)(q[c] / sum);
  }
}

void softmax_backward(const float* y, const float* g, float* dx, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = y + r * cols; const float* q = g + r * cols; double sum = 0;
    for (long long c = 0; c < cols; ++c) sum += (double)p[c] * q[c];
    for (long long c = 0; c < cols; ++c) dx[r * cols + c] = (float)(p[c] * (q[c] - sum));
  }
}
"""

SOFTMAX_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("softmax", args=(x, y, *x.shape))
    return y

def plan_backward(x, out, grad_out):
    dx = empty(x.shape, x.dtype)
    launch("softmax_backward", args=(out, grad_out, dx, *x.shape))
    return {"x": dx}
"""

UNIT_SOURCE = """
#include <cmath>

static double length(const float* x, long long cols) {
  double sum = 0;
  for (long long c = 0; c < cols; ++c) sum += (double)x[c] * x[c];
  return std::sqrt(sum);
}

void unit(const float* x, float* y, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols; double n = std::fmax(length(p, cols), 1e-6);
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = (float)(p[c] / n);
  }
}

void unit_backward(const float* x, const float* g, float* dx, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols; const float* q = g + r * cols; double n = length(p, cols), along = 0;
    for (long long c = 0; c < cols; ++c) along += (double)p[c] * q[c] / (n * n);
    if (n < 1e-6) n = 1e-6, along = 0;
    for (long long c = 0; c < cols; ++c) dx[r * cols + c] = (float)((q[c] - along * p[c]) / n);
  }
}
"""

UNIT_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("unit", args=(x, y, *x.shape))
    return y

def plan_backward(x, grad_out):
    dx = empty(x.shape, x.dtype)
    launch("unit_backward", args=(x, grad_out, dx, *x.shape))
    return {"x": dx}
"""

APART_SOURCE = """
#include <cmath>

void apart(const float* x, const float* y, float* d, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    double sum = 0;
    for (long long i = r * cols; i < (r + 1) * cols; ++i) sum += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
    d[r] = (float)std::sqrt(sum);
  }
}

void apart_backward(const float* x, const float* y, const float* d, const float* g, float* dx, float* dy,
                    long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    const float one = d[r] > 0 ? g[r] / d[r] : 0;
    for (long long i = r * cols; i < (r + 1) * cols; ++i) { dx[i] = (x[i] - y[i]) * one; dy[i] = -dx[i]; }
  }
}
"""

APART_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x, y):
    d = empty(x.shape[:1], x.dtype)
    launch("apart", args=(x, y, d, *x.shape))
    return d

def plan_backward(x, y, out, grad_out):
    dx, dy = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    launch("apart_backward", args=(x, y, out, grad_out, dx, dy, *x.shape))
    return {"x": dx, "y": dy}
"""

PEAK_SOURCE = """
#include <cmath>

void peak(const float* x, float* y, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    y[r] = x[r * cols];
    for (long long c = 1; c < cols; ++c) y[r] = std::fmax(y[r], x[r * cols + c]);
  }
}

void peak_backward(const float* x, const float* y, const float* g, float* dx, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    long long equal = 0;
    for (long long c = 0; c < cols; ++c) equal += x[r * cols + c] == y[r];
    for (long long c = 0; c < cols; ++c) dx[r * cols + c] = x[r * cols + c] == y[r] ? g[r] / equal : 0;
  }
}
"""

PEAK_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape[:1], x.dtype)
    launch("peak", args=(x, y, *x.shape))
    return y

def plan_backward(x, out, grad_out):
    dx = empty(x.shape, x.dtype)
    launch("peak_backward", args=(x, out, grad_out, dx, *x.shape))
    return {"x": dx}
"""

PARTS_SOURCE = """
void parts(const float* x, float scale, const float* shift, float* moved, long long* count, float* square,
           long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    count[r] = 0;
    for (long long c = 0; c < cols; ++c) {
      long long i = r * cols + c;
      moved[i] = x[i] * scale + shift[c]; square[i] = x[i] * x[i]; count[r] += x[i] > 0;
    }
  }
}

void parts_backward(const float* x, float scale, const float* moved, const float* square, float* dx, float* dshift,
                    long long rows, long long cols) {
  for (long long c = 0; c < cols; ++c) {
    double sum = 0;
    for (long long r = 0; r < rows; ++r) {
      long long i = r * cols + c;
      dx[i] = moved[i] * scale + 2 * x[i] * square[i]; sum += moved[i];
    }
    dshift[c] = (float)sum;
  }
}
"""

PARTS_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x, scale, shift):
    moved, square = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    count = empty(x.shape[:1], "int64")
    launch("parts", args=(x, scale, shift, moved, count, square, *x.shape))
    return {"moved": moved, "count": count, "square": square}

def plan_backward(x, scale, shift, grad_out):
    assert grad_out["count"] is None
    dx, dshift = empty(x.shape, x.dtype), empty(shift.shape, x.dtype)
    launch("parts_backward", args=(x, scale, grad_out["moved"], grad_out["square"], dx, dshift, *x.shape))
    return {"shift": dshift, "x": dx, "scale": None}
"""

WORDS_SOURCE = """
void words(const long long* ids, const float* w, float* y, long long count, long long dim) {
  for (long long i = 0; i < count * dim; ++i) y[i] = w[ids[i / dim] * dim + i % dim];
}

void words_backward(const long long* ids, const float* g, float* dw, long long count, long long dim,
                    long long padding) {
  for (long long i = 0; i < count; ++i)
    for (long long c = 0; c < dim; ++c) dw[ids[i] * dim + c] += ids[i] == padding ? 0 : g[i * dim + c];
}
"""

WORDS_PLAN = """
from pytest_cudaforge.plan import empty, launch, zeros

def plan(module, ids):
    y = empty((*ids.shape, module.weight.shape[1]), module.weight.dtype)
    launch("words", args=(ids, module.weight, y, ids.numel(), module.weight.shape[1]))
    return y

def plan_backward(module, ids, out, grad_out):
    dw = zeros(module.weight.shape, module.weight.dtype)
    launch("words_backward", args=(ids, grad_out, dw, ids.numel(), module.weight.shape[1], module.padding))
    return {"weight": dw}
"""

_FILES = {
    "Gate": (GATE_SOURCE, GATE_PLAN),
    "softmax": (SOFTMAX_SOURCE, SOFTMAX_PLAN),
    "Words": (WORDS_SOURCE, WORDS_PLAN),
    "unit": (UNIT_SOURCE, UNIT_PLAN),
    "parts": (PARTS_SOURCE, PARTS_PLAN),
    "peak": (PEAK_SOURCE, PEAK_PLAN),
    "apart": (APART_SOURCE, APART_PLAN),
}


def write_repo(root: Path) -> None:
    """The targets' file in a project of its own."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "layers.py").write_text(LAYERS)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")


def find(root: Path, name: str) -> Target:
    """The target ``name`` of :func:`write_repo`."""
    return next(target for target in discover([root], root).targets if target.id.endswith(f"::{name}"))


def candidate(
    name: str = "Gate", source: tuple[str, str] = ("", ""), plan: tuple[str, str] = ("", ""), forward_only: bool = False
) -> Candidate:
    """The honest candidate for ``name`` with one piece of text replaced in its source and one in its plan."""
    code, text = _FILES[name]
    assert source[0] in code and plan[0] in text, "what is replaced must be there"
    code = code.replace(*source) if source[0] else code
    text = text.replace(*plan) if plan[0] else text
    if forward_only:
        text = text[: text.index("def plan_backward")]
    return Candidate.of("cpp", {"kernel.cpp": code, "plan.py": text})
