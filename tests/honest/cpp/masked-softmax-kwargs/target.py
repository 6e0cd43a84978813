import torch
from torch import nn

from pytest_cudaforge import forge_target

BATCH, HEADS, LENGTH = 3, 6, 80


def lengths_mask() -> torch.Tensor:
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,))
    return (torch.arange(LENGTH)[None, :] < lengths[:, None])[:, None, None, :]


@forge_target(
    workloads={
        "padded": lambda: {
            "scores": torch.randn(BATCH, HEADS, LENGTH, LENGTH),
            "mask": lengths_mask(),
            "causal": False,
        },
        "causal": lambda: {"scores": torch.randn(BATCH, HEADS, LENGTH, LENGTH), "mask": None, "causal": True},
    },
    init=lambda: {"head_size": 32},
)
class ScoreSoftmax(nn.Module):
    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.scale = head_size**-0.5

    def forward(self, scores: torch.Tensor, mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        scores = scores * self.scale
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if causal:
            length = scores.shape[-1]
            hidden = torch.ones(scores.shape[-2], length, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, dim=-1)
