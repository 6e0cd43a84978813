"""Settings that calls must leave as they find them."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pytest_cudaforge.evaluation.settings import changed, thread_settings, torch_settings

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


def test_what_has_happened_is_no_setting() -> None:
    def divide() -> None:
        assert float(torch.ones(1) / 3) > 0  # inexact
        assert float(torch.full((1,), 1e30) ** 2) == float("inf")

    assert _names(divide) == ()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_other_processors() -> None:
    one = {min(os.sched_getaffinity(0))}
    assert _names(os.sched_setaffinity, 0, one) == ("the processors that its thread may run on",)


def test_torchs_settings() -> None:
    before = torch_settings(torch)
    assert changed(before, torch_settings(torch)) == ()
    with torch.autocast("cpu"), torch.inference_mode():
        found = changed(before, torch_settings(torch))
    assert set(found) >= {"torch.is_autocast_enabled()", "torch.is_inference_mode_enabled()"}
    with torch.device("meta"):
        assert changed(before, torch_settings(torch)) == ("torch.get_default_device()",)
