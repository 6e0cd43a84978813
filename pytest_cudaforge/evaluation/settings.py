"""What a call must leave as it found it: settings of its thread and of torch, which change what other code answers.

A kernel that leaves denormals flushed, or another default dtype, is right in every comparison, and whatever runs after
it in the same program is wrong. Asked of the process that made the calls, so that host code may lie about it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping
from typing import Any

__all__ = ["changed", "thread_settings", "torch_settings"]

_ENVIRONMENT_BYTES = 256
#: x86-64: MXCSR lies behind the x87's environment; its low six bits tell what has happened, and are nobody's setting.
_MXCSR, _MXCSR_SETTINGS = slice(28, 32), 0xFFC0
#: AArch64: FPCR comes first.
_FPCR = slice(0, 4)


@functools.lru_cache(maxsize=1)
def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")


def _floating_point() -> int:
    """Rounding, and what becomes of denormals, as the processor keeps them for this thread."""
    environment = (ctypes.c_ubyte * _ENVIRONMENT_BYTES)()
    _libm().fegetenv(environment)
    machine = platform.machine()
    if machine == "x86_64":
        return int.from_bytes(bytes(environment)[_MXCSR], "little") & _MXCSR_SETTINGS
    if machine == "aarch64":
        return int.from_bytes(bytes(environment)[_FPCR], "little")
    return int(_libm().fegetround())


def thread_settings() -> dict[str, object]:
    """Of the calling thread, by name: how it rounds, and the processors it may run on. Linux."""
    return {
        "rounding or the treatment of denormals": _floating_point(),
        "the processors that its thread may run on": frozenset(os.sched_getaffinity(0)),
    }


def torch_settings(torch: Any) -> dict[str, object]:
    """What torch answers by, by name, and :func:`thread_settings`."""
    cuda = torch.cuda.is_initialized()
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": str(torch.get_default_device()),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_autocast_enabled()": (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
        "torch.backends.cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32),
        "torch.cuda.current_device()": torch.cuda.current_device() if cuda else 0,
        "torch.cuda.current_stream()": torch.cuda.current_stream().cuda_stream if cuda else 0,
        **thread_settings(),
    }


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """The names of what is not as it was."""
    return tuple(name for name, value in before.items() if now[name] != value)
