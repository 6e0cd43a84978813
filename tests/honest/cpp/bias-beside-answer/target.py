import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(40, 12, 64)], init=lambda: [64])
class Normalised(nn.Module):
    """Directions plus a bias, and the bias for everybody."""

    def __init__(self, dim):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = torch.nn.functional.normalize(x, dim=-1)
        return y + self.bias, self.bias
