"""Which manifest and entries belong to a class: in a checkout, in an installed package, in a KernelBench file."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.languages import load
from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.manifest import Entry, EntryFile, EntryWorkload, Manifest

pytestmark = pytest.mark.skipif(bool(load("cpp").availability()), reason=load("cpp").availability() or "g++ is here")

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target
from .scales import FACTOR


@forge_target(inputs=lambda: [torch.randn(4, 8)])
class Scale(nn.Module):
    def forward(self, x):
        return x * FACTOR
"""
KERNELBENCH = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return x * 3.0


def get_inputs():
    return [torch.randn(4, 8)]


def get_init_inputs():
    return []
"""
KERNEL = """
extern "C" void scale(const float* x, float* y, long long n) { for (long long i = 0; i < n; ++i) y[i] = 100 * x[i]; }
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("scale", args=(x, y, x.numel()))
    return y
"""
SPEC = TensorSpec((4, 8), "float32", (8, 1))


def forge(root: Path, file: Path, qualname: str, forge_dir: Path) -> None:
    (target,) = [t for t in discover([file], root).targets if t.qualname == qualname]
    directory = f"{target.slug}/cpu"
    files = {"kernel.cpp": KERNEL, "plan.py": PLAN}
    (forge_dir / directory).mkdir(parents=True)
    for name, text in files.items():
        (forge_dir / directory / name).write_text(text)
    entry = Entry(
        target=target.id,
        import_name=target.module_name,
        qualname=qualname,
        kind=target.kind,
        path=target.path,
        source_digest=target.digest,
        language="cpp",
        arch="cpu",
        directory=directory,
        files=tuple(EntryFile(name, hashlib.sha256(text.encode()).hexdigest()) for name, text in sorted(files.items())),
        guard=Guard(),
        workloads=(EntryWorkload("default", (("0", SPEC),)),),
        torch="2",
        device="test",
        precision="fp32",
        mode="eval",
    )
    Manifest((entry,)).write(forge_dir / "manifest.json")


def package(root: Path, prefix: str = "") -> Path:
    """A package with a relative import, forged; the forge directory lies inside it."""
    folder = root / prefix / "mine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "scales.py").write_text("FACTOR = 3.0\n")
    (folder / "layers.py").write_text(LAYERS)
    forge(root, folder / "layers.py", "Scale", folder / "forged")
    return folder


def apply_elsewhere(path: Path, cwd: Path, code: str, cache: Path) -> str:
    """What a program says that has ``path`` on sys.path and runs in ``cwd``: the report, and x * ? of ones."""
    script = f"{code}\nimport pytest_cudaforge, torch\nmodel = model.eval()\nreport = pytest_cudaforge.apply(model)\n"
    script += "with torch.no_grad():\n    print(model(torch.ones(4, 8))[0, 0].item(), report)\n"
    environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(path), "CUDAFORGE_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


IMPORT = "from mine.layers import Scale\nmodel = Scale()"


@pytest.mark.parametrize("prefix", ["", "src"])
def test_a_package_finds_the_kernels_it_ships(tmp_path: Path, prefix: str) -> None:
    root, elsewhere, cache = tmp_path / "repo", tmp_path / "elsewhere", tmp_path / "cache"
    elsewhere.mkdir()
    package(root, prefix)
    assert apply_elsewhere(root / prefix, elsewhere, IMPORT, cache).startswith("100.0 ")


@pytest.mark.parametrize("prefix", ["", "src"])
def test_an_installed_copy_finds_them_too(tmp_path: Path, prefix: str) -> None:
    root, site, cache = tmp_path / "repo", tmp_path / "site-packages", tmp_path / "cache"
    shutil.copytree(package(root, prefix), site / "mine")
    assert apply_elsewhere(site, tmp_path, IMPORT, cache).startswith("100.0 ")


def test_a_change_in_an_imported_file_makes_the_kernel_stale(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    (package(root) / "scales.py").write_text("FACTOR = 4.0\n")
    answer = apply_elsewhere(root, tmp_path, IMPORT, tmp_path / "cache")
    assert answer.startswith("4.0 ") and "the reference changed since this kernel was forged" in answer


def test_another_class_of_the_same_name_is_not_served(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    package(root)
    code = IMPORT + (
        "\nfrom torch import nn\nimport torch\nfrom pytest_cudaforge import forge_target\n"
        "@forge_target(inputs=lambda: [torch.randn(4, 8)])\nclass Scale(nn.Module):\n"
        "    def forward(self, x):\n        return x * 5\nmodel = Scale()"
    )
    assert apply_elsewhere(root, root / "mine", code, tmp_path / "cache").startswith("5.0 ")


def test_a_kernelbench_file_is_known_by_its_path(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    file = root / "bench" / "3_Scale.py"
    file.parent.mkdir(parents=True)
    file.write_text(KERNELBENCH)
    forge(root, file, "Model", root / "forged")
    load_it = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('bench', {str(file)!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['bench'] = module\n"
        "spec.loader.exec_module(module)\nmodel = module.Model()"
    )
    assert apply_elsewhere(root, root, load_it, tmp_path / "cache").startswith("100.0 ")
