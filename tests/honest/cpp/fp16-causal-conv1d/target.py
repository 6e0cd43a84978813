import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(2, 96, 250).half()], init=lambda: [96, 4], precision="fp16")
class ShortConv(nn.Module):
    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.taps = taps
        self.weight = nn.Parameter((torch.randn(channels, taps) * 0.5).half())
        self.bias = nn.Parameter(torch.zeros(channels, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.pad(x.float(), (self.taps - 1, 0))
        total = self.bias.float()[:, None]
        for tap in range(self.taps):
            total = total + wide[..., tap : tap + x.shape[-1]] * self.weight.float()[:, tap, None]
        return F.silu(total).to(x.dtype)
