"""Kernels that are right nearly everywhere: each is wrong where only one kind of values goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from judged_targets import find

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status

TARGETS = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(33, 257)])
def largest(x):
    return x.amax(-1)

@forge_target(inputs=lambda: [torch.rand(33, 257)])
def gelu(x):
    return torch.nn.functional.gelu(x)

@forge_target(inputs=lambda: [torch.randn(33, 257)])
def sign(x):
    return x.sign()

@forge_target(inputs=lambda: [torch.randn(33, 257)], dynamic=True)
def total(x):
    return x.sum(-1)
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(SHAPE, x.dtype)
    launch("kernel", args=(x, y, x.shape[0], x.shape[1]))
    return y
"""
ROWS = """
#include <cmath>
void kernel(const float* x, float* y, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols;
    BODY
  }
}
"""
MAX = "float m = START; for (long long c = 0; c < cols; ++c) m = p[c] > m ? p[c] : m; y[r] = m;"
GELU = "for (long long c = 0; c < cols; ++c) y[r * cols + c] = TAIL 0.5f * p[c] * (1 + std::erf(p[c] * 0.70710678f));"
SIGN = "for (long long c = 0; c < cols; ++c) y[r * cols + c] = p[c] > 0 ? 1.f : p[c] < 0 ? -1.f : ZERO;"
SUM = "double s = 0; for (long long c = 0; c < cols; ++c) s += p[c]; y[r] = WRONG s;"


def _candidate(shape: str, body: str) -> Candidate:
    return Candidate.of("cpp", {"kernel.cpp": ROWS.replace("BODY", body), "plan.py": PLAN.replace("SHAPE", shape)})


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    (root / "layers.py").write_text(TARGETS)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache, lock_dir=cache, times=False)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "shape", "right", "wrong"),
    [
        ("largest", "x.shape[:1]", MAX.replace("START", "-INFINITY"), MAX.replace("START", "0")),
        ("gelu", "x.shape", GELU.replace("TAIL", ""), GELU.replace("TAIL", "p[c] < -4 ? 0 :")),
        ("sign", "x.shape", SIGN.replace("ZERO", "0.f"), SIGN.replace("ZERO", "1.f")),
        ("total", "x.shape[:1]", SUM.replace("WRONG", ""), SUM.replace("WRONG", "rows > 33 ? 0 :")),
    ],
)
def test_wrong_for_some_values_or_sizes_is_wrong(
    evaluator: Evaluator, repo: Path, name: str, shape: str, right: str, wrong: str
) -> None:
    target = find(repo, f"::{name}")
    honest = evaluator.evaluate(_candidate(shape, right), target, timing=False)
    assert honest.status is Status.PASSED, honest.reason
    refused = evaluator.evaluate(_candidate(shape, wrong), target, timing=False)
    assert refused.status in (Status.INCORRECT_NUMERICAL, Status.REJECTED), refused.reason
