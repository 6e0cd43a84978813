import torch

from pytest_cudaforge import forge_target

NODES, EDGES, WIDTH = 400, 5000, 24


def draw() -> list[torch.Tensor]:
    return [
        torch.randint(0, NODES, (EDGES,)),
        torch.randint(0, NODES, (EDGES,)),
        torch.randn(EDGES),
        torch.randn(NODES, WIDTH),
    ]


@forge_target(inputs=draw)
def aggregate(target: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Message passing: each edge carries its source's features, weighted, to its target."""
    out = torch.zeros_like(x)
    return out.index_add(0, target, x[source] * weight[:, None])
