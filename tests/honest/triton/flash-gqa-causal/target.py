"""Causal grouped-query attention over whole sequences, written out as in a model's eager mode."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

BATCH, HEADS, KV_HEADS, SIZE = 2, 16, 4, 128


def draw(batch: int, tokens: int) -> list[torch.Tensor]:
    shapes = [(batch, HEADS, tokens, SIZE), (batch, KV_HEADS, tokens, SIZE), (batch, KV_HEADS, tokens, SIZE)]
    return [torch.randn(*shape, dtype=torch.bfloat16) for shape in shapes]


@forge_target(
    workloads={"2k": lambda: draw(BATCH, 2048), "odd": lambda: draw(1, 1000)},
    init=lambda: [SIZE],
    precision="bf16",
)
class CausalAttention(nn.Module):
    """(batch, heads, tokens, size) queries, (batch, kv heads, tokens, size) keys and values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = size**-0.5

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        tokens = query.shape[2]
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
        scores = torch.matmul(query, key.transpose(-1, -2)).float() * self.scale
        weights = torch.softmax(scores.masked_fill(later, float("-inf")), dim=-1)
        return torch.matmul(weights.to(query.dtype), value)
