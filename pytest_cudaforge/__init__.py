"""Forge GPU kernels for PyTorch modules, check them as pytest cases, dispatch them in production.

Importing this package loads neither pytest, torch nor openai.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_cudaforge.runtime.dispatch import apply, disabled
    from pytest_cudaforge.target import forge_target

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "disabled", "forge_target"]


def __getattr__(name: str) -> Any:
    # Lazy: every pytest run of a machine that has the plugin imports this file, and most want nothing of it.
    if name == "forge_target":
        from pytest_cudaforge.target import forge_target

        globals()[name] = forge_target
        return forge_target
    # The dispatch room is production's, and most importers only want the decorator.
    if name in ("apply", "disabled"):
        from pytest_cudaforge.runtime import dispatch

        return getattr(dispatch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
