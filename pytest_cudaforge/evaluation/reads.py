"""Which of a module's attributes its forward reads: what an author may have built into a kernel without reading it.

A plan that takes ``eps`` from the module is right for any; one whose kernel says ``1e-5f`` is right for that one. Which
of them was written cannot be told, so a guard holds modules to the values that forward read when it was verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_cudaforge.runtime.signature import config_attributes

__all__ = ["reads_of"]


@contextmanager
def reads_of(module: torch.nn.Module) -> Iterator[set[str]]:
    """The paths (``norm.eps``, ``config.scale``) of attributes and buffers that are read inside, in ``module``, in its
    submodules and in their configuration objects. Names with an underscore in front are torch's. For one thread.

    Objects of classes that Python does not let change (a namespace's) are left out.
    """
    found: set[str] = set()
    owners = dict(_owners(module))
    places = {id(owner): path for path, owner in owners.items()}
    with ExitStack() as stack:
        for cls in {type(owner) for owner in owners.values()}:
            stack.enter_context(_watched(cls, places, found))
        yield found


def _owners(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        yield path, part
        for name, value in vars(part).items():
            if not name.startswith("_") and config_attributes(value) is not None:
                yield _joined(path, name), value


@contextmanager
def _watched(cls: type, places: dict[int, str], found: set[str]) -> Iterator[None]:
    own = cls.__dict__.get("__getattribute__")
    usual: Any = cls.__getattribute__

    def reading(self: Any, name: str) -> Any:
        if not name.startswith("_") and id(self) in places:
            own = object.__getattribute__(self, "__dict__")
            if name in own or name in own.get("_buffers", ()):
                found.add(_joined(places[id(self)], name))
        return usual(self, name)

    try:
        setattr(cls, "__getattribute__", reading)  # noqa: B010 - mypy knows no assignment to it
    except TypeError:
        yield
        return
    try:
        yield
    finally:
        if own is None:
            delattr(cls, "__getattribute__")
        else:
            setattr(cls, "__getattribute__", own)  # noqa: B010


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
