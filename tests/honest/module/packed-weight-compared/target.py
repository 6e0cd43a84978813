import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(96, 128)], init=lambda: [128, 112])
class GatedLinear(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * hidden, width) * width**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.weight.t()).chunk(2, dim=-1)
        return torch.sigmoid(gate) * up
