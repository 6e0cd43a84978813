"""Workers and their fork servers: honest use, life and death, many at once."""

from __future__ import annotations

import os
import resource
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_children import BINDINGS, COUNT, LAYOUT, compile_act, plan_of_act, started

from pytest_cudaforge.errors import LaunchFailure, SandboxError, WorkerCrash
from pytest_cudaforge.evaluation.arena import HostArena
from pytest_cudaforge.evaluation.sandbox import Defences, SandboxSettings
from pytest_cudaforge.evaluation.zygote import ForkServers
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, LibraryCall, TensorSpec, TracedPlan, View

DOUBLE = f"for (int i = 0; i < {COUNT}; i++) out[i] = 2 * in[i];"


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    with ForkServers() as opened:
        yield opened


@pytest.fixture(scope="module")
def double(servers: ForkServers) -> tuple[Binary, ...]:
    return compile_act(servers, DOUBLE)


def test_it_computes(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    with started(servers, double) as act:
        assert act.run(range(COUNT)) == tuple(2 * i for i in range(COUNT))


def test_a_worker_starts_in_milliseconds(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    times_ms = []
    for _ in range(10):
        begun = time.perf_counter()
        servers.worker("cpp").close()
        times_ms.append(1e3 * (time.perf_counter() - begun))
    print(f"start and end of a worker: median {statistics.median(times_ms):.1f} ms")
    assert min(times_ms) < 250  # others may be busy on this machine


def test_calls_rotate_over_buffer_sets(servers: ForkServers) -> None:
    count = compile_act(servers, "out[0] += 1;")
    with started(servers, count) as act, HostArena.create(LAYOUT.nbytes) as second:
        act.worker.attach(1, second)
        other = tuple((1, offset) for _, offset in BINDINGS)
        assert act.worker.run_many([BINDINGS, other], 7, timeout_s=10) > 0
        with second.memory() as memory:
            assert (act.outputs()[0], memory[LAYOUT.offset("out")]) == (4, 3)


def test_the_slope_is_the_time_of_a_call(servers: ForkServers) -> None:
    with started(servers, compile_act(servers, "usleep(1000);")) as act:
        act.worker.run_many([BINDINGS], 5, timeout_s=10)
        once = act.worker.run_many([BINDINGS], 20, timeout_s=10)
        slope_us = (act.worker.run_many([BINDINGS], 40, timeout_s=10) - once) / 20 / 1e3
    assert 500 < slope_us < 6000


def test_a_clean_phase_forgets_static_state(servers: ForkServers) -> None:
    with started(servers, compile_act(servers, "static long calls; out[0] = ++calls;")) as act:
        assert [act.run()[0], act.run()[0]] == [1, 2]
        act.worker.reload("another look")
        assert act.run()[0] == 1


def test_parallel_regions_get_the_threads_they_are_told(servers: ForkServers) -> None:
    source = """
    int team = 0;
    #pragma omp parallel
    {
      #pragma omp atomic
      team++;
    }
    out[0] = team;
    """
    with started(servers, compile_act(servers, source)) as act:
        for count in (1, 3, 2):
            act.worker.set_threads(count)
            assert act.run()[0] == count


def test_prepare_runs_its_own_plan(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    main = plan_of_act().main
    state = Buffer("state", main.buffers[0].spec, "weight")
    prepare = LaunchPlan((state, main.buffers[1]), main.steps, main.outputs)
    with servers.worker("cpp") as worker, HostArena.create(LAYOUT.nbytes) as arena:
        worker.start(TracedPlan(main, prepare), double)
        worker.attach(0, arena)
        with arena.memory() as memory:
            memory[LAYOUT.offset("in")] = 21
        worker.run("prepare", BINDINGS, timeout_s=10)
        with arena.memory() as memory:
            assert memory[LAYOUT.offset("out")] == 42


def test_mistakes_of_the_caller_are_told_and_survived(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    with started(servers, double) as act:
        with pytest.raises(LaunchFailure, match="no prepare plan"):
            act.worker.run("prepare", BINDINGS, timeout_s=10)
        with pytest.raises(LaunchFailure, match="slot 9"):
            act.worker.run("main", [(9, 0), (0, 0)], timeout_s=10)
        with pytest.raises(LaunchFailure, match="outside its arena"):
            act.worker.run("main", [(0, LAYOUT.nbytes - 8), (0, 0)], timeout_s=10)
        with pytest.raises(LaunchFailure, match="device events were asked of the CPU"):
            act.worker.time_events([BINDINGS], 3, flush_bytes=0, timeout_s=10)
        with pytest.raises(ValueError, match="slot 5000"):
            act.worker.attach(5000, act.arena)
        act.worker.detach(7)
        assert act.run([4])[0] == 8


def test_a_plan_whose_kernel_is_missing_is_refused(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    plan = plan_of_act().main
    other = LaunchPlan(plan.buffers, (Launch("absent", plan.launches[0].args),), plan.outputs)
    with servers.worker("cpp") as worker, pytest.raises(LaunchFailure, match="absent"):
        worker.start(TracedPlan(other), double)


def test_stop_and_cont(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    with started(servers, double) as act:
        act.worker.stop()
        assert _state(act.worker.pgid) == "T"
        act.worker.cont()
        assert act.run([1])[0] == 2
        act.worker.stop()
    assert _state(act.worker.pgid) == ""


def test_after_close_a_call_says_the_process_is_gone(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    with started(servers, double) as act:
        act.worker.close()
        act.worker.close()
        with pytest.raises(WorkerCrash, match="gone"):
            act.run()


def test_close_from_another_thread_ends_a_hanging_call(servers: ForkServers) -> None:
    with started(servers, compile_act(servers, "sleep(60);")) as act:
        threading.Timer(0.3, act.worker.close).start()
        begun = time.monotonic()
        with pytest.raises(WorkerCrash):
            act.run(timeout_s=30)
        assert time.monotonic() - begun < 5


def test_several_threads_may_start_workers_at_once(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    results: list[int] = []

    def work(number: int) -> None:
        for _ in range(3):
            with started(servers, double) as act:
                results.append(act.run([number])[0] - 2 * number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [0] * 18


def test_nothing_is_left_after_many_workers(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    with started(servers, double) as act:
        act.run()
    before = len(os.listdir("/proc/self/fd"))
    pids = []
    for _ in range(15):
        with started(servers, double) as act:
            pids.append(act.worker.pgid)
            act.run()
    assert len(os.listdir("/proc/self/fd")) == before
    assert [_state(pid) for pid in pids] == [""] * 15


def test_library_calls_run_in_the_server_with_torch(servers: ForkServers) -> None:
    spec = TensorSpec((2, 2), "float32", (2, 1))
    view = View(0, (2, 2), (2, 1))
    buffers = (Buffer("input", spec, "0"), Buffer("scratch", spec))
    call = LibraryCall("aten.mm", (view, view), (), (1,))
    traced = TracedPlan(LaunchPlan(buffers, (call,), View(1, (2, 2), (2, 1))))
    with servers.worker("cpp", library_calls=True) as worker, HostArena.create(4096) as arena:
        worker.start(traced, [])
        worker.attach(0, arena)
        with arena.memory() as memory:
            memory.cast("f")[:4] = memoryview(bytearray(16)).cast("f")
            for index, value in enumerate((1.0, 2.0, 3.0, 4.0)):
                memory.cast("f")[index] = value
        worker.run("main", [(0, 0), (0, 256)], timeout_s=60)
        with arena.memory() as memory:
            assert memory.cast("f")[64:68].tolist() == [7.0, 10.0, 15.0, 22.0]


def test_isolation_none_runs_and_is_grade_c(double: tuple[Binary, ...]) -> None:
    with ForkServers(SandboxSettings(isolation="none")) as plain:
        assert plain.isolation("cpp").grade == "C"
        with started(plain, double) as act:
            assert act.run([3])[0] == 6


def test_closed_fork_servers_say_so() -> None:
    servers = ForkServers()
    servers.close()
    servers.close()
    with pytest.raises(SandboxError, match="closed"):
        servers.worker("cpp")


def test_a_killed_fork_server_is_started_again(double: tuple[Binary, ...]) -> None:
    with ForkServers() as servers:
        with started(servers, double) as act:
            parent = _ancestor(act.worker.pgid, 3)
            os.kill(parent, signal.SIGKILL)
            with pytest.raises(WorkerCrash):
                for _ in range(200):
                    act.run()
                    time.sleep(0.01)
        with started(servers, double) as act:
            assert act.run([3])[0] == 6


def test_a_python_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with ForkServers() as servers, pytest.raises(SandboxError, match="cannot be started"):
        servers.warm("plain")


def test_descriptors_beyond_the_reach_of_select(servers: ForkServers, double: tuple[Binary, ...]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("the limit of open files is too low")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.dup(0) for _ in range(1100)]
    try:
        with started(servers, double) as act:
            assert act.run([1])[0] == 2
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_death_of_the_supervisor_ends_everything(tmp_path: Path) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, threading, time
            sys.path[:0] = sys.argv[1:]
            from native_children import compile_act, started
            from pytest_cudaforge.evaluation.zygote import ForkServers
            servers = ForkServers()
            with started(servers, compile_act(servers, "for (volatile long i = 0;; i++) {}")) as act:
                threading.Thread(target=lambda: act.run(timeout_s=600), daemon=True).start()
                time.sleep(0.3)
                print(act.worker.pgid, flush=True)
                time.sleep(600)
            """
        )
    )
    tests = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        [sys.executable, str(script), str(tests), str(tests.parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    family = [worker, *(_ancestor(worker, steps) for steps in (1, 2, 3))]
    assert all(_state(pid) for pid in family)
    process.kill()
    process.wait()
    process.stdout.close()
    _wait_for(lambda: not any(_state(pid) not in ("", "Z") for pid in family))


def test_switches_are_for_tests_and_default_to_on() -> None:
    assert all(vars(Defences()).values()) and SandboxSettings().defences == Defences()


def _state(pid: int) -> str:
    """One letter of /proc/<pid>/stat, "" where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _ancestor(pid: int, steps: int) -> int:
    for _ in range(steps):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def _wait_for(condition: object, limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
