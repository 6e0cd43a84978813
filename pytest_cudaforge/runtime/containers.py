"""What an original's outputs lie in where that is no plain tuple or dict: named tuples, torch's own, a model's output.

A plan returns plain containers, and who calls the original reads ``out.hidden``. So the manifest names their classes
by the path of what they hold, and dispatch puts them back. Torch is not imported.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pytest_cudaforge.errors import Unsupported

__all__ = ["Containers", "Makers", "alike", "containers_of", "in_containers", "makers_of"]

#: (path of an output's part, "module.Class"), the outermost first.
Containers = tuple[tuple[str, str], ...]
_SEVERAL = "container of one class or another"
#: By path, what makes a container of its parts: a tuple's in order, a dict's by key.
Makers = Mapping[str, Callable[[Any], Any]]


def containers_of(*trees: Any) -> Containers:
    """Of outputs' trees (``flatten_output``), one for each workload: those that are no plain list, tuple or dict. What
    lies in different ones, or in a plain one now and then, has a name that no class has, and dispatch leaves it alone.
    """
    found: dict[str, set[str]] = {}
    for path, name in (one for tree in trees for one in _all(tree, "out")):
        found.setdefault(path, set()).add(name)
    return tuple((path, names.pop() if len(names) == 1 else _SEVERAL) for path, names in found.items() if names != {""})


def _all(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, class or "" for a plain one) of each container."""
    if "leaf" in tree or not tree:
        return
    yield path, str(tree.get("type", ""))
    parts = enumerate(tree.get("list") or tree.get("tuple") or ())
    for key, part in (*parts, *tree.get("dict", ())):
        yield from _all(part, f"{path}.{key}")


def makers_of(containers: Containers, home: str) -> Makers:
    """``home``: the original's module, which may have been imported by another name than it was forged by.

    Raises Unsupported where a class is not in this process: what cannot be given back is the original's to make.
    """
    return {path: _maker(_class_of(name, home)) for path, name in containers}


def _class_of(name: str, home: str) -> type:
    parts = name.split(".")
    places = [(".".join(parts[:at]), parts[at:]) for at in range(len(parts) - 1, 0, -1)]
    for module, own in (*places, *((home, own) for _, own in places)):
        found = functools.reduce(lambda owner, part: getattr(owner, part, None), own, sys.modules.get(module))
        if isinstance(found, type) and issubclass(found, (tuple, list, dict)):
            return found
    raise Unsupported(f"the original returns a {name}, which is not here")


def _maker(kind: type) -> Callable[[Any], Any]:
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return lambda parts: kind(*parts)
    if issubclass(kind, dict) and dataclasses.is_dataclass(kind):
        return lambda parts: kind(**parts)
    return kind


def in_containers(value: Any, makers: Makers, path: str = "out") -> Any:
    """``value``, of plain lists, tuples and dicts, in the containers that go with its parts."""
    if isinstance(value, (list, tuple)):
        parts: Any = type(value)(in_containers(part, makers, f"{path}.{at}") for at, part in enumerate(value))
    elif isinstance(value, dict):
        parts = {key: in_containers(part, makers, f"{path}.{key}") for key, part in value.items()}
    else:
        return value
    maker = makers.get(path)
    return parts if maker is None else maker(parts)


def alike(value: Any, original: Any) -> Any:
    """``value``, of plain containers, in containers such as those of ``original``, which is nested alike."""
    if isinstance(original, Mapping):
        parts: Any = {key: alike(value[key], part) for key, part in original.items()}
    elif isinstance(original, (list, tuple)):
        parts = [alike(part, other) for part, other in zip(value, original, strict=True)]
    else:
        return value
    return _maker(type(original))(parts)
