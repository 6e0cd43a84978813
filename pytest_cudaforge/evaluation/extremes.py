"""Integers as large as a target draws them, or as small, everywhere at once: sums and products are as far out as they
come, and many numbers alike. In the oracle's process only.

Of few numbers many draws are looked at, and each place gets the most that stood there. Of many numbers few draws are,
and a place gets what stood in its row and in its column, so that features of their own ranges, and rows that end early,
keep theirs. Integers that may follow from others are left alone, and with them all: an order, a permutation, a count,
a code that goes with another one's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.structures import INTEGERS, LEAST_EXCHANGED

__all__ = ["EXTREMES", "Extremes", "bound_together", "extremes_of"]

#: The most everywhere, and the least; frequent: the same number at most places; opposed: some leading entries as large
#: as they may be, and the others as small, the other way round in every other input, where there are several.
EXTREMES = ("highest", "lowest", "frequent", "opposed")
#: So many numbers of a call are looked at, at most, and so many of all draws; those of a row that tell of repeats.
_MOST_NUMBERS, _MOST_IN_ALL, _TOLD_NUMBERS = 1 << 22, 1 << 21, 1 << 17
#: The share of places where "frequent" puts its number.
_FREQUENT = 0.9
#: Draws that say of each place what may stand there.
_ENOUGH_DRAWS = 16


@dataclass(frozen=True)
class Extremes:
    """By input path: the most and the least that each place may have, on the CPU."""

    of: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def families(self) -> tuple[str, ...]:
        return EXTREMES if len(self.of) > 1 else EXTREMES[:-1]

    def put(self, family: str, leaves: dict[str, Any], generator: torch.Generator) -> None:
        """Into a call's leaves, which stay as they are in a variant of other shapes. ``generator``: on the CPU."""
        found = {path: leaves.get(path) for path in self.of}
        if all(isinstance(leaf, Tensor) and leaf.shape == self.of[path][0].shape for path, leaf in found.items()):
            sides = torch.rand(max(len(most) for most, _ in self.of.values()), generator=generator) < 1 / 2
            for number, (path, (most, least)) in enumerate(self.of.items()):
                leaf = leaves[path]
                whole = {"highest": most, "lowest": least}.get(family)
                if family == "opposed":
                    upper = sides[: len(most)].logical_xor(torch.tensor(bool(number % 2)))
                    whole = torch.where(upper.reshape(-1, *(1,) * (most.dim() - 1)), most, least)
                whole = _with_frequent(leaf.cpu(), most, least, generator) if whole is None else whole
                leaves[path] = torch.empty_like(leaf).copy_(whole)


def extremes_of(draws: Iterable[Mapping[str, Any]]) -> Extremes | None:
    """Of all of a call's integers, as so many ``draws`` of it show them. None where some may follow from others, or a
    mask beside them tells which of them count."""
    drawn: dict[str, list[Tensor]] = {}
    for leaves in draws:
        tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
        whole = {path: leaf.detach() for path, leaf in tensors.items() if leaf.dtype in INTEGERS}
        numbers = sum(leaf.numel() for leaf in whole.values())
        if not 0 < numbers <= _MOST_NUMBERS or any(leaf.dtype == torch.bool for leaf in tensors.values()):
            return None
        if drawn and {p: leaf.shape for p, leaf in whole.items()} != {p: one[0].shape for p, one in drawn.items()}:
            return None
        for path, leaf in whole.items():
            drawn.setdefault(path, []).append(leaf.cpu())
        count = len(next(iter(drawn.values())))
        if count > 1 and count * numbers > _MOST_IN_ALL:
            break
    stacked = {path: torch.stack(found) for path, found in drawn.items()}
    if not stacked or len(next(iter(stacked.values()))) < 2 or not all(map(_are_free, stacked.values())):
        return None
    # Of several, few may be sizes, or choices among the others.
    few = any(one[0].numel() < LEAST_EXCHANGED for one in stacked.values())
    if len(stacked) > 1 and (few or any(_go_together(*pair) for pair in itertools.combinations(stacked.values(), 2))):
        return None
    return Extremes({path: (_most(one), -_most(-one.to(torch.int64))) for path, one in stacked.items()})


def _with_frequent(drawn: Tensor, most: Tensor, least: Tensor, generator: torch.Generator) -> Tensor:
    """With one of its numbers at most places, as chance says, if that number may stand there."""
    place = int(torch.randint(drawn.numel(), (), generator=generator))
    number = int(drawn.flatten()[place])
    free = (torch.rand(drawn.shape, generator=generator) < _FREQUENT) & (least <= number) & (number <= most)
    return drawn.masked_fill(free, number)


def bound_together(flat: Tensor, shape: tuple[int, ...]) -> bool:
    """Is the same all draws' sum, or that of each row, or their product? ``flat``: (draws, numbers), int64."""
    if bool((flat == flat[0]).all()):
        return True
    rows = flat.reshape(len(flat), -1, shape[-1] if shape else 1)
    sums, products = flat.sum(1), flat.double().prod(1)
    same_rows = rows.shape[-1] > 1 and bool((rows.sum(-1) == rows.sum(-1)[:1]).all())
    multiplied = bool((products == products[0]).all()) and bool(products[0].isfinite()) and bool(products[0] != 0)
    return same_rows or bool((sums == sums[0]).all()) or multiplied


def _are_free(drawn: Tensor) -> bool:
    """May each be as large as any? Where rows never have a number twice they may be places, or an order."""
    shape = tuple(drawn.shape[1:])
    if math.prod(shape) < 2:
        return False
    flat = drawn.flatten(1).to(torch.int64)
    rows = flat.reshape(-1, shape[-1] if shape else 1)
    rows = rows[: max(2, _TOLD_NUMBERS // max(1, rows.shape[1]))]
    steps = rows.diff(dim=-1)
    if rows.shape[1] < 2 or bool((steps >= 0).all()) or bool((steps <= 0).all()):
        return False
    repeats = bool((rows.sort(dim=-1).values.diff(dim=-1) == 0).any())
    return repeats and int(flat.max()) - int(flat.min()) > 1 and not bound_together(flat, shape)


def _go_together(one: Tensor, other: Tensor) -> bool:
    """Does one say what the other is, element by element, or do they always add up to the same?"""
    if one.shape != other.shape:
        return False
    first, second = (tensor.flatten()[:_TOLD_NUMBERS].to(torch.int64) for tensor in (one, other))
    if bool((first + second == first[0] + second[0]).all()):
        return True
    pairs = _distinct(torch.stack([first, second]))
    return any(pairs == _distinct(tensor[None]) < len(first) for tensor in (first, second))


def _distinct(columns: Tensor) -> int:
    return len(torch.unique(columns, dim=1)[0])


def _most(drawn: Tensor) -> Tensor:
    """What each place may have at most; of few draws, what its row and its column had. ``drawn``: (draws, *shape)."""
    wide = drawn.to(torch.int64)
    if len(wide) >= _ENOUGH_DRAWS or wide.dim() < 3:
        return wide.amax(0)
    rows = wide.reshape(len(wide), -1, wide.shape[-1])
    return torch.minimum(rows.amax((0, 2))[:, None], rows.amax((0, 1))[None]).reshape(wide.shape[1:])
