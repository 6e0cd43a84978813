"""What a refusal says to whoever wrote the kernel: names that are in the target's own source. Real kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from judged_targets import find, norm, write_repo
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status

PAIR_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    rows, cols = x.shape
    top, count = empty((rows,), x.dtype), empty((rows,), "int64")
    launch("pair", args=(x, top, count, rows, cols))
    return {"top": top, "count": count}
"""
PAIR = """
void pair(const float* x, float* top, long long* count, long long rows, long long cols) {
  for (long long r = 0; r < ROWS; ++r) {
    float t = x[r * cols]; long long n = 0;
    for (long long c = 0; c < cols; ++c) { float v = x[r * cols + c]; t = v > t ? v : t; n += v > 0; }
    top[r] = t; if (r < COUNTED) count[r] = n;
  }
  AFTER
}
"""

COPY_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty((300, 16), x.dtype).t()
    launch("copy", args=(x, y, x.numel()))
    return y
"""
COPY = "void copy(const float* x, float* y, long long n) { for (long long i = 0; i < n; ++i) y[i] = x[i]; }"
TRANSPOSED = Candidate.of("cpp", {"kernel.cpp": COPY, "plan.py": COPY_PLAN})


def pair(rows: str = "rows", counted: str = "rows", after: str = "") -> Candidate:
    source = PAIR.replace("ROWS", rows).replace("COUNTED", counted).replace("AFTER", after)
    return Candidate.of("cpp", {"kernel.cpp": source, "plan.py": PAIR_PLAN})


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache_with_ceilings(cache), hang_limit_s=3.0, lock_dir=cache)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("target", "candidate", "status", "words"),
    [
        ("::RMSNorm", norm(after="const_cast<float*>(x)[3] = 0;"), Status.REJECTED,
         "input 0 (x): was changed by the kernel; the reference does not write it"),
        ("::RMSNorm", norm(after="const_cast<float*>(w)[3] = 0;"), Status.REJECTED,
         "parameter weight: was changed by the kernel"),
        ("::pair", pair(after="const_cast<float*>(x)[3] = 0;"), Status.REJECTED,
         "input x: was changed by the kernel"),
        ("::pair", pair(after="count[rows] = 1;"), Status.REJECTED,
         "output out.count: memory behind it was written out of bounds"),
        ("::pair", pair(after="const_cast<float*>(x)[rows * cols] = 1;"), Status.REJECTED,
         "input x: memory behind it was written out of bounds"),
        ("::RMSNorm", norm(rows="rows - 2"), Status.INCORRECT_NUMERICAL,
         "out: never written: 1024 of 16896 elements still hold what was there before the call, NaN"),
        ("::pair", pair(counted="5"), Status.INCORRECT_NUMERICAL,
         "out.count: never written: 3 of 8 elements still hold what was there before the call"),
        ("::softmax", TRANSPOSED, Status.INCORRECT_SHAPE,
         "strides (1, 16), expected (300, 1): return a contiguous tensor, empty((16, 300), ...)"),
    ],
)  # fmt: skip
def test_a_refusal_names_what_its_author_can_find(
    evaluator: Evaluator, repo: Path, target: str, candidate: Candidate, status: Status, words: str
) -> None:
    evaluation = evaluator.evaluate(candidate, find(repo, target), timing=False)
    assert (evaluation.status, words in evaluation.reason) == (status, True), evaluation.reason


def test_finite_poison_is_told_as_well(evaluator: Evaluator, repo: Path) -> None:
    evaluation = evaluator.evaluate(norm(rows="rows - 2"), find(repo, "::RMSNorm"), timing=False)
    assert evaluation.verification is not None
    failed = [case.mismatches[0].detail for case in evaluation.verification.cases if not case.passed]
    assert len(failed) > 1 and all(detail.startswith("never written: 1024 of 16896") for detail in failed)
    assert {"NaN" in detail for detail in failed} == {True, False}
