"""Tensors of which little is new: a few elements have changed places, or are another tensor's, or all have moved by a
little. Who remembers an answer, and looks at some of an input, takes them for the old ones. In the oracle's process
only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.structures import FLOAT8, INTEGERS, LEAST_EXCHANGED, readable

__all__ = [
    "EXCHANGES",
    "Moved",
    "between",
    "exchangeable",
    "exchanged",
    "exchanged_integers",
    "exchanged_mask",
    "exchanged_together",
    "moved_values",
    "near_rows",
    "trail",
    "unravelled",
    "with_values_of",
]

#: How all of a tensor's elements, or some, are others without a draw.
Moved = Literal["smaller", "turned"]
#: Pairs of elements that change places where only few of them shall.
EXCHANGES = 4
#: By how much of itself, or twice that.
_NUDGE = 1e-5
#: Pairs of them: answers that count or add up take some changes for none.
_EXCHANGED_INTEGERS = 16
#: So many integers may belong together; by what part of the range of all their ends are apart; and how many are looked
#: through for what is there twice.
_MOST_TOGETHER, _ALIKE, _MOST_COMPARED = 8, 4, 1 << 18
#: How far rows are from others' in "near", for their deviation, at most; the square of that at least. How many are.
_NEAR, _NEAR_SHARE = 0.01, 1 / 2
#: So many rows of each tensor, from the first on, have others beside them.
_MOST_NEAR = 1 << 16
#: How many of the elements of "edges" are another tensor's.
_EDGES_SHARE = 1 / 16


def between(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What lies in the middle of two neighbours each, along the last dimension."""
    return [(tensor[..., 1:] + tensor[..., :-1]) / 2 for tensor in tensors if tensor.dim()]


def with_values_of(
    leaf: Tensor, others: Sequence[Tensor], generator: torch.Generator, share: float = _EDGES_SHARE
) -> Tensor:
    """``leaf`` with a share of its elements exchanged for elements of ``others`` of its dtype; itself where none is."""
    pools = [other.detach().flatten() for other in others if other.dtype == leaf.dtype]
    if not pools or not leaf.numel():
        return leaf
    pool = torch.cat(pools)
    places = torch.randint(len(pool), leaf.shape, generator=generator, device=leaf.device)
    chosen = torch.rand(leaf.shape, generator=generator, device=leaf.device) < share
    changed = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return changed.copy_(torch.where(chosen, pool[places], leaf))


def near_rows(leaf: Tensor, others: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    """``leaf`` with half of its rows beside rows of ``others``, which are as long: by a hundredth of those, or less."""
    rows = leaf.reshape(-1, leaf.shape[-1])
    tables = [other.detach().reshape(-1, other.shape[-1]) for other in others]
    pool = torch.cat([table[:_MOST_NEAR].to(leaf.dtype) for table in tables])
    places = torch.randint(len(pool), (len(rows),), generator=generator, device=leaf.device)
    by, chosen = torch.rand((2, len(rows), 1), generator=generator, device=leaf.device)
    noise = torch.randn(rows.shape, generator=generator, device=leaf.device)
    beside = pool[places] + noise * _NEAR ** (1 + by) * pool.float().std()
    changed = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return changed.copy_(torch.where(chosen < _NEAR_SHARE, beside, rows).reshape(leaf.shape))


def trail(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """As many rows, each next to the one before, as what is sampled densely is: by a hundredth of the values'
    deviation, or less."""
    rows = leaf.reshape(-1, leaf.shape[-1]).float()
    by = torch.rand((len(rows), 1), generator=generator, device=leaf.device)
    walked = torch.randn(rows.shape, generator=generator, device=leaf.device).mul_(_NEAR ** (1 + by) * rows.std())
    walked[0] = rows[0]
    changed = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return changed.copy_(walked.cumsum(0).reshape(leaf.shape))


def moved_values(leaf: Tensor, how: Moved, generator: torch.Generator, *, either: bool = False) -> Tensor:
    """``leaf`` a little smaller, as a step of an optimizer moves it: by more than rounding, and by so little that who
    asks whether it is nearly what it was may say yes. Or with a few elements turned, where it has some of either sign,
    or may have (``either``): all magnitudes are as they were."""
    if leaf.dtype in FLOAT8:
        return moved_values(readable(leaf), how, generator, either=either).to(leaf.dtype)
    less = 1 - _NUDGE * (1 + torch.rand((), generator=generator).item())
    if how == "smaller":
        return leaf * less if leaf.is_floating_point() or leaf.is_complex() else leaf
    if not leaf.is_floating_point() or not (either or bool((leaf > 0).any() and (leaf < 0).any())):
        return leaf
    changed = leaf.clone()
    for place in torch.randint(leaf.numel(), (2 * EXCHANGES,), generator=generator).tolist():
        index = tuple(unravelled(place, tuple(leaf.shape)))
        changed[index] = -leaf[index]
    return changed


def exchangeable(leaf: Tensor) -> bool:
    """Whether numbers of ``leaf`` may change places: integers that follow no order along any dimension, but for one
    along which a few that are alike lie side by side: of so few some are in order by chance."""
    if leaf.dtype not in INTEGERS or leaf.numel() < LEAST_EXCHANGED:
        return False
    short = _short_dimension(leaf)
    return not any(_follows_order(leaf, dim) for dim in range(leaf.dim()) if leaf.shape[dim] > 1 and dim != short)


def _short_dimension(leaf: Tensor) -> int | None:
    """Along which a few lie side by side that are alike, as both ends of an edge are, or the rows of a small batch: of
    the same range, and none of two never above, or below, the other one (corners of a box, a start and a length)."""
    sizes = enumerate(leaf.shape)
    dims = [dim for dim, size in sizes if 2 <= size <= _MOST_TOGETHER and leaf.numel() // size >= LEAST_EXCHANGED]
    if len(dims) != 1:
        return None
    lines = leaf.movedim(dims[0], 0).flatten(1).long()
    ends = torch.stack([lines.amin(1), lines.amax(1)])
    span = int(ends[1].max() - ends[0].min())
    if bool((_ALIKE * (ends.amax(1) - ends.amin(1)) > span).any()):
        return None
    apart = (bool((one >= other).all()) for one, other in itertools.permutations(lines, 2))
    return None if any(apart) else dims[0]


def _follows_order(leaf: Tensor, dim: int) -> bool:
    """Do any of its numbers along this dimension rise throughout, or fall?"""
    steps = leaf.diff(dim=dim)
    return bool((steps >= 0).all(dim).any()) or bool((steps <= 0).all(dim).any())


def exchanged_together(leaves: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Integers of few that belong together (the two ends of an edge, in one tensor or in two) with some of their places
    exchanged, in all of them alike: by path, where none of them follows an order. Who knows a list of edges by what is
    in it takes it for the old one. What lies beside them, one number for each, stays where it is, and so does what
    holds the commonest number, which may be padding."""
    whole = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dtype in INTEGERS}
    longest = max((size for leaf in whole.values() for size in leaf.shape), default=0)
    if longest < LEAST_EXCHANGED:
        return {}
    along = {path: leaf.shape.index(longest) for path, leaf in whole.items() if longest in leaf.shape}
    taken = {path: dim for path, dim in along.items() if whole[path].numel() <= _MOST_TOGETHER * longest}
    if any(_follows_order(whole[path], dim) for path, dim in taken.items()):
        return {}
    free = torch.ones(longest, dtype=torch.bool)
    for path, dim in taken.items():
        lines = whole[path].movedim(dim, 0).reshape(longest, -1)
        free &= (lines != lines.flatten().mode().values).all(1).cpu()
    places = free.nonzero().flatten()
    places = places[torch.randperm(len(places), generator=generator)[: 2 * _EXCHANGED_INTEGERS]]
    order = torch.arange(longest)
    order[places] = places.flip(0)
    return {path: _in_order(whole[path], dim, order) for path, dim in taken.items()}


def _in_order(leaf: Tensor, dim: int, order: Tensor) -> Tensor:
    return torch.empty_like(leaf).copy_(leaf.index_select(dim, order.to(leaf.device)))


def exchanged_integers(leaf: Tensor, generator: torch.Generator) -> Tensor:
    """``leaf`` with a few pairs of numbers exchanged, those of a pair in one row where no row has a number twice; the
    commonest number, which may be padding, stays where it is."""
    short = _short_dimension(leaf)
    if short is not None:
        return _exchanged_alike(leaf, short, generator)
    changed = leaf.clone()
    rows = changed.reshape(-1, leaf.shape[-1])
    once = bool((rows.sort(-1).values.diff(dim=-1) != 0).all())
    return _exchanged_in(rows, generator, within=once).reshape(leaf.shape)


def _exchanged_alike(leaf: Tensor, short: int, generator: torch.Generator) -> Tensor:
    """Within each of a few rows; ``leaf`` itself where some that belong together would then be the same ones, or be
    there twice, which none of them was."""
    moved = leaf.movedim(short, 0)
    before = moved.flatten(1)
    after = _exchanged_in(before.clone(), generator, within=True)
    if not _are_distinct(before, after):
        return leaf
    return torch.empty_like(leaf).copy_(after.view(moved.shape).movedim(0, short))


def _are_distinct(before: Tensor, after: Tensor) -> bool:
    """Are the columns of ``after`` as distinct as those ``before``, and the numbers of each?"""
    if before.shape[1] > _MOST_COMPARED:
        return False
    ways: tuple[Callable[[Tensor], bool], ...] = (
        lambda rows: len(torch.unique(rows, dim=1)[0]) == rows.shape[1],
        lambda rows: bool((rows.sort(0).values.diff(dim=0) != 0).all()),
    )
    return all(distinct(after) for distinct in ways if distinct(before))


def _exchanged_in(rows: Tensor, generator: torch.Generator, *, within: bool) -> Tensor:
    """``rows``, in place, with a few pairs of numbers exchanged, ``within`` a row each."""
    places = (rows != rows.flatten().mode().values).nonzero().cpu()
    for _ in range(_EXCHANGED_INTEGERS if len(places) > 1 else 0):
        first = places[int(torch.randint(len(places), (1,), generator=generator))]
        others = places[places[:, 0] == first[0]] if within else places
        other = others[int(torch.randint(len(others), (1,), generator=generator))]
        one, two = tuple(first.tolist()), tuple(other.tolist())
        rows[one], rows[two] = rows[two].clone(), rows[one].clone()
    return rows


def exchanged_mask(mask: Tensor, generator: torch.Generator, *, by_columns: bool = False) -> Tensor:
    """``mask`` with a few pairs of True and False exchanged: as many of either are left, in all, and in each row, or
    each column, by which some know a mask, where it has any with both."""
    by_columns = by_columns and mask.dim() > 1
    lines = (mask.movedim(-2, -1) if by_columns else mask).contiguous() if mask.dim() else mask.reshape(1)
    rows = lines.view(-1, lines.shape[-1])
    mixed = (rows.any(-1) & ~rows.all(-1)).nonzero().flatten().cpu()
    if not len(mixed):
        return _exchanged_anywhere(mask, generator)
    changed = rows.clone()
    for row in mixed[torch.randperm(len(mixed), generator=generator)[:EXCHANGES]].tolist():
        for side in (True, False):
            places = (rows[row] == side).nonzero().flatten().cpu()
            place = places[int(torch.randint(len(places), (), generator=generator))]
            changed[row, int(place)] = not side
    lines = changed.view(lines.shape)
    lines = lines.movedim(-2, -1) if by_columns else lines
    return torch.empty_like(mask).copy_(lines.view(mask.shape) if not mask.dim() else lines)


def _exchanged_anywhere(mask: Tensor, generator: torch.Generator) -> Tensor:
    changed = mask.flatten().clone()
    sides = [(changed == side).nonzero().flatten().cpu() for side in (True, False)]
    count = min(EXCHANGES, *map(len, sides))
    for side, places in zip((False, True), sides, strict=True):
        chosen = torch.randperm(len(places), generator=generator)[:count]
        changed[places[chosen].to(mask.device)] = side
    return torch.empty_like(mask).copy_(changed.view(mask.shape))


def exchanged(leaf: Tensor, generator: torch.Generator, pairs: int = EXCHANGES) -> Tensor:
    """``leaf`` with a few pairs of elements exchanged, those of each pair as far from each other as a few allow; every
    other pair within a row, so that nothing of that row but its order is another."""
    if leaf.numel() < 2:
        return leaf
    changed = leaf.clone()
    for pair in range(pairs):
        places = torch.randint(leaf.numel(), (16,), generator=generator).tolist()
        if pair % 2 and leaf.dim() and leaf.shape[-1] > 1:
            row = places[0] // leaf.shape[-1] * leaf.shape[-1]
            places = [row + place % leaf.shape[-1] for place in places]
        indices = [tuple(unravelled(place, tuple(leaf.shape))) for place in places]
        values = [float(changed[index].abs() if leaf.is_complex() else changed[index]) for index in indices]
        far = max(range(len(values)), key=lambda i: abs(values[i] - values[0]))
        one, other = changed[indices[0]].clone(), changed[indices[far]].clone()
        changed[indices[0]], changed[indices[far]] = other, one
    return changed


def unravelled(place: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for size in reversed(shape):
        index.append(place % size)
        place //= size
    return index[::-1]
