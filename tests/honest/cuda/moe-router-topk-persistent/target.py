"""Token choice routing of a mixture of experts: the best experts of each token, their weights, the experts' mean load."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

TOKENS, EXPERTS, CHOSEN = 32768, 128, 8


@forge_target(
    inputs=lambda: [torch.randn(TOKENS, EXPERTS)],
    init=lambda: [CHOSEN],
    index_outputs=("out.1",),
)
class Router(nn.Module):
    """(tokens, experts) logits -> (tokens, chosen) weights, (tokens, chosen) int64 experts, (experts,) mean probability."""

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, experts = torch.topk(logits, self.chosen, dim=-1)
        return torch.softmax(values, dim=-1), experts, torch.softmax(logits, dim=-1).mean(dim=0)
