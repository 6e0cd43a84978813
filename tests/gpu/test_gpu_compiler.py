"""torch.compile's options, searched on a GPU: real Inductor, real CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from forge_repo import pytest_in

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status, Target
from pytest_cudaforge.runtime.configuration import FILE_NAME, GRAPHS, LANGUAGE

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(32, 64)])
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "layers.py").write_text(LAYERS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


@pytest.fixture(scope="module")
def target(repo: Path) -> Target:
    (found,) = discover([repo / "layers.py"], repo).targets
    return found


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    settings = EvaluatorSettings(device="cuda:0", cache_dir=tmp_path_factory.mktemp("cache"), trials=2)
    with Evaluator(settings) as opened:
        yield opened


def test_tritons_kernels_come_with_the_baseline(evaluator: Evaluator, target: Target) -> None:
    (line,) = evaluator.baselines(target, LANGUAGE)
    assert line.compile is not None, line.compile_note
    assert "@triton.jit\ndef triton_" in line.generated
    assert "extern_kernels." in line.generated


def test_a_graph_of_all_launches_is_right_and_its_outputs_are_the_callers(evaluator: Evaluator, target: Target) -> None:
    found = evaluator.evaluate(Candidate.of(LANGUAGE, {FILE_NAME: json.dumps({GRAPHS: True})}), target)
    assert found.status is Status.PASSED, found.reason
    assert (found.work, found.isolation.grade) == ("compiler", "C")
    assert found.timing is not None and found.timing.clock == "supervisor"
    assert found.timing.speedup_compile is not None
    print("one CUDA graph:", found.reason, [line.candidate.median_ns for line in found.timing.workloads])


def test_without_a_model_a_configuration_is_verified(repo: Path) -> None:
    done = pytest_in(repo, "--forge", "--forge-rounds", "1", OPENAI_API_KEY="", CUDAFORGE_TRIALS="2")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "torch.compile's options were searched" in said
    (verdict,) = (repo / ".cudaforge" / "runs").glob("small-*/compiler/round-01/evaluation.json")
    assert json.loads(verdict.read_text())["status"] == "PASSED"
