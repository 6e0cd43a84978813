import torch

from pytest_cudaforge import forge_target

BINS = 200


@forge_target(inputs=lambda: [torch.randint(0, BINS, (16, 20000))])
def token_histogram(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sequences, tokens) int64 -> counts (sequences, BINS) int64, shares (sequences, BINS) float32."""
    counts = torch.zeros(ids.shape[0], BINS, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(1, ids, torch.ones_like(ids))
    return counts, counts.float() / ids.shape[1]
