"""Are others busy on this machine? Linux's pressure stall information: how long some task waited for a core; and on a
GPU what NVML tells (:mod:`hardware.nvml`).

Nobody waits where the timed party has the cores to itself. Where kernel or driver do not tell, nothing is known and
every share is 0.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from pytest_cudaforge.hardware.nvml import DeviceMonitor, Reading, is_descendant, power_capped, slowed_by

__all__ = ["CoreUsers", "DeviceLoad", "DeviceWatch", "ForeignLoad", "Load", "stalled_share", "wait_for_quiet"]

_WINDOW_S = 0.25
#: Others that use a GPU for more than this share of the time disturb whoever is timed there: kernels take turns.
_USED_BY_OTHERS = 0.1
#: What happened before a block must not be laid at its door.
_STALE_S = 0.05
#: Of one core.
_WORTH_NAMING = 0.1


class Load(Protocol):
    """What happens on a device from its construction on."""

    def share(self) -> float:
        """Share of that time which somebody or something else took."""


class ForeignLoad:
    """Linux's own account of tasks that waited for a core (pressure stall information), where there is one."""

    def __init__(self) -> None:
        self._begin, self._began_ns = _stalled_us(), time.perf_counter_ns()

    def share(self) -> float:
        """Share of the time since construction in which some task waited."""
        elapsed_us = (time.perf_counter_ns() - self._began_ns) / 1e3
        return max(0.0, (_stalled_us() - self._begin) / max(elapsed_us, 1.0))


class DeviceWatch:
    """One GPU over many blocks; remembers for a note what slowed it down. ``ours`` names processes that are ours."""

    def __init__(self, monitor: DeviceMonitor, ours: Callable[[], Collection[int]] = tuple) -> None:
        self._monitor, self._ours = monitor, ours
        self._readings = self._capped = 0
        self._read_s = -1.0
        self._causes: dict[str, None] = {}

    def load(self) -> DeviceLoad:
        """For one block; reads only where the last reading is no longer the block's beginning."""
        if self._read_s < 0 or time.monotonic() - self._read_s > _STALE_S:
            self._read()
        return DeviceLoad(self)

    def look(self) -> float:
        """Read the device; 1.0 where it was slowed down or used by others since the last look."""
        before = self._monitor.last
        reading = self._read()
        self._readings += 1
        self._capped += power_capped(reading, before)
        return self._judged(reading, before)

    def _read(self) -> Reading:
        reading = self._monitor.read(self._ours())
        self._read_s = time.monotonic()
        return reading

    def _judged(self, reading: Reading, before: Reading | None) -> float:
        cause = slowed_by(reading, before, self._monitor.fastest_mhz)
        others = reading.others or 0.0
        if not cause and others <= _USED_BY_OTHERS:
            return others
        self._causes[cause or f"others used the device for {others:.0%} of the time"] = None
        return 1.0

    @property
    def capped(self) -> bool:
        """Was the device at its power limit most of the time?"""
        return self._capped > self._readings / 2

    @property
    def notes(self) -> list[str]:
        """What was seen, in words."""
        found = [f"blocks were left out: {cause}" for cause in list(self._causes)[:3]]
        if self.capped:
            found.append("the device ran at its power limit")
        return found


class DeviceLoad:
    """A GPU during one block. It is read once, at the block's end: reading must not cost time inside."""

    def __init__(self, watch: DeviceWatch) -> None:
        self._watch = watch

    def share(self) -> float:
        """1.0 where the block is of no use, else the share of the time that other processes used the device."""
        return self._watch.look()


class CoreUsers:
    """Who used this machine's cores from its construction on, of the processes that are to be seen from here."""

    def __init__(self) -> None:
        self._before, self._began_s = _core_ticks(), time.monotonic()

    def busiest(self, count: int = 2) -> list[str]:
        """Others than this process and its descendants that used a tenth of a core: "cc1plus (process 7131) 95 %"."""
        elapsed = max(time.monotonic() - self._began_s, 1e-3) * os.sysconf("SC_CLK_TCK")
        now = _core_ticks()
        shares = {pid: (ticks - self._before.get(pid, ("", 0))[1]) / elapsed for pid, (_, ticks) in now.items()}
        found = sorted((pid for pid, share in shares.items() if share >= _WORTH_NAMING), key=lambda pid: -shares[pid])
        others = [pid for pid in found if not is_descendant(pid)][:count]
        return [f"{now[pid][0]} (process {pid}) {100 * shares[pid]:.0f} %" for pid in others]


def _core_ticks() -> dict[int, tuple[str, int]]:
    """Name and clock ticks of every process that is to be seen."""
    found = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The name, in brackets, may hold anything, brackets included.
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        found[int(entry.name)] = (head.partition("(")[2], int(fields[11]) + int(fields[12]))
    return found


def _pressure(name: str) -> float:
    try:
        text = Path("/proc/pressure/cpu").read_text(encoding="ascii")
    except OSError:
        return 0.0
    return float(text.split(f"{name}=", 1)[1].split()[0])


def _stalled_us() -> int:
    return int(_pressure("total"))


def stalled_share() -> float:
    """Share of the last minute in which some task of this machine waited for a core; 0 where Linux does not tell."""
    return _pressure("avg60") / 100.0


def wait_for_quiet(limit_s: float, most: float, load_of: Callable[[], Load] = ForeignLoad) -> None:
    """Return once nobody took more than the share ``most`` of a moment, or after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        load = load_of()
        time.sleep(_WINDOW_S)
        if load.share() <= most:
            return
