"""Ordinary calls by the hundred: what is wrong in one of some hundred is so in none of a few dozen, whatever those are
drawn for. In the oracle's process only.

So many calls cannot each be judged as carefully as a trial. Most answers are next to the reference's, element by
element, and need not be; only what is not is judged, and wrong is only what no other rounding could have come to: it is
off by far, where the reference itself gives the same however it is rounded. (Of integers only what has no one right
rounding counts there, sums and exponentials: a quotient has one.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.contract import ROUNDING
from pytest_cudaforge.evaluation.leaning import CORRECTLY_ROUNDED, LeaningMode
from pytest_cudaforge.records import Mismatch

__all__ = ["BY_FAR", "BY_FAR_MADE", "STEPS", "all_near", "leaning_modes", "plainly_wrong"]

#: So many roundoffs of its own and of its tensor's usual size is an answer next to another one, by the type's bytes.
_OWN_ROUNDOFFS, _USUAL_ROUNDOFFS = {8: 64.0, 4: 64.0}, {8: 16.0, 4: 16.0}
_FEW_ROUNDOFFS = 2.0
#: So many times its bound is an error that is off by far: on values as drawn, of which nobody knows how shaky they are,
#: and on those that are made to show something.
BY_FAR, BY_FAR_MADE = 8.0, 2.0
#: Runs of the reference, rounded otherwise by up to so many eps in each operator, that tell where it is shaky.
_RUNS, _MOST_EPS = 8, 4
#: A step is of a share of an error that it explains, at least; so many runs look for some.
_STEP, STEPS = 1 / 4, 12
#: Kinds of mismatches that may come of a value which the reference itself rounds one way or the other.
_ROUNDED = ROUNDING | {"integer", "nonfinite"}


def all_near(candidate: Mapping[str, Any], reference: Mapping[str, Any]) -> bool:
    """Is each tensor of ``reference`` there, next to it in all of its elements?"""
    tensors = {path: value for path, value in reference.items() if isinstance(value, Tensor)}
    return all(path in candidate and bool(_near(candidate[path], value).all()) for path, value in tensors.items())


class Leaning(NamedTuple):
    """What the reference is run under, for its floating outputs and for its integers."""

    floats: LeaningMode
    integers: LeaningMode


def leaning_modes() -> Iterator[Leaning]:
    """Some, each rounded otherwise."""
    for seed in range(_RUNS):
        each = seed % 2 == 1
        alike = LeaningMode(seed, most=_MOST_EPS, alike=CORRECTLY_ROUNDED, each=each)
        yield Leaning(LeaningMode(seed, most=_MOST_EPS, each=each), alike)


def plainly_wrong(
    mismatches: Iterable[Mismatch],
    candidate: Mapping[str, Tensor],
    reference: Mapping[str, Any],
    nearby: Callable[[], Iterator[Mapping[str, Any]]],
    by_far: float = BY_FAR,
    beside: Callable[[], Iterable[Mapping[str, Any]]] = tuple,
) -> list[Mismatch]:
    """Those of ``mismatches`` that no other rounding explains, by errors of more than ``by_far`` times their bounds.
    ``nearby``: what the reference gives, rounded otherwise; ``beside``: for inputs some roundoffs away, where one may
    lie at a step of one of its operators."""
    found = [m for m in mismatches if m.kind not in ROUNDING or _by_far(m, by_far)]
    rounded = {m.output for m in found if m.kind in _ROUNDED}
    tensors = {path: value for path, value in reference.items() if path in rounded and isinstance(value, Tensor)}
    wrong = {path: ~_near(candidate[path], value) for path, value in tensors.items() if path in candidate}
    for outputs in nearby() if wrong else ():
        for path in wrong:
            wrong[path] &= _near(outputs[path], reference[path])
    for outputs in beside() if any(bool(some.any()) for some in wrong.values()) else ():
        for path in wrong:
            wrong[path] &= ~_steps(outputs[path], reference[path], candidate[path])
    return [m for m in found if m.output not in wrong or bool(wrong[m.output].any())]


def _by_far(mismatch: Mismatch, times: float) -> bool:
    ratio, bound = mismatch.error_ratio, mismatch.bound
    return ratio is not None and bound is not None and not ratio <= times * bound


def _steps(other: Tensor, reference: Tensor, candidate: Tensor) -> Tensor:
    """Element by element: does the reference itself move by a fair share of what the candidate is off by?"""
    if not reference.is_floating_point() or not (other.shape == reference.shape == candidate.shape):
        return torch.tensor(False, device=reference.device)
    moved, off = (other - reference).abs(), (candidate - reference).abs()
    return moved > _STEP * off


def _near(one: Tensor, other: Tensor) -> Tensor:
    """Element by element; () where they are of other shapes or types."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return torch.tensor(False, device=other.device)
    if not other.is_floating_point() or other.itemsize == 1:
        return one == other if other.itemsize > 1 or not other.is_floating_point() else one.float() == other.float()
    size = other.abs()
    usual = size.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt() if size.itemsize > 2 else 0.0
    eps = torch.finfo(other.dtype).eps
    own = eps * _OWN_ROUNDOFFS.get(other.itemsize, _FEW_ROUNDOFFS)
    close = (one - other).abs() <= own * size + eps * _USUAL_ROUNDOFFS.get(other.itemsize, _FEW_ROUNDOFFS) * usual
    return close & other.isfinite() | (one == other) | (one.isnan() & other.isnan())
