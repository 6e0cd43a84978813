import torch
import torch.nn.functional as F

from pytest_cudaforge import forge_target

SHAPE = (2, 3, 117, 32)


def draw(causal: bool):
    return lambda: ([torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(SHAPE)], {"is_causal": causal})


@forge_target(workloads={"full": draw(False), "causal": draw(True)})
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).contiguous()
