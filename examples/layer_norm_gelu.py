"""LayerNorm, GELU and a residual connection: three passes over memory in eager mode."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target

WIDTH = 2048
ROWS = 8192 if torch.cuda.is_available() else 192


@forge_target(
    inputs=lambda: [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)],
    init=lambda: [WIDTH],
)
class LayerNormGeluResidual(nn.Module):
    """``residual + gelu(layer_norm(x))`` with the exact (erf) GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + F.gelu(self.norm(x))
