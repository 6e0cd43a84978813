"""Honest launch plans of many kinds are accepted, on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from honest_cases import HonestCase, honest_cases

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Status

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=cache, lock_dir=cache)) as opened:
        yield opened


@pytest.mark.parametrize("case", honest_cases("cuda", "triton"), ids=lambda case: case.name)
def test_an_honest_plan_is_accepted(case: HonestCase, evaluator: Evaluator) -> None:
    if case.candidate.language == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton")
    assert evaluator.lint(case.target) == ()
    found = evaluator.evaluate(case.candidate, case.target, timing=False, sanitize=True)
    assert found.status is Status.PASSED, found.reason
