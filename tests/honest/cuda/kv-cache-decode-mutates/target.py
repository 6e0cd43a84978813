"""One decoding step of grouped-query attention with a key-value cache in the module's buffers."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 8, 32, 8, 4096, 128


def draw() -> list[torch.Tensor]:
    return [
        torch.randn(BATCH, HEADS, SIZE, dtype=torch.float16),
        torch.randn(BATCH, KV_HEADS, SIZE, dtype=torch.float16),
        torch.randn(BATCH, KV_HEADS, SIZE, dtype=torch.float16),
        torch.randint(0, LENGTH, (BATCH,)),
    ]


@forge_target(inputs=draw, init=lambda: [BATCH, HEADS, KV_HEADS, LENGTH, SIZE], precision="fp16")
class CachedDecode(nn.Module):
    """Writes the new key and value at each sequence's position, then attends to everything up to it."""

    def __init__(self, batch: int, heads: int, kv_heads: int, length: int, size: int) -> None:
        super().__init__()
        self.group = heads // kv_heads
        self.length = length
        self.scale = size**-0.5
        # As a prefill left them.
        self.register_buffer("keys", torch.randn(batch, kv_heads, length, size, dtype=torch.float16))
        self.register_buffer("values", torch.randn(batch, kv_heads, length, size, dtype=torch.float16))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        batch, heads, size = query.shape
        rows = torch.arange(batch, device=query.device)
        self.keys[rows, :, position] = key
        self.values[rows, :, position] = value
        grouped = query.view(batch, heads // self.group, self.group, size).float()
        scores = torch.matmul(grouped, self.keys.float().transpose(-1, -2)) * self.scale
        hidden = torch.arange(self.length, device=query.device) > position[:, None]
        weights = torch.softmax(scores.masked_fill(hidden[:, None, None], float("-inf")), dim=-1)
        return torch.matmul(weights, self.values.float()).view(batch, heads, size).to(query.dtype)
