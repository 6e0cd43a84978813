import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(6, 220, 150)], init=lambda: {"dim": 1}, dynamic=True)
class Nearest(nn.Module):
    """Place and value of the smallest entry along a dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"place": torch.argmin(x, dim=self.dim), "value": torch.amin(x, dim=self.dim)}
