"""What a target's own code raises: which of its frames the author wants to see, and whether the device survived."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from pytest_cudaforge.errors import DeviceError

__all__ = ["is_fatal", "user_text"]

#: What the driver calls faults that a context does not survive.
_STICKY = (
    *("CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    *("CUDA_ERROR_ASSERT", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT", "CUDA_ERROR_INVALID_PC"),
    *("CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ECC_UNCORRECTABLE"),
)


def is_fatal(error: BaseException | None) -> bool:
    """Did CUDA fail in, or behind, ``error``? Such a fault stays: every later call of this process would fail, too."""
    # torch before 2.8 has no class for it.
    kind = getattr(torch, "AcceleratorError", ())
    while error is not None:
        if isinstance(error, kind) or (isinstance(error, RuntimeError) and str(error).startswith("CUDA error:")):
            return True
        if isinstance(error, DeviceError) and any(name in error.what for name in _STICKY):
            return True
        error = error.__cause__ or error.__context__
    return False


def user_text(error: BaseException, root: str) -> str:
    """The traceback's frames that lie under ``root``, then the error's own line."""
    lines = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if not path.is_relative_to(root) or "site-packages" in path.parts:
            continue
        lines.append(f"{path.relative_to(root)}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}")
    return "\n".join([*lines, f"{type(error).__name__}: {error}"])
