"""Device facts and ceilings of a real GPU, against torch's own view of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaforge import hardware
from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.hardware import roofline

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]


def test_facts_agree_with_torch() -> None:
    facts = hardware.detect_in_child("cuda:0")
    seen = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability(0)
    assert facts.name == seen.name
    assert facts.arch == f"sm_{major}{minor}"
    assert facts.sm_count == seen.multi_processor_count
    assert facts.l2_bytes == seen.L2_cache_size
    assert facts.max_shared_bytes == seen.shared_memory_per_block_optin
    assert abs(facts.memory_bytes - seen.total_memory) < 2**30
    assert facts.uuid.removeprefix("GPU-") == str(seen.uuid)
    assert facts.clock_mhz > 500
    print("\n" + hardware.describe(facts), facts.extra)


def test_asking_in_process_makes_no_context() -> None:
    code = (
        "from pytest_cudaforge import hardware; hardware.detect('cuda:0');"
        "from cuda.bindings import driver as d; s, context = d.cuCtxGetCurrent(); assert int(context) == 0;"
        "_, device = d.cuDeviceGet(0); s, flags, active = d.cuDevicePrimaryCtxGetState(device); assert active == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_index_beyond_the_last_is_an_error() -> None:
    with pytest.raises(DeviceError, match=r"there is no cuda:99"):
        hardware.detect_in_child("cuda:99")


def test_auto_is_the_first_gpu() -> None:
    assert hardware.choose("auto") == "cuda:0"


def test_ceilings_are_plausible_and_kept(tmp_path: Path) -> None:
    facts = roofline.with_ceilings(hardware.detect("cuda:0"), tmp_path, lambda: roofline.measure("cuda:0"))
    print("\n" + hardware.describe(facts))
    assert facts.bandwidth_bytes_per_s and facts.bandwidth_bytes_per_s > 1e11
    assert dict(facts.peak_flops)["bf16"] > dict(facts.peak_flops)["fp32"]
    ((capacity, cache),) = facts.cache_bandwidths
    assert capacity == facts.l2_bytes and cache > facts.bandwidth_bytes_per_s
    assert roofline.with_ceilings(hardware.detect("cuda:0"), tmp_path) == facts
