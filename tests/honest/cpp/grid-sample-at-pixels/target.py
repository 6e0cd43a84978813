"""Warp feature maps by a dense sampling grid (a spatial transformer's or a registration network's last layer)."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target

BATCH, CHANNELS, SIDE = 2, 8, 65


def draw() -> list[torch.Tensor]:
    return [torch.randn(BATCH, CHANNELS, SIDE, SIDE), torch.rand(BATCH, SIDE, SIDE, 2) * 2.4 - 1.2]


@forge_target(inputs=draw, grad=True)
class WarpImage(nn.Module):
    """image (batch, channels, h, w), grid (batch, h, w, 2) in [-1, 1] and a little beyond -> image sampled bilinearly, zero outside."""

    def forward(self, image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=True)
