"""Clocks on a real GPU: cold means cold, two clocks agree, launch-bound calls have host times, throttling is read."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.attempt import Attempt
from pytest_cudaforge.evaluation.cases import call_layout
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.parties import EventParty, worker_party
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.hardware import detect
from pytest_cudaforge.hardware.nvml import DeviceMonitor, open_monitor, others_visible
from pytest_cudaforge.records import Candidate, Target

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

LAYERS = """
import torch
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(1024, 2048)])
def doubled(x):
    return x * 2


@forge_target(inputs=lambda: [torch.randn(16, 256)])
def tiny(x):
    return torch.sin(torch.cos(x) * 2) + 1
"""

KERNEL = """
__global__ void twice(const float* x, float* y, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = 2.f * x[i];
}
__global__ void waves(const float* x, float* y, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    y[i] = sinf(cosf(x[i]) * 2.f) + 1.f;
}
"""

PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("KERNEL", grid=(264,), block=(512,), args=(x, y, x.numel()))
    return y
"""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    root: Path = tmp_path_factory.mktemp("clocks")
    (root / "layers.py").write_text(LAYERS)
    return {target.qualname: target for target in discover([root / "layers.py"], root).targets}


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    place = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=place, lock_dir=place)) as found:
        yield found


def candidate(kernel: str) -> Candidate:
    return Candidate.of("cuda", {"kernel.cu": KERNEL, "plan.py": PLAN.replace("KERNEL", kernel)})


@contextlib.contextmanager
def seated(evaluator: Evaluator, target: Target) -> Iterator[tuple[Worker, list[list[tuple[int, int]]]]]:
    """A worker with ``twice`` loaded and two frames of values attached."""
    attempt = Attempt(evaluator, candidate("twice"), target, evaluator.facts(target), False)
    attempt.build_for_timing()
    product = attempt._products[0]
    layout = call_layout(product.traced, frames=2)
    bench, arena = evaluator.oracle.open_bench(target, product.workload.name, "", layout.data)
    try:
        evaluator.oracle.fill_all(bench, [1, 2], 0)
        with attempt._worker_of(product) as worker:
            worker.attach(0, arena)
            yield worker, [layout.bindings(frame) for frame in range(2)]
    finally:
        arena.close()
        evaluator.oracle.close_bench(bench)


def test_a_flush_of_twice_the_l2_makes_a_call_cold(evaluator: Evaluator, targets: dict[str, Target]) -> None:
    """16 MiB in and out fit into the L2 of a data centre card: without the flush the input is still there."""
    assert evaluator.flush_bytes == 2 * evaluator.device.l2_bytes > 0
    with seated(evaluator, targets["doubled"]) as (worker, sets):
        times = {
            flush: sorted(worker.time_events(sets[:1], 41, flush_bytes=flush, timeout_s=30).ns)[20]
            for flush in (0, evaluator.flush_bytes)
        }
    hot_ns, cold_ns = times.values()
    print(f"hot {hot_ns / 1e3:.2f} us, cold {cold_ns / 1e3:.2f} us")
    if evaluator.device.l2_bytes < 32 << 20:
        pytest.skip("the L2 is too small to keep both buffers")
    assert cold_ns > 1.15 * hot_ns


def test_both_clocks_see_the_same_calls(evaluator: Evaluator, targets: dict[str, Target]) -> None:
    with seated(evaluator, targets["doubled"]) as (worker, sets):
        party = worker_party(evaluator.oracle, worker, sets, clock="events", flush_bytes=0, limit_s=30)
        assert isinstance(party, EventParty)
        both = party.by_both_clocks(20e6)
        # Calls that do not overlap with anything: events around all of them miss no more than the first launch.
        taken_ns, device_ns = worker.time_run(sets, 2000, timeout_s=30)
    assert both is not None
    print(f"supervisor {both[0]:.0f} ns, events {both[1]:.0f} ns a call; 2000 calls {taken_ns} and {device_ns} ns")
    assert device_ns < taken_ns
    assert both[0] == pytest.approx(both[1], rel=0.15)


def test_launch_bound_calls_have_device_and_host_times(evaluator: Evaluator, targets: dict[str, Target]) -> None:
    verdict = evaluator.evaluate(candidate("waves"), targets["tiny"])
    assert verdict.passed and verdict.timing is not None, verdict.reason
    (workload,) = verdict.timing.workloads
    print(f"{workload}\n{verdict.timing.note}")
    assert workload.host is not None and workload.host.eager_ns is not None
    assert 0 < workload.host.candidate_ns < workload.host.eager_ns
    assert workload.host.device_ns > 0
    assert "left out" not in verdict.timing.note, "nobody else uses this device while it is timed"


# -- NVML --------------------------------------------------------------------------------------------------------


@pytest.fixture
def monitor() -> DeviceMonitor:
    found = open_monitor(detect(f"cuda:{torch.cuda.current_device()}").uuid)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def test_reading_a_device_takes_little(monitor: DeviceMonitor) -> None:
    monitor.read()
    began = time.perf_counter()
    readings = [monitor.read() for _ in range(20)]
    each_ms = (time.perf_counter() - began) * 50
    print(f"{each_ms:.2f} ms a reading; {readings[-1]}; running {monitor.running()}")
    assert readings[-1].sm_clock_mhz > 100
    assert each_ms < 50


LOAD = """
import os, sys, time, torch
print(os.getpid(), flush=True)
a = torch.randn(4096, 4096, device="cuda")
end = time.time() + 8
while time.time() < end:
    (a @ a).sum().item()
"""


def test_another_process_on_the_device_is_seen(monitor: DeviceMonitor, tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    if shutil.which("setsid") is None or not others_visible(monitor.running() or (), [os.getpid()]):
        pytest.skip("NVML does not show this process by its number: others cannot be told here")
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    # Its parent ends at once, so that it is nobody's child here.
    subprocess.run(["setsid", "-f", sys.executable, str(script)], stdout=(tmp_path / "pid").open("w"), check=True)
    seen = 0.0
    try:
        for _ in range(24):
            time.sleep(0.25)
            seen = max(seen, monitor.read([os.getpid()]).others or 0.0)
    finally:
        pid = (tmp_path / "pid").read_text().split()
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(int(pid[0]), signal.SIGKILL)
    print(f"others used it for {seen:.0%} of the time")
    assert seen > 0.1
