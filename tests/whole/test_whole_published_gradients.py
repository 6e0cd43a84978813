"""From a verdict with gradients to a model that trains through them: real evaluator, files, manifest and dispatch."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gradient_targets import candidate, find, write_repo
from known_ceilings import cache_with_ceilings

from pytest_cudaforge import apply
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.publishing import publish
from pytest_cudaforge.records import Candidate, Round, Trace


def _published(root: Path, made: Candidate, cache: Path, *, asked: bool = True) -> dict[str, Any]:
    """The manifest's entry of Gate after ``made`` was evaluated and published; ``asked``: by a target with grad."""
    target = find(root, "Gate")
    with Evaluator(EvaluatorSettings(cache_dir=cache_with_ceilings(cache), lock_dir=cache)) as evaluator:
        final = evaluator.evaluate(made, target, timing=False)
        facts = replace(evaluator.facts(target), grad=asked)
    if final.isolation.grade not in ("A", "B"):
        pytest.skip(f"isolation of grade {final.isolation.grade}: nothing native is published here")
    trace = Trace(target.id, "cpp", "forged", "", (Round(1, "first", None, made, final),), 1, final)
    publish(trace, target, facts, root / "forged")
    (entry,) = json.loads((root / "forged" / "manifest.json").read_text())["entries"]
    return dict(entry)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_repo(tmp_path / "repo")
    return tmp_path / "repo"


def _gate(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("layers", root / "layers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["layers"] = module
    spec.loader.exec_module(module)
    return module.Gate(64)


def test_a_published_backward_trains(root: Path, tmp_path: Path) -> None:
    assert _published(root, candidate(), tmp_path)["backward"] is True
    model = _gate(root)
    report = apply(model, manifest=root / "forged" / "manifest.json")
    output = model(torch.randn(33, 64))
    assert type(output.grad_fn).__name__ == "_ReplayedBackward", report
    output.sum().backward()
    torch.testing.assert_close(model.bias.grad, torch.full((64,), 33.0))


@pytest.mark.parametrize(("asked", "said"), [(True, False), (False, None)])
def test_what_was_not_verified_is_not_said_to_be(root: Path, tmp_path: Path, asked: bool, said: bool | None) -> None:
    assert _published(root, candidate(forward_only=True), tmp_path, asked=asked).get("backward") is said
