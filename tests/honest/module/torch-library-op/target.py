import torch

from pytest_cudaforge import forge_target

TOKENS, HEADS, SIZE = 180, 6, 64


def draw() -> list[torch.Tensor]:
    angle = torch.outer(torch.rand(TOKENS) * 100.0, 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE))
    return [torch.randn(TOKENS, HEADS, SIZE), torch.randn(TOKENS, HEADS, SIZE), angle.cos(), angle.sin()]


@forge_target(inputs=draw)
class Rotary(torch.nn.Module):
    """Rotates pairs of neighbours (GPT-J's layout)."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        def rotate(x: torch.Tensor) -> torch.Tensor:
            c, s = cos[:, None, :], sin[:, None, :]
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.stack([even * c - odd * s, odd * c + even * s], dim=-1).flatten(-2)

        return rotate(q), rotate(k)
