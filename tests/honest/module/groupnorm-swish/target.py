import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(12, 64, 28, 28)], init=lambda: [8, 64])
class GroupNormSiLU(nn.Module):
    """In front of each convolution of a diffusion model's residual block."""

    def __init__(self, groups: int, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(F.group_norm(x, self.groups, self.weight, self.bias, self.eps))
