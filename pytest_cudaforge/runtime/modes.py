"""What torch is doing just now that a forged kernel must stay out of; asked on every dispatched call.

Each question is one C call of some 50 ns. Several are private to torch, so each has a public or harmless stand-in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

__all__ = ["disabled", "function_modes", "is_plain", "obstacle", "switched_off"]

_disabled: ContextVar[bool] = ContextVar("cudaforge_disabled", default=False)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Within this block every applied model runs its reference; for this thread or task only (a context variable)."""
    token = _disabled.set(True)
    try:
        yield
    finally:
        _disabled.reset(token)


def _private(owner: Any, name: str, otherwise: Callable[[], Any]) -> Callable[[], Any]:
    found = getattr(owner, name, None)
    return found if callable(found) else otherwise


_autocast = _private(torch._C, "_is_any_autocast_enabled", lambda: torch.is_autocast_enabled())
_dispatch_modes = _private(torch._C, "_len_torch_dispatch_stack", lambda: 0)
function_modes = _private(torch._C, "_len_torch_function_stack", lambda: 0)
_functorch = _private(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
_tracing = _private(torch._C, "_get_tracing_state", lambda: None)
switched_off = _disabled.get


def is_plain() -> bool:
    """Whether a call now may run a kernel at all: no autocast, transform, tracing, mode or ``disabled()`` block."""
    return not (
        switched_off()
        or _autocast()
        or _dispatch_modes()
        or (function_modes() and not _only_default_device())
        or _functorch() is not None
        or forward_ad._current_level >= 0
        or _tracing() is not None
    )


def obstacle() -> str:
    """What :func:`is_plain` found, in words for a report."""
    if switched_off():
        return "inside disabled()"
    if _autocast():
        return "autocast is on"
    if _functorch() is not None:
        return "inside a torch.func transform (vmap, grad, ...)"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if _tracing() is not None:
        return "torch.jit is tracing"
    return "a torch dispatch or function mode is active"


def _only_default_device() -> bool:
    # torch.set_default_device is such a mode; it changes factory functions only, and ours name their device.
    from torch import overrides
    from torch.utils._device import DeviceContext

    stack: Any = getattr(overrides, "_get_current_function_mode_stack", lambda: [None])
    return all(isinstance(mode, DeviceContext) for mode in stack())
