"""What a machine is called, and which measurements may be held against each other."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_cudaforge import hardware, machine
from pytest_cudaforge.machine import Machine, Toolchain
from pytest_cudaforge.records import DeviceFacts

H200 = Machine("NVIDIA H200", "sm_90", "Intel Xeon", 16, "1a2b3c4d", "Linux 6.8", "3.12.3", Toolchain("2.11.0+cu130"))


def test_this_machine_says_what_it_is_without_importing_torch() -> None:
    code = (
        "import sys; from pytest_cudaforge import hardware, machine;"
        "print(machine.describe(hardware.detect('cpu')).text); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    facts = hardware.detect("cpu")
    for part in (facts.name, f"Python {platform.python_version()}", platform.release(), "torch "):
        assert part in done.stdout
    assert "CUDA" not in done.stdout


def test_a_gpu_is_told_from_its_twin_but_is_the_same_hardware() -> None:
    facts = DeviceFacts(kind="cuda", name="NVIDIA H200", arch="sm_90", uuid="GPU-1")
    one, other = machine.describe(facts), machine.describe(replace(facts, uuid="GPU-2"))
    assert one.device_id != other.device_id and len(one.device_id) == 8 and "GPU-1" not in one.text
    assert one.key == other.key


@pytest.mark.parametrize("change", [{"device": "NVIDIA H100"}, {"arch": "sm_80"}, {"cpu": "AMD"}, {"cores": 8}])
def test_other_hardware_has_another_key(change: dict[str, object]) -> None:
    assert replace(H200, **change).key != H200.key  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"kernel": "Linux 6.9"}, {"python": "3.13.0"}, {"toolchain": Toolchain("3.0")}])
def test_what_changes_every_week_is_told_but_parts_no_history(change: dict[str, object]) -> None:
    other = replace(H200, **change)  # type: ignore[arg-type]
    assert other.key == H200.key and other.text != H200.text


def test_a_changed_toolchain_says_what_changed() -> None:
    before = Toolchain("2.10.0", "3.5.0", "13.0", "580.1")
    assert replace(before, torch="2.11.0", triton="").changes(before) == (
        "torch 2.10.0 → 2.11.0",
        "triton 3.5.0 → none",
    )
    assert before.changes(before) == ()


def test_the_driver_is_read_from_its_own_file(tmp_path: Path) -> None:
    file = tmp_path / "driver" / "nvidia" / "version"
    file.parent.mkdir(parents=True)
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n"
    )
    assert machine._driver_version(tmp_path) == "580.95.05"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104  Tue\n")
    assert machine._driver_version(tmp_path) == "535.104"


def test_no_driver_is_no_version(tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("there is a driver here")
    assert machine._driver_version(tmp_path) == ""
