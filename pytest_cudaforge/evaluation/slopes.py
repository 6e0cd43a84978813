"""Scores that rise by little at a time and far in all, as under a bias by position (ALiBi, Press et al. 2022): which
input makes them so, and how far. In the oracle's process only.

Where all inputs of a call climb at once, what is large in one of them hides it: here one climbs alone along one of its
dimensions, and all others are as they were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.evaluation.decisions import SCORING, kept
from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = ["SLOPING", "ScoresMode", "Slope", "find_slopes", "put_slope"]

SLOPING = "sloping"
#: How far scores go in all, from and to: beyond what exponentials hold in fp32 (88), by less than one a place mostly.
_FAR = (60.0, 300.0)
#: Along fewer places nothing rises by little at a time. So many ways to climb are tried at most.
_LEAST_PLACES, _MOST_TRIED = 16, 8
#: Scores climb where they follow their places so closely (correlation), in such a share of the rows.
_FOLLOWS, _SHARE = 0.9, 0.1
#: Gigabytes of scores are not looked at.
_MOST_SCORES = 1 << 24


@undisabled
class ScoresMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is weighed by exponentials, that dimension last."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores, dim = _weighed(func.overloadpacket.__name__, args, kwargs or {})
        if isinstance(scores, Tensor) and scores.dim() and 0 < scores.numel() <= _MOST_SCORES:
            self.found.append(kept(scores).movedim(dim, -1))
        return func(*args, **(kwargs or {}))


def _weighed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, int]:
    """(scores, the dimension that they are weighed along) of a call of an operator; (None, -1) where it weighs none, or
    shows none: of attention in one operator a mask that is added."""
    if name not in SCORING:
        return None, -1
    if "attention" in name:
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        return (mask if isinstance(mask, Tensor) and mask.is_floating_point() else None), -1
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return (args[0] if args and len(dims) == 1 else None), int(dims[0]) if dims else -1


@dataclass(frozen=True, slots=True)
class Slope:
    """A way to make scores climb: along which dimension of the input at ``path``, and how far they go for each unit
    that the input does (median of the rows that follow)."""

    path: str
    dim: int
    gain: float


def find_slopes(
    leaves: Mapping[str, Any], paths: Sequence[str], scores_of: Callable[[Mapping[str, Any]], Sequence[Tensor]]
) -> tuple[Slope, ...]:
    """Those of the inputs at ``paths`` that make scores climb where they climb alone. ``scores_of`` runs a call."""
    found = []
    for path, dim in list(_ways(leaves, paths))[:_MOST_TRIED]:
        reach = _reach_of(leaves[path])
        climbing = {**leaves, path: _climbed(leaves[path], dim, torch.full((1,), reach))}
        gone = [gain for scores in scores_of(climbing) if (gain := _gone(scores))]
        if gone:
            found.append(Slope(path, dim, max(gone) / reach))
    return tuple(found)


def _ways(leaves: Mapping[str, Any], paths: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Small inputs first: what is added to scores has fewer elements than what they are made from."""
    tensors = {path: leaves[path] for path in paths if isinstance(leaves[path], Tensor)}
    for path, leaf in sorted(tensors.items(), key=lambda item: item[1].numel()):
        if leaf.is_floating_point() and leaf.numel():
            yield from ((path, dim) for dim in reversed(range(leaf.dim())) if leaf.shape[dim] >= _LEAST_PLACES)


def _reach_of(leaf: Tensor) -> float:
    """Far enough to be told from what was drawn, in the input's own measure."""
    size = float(leaf.double().square().mean().sqrt())
    return 100.0 * size if 0.0 < size < math.inf else 100.0


def _climbed(leaf: Tensor, dim: int, reach: Tensor) -> Tensor:
    """``leaf`` with what rises to zero by ``reach`` along ``dim`` (falls, where that is negative) added to it; one for
    each entry of the dimensions before, or one for all."""
    places = torch.linspace(-1.0, 0.0, leaf.shape[dim], device=leaf.device)
    far = reach.to(leaf.device).reshape(-1, 1)
    ramp = torch.where(far < 0, places.flip(0), places) * far.abs()
    shape = [*(leaf.shape[:dim] if len(far) > 1 else [1] * dim), leaf.shape[dim], *[1] * (leaf.dim() - dim - 1)]
    climbed = leaf.to(torch.float64 if leaf.dtype == torch.float64 else torch.float32) + ramp.reshape(shape)
    return torch.empty_like(leaf).copy_(climbed)


def _gone(scores: Tensor) -> float:
    """How far rows of scores go along the last dimension that follow their places; 0 where hardly any does."""
    if scores.shape[-1] < _LEAST_PLACES:
        return 0.0
    rows = scores.double().reshape(-1, scores.shape[-1])
    here = rows.isfinite()
    count = here.sum(-1, keepdim=True).clamp(min=1)
    places = torch.arange(rows.shape[-1], dtype=torch.float64, device=rows.device).expand_as(rows)

    def apart(values: Tensor) -> Tensor:
        held = values.where(here, 0.0)
        return (held - held.sum(-1, keepdim=True) / count).where(here, 0.0)

    x, y = apart(places), apart(rows)
    both, along, up = (x * y).sum(-1), x.square().sum(-1), y.square().sum(-1)
    follows = (both.abs() >= _FOLLOWS * (along * up).sqrt()) & (both != 0) & (count[:, 0] >= _LEAST_PLACES)
    if float(follows.double().mean()) < _SHARE:
        return 0.0
    slope = (both / along.clamp(min=1.0))[follows].abs()
    return float((slope * (count[follows][:, 0] - 1)).median())


def put_slope(leaves: dict[str, Any], slopes: Sequence[Slope], generator: torch.Generator) -> None:
    """One of the inputs climbs: rows of it by something of their own each, up or down."""
    device = generator.device
    slope = slopes[int(torch.randint(len(slopes), (), generator=generator, device=device))]
    leaf = leaves[slope.path]
    chance, side = torch.rand((2, math.prod(leaf.shape[: slope.dim])), generator=generator, device=device)
    far = (math.log(_FAR[0]) + chance * math.log(_FAR[1] / _FAR[0])).exp() / slope.gain
    leaves[slope.path] = _climbed(leaf, slope.dim, torch.where(side < 1 / 2, far, -far))
