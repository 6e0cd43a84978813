"""torch.compile's options, searched on a GPU: real Inductor, real CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
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


#: Its launches take far longer than its arithmetic: one graph of them must win on any GPU.
DEEP = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(16, 64)])
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(10)])

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x
"""
#: What production does with the winner: called again and again, from another thread, inside somebody's capture.
USE = """
import faulthandler
import threading

faulthandler.dump_traceback_later(100, exit=True)

import torch

import pytest_cudaforge
from layers import Deep

model = Deep().cuda().eval()
inputs = [torch.randn(16, 64, device="cuda") for _ in range(4)]
with torch.no_grad():
    wanted = [model(x) for x in inputs]
    report = pytest_cudaforge.apply(model)
    print("APPLIED", report)
    held = [model(x) for x in inputs for _ in range(3)]
    torch.cuda.synchronize()
    for number, got in enumerate(held):
        torch.testing.assert_close(got, wanted[number // 3])
    print("FALLBACKS at home", dict(report.fallbacks))
    found = []
    def elsewhere():
        with torch.no_grad():
            found.append(model(inputs[0]))
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], wanted[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(inputs[1])
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, wanted[1])
    model.layers[0].weight.mul_(2.0)
    changed = model(inputs[2])
    again = type(model).forward(model, inputs[2])
    torch.testing.assert_close(changed, again)
    torch.testing.assert_close(model(inputs[3].repeat(2, 1))[:16], model(inputs[3]))
print("FALLBACKS in all", dict(report.fallbacks))
"""


def test_a_configuration_that_wins_is_published_checked_and_applied(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "layers.py").write_text(DEEP)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "use.py").write_text(USE)
    forged = pytest_in(tmp_path, "--forge", "--forge-rounds", "1", OPENAI_API_KEY="", CUDAFORGE_TRIALS="2")
    said = forged.stdout + forged.stderr
    print(said)
    assert "1 passed" in said
    (options,) = (tmp_path / "forged").glob("deep-*/sm_*-compiler/options.json")
    assert json.loads(options.read_text()).get(GRAPHS) is True
    checked = pytest_in(tmp_path, "forged", "-rA")
    print(checked.stdout)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "1 passed" in checked.stdout
    used = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    print(used.stdout, used.stderr)
    assert used.returncode == 0, used.stderr
    assert "FALLBACKS at home {}" in used.stdout
