import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(16, 200, 64)], init=lambda: [64], allow=("kernel", "mixed"))
class AttentionPool(nn.Module):
    """One vector per sequence, weighted by tanh scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width) * width**-0.5)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (torch.tanh(x + self.bias) * self.query).sum(-1)
        weights = torch.softmax(scores, dim=-1)
        return torch.bmm(weights.unsqueeze(1), x).squeeze(1), weights
