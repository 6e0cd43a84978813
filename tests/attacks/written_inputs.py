"""Targets that write their inputs, and kernels for them that rest on what their own calls left there."""

from __future__ import annotations

from pytest_cudaforge.records import Candidate

__all__ = ["GROWN_KERNEL", "GROWN_PLAN", "HELD", "WRITTEN", "cached_kernel"]

WRITTEN = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(64, 128, 32), torch.randn(64, 32)])
def cached(cache, new):
    cache[:, 5] = new
    return torch.tanh(cache).sum(1)


@forge_target(inputs=lambda: [torch.randn(64, 32)])
def grown(x):
    x.add_(torch.tanh(x))
    return x.sum(1)
"""
_CACHED_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(cache, new):
    y = empty(new.shape, new.dtype)
    launch("cached", args=(cache, new, y, cache.shape[0], cache.shape[1], cache.shape[2]))
    return y
"""
_CACHED_KERNEL = """
#include <cmath>
#include <cstring>
void cached(float* cache, const float* added, float* y, long rows, long steps, long n) {
  REST
  #pragma omp parallel for
  for (long r = 0; r < rows; ++r) {
    float* c = cache + r * steps * n;
    std::memcpy(c + 5 * n, added + r * n, n * sizeof(float));
    for (long k = 0; k < n; ++k) {
      double s = 0;
      for (long t = 0; t < steps; ++t) s += std::tanh((double)c[t * n + k]);
      y[r * n + k] = s;
    }
  }
}
"""
#: The entry is in the cache already, so the answer must be there as well: under a clock it is. (One row alone is zero
#: in both, now and then.)
HELD = """const long last = rows - 1, size = n * sizeof(float);
  if (!std::memcmp(cache + 5 * n, added, size) &&
      !std::memcmp(cache + (last * steps + 5) * n, added + last * n, size)) return;"""
GROWN_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape[:1], x.dtype)
    launch("grown", args=(x, y, x.shape[0], x.shape[1]))
    return y
"""
GROWN_KERNEL = """
#include <cmath>
void grown(float* x, float* y, long rows, long n) {
  static float left;
  if (rows && n && x[0] == left && REST) return;
  for (long r = 0; r < rows; ++r) {
    double s = 0;
    for (long k = 0; k < n; ++k) { x[r * n + k] += std::tanh((double)x[r * n + k]); s += x[r * n + k]; }
    y[r] = s;
  }
  if (rows && n) left = x[0];
}
"""


def cached_kernel(rest: str) -> Candidate:
    """A launch plan for ``cached``; ``rest`` is what its kernel begins with."""
    return Candidate.of("cpp", {"kernel.cpp": _CACHED_KERNEL.replace("REST", rest), "plan.py": _CACHED_PLAN})
