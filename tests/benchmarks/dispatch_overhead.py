"""Host cost of one dispatched call, beside an empty module call and eager torch. Run by hand:

    PYTHONPATH=. python tests/benchmarks/dispatch_overhead.py [--device cpu|cuda] [--blocks 300] [--calls 40]

The kernel multiplies by a weight (one input, one parameter, one launch). Blocks of all parties are interleaved in a
changing order; of each block the time per call counts. On a GPU a block is enqueued behind a running queue and
synchronised after, so that it shows host cost, not device time. Printed: median, 99 % interval of it, counts.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from forged_layers import Repo

import pytest_cudaforge
from pytest_cudaforge import hardware

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(4, 64)], init=lambda: [64])
class Scale(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.size = size

    def forward(self, x):
        return x * self.weight


@forge_target(inputs=lambda: [torch.randn(4, 64) for _ in range(4)], init=lambda: [64])
class Blend(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.size = size

    def forward(self, x, a, b, c):
        return (x + a + b + c) * self.weight


class Empty(nn.Module):
    def forward(self, x):
        return x
"""
CUDA = """
extern "C" __global__ void scale(const float* x, const float* w, float* y, int cols) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i] * w[i % cols];
}
"""
BLEND_CUDA = """
extern "C" __global__ void blend(const float* x, const float* a, const float* b, const float* c, const float* w,
                                 float* y, int cols) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = (x[i] + a[i] + b[i] + c[i]) * w[i % cols];
}
"""
BLEND_CPP = """
extern "C" void blend(const float* x, const float* a, const float* b, const float* c, const float* w, float* y, int n,
                      int cols) {
  for (int i = 0; i < n; ++i) y[i] = (x[i] + a[i] + b[i] + c[i]) * w[i % cols];
}
"""
CPP = """
extern "C" void scale(const float* x, const float* w, float* y, int n, int cols) {
  for (int i = 0; i < n; ++i) y[i] = x[i] * w[i % cols];
}
"""
CUDA_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("scale", grid=x.shape[0], block=x.shape[1], args=(x, module.weight, y, x.shape[1]))
    return y
"""
CPP_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("scale", args=(x, module.weight, y, x.numel(), x.shape[1]))
    return y
"""
BLEND_CUDA_PLAN = CUDA_PLAN.replace("module, x", "module, x, a, b, c").replace("(x, m", "(x, a, b, c, m")
BLEND_CUDA_PLAN = BLEND_CUDA_PLAN.replace('"scale"', '"blend"')
BLEND_CPP_PLAN = CPP_PLAN.replace("module, x", "module, x, a, b, c").replace("(x, m", "(x, a, b, c, m")
BLEND_CPP_PLAN = BLEND_CPP_PLAN.replace('"scale"', '"blend"')


def forged(root: Path, device: str) -> Any:
    """The module with the target applied, in its own folder."""
    repo = Repo(root, LAYERS)
    x = torch.randn(4, 64)
    if device == "cpu":
        repo.forge("Scale", CPP, CPP_PLAN, (x,))
        repo.forge("Blend", BLEND_CPP, BLEND_CPP_PLAN, (x, x, x, x))
    else:
        arch = hardware.detect("cuda:0").arch
        repo.forge("Scale", CUDA, CUDA_PLAN, (x,), language="cuda", arch=arch)
        repo.forge("Blend", BLEND_CUDA, BLEND_CUDA_PLAN, (x, x, x, x), language="cuda", arch=arch)
    return repo.module


def block_us(call: Callable[[Any], Any], x: Any, calls: int, device: str) -> float:
    """Microseconds per call over one block."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call(x)
    elapsed = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return elapsed / calls * 1e6


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """99 % interval of the median by bootstrap over blocks."""
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.005 * draws)], medians[int(0.995 * draws) - 1]


def parties(module: Any, device: str) -> dict[str, Callable[[Any], Any]]:
    applied, plain, empty = (kind.to(device).eval() for kind in (module.Scale(64), module.Scale(64), module.Empty()))
    blend = module.Blend(64).to(device).eval()
    reports = [pytest_cudaforge.apply(applied), pytest_cudaforge.apply(blend)]
    weight, (x, a, b, c) = plain.weight, (torch.randn(4, 64, device=device) for _ in range(4))
    with torch.no_grad():
        assert torch.equal(applied(x), plain(x))
        assert torch.allclose(blend(x, x, x, x), plain(4 * x))
    assert not any(report.fallbacks for report in reports), reports
    return {
        "empty nn.Module call": empty,
        "eager x * weight": lambda x: x * weight,
        "eager module": plain,
        "dispatched module": applied,
        "dispatched, 3 inputs more": lambda x: blend(x, a, b, c),
        "torch.empty_like": torch.empty_like,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--calls", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["CUDAFORGE_CACHE_DIR"] = folder
        calls = parties(forged(Path(folder), options.device), options.device)
        x = torch.randn(4, 64, device=options.device)
        times: dict[str, list[float]] = {name: [] for name in calls}
        gc.disable()
        for number in range(options.blocks + 5):
            for name in random.sample(list(calls), len(calls)):
                microseconds = block_us(calls[name], x, options.calls, options.device)
                if number >= 5:
                    times[name].append(microseconds)
    device = hardware.describe(hardware.detect(options.device))
    print(f"Python {platform.python_version()} · torch {torch.__version__} · {device}")
    print(f"{options.blocks} interleaved blocks of {options.calls} calls each; µs per call, median [99 % interval]")
    applied, blend, empty = (
        times[name] for name in ("dispatched module", "dispatched, 3 inputs more", "empty nn.Module call")
    )
    times["a further tensor"] = [(b - a) / 3 for a, b in zip(applied, blend, strict=True)]
    times["beyond nn.Module call"] = [a - b for a, b in zip(applied, empty, strict=True)]
    for name, values in times.items():
        low, high = interval(values)
        print(f"{name:26} {statistics.median(values):7.2f}  [{low:.2f}, {high:.2f}]")


if __name__ == "__main__":
    main()
