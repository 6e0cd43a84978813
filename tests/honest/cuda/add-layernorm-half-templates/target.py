"""A pre-norm transformer's residual addition and layer norm, in half precision with float32 weights."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target

WIDTH = 4096


def pair(*shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(*shape, dtype=dtype), torch.randn(*shape, dtype=dtype)]


@forge_target(
    workloads={
        "bf16": lambda: pair(8, 1024, WIDTH, dtype=torch.bfloat16),
        "fp16": lambda: pair(8, 1024, WIDTH, dtype=torch.float16),
        "decode": lambda: pair(32, 1, WIDTH, dtype=torch.bfloat16),
    },
    init=lambda: [WIDTH],
)
class AddLayerNorm(nn.Module):
    """(hidden, residual) -> (layer norm of their sum, their sum), both in the dtype of the inputs."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = hidden + residual
        normed = F.layer_norm(total.float(), (self.width,), self.weight, self.bias, self.eps)
        return normed.to(hidden.dtype), total
