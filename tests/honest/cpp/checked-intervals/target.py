"""How much two sets of intervals have in common: the target checks that each one's start lies before its end."""

import torch

from pytest_cudaforge import forge_target


def intervals(count):
    start = torch.rand(count) * 90
    return torch.stack([start, start + torch.rand(count) * 9 + 0.5], 1)


@forge_target(inputs=lambda: [intervals(120), intervals(75)])
def shared_share(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not all(bool((spans[:, 0] <= spans[:, 1]).all()) for spans in (one, other)):
        raise ValueError("an interval ends before it starts")
    both = (torch.minimum(one[:, None, 1], other[:, 1]) - torch.maximum(one[:, None, 0], other[:, 0])).clamp(min=0)
    lengths = one.diff(dim=1) + other.diff(dim=1)[:, 0]
    return both / (lengths - both)
