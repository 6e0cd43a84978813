"""Facts of the CPU, read from the kernel: /proc, /sys and the affinity mask."""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

from pytest_cudaforge.facts import DeviceFacts

__all__ = ["detect"]

_SYSFS = Path("/sys/devices/system/cpu")
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")

#: What a kernel's author wants to know; the kernel's names, in ascending order of use.
_ISA_FLAGS = (
    "sse4_2 avx avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 avx_vnni "
    "amx_tile amx_int8 amx_bf16 amx_fp16 asimd asimdhp asimddp bf16 i8mm sve sve2"
)


def detect(sysfs: Path = _SYSFS, proc: Path = _PROC, cgroup: Path = _CGROUP) -> DeviceFacts:
    """The CPU as this process may use it.

    ``sm_count`` is the number of cores in the affinity mask, cut to the container's quota; ``l2_bytes`` is one
    core's L2; ``extra`` holds ``isa`` (comma-separated flags), ``l1d_bytes``, ``l3_bytes``, ``cores_online``.
    ``memory_bytes`` is what the machine or the container has. The clock is the maximum where the kernel tells it.
    """
    core = min(os.sched_getaffinity(0))
    info = _cpuinfo(proc)
    caches = _caches(sysfs / f"cpu{core}" / "cache")
    extra = (
        ("cores_online", str(os.cpu_count() or 1)),
        (
            "isa",
            ",".join(
                flag for flag in _ISA_FLAGS.split() if flag in info.get("flags", info.get("features", "")).split()
            ),
        ),
        ("l1d_bytes", str(caches.get(1, 0))),
        ("l3_bytes", str(caches.get(3, 0))),
        ("machine", platform.machine()),
    )
    return DeviceFacts(
        kind="cpu",
        name=info.get("model name") or platform.processor() or platform.machine(),
        arch="cpu",
        sm_count=_usable_cores(cgroup),
        l2_bytes=caches.get(2, 0),
        memory_bytes=_memory_bytes(proc, cgroup),
        clock_mhz=_clock_mhz(sysfs / f"cpu{core}", info),
        extra=extra,
    )


def _read(path: Path) -> str:
    """The file's text, or nothing: each of these files is absent on some machines."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cpuinfo(proc: Path) -> dict[str, str]:
    """The first processor's fields, names in lower case."""
    block = _read(proc / "cpuinfo").split("\n\n")[0]
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _caches(directory: Path) -> dict[int, int]:
    """Level -> bytes of the data (or unified) cache that one core sees."""
    sizes: dict[int, int] = {}
    for index in sorted(directory.glob("index*")):
        level, size = _read(index / "level"), _read(index / "size")
        if _read(index / "type") != "Instruction" and level.isdigit():
            sizes[int(level)] = _size_bytes(size)
    return sizes


def _size_bytes(text: str) -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    digits = text.rstrip("KMG")
    return int(digits) * units.get(text[len(digits) :], 1) if digits.isdigit() else 0


def _usable_cores(cgroup: Path) -> int:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that can be had without swapping, in a container those that its limit leaves; 0 where nothing
    says so."""
    free = _meminfo_bytes(proc, "MemAvailable:")
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    return min(free, max(0, int(limit) - int(used))) if limit.isdigit() and used.isdigit() and free else free


def _memory_bytes(proc: Path, cgroup: Path) -> int:
    total = _meminfo_bytes(proc, "MemTotal:")
    limit = _read(cgroup / "memory.max")
    return min(total, int(limit)) if limit.isdigit() and total else total


def _meminfo_bytes(proc: Path, name: str) -> int:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _clock_mhz(core: Path, info: dict[str, str]) -> int:
    # The maximum is a property of the machine; "cpu MHz" is this instant's clock and the last resort.
    maximum = _read(core / "cpufreq" / "cpuinfo_max_freq")
    if maximum.isdigit():
        return int(maximum) // 1000
    try:
        return round(float(info.get("cpu mhz", "0")))
    except ValueError:
        return 0
