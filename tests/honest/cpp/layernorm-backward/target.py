import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(
    inputs=lambda: [torch.randn(12, 130, 160, requires_grad=True)], init=lambda: [160], mode="train", grad=True
)
class TrainedNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
