import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(
    workloads={"prefill": lambda: [torch.randn(2, 37, 200)], "decode": lambda: [torch.randn(1, 1, 200)]},
    init=lambda: [200, 330],
    allow=("kernel",),
)
class UpProjection(nn.Module):
    """The first half of a transformer's feed-forward block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.proj(x))
