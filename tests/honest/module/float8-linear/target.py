"""A linear layer whose inputs and weights have eight bits, with scales, and its answer in eight bits again."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

ROWS, FEATURES, OUTPUTS = 32, 128, 64


def draw() -> list[torch.Tensor]:
    x = torch.randn(ROWS, FEATURES)
    scale = x.abs().amax(1, keepdim=True) / 448.0
    return [(x / scale).to(torch.float8_e4m3fn), scale, torch.randn(ROWS, FEATURES).to(torch.float8_e5m2)]


@forge_target(inputs=draw, allow=("kernel", "mixed", "library", "rewrite"))
class Float8Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(OUTPUTS, FEATURES).to(torch.float8_e4m3fn))

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x.float() * scale + shift.float()) @ self.weight.float().t()
        return y, y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
