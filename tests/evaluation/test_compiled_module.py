"""Compiler configurations through the same door as every candidate: real torch.compile in a confined worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status, Target
from pytest_cudaforge.runtime.configuration import FILE_NAME, LANGUAGE

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target
from neighbour import scaled


@forge_target(inputs=lambda: [torch.randn(16, 64)], init=lambda: [torch.Size([64])])
class Gain(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x):
        return scaled(x, self.weight).relu()
"""


def configuration(**options: object) -> Candidate:
    return Candidate.of(LANGUAGE, {FILE_NAME: json.dumps({name.replace("__", "."): v for name, v in options.items()})})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "layers.py").write_text(LAYERS)
    (folder / "neighbour.py").write_text("def scaled(x, weight):\n    return x * weight\n")
    (found,) = discover([folder / "layers.py"], folder).targets
    return found


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache: Path = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache, trials=1)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"freezing": True}, "'freezing' is no option that may be chosen"),
        ({"cpp__threads": True}, "cpp.threads = True"),
    ],
)
def test_what_changes_the_answer_or_is_no_option_is_refused_before_anything_runs(
    evaluator: Evaluator, target: Target, options: dict[str, object], why: str
) -> None:
    found = evaluator.evaluate(configuration(**options), target, timing=False)
    assert found.status is Status.BUILD_ERROR
    assert why in found.reason


def test_the_target_is_verified_with_its_options_and_labelled_as_no_kernel(
    evaluator: Evaluator, target: Target
) -> None:
    found = evaluator.evaluate(configuration(cpp__threads=1), target, timing=False)
    assert found.status is Status.PASSED, found.reason
    assert (found.work, found.language, found.isolation.grade) == ("compiler", LANGUAGE, "C")
    assert found.verification is not None and found.verification.contract_passed
    # What was not drawn is left to the reference.
    assert found.verification.guard.drawn_shapes_only
