"""Plain `pytest` on committed CUDA kernels, beside one for a CPU, on a real GPU."""

from __future__ import annotations

from pathlib import Path

import case_repo
import pytest
from forge_repo import pytest_in

from pytest_cudaforge.hardware import detect_in_child
from pytest_cudaforge.runtime.manifest import Manifest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]


def test_kernels_of_this_gpu_of_another_and_of_the_cpu(tmp_path: Path) -> None:
    arch = detect_in_child("cuda:0").arch
    names = ("Fine", "Wrong", "Elsewhere", "Host")
    known = case_repo.targets(tmp_path, *names, wide=("Fine",))
    wrong = case_repo.CUDA_KERNEL.replace("1.0f", "1.001f")
    entries = (
        case_repo.entry(tmp_path, known["Fine"], kernel=case_repo.CUDA_KERNEL, arch=arch, names=("default", "wide")),
        case_repo.entry(tmp_path, known["Wrong"], kernel=wrong, arch=arch),
        case_repo.entry(tmp_path, known["Elsewhere"], kernel=case_repo.CUDA_KERNEL, arch="sm_42"),
        case_repo.entry(tmp_path, known["Host"]),
    )
    Manifest(entries).write(tmp_path / "forged" / "manifest.json")
    done = pytest_in(tmp_path, "-v", "-rs", "forged")
    said = done.stdout + done.stderr
    print(said)
    assert "1 failed, 3 passed, 1 skipped" in said
    for workload in ("default", "wide"):
        assert f"forged/Fine/{arch}/plan.py::case[{workload}] PASSED" in said
    assert "forged/Host/cpu/plan.py::case[default] PASSED" in said
    assert f"this kernel was made for sm_42; the GPU here is {arch}" in said
    assert "INCORRECT_NUMERICAL" in said and "Traceback" not in said
