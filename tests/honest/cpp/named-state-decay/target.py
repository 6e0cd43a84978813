"""A gated update of a recurrent state that comes as a named tuple, by whose names both the target and the plan read."""

from typing import NamedTuple

import torch

from pytest_cudaforge import forge_target


class State(NamedTuple):
    level: torch.Tensor
    gates: torch.Tensor


def draw():
    return [torch.randn(80, 96), State(torch.randn(80, 96), torch.randn(96))]


@forge_target(inputs=draw, grad=True)
def decay(x: torch.Tensor, state: State) -> torch.Tensor:
    kept = torch.sigmoid(state.gates)
    return kept * state.level + (1 - kept) * torch.tanh(x)
