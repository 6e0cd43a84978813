"""Builds a small repo with targets, kernels and a manifest, as `pytest --forge` would leave it, and imports it."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import textwrap
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.manifest import Entry, EntryFile, EntryWorkload, Manifest
from pytest_cudaforge.runtime.signature import flatten_call, spec_of

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(4, 64)], init=lambda: [64])
class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


@forge_target(inputs=lambda: [torch.randn(4, 64)])
def scaled(x, factor=2.0):
    return x * factor


class Child(RMSNorm):
    pass


class Net(nn.Module):
    def __init__(self, size=64, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(RMSNorm(size) for _ in range(depth))
        self.head = nn.Linear(size, size)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""

NO_GUARD = Guard()

#: The kernel doubles what the reference gives, so that a test can tell which of the two ran.
RMS_KERNEL = """
#include <cmath>
extern "C" void rms(const float* x, const float* w, float* y, long long rows, long long cols, float eps) {
  #pragma omp parallel for
  for (long long r = 0; r < rows; ++r) {
    double sum = 0;
    for (long long c = 0; c < cols; ++c) sum += double(x[r * cols + c]) * x[r * cols + c];
    float scale = 1.0f / std::sqrt(float(sum / cols) + eps);
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = 2 * x[r * cols + c] * scale * w[c];
  }
}
"""
RMS_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("rms", args=(x, module.weight, y, rows, cols, module.eps))
    return y
"""
SCALED_KERNEL = """
extern "C" void scaled(const float* x, float* y, long long n, float f) {
  for (long long i = 0; i < n; ++i) y[i] = 2 * f * x[i];
}
"""
SCALED_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x, factor=2.0):
    y = empty(x.shape, x.dtype)
    launch("scaled", args=(x, y, x.numel(), factor))
    return y
"""


class Repo:
    """A folder with ``layers.py`` (imported as ``module``) and ``forged/``."""

    def __init__(self, root: Path, source: str = LAYERS) -> None:
        self.root = root
        self.file = root / f"layers_{uuid.uuid4().hex[:8]}.py"
        self.file.write_text(textwrap.dedent(source))
        self.manifest = root / "forged" / "manifest.json"
        self.module = self._import()

    def _import(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(self.file.stem, self.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.file.stem] = module
        spec.loader.exec_module(module)
        return module

    def forge(
        self,
        qualname: str,
        kernel: str,
        plan: str,
        *calls: tuple[Any, ...],
        language: str = "cpp",
        arch: str = "cpu",
        guard: Guard = NO_GUARD,
        kwargs: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Entry:
        """Write one kernel with its manifest entry; ``calls`` are the drawn inputs, one workload each."""
        (target,) = [t for t in discover([self.file], self.root).targets if t.qualname == qualname]
        directory = "-".join(filter(None, (f"{target.slug}/{arch}", changes.get("variant", ""))))
        files = {"kernel.cpp" if language == "cpp" else "kernel.cu": kernel, "plan.py": plan}
        for name, text in files.items():
            path = self.manifest.parent / directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        entry = Entry(
            target=target.id,
            import_name=target.module_name,
            qualname=qualname,
            kind=target.kind,
            path=target.path,
            source_digest=target.digest,
            language=language,
            arch=arch,
            directory=directory,
            files=tuple(EntryFile(n, hashlib.sha256(t.encode()).hexdigest()) for n, t in sorted(files.items())),
            guard=guard,
            workloads=tuple(
                EntryWorkload(f"w{i}", _leaves(args, kwargs or {}), 2.0, 1.5) for i, args in enumerate(calls)
            ),
            torch=torch.__version__,
            device="test",
            precision="fp32",
            mode="eval",
        )
        entry = replace(entry, **changes)
        known = Manifest.load(self.manifest).entries if self.manifest.exists() else ()
        Manifest(tuple(e for e in known if e.key != entry.key)).merged([entry]).write(self.manifest)
        return entry


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    leaves, _ = flatten_call(args, kwargs)
    return tuple((path, spec_of(leaf) if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves.items())


def with_rms(root: Path, **changes: Any) -> Repo:
    """A repo whose RMSNorm has a kernel that doubles."""
    repo = Repo(root)
    repo.forge("RMSNorm", RMS_KERNEL, RMS_PLAN, (torch.randn(4, 64),), **changes)
    return repo
