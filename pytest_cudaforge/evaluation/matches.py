"""Rows of integers that are what another tensor holds already: who is looked for is there, and what two codes come to
together is as much as it can be. In the oracle's process only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.evaluation.structures import INTEGERS

__all__ = ["MATCHING", "matches_of", "matching"]

MATCHING = "matching"
#: Shorter rows are met with by chance, or are places; the share of rows that are another's, and where they differ.
_FEWEST_IN_A_ROW, _MATCHED, _DIFFERENT = 8, 1 / 2, 1 / 32


def matches_of(leaves: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By input path the tensor, of the state or of an input before it, whose rows it may have: of as many numbers, and
    none that it does not have."""
    found: dict[str, Tensor] = {}
    known = [tensor for tensor in state.values() if _has_rows(tensor)]
    for path, leaf in leaves.items():
        if isinstance(leaf, Tensor) and _has_rows(leaf):
            low, high = leaf.aminmax()
            for other in known:
                alike = other.dtype == leaf.dtype and other.shape[-1] == leaf.shape[-1]
                if alike and bool(other.min() >= low) and bool(other.max() <= high):
                    found[path] = other
                    break
            known.append(leaf)
    return found


def matching(leaves: dict[str, Any], state: Mapping[str, Tensor], generator: torch.Generator) -> None:
    """Half of the rows of what has matches are another tensor's, some but for a few numbers. ``generator``: on the
    CPU."""
    for path, other in matches_of(leaves, state).items():
        leaf = leaves[path]
        rows, others = leaf.reshape(-1, leaf.shape[-1]).clone(), other.detach().reshape(-1, other.shape[-1])
        chance = torch.rand((2, len(rows), 1), generator=generator).to(leaf.device)
        which = (torch.rand(len(rows), generator=generator) * len(others)).long().to(leaf.device)
        same = torch.rand(rows.shape, generator=generator).to(leaf.device) >= _DIFFERENT * (chance[1] < 1 / 2)
        rows = torch.where((chance[0] < _MATCHED) & same, others.to(leaf.device)[which], rows)
        leaves[path] = torch.empty_like(leaf).copy_(rows.view(leaf.shape))


def _has_rows(tensor: Tensor) -> bool:
    return tensor.dtype in INTEGERS and tensor.dim() > 1 and tensor.shape[-1] >= _FEWEST_IN_A_ROW and tensor.numel() > 0
