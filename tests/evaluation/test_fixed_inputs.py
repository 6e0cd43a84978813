"""An input that is the same in every draw: a kernel may have it built in, and the verdict says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.display import evaluation_text
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate

TARGET = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(12, 20), torch.ones(12, 20, dtype=torch.bool).tril(8)])
def masked(x, mask):
    return torch.where(mask, x, -1.0)
"""
PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x, mask):
    y = empty(x.shape, x.dtype)
    launch("masked", args=(x, mask, y, *x.shape))
    return y
"""


def _candidate(kept: str) -> Candidate:
    source = f"""void masked(const float* x, const bool* mask, float* y, long long rows, long long cols) {{
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = {kept} ? x[r * cols + c] : -1.0f;
}}"""
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": PLAN})


@pytest.mark.parametrize(("kept", "built_in"), [("mask[r * cols + c]", False), ("c <= r + 8", True)])
def test_a_mask_that_is_built_in_is_told(tmp_path: Path, kept: str, built_in: bool) -> None:
    (tmp_path / "masks.py").write_text(TARGET)
    (target,) = discover([tmp_path], tmp_path).targets
    settings = EvaluatorSettings(cache_dir=cache_with_ceilings(tmp_path / "cache"), lock_dir=tmp_path)
    with Evaluator(settings) as evaluator:
        evaluation = evaluator.evaluate(_candidate(kept), target, timing=False)
    assert evaluation.passed, evaluation.reason
    assert ("note: input 1 is the same in every draw; with other" in evaluation_text(evaluation)) is built_in
