"""Is the GPU slowed down, or used by somebody else? NVIDIA's management library, through ``nvidia-ml-py``; optional.

It makes no CUDA context, so the process that writes the verdict may ask it. Without the package, the library or the
permission nothing is known, and nothing is disturbed.

What counts as slowed down: thermal slowdown by hardware or software, the power brake, and the hardware's own
slowdown, seen at the moment of reading or, where the driver counts it, at any time since the last one; and a clock far
below the fastest one seen with no such reason given. The software's **power cap does not count**: matrix products of
baseline and candidate alike run into it on a data centre card, honestly and on every user's machine as well; it is
told, no more. Clocks that an administrator fixed do not count either: they are the same for everybody.

Processes are told apart by their numbers. In a container the library may list none, or by numbers of another
namespace; then those of ours that use the device are not in the list, and others cannot be told.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DeviceMonitor", "Reading", "open_monitor", "others_visible", "power_capped", "slowed_by"]

#: Bits of NVML's clocks event reasons.
_POWER_CAP = 0x04
_SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
_IDLE = 0x01
#: Below this share of the fastest clock seen, with no reason that would be honest, the device was slowed down.
#: (Products at the power limit run at three quarters of it, and the bit that says so is gone when they end.)
_SLOW_CLOCK = 0.6
#: Throttling of so much time between two readings is more than the counter's grain.
_LEAST_THROTTLED_NS = 1_000_000
#: Answers that will not change.
_FOR_GOOD = ("NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND")


@dataclass(frozen=True)
class Reading:
    """The device at one moment.

    ``thermal_ns`` and ``power_ns``: how long it was throttled by heat, and by its power limit, since the driver
    started; None where that is not counted. ``others``: share of the time since the last reading in which other
    processes used it; None where that is not known.
    """

    reasons: int
    sm_clock_mhz: int
    thermal_ns: int | None
    others: float | None
    power_ns: int | None = None


def power_capped(reading: Reading, before: Reading | None) -> bool:
    """Did the device run at its power limit, now or since the reading before?"""
    counted = before is not None and _throttled(reading.power_ns, before.power_ns)
    return bool(reading.reasons & _POWER_CAP) or counted


def _throttled(now_ns: int | None, before_ns: int | None) -> bool:
    """Did a counter of throttled time move? Not where it was not there."""
    return now_ns is not None and before_ns is not None and now_ns - before_ns > _LEAST_THROTTLED_NS


def slowed_by(reading: Reading, before: Reading | None, fastest_mhz: int) -> str:
    """Why the device was slower than it can be between two readings; "" where it was not."""
    for bit, name in _SLOWDOWNS.items():
        if reading.reasons & bit:
            return name
    if before is not None and _throttled(reading.thermal_ns, before.thermal_ns):
        return "thermal slowdown"
    honest = power_capped(reading, before) or reading.reasons & _IDLE
    if not honest and reading.sm_clock_mhz < _SLOW_CLOCK * fastest_mhz:
        return f"an SM clock of {reading.sm_clock_mhz} MHz, {fastest_mhz} MHz before"
    return ""


def open_monitor(uuid: str) -> DeviceMonitor | str:
    """The monitor of the GPU with this UUID (``GPU-...``), or why there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        return DeviceMonitor(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return f"NVML cannot be used: {error}"


@dataclass
class DeviceMonitor:
    """One device through NVML. A reading takes well under a millisecond; take it between blocks, never inside one.

    Not for two threads at once.
    """

    nvml: Any
    handle: Any
    last: Reading | None = None
    fastest_mhz: int = 0
    _seen_us: int = 0
    _lost: set[str] = field(default_factory=set)

    def read(self, ours: Collection[int] = ()) -> Reading:
        """The device now. ``ours``: ids of processes of ours that use it; descendants of this process are not others
        either. Without any nobody is told apart."""
        nvml, handle = self.nvml, self.handle
        reasons = self._ask("reasons", lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)))
        clock = self._ask("clock", lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
        thermal_ns = self._throttled_ns("thermal", nvml.NVML_PERF_POLICY_THERMAL)
        power_ns = self._throttled_ns("power", nvml.NVML_PERF_POLICY_POWER)
        reading = Reading(reasons or 0, clock or 0, thermal_ns, self._others(ours), power_ns)
        self.last, self.fastest_mhz = reading, max(self.fastest_mhz, reading.sm_clock_mhz)
        return reading

    def _throttled_ns(self, what: str, policy: int) -> int | None:
        """How long the device was throttled for this cause since the driver started."""
        ask = self.nvml.nvmlDeviceGetViolationStatus
        found = self._ask(what, lambda: int(ask(self.handle, policy).violationTime))
        return None if found is None else int(found)

    def _ask(self, what: str, question: Callable[[], Any]) -> Any:
        """The answer, or None; what a device does not tell once it is not asked again."""
        if what in self._lost:
            return None
        try:
            return question()
        except self.nvml.NVMLError as error:
            if error.value in [getattr(self.nvml, f"NVML_ERROR_{name}") for name in _FOR_GOOD]:
                self._lost.add(what)
            return None
        except self.nvml.NVMLLibraryMismatchError:
            self._lost.add(what)  # the driver's library is older than the package
            return None

    def running(self) -> frozenset[int] | None:
        """Process ids with a compute context on the device, as NVML numbers them; None where it does not tell."""
        found = self._ask("processes", lambda: self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle))
        return None if found is None else frozenset(int(process.pid) for process in found)

    def _others(self, ours: Collection[int]) -> float | None:
        running = self.running()
        if running is None or not others_visible(running, ours):
            return None
        foreign = {pid for pid in running if pid not in ours and not is_descendant(pid)}
        samples = self._ask("use", self._samples)
        if not foreign:
            return 0.0
        if samples is None:
            return None
        moments = {int(sample.timeStamp) for sample in samples}
        used = sum(int(sample.smUtil) for sample in samples if int(sample.pid) in foreign)
        return min(1.0, used / (100.0 * max(1, len(moments))))

    def _samples(self) -> list[Any]:
        """Per process use of the multiprocessors since the last time this was asked."""
        try:
            found = list(self.nvml.nvmlDeviceGetProcessUtilization(self.handle, self._seen_us))
        except self.nvml.NVMLError as error:
            if error.value == self.nvml.NVML_ERROR_NOT_FOUND:
                return []  # nobody used it
            raise
        fresh = [sample for sample in found if int(sample.timeStamp) > self._seen_us]
        self._seen_us = max([self._seen_us, *(int(sample.timeStamp) for sample in fresh)])
        return fresh


def others_visible(running: Collection[int], ours: Collection[int]) -> bool:
    """Are the numbers of a list of running processes those by which we know them? They are where all of our own that
    use the device are among them; one alone might be there by chance."""
    return bool(ours) and all(pid in running for pid in ours)


def is_descendant(pid: int) -> bool:
    """Is the process this one, or a child of its children? False for one that is gone or not to be seen."""
    me, seen = os.getpid(), 0
    while pid > 1 and pid != me and seen < 64:
        pid, seen = _parent(pid), seen + 1
    return pid == me


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            # The name before the parent's number may hold spaces and brackets.
            return int(stream.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
