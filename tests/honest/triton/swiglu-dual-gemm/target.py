"""The first half of a Llama feed-forward block."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target

WIDTH, HIDDEN = 2048, 5632


@forge_target(
    workloads={
        "prefill": lambda: [torch.randn(4, 512, WIDTH, dtype=torch.bfloat16)],
        "decode": lambda: [torch.randn(24, 1, WIDTH, dtype=torch.bfloat16)],
    },
    init=lambda: [WIDTH, HIDDEN],
    precision="bf16",
)
class GatedUp(nn.Module):
    """``silu(gate(x)) * up(x)``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(width, hidden, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)
