"""Probes on a real GPU: a reference that makes the device fail on some strides costs those, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.oracle import OracleClient

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

#: Torch's own kernel for it reads vectors, which odd rows of halves are not aligned to.
DECODE = """
import torch
from pytest_cudaforge import forge_target

def draw():
    cache = [torch.randn(4, 8, 777, 64, dtype=torch.float16) for _ in range(2)]
    return [torch.randn(4, 8, 64, dtype=torch.float16), *cache]

@forge_target(inputs=draw, precision="fp16")
def decode(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q.unsqueeze(2), k, v).squeeze(2)
"""


def test_strides_on_which_the_device_fails_cost_no_other_probe(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(DECODE)
    (target,) = discover([tmp_path], tmp_path).targets
    with OracleClient(device="cuda:0", cache_dir=tmp_path / "cache") as oracle:
        names = [name for name, _ in oracle.variants(target, "default")]
    assert "strided" in names and any(name.startswith("size ") for name in names), names
