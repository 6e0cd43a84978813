"""A configuration is no licence: what torch.compile makes of a reference is held against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status, Target
from pytest_cudaforge.runtime.configuration import FILE_NAME, LANGUAGE

LAYERS = """
import torch
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def honest(x):
    return x * 2 + 1


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def otherwise_when_compiled(x):
    return x * 2 + (1.001 if torch.compiler.is_compiling() else 1)


@forge_target(inputs=lambda: [torch.randn(16, 64)])
def remembers_when_compiled(x, known=[]):
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
    if not known:
        known.append(x * 2 + 1)
    return known[0] if torch.compiler.is_compiling() else x * 2 + 1
"""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "layers.py").write_text(LAYERS)
    return {target.qualname: target for target in discover([folder / "layers.py"], folder).targets}


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache: Path = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache, trials=2, times=False)) as opened:
        yield opened


@pytest.mark.parametrize("name", ["otherwise_when_compiled", "remembers_when_compiled"])
def test_what_is_wrong_when_compiled_does_not_pass(evaluator: Evaluator, targets: dict[str, Target], name: str) -> None:
    found = evaluator.evaluate(Candidate.of(LANGUAGE, {FILE_NAME: "{}"}), targets[name], timing=False)
    assert found.status is Status.INCORRECT_NUMERICAL, found.reason
    assert found.work is None


def test_its_honest_twin_does(evaluator: Evaluator, targets: dict[str, Target]) -> None:
    found = evaluator.evaluate(Candidate.of(LANGUAGE, {FILE_NAME: "{}"}), targets["honest"], timing=False)
    assert (found.status, found.work) == (Status.PASSED, "compiler"), found.reason
