import torch
from torch import nn

from pytest_cudaforge import forge_target

VOCABULARY = 2000


def sentences(batch: int, length: int):
    def draw() -> list[torch.Tensor]:
        ids = torch.randint(1, VOCABULARY, (batch, length))
        lengths = torch.randint(0, length + 1, (batch, 1))
        return [ids.masked_fill(torch.arange(length)[None, :] >= lengths, 0)]

    return draw


@forge_target(workloads={"long": sentences(48, 120), "short": sentences(300, 9)}, init=lambda: [VOCABULARY, 64])
class BagOfWords(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocabulary, width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        kept = (ids != 0).unsqueeze(-1)
        total = (self.table[ids] * kept).sum(1)
        return total / kept.sum(1).clamp(min=1)
