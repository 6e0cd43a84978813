"""Evaluators that judge honest cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from honest_cases import HonestCase

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Status

__all__ = ["Opened", "opened", "require_accepted"]

Opened = Callable[[tuple[str, ...]], Evaluator]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Evaluators by what they allow."""
    cache, kept = tmp_path_factory.mktemp("cache"), dict[tuple[str, ...], Evaluator]()

    def provide(allow: tuple[str, ...]) -> Evaluator:
        if allow not in kept:
            settings = EvaluatorSettings(cache_dir=cache, lock_dir=cache, allow=allow or None, times=False)
            kept[allow] = Evaluator(settings)
        return kept[allow]

    yield provide
    for evaluator in kept.values():
        evaluator.close()


def require_accepted(case: HonestCase, opened: Opened) -> None:
    evaluator = opened(case.allow)
    assert evaluator.lint(case.target) == ()
    found = evaluator.evaluate(case.candidate, case.target, timing=False)
    assert found.status is Status.PASSED, found.reason
