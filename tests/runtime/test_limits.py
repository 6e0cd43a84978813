"""Launch limits, checked before a launch. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_cudaforge.errors import LaunchFailure
from pytest_cudaforge.plan import Launch
from pytest_cudaforge.runtime.limits import KernelLimits, LaunchLimits, check_cpu_launch, check_launch

H200 = LaunchLimits(max_shared_bytes=232448, clusters=True)


def check(device: LaunchLimits = H200, kernel: KernelLimits | None = None, **launch: Any) -> None:
    check_launch(Launch("f", (), **{"line": 7, **launch}), device, kernel or KernelLimits())


def test_launches_within_the_limits_pass() -> None:
    check(grid=(2**31 - 1, 65535, 65535), block=(1024, 1, 1))
    check(block=(16, 1, 64), shared_bytes=232448)
    check(grid=(32, 4, 1), cluster=(16, 1, 1), cooperative=True)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"grid": (0, 1, 1)}, r"grid.x is 0\n  expected: 1 to 2147483647"),
        ({"grid": (1, 65536, 1)}, r"grid.y is 65536\n  expected: 1 to 65535"),
        ({"block": (1, 1, 65)}, "block.z is 65"),
        ({"block": (0, 1, 1)}, "block.x is 0"),
        ({"block": (64, 32, 1)}, r"a block of 2048 threads\n  expected: at most 1024"),
        ({"shared_bytes": 232449}, "232449 bytes of dynamic shared memory"),
        ({"shared_bytes": -1}, "-1 bytes"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "divide the grid"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "of 32 blocks"),
        ({"grid": (32, 1, 1), "cluster": (0, 1, 1)}, "of 0 blocks"),
    ],
)
def test_a_limit_passed_is_named_with_the_launchs_line(launch: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchFailure, match=message) as caught:
        check(**launch)
    assert str(caught.value).startswith('plan.py:7: kernel "f" is launched with ')


def test_the_kernels_own_limits_count() -> None:
    with pytest.raises(LaunchFailure, match="__launch_bounds__ allow 256"):
        check(kernel=KernelLimits(max_threads=256), block=(512, 1, 1))
    with pytest.raises(LaunchFailure, match="200000 bytes of dynamic and 40000 static shared memory"):
        check(kernel=KernelLimits(static_shared_bytes=40000), shared_bytes=200000)


def test_an_old_device_has_no_clusters() -> None:
    with pytest.raises(LaunchFailure, match=r"compute capability 9\.0"):
        check(LaunchLimits(), grid=(2, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(LaunchFailure, match="cooperative"):
        check(LaunchLimits(cooperative=False), cooperative=True)


@pytest.mark.parametrize(
    "launch",
    [{"grid": (2, 1, 1)}, {"block": (1, 2, 1)}, {"shared_bytes": 8}, {"cluster": (1, 1, 1)}, {"cooperative": True}],
)
def test_the_cpu_has_no_grid(launch: dict[str, Any]) -> None:
    check_cpu_launch(Launch("f", ()))
    with pytest.raises(LaunchFailure, match="takes no grid"):
        check_cpu_launch(Launch("f", (), **launch))
