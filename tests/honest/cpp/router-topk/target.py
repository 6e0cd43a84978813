import torch
from torch import nn

from pytest_cudaforge import forge_target


@forge_target(
    inputs=lambda: [torch.randn(1500, 48)],
    init=lambda: {"k": 6},
    index_outputs=("out.1",),
    dynamic=True,
)
class Gate(nn.Module):
    """Which experts see a token, and with what weight."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = torch.softmax(logits, dim=-1).topk(self.k, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), experts
