"""Gradients on a real GPU: verified by the evaluator, trained through by apply, on whatever thread and stream autograd
runs a backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradient_targets import LAYERS, find, write_repo

from pytest_cudaforge import apply, hardware
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

SOURCE = """
extern "C" __global__ void gate(const float* x, const float* w, const float* b, float* y, int rows, int cols) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows * cols) y[i] = w[i % cols] / (1.0f + expf(-x[i])) + b[i % cols];
}

extern "C" __global__ void gate_dx(const float* x, const float* w, const float* g, float* dx, int rows, int cols) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows * cols) return;
  float s = 1.0f / (1.0f + expf(-x[i]));
  dx[i] = g[i] * w[i % cols] * s * (1.0f - s);
}

extern "C" __global__ void gate_dw(const float* x, const float* g, float* dw, float* db, int rows, int cols) {
  int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= cols) return;
  double sum_w = 0, sum_b = 0;
  for (int r = 0; r < rows; ++r) {
    float grad = g[r * cols + c];
    sum_w += grad * (1.0f / (1.0f + expf(-x[r * cols + c])));
    sum_b += grad;
  }
  dw[c] = (float)sum_w;
  db[c] = (float)sum_b;
}
"""

PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("gate", grid=-(-rows * cols // 256), block=256, args=(x, module.weight, module.bias, y, rows, cols))
    return y

def plan_backward(module, x, grad_out):
    rows, cols = x.shape
    dx = empty(x.shape, x.dtype)
    dw, db = empty((cols,), x.dtype), empty((cols,), x.dtype)
    launch("gate_dx", grid=-(-rows * cols // 256), block=256, args=(x, module.weight, grad_out, dx, rows, cols))
    launch("gate_dw", grid=-(-cols // 64), block=64, args=(x, grad_out, dw, db, rows, cols))
    return {"x": dx, "weight": dw, "bias": db}
"""


def _candidate(old: str = "", new: str = "") -> Candidate:
    assert old in SOURCE
    return Candidate.of("cuda", {"kernel.cu": SOURCE.replace(old, new) if old else SOURCE, "plan.py": PLAN})


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=cache, lock_dir=cache)) as opened:
        yield opened


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


def test_honest_gradients_are_verified(evaluator: Evaluator, repo: Path) -> None:
    found = evaluator.evaluate(_candidate(), find(repo, "Gate"), timing=False, sanitize=True)
    assert found.status is Status.PASSED, found.reason
    assert found.reason == "correct (gradients verified)"
    assert found.verification is not None and found.verification.backward
    assert found.verification.sanitizer is not None and found.verification.sanitizer.refusal is None


@pytest.mark.parametrize(
    ("old", "new", "status", "words"),
    [
        ("dw[c] = (float)sum_w;", "dw[c] = 0;", Status.INCORRECT_NUMERICAL, "parameter weight"),
        ("* s * (1.0f - s)", "* s", Status.INCORRECT_NUMERICAL, "input 0 (x)"),
        ("db[c] = (float)sum_b;", "db[c] += (float)sum_b;", Status.INCORRECT_NUMERICAL, "parameter bias"),
        (
            "db[c] = (float)sum_b;",
            "db[c] = (float)sum_b; ((float*)g)[c] = 0;",
            Status.REJECTED,
            "grad_out: was changed",
        ),
    ],
)
def test_wrong_gradients_are_refused(
    evaluator: Evaluator, repo: Path, old: str, new: str, status: Status, words: str
) -> None:
    found = evaluator.evaluate(_candidate(old, new), find(repo, "Gate"), timing=False)
    assert found.status is status and words in found.reason and "::backward" in found.reason, found.reason


def _models(root: Path) -> tuple[Any, Any]:
    """A forged Gate on the GPU, and its twin that is not forged."""
    from forged_layers import Repo

    repo = Repo(root, LAYERS)
    drawn = (torch.randn(33, 64),)
    arch = hardware.detect("cuda:0").arch
    repo.forge("Gate", SOURCE, PLAN, drawn, language="cuda", arch=arch, mode="train", backward=True)
    torch.manual_seed(0)
    model = repo.module.Gate(64).cuda()
    twin = copy.deepcopy(model)
    apply(model)
    return model, twin


def test_apply_trains(tmp_path: Path) -> None:
    model, twin = _models(tmp_path)
    data = torch.randn(33, 64, device="cuda")
    curves = []
    for each in (model, twin):
        optimizer, losses = torch.optim.SGD(each.parameters(), lr=0.05), []
        for _ in range(30):
            optimizer.zero_grad()
            output = each(data)
            assert (type(output.grad_fn).__name__ == "_ReplayedBackward") == (each is model)
            loss = (output - data.sin()).square().sum(1).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        curves.append(torch.stack(losses))
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=1e-5)


def test_backward_runs_on_forward_s_stream(tmp_path: Path) -> None:
    model, twin = _models(tmp_path)
    stream = torch.cuda.Stream()
    found = []
    for each in (model, twin):
        x = torch.randn(33, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(5):
                h = x
                for _ in range(4):
                    h = each(h)
                h.square().sum().backward()
        torch.cuda.synchronize()
        found.append((x.grad, each.weight.grad, each.bias.grad))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)
