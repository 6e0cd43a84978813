"""RMSNorm as a language model uses it, before every attention and MLP block."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

HIDDEN = 4096
ROWS = 8192 if torch.cuda.is_available() else 128


@forge_target(inputs=lambda: [torch.randn(ROWS, HIDDEN)], init=lambda: [HIDDEN])
class RMSNorm(nn.Module):
    """Scale each row by the reciprocal of its root mean square (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, hidden: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.weight
