"""A reference that takes calls of another size with some values, and not with others: a probe that cannot be run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status, to_json

#: As offsets do that happen to fit into what they point to.
TARGET = """
import collections
import torch
from pytest_cudaforge import forge_target

CALLS = collections.Counter()

@forge_target(inputs=lambda: [torch.randn(12, 20)]PROMISED)
def doubled(x):
    CALLS[x.shape] += 1
    if x.shape != (12, 20) and CALLS[x.shape] > 1:
        raise ValueError("not with these values")
    return x * 2
"""
PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("kernel", args=(x, y, x.numel()))
    return y
"""
SOURCE = "void kernel(const float* x, float* y, long long n) { for (long long i = 0; i < n; ++i) y[i] = 2 * x[i]; }"


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    root = tmp_path_factory.mktemp("judge")
    with Evaluator(EvaluatorSettings(cache_dir=cache_with_ceilings(root / "cache"), lock_dir=root)) as opened:
        yield opened


@pytest.mark.parametrize("promised", [False, True], ids=["sizes as drawn", "any size"])
def test_such_sizes_are_tried_no_further(evaluator: Evaluator, tmp_path: Path, promised: bool) -> None:
    (tmp_path / "targets.py").write_text(TARGET.replace("PROMISED", ", dynamic=True" * promised))
    (target,) = discover([tmp_path], tmp_path).targets
    candidate = Candidate.of("cpp", {"kernel.cpp": SOURCE, "plan.py": PLAN})
    evaluation = evaluator.evaluate(candidate, target, timing=False)
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert "takes calls of that kind now and then" in str(to_json(evaluation))
