"""Kernels for a CPU that are right and each slow in one way that a profile has to name; and one that is in order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate, Target

LAYERS = """
import torch
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(1024, 1024)])
def scaled(x):
    return torch.exp(x * 0.5) * 2.0
"""

PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("scaled", args=(x, y, rows, cols))
    return y
"""

TWO_STEPS = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    rows, cols = x.shape
    h = empty(x.shape, x.dtype)
    y = empty(x.shape, x.dtype)
    launch("halved", args=(x, h, rows, cols))
    launch("raised", args=(h, y, rows, cols))
    return y
"""

#: exp without a library call, so that g++ can vectorize a loop over it.
POLYNOMIAL = """
#include <cmath>
static inline float exponential(float x) {
  float t = x * 1.44269504f;
  float whole = __builtin_rintf(t), f = t - whole;
  float p = 1.54033e-4f;
  p = p * f + 1.33335581e-3f; p = p * f + 9.61812911e-3f; p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f; p = p * f + 6.93147181e-1f; p = p * f + 1.0f;
  union { int i; float f; } scale = {((int)whole + 127) << 23};
  return p * scale.f;
}
"""

IN_ORDER = (
    POLYNOMIAL
    + """
void scaled(const float* x, float* y, long long rows, long long cols) {
  #pragma omp parallel for simd
  for (long long i = 0; i < rows * cols; ++i)
    y[i] = exponential(x[i] * 0.5f) * 2.0f;
}
"""
)

ONE_THREAD = IN_ORDER.replace("omp parallel for simd", "omp simd")

SCALAR_CALLS = """
#include <cmath>
void scaled(const float* x, float* y, long long rows, long long cols) {
  #pragma omp parallel for
  for (long long i = 0; i < rows * cols; ++i)
    y[i] = std::exp(x[i] * 0.5f) * 2.0f;
}
"""

STRIDED = (
    POLYNOMIAL
    + """
void scaled(const float* x, float* y, long long rows, long long cols) {
  #pragma omp parallel for
  for (long long c = 0; c < cols; ++c)
    for (long long r = 0; r < rows; ++r)
      y[r * cols + c] = exponential(x[r * cols + c] * 0.5f) * 2.0f;
}
"""
)

ROUND_TRIP = (
    POLYNOMIAL
    + """
void halved(const float* x, float* h, long long rows, long long cols) {
  #pragma omp parallel for simd
  for (long long i = 0; i < rows * cols; ++i)
    h[i] = x[i] * 0.5f;
}
void raised(const float* h, float* y, long long rows, long long cols) {
  #pragma omp parallel for simd
  for (long long i = 0; i < rows * cols; ++i)
    y[i] = exponential(h[i]) * 2.0f;
}
"""
)

UNEVEN = (
    POLYNOMIAL
    + """
void scaled(const float* x, float* y, long long rows, long long cols) {
  #pragma omp parallel for schedule(static)
  for (long long r = 0; r < rows; ++r) {
    int times = r >= rows - 64 ? 96 : 1;
    for (int t = 0; t < times; ++t) {
      #pragma omp simd
      for (long long c = 0; c < cols; ++c)
        y[r * cols + c] = exponential(x[r * cols + c] * 0.5f) * 2.0f;
      __asm__ volatile("" : : "r"(y) : "memory");
    }
  }
}
"""
)


@dataclass(frozen=True)
class Fault:
    """``bound``: what the profile has to say of the kernel that takes the time; ``line``: the line to be named, by a
    part of its text."""

    name: str
    candidate: Candidate
    bound: str
    line: str


def candidate(source: str, plan: str = PLAN) -> Candidate:
    """One kernel called ``scaled``, or whatever ``plan`` launches."""
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan})


FAULTS = (
    Fault("one thread", candidate(ONE_THREAD), "one thread", "y[i] ="),
    Fault("library calls", candidate(SCALAR_CALLS), "library calls", "std::exp"),
    Fault("strided", candidate(STRIDED), "strided access", "y[r * cols + c]"),
    Fault("uneven", candidate(UNEVEN), "waiting threads", "y[r * cols + c]"),
    Fault("round trip", candidate(ROUND_TRIP, TWO_STEPS), "redundant traffic", ""),
)
HONEST = candidate(IN_ORDER)


def write_repo(root: Path) -> Target:
    """The target's file in ``root``."""
    (root / "layers.py").write_text(LAYERS)
    (target,) = discover([root], root).targets
    return target
