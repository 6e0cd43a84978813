import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(500, 2)], init=lambda: [], dynamic=True)
class PointEncoder(nn.Module):
    """Any number of points in the plane, normalised by a learnt scale and offset; their radius beside them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.offset = nn.Parameter(torch.zeros(2))

    def forward(self, points):
        p = points * self.scale + self.offset
        return p, p.square().sum(-1).sqrt()
