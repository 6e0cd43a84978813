"""A recurrent layer over a short sequence, as speech models have it before their attention."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

STEPS, BATCH, INPUT, HIDDEN = 192, 16, 256, 512


@forge_target(
    inputs=lambda: [torch.randn(STEPS, BATCH, INPUT), torch.randn(1, BATCH, HIDDEN)],
    init=lambda: [INPUT, HIDDEN],
)
class RecurrentLayer(nn.Module):
    """(steps, batch, input) and the first state (1, batch, hidden) -> all states and the last one."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, hidden)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gru(x, state)
