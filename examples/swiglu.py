"""The gate of a SwiGLU feed-forward block: one projection came out as [gate, up] side by side."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target

WIDTH = 5632
ROWS = 8192 if torch.cuda.is_available() else 64


@forge_target(
    workloads={
        "prefill": lambda: [torch.randn(ROWS, 2 * WIDTH)],
        "decode": lambda: [torch.randn(16, 2 * WIDTH)],
    }
)
class SwiGLU(nn.Module):
    """``silu(gate) * up`` (Shazeer, arXiv 2002.05202)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
