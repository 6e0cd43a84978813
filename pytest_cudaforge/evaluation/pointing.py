"""Where an index output points: the very tensor that the reference searched or sorted. In the oracle's process only.

A gate that takes the top k of a softmax returns indices into values that no input holds. They are compared by what
they point at, so the operator that made them is watched, in the reference's precision and in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = ["Pointed", "PointingMode", "pointed_by"]

#: Operators that return places, alone or beside values.
_SEARCHES = frozenset(
    ["topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median", "nanmedian", "mode"]
)
#: Those of which torch's documentation promises the first of several equal places.
_FIRST = frozenset(["argmax", "argmin", "max", "min"])


@dataclass(frozen=True)
class Pointed:
    """One search: the places it found in ``source``, along ``dim``; ``first``: of equal ones the first, by promise."""

    index: Tensor
    source: Tensor
    dim: int
    first: bool


@undisabled
class PointingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every search in the order they run; results keep their memory, by which they are known again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Pointed] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _SEARCHES and args and isinstance(args[0], Tensor):
            index = result[1] if isinstance(result, (tuple, list)) and len(result) == 2 else result
            if isinstance(index, Tensor) and index.dtype == torch.int64:
                self.found.append(_search(index, args[0], _dim_of(func, args, kwargs or {}), name in _FIRST))
        return result

    def searched_the_same(self, wide: PointingMode) -> bool:
        """Did a run in fp64, ``wide``, search the same numbers, none of them rounded here?"""
        if len(self.found) != len(wide.found):
            return False
        pairs = [(here.source, there.source) for here, there in zip(self.found, wide.found, strict=True)]
        return all(a.shape == b.shape and torch.equal(a.double(), b.double()) for a, b in pairs)


def _search(index: Tensor, source: Tensor, dim: int | None, first: bool) -> Pointed:
    source = source.detach().clone()
    return Pointed(index, source.flatten(), 0, first) if dim is None else Pointed(index, source, dim, first)


def _dim_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            given = args[position] if position < len(args) else kwargs.get("dim", argument.default_value)
            return None if given is None else int(given) % max(1, args[0].dim())
    return None


def pointed_by(output: Tensor, found: Sequence[Pointed]) -> int | None:
    """Which search made ``output`` (a view of its result, or a copy in another integer type); None: none of them."""
    for number, search in enumerate(found):
        same = output.untyped_storage().data_ptr() == search.index.untyped_storage().data_ptr()
        if same and _fits(tuple(output.shape), search):
            return number
    for number, search in enumerate(found):
        if output.shape == search.index.shape and torch.equal(output.to(torch.int64), search.index):
            return number
    return None


def _fits(shape: tuple[int, ...], search: Pointed) -> bool:
    """May places of this shape point along the search's dimension?"""
    source = tuple(search.source.shape)
    rest = source[: search.dim] + source[search.dim + 1 :]
    return shape == rest or (len(shape) == len(source) and shape[: search.dim] + shape[search.dim + 1 :] == rest)
