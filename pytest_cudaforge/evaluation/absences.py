"""What may be missing from an input that only the user's function can draw: its values are such as were drawn, but no
draw happens to have what these do. In the oracle's process only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["LACKING", "skewed"]


def _missing(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """With a few entries along each dimension that are NaN throughout; a vector stays as it was drawn."""
    changed = drawn.clone()
    for dim, size in enumerate(drawn.shape):
        if size > 1 and drawn.numel() > size:
            order = torch.rand(size, generator=generator, device=drawn.device).argsort()
            changed.index_fill_(dim, order[: max(1, size // _LACKING_SHARE)], math.nan)
    return changed


def _shut(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """With a few rows of the last dimension that are -inf throughout, or False."""
    return _with_rows(drawn, False if drawn.dtype == torch.bool else -math.inf, generator)


def _fronted(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """With rows that begin with such a stretch, as what is padded on its left does."""
    return _stretched(drawn, generator, front=True)


def _stretched(drawn: Tensor, generator: torch.Generator, *, front: bool = False) -> Tensor:
    """With rows of which a stretch is -inf throughout, or False (of some True), as what is padded, or far away, is;
    something is left of each that had something. ``front``: from the first element on."""
    if drawn.dim() < 2 or drawn.shape[-1] < _FEWEST_STRETCHED:
        return drawn
    size, device = drawn.shape[-1], drawn.device
    begins, lengths, chances = (
        torch.rand((*drawn.shape[:-1], 1), generator=generator, device=device) for _ in range(3)
    )
    begins, lengths = (begins * size / 2 + 1).floor() * (not front), (size * (1 + lengths) / 4).floor()
    places = torch.arange(size, device=device)
    within = (places >= begins) & (places < begins + lengths) & (chances < _STRETCHED)
    if drawn.dtype != torch.bool:
        shut = drawn.masked_fill(within, -math.inf)
        return torch.where((shut > -math.inf).any(-1, keepdim=True), shut, drawn)
    shut = drawn & ~within
    shut = torch.where(shut.any(-1, keepdim=True), shut, drawn)
    return torch.where(chances < _STRETCHED / 2, shut, drawn | within)


def _open(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """A mask of which the first row, and a few others, are True throughout, or nowhere -inf."""
    opened = drawn | True if drawn.dtype == torch.bool else drawn.masked_fill(drawn == -math.inf, 0.0)
    changed = _with_rows(drawn, opened, generator)
    if changed is not drawn:
        changed.view(-1, changed.shape[-1])[0] = opened.view(-1, changed.shape[-1])[0]
    return changed


def _with_rows(drawn: Tensor, value: float | Tensor, generator: torch.Generator) -> Tensor:
    """With a few rows of the last dimension that are ``value`` throughout, or those of ``value``; a vector stays as it
    was drawn."""
    if drawn.numel() in (0, drawn.shape[-1]) or not drawn.is_contiguous():
        return drawn
    changed = drawn.clone()
    rows = changed.view(-1, changed.shape[-1])
    order = torch.rand(len(rows), generator=generator, device=drawn.device).argsort()
    chosen = order[: max(1, len(rows) // _LACKING_SHARE)]
    if isinstance(value, Tensor):
        rows[chosen] = value.view(rows.shape)[chosen]
    else:
        rows.index_fill_(0, chosen, value)
    return changed


def _extremes(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """The least and the largest that were drawn, whatever stood there, side by side; and in some parts, between which
    each dimension is divided in two, one of them alone, as in a plain picture's."""
    upper = torch.rand(drawn.shape, generator=generator, device=drawn.device) < 0.5
    part = torch.zeros((), dtype=torch.int64, device=drawn.device)
    for dim, size in enumerate(drawn.shape):
        cut = torch.rand((), generator=generator, device=drawn.device) * size
        behind = torch.arange(size, device=drawn.device) > cut
        part = 2 * part + behind.reshape(-1, *(1,) * (drawn.dim() - 1 - dim))
    kinds = torch.randint(4, (2 ** drawn.dim(),), generator=generator, device=drawn.device)
    kind = kinds[part]
    upper = torch.where(kind < 2, upper, kind == 3)
    return torch.empty_like(drawn).copy_(torch.where(upper, drawn.max(), drawn.min()))


def _absent(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Without some of the classes, in whose place stand their neighbours, so that what is sorted stays so. The
    commonest one, which may be padding, stays, and the last one, which may tell how many there are."""
    values, at, counts = drawn.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    chance = torch.rand(len(values), generator=generator, device=drawn.device)
    chance[counts.argmax()] = chance[-1] = 2.0
    kept = values[chance.argsort()[max(1, len(values) // _LACKING_SHARE) :]].sort().values
    neighbours = kept[(torch.searchsorted(kept, values, right=True) - 1).clamp_min(0)]
    return torch.empty_like(drawn).copy_(neighbours[at])


def _in_runs(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Many elements are what the one before is; what is sorted stays so."""
    flat = drawn.flatten()
    begins = torch.rand(len(flat), generator=generator, device=drawn.device) < _RUN_BEGINS
    begins[0] = True
    places = torch.arange(len(flat), device=drawn.device)
    return torch.empty_like(drawn).copy_(flat[places.where(begins, 0).cummax(0).values].view(drawn.shape))


def _certain(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Of the first row, and of a few others, one of those that may be has all."""
    rows = drawn.reshape(-1, drawn.shape[-1])
    chances = torch.rand(rows.shape, generator=generator, device=drawn.device) * (rows > 0)
    sure = torch.nn.functional.one_hot(chances.argmax(-1), rows.shape[-1]).to(drawn.dtype)
    chosen = torch.rand((len(rows), 1), generator=generator, device=drawn.device) < 1 / _LACKING_SHARE
    chosen[0] = True
    return torch.empty_like(drawn).copy_(torch.where(chosen, sure, rows).view(drawn.shape))


def _nearly_certain(drawn: Tensor, generator: torch.Generator) -> Tensor:
    """Of each row one has nearly all, another one as a rule than of the row before: logarithms of such."""
    scores = torch.randn(drawn.shape, generator=generator, device=drawn.device) * _SHARP
    return torch.empty_like(drawn).copy_(scores.log_softmax(-1))


def skewed(drawn: Tensor, _: torch.Generator | None = None) -> Tensor:
    """As many sorted values with the same ends, ever further apart, as exponents are; the drawn ones where they are too
    few, or would no longer be different."""
    if drawn.dim() != 1 or len(drawn) < _FEWEST_SORTED:
        return drawn
    first, last = float(drawn[0]), float(drawn[-1])
    share = torch.linspace(0.0, 1.0, len(drawn), dtype=torch.float64, device=drawn.device)
    share = torch.expm1(_SKEW * (share if first < last else 1.0 - share)) / math.expm1(_SKEW)
    low, high = min(first, last), max(first, last)
    skewed = (low + share * (high - low)).to(drawn.dtype)
    return skewed if math.isfinite(high - low) and bool((skewed.diff() != 0).all()) else drawn


LACKING: Mapping[tuple[str, str], Callable[[Tensor, torch.Generator], Tensor]] = {
    ("gaps", "missing"): _missing,
    ("barred", "shut"): _shut,
    ("mask", "shut"): _shut,
    ("barred", "stretches"): _stretched,
    ("mask", "stretches"): _stretched,
    ("barred", "fronts"): _fronted,
    ("mask", "fronts"): _fronted,
    ("barred", "afar"): _fronted,
    ("mask", "afar"): _fronted,
    ("mask", "open"): _open,
    ("barred", "open"): _open,
    ("pattern", "open"): _open,  # whoever always gives the same may never shut a row
    ("classes", "absent"): _absent,
    ("classes", "runs"): _in_runs,
    ("bytes", "extremes"): _extremes,
    ("sorted", "skewed"): skewed,
    ("shares", "certain"): _certain,
    ("logarithms", "certain"): _nearly_certain,
}
#: One entry, or one class, in so many is missing.
_LACKING_SHARE = 8
#: The share of rows with a stretch in "stretches", and the shortest such rows.
_STRETCHED, _FEWEST_STRETCHED = 0.5, 8
#: Standard deviation of the scores of what is nearly certain.
_SHARP = 30.0
#: The share of elements of "runs" that begin one.
_RUN_BEGINS = 0.4
#: "skewed": values from the one end lie by this exponent denser than those at the other.
_SKEW, _FEWEST_SORTED = 9.0, 8
