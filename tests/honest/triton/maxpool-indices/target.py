"""The pooling of SegNet's encoder: its decoder needs to know where each maximum was."""

import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(
    workloads={
        "fp32": lambda: [torch.randn(16, 64, 112, 112)],
        "fp16": lambda: [torch.randn(8, 64, 225, 223, dtype=torch.float16)],
    },
    init=lambda: [3, 2, 1],
)
class PoolWithIndices(nn.Module):
    """(batch, channels, height, width) -> pooled values and their places in the plane."""

    def __init__(self, kernel_size: int, stride: int, padding: int) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(kernel_size, stride, padding, return_indices=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool(x)
