"""What the CUDA driver needs of the sandbox, tried without a GPU: thread names in /proc, but no kernel settings."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from native_children import BINDINGS, LAYOUT, compile_act, plan_of_act

from pytest_cudaforge.errors import DeviceError
from pytest_cudaforge.evaluation.arena import HostArena
from pytest_cudaforge.evaluation.zygote import ForkServers

_NAMES = """
static void* rest(void*) { sleep(5); return nullptr; }
static int renames() {
    // As the driver does it: the file of a thread, truncated.
    pthread_t thread;
    pthread_create(&thread, nullptr, rest, nullptr);
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%ld/comm", (long)syscall(SYS_gettid));
    FILE* file = fopen(path, "w");
    return file && fputs("cuda-EvtHandlr", file) >= 0 && fclose(file) == 0;
}
static int writable(const char* path) { return open(path, O_WRONLY) >= 0; }
"""


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    with ForkServers() as opened:
        yield opened


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # cuInit answers 304 (operating system) where this fails: drivers 570 and newer
        ("out[0] = renames();", 1),
        ('pthread_t t; pthread_create(&t, nullptr, rest, nullptr); out[0] = pthread_setname_np(t, "cuda") == 0;', 1),
        ('out[0] = writable("/proc/sys/kernel/hostname") || writable("/proc/sys/vm/drop_caches");', 0),
        ('out[0] = writable("/proc/sysrq-trigger");', 0),
    ],
)
def test_proc_of_a_cuda_worker(servers: ForkServers, body: str, expected: int) -> None:
    binaries = compile_act(servers, body, _NAMES)
    with servers.worker("cuda") as worker, HostArena.create(LAYOUT.nbytes) as arena:
        worker.start(plan_of_act(), binaries, "cpu")
        worker.attach(0, arena)
        worker.run("main", BINDINGS, timeout_s=10)
        with arena.memory() as memory:
            assert memory[LAYOUT.offset("out")] == expected


def test_a_machine_without_a_driver_is_a_bad_situation_not_a_bad_candidate(servers: ForkServers) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        binaries = compile_act(servers, "out[0] = 1;")
        with servers.worker("cuda") as worker, pytest.raises(DeviceError, match="CUDA"):
            worker.start(plan_of_act(), binaries, "cuda:0")
    else:
        pytest.skip("there is a CUDA driver here")
