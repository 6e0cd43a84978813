"""RMS norm plus an embedding of a token's kind (int32), for inputs in any strides."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

BATCH, LENGTH, WIDTH, KINDS = 8, 96, 256, 5


@forge_target(
    workloads={
        "rows": lambda: [
            torch.randn(BATCH, LENGTH, WIDTH),
            torch.randint(0, KINDS, (BATCH, LENGTH), dtype=torch.int32),
        ],
        "time_major": lambda: [
            torch.randn(LENGTH, BATCH, WIDTH).transpose(0, 1),
            torch.randint(0, KINDS, (LENGTH, BATCH), dtype=torch.int32).t(),
        ],
        "channels_first": lambda: [
            torch.randn(2, WIDTH, LENGTH).transpose(1, 2),
            torch.randint(0, KINDS, (2, 1), dtype=torch.int32).expand(2, LENGTH),
        ],
    },
    init=lambda: [WIDTH, KINDS],
    strides="any",
)
class StridedNorm(nn.Module):
    def __init__(self, width, kinds, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.kind = nn.Embedding(kinds, width)
        self.eps = eps

    def forward(self, x, kinds):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (y + self.kind(kinds)).contiguous()
