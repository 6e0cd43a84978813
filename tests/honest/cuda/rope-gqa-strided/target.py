"""Rotary embedding of queries and keys as they come out of a fused projection: (batch, tokens, heads, size), transposed."""

import torch

from pytest_cudaforge import forge_target

BATCH, TOKENS, HEADS, KV_HEADS, SIZE = 2, 4096, 32, 8, 128


def angles(tokens: int, size: int, base: float = 500000.0) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(tokens, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def draw(batch: int, tokens: int) -> list[torch.Tensor]:
    cos, sin = angles(tokens, SIZE)
    query = torch.randn(batch, tokens, HEADS, SIZE, dtype=torch.bfloat16).transpose(1, 2)
    key = torch.randn(batch, tokens, KV_HEADS, SIZE, dtype=torch.bfloat16).transpose(1, 2)
    return [query, key, cos.to(torch.bfloat16), sin.to(torch.bfloat16)]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@forge_target(
    precision="bf16",
    workloads={"prefill": lambda: draw(BATCH, TOKENS), "chunk": lambda: draw(64, 16)},
)
def rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate (batch, heads, tokens, size) queries and (batch, kv heads, tokens, size) keys by (tokens, size) angles."""
    cos, sin = cos[None, None], sin[None, None]
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin
