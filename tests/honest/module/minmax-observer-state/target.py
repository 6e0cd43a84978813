import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(500, 1400)], init=lambda: {"momentum": 0.05}, mode="train")
class RangeObserver(nn.Module):
    """Moving average of a tensor's range; values beyond it are clipped."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))

    def forward(self, x: torch.Tensor):
        self.low.lerp_(x.min(), self.momentum)
        self.high.lerp_(x.max(), self.momentum)
        scale = (self.high - self.low) / 255.0
        return (torch.clamp(x, self.low, self.high), {"scale": scale, "range": [self.low.clone(), self.high.clone()]})
