"""What two draws of an input have in common, which a redraw of it keeps. In the oracle's process only.

An input without structure may have any other values. Others have a pattern of zeros (masks, triangles, diagonals,
padding), one sign, slices that sum to one or have unit length (probabilities, directions, rotations), integers and
other codes of few values (labels, lengths, indices as floats), sorted values (which may lie as dense as they like),
symmetric matrices (positive-definite ones among them). Values in [0, 1] that show no other structure count as generic
where the reference takes others (see the subject). Complex numbers are what their parts are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.absences import skewed

__all__ = [
    "FLOAT8",
    "INTEGERS",
    "LEAST_EXCHANGED",
    "LOW_PRECISION",
    "REDRAWN",
    "Structure",
    "looks_normal",
    "ordered_values",
    "readable",
    "sample_of",
    "structure_of",
    "structures_of",
]

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

#: generic: any finite values will do · unit: keep [0, 1] · signed: keep the draw's range · drawn: only the user's
#: function may draw it, as it may the others, of which however something may be missing: gaps, NaN for what was not
#: measured, barred, -inf for what does not count, mask, which says that, classes, integers of few values, bytes, of all
#: that they can be, pattern, a mask, or -inf beside others, that is the same in every draw, sorted values, which lie
#: as dense as they happen to, and shares, rows that add up to one, of which hardly any has all in one place, or
#: logarithms of such
Structure = Literal[
    "generic",
    "unit",
    "signed",
    "drawn",
    "gaps",
    "barred",
    "mask",
    "pattern",
    "classes",
    "bytes",
    "sorted",
    "shares",
    "logarithms",
]
#: Those of which any element may have another value.
REDRAWN: frozenset[Structure] = frozenset({"generic", "unit", "signed", "logarithms"})

_SAMPLE = 1 << 21
#: Integers of so few elements may be sizes, lengths or choices.
LEAST_EXCHANGED = 32
#: Integers are classes where there are so many, each so often.
_FEWEST_CLASSES, _CLASS_SIZE = 3, 4
#: Leading entries of the other dimensions looked at where a structure lies along one, and elements in all.
_SLICES, _SLICED_ELEMENTS = 64, 1 << 22
#: An input of few values is a code: labels, levels, a lattice. Half types and narrower have few values by nature.
_FEW_VALUES, _MANY_ELEMENTS = 256, 4096
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LOW_PRECISION = (torch.float16, torch.bfloat16, *FLOAT8)


def structures_of(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Structure]:
    """The structure of every tensor among the leaves of two draws of a call. Where another leaf may follow from a
    tensor's gaps, bars or order (a mask of its shape, where its values had been), a mask (another one, integers) or
    classes (other integers), it is as "drawn"."""
    pairs = ((path, leaf, second.get(path)) for path, leaf in first.items())
    tensors = {path: (a, b) for path, a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor)}
    found = {path: structure_of(a, b) for path, (a, b) in tensors.items()}
    masks = [path for path, structure in found.items() if structure in ("mask", "pattern")]
    integers = [path for path, (a, _) in tensors.items() if a.dtype in INTEGERS and a.numel() > 1]
    for path, structure in tuple(found.items()):
        shape = tensors[path][0].shape
        alike = [other for other in found if other != path and tensors[other][0].shape == shape]
        masked = structure in ("gaps", "barred", "pattern") and any(found[other] not in REDRAWN for other in alike)
        masked = masked or (structure == "sorted" and any(found[other] not in REDRAWN for other in alike))
        told = (
            structure in ("mask", "pattern")
            and tensors[path][0].dtype == torch.bool
            and (integers or len(masks) > 1 or any(found[o] not in REDRAWN for o in alike))
        )
        if masked or told or (structure == "classes" and len(integers) > 1):
            found[path] = "drawn"
    return found


def structure_of(first: Tensor, second: Tensor) -> Structure:
    """What two independent draws of one input leaf have in common. Booleans are "drawn"."""
    if first.numel() == 0 or first.shape != second.shape:
        return "drawn"
    if first.is_complex():
        return structure_of(*(torch.view_as_real(one.detach().resolve_conj()) for one in (first, second)))
    if first.dtype == torch.bool:
        mixed = all(bool(draw.any()) and not bool(draw.all()) for draw in (first, second))
        known: Structure = "pattern" if torch.equal(first, second) else "mask"
        return known if mixed and first.dim() > 1 else "drawn"
    if not first.is_floating_point():
        if all(draw.dtype in _BYTES and len(draw.unique()) >= _MANY_BYTES for draw in (first, second)):  # type: ignore[no-untyped-call]
            return "bytes"
        classes = not torch.equal(first, second) and _are_classes(first) and _are_classes(second)
        return "classes" if classes else "drawn"
    a, b = sample_of(first), sample_of(second)
    if torch.equal(a, b) or bool(a.isinf().any() or b.isinf().any()):
        known = "pattern" if torch.equal(a, b) else "barred"
        return known if _is_barred(a, b) else "drawn"
    if bool(a.isnan().any() or b.isnan().any()):
        return "gaps" if bool(a.isnan().any() and b.isnan().any()) and not bool(a.isnan().all()) else "drawn"
    if _are_shares(first) and _are_shares(second):
        return "shares"
    if _are_logarithms(first) and _are_logarithms(second):
        return "logarithms"
    if _has_zeros(a, b, first.dtype) or _is_coded(a, first.dtype):
        return "drawn"
    if any(shows(first) and shows(second) for shows in (_ordered, _symmetric, _normed)):
        return "sorted" if skewed(first) is not first and skewed(second) is not second else "drawn"
    low, high = float(torch.minimum(a.min(), b.min())), float(torch.maximum(a.max(), b.max()))
    if low >= 0 or high <= 0:
        return ("unit" if low >= 0 and high <= 1 else "signed") if first.dim() else "drawn"
    return "generic"


def _is_barred(a: Tensor, b: Tensor) -> bool:
    """Are some elements of both draws -inf, others each time, or is all of it the same (a mask)? Values that change
    where others never do have a structure."""
    shut = [draw == -math.inf for draw in (a, b)]
    plain = not bool(torch.cat([a, b]).isnan().any() or (torch.cat([a, b]) == math.inf).any())
    mixed = plain and all(bool(some.any()) and not bool(some.all()) for some in shut)
    return mixed and (torch.equal(a, b) or not torch.equal(*shut))


def readable(tensor: Tensor) -> Tensor:
    """As float32 where torch compares and sorts no such numbers: those of eight bits."""
    return tensor.float() if tensor.dtype in FLOAT8 else tensor


def sample_of(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    if flat.numel() > 2 * _SAMPLE:
        flat = torch.cat([flat[:_SAMPLE], flat[-_SAMPLE:]])
    return flat.double()


def _are_classes(tensor: Tensor) -> bool:
    """Integers of at least three values, each of them several times, and not once in every row (as places are)."""
    if tensor.dtype not in INTEGERS or not LEAST_EXCHANGED <= tensor.numel() <= _SLICED_ELEMENTS:
        return False
    rows = tensor.reshape(-1, tensor.shape[-1])
    if tensor.shape[-1] > 1 and bool((rows.sort(-1).values.diff(dim=-1) != 0).all()):
        return False
    values = tensor.unique()  # type: ignore[no-untyped-call]
    return _FEWEST_CLASSES <= len(values) <= tensor.numel() // _CLASS_SIZE


def _has_zeros(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Many exact zeros, or few at the same places in both draws (a diagonal, a padded end)."""
    zero, other = a == 0, b == 0
    count = int(zero.sum())
    # bfloat16 has 256 equidistant values in [0, 1): one in 256 is zero by chance.
    if count > (2e-2 if dtype in LOW_PRECISION else 1e-3) * a.numel():
        return True
    return count > 0 and 2 * int((zero & other).sum()) >= count


def _is_coded(a: Tensor, dtype: torch.dtype) -> bool:
    """Integers, one value everywhere, or so few values that they are codes."""
    if torch.equal(a, a.round()) or (a.numel() > 1 and bool((a == a[0]).all())):
        return True
    if dtype in LOW_PRECISION or a.numel() < _MANY_ELEMENTS:
        return False
    head = a[: 1 << 16]
    steps = head.sort().values.diff()
    return 1 + int((steps > 0).sum()) <= min(_FEW_VALUES, head.numel() // 16)


def _slices(tensor: Tensor, dim: int) -> Tensor:
    """Some of the tensor as whole rows along ``dim``."""
    room, others = _SLICED_ELEMENTS / tensor.shape[dim], max(1, tensor.dim() - 1)
    leading = slice(0, max(2, min(_SLICES, int(room ** (1 / others)))))
    part = tensor.detach()[tuple(slice(None) if d == dim else leading for d in range(tensor.dim()))]
    rows = part.movedim(dim, -1).reshape(-1, tensor.shape[dim])
    return rows.float() if tensor.dtype in LOW_PRECISION else rows


def _ordered(tensor: Tensor) -> bool:
    """Sorted along some dimension, up or down."""
    for dim in range(tensor.dim()):
        if tensor.shape[dim] >= 8:
            rows = _slices(tensor, dim)[:, :_SLICED_ELEMENTS]
            if bool((rows[:, 1:] >= rows[:, :-1]).all()) or bool((rows[:, 1:] <= rows[:, :-1]).all()):
                return True
    return False


def _symmetric(tensor: Tensor) -> bool:
    """Square matrices that equal their transpose, or its negative, up to the rounding of a product."""
    if tensor.dim() < 2 or tensor.shape[-1] != tensor.shape[-2] or tensor.shape[-1] < 2:
        return False
    matrices = tensor.detach().reshape(-1, *tensor.shape[-2:])[:4].double()
    flipped, scale = matrices.mT, 1e-5 * float(matrices.abs().max())
    return bool(((matrices - flipped).abs() <= scale).all()) or bool(((matrices + flipped).abs() <= scale).all())


def _normed(tensor: Tensor) -> bool:
    """Slices along some dimension that all sum to one, or all have unit length: both lost by any redraw."""
    tolerance = 1e-2 if tensor.dtype in LOW_PRECISION else 1e-3
    for dim in range(tensor.dim()):
        if tensor.shape[dim] > 1:
            rows = _slices(tensor, dim)
            lengths = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
            for measure in (rows.sum(dim=-1, dtype=torch.float64), lengths):
                if bool(((measure - 1).abs() < tolerance).all()):
                    return True
    return False


def _are_shares(tensor: Tensor) -> bool:
    """Rows of the last dimension that are probabilities, and add up to one, but for codes of classes."""
    if tensor.dim() < 2 or tensor.shape[-1] < 2 or tensor.dtype in FLOAT8:
        return False
    rows = _slices(tensor, tensor.dim() - 1)
    tolerance = 1e-2 if tensor.dtype in LOW_PRECISION else 1e-3
    sums = rows.sum(dim=-1, dtype=torch.float64)
    coded = bool((rows.amax(-1) == 1).all())
    return not coded and bool((rows >= 0).all()) and bool(((sums - 1).abs() < tolerance).all())


def _are_logarithms(tensor: Tensor) -> bool:
    return bool((sample_of(tensor) <= 0).all()) and _are_shares(tensor.detach().float().exp())


def looks_normal(drawn: Tensor) -> bool:
    """Are there many values, and do as many of them lie far from their mean as of a normal distribution?"""
    sample = sample_of(torch.view_as_real(drawn.resolve_conj()) if drawn.is_complex() else drawn)
    if len(sample) < _FEWEST_NORMAL:
        return False
    away = (sample - sample.mean()) / sample.std()
    return abs(float(away.pow(4).mean()) - 3.0) < 0.5 and abs(float(away.pow(3).mean())) < 0.3


#: Integers of one byte that have so many values are data, not codes.
_BYTES, _MANY_BYTES = (torch.int8, torch.uint8), 160
#: So many values tell a distribution.
_FEWEST_NORMAL = 512


def ordered_values(tensors: Iterable[Any]) -> list[Tensor]:
    """Those of ``tensors`` that are floating, finite and sorted: the edges of buckets, the nodes of a table."""
    found = (tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_floating_point())
    return [tensor for tensor in found if _ordered(tensor) and bool(tensor.isfinite().all())]
