"""An input that is the same in every draw: a kernel may have it built in, and the verdict says so; but no mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


Judge = Callable[[str, str, str], Evaluation]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    root = tmp_path_factory.mktemp("repo")
    (root / "targets.py").write_text(TARGETS)
    targets = {target.qualname: target for target in discover([root], root).targets}
    settings = EvaluatorSettings(cache_dir=cache_with_ceilings(root / "cache"), lock_dir=root)
    with Evaluator(settings) as evaluator:
        yield lambda name, other, answer: evaluator.evaluate(_candidate(other, answer), targets[name], timing=False)


def _candidate(other: str, answer: str) -> Candidate:
    source = f"""void kernel(const float* x, const {other}, float* y, long long rows, long long cols) {{
  for (long long r = 0; r < rows; ++r)
    for (long long c = 0; c < cols; ++c) y[r * cols + c] = {answer};
}}"""
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": PLAN.replace("OTHER", other.split()[-1].strip("*"))})


@pytest.mark.parametrize(("weight", "built_in"), [("weights[c]", False), ("(c + 1) * 0.25f", True)])
def test_weights_that_are_built_in_are_told(judged: Judge, weight: str, built_in: bool) -> None:
    evaluation = judged("weighted", "float* weights", f"{weight} * x[r * cols + c]")
    assert evaluation.passed, evaluation.reason
    assert ("note: input 1 is the same in every draw; with other" in evaluation_text(evaluation)) is built_in


@pytest.mark.parametrize(
    ("kept", "status"), [("mask[r * cols + c]", Status.PASSED), ("c <= r + 8", Status.INCORRECT_NUMERICAL)]
)
def test_a_mask_has_to_be_read(judged: Judge, kept: str, status: Status) -> None:
    evaluation = judged("masked", "bool* mask", f"{kept} ? x[r * cols + c] : -1.0f")
    assert evaluation.status is status, evaluation.reason
