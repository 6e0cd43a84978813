"""Attention's softmax over scores with a boolean mask given by keyword."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

HEADS = 8
LENGTH = 2048 if torch.cuda.is_available() else 192


def draw() -> dict[str, torch.Tensor]:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return {"scores": torch.randn(HEADS, LENGTH, LENGTH), "mask": causal}


@forge_target(inputs=draw, init=lambda: {"head_size": 64})
class MaskedSoftmax(nn.Module):
    """``softmax(scores / sqrt(head_size))`` over the last dimension where ``mask`` is True."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.scale = head_size**-0.5

    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = (scores * self.scale).masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, dim=-1)
