import torch
import torch.nn.functional as F
from torch import nn

from pytest_cudaforge import forge_target

CLASSES, ROWS = 1000, 300


def draw() -> list[torch.Tensor]:
    target = torch.randint(0, CLASSES, (ROWS,))
    return [torch.randn(ROWS, CLASSES).bfloat16(), target.masked_fill(torch.rand(ROWS) < 0.2, -100)]


@forge_target(inputs=draw, init=lambda: {"smoothing": 0.1}, precision="bf16")
class LanguageLoss(nn.Module):
    def __init__(self, smoothing: float) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), target, ignore_index=-100, label_smoothing=self.smoothing)
