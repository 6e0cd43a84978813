import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(
    inputs=lambda: [torch.randn(600, 512).bfloat16(), torch.randn(600, 512).bfloat16()],
    init=lambda: [512],
    precision="bf16",
)
class AddNorm(nn.Module):
    """Residual connection and RMSNorm as served language models run them."""

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16))
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> dict[str, torch.Tensor]:
        total = x + residual
        wide = total.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return {"hidden": normed.to(x.dtype) * self.weight, "residual": total}
