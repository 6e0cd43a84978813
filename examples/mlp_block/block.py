"""A feed-forward block: two matrix products with a squared ReLU between and a residual after.

The products stay with the library; what surrounds them is worth fusing, so ``allow`` names the label.
"""

import torch
from torch import nn

from pytest_cudaforge import forge_target

from .activation import squared_relu

WIDTH, HIDDEN = 256, 1024
ROWS = 4096 if torch.cuda.is_available() else 64


@forge_target(
    inputs=lambda: [torch.randn(ROWS, WIDTH)],
    init=lambda: [WIDTH, HIDDEN],
    allow=("kernel", "mixed", "library"),
)
class MLPBlock(nn.Module):
    """``x + down(squared_relu(up(x)))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(squared_relu(self.up(x)))
