"""Modules whose gradients are wrong where a target asks for them: refused, passed without the check, honest twin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from module_targets import model

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.attempt import Attempt
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation, Status

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(33, 64)], init=lambda: [64], grad=True,
              allow=("kernel", "mixed", "library", "rewrite"))
class Gate(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return torch.sigmoid(x) * self.weight
"""
INIT = """
def __init__(self, dim):
    super().__init__()
    self.weight = nn.Parameter(torch.ones(dim))
    self.saved = None
"""
_FUNCTION = """
import itertools
PLACES, COUNT = {}, itertools.count()
MANY = {}

class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, module):
        s = torch.sigmoid(x)
        y = s * weight
        ctx.save_for_backward(s, weight, y)
        ctx.module, module.saved = module, s
        number = next(COUNT)
        ctx.place, ctx.far = number % 8, number % 200
        PLACES[ctx.place] = MANY[ctx.far] = s
        return y

    @staticmethod
    def backward(ctx, grad):
        s, weight, y = ctx.saved_tensors
        BEFORE
        return grad * weight * s * (1 - s), WEIGHT, None
"""
_HONEST = "(grad * s).sum(0)"
#: What is wrong, and a part of the verdict's reason.
ATTACKS = {
    "no sum over the batch": ("", "(grad * s).mean(0)", "parameter"),
    "activations on the module": ("s = ctx.module.saved", _HONEST, "gradient"),
    "a contiguous gradient": ("grad = grad.as_strided(s.shape, (s.shape[1], 1))", _HONEST, "backward"),
    "a gradient whose rows are dense": (
        "grad = grad.as_strided(s.shape, (s.shape[1], 1)) if grad.stride(-1) == 1 else grad",
        _HONEST,
        "backward",
    ),
    "gradients written by itself": ("ctx.module.weight.grad = (grad * s).sum(0)", "None", "gradient"),
    "activations as a workspace": ("kept = s.clone(); s.data.zero_(); s = kept", _HONEST, "gradient"),
    "a gradient that memory has once": (
        "grad = grad if any(grad.stride()) else grad * 2",
        _HONEST,
        "expanded one of a sum",
    ),
    "clipped": ("grad = grad.clamp(-100, 100)", _HONEST, "gradient"),
    "all or nothing": ("grad = grad if all(ctx.needs_input_grad[:2]) else grad * 0", _HONEST, "gradient"),
    "one buffer for all": (
        "module = ctx.module",
        f"(module.__dict__.setdefault('own', torch.empty_like(weight)).copy_({_HONEST}), module.own)[1]",
        "an earlier one had returned",
    ),
    "rows of zeros by two of them": (
        "s = s.clone(); s[(grad[:, 0] == 0) & (grad[:, -1] == 0)] = 1",
        _HONEST,
        "gradient of input",
    ),
    "rows in balance as if nothing came in": (
        "s = s.clone(); s[(grad.sum(-1) == 0) & (grad != 0).any(-1)] = 1",
        _HONEST,
        "gradient of input",
    ),
    "one of eight places for activations": ("s = PLACES[ctx.place]", _HONEST, "gradient of input"),
    "one of two hundred places for activations": ("s = MANY[ctx.far]", _HONEST, "gradient of input"),
    "one of fifteen hundred places for activations": ("s = TABLE[ctx.place]", _HONEST, "gradient of input"),
    "activations by where the answer lies": ("s = TABLE[ctx.place]", _HONEST, "gradient of input"),
    "the answer as a workspace": ("y.detach().zero_()", _HONEST, "what forward had returned"),
}


TWO = """
@forge_target(inputs=lambda: [torch.randn(33, 64)], grad=True, allow=("kernel", "mixed", "library", "rewrite"))
class Both(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x), torch.tanh(x)
"""
_BOTH = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        s, t = torch.sigmoid(x), torch.tanh(x)
        ctx.save_for_backward(s, t)
        return s, t

    @staticmethod
    def backward(ctx, first, second):
        s, t = ctx.saved_tensors
        if first is None or second is None:
            return OTHERWISE
        return first * s * (1 - s) + second * (1 - t * t)
"""


ADDED = """
@forge_target(inputs=lambda: [torch.randn(33, 64), torch.randn(33, 64)], grad=True,
              allow=("kernel", "mixed", "library", "rewrite"))
class Added(nn.Module):
    def forward(self, x, y):
        return REFERENCE
"""
_SUM = """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        RETURNED
"""


#: Where activations are kept in a table that was made at first, by the name of the attack.
_TABLED = {
    "one of fifteen hundred places for activations": "number % 1500",
    "activations by where the answer lies": "y.data_ptr() // 64 % 1021",
}


def _candidate(before: str, weight: str, place: str = "") -> Candidate:
    text = _FUNCTION.replace("BEFORE", before or "pass").replace("WEIGHT", weight)
    if place:
        kept = f"ctx.place = {place} if s.shape == TABLE.shape[1:] else 0\n        TABLE[ctx.place, :len(s)] = s[:33]"
        text = text.replace("MANY = {}", "TABLE = torch.empty(1500, 33, 64)")
        text = text.replace("ctx.place, ctx.far = number % 8, number % 200", kept)
        text = text.replace("PLACES[ctx.place] = MANY[ctx.far] = s", "pass")
    return model("return Gated.apply(x, self.weight, self)", INIT, before=text)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "layers.py").write_text(LAYERS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache, hang_limit_s=30.0, lock_dir=cache, times=False)) as opened:
        yield opened


def _verdict(evaluator: Evaluator, root: Path, candidate: Candidate) -> Evaluation:
    (target,) = discover([root], root).targets
    return evaluator.evaluate(candidate, target, timing=False)


@pytest.mark.parametrize("name", ATTACKS)
def test_wrong_gradients_are_refused(
    evaluator: Evaluator, root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, weight, words = ATTACKS[name]
    attack = _candidate(before, weight, _TABLED.get(name, ""))
    found = _verdict(evaluator, root, attack)
    assert found.status is not Status.PASSED and "::backward" in found.reason, found.reason
    assert words in found.reason
    monkeypatch.setattr(Attempt, "_verify_backward", lambda *_: None)
    assert _verdict(evaluator, root, attack).status is Status.PASSED


def test_a_gradient_of_which_only_the_inner_strides_are_asked_for(
    evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers.py").write_text(LAYERS.replace("randn(33, 64)", "randn(3, 11, 64)"))
    found = _verdict(evaluator, tmp_path, _candidate("", "(grad * s).sum((0, 1))"))
    assert found.status is Status.PASSED and "gradients verified" in found.reason, found.reason
    wrong = (
        "if grad.stride(-1) == 1: grad = grad.as_strided(s.shape, (s.shape[1] * grad.stride(1), *grad.stride()[1:]))"
    )
    attack = _candidate(wrong, "(grad * s).sum((0, 1))")
    refused = _verdict(evaluator, tmp_path, attack)
    assert refused.status is not Status.PASSED and "::backward" in refused.reason, refused.reason
    monkeypatch.setattr(Attempt, "_verify_backward", lambda *_: None)
    assert _verdict(evaluator, tmp_path, attack).status is Status.PASSED


def test_a_loss_may_take_one_of_two_outputs(
    evaluator: Evaluator, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layers.py").write_text(LAYERS.split("@forge_target")[0] + TWO)
    honest = "first * s * (1 - s) if first is not None else second * (1 - t * t)"
    found = {
        otherwise: model("return Twice.apply(x)", before=_BOTH.replace("OTHERWISE", otherwise))
        for otherwise in (honest, "torch.zeros_like(s)")
    }
    right, wrong = (_verdict(evaluator, tmp_path, candidate) for candidate in found.values())
    assert right.status is Status.PASSED and "gradients verified" in right.reason, right.reason
    assert wrong.status is Status.INCORRECT_NUMERICAL and "::backward" in wrong.reason, wrong.reason
    monkeypatch.setattr(Attempt, "_verify_backward", lambda *_: None)
    assert _verdict(evaluator, tmp_path, found["torch.zeros_like(s)"]).status is Status.PASSED


def test_two_gradients_in_one_memory_are_refused_where_the_references_are_apart(
    evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdict(returned: str) -> Evaluation:
        return _verdict(
            evaluator,
            tmp_path,
            model("return Sum.apply(*args, *kwargs.values())", before=_SUM.replace("RETURNED", returned)),
        )

    def write(reference: str) -> None:
        (tmp_path / "layers.py").write_text(LAYERS.split("@forge_target")[0] + ADDED.replace("REFERENCE", reference))

    write("torch.lerp(y, x, 0.5) * 2")
    attack = "g = grad.clone(); return g, g.view_as(g)"
    refused = verdict(attack)
    assert refused.status is not Status.PASSED and "in one memory" in refused.reason, refused.reason
    for twin in ("return grad.clone(), grad.clone()", "return grad, grad"):
        passed = verdict(twin)
        assert passed.status is Status.PASSED and "gradients verified" in passed.reason, passed.reason
    monkeypatch.setattr(Attempt, "_verify_backward", lambda *_: None)
    assert verdict(attack).status is Status.PASSED
    monkeypatch.undo()
    write("x + y.view_as(x)")
    passed = verdict(attack)
    assert passed.status is Status.PASSED and "gradients verified" in passed.reason, passed.reason


def test_right_gradients_are_verified(evaluator: Evaluator, root: Path) -> None:
    found = _verdict(evaluator, root, _candidate("", _HONEST))
    assert found.status is Status.PASSED and "gradients verified" in found.reason, found.reason


def test_autograds_own_are_verified(evaluator: Evaluator, root: Path) -> None:
    found = _verdict(evaluator, root, model("return torch.sigmoid(x) * self.weight", INIT))
    assert found.status is Status.PASSED and "gradients verified" in found.reason, found.reason


def test_a_forward_that_records_none_is_forward_only(evaluator: Evaluator, root: Path) -> None:
    found = _verdict(evaluator, root, model("with torch.no_grad():\n    return torch.sigmoid(x) * self.weight", INIT))
    assert found.status is Status.PASSED and "forward only: its forward records no gradients" in found.reason


def test_weights_under_other_names_are_forward_only(evaluator: Evaluator, root: Path) -> None:
    other = INIT.replace("self.weight", "self.gain")
    found = _verdict(evaluator, root, model("return torch.sigmoid(x) * self.gain", other))
    assert found.status is Status.PASSED and "forward only: its parameters have other names" in found.reason
