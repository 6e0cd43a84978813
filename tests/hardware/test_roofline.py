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
CEILINGS = roofline.Ceilings(1e9, (("fp32", 1e12),))


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
        (10**8, 10**8, "fp32", TF32, 3e4),  # three products of parts lose no digit
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
    assert found is not None and found.bandwidth_bytes_per_s == pytest.approx(tb * 1e12)


def test_an_unlisted_gpu_has_the_drivers_bandwidth() -> None:
    facts = DeviceFacts(
        kind="cuda", name="Future", arch="sm_130", extra=(("nominal_bandwidth_bytes_per_s", "5000000000000"),)
    )
    assert roofline.nominal(facts) == roofline.Ceilings(5e12)


CACHED = dataclasses.replace(MEASURED, cache_bandwidths=((1000, 8e9), (4000, 4e9)))


@pytest.mark.parametrize(
    ("working_set", "bytes_per_s"),
    [
        (None, 1e9),
        (500, 8e9),
        (1000, 8e9),
        (4000, 4000 / (1000 / 8e9 + 3000 / 4e9)),
        (8000, 8000 / (1000 / 8e9 + 3000 / 4e9 + 4000 / 1e9)),
    ],
)
def test_what_fits_a_cache_moves_at_its_speed(working_set: int | None, bytes_per_s: float) -> None:
    assert roofline.bandwidth(CACHED, working_set) == pytest.approx(bytes_per_s)
    facts = WorkloadFacts("default", (), [], (), [], 400, 100, 500, 0)
    expected_ns = 1000 / bytes_per_s * 1e9
    assert roofline.reference_ns(facts, "fp32", CACHED, working_set) == pytest.approx(expected_ns)


def test_a_cache_measured_slower_than_memory_counts_as_memory() -> None:
    facts = dataclasses.replace(MEASURED, cache_bandwidths=((1000, 1e8),))
    assert roofline.bandwidth(facts, 1000) == pytest.approx(1e9)


INVENTED = DeviceFacts(
    kind="cuda",
    name="NVIDIA Quillfeather 9000",
    arch="sm_177",
    sm_count=100,
    l2_bytes=2**27,
    clock_mhz=2000,
    extra=(("nominal_bandwidth_bytes_per_s", "9000000000000"),),
)


def test_a_gpu_that_nobody_has_heard_of_has_a_roofline() -> None:
    found = roofline.nominal(INVENTED)
    assert found == roofline.Ceilings(9e12, (("fp32", 2.0 * 128 * 100 * 2e9),))
    assert roofline.minimal_ns(9 * 10**9, 0, "fp32", INVENTED) == pytest.approx(1e6)
    assert roofline.minimal_ns(0, 51_200_000_000, "fp32", INVENTED) == pytest.approx(1e6)
    assert roofline.bound(10**9, 1, "fp32", INVENTED) == "memory"
    assert "Quillfeather" in hardware.describe(INVENTED)


def test_a_measurement_of_an_unknown_gpu_wins_and_is_kept(tmp_path: Path) -> None:
    measured = roofline.Ceilings(8e12, (("fp32", 4e13),), ((2**27, 2e13),))
    first = roofline.with_ceilings(INVENTED, tmp_path, lambda: measured)
    assert first.cache_bandwidths == ((2**27, 2e13),) and roofline.with_ceilings(INVENTED, tmp_path) == first
    assert roofline.minimal_ns(8 * 10**9, 0, "fp32", first) == pytest.approx(1e6)
    assert "8e+03 GB/s" in hardware.describe(first) and "within 128 MiB" in hardware.describe(first)


def test_measured_once_per_device(tmp_path: Path) -> None:
    calls = []

    def measure_here() -> roofline.Ceilings:
        calls.append(1)
        return CEILINGS

    first = roofline.with_ceilings(CPU, tmp_path / "new", measure_here)
    second = roofline.with_ceilings(CPU, tmp_path / "new", measure_here)
    assert first == second == MEASURED
    assert len(calls) == 1


def test_what_was_measured_beside_others_is_not_kept(tmp_path: Path) -> None:
    disturbed = dataclasses.replace(CEILINGS, disturbed=True)
    assert roofline.with_ceilings(CPU, tmp_path, lambda: disturbed) == MEASURED
    assert roofline.load(CPU, tmp_path) is None


def test_another_device_is_another_entry(tmp_path: Path) -> None:
    roofline.store(CPU, tmp_path, CEILINGS)
    assert roofline.load(dataclasses.replace(CPU, uuid="GPU-2"), tmp_path) is None


def test_without_a_measurement_the_facts_stay(tmp_path: Path) -> None:
    assert roofline.with_ceilings(CPU, tmp_path) == CPU


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2}', '{"format": 2, "ceilings": {"bandwidth_bytes_per_s": -1}}']
)
def test_a_broken_cache_is_measured_anew(tmp_path: Path, text: str) -> None:
    roofline.store(CPU, tmp_path, CEILINGS)
    (file,) = tmp_path.glob("ceilings-*.json")
    file.write_text(text)
    assert roofline.load(CPU, tmp_path) is None
    assert roofline.with_ceilings(CPU, tmp_path, lambda: CEILINGS) == MEASURED
    assert json.loads(file.read_text())["ceilings"]["bandwidth_bytes_per_s"] == 1e9


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert roofline.with_ceilings(CPU, blocker / "below", lambda: CEILINGS) == MEASURED


def test_the_cpu_is_measured_for_real() -> None:
    found = roofline.measure("cpu")
    assert 1e8 < found.bandwidth_bytes_per_s < 1e13
    assert dict(found.peak_flops)["fp32"] > 1e8
    # A short copy on cores that others have waits for a turn of theirs.
    assert all(capacity > 0 and 1e6 < speed < 1e14 for capacity, speed in found.cache_bandwidths)


def test_measuring_a_gpu_that_torch_does_not_see_is_an_error() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    with pytest.raises(DeviceError, match=r"torch does not see cuda:0"):
        roofline.measure("cuda:0")


def test_every_data_sheet_row_is_complete() -> None:
    for name in ("H200", "H100", "A100", "L40S", "L4", "A10G", "T4", "RTX 4090"):
        found = roofline.nominal(dataclasses.replace(H200, name=name))
        assert found is not None and found.bandwidth_bytes_per_s > 0 and dict(found.peak_flops)["fp32"] > 0


def test_doctor_shows_ceilings() -> None:
    assert "copy 1 GB/s · fp32 1 TFLOP/s" in hardware.describe(
        dataclasses.replace(MEASURED, extra=(("l3_bytes", "0"),))
    )
