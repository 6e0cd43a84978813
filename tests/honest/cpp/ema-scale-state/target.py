import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(300, 180)], init=lambda: {"channels": 180, "decay": 0.9}, mode="train")
class EmaScale(nn.Module):
    """Divides by a running average of each channel's mean magnitude."""

    def __init__(self, channels: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("scale", torch.ones(channels))

    def forward(self, x: torch.Tensor):
        self.scale.mul_(self.decay).add_(x.abs().mean(dim=0), alpha=1.0 - self.decay)
        return [x / (self.scale + 1e-6), {"scale": self.scale.clone()}]
