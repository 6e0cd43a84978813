"""The loss of a language model over padded labels, with the number of tokens that counted."""

import torch
import torch.nn.functional as F

from pytest_cudaforge import forge_target

ROWS, VOCABULARY, IGNORE = 128, 8192, -100


def draw():
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[torch.rand(ROWS) < 0.2] = IGNORE
    return {"logits": torch.randn(ROWS, VOCABULARY), "labels": labels}


@forge_target(inputs=draw, grad=True, strides="any")
def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE)
    return {"loss": loss, "tokens": labels.ne(IGNORE).sum()}
