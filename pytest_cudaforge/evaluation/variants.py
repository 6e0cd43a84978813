"""Probes: the same call with other strides, neighbouring shapes, or other values of an input that is always the same.
In the oracle's process only.

A variant has a name that says all: ``""`` (as drawn), ``"strided"``, ``"size 64 -> 63"``, ``"size 64 -> 131"``,
``"other kw.mask"`` (by path).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.runtime.signature import flatten_call, unflatten_call

__all__ = ["OTHER", "apply_variant", "fixed_names", "neighbour_names"]

#: How the names of variants begin that have other values.
OTHER = "other "

_SIZE = re.compile(r"size (\d+) -> (\d+)")
_MAX_NEIGHBOURS = 3
_GROWTH = 67
_MAX_FIXED = 2


def apply_variant(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with every tensor changed as the variant's name says; values stay where that is possible."""
    leaves, tree = flatten_call(args, kwargs)
    if name == "strided":
        leaves = {path: _strided(leaf) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif match := _SIZE.fullmatch(name):
        old, new = int(match[1]), int(match[2])
        leaves = {path: _resized(leaf, old, new) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves.items()}
    elif (path := name.removeprefix(OTHER)) in leaves and path != name:
        leaves[path] = _mirrored(leaves[path])
    return unflatten_call(tree, leaves)


def fixed_names(first: tuple[Any, ...], second: tuple[Any, ...]) -> Iterator[str]:
    """Names of variants with other values of what two draws, each (args, kwargs), have in common: a mask, positions.

    A kernel may have them built in. Rows of the last dimension are mirrored, so that none of a mask's loses its last
    entry.
    """
    leaves, others = (flatten_call(*call)[0] for call in (first, second))
    fixed = [path for path, leaf in leaves.items() if isinstance(leaf, Tensor) and _same(leaf, others.get(path))]
    for path in [path for path in fixed if not _same(leaves[path], _mirrored(leaves[path]))][:_MAX_FIXED]:
        yield f"{OTHER}{path}"


def _same(leaf: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and leaf.shape == other.shape and torch.equal(leaf, other)


def _mirrored(leaf: Tensor) -> Tensor:
    """With each row of the last dimension back to front, or rotated by one where that is the same."""
    if leaf.dim() == 0 or leaf.shape[-1] < 2:
        return leaf
    mirrored = leaf.flip(-1)
    return leaf.roll(1, -1) if torch.equal(mirrored, leaf) else mirrored


def _strided(tensor: Tensor) -> Tensor:
    """The same values, with the last two dimensions swapped in memory and padding at each row's end."""
    if tensor.numel() < 2 or tensor.dim() == 0:
        return tensor
    if tensor.dim() == 1:
        return torch.stack([tensor, tensor], dim=1)[:, 0]
    swapped = tensor.transpose(-1, -2)
    padded = torch.cat([swapped, swapped[..., :1]], dim=-1)
    return padded[..., :-1].transpose(-1, -2)


def _resized(tensor: Tensor, old: int, new: int) -> Tensor:
    for dim, size in enumerate(tensor.shape):
        if size == old:
            index = torch.arange(new, device=tensor.device) % old
            tensor = tensor.index_select(dim, index)
    return tensor


def neighbour_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: bool = False) -> Iterator[str]:
    """Names of variants with one size changed wherever it occurs, for the leading sizes first: smaller by one, and the
    first one (``dynamic``, where any size is promised: each of them) larger, too, by more than any vector is wide."""
    leaves, _ = flatten_call(args, kwargs)
    sizes: dict[int, None] = {}
    tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.dim()]
    for dim in range(max((t.dim() for t in tensors), default=0)):
        for tensor in tensors:
            if dim < tensor.dim() and tensor.shape[dim] > 1:
                sizes.setdefault(int(tensor.shape[dim]))
    indices = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and _may_index(leaf)]
    safe = [size for size in sizes if not any(_points_into(tensor, size) for tensor in indices)]
    for size in safe[:_MAX_NEIGHBOURS]:
        yield f"size {size} -> {size - 1}"
    for size in safe[: _MAX_NEIGHBOURS if dynamic else 1]:
        yield f"size {size} -> {size + _GROWTH}"


def _may_index(tensor: Tensor) -> bool:
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return whole and tensor.numel() > 0


def _points_into(tensor: Tensor, size: int) -> bool:
    """May the integers be indices into a dimension of ``size``, such as class numbers of so many classes?

    One left pointing behind a smaller dimension is undefined: on a device an assertion that ends the process.
    """
    largest = int(tensor.max())
    if largest >= size:
        return False
    # A size of the integers' own (a batch) is one they point into only where they reach far into it.
    return size not in tensor.shape or 2 * largest >= size
