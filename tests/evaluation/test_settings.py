"""Settings that calls must leave as they find them."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from pytest_cudaforge.evaluation import settings
from pytest_cudaforge.evaluation.settings import (
    Randomness,
    changed,
    found_settings,
    process_settings,
    thread_settings,
    torch_settings,
)

_FE_TOWARDZERO = {"x86_64": 0xC00, "aarch64": 0xC00000}


def _names(change: object, *arguments: object) -> tuple[str, ...]:
    """What ``change`` changes, in a thread of its own."""

    def act() -> tuple[str, ...]:
        before = thread_settings()
        assert changed(before, thread_settings()) == ()
        assert callable(change)
        change(*arguments)
        return changed(before, thread_settings())

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).result()


@pytest.mark.skipif(os.uname().machine not in _FE_TOWARDZERO, reason="the value of FE_TOWARDZERO is not known here")
def test_another_rounding() -> None:
    libm = ctypes.CDLL("libm.so.6")
    assert _names(libm.fesetround, _FE_TOWARDZERO[os.uname().machine]) == ("rounding or the treatment of denormals",)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush denormals")
def test_denormals_as_zeros() -> None:
    assert _names(torch.set_flush_denormal, True) == ("rounding or the treatment of denormals",)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="there is no x87 here")
def test_long_doubles_of_fewer_bits(tmp_path: Path) -> None:
    source, library = tmp_path / "x87.c", tmp_path / "x87.so"
    source.write_text(
        'void single(void) { unsigned short w; __asm__("fnstcw %0" : "=m"(w)); w &= ~0x300; '
        '__asm__ volatile("fldcw %0" : : "m"(w)); }'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert _names(ctypes.CDLL(str(library)).single) == ("rounding or the treatment of denormals",)


def _in_the_pool(change: Callable[[], None]) -> None:
    """``change`` in OpenMP's other threads, of the runtime that torch brings along, and not in this one."""
    me = threading.get_ident()
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None if threading.get_ident() == me else change())
    for library in settings._openmp_libraries():
        library.GOMP_parallel(body, None, ctypes.c_uint(2), ctypes.c_uint(0))


@pytest.fixture
def team() -> Iterator[None]:
    """OpenMP has two threads at least; a worker of a run of tests has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush denormals")
@pytest.mark.skipif(torch.get_num_threads() < 2, reason="OpenMP has no other threads here")
def test_denormals_as_zeros_in_other_threads(team: None) -> None:
    if not list(settings._openmp_libraries()):
        pytest.skip("torch brings no GNU OpenMP runtime here")

    def flush(on: bool) -> None:
        _in_the_pool(lambda: torch.set_flush_denormal(on) and None)

    assert _names(flush, True) == ("rounding or the treatment of denormals",)
    assert _names(flush, False) == ()
    before = settings.thread_settings(team=False)
    flush(True)
    assert changed(before, settings.thread_settings(team=False)) == ()
    flush(False)


def test_allocated_bytes() -> None:
    gc.collect()
    before = settings.allocated_bytes()
    kept = [ctypes.create_string_buffer(1000) for _ in range(1000)]
    assert before == 0 or settings.allocated_bytes() - before > 500 * len(kept)


def test_what_has_happened_is_no_setting() -> None:
    def divide() -> None:
        assert float(torch.ones(1) / 3) > 0  # inexact
        assert float(torch.full((1,), 1e30) ** 2) == float("inf")

    assert _names(divide) == ()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_other_processors() -> None:
    one = {min(os.sched_getaffinity(0))}
    assert _names(os.sched_setaffinity, 0, one) == ("the processors that its thread may run on",)


class _Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_torchs_settings() -> None:
    before = torch_settings(torch)
    assert changed(before, torch_settings(torch)) == ()
    with torch.autocast("cpu"), torch.inference_mode():
        found = changed(before, torch_settings(torch))
    assert set(found) >= {"torch.is_autocast_enabled()", "torch.is_inference_mode_enabled()"}
    modes = "modes that every operator passes through"
    with torch.device("meta"):
        assert changed(before, torch_settings(torch)) == ("torch.get_default_device()", modes)
    with _Passing():
        assert changed(before, torch_settings(torch)) == (modes,)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, lambda kept: kept):
        assert changed(before, torch_settings(torch)) == ("the hooks for what autograd saves",)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert changed(before, torch_settings(torch)) == ("torch.is_anomaly_enabled()",)


def test_pythons_settings() -> None:
    before = process_settings()
    assert changed(before, process_settings()) == ()
    interval = sys.getswitchinterval()
    try:
        gc.disable()
        assert changed(before, process_settings()) == ("the garbage collector",)
        sys.setswitchinterval(interval * 2)
        assert "sys.getswitchinterval()" in changed(before, process_settings())
    finally:
        gc.enable()
        sys.setswitchinterval(interval)


def test_whoever_looks_on() -> None:
    name = "the functions that look on (sys.setprofile, sys.settrace)"
    before = process_settings()
    kept = sys.getprofile()
    try:
        sys.setprofile(lambda *_: None)
        assert changed(before, process_settings()) == (name,)
    finally:
        sys.setprofile(kept)


def test_signals_that_native_code_blocks_catches_or_sends() -> None:
    before = thread_settings()
    assert changed(before, thread_settings()) == ()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        assert changed(before, thread_settings()) == ("the signals that its thread has blocked",)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    # One that neither readline nor LLVM (Triton's) has caught already.
    kept = signal.signal(signal.SIGURG, lambda *_: None)
    try:
        assert changed(before, thread_settings()) == ("the signals that are caught, or ignored",)
        signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
        assert "the timers that send signals" in changed(before, thread_settings())
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGURG, kept)


def test_memory_that_malloc_fills() -> None:
    """In a process of its own: nobody takes it back."""
    program = (
        "import ctypes\nfrom pytest_cudaforge.evaluation.settings import changed, thread_settings\n"
        "before = thread_settings(team=False)\n"
        "for _ in range(9):\n    assert not changed(before, thread_settings(team=False))\n"
        "ctypes.CDLL(None).mallopt(-6, 90)\nprint(changed(before, thread_settings(team=False)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "('what malloc fills memory with (M_PERTURB)',)"


def test_signals_keep_their_handlers() -> None:
    before = process_settings()
    kept = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        assert changed(before, process_settings()) == ("the handlers of signals",)
    finally:
        signal.signal(signal.SIGUSR2, kept)


def test_torchs_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = found_settings(torch)
    torch.rand(3)
    assert changed(before, found_settings(torch)) == ()
    monkeypatch.setattr(torch.nn.functional, "a_new_name", len, raising=False)
    monkeypatch.setattr(torch.nn.Module, "__init__", torch.nn.Linear.__init__)  # torch.compile wraps it, too
    assert changed(before, found_settings(torch)) == ()
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda *_: None)
        assert changed(before, found_settings(torch)) == ("torch's own functions, or Python's clocks",)
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *_: 0.001)
    assert changed(before, found_settings(torch)) == ("torch's own functions, or Python's clocks",)


def test_what_is_in_torchs_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    before = found_settings(torch)
    name = "what is in torch's own functions (__code__, __defaults__)"
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional.dropout, "__defaults__", (0.5, False, False))
        assert changed(before, found_settings(torch)) == (name,)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional.dropout, "__code__", torch.nn.functional.alpha_dropout.__code__)
        assert changed(before, found_settings(torch)) == (name,)
    assert changed(before, found_settings(torch)) == ()


def test_handlers_of_faults() -> None:
    def caught() -> tuple[str, ...]:
        return changed(before, found_settings(torch))

    old = signal.signal(signal.SIGBUS, signal.SIG_DFL)
    before = found_settings(torch)
    try:
        assert caught() == ()
        signal.signal(signal.SIGBUS, lambda *_: None)
        assert caught() == ("the handlers of faults",)
    finally:
        signal.signal(signal.SIGBUS, old)


def _rewind() -> None:
    torch.default_generator.manual_seed(torch.initial_seed())


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda: (random.random(), np.random.rand(), torch.rand(3)), ()),
        (lambda: random.seed(3), ("the seed of random",)),
        (lambda: np.random.seed(3), ("the seed of numpy.random",)),
        (lambda: torch.manual_seed(3), ("the seed of torch's random numbers",)),
        (_rewind, ("the seed of torch's random numbers",)),
    ],
    ids=["draws", "random", "numpy", "torch", "rewinds"],
)
def test_drawing_is_no_seeding(call: Callable[[], object], found: tuple[str, ...]) -> None:
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        seen = Randomness(torch)
        for _ in range(3):
            seen.scatter()
            call()
            seen.look()
        assert seen.reseeded == found
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def test_a_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_settings()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere")
    assert changed(before, process_settings()) == ()
    monkeypatch.setenv("FORGE_TEST_VARIABLE", "1")
    assert changed(before, process_settings()) == ("the environment",)


def test_a_variable_that_native_code_sets() -> None:
    libc, before = ctypes.CDLL(None), process_settings()
    libc.setenv(b"FORGE_TEST_VARIABLE", b"1", 1)
    try:
        assert "FORGE_TEST_VARIABLE" not in os.environ
        assert changed(before, process_settings()) == ("the environment",)
    finally:
        libc.unsetenv(b"FORGE_TEST_VARIABLE")
    assert changed(before, process_settings()) == ()
