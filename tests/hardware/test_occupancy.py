"""Theoretical occupancy against figures of CUDA's own calculator."""

from __future__ import annotations

import pytest

from pytest_cudaforge.hardware.occupancy import theoretical
from pytest_cudaforge.records import DeviceFacts

H200 = DeviceFacts(
    kind="cuda",
    name="NVIDIA H200",
    arch="sm_90",
    sm_count=132,
    extra=(
        ("max_blocks_per_sm", "32"),
        ("max_threads_per_sm", "2048"),
        ("registers_per_sm", "65536"),
        ("shared_bytes_per_sm", "233472"),
    ),
)


@pytest.mark.parametrize(
    ("block", "registers", "shared_bytes", "blocks", "percent", "limited_by"),
    [
        ((256, 1, 1), 32, 0, 8, 100.0, "registers, warps"),
        ((256, 1, 1), 40, 0, 6, 75.0, "registers"),
        ((256, 1, 1), 255, 0, 1, 12.5, "registers"),
        ((32, 1, 1), 16, 0, 32, 50.0, "blocks"),
        ((1024, 1, 1), 64, 0, 1, 50.0, "registers"),
        ((128, 1, 1), 32, 48 * 1024, 4, 25.0, "shared memory"),
        ((33, 1, 1), 16, 0, 32, 100.0, "warps, blocks"),
    ],
)
def test_blocks_of_an_sm(
    block: tuple[int, ...], registers: int, shared_bytes: int, blocks: int, percent: float, limited_by: str
) -> None:
    found = theoretical(H200, (1320, 1, 1), block, registers, shared_bytes)
    assert found is not None
    assert (found.blocks_per_sm, found.percent, found.limited_by) == (blocks, percent, limited_by)
    assert found.waves == pytest.approx(10 / blocks)


def test_nothing_is_said_of_a_device_that_tells_nothing() -> None:
    assert theoretical(DeviceFacts(kind="cuda", name="?", arch="sm_90"), (1,), (32,), 16, 0) is None
