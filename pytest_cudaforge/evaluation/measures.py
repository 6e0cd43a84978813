"""What tensors come to: are they the same, how large are they, how much of them is no number? On any device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["beyond_alike", "nonfinite", "same_values", "size_of"]


def same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Two tensors of one shape, NaN being the same as NaN."""
    return bool(torch.equal(first, second) or ((first == second) | ((first != first) & (second != second))).all())


def beyond_alike(value: torch.Tensor, exact: torch.Tensor) -> bool:
    """Is ``value`` infinite where ``exact``, in fp64, is beyond its range, with that sign, and nowhere else?"""
    most = torch.finfo(value.dtype).max
    signed = exact.sign() == value.sign()
    inside, outside = exact.abs() <= most / 0.98, (exact.abs() >= 0.98 * most) & signed
    return not bool((value.isnan() | exact.isnan()).any()) and bool(torch.where(value.isinf(), outside, inside).all())


def nonfinite(outputs: Mapping[str, torch.Tensor]) -> int:
    """How many elements are NaN or infinite."""
    floats = [value for value in outputs.values() if value.is_floating_point() or value.is_complex()]
    # Types of one byte have no isfinite.
    floats = [value.float() if value.itemsize == 1 else value for value in floats]
    return sum(value.numel() - int(value.isfinite().sum()) for value in floats)


def size_of(value: torch.Tensor) -> float:
    """The root of the mean square of what is finite."""
    size = value.abs().double().nan_to_num(posinf=0.0)
    return float(size.square().mean().sqrt()) if value.numel() else 0.0
