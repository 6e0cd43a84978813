"""What a module returned: who holds it, and whether it shares memory with other answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_cudaforge import plan

if TYPE_CHECKING:
    import torch

__all__ = ["WRITTEN", "as_it_was", "copy_of", "holders", "lists_and_dicts", "overwrite", "share", "sharing", "uses"]

#: What a caller may write into an answer of integers.
WRITTEN = 77


def share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype lie in one storage and share an element there."""
    if one.dtype != other.dtype or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    first, second = (plan.View(0, tuple(t.shape), t.stride(), int(t.storage_offset())) for t in (one, other))
    return plan.overlap(first, second)


def uses(tensor: torch.Tensor) -> int:
    """How many hold it in C++; 0 where torch does not tell."""
    return int(getattr(tensor, "_use_count", int)())


def sharing(answers: Iterable[Sequence[torch.Tensor]]) -> int:
    """How many answers are in one storage with another, at another place: what never changes may be given again."""
    places: dict[int, list[frozenset[int]]] = {}
    for answer in answers:
        by_storage: dict[int, set[int]] = {}
        for tensor in answer:
            if tensor.numel():
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), set()).add(tensor.data_ptr())
        for storage, at in by_storage.items():
            places.setdefault(storage, []).append(frozenset(at))
    return sum(len(at) for at in places.values() if len(set(at)) > 1)


def lists_and_dicts(value: Any) -> Iterator[Any]:
    """The containers of an answer, or of arguments, that somebody may write into, the outermost first."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, (Mapping, list)):
        yield value
    for part in parts:
        yield from lists_and_dicts(part)


def holders(storage: torch.UntypedStorage) -> int:
    """How many tensors, and others, share a storage."""
    import torch

    return int(torch._C._storage_Use_Count(storage._cdata))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of its own with the same values, strides included."""
    if not tensor.numel():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def as_it_was(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Is each element the one that was copied, or both of them NaN?"""
    return bool(((tensor == copy) | ((tensor != tensor) & (copy != copy))).all())


def overwrite(tensor: torch.Tensor) -> None:
    """Other values in every element, where no two of them share a place."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    elif str(tensor.dtype) == "torch.bool":
        tensor.logical_not_()
    else:
        tensor.fill_(WRITTEN)
