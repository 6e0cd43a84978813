"""``pytest --forge`` in a repo that says nothing of models, without a key: real torch.compile, verified and timed."""

from __future__ import annotations

import json
from pathlib import Path

from forge_repo import pytest_in

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target
from neighbour import scaled


@forge_target(inputs=lambda: [torch.randn(4, 64)])
class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x):
        return scaled(x, self.weight).relu()
"""


ENVIRONMENT = {"OPENAI_API_KEY": "", "CUDAFORGE_TRIALS": "1", "CUDAFORGE_TIMING_BUDGET_S": "0.2"}


def test_without_a_model_the_compilers_options_are_searched_and_it_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "neighbour.py").write_text("def scaled(x, weight):\n    return x * weight\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = pytest_in(tmp_path, "--forge", "--forge-device", "cpu", "--forge-rounds", "1", **ENVIRONMENT)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "no model is configured and OPENAI_API_KEY is not set: torch.compile's options were searched" in said
    (run,) = (tmp_path / ".cudaforge" / "runs").glob("gain-*/compiler")
    assert json.loads((run / "round-01" / "options.json").read_text()) == {"cpp.threads": 1}
    verdict = json.loads((run / "round-01" / "evaluation.json").read_text())
    assert (verdict["status"], verdict["work"]) == ("PASSED", "compiler"), verdict["reason"]
    guard = verdict["verification"]["guard"]
    assert guard["drawn_shapes_only"] and guard["contiguous_only"]
    assert verdict["timing"]["speedup_compile"] > 0 and verdict["isolation"]["grade"] == "C"
    assert not (run / "round-01" / "prompt.md").exists()
    assert "for(int64_t" in (run / "torch-compile.txt").read_text()
