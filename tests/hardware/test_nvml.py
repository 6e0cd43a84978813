"""What NVML's readings mean, and whose processes are whose; the library itself only on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence

import pytest

from pytest_cudaforge.evaluation.pressure import DeviceWatch
from pytest_cudaforge.hardware.nvml import (
    DeviceMonitor,
    Reading,
    is_descendant,
    open_monitor,
    others_visible,
    slowed_by,
)

FASTEST_MHZ = 1980
QUIET = Reading(0, FASTEST_MHZ, 5, 0.0)


@pytest.mark.parametrize(
    ("reasons", "cause"),
    [
        (0x00, ""),
        (0x01, ""),  # idle
        (0x02, ""),  # an administrator's clocks
        (0x04, ""),  # the power cap, which a matrix product reaches honestly
        (0x08, "hardware slowdown"),
        (0x24, "thermal slowdown by the driver"),
        (0x40, "thermal slowdown by the hardware"),
        (0x80, "power brake"),
    ],
)
def test_heat_and_brakes_slow_a_device_down(reasons: int, cause: str) -> None:
    assert slowed_by(Reading(reasons, FASTEST_MHZ, None, None), None, FASTEST_MHZ) == cause


def test_throttling_between_two_readings_counts() -> None:
    hot = Reading(0, FASTEST_MHZ, 5 + 20_000_000, 0.0)
    assert slowed_by(hot, QUIET, FASTEST_MHZ) == "thermal slowdown"
    assert slowed_by(hot, None, FASTEST_MHZ) == ""
    assert slowed_by(hot, hot, FASTEST_MHZ) == ""


def test_a_slow_clock_needs_an_honest_reason() -> None:
    assert "800 MHz" in slowed_by(Reading(0, 800, None, None), None, FASTEST_MHZ)
    assert slowed_by(Reading(0x04, 800, None, None), None, FASTEST_MHZ) == ""
    assert slowed_by(Reading(0x01, 800, None, None), None, FASTEST_MHZ) == ""
    assert slowed_by(Reading(0, 1400, None, None), None, FASTEST_MHZ) == ""
    # The power limit was reached since the last reading; the bit is gone already.
    before, after = Reading(0, 800, None, None, 0), Reading(0, 800, None, None, 50_000_000)
    assert slowed_by(after, before, FASTEST_MHZ) == "" and slowed_by(after, after, FASTEST_MHZ)


class Played(DeviceMonitor):
    """Readings that were taken before."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        super().__init__(None, None)
        self._readings = list(readings)

    def read(self, ours: Collection[int] = ()) -> Reading:
        self.last = self._readings.pop(0)
        self.fastest_mhz = max(self.fastest_mhz, self.last.sm_clock_mhz)
        return self.last


def test_a_watch_marks_blocks_and_says_why() -> None:
    used = Reading(0, FASTEST_MHZ, 5, 0.4)
    braked = Reading(0x80, FASTEST_MHZ, 5, 0.0)
    watch = DeviceWatch(Played([QUIET, QUIET, used, braked, Reading(0, FASTEST_MHZ, 5, None)]))
    watch.load()
    assert [watch.look() for _ in range(4)] == [0.0, 1.0, 1.0, 0.0]
    notes = " ".join(watch.notes)
    assert "40%" in notes and "power brake" in notes


def test_the_power_limit_is_told_and_no_more() -> None:
    capped = Reading(0x04, 1500, 5, 0.0)
    watch = DeviceWatch(Played([QUIET, capped, capped]))
    watch.load()
    assert [watch.look() for _ in range(2)] == [0.0, 0.0]
    assert watch.capped and watch.notes == ["the device ran at its power limit"]


def test_children_of_children_are_ours() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1); import os; print(os.getpid(), flush=True); input()'])"  # noqa: E501
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        grandchild = int(child.stdout.readline())
        assert is_descendant(child.pid) and is_descendant(grandchild) and is_descendant(os.getpid())
        assert not is_descendant(1) and not is_descendant(os.getppid())
        child.stdin.close()


def test_numbers_of_another_namespace_tell_nothing() -> None:
    assert others_visible([7, 8, 9], [7, 8])
    assert not others_visible([7, 9], [7, 8]), "one of them may be there by chance"
    assert not others_visible([7], ()) and not others_visible((), [7])


def test_without_nvml_there_is_a_reason() -> None:
    found = open_monitor("GPU-00000000-0000-0000-0000-000000000000")
    assert isinstance(found, str) and found
