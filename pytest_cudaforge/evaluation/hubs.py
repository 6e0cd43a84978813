"""Sorted labels of which one has nearly all places: a batch of graphs with one large one. In the oracle's process only.

Where work is split by places, all parts of it then end in one and the same sum, at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.structures import INTEGERS, LEAST_EXCHANGED

__all__ = ["HUB", "Hubs", "hubs_of"]

HUB = "hub"
#: So many draws say that labels are sorted; rows of them at most.
_ENOUGH_DRAWS, _MOST_ROWS = 16, 256
#: Where so many neighbours at least are alike they label something; ends of segments, which are sorted as well, differ.
_ALIKE = 0.5


@dataclass(frozen=True)
class Hubs:
    """``path``: of the input with the labels."""

    path: str

    def put(self, leaves: dict[str, Any], generator: torch.Generator) -> None:
        """In place of a call's own labels, sorted as those: one has all places but one of each of the others.
        ``generator``: on the CPU."""
        leaf = leaves.get(self.path)
        if isinstance(leaf, Tensor) and _are_labels(leaf.cpu()):
            rows = [_with_hub(row, generator) for row in leaf.cpu().reshape(-1, leaf.shape[-1])]
            leaves[self.path] = torch.empty_like(leaf).copy_(torch.stack(rows).reshape(leaf.shape))


def hubs_of(draws: Iterable[Mapping[str, Any]]) -> Hubs | None:
    """Where one input alone holds integers, and these are sorted labels in all ``draws``: others might count them."""
    found: set[str] = set()
    for count, leaves in enumerate(draws, 1):
        whole = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.dtype in INTEGERS}
        if len(whole) != 1 or not all(_are_labels(leaf.cpu()) for leaf in whole.values()):
            return None
        found |= set(whole)
        if count >= _ENOUGH_DRAWS:
            break
    return Hubs(found.pop()) if len(found) == 1 else None


def _are_labels(leaf: Tensor) -> bool:
    if leaf.dim() == 0 or leaf.numel() < LEAST_EXCHANGED or leaf.dtype == torch.bool:
        return False
    rows = leaf.reshape(-1, leaf.shape[-1])
    steps = rows.to(torch.int64).diff(dim=-1)
    if rows.shape[0] > _MOST_ROWS or steps.numel() == 0 or bool((steps < 0).any()):
        return False
    return bool((steps > 0).any()) and float((steps == 0).double().mean()) >= _ALIKE


def _with_hub(row: Tensor, generator: torch.Generator) -> Tensor:
    labels: Tensor = row.unique()  # type: ignore[no-untyped-call]
    hub = int(torch.randint(len(labels), (), generator=generator))
    counts = torch.ones(len(labels), dtype=torch.int64)
    counts[hub] += len(row) - len(labels)
    return labels.repeat_interleave(counts)
