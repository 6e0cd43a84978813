"""A repo whose committed kernels are in every state that an ordinary run may find them in."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Guard, Target
from pytest_cudaforge.runtime.manifest import Entry, EntryFile, EntryWorkload, Manifest

HEAD = """\
import torch
from torch import nn
from pytest_cudaforge import forge_target
"""
TARGET = """

@forge_target(inputs=lambda: [torch.randn(4, 64)]{more})
class {name}(nn.Module):
    def forward(self, x):
        return x * 2.0 + 1.0
"""
WIDE = ', workloads={"wide": lambda: [torch.randn(2, 128)]}'
PLAN = """\
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("affine", args=(x, y, x.numel()), constants={"COLS": x.shape[-1]})
    return y
"""
KERNEL = """\
extern "C" void affine(const float* __restrict__ x, float* __restrict__ y, long long count) {
  for (long long i = 0; i < count; ++i) y[i] = x[i] * 2.0f + 1.0f;
}
"""
CUDA_PLAN = PLAN.replace('"affine", ', '"affine", grid=(x.numel() + 255) // 256, block=256, ')
CUDA_KERNEL = """\
extern "C" __global__ void affine(const float* __restrict__ x, float* __restrict__ y, long long count) {
  long long i = blockIdx.x * 256LL + threadIdx.x;
  if (i < count) y[i] = x[i] * 2.0f + 1.0f;
}
"""
#: The kernel bakes the row's length in, and was probed for nothing else.
DRAWN = Guard(contiguous_only=True, align_bytes=16, drawn_shapes_only=True)
STATES = (
    *("Fine", "Changed", "Gone", "Moved", "Tampered", "Missing", "OldTorch"),
    *("Elsewhere", "Renamed", "Redrawn", "Grown", "Shared", "Wider", "Wrong"),
)
#: Says at the end of a run whether its process had any children.
CONFTEST = """
import resource

def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        print("CHILDREN", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def workload(name: str, *shape: int) -> EntryWorkload:
    return EntryWorkload(name, (("0", TensorSpec(shape, "float32", (shape[-1], 1))),))


def targets(folder: Path, *names: str, wide: tuple[str, ...] = ()) -> dict[str, Target]:
    """Write ``layers.py`` with so many targets, all alike; those of ``wide`` have a second workload."""
    texts = [TARGET.format(name=name, more=WIDE if name in wide else "") for name in names]
    (folder / "layers.py").write_text(HEAD + "".join(texts), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_own.py").write_text("def test_own(): pass\n")
    return {target.qualname: target for target in discover([folder / "layers.py"], folder).targets}


def entry(
    folder: Path,
    target: Target,
    *,
    kernel: str = KERNEL,
    names: tuple[str, ...] = ("default",),
    arch: str = "cpu",
    variant: str = "",
) -> Entry:
    """Commit a kernel for a target, as publishing would after a verdict."""
    directory = f"{target.qualname}/{arch}" + (f"-{variant}" if variant else "")
    place = folder / "forged" / directory
    place.mkdir(parents=True)
    host = arch == "cpu"
    files = {"kernel.cpp" if host else "kernel.cu": kernel, "plan.py": PLAN if host else CUDA_PLAN}
    for name, text in files.items():
        (place / name).write_text(text, encoding="utf-8")
    shapes = {"default": (4, 64), "wide": (2, 128)}
    return Entry(
        target=target.id,
        import_name=target.module_name,
        qualname=target.qualname,
        kind=target.kind,
        path=target.path,
        source_digest=target.digest,
        language="cpp" if host else "cuda",
        arch=arch,
        directory=directory,
        variant=variant,
        files=tuple(EntryFile(name, hashlib.sha256(text.encode()).hexdigest()) for name, text in files.items()),
        guard=DRAWN,
        workloads=tuple(workload(name, *shapes[name]) for name in names),
        torch="",
        device="cpu" if host else arch,
        precision="fp32",
        mode="eval",
    )


def write(folder: Path) -> None:
    """One kernel in each state; its target's name says which."""
    known = targets(folder, *STATES, wide=("Fine", "Grown", "Shared"))
    made = {name: entry(folder, target) for name, target in known.items() if name not in ("Fine", "Wrong", "Elsewhere")}
    made["Fine"] = entry(folder, known["Fine"], names=("default", "wide"))
    made["Elsewhere"] = entry(folder, known["Elsewhere"], kernel=CUDA_KERNEL, arch="sm_42")
    made["Wrong"] = entry(folder, known["Wrong"], kernel=KERNEL.replace("1.0f", "1.001f"))
    changes: dict[str, dict[str, object]] = {
        "Changed": {"source_digest": "0" * 64},
        "Gone": {"target": "layers.py::Vanished", "qualname": "Vanished"},
        "Moved": {"target": "old.py::Moved", "path": "old.py"},
        "OldTorch": {"torch": "1.13.1+cpu"},
        "Renamed": {"workloads": (workload("narrow", 4, 64),)},
        "Redrawn": {"workloads": (workload("default", 4, 32),)},
        "Wider": {"guard": replace(DRAWN, drawn_shapes_only=False)},
    }
    entries = [replace(made[name], **changes.get(name, {})) for name in STATES]  # type: ignore[arg-type]
    entries.append(entry(folder, known["Shared"], names=("wide",), variant="wide"))
    Manifest(tuple(entries)).write(folder / "forged" / "manifest.json")
    (folder / "forged" / "Tampered" / "cpu" / "kernel.cpp").write_text(KERNEL + "// harmless\n")
    (folder / "forged" / "Missing" / "cpu" / "kernel.cpp").unlink()
