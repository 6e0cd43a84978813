"""Repeated calls on the same values: a kernel that is right most of the time is found out."""

from __future__ import annotations

from pathlib import Path

import pytest
from judged_targets import find, write_repo

from pytest_cudaforge.evaluation import verification
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status

PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("twice", args=(x, y, x.numel()))
    return y
"""
#: What threads that race do, without luck: wrong at every seventh call on values that it has just seen.
KERNEL = """
void twice(const float* x, float* y, long n) {
  static float last; static int same;
  same = x[0] == last ? same + 1 : 0;
  last = x[0];
  for (long k = 0; k < n; ++k) y[k] = x[k] * 2 + 1;
  if (SPOIL) y[0] += 1;
}
"""


def _status(root: Path, spoil: str) -> tuple[Status, str]:
    write_repo(root)
    candidate = Candidate.of("cpp", {"kernel.cpp": KERNEL.replace("SPOIL", spoil), "plan.py": PLAN})
    with Evaluator(EvaluatorSettings(cache_dir=root / "cache", lock_dir=root)) as evaluator:
        evaluation = evaluator.evaluate(candidate, find(root, "::only_fp32"), timing=False)
    return evaluation.status, evaluation.reason


def test_a_kernel_that_is_sometimes_wrong_is_refused_and_its_twin_passes(tmp_path: Path) -> None:
    status, reason = _status(tmp_path / "wrong", "same && same % 7 == 0")
    assert status is Status.INCORRECT_NUMERICAL, reason
    assert "a repeated call on the same inputs" in reason
    assert _status(tmp_path / "right", "same < 0")[0] is Status.PASSED


def test_without_the_repeats_it_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_REPEATS", (1, 1))
    assert _status(tmp_path, "same && same % 7 == 0")[0] is Status.PASSED
