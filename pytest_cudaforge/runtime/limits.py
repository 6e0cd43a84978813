"""What a device accepts in a launch, checked before it: a clear LaunchFailure instead of "invalid argument".

Pure; standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_cudaforge.errors import LaunchFailure
from pytest_cudaforge.plan import Launch

#: Above this many blocks a cluster is not portable and has to be opted in (CUDA programming guide, clusters).
PORTABLE_CLUSTER_BLOCKS = 8
MAX_CLUSTER_BLOCKS = 16


@dataclass(frozen=True)
class LaunchLimits:
    """Limits of one CUDA device; the defaults hold for every GPU since compute capability 7.0."""

    max_grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    max_block: tuple[int, int, int] = (1024, 1024, 64)
    max_threads: int = 1024
    max_shared_bytes: int = 48 * 1024
    clusters: bool = False
    cooperative: bool = True


@dataclass(frozen=True)
class KernelLimits:
    """What one compiled kernel allows: threads per block (by its registers) and the shared memory it has already."""

    max_threads: int = 1024
    static_shared_bytes: int = 0


def check_launch(launch: Launch, device: LaunchLimits, kernel: KernelLimits) -> None:
    """Raises LaunchFailure where ``launch`` passes a limit of the device or of the kernel."""
    for name, sizes, most in (("grid", launch.grid, device.max_grid), ("block", launch.block, device.max_block)):
        for axis, size, limit in zip("xyz", sizes, most, strict=True):
            if not 1 <= size <= limit:
                raise _refused(launch, f"{name}.{axis} is {size}", f"1 to {limit}")
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if threads > device.max_threads:
        raise _refused(launch, f"a block of {threads} threads", f"at most {device.max_threads}")
    if threads > kernel.max_threads:
        raise _refused(
            launch,
            f"a block of {threads} threads, but its registers or __launch_bounds__ allow {kernel.max_threads}",
            f"at most {kernel.max_threads}",
        )
    _check_shared(launch, device, kernel)
    _check_cluster(launch, device)
    if launch.cooperative and not device.cooperative:
        raise _refused(launch, "a cooperative launch", "a device with cooperative launch")


def check_cpu_launch(launch: Launch) -> None:
    """Raises LaunchFailure where a launch for the CPU asks for what only a GPU has."""
    ones = (1, 1, 1)
    if launch.grid != ones or launch.block != ones or launch.shared_bytes or launch.cluster or launch.cooperative:
        raise LaunchFailure(
            f'kernel "{launch.kernel}" is a C++ function on the CPU and takes no grid, block, shared memory or cluster',
            expected='launch("name", args=(...)) and OpenMP inside the function',
        )


def _check_shared(launch: Launch, device: LaunchLimits, kernel: KernelLimits) -> None:
    total = launch.shared_bytes + kernel.static_shared_bytes
    if launch.shared_bytes < 0 or total > device.max_shared_bytes:
        static = f" and {kernel.static_shared_bytes} static" if kernel.static_shared_bytes else ""
        raise _refused(
            launch,
            f"{launch.shared_bytes} bytes of dynamic{static} shared memory",
            f"at most {device.max_shared_bytes} bytes a block (device.max_shared_bytes in plan.py)",
        )


def _check_cluster(launch: Launch, device: LaunchLimits) -> None:
    if launch.cluster is None:
        return
    if not device.clusters:
        raise _refused(launch, f"cluster {launch.cluster}", "a device of compute capability 9.0 or newer")
    blocks = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    if min(launch.cluster) < 1 or blocks > MAX_CLUSTER_BLOCKS:
        raise _refused(launch, f"cluster {launch.cluster} of {blocks} blocks", f"1 to {MAX_CLUSTER_BLOCKS} blocks")
    if any(size % step for size, step in zip(launch.grid, launch.cluster, strict=True)):
        raise _refused(launch, f"cluster {launch.cluster}", f"sizes that divide the grid {launch.grid}")


def _refused(launch: Launch, what: str, expected: str) -> LaunchFailure:
    where = f"plan.py:{launch.line}: " if launch.line else ""
    return LaunchFailure(f'{where}kernel "{launch.kernel}" is launched with {what}', expected=expected)
