"""A linear layer whose weights are stored in four bits (NF4, blocks of 64), as QLoRA keeps them."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target

BLOCK = 64
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@forge_target(
    workloads={
        "prefill": lambda: [torch.randn(2, 512, 4096, dtype=torch.float16)],
        "decode": lambda: [torch.randn(16, 1, 4096, dtype=torch.float16)],
    },
    init=lambda: [4096, 4096],
    precision="fp16",
)
class LinearNF4(nn.Module):
    """``x @ W.T + bias`` with ``W`` from two codes a byte (the first in the high half) and one scale per 64 of a row."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.register_buffer("packed", torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8))
        self.register_buffer("absmax", torch.rand(out_features, in_features // BLOCK) * 0.02 + 0.02)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = torch.stack((self.packed >> 4, self.packed & 15), dim=-1).flatten(1)
        levels = torch.tensor(NF4, dtype=torch.float32, device=x.device)[codes.long()]
        weight = levels.unflatten(1, (-1, BLOCK)) * self.absmax.unsqueeze(-1)
        return F.linear(x, weight.flatten(1).to(x.dtype), self.bias)
