"""What the one look at a GPU's counters says where there are none: real programs stand in for ncu."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pytest_cudaforge.hardware import counter_probe
from pytest_cudaforge.hardware.counter_probe import INSTALL, PERMISSION, probe
from pytest_cudaforge.hardware.ncu import find_ncu


def _environment(folder: Path, script: str | None) -> dict[str, str]:
    if script is not None:
        (folder / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        os.chmod(folder / "ncu", stat.S_IRWXU)
    return {"PATH": f"{folder}:/usr/bin:/bin", "CUDA_HOME": str(folder)}


@pytest.mark.parametrize(
    ("script", "reason", "remedy"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'", "ERR_NVGPUCTRPERM", PERMISSION),
        (
            "echo '==ERROR== Profiling failed because a driver resource was unavailable.'",
            "DCGM",
            "dcgmi profile --pause",
        ),
        ("echo '==ERROR== Failed to initialize the profiler: LibraryNotLoaded'", "LibraryNotLoaded", "runtime"),
        ("head -c 5000 /dev/urandom", "nothing that can be read", "--version"),
        ('echo \'"ID","Kernel Name","sm__cycles_active.avg"\'; echo \'"","","cycle"\'; echo \'"0","f","12"\'', "", ""),
    ],
)
def test_the_reason_and_what_to_do(tmp_path: Path, script: str, reason: str, remedy: str) -> None:
    found = probe("cuda:0", _environment(tmp_path, script))
    assert found.rung == ("cupti" if reason else "ncu")
    assert reason in found.reason and remedy in found.remedy and "sudo" not in found.remedy


def test_a_probe_that_hangs_is_ended_and_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter_probe, "_LIMIT_S", 0.4)
    environment = _environment(tmp_path, "sleep 600")
    first = probe("cuda:0", environment)
    assert first.rung == "cupti" and "was ended after" in first.reason
    (tmp_path / "ncu").write_text("#!/bin/sh\n")
    assert probe("cuda:0", environment) == first


def test_without_ncu_there_is_something_to_install(tmp_path: Path) -> None:
    environment = _environment(tmp_path, None)
    if find_ncu(environment) is not None:
        pytest.skip("ncu is installed here, whatever the PATH says")
    assert probe("cuda:0", environment).remedy == INSTALL
