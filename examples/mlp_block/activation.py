"""The activation that the block uses."""

import torch


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """``relu(x) ** 2`` (So et al., Primer, arXiv 2109.08668)."""
    return torch.relu(x).square()
