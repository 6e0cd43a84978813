"""What buffers hold before a call, and how it is told that a kernel has left some of it there."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.exchanges import unravelled
from pytest_cudaforge.evaluation.regions import Header
from pytest_cudaforge.records import Mismatch

__all__ = ["POISON", "ZONES", "unwritten"]

#: NaN in every float format; and a finite, large, odd value.
POISON = (0xFF, 0x5B)

#: What lies between buffers: the same, values like those of the buffer before (None), so that a kernel that reads out
#: of bounds and leaves odd values out is not right by that, the second one's negative, and, on a host, poison behind
#: which each buffer has what malloc writes before a block of its "heap", or of one with pages of its own ("mapped"): a
#: kernel must not tell by it where it is.
ZONES: tuple[int | Header | None, ...] = (*POISON, None, 0xDB, "heap", "mapped")

#: Elements looked at in one step: the bytes of gigabytes should not be copied at once.
_STEP = 1 << 24


def unwritten(path: str, candidate: Tensor, reference: Tensor, poison: int, pattern: str = "") -> list[Mismatch]:
    """One mismatch where elements of a wrong output still hold ``poison`` in every byte; none where nothing does.

    A kernel may have meant such a value where the type has it (-1 is 0xFF in every byte): there it counts only where
    every wrong element is one.
    """
    if candidate.shape != reference.shape or candidate.dtype != reference.dtype:
        return []
    left = wrong = 0
    first = -1
    flat, expected = candidate.flatten(), reference.flatten()
    for start in range(0, flat.numel(), _STEP):
        part, other = flat[start : start + _STEP], expected[start : start + _STEP]
        bytes_ = part.view(torch.uint8).view(part.numel(), -1)
        # NaN differs from everything; types of one byte have no comparison everywhere.
        bad = part != other if part.itemsize > 1 else bytes_[:, 0] != other.view(torch.uint8)
        held = (bytes_ == poison).all(dim=1) & bad
        if first < 0 and bool(held.any()):
            first = start + int(held.byte().argmax())
        left, wrong = left + int(held.sum()), wrong + int(bad.sum())
    if not left or (left < wrong and not _never_meant(candidate.dtype, poison)):
        return []
    detail = f"never written: {left} of {flat.numel()} elements still hold what was there before the call"
    if candidate.dtype.is_floating_point and poison == POISON[0]:
        detail += ", NaN (or were computed from memory that nothing was written to)"
    index = tuple(int(place) for place in unravelled(first, tuple(candidate.shape)))
    kind = "values" if candidate.dtype.is_floating_point or candidate.dtype.is_complex else "integer"
    return [Mismatch(path, kind, detail, index=index, pattern=pattern)]


def _never_meant(dtype: torch.dtype, poison: int) -> bool:
    """Is the poison nothing that a kernel would write? NaN of all ones, or one odd number among 2**16 and more."""
    if dtype.itemsize == 1:
        return dtype == torch.bool
    return dtype.is_floating_point or dtype.is_complex or poison != POISON[0]
