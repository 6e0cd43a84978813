"""Integers from a wide range, as identifiers are: such that are alike in their low bits, and such that lie close
together. A table that hashes them by some bits is a list for those that share these (ids by shard, by time, pages by
their address). Both maps keep what is equal equal and what is ordered ordered. In the oracle's process only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["IDENTIFIERS", "Identifiers", "identifiers_of"]

#: aligned: multiples of one large power of two; close: next to each other, near the lower end of their range.
IDENTIFIERS = ("aligned", "close")
#: Narrower ranges are of classes, places, lengths; by how much it is wider than there are numbers, and how many times
#: as many numbers as there are the redrawn ones come from.
_WIDE, _SPARSE, _ROOM = 1 << 20, 64, 8
_TYPES = (torch.int64, torch.int32)
#: Draws that tell of a range.
_MOST_DRAWS = 64


@dataclass(frozen=True)
class Identifiers:
    """By input path: the least and the most that was drawn there. ``step``: how far apart redrawn ones are."""

    of: Mapping[str, tuple[int, int]]
    step: int

    def put(self, family: str, leaves: dict[str, Any]) -> None:
        """Into a call's leaves, of whatever shapes."""
        lows, highs = zip(*self.of.values(), strict=True)
        for path, (low, _) in self.of.items():
            leaf = leaves.get(path)
            if isinstance(leaf, Tensor):
                whole = leaf.to(torch.int64)
                if family == "aligned":
                    whole = whole.div(self.step, rounding_mode="floor") * self.step
                    whole = torch.where(whole < min(lows), whole + self.step, whole)
                else:  # nearer to what all ranges have, if there is such
                    anchor = max(lows) if max(lows) <= min(highs) else low
                    whole = anchor + (whole - anchor).div(self.step, rounding_mode="floor")
                leaves[path] = torch.empty_like(leaf).copy_(whole)


def identifiers_of(draws: Iterable[Mapping[str, Any]]) -> Identifiers | None:
    """Of a call's integers those that draws take from a wide range, of which they show little; None where none do."""
    ends: dict[str, tuple[int, int]] = {}
    numbers = 0
    for number, leaves in enumerate(draws):
        if number == _MOST_DRAWS:
            break
        whole = {p: leaf for p, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dtype in _TYPES}
        numbers = max(numbers, sum(leaf.numel() for leaf in whole.values()))
        for path, leaf in whole.items():
            if leaf.numel():
                low, high = int(leaf.min()), int(leaf.max())
                before = ends.get(path, (low, high))
                ends[path] = (min(low, before[0]), max(high, before[1]))
    wide = {p: (low, high) for p, (low, high) in ends.items() if high - low >= max(_WIDE, _SPARSE * numbers)}
    if not wide:
        return None
    room = min(high - low for low, high in wide.values()) // (_ROOM * numbers)
    return Identifiers(wide, 1 << (room.bit_length() - 1))
