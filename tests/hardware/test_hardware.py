"""Device facts: what the kernel says, what the driver says, and what is said where neither can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaforge import hardware
from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.hardware import cpu
from pytest_cudaforge.records import DeviceFacts, from_json, to_json


def _gpu_is_here() -> bool:
    return Path("/dev/nvidiactl").exists()


def test_the_cpu_has_cores_caches_and_memory() -> None:
    facts = hardware.detect("cpu")
    assert (facts.kind, facts.arch) == ("cpu", "cpu")
    assert 1 <= facts.sm_count <= len(os.sched_getaffinity(0))
    assert facts.memory_bytes > 2**28
    assert facts.name


def test_facts_survive_json() -> None:
    facts = hardware.detect("cpu")
    assert from_json(DeviceFacts, json.loads(json.dumps(to_json(facts)))) == facts


def test_two_detections_agree() -> None:
    """The facts are part of signatures and cache keys."""
    first, second = hardware.detect("cpu"), hardware.detect("cpu")
    assert first.extra == second.extra
    assert first.l2_bytes == second.l2_bytes


def _machine(root: Path) -> dict[str, Path]:
    core = min(os.sched_getaffinity(0))
    cache = root / "sys" / f"cpu{core}" / "cache"
    for index, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2048K"), (3, "Unified", "36M")]
    ):
        directory = cache / f"index{index}"
        directory.mkdir(parents=True)
        for name, value in {"level": str(level), "type": kind, "size": size}.items():
            (directory / name).write_text(value + "\n")
    clock = root / "sys" / f"cpu{core}" / "cpufreq"
    clock.mkdir()
    (clock / "cpuinfo_max_freq").write_text("3800000\n")
    proc, cgroup = root / "proc", root / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "cpuinfo").write_text("model name\t: Test CPU @ 3\ncpu MHz\t: 1200.5\nflags\t: fpu avx2 avx512f\n\nx: y\n")
    (proc / "meminfo").write_text("MemTotal:       16384 kB\nMemFree: 1 kB\n")
    return {"sysfs": root / "sys", "proc": proc, "cgroup": cgroup}


def test_caches_clock_flags_and_memory_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    facts = cpu.detect(**_machine(tmp_path))
    extra = dict(facts.extra)
    assert facts.name == "Test CPU @ 3"
    assert (facts.l2_bytes, extra["l3_bytes"], extra["l1d_bytes"]) == (2 * 2**20, str(36 * 2**20), str(48 * 2**10))
    assert facts.clock_mhz == 3800
    assert extra["isa"] == "avx2,avx512f"
    assert facts.memory_bytes == 16384 * 1024


def test_a_containers_limits_count(tmp_path: Path) -> None:
    machine = _machine(tmp_path)
    (machine["cgroup"] / "cpu.max").write_text("50000 100000\n")
    (machine["cgroup"] / "memory.max").write_text("1048576\n")
    facts = cpu.detect(**machine)
    assert facts.sm_count == 1
    assert facts.memory_bytes == 1048576


def test_an_unlimited_container_changes_nothing(tmp_path: Path) -> None:
    machine = _machine(tmp_path)
    (machine["cgroup"] / "cpu.max").write_text("max 100000\n")
    (machine["cgroup"] / "memory.max").write_text("max\n")
    facts = cpu.detect(**machine)
    assert facts.sm_count == len(os.sched_getaffinity(0))
    assert facts.memory_bytes == 16384 * 1024


def test_a_machine_without_these_files_still_has_facts(tmp_path: Path) -> None:
    facts = cpu.detect(tmp_path / "none", tmp_path / "none", tmp_path / "none")
    assert (facts.l2_bytes, facts.memory_bytes, facts.clock_mhz) == (0, 0, 0)
    assert facts.sm_count >= 1


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:x", "", "cpu:0", "CUDA:0"])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(DeviceError, match=r"unknown device .*\n.*expected: cpu, cuda or cuda:N"):
        hardware.detect(device)


@pytest.mark.parametrize(("device", "meaning"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:3", "cuda:3")])
def test_a_named_device_is_taken_at_its_word(device: str, meaning: str) -> None:
    assert hardware.choose(device) == meaning


@pytest.mark.skipif(_gpu_is_here(), reason="this machine has a GPU")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert hardware.choose("auto") == "cpu"


@pytest.mark.skipif(_gpu_is_here(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"(?s)CUDA driver.*to do: pip install .*--forge-device cpu"):
        hardware.detect_in_child("cuda:0")


def test_the_child_answers_in_json_only() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_cudaforge.hardware", "cpu"], capture_output=True, text=True, check=True
    )
    assert from_json(DeviceFacts, json.loads(done.stdout)["facts"]).kind == "cpu"


def test_asking_loads_no_torch() -> None:
    code = (
        "import sys; from pytest_cudaforge import hardware; hardware.detect('cpu'); hardware.choose('auto');"
        "from pytest_cudaforge.hardware import roofline; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_description_is_one_readable_line() -> None:
    text = hardware.describe(hardware.detect("cpu"))
    assert "cores" in text and "GiB" in text and "\n" not in text
