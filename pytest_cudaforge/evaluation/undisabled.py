"""Torch's dispatch modes without torch._dynamo, which takes two seconds to load and is of use to who compiles only.

Torch wraps every ``__torch_dispatch__`` so that the compiler leaves it alone, and loads the compiler to do so.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, TypeVar

__all__ = ["undisabled"]

Mode = TypeVar("Mode", bound=type)


def undisabled(mode: Mode) -> Mode:
    """A decorator of modes: as long as nobody has loaded the compiler there is nothing that must leave them alone; from
    then on the mode is as torch made it. Does nothing in a torch that does not wrap."""
    wrapped: Any = mode.__dict__.get("__torch_dispatch__")
    plain = getattr(wrapped, "__wrapped__", None)
    if plain is None:
        return mode

    @functools.wraps(plain)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        # While it is being loaded it can disable nothing yet.
        if not hasattr(sys.modules.get("torch._dynamo"), "disable"):
            return plain(self, *args, **kwargs)
        mode.__torch_dispatch__ = wrapped  # type: ignore[attr-defined]
        return wrapped(self, *args, **kwargs)

    mode.__torch_dispatch__ = dispatch  # type: ignore[attr-defined]
    return mode
