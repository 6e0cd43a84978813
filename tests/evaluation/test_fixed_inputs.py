"""An input that is the same in every draw: a kernel may have it built in, and the verdict says so; but no mask."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.display import evaluation_text
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation, Status

TARGETS = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(12, 20), torch.ones(12, 20, dtype=torch.bool).tril(8)])
def masked(x, mask):
    return torch.where(mask, x, -1.0)

@forge_target(inputs=lambda: [torch.randn(12, 20), torch.arange(1.0, 21.0) / 4])
def weighted(x, weights):
    return x * weights
"""
PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x, OTHER):
    y = empty(x.shape, x.dtype)
    launch("kernel", args=(x, OTHER, y, *x.shape))
    return y
"""


def _judged(tmp_path: Path, name: str, other: str, answer: str) -> Evaluation:
    (tmp_path / "targets.py").write_text(TARGETS)
    target = next(target for target in discover([tmp_path], tmp_path).targets if target.qualname == name)
    source = f"""void kernel(const float* x, const {other}, float* y, long long rows, long long cols) {{
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = {answer};
}}"""
    plan = PLAN.replace("OTHER", other.split()[-1].strip("*"))
    settings = EvaluatorSettings(cache_dir=cache_with_ceilings(tmp_path / "cache"), lock_dir=tmp_path)
    with Evaluator(settings) as evaluator:
        return evaluator.evaluate(Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan}), target, timing=False)


@pytest.mark.parametrize(("weight", "built_in"), [("weights[c]", False), ("(c + 1) * 0.25f", True)])
def test_weights_that_are_built_in_are_told(tmp_path: Path, weight: str, built_in: bool) -> None:
    evaluation = _judged(tmp_path, "weighted", "float* weights", f"{weight} * x[r * cols + c]")
    assert evaluation.passed, evaluation.reason
    assert ("note: input 1 is the same in every draw; with other" in evaluation_text(evaluation)) is built_in


@pytest.mark.parametrize(
    ("kept", "status"), [("mask[r * cols + c]", Status.PASSED), ("c <= r + 8", Status.INCORRECT_NUMERICAL)]
)
def test_a_mask_has_to_be_read(tmp_path: Path, kept: str, status: Status) -> None:
    evaluation = _judged(tmp_path, "masked", "bool* mask", f"{kept} ? x[r * cols + c] : -1.0f")
    assert evaluation.status is status, evaluation.reason
