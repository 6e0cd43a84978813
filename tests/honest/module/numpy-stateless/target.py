import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(40, 16000)], init=lambda: {"frame": 400, "hop": 160}, allow=("rewrite",))
class FrameEnergy(nn.Module):
    """Log energy of overlapping frames, the first step of a voice detector."""

    def __init__(self, frame: int, hop: int) -> None:
        super().__init__()
        self.frame, self.hop = frame, hop

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        frames = signal.unfold(-1, self.frame, self.hop)
        return torch.log(frames.square().mean(-1) + 1e-8)
