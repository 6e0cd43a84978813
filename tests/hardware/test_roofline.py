"""The roofline's arithmetic, its cache, and a real measurement on the CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pytest_cudaforge import hardware
from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.hardware import roofline
from pytest_cudaforge.records import DeviceFacts, WorkloadFacts

CPU = DeviceFacts(kind="cpu", name="some CPU", arch="cpu", sm_count=2)
MEASURED = dataclasses.replace(CPU, bandwidth_bytes_per_s=1e9, peak_flops=(("fp32", 1e12),))
H200 = DeviceFacts(kind="cuda", name="NVIDIA H200", arch="sm_90")
CEILINGS = (1e9, (("fp32", 1e12),))


def test_bytes_decide_where_they_take_longer() -> None:
    assert roofline.minimal_ns(1000, 1000, "fp32", MEASURED) == pytest.approx(1000.0)
    assert roofline.bound(1000, 1000, "fp32", MEASURED) == "memory"


def test_operations_decide_where_they_take_longer() -> None:
    assert roofline.minimal_ns(1000, 10_000_000, "fp32", MEASURED) == pytest.approx(10_000.0)
    assert roofline.bound(1000, 10_000_000, "fp32", MEASURED) == "compute"


def test_an_unknown_precision_leaves_the_bytes() -> None:
    assert roofline.minimal_ns(1000, 10**12, "fp8", MEASURED) == pytest.approx(1000.0)
    assert roofline.bound(1000, 10**12, "fp8", MEASURED) == "unknown"


def test_without_a_bandwidth_there_is_no_roofline() -> None:
    assert roofline.minimal_ns(1000, 1000, "fp32", CPU) is None
    assert roofline.sol_percent(100.0, None) is None


def call(flops: int, convolutions: int) -> WorkloadFacts:
    return WorkloadFacts("default", (), [], (), [], 400, 100, 500, flops, convolutions)


TF32 = dataclasses.replace(H200, bandwidth_bytes_per_s=1e9, peak_flops=(("fp32", 1e12), ("tf32", 1e13)))


@pytest.mark.parametrize(
    ("flops", "convolutions", "precision", "facts", "expected_ns"),
    [
        (0, 0, "default", TF32, 1000.0),
        (10**8, 0, "default", TF32, 1e5),  # products stay in fp32
        (10**8, 10**8, "default", TF32, 1e4),  # cuDNN takes tf32
        (2 * 10**8, 10**8, "default", TF32, 1.1e5),
        (10**8, 10**8, "fp32", TF32, 1e5),
        (10**8, 10**8, "default", MEASURED, 1e5),  # a CPU has no tf32
        (10**8, 10**8, "default", CPU, None),
    ],
)
def test_torchs_defaults_let_convolutions_use_tf32(
    flops: int, convolutions: int, precision: str, facts: DeviceFacts, expected_ns: float | None
) -> None:
    assert roofline.reference_ns(call(flops, convolutions), precision, facts) == pytest.approx(expected_ns)


def test_nothing_to_move_and_nothing_to_do_takes_no_time() -> None:
    assert roofline.minimal_ns(0, 0, "fp32", MEASURED) == 0.0


def test_speed_of_light() -> None:
    assert roofline.sol_percent(200.0, 100.0) == 50.0
    assert roofline.sol_percent(0.0, 100.0) is None


def test_data_sheet_stands_in_for_a_measurement() -> None:
    assert roofline.minimal_ns(4_800_000_000, 0, "fp32", H200) == pytest.approx(1e6)
    assert roofline.nominal(H200) is not None


def test_a_measured_ceiling_wins_over_the_data_sheet() -> None:
    facts = dataclasses.replace(H200, bandwidth_bytes_per_s=4.3e12, peak_flops=(("bf16", 790e12),))
    assert roofline.minimal_ns(0, 790 * 10**12, "bf16", facts) == pytest.approx(1e9)
    assert roofline.minimal_ns(0, 67 * 10**12, "fp32", facts) == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("name", "tb"), [("NVIDIA H100 PCIe", 2.0), ("NVIDIA H100 80GB HBM3", 3.35), ("NVIDIA L40S", 0.864)]
)
def test_the_more_exact_name_is_found_first(name: str, tb: float) -> None:
    found = roofline.nominal(DeviceFacts(kind="cuda", name=name, arch="sm_90"))
    assert found is not None and found[0] == pytest.approx(tb * 1e12)


def test_an_unlisted_gpu_has_the_drivers_bandwidth() -> None:
    facts = DeviceFacts(
        kind="cuda", name="Future", arch="sm_130", extra=(("nominal_bandwidth_bytes_per_s", "5000000000000"),)
    )
    assert roofline.nominal(facts) == (5e12, ())


def test_measured_once_per_device(tmp_path: Path) -> None:
    calls = []

    def measure_here() -> roofline.Ceilings:
        calls.append(1)
        return CEILINGS

    first = roofline.with_ceilings(CPU, tmp_path / "new", measure_here)
    second = roofline.with_ceilings(CPU, tmp_path / "new", measure_here)
    assert first == second == MEASURED
    assert len(calls) == 1


def test_another_device_is_another_entry(tmp_path: Path) -> None:
    roofline.store(CPU, tmp_path, CEILINGS)
    assert roofline.load(dataclasses.replace(CPU, uuid="GPU-2"), tmp_path) is None


def test_without_a_measurement_the_facts_stay(tmp_path: Path) -> None:
    assert roofline.with_ceilings(CPU, tmp_path) == CPU


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "bandwidth_bytes_per_s": -1, "peak_flops": []}']
)
def test_a_broken_cache_is_measured_anew(tmp_path: Path, text: str) -> None:
    roofline.store(CPU, tmp_path, CEILINGS)
    (file,) = tmp_path.glob("ceilings-*.json")
    file.write_text(text)
    assert roofline.load(CPU, tmp_path) is None
    assert roofline.with_ceilings(CPU, tmp_path, lambda: CEILINGS) == MEASURED
    assert json.loads(file.read_text())["bandwidth_bytes_per_s"] == 1e9


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert roofline.with_ceilings(CPU, blocker / "below", lambda: CEILINGS) == MEASURED


def test_the_cpu_is_measured_for_real() -> None:
    bandwidth, peaks = roofline.measure("cpu")
    assert 1e8 < bandwidth < 1e13
    assert dict(peaks)["fp32"] > 1e8


def test_measuring_a_gpu_that_torch_does_not_see_is_an_error() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    with pytest.raises(DeviceError, match=r"torch does not see cuda:0"):
        roofline.measure("cuda:0")


def test_every_data_sheet_row_is_complete() -> None:
    for name in ("H200", "H100", "A100", "L40S", "L4", "A10G", "T4", "RTX 4090"):
        found = roofline.nominal(dataclasses.replace(H200, name=name))
        assert found is not None and found[0] > 0 and dict(found[1])["fp32"] > 0


def test_doctor_shows_ceilings() -> None:
    assert "copy 1 GB/s · fp32 1 TFLOP/s" in hardware.describe(
        dataclasses.replace(MEASURED, extra=(("l3_bytes", "0"),))
    )
