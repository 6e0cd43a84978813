"""Greedy decoding: the most likely token of each row and its log probability."""

import torch
from torch import nn

from pytest_cudaforge import forge_target

VOCABULARY = 32000
ROWS = 2048 if torch.cuda.is_available() else 32


@forge_target(inputs=lambda: [torch.randn(ROWS, VOCABULARY)], index_outputs=("out.0",))
class GreedyToken(nn.Module):
    """(rows, vocabulary) float logits -> (rows,) int64 token and (rows,) float log probability."""

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = logits.argmax(dim=-1)
        log_probability = torch.log_softmax(logits, dim=-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
        return token, log_probability
