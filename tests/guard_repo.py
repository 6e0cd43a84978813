"""A git repo with forged cpp kernels on its main branch, and a branch beside it, as the guard's tests use them.

Nothing is forged and no torch is imported here: the kernels are written as they stand, their manifest as publishing
would write it. Speedups that nobody measured are promised by whoever asks for them.
"""

from __future__ import annotations

import hashlib
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.manifest import Entry, EntryFile, EntryWorkload, Manifest

ROWS, COLS = 64, 256

LAYER = """
@forge_target(inputs=lambda: [torch.randn({rows}, {cols})]{options})
class {name}(nn.Module):
    def forward(self, x):
        return ((x * {factor}).abs() + 1.0).sqrt() - 0.5
"""
HEADER = "import torch\nfrom torch import nn\nfrom pytest_cudaforge import forge_target\n"
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("scale", args=(x, y, x.numel()))
    return y
"""
KERNEL = """
#include <cmath>
extern "C" void scale(const float* __restrict__ x, float* __restrict__ y, long long n) {{
  for (int turn = 0; turn < {turns}; ++turn) {{
    asm volatile("" ::: "memory");  // each turn is done
    for (long long i = 0; i < n; ++i) y[i] = std::sqrt(std::fabs(x[i] * {factor}f) + 1.0f) - 0.5f{wrong};
  }}
}}
"""
CUDA_PLAN = PLAN.replace('launch("scale", args', 'launch("scale", grid=((x.numel() + 255) // 256,), block=(256,), args')
CUDA_KERNEL = """
extern "C" __global__ void scale(const float* x, float* y, long long n) {{
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= n) return;
  for (int turn = 0; turn < {turns}; ++turn) {{
    float v = reinterpret_cast<const volatile float*>(x)[i];
    reinterpret_cast<volatile float*>(y)[i] = sqrtf(fabsf(v * {factor}f) + 1.0f) - 0.5f{wrong};
  }}
}}
"""


def layer(name: str, factor: float = 2.0, options: str = "", shape: tuple[int, int] = (ROWS, COLS)) -> str:
    """A target's source."""
    rows, cols = shape
    return LAYER.format(name=name, factor=factor, rows=rows, cols=cols, options=options and ", " + options)


def kernel(factor: float = 2.0, turns: int = 1, wrong: str = "", language: str = "cpp") -> dict[str, str]:
    """A kernel's files. ``turns``: how many times it does the work, so that it takes that much longer."""
    name, text, plan = ("kernel.cpp", KERNEL, PLAN) if language == "cpp" else ("kernel.cu", CUDA_KERNEL, CUDA_PLAN)
    return {name: text.format(factor=factor, turns=turns, wrong=wrong).lstrip(), "plan.py": plan.lstrip()}


@dataclass
class Repo:
    """The repo at ``root``; ``entries`` by target name."""

    root: Path
    shape: tuple[int, int] = (ROWS, COLS)
    arch: str = "cpu"
    device: str = "cpu"
    entries: dict[str, Entry] = field(default_factory=dict)

    def git(self, *args: str) -> str:
        done = subprocess.run(["git", *args], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(textwrap.dedent(text).lstrip())

    def layers(self, layers: Iterable[str]) -> None:
        """``layers.py``, from the sources of its targets."""
        self.write({"layers.py": HEADER + "\n" + "\n".join(layers)})

    def publish(
        self, name: str, files: Mapping[str, str], promised: float | None = None, guard: Guard | None = None
    ) -> Entry:
        """The kernel of a target of layers.py, and its entry in the manifest."""
        found = discover([self.root / "layers.py"], self.root).targets
        target = next(one for one in found if one.qualname == name)
        spec = TensorSpec(self.shape, "float32", (self.shape[1], 1))
        entry = Entry(
            target=target.id,
            import_name=target.module_name,
            qualname=target.qualname,
            kind=target.kind,
            path=target.path,
            source_digest=target.digest,
            language="cpp" if self.arch == "cpu" else "cuda",
            arch=self.arch,
            directory=f"{target.slug}/{self.arch}",
            files=tuple(
                EntryFile(file, hashlib.sha256(text.encode()).hexdigest()) for file, text in sorted(files.items())
            ),
            guard=guard or Guard(contiguous_only=True),
            workloads=(EntryWorkload("default", (("0", spec),), promised, None),),
            torch=_torch(),
            device=self.device,
            precision="fp32",
            mode="eval",
        )
        self.write({f"forged/{entry.directory}/{file}": text for file, text in files.items()})
        self.entries[name] = entry
        Manifest(tuple(sorted(self.entries.values(), key=lambda one: one.target))).write(
            self.root / "forged/manifest.json"
        )
        return entry

    def withdraw(self, name: str) -> None:
        """Remove a kernel and its entry."""
        entry = self.entries.pop(name)
        for file in entry.files:
            (self.root / "forged" / entry.directory / file.name).unlink()
        Manifest(tuple(self.entries.values())).write(self.root / "forged/manifest.json")

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD")

    def item(self, name: str, what: str = "guard") -> str:
        return f"forged/{self.entries[name].directory}/plan.py::{what}[default]"


def repo(root: Path, **rest: Any) -> Repo:
    """An empty one, on its branch main, with a pytest.ini and settings for a CPU."""
    made = Repo(root, **rest)
    root.mkdir(parents=True, exist_ok=True)
    made.git("init", "-q", "-b", "main")
    made.git("config", "user.name", "A. Tester")
    made.git("config", "user.email", "tester@example.com")
    made.write({"pytest.ini": "[pytest]\n", "cudaforge.yaml": "trials: 5\n", ".gitignore": ".cudaforge\n__pycache__\n"})
    return made


def _torch() -> str:
    from importlib.metadata import version

    return version("torch")
