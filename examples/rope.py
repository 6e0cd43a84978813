"""Rotary position embedding, as a plain function with two tensors of angles."""

import torch

from pytest_cudaforge import forge_target

HEADS, HEAD_SIZE = 16, 128
TOKENS = 8192 if torch.cuda.is_available() else 256


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Swap the halves of the last dimension and negate the first: (a, b) -> (-b, a)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def draw() -> list[torch.Tensor]:
    angle = torch.outer(
        torch.arange(TOKENS, dtype=torch.float32),
        10000.0 ** (-torch.arange(0, HEAD_SIZE, 2, dtype=torch.float32) / HEAD_SIZE),
    )
    angle = torch.cat((angle, angle), dim=-1)
    return [torch.randn(TOKENS, HEADS, HEAD_SIZE), torch.randn(TOKENS, HEADS, HEAD_SIZE), angle.cos(), angle.sin()]


@forge_target(inputs=draw)
def apply_rope(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys of shape (tokens, heads, head size) (Su et al., arXiv 2104.09864)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin
