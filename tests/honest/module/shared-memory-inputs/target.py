"""Windows that slide over a signal and over its codes, and values that are expanded along rows."""

import torch
from torch import nn

from pytest_cudaforge import forge_target


def draw() -> list[torch.Tensor]:
    return [
        torch.randn(200).unfold(0, 16, 4),
        torch.randint(0, 500, (200,)).unfold(0, 16, 4),
        torch.randn(1).expand(47),
        torch.randint(0, 500, (47, 1)).expand(47, 16),
        (torch.rand(1, 16) > 0.5).expand(47, 16),
        torch.randn(8, 64).t(),
    ]


@forge_target(inputs=draw, allow=("kernel", "mixed", "library", "rewrite"), grad=True)
class Windows(nn.Module):
    def forward(
        self,
        signal: torch.Tensor,
        codes: torch.Tensor,
        gain: torch.Tensor,
        shift: torch.Tensor,
        mask: torch.Tensor,
        turned: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ((signal * codes + shift) * mask).sum(-1) * gain, turned * 2
