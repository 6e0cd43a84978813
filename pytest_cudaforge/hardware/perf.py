"""Counters and samples of another process on this CPU, through the kernel's ``perf_event_open``; no ``perf`` needed.

It counts and samples what runs in user space only: that is the candidate's part, and what a user without privileges may
see. Who looks sits in the supervisor; the process looked at takes no part in it and cannot change a figure but by
working.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EVENTS", "Counters", "Counts", "PerfProbe", "PerfRefused", "Sampler", "counters", "probe", "sampler"]

_SYSCALL = {"x86_64": 298, "aarch64": 241, "ppc64le": 319, "riscv64": 241, "s390x": 331}
_HARDWARE, _SOFTWARE, _CACHE = 0, 1, 3
_CPU_CLOCK = 0
#: cache | operation << 8 | result << 16, of PERF_TYPE_HW_CACHE: read misses.
_L1D_READ_MISS, _DTLB_READ_MISS = 0 | 0 << 8 | 1 << 16, 3 | 0 << 8 | 1 << 16
#: By perf's own names: (type, config). What a CPU lacks is left out; what exceeds its registers is counted in turns.
EVENTS: dict[str, tuple[int, int]] = {
    "cycles": (_HARDWARE, 0),
    "instructions": (_HARDWARE, 1),
    "cache-references": (_HARDWARE, 2),
    "cache-misses": (_HARDWARE, 3),
    "branches": (_HARDWARE, 4),
    "branch-misses": (_HARDWARE, 5),
    "L1-dcache-load-misses": (_CACHE, _L1D_READ_MISS),
    "dTLB-load-misses": (_CACHE, _DTLB_READ_MISS),
}

#: struct perf_event_attr as of its first version, which every kernel takes.
_ATTRIBUTES = struct.Struct("<IIQQQQQIIQ")
_DISABLED, _INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR, _FREQUENCY = 1 << 0, 1 << 1, 1 << 5, 1 << 6, 1 << 10
_SAMPLE_IP = 1
_WITH_TIMES = 1 | 2  # PERF_FORMAT_TOTAL_TIME_ENABLED | _RUNNING
_CLOSE_ON_EXEC = 8
_ENABLE, _DISABLE = 0x2400, 0x2401
#: Offsets into the page before a ring of samples.
_HEAD, _TAIL = 1024, 1032
_RECORD = struct.Struct("<IHH")
_RECORD_SAMPLE = 9
_RING_PAGES = 16
_SETTINGS = Path("/proc/sys/kernel")


@dataclass(frozen=True)
class Counts:
    """What was counted: (name, value). ``running``: the least share of the time in which a counter ran; below 1 the CPU
    has fewer registers than events were asked, and values are extrapolated."""

    values: tuple[tuple[str, float], ...]
    running: float

    def get(self, name: str) -> float | None:
        """The count of one event, None where it was not counted."""
        return dict(self.values).get(name)


class PerfRefused(OSError):
    """The kernel does not let this process look; ``remedy`` is for the machine's administrator."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


# -- counting ----------------------------------------------------------------------------------------------------


class Counters:
    """Hardware counters of one process and of every thread that it starts from now on. A context manager."""

    def __init__(self, files: dict[str, int]) -> None:
        self._files = files

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[Counts]]:
        """Count while the block runs; its one element comes when it ends."""
        found: list[Counts] = []
        before = {name: _read(file) for name, file in self._files.items()}
        self._all(_ENABLE)
        try:
            yield found
        finally:
            self._all(_DISABLE)
        found.append(_counts({name: _since(before[name], _read(file)) for name, file in self._files.items()}))

    def _all(self, request: int) -> None:
        for file in self._files.values():
            fcntl.ioctl(file, request, 0)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def counters(pid: int, events: Mapping[str, tuple[int, int]] = EVENTS) -> Counters:
    """Counters of process ``pid``; attach them before it starts threads. Raises PerfRefused where there are none.

    ``events``: (type, config) by name, as in the kernel's ``perf_event_attr``; the first one has to be there.
    """
    files: dict[str, int] = {}
    for name, (kind, config) in events.items():
        try:
            files[name] = _open(pid, kind, config, _INHERIT)
        except PerfRefused:
            # A CPU may lack one of the others; without cycles it has no counters for us.
            if not files:
                raise
    return Counters(files)


def _read(file: int) -> tuple[int, int, int]:
    value, enabled, running = struct.unpack("<QQQ", os.read(file, 24))
    return value, enabled, running


def _since(before: tuple[int, int, int], after: tuple[int, int, int]) -> tuple[int, int, int]:
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _counts(raw: dict[str, tuple[int, int, int]]) -> Counts:
    values = tuple((name, value * enabled / running) for name, (value, enabled, running) in raw.items() if running)
    shares = [running / enabled for _, enabled, running in raw.values() if running and enabled]
    return Counts(values, min(shares, default=0.0))


# -- sampling ----------------------------------------------------------------------------------------------------


class Sampler:
    """Takes the instruction's address of one thread many times a second. A context manager.

    ``clock``: "cycles", or "time" where the CPU has no counters for us and the kernel's own clock is used.
    """

    def __init__(self, file: int, clock: str) -> None:
        self._file, self.clock = file, clock
        try:
            self._ring = mmap.mmap(file, (1 + _RING_PAGES) * mmap.PAGESIZE)
        except OSError as error:
            os.close(file)
            raise PerfRefused(f"no memory for samples: {error}", "sysctl kernel.perf_event_mlock_kb=516") from error

    @contextlib.contextmanager
    def sampling(self) -> Iterator[list[int]]:
        """Sample while the block runs; the addresses are there when it ends."""
        found: list[int] = []
        self._drain()
        fcntl.ioctl(self._file, _ENABLE, 0)
        try:
            yield found
        finally:
            fcntl.ioctl(self._file, _DISABLE, 0)
        found += self._drain()

    def _drain(self) -> list[int]:
        """What lies in the ring; the newest samples are lost where it is full."""
        (head,), (tail,) = struct.unpack_from("<Q", self._ring, _HEAD), struct.unpack_from("<Q", self._ring, _TAIL)
        size = _RING_PAGES * mmap.PAGESIZE
        data = self._ring[mmap.PAGESIZE : mmap.PAGESIZE + size]
        found = []
        while tail < head:
            # Records are multiples of eight bytes, so that no header is cut in two by the ring's end.
            kind, _, nbytes = _RECORD.unpack_from(data, tail % size)
            if kind == _RECORD_SAMPLE:
                found.append(struct.unpack_from("<Q", data, (tail + _RECORD.size) % size)[0])
            if not nbytes:
                break
            tail += nbytes
        struct.pack_into("<Q", self._ring, _TAIL, head)
        return found

    def close(self) -> None:
        if self._file >= 0:
            self._ring.close()
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sampler(tid: int, per_second: int = 9973) -> Sampler:
    """A sampler of thread ``tid``; a prime rate keeps in step with no loop. Raises PerfRefused."""
    # The kernel lowers its limit by itself where interrupts took long, and refuses what is above it.
    per_second = min(per_second, _setting("perf_event_max_sample_rate") or per_second)
    try:
        file, clock = _open(tid, *EVENTS["cycles"], _FREQUENCY, per_second, _SAMPLE_IP), "cycles"
    except PerfRefused:
        file, clock = _open(tid, _SOFTWARE, _CPU_CLOCK, _FREQUENCY, per_second, _SAMPLE_IP), "time"
    return Sampler(file, clock)


# -- the door ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerfProbe:
    """What this process may see of its own children. ``counters``: perf's names of the events that can be counted."""

    counters: tuple[str, ...]
    sampling: bool
    reason: str = ""
    remedy: str = ""


def probe() -> PerfProbe:
    """Try each event on the calling thread, and sampling by the clock; nothing is left open."""
    names, refused = [], None
    for name, (kind, config) in EVENTS.items():
        try:
            os.close(_open(0, kind, config, _INHERIT))
            names.append(name)
        except PerfRefused as error:
            refused = refused or error
    try:
        sampler(0).close()
        sampling = True
    except PerfRefused as error:
        sampling, refused = False, error
    if names or refused is None:
        return PerfProbe(tuple(names), sampling)
    return PerfProbe((), sampling, refused.reason, refused.remedy)


def _open(pid: int, kind: int, config: int, flags: int, rate: int = 0, sample: int = 0) -> int:
    """A descriptor of one event, disabled. Raises PerfRefused."""
    number = _SYSCALL.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        raise PerfRefused(f"perf_event_open is not known here ({sys.platform}, {platform.machine()})")
    flags |= _DISABLED | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
    packed = _ATTRIBUTES.pack(
        kind, _ATTRIBUTES.size, config, rate, sample, 0 if sample else _WITH_TIMES, flags, 0, 0, 0
    )
    file = _libc().syscall(number, ctypes.c_char_p(packed), pid, -1, -1, ctypes.c_ulong(_CLOSE_ON_EXEC))
    if file < 0:
        raise _refusal(ctypes.get_errno(), pid)
    return int(file)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _refusal(code: int, pid: int) -> PerfRefused:
    """What an error of the system call means, and what the administrator can do."""
    level = _setting("perf_event_paranoid")
    if code in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL):
        where = "this virtual machine shows no" if _is_virtual() else "this CPU or its kernel driver offers no"
        return PerfRefused(
            f"{where} hardware counters ({errno.errorcode[code]})",
            "expose the PMU to the guest (for KVM `-cpu host,pmu=on`, on a cloud a bare-metal instance)",
        )
    if code == errno.ENOSYS:
        return PerfRefused("the kernel has no perf_event_open", "a kernel with CONFIG_PERF_EVENTS")
    if code in (errno.EPERM, errno.EACCES) and level is not None and level > 2:
        return PerfRefused(
            f"perf_event_paranoid is {level}", "as administrator `sysctl kernel.perf_event_paranoid=2`, or CAP_PERFMON"
        )
    if code in (errno.EPERM, errno.EACCES):
        what = "perf_event_open is forbidden" if not pid else f"process {pid} may not be looked at"
        return PerfRefused(
            f"{what} ({errno.errorcode[code]}; perf_event_paranoid is {level})",
            "in a container: `--cap-add PERFMON` and a seccomp profile that allows perf_event_open",
        )
    return PerfRefused(f"perf_event_open failed: {os.strerror(code)}")


def _setting(name: str) -> int | None:
    try:
        return int((_SETTINGS / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _is_virtual() -> bool:
    try:
        return " hypervisor" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
