"""Plain modules against their merge base on a GPU: by device events, gradients included."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Race, Target

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

LAYERS = """
import torch
from torch import nn

import chain
from pytest_cudaforge import forge_target

torch.cuda.is_available()  # a question to the driver while it is imported


@forge_target(inputs=lambda: [torch.randn(256, 4096)], guard=True, grad=True)
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))

    def forward(self, x):
        return chain.run(x, self.weight)
"""
CHAIN = """
def run(x, weight):
    for _ in range({links}):
        x = x * weight
    return x
"""


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    settings = EvaluatorSettings(device="cuda:0", cache_dir=tmp_path_factory.mktemp("cache"))
    with Evaluator(settings) as found:
        yield found


def _version(root: Path, links: int) -> Target:
    root.mkdir()
    (root / "layers.py").write_text(LAYERS)
    (root / "chain.py").write_text(CHAIN.format(links=links))
    return discover([root], root).targets[0]


def _slowdown(race: Race) -> float:
    return statistics.median(dict(block.ns)["candidate"] / dict(block.ns)["base"] for block in race.blocks)


def test_a_planted_slowdown_shows_forward_and_backward(evaluator: Evaluator, tmp_path: Path) -> None:
    base, head = _version(tmp_path / "base", 8), _version(tmp_path / "head", 40)
    races = evaluator.race_modules(head, base, processes=2)

    assert [(race.workload, race.what, race.clock) for race in races] == [
        ("default", "forward", "events"),
        ("default", "backward", "events"),
    ]
    for race in races:
        assert not race.disturbed and {block.process for block in race.blocks} == {0, 1}
        assert _slowdown(race) > 2.0


def test_no_change_is_none(evaluator: Evaluator, tmp_path: Path) -> None:
    base, head = _version(tmp_path / "base", 20), _version(tmp_path / "head", 20)
    forward, backward = evaluator.race_modules(head, base, processes=2)

    # What a decision makes of it is the guard's; by so much no run was ever off.
    assert 0.8 < _slowdown(forward) < 1.25 and 0.8 < _slowdown(backward) < 1.25
    assert not forward.notes and not backward.notes
