"""Kernels that take as long as one likes: what the guard is tried on where nobody's kernel may be (``cudaforge
calibrate``, benchmarks). One target, softsign, and a kernel that computes every element ``repeats`` times over.

Reads and writes are volatile, so no compiler leaves a repetition out, and time grows with the repetitions: ``extra``
of them is a slowdown of that share, less what a launch takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate, Target

__all__ = ["YARDSTICKS", "Yardstick", "target_in"]

_TARGET = '''"""What the guard is calibrated on."""

import torch
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn({elements})])
def softsign(x):
    return torch.nn.functional.softsign(x)
'''
_PLAN = """from pytest_cudaforge.plan import empty, launch


def plan(x):
    y = empty(x.shape, x.dtype)
    n = x.numel()
    launch("yardstick", {geometry}args=(x, y, n, {repeats}))
    return y
"""
_CPP = """#include <cmath>

void yardstick(const float* x, float* y, long long n, long long repeats) {
    const volatile float* in = x;
    volatile float* out = y;
    #pragma omp parallel for
    for (long long i = 0; i < n; ++i)
        for (long long k = 0; k < repeats; ++k) {
            const float v = in[i];
            out[i] = v / (1.0f + std::fabs(v));
        }
}
"""
_CUDA = """__global__ void yardstick(const float* x, float* y, long long n, long long repeats) {
    const volatile float* in = x;
    volatile float* out = y;
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    for (long long k = 0; k < repeats; ++k) {
        const float v = in[i];
        out[i] = v / (1.0f + fabsf(v));
    }
}
"""
#: Floats of the target's input: few enough that drawing and judging them costs nothing.
_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 20}


@dataclass(frozen=True)
class Yardstick:
    """One length of call. ``sensitive``: long enough for a planted slowdown to pass the guard's absolute threshold."""

    name: str
    kind: str
    repeats: int
    sensitive: bool = True

    def candidate(self, extra: float = 0.0) -> Candidate:
        """The kernel with ``extra`` more work (0.05: 5 %, rounded up to whole repetitions)."""
        repeats = self.repeats + math.ceil(self.repeats * extra - 1e-9)
        if self.kind == "cpu":
            files = {"kernel.cpp": _CPP, "plan.py": _PLAN.format(geometry="", repeats=repeats)}
            return Candidate.of("cpp", files)
        geometry = "grid=((n + 255) // 256,), block=(256,), "
        return Candidate.of("cuda", {"kernel.cu": _CUDA, "plan.py": _PLAN.format(geometry=geometry, repeats=repeats)})


def _yardsticks(kind: str, repeats: tuple[int, ...], fewest_sensitive: int) -> tuple[Yardstick, ...]:
    return tuple(Yardstick(f"x{count}", kind, count, count >= fewest_sensitive) for count in repeats)


#: Short, middle and long calls: about 7, 30, 100, 1000 and 5000 us on an H200, of which 5 % of the shortest are less
#: than the 1 us that nobody asks about; about 40, 200 and 1700 us on two cores of an EPYC.
YARDSTICKS: dict[str, tuple[Yardstick, ...]] = {
    "cpu": _yardsticks("cpu", (5, 25, 250), 5),
    "cuda": _yardsticks("cuda", (1, 18, 70, 730, 3650), 18),
}


def target_in(folder: Path, kind: str) -> Target:
    """The yardsticks' target for "cpu" or "cuda", written into ``folder``, which has to outlive its use."""
    path = folder / f"yardstick_{kind}.py"
    path.write_text(_TARGET.format(elements=_ELEMENTS[kind]), encoding="utf-8")
    return discover([path], folder).targets[0]
