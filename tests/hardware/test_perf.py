"""Counters and samples of another process: real ones, and what the kernel says where it refuses."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge.hardware import perf

PROBE = perf.probe()
BUSY = "x = 0\nprint('go', flush=True)\nwhile True: x += 1"


@pytest.fixture
def busy() -> Iterator[int]:
    """The process id of one that never rests."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.skipif(not PROBE.sampling, reason=f"no sampling here: {PROBE.reason}")
def test_samples_lie_in_the_code_that_runs(busy: int) -> None:
    maps = Path(f"/proc/{busy}/maps").read_text()
    ranges = [line.split()[0].split("-") for line in maps.splitlines() if "x" in line.split()[1]]
    found: list[int] = []
    with perf.sampler(busy) as sampler:
        for _ in range(50):
            with sampler.sampling() as addresses, subprocess.Popen(["sleep", "0.02"]) as pause:
                pause.wait()
            found += addresses
            if found:
                break
    assert found
    assert any(int(start, 16) <= address < int(end, 16) for address in found for start, end in ranges)


@pytest.mark.skipif("cycles" not in PROBE.counters, reason=f"no hardware counters here: {PROBE.reason}")
def test_counters_of_a_busy_process_count(busy: int) -> None:
    with perf.counters(busy) as counters, counters.counting() as counted, subprocess.Popen(["sleep", "0.1"]) as pause:
        pause.wait()
    (counts,) = counted
    assert (counts.get("cycles") or 0) > 1000 and (counts.get("instructions") or 0) > 1000
    assert 0 < counts.running <= 1


SOFTWARE = {"task-clock": (1, 1), "page-faults": (1, 2)}
#: Touches fresh memory in a thread that is started when it is told to.
THREADED = """
import sys, threading
print('go', flush=True)
sys.stdin.readline()
parts = []
thread = threading.Thread(target=lambda: parts.append(bytearray(1 << 24)))
thread.start()
thread.join()
print('done', flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not PROBE.sampling, reason=f"perf_event_open is refused here: {PROBE.reason}")
def test_threads_that_start_later_are_counted_too() -> None:
    """With events that the kernel counts itself: the same calls as for those of a CPU."""
    argv = [sys.executable, "-c", THREADED]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        with perf.counters(process.pid, SOFTWARE) as counters:
            with counters.counting() as counted:
                process.stdin.write("\n")
                process.stdin.flush()
                process.stdout.readline()
            with counters.counting() as idle:
                pass
        process.communicate("\n")
    assert (counted[0].get("task-clock") or 0) > 1e5  # ns
    assert (counted[0].get("page-faults") or 0) >= 8  # 16 MiB, were they in the largest of pages
    assert (idle[0].get("page-faults") or 0) == 0
    assert counted[0].get("cycles") is None


@pytest.mark.skipif("cycles" in PROBE.counters, reason="this CPU has counters for us")
def test_without_counters_the_reason_and_the_remedy_are_told(busy: int) -> None:
    assert PROBE.reason and PROBE.remedy and not PROBE.counters
    with pytest.raises(perf.PerfRefused) as refused:
        perf.counters(busy)
    assert refused.value.reason == PROBE.reason


def test_a_process_that_is_gone_cannot_be_watched() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    with pytest.raises(perf.PerfRefused, match="perf_event_open"):
        perf.sampler(process.pid)


@pytest.mark.parametrize(
    ("code", "level", "words", "remedy"),
    [
        (errno.ENOENT, "1", "no hardware counters", "PMU"),
        (errno.EACCES, "4", "perf_event_paranoid is 4", "sysctl kernel.perf_event_paranoid=2"),
        (errno.EPERM, "2", "may not be looked at", "--cap-add PERFMON"),
        (errno.ENOSYS, "2", "no perf_event_open", "CONFIG_PERF_EVENTS"),
    ],
)
def test_a_refusal_names_what_its_administrator_can_do(
    code: int, level: str, words: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "perf_event_paranoid").write_text(level)
    monkeypatch.setattr(perf, "_SETTINGS", tmp_path)
    refusal = perf._refusal(code, 4711)
    assert words in refusal.reason and remedy in refusal.remedy
    assert "sudo" not in refusal.remedy
