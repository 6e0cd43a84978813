"""Candidates that lie, leave, hang or hog: the supervisor gets a typed failure in time, never a pass."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from native_children import COUNT, LAYOUT, compile_act, plan_of_act, started

from pytest_cudaforge.errors import CandidateError, WorkerCrash, WorkerProtocol, WorkerTimeout
from pytest_cudaforge.evaluation.arena import HostArena
from pytest_cudaforge.evaluation.sandbox import Defences, Limits
from pytest_cudaforge.evaluation.zygote import ForkServers

#: The channel is the only socket; found by asking each descriptor for its socket type.
_FIND_CHANNEL = """
static int channel() {
    for (int fd = 3; fd < 256; fd++) {
        int kind; socklen_t size = sizeof kind;
        if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) == 0) return fd;
    }
    return -1;
}
"""


def _failure(servers: ForkServers, body: str, before: str = "", limits: Limits | None = None) -> CandidateError:
    """What running ``body`` raises within its limit of one second."""
    with started(servers, compile_act(servers, body, before), limits) as act:
        with pytest.raises(CandidateError) as caught:
            act.run(timeout_s=1)
        return caught.value


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("*(volatile long long*)8 = in[0];", "SIGSEGV"),
        ("volatile long long zero = in[0]; out[0] = (in[1] + 9) / zero;", "SIGFPE"),
        ("abort();", "SIGABRT"),
        ("__builtin_trap();", "SIGILL"),
        ("char page[4096]; volatile char* p = page; for (long i = 0;; i += 64) p[-i] = 1;", "SIGSEGV"),
    ],
)
def test_a_crash_names_its_signal_and_the_phase(guarded: ForkServers, body: str, name: str) -> None:
    failure = _failure(guarded, body)
    assert isinstance(failure, WorkerCrash)
    assert failure.signal == name and failure.phase == "running main"
    assert name in str(failure) and "running main" in str(failure)


def test_leaving_early_is_no_answer(guarded: ForkServers) -> None:
    failure = _failure(guarded, "_exit(0);")
    assert isinstance(failure, WorkerCrash)
    assert failure.status == 0 and failure.signal == ""
    assert "exited with status 0" in str(failure)


def test_an_endless_loop_ends_in_time(guarded: ForkServers) -> None:
    begun = time.monotonic()
    failure = _failure(guarded, "for (volatile long i = 0;; i++) {}")
    assert isinstance(failure, WorkerTimeout) and failure.limit_s == 1
    assert time.monotonic() - begun < 5


def test_ignoring_sigterm_does_not_help(guarded: ForkServers) -> None:
    body = "signal(SIGTERM, SIG_IGN); signal(SIGINT, SIG_IGN); for (volatile long i = 0;; i++) {}"
    assert isinstance(_failure(guarded, body), WorkerTimeout)


def test_stopping_itself_does_not_help(guarded: ForkServers) -> None:
    assert isinstance(_failure(guarded, "raise(SIGSTOP);"), WorkerTimeout)


def test_threads_do_not_outlive_the_kill(guarded: ForkServers) -> None:
    before = "static void* spin(void*) { for (volatile long i = 0;; i++) {} }"
    body = "pthread_t t; for (int i = 0; i < 4; i++) pthread_create(&t, nullptr, spin, nullptr); pthread_exit(nullptr);"
    assert isinstance(_failure(guarded, body, before), (WorkerTimeout, WorkerCrash))


def test_garbage_on_the_channel(guarded: ForkServers) -> None:
    body = "char junk[4096]; memset(junk, 0x41, sizeof junk); write(channel(), junk, sizeof junk); sleep(20);"
    failure = _failure(guarded, body, _FIND_CHANNEL)
    assert isinstance(failure, WorkerProtocol) and "header" in str(failure)


def test_a_forged_answer_needs_the_nonce(guarded: ForkServers) -> None:
    # magic, status 0, reserved 0, a guessed nonce, no values, text or blob
    body = """unsigned int header[8] = {0x43464752, 0, 1, 0, 0, 0, 0, 0};
    write(channel(), header, 32); sleep(20);"""
    assert isinstance(_failure(guarded, body, _FIND_CHANNEL), WorkerProtocol)


def test_closing_every_descriptor(guarded: ForkServers) -> None:
    failure = _failure(guarded, "for (int fd = 0; fd < 256; fd++) close(fd); sleep(20);")
    assert isinstance(failure, WorkerCrash) and "closed its channel" in str(failure)


def test_processor_time_is_limited(guarded: ForkServers) -> None:
    binaries = compile_act(guarded, "for (volatile long i = 0;; i++) {}")
    with started(guarded, binaries, Limits(cpu_s=1)) as act, pytest.raises(WorkerCrash) as caught:
        act.run(timeout_s=10)
    assert caught.value.signal in ("SIGXCPU", "SIGKILL")


_WRITE_INPUT = """
    // Any descriptor of an arena, mapped writable again, whatever mapping we were given.
    for (int fd = 3; fd < 256; fd++) {
        void* map = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (map != MAP_FAILED) { ((char*)map)[in[0]] = 77; out[0] = 1; }
    }
"""


@pytest.mark.parametrize("sealed", [True, False])
def test_a_sealed_input_cannot_be_written(guarded: ForkServers, sealed: bool) -> None:
    """The attack succeeds where the seal is missing, although the worker was told to map it read-only."""
    binaries = compile_act(guarded, _WRITE_INPUT)
    with HostArena.create(LAYOUT.nbytes) as inputs, HostArena.create(LAYOUT.nbytes) as outputs:
        offset = LAYOUT.offset("in")
        with inputs.memory() as memory:
            memory[offset : offset + 8] = (offset + 16).to_bytes(8, "little")
        if sealed:
            inputs.seal_readonly()
        with guarded.worker("cpp") as worker:
            worker.start(plan_of_act(), binaries)
            worker.attach(0, inputs, readonly=True)
            worker.attach(1, outputs)
            worker.run("main", [(0, offset), (1, LAYOUT.offset("out"))], timeout_s=10)
        with inputs.memory() as memory:
            assert (memory[offset + 16] == 77) is not sealed


_LATER = """
static long long* later;
static void* compute(void*) { usleep(300000); later[0] = 42; return nullptr; }
"""


@pytest.mark.parametrize("stopped", [True, False])
def test_a_thread_that_computes_after_the_answer_is_caught_by_stopping(guarded: ForkServers, stopped: bool) -> None:
    """Without the stop the late result arrives and would be counted, although the call was timed without it."""
    body = "later = out; pthread_t t; pthread_create(&t, nullptr, compute, nullptr);"
    with started(guarded, compile_act(guarded, body, _LATER)) as act:
        act.run()
        if stopped:
            act.worker.stop()
        time.sleep(0.6)
        assert (act.outputs()[0] == 42) is not stopped


def test_the_next_worker_is_unharmed(guarded: ForkServers, servers_with: Callable[[Defences], ForkServers]) -> None:
    for body in ("_exit(0);", "abort();", "for (int fd = 0; fd < 256; fd++) close(fd);"):
        _failure(guarded, body)
    with started(guarded, compile_act(guarded, f"for (int i = 0; i < {COUNT}; i++) out[i] = 2 * in[i];")) as act:
        assert act.run(range(COUNT)) == tuple(2 * i for i in range(COUNT))
