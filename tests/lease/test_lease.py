"""The device's lease: work overlaps, timing is alone, groups stand still meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.lease import DeviceLease


def _in_thread(action: object) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def test_work_overlaps_and_timing_waits_for_it(tmp_path: Path) -> None:
    lease, events = DeviceLease("cpu", lock_dir=tmp_path), []
    both = threading.Barrier(3)
    leave = threading.Event()

    def work() -> None:
        with lease.work():
            both.wait(5)
            leave.wait(5)
            events.append("work ended")

    def timing() -> None:
        with lease.timing():
            events.append("timed")

    workers = [_in_thread(work), _in_thread(work)]
    both.wait(5)
    timer = _in_thread(timing)
    time.sleep(0.05)
    assert events == []
    leave.set()
    for thread in [*workers, timer]:
        thread.join(5)
    assert events == ["work ended", "work ended", "timed"]


def test_waiting_timing_holds_new_work_back(tmp_path: Path) -> None:
    lease, order = DeviceLease("cpu", lock_dir=tmp_path), []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with lease.work():
            inside.set()
            leave.wait(5)

    def timing() -> None:
        with lease.timing():
            order.append("timing")

    def second() -> None:
        with lease.work():
            order.append("work")

    threads = [_in_thread(first)]
    inside.wait(5)
    threads.append(_in_thread(timing))
    time.sleep(0.05)
    threads.append(_in_thread(second))
    time.sleep(0.05)
    leave.set()
    for thread in threads:
        thread.join(5)
    assert order == ["timing", "work"]


def test_nesting_in_one_thread_does_not_lock_up(tmp_path: Path) -> None:
    lease = DeviceLease("cpu", lock_dir=tmp_path)
    with lease.timing(), lease.work(), lease.timing():
        pass
    with lease.work(), lease.work():
        pass


def test_two_processes_of_one_host_take_turns(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom pytest_cudaforge.lease import DeviceLease\n"
        "with DeviceLease('cuda:0', identity='GPU-1', lock_dir=Path(sys.argv[1])).timing():\n"
        "    print('held', flush=True)\n    time.sleep(0.5)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    impatient = DeviceLease("cuda:0", identity="GPU-1", lock_dir=tmp_path, timeout_s=0.1)
    with (
        pytest.raises(DeviceError, match=r"no exclusive use of cuda:0 within 0.1 s: another process"),
        impatient.timing(),
    ):
        pass
    with DeviceLease("cuda:1", identity="GPU-2", lock_dir=tmp_path).timing():
        assert other.poll() is None
    with DeviceLease("cuda:0", identity="GPU-1", lock_dir=tmp_path).timing():
        assert other.wait(5) == 0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _wait_for(pid: int, state: str) -> bool:
    for _ in range(100):
        if (_state(pid) == "T") == (state == "T"):
            return True
        time.sleep(0.01)
    return False


def test_registered_groups_stand_still_while_the_cpu_is_timed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    lease = DeviceLease("cpu", lock_dir=tmp_path)
    try:
        lease.register(child.pid)
        with lease.timing():
            assert _wait_for(child.pid, "T")
        assert _wait_for(child.pid, "S")
        lease.unregister(child.pid)
        with lease.timing():
            assert _state(child.pid) != "T"
        lease.unregister(child.pid)  # twice does nothing
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_a_group_that_is_gone_does_not_matter(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"], start_new_session=True)
    child.wait()
    lease = DeviceLease("cpu", lock_dir=tmp_path)
    lease.register(child.pid)
    with lease.timing():
        pass
