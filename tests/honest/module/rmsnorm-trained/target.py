import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(
    inputs=lambda: [torch.randn(8, 450, 128, requires_grad=True)], init=lambda: [128], mode="train", grad=True
)
class TrainedRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
