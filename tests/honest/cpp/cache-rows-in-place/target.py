"""New rows go to their slots of a half-precision cache; those without a slot (-1) nowhere. Nothing is returned."""

import torch

from pytest_cudaforge import forge_target

ROWS, SLOTS, WIDTH = 48, 300, 40


def draw():
    slots = torch.randperm(SLOTS)[:ROWS]
    return [torch.randn(ROWS, WIDTH), torch.randn(SLOTS, WIDTH).half(), slots.where(torch.rand(ROWS) > 0.2, -1)]


@forge_target(inputs=draw)
def write_rows(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    kept = slots >= 0
    cache[slots[kept]] = rows[kept].half()
