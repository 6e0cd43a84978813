"""The selective state space scan of Mamba (Gu and Dao, arXiv 2312.00752), step by step as its reference does it."""

import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target

BATCH, LENGTH, CHANNELS, STATES = 8, 64, 2048, 16


def draw() -> list[torch.Tensor]:
    return [
        torch.randn(BATCH, LENGTH, CHANNELS),
        torch.randn(BATCH, LENGTH, CHANNELS) - 2.0,
        torch.randn(BATCH, LENGTH, STATES),
        torch.randn(BATCH, LENGTH, STATES),
    ]


@forge_target(inputs=draw, init=lambda: [CHANNELS, STATES])
class SelectiveScan(nn.Module):
    """``h = exp(dt * A) * h + dt * B * u`` and ``y = C h + D u`` with ``dt = softplus(delta)`` and ``A = -exp(log_a)``."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.log(torch.arange(1, states + 1, dtype=torch.float32)).repeat(channels, 1))
        self.skip = nn.Parameter(torch.ones(channels))

    def forward(self, u: torch.Tensor, delta: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        a = -torch.exp(self.log_a)
        step = F.softplus(delta)
        state = u.new_zeros(u.shape[0], u.shape[2], a.shape[1])
        outputs = []
        for t in range(u.shape[1]):
            decay = torch.exp(step[:, t, :, None] * a)
            state = decay * state + (step[:, t] * u[:, t])[:, :, None] * b[:, t, None, :]
            outputs.append((state * c[:, t, None, :]).sum(-1))
        return torch.stack(outputs, dim=1) + u * self.skip
