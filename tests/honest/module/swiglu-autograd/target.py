import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(
    inputs=lambda: [torch.randn(500, 900, requires_grad=True), torch.randn(500, 900, requires_grad=True)],
    mode="train",
    grad=True,
)
class SwiGLU(nn.Module):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up
