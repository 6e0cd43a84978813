import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(800, 1000)], init=lambda: [1000], dynamic=True)
class TokenNorm(nn.Module):
    """LayerNorm with affine parameters, as in front of every block of an encoder."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
