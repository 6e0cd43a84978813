"""A candidate and the kernel that it is to replace, under one clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from judged_targets import find, norm, write_repo

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Evaluation, from_json, to_json


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    settings = EvaluatorSettings(cache_dir=cache, timing_budget_s=0.4, hang_limit_s=3.0, lock_dir=cache)
    with Evaluator(settings) as opened:
        yield opened


def test_an_incumbent_is_timed_in_the_same_sitting(evaluator: Evaluator, repo: Path) -> None:
    slow = norm(after="volatile float waste = 0; for (int i = 0; i < 1000000; ++i) waste = waste + 1;")
    evaluation = evaluator.evaluate(norm(), find(repo, "::RMSNorm"), incumbent=slow)
    assert evaluation.timing is not None, evaluation.reason
    ratio = evaluation.timing.vs_incumbent
    assert ratio is not None and ratio.low <= ratio.speedup <= ratio.high
    (timed,) = evaluation.timing.workloads
    assert timed.incumbent is not None and timed.incumbent.median_ns > 3e5
    assert from_json(Evaluation, to_json(evaluation)) == evaluation


def test_an_incumbent_that_cannot_be_built_again_is_left_out_and_said_so(evaluator: Evaluator, repo: Path) -> None:
    evaluation = evaluator.evaluate(norm(), find(repo, "::RMSNorm"), incumbent=norm(after="nonsense"))
    assert evaluation.timing is not None, evaluation.reason
    assert evaluation.timing.vs_incumbent is None
    assert "the incumbent could not be built again" in evaluation.timing.note
