"""A target's names and weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.subject import Subject, Weights

TARGETS = """
import torch
from torch import nn
from torch.nn import functional as F
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.rand(32), torch.randint(0, 2, (32,)).float() * 2 - 1])
def hinge(x, sign):
    return torch.clamp(1 - x * sign, min=0).mean()

@forge_target(inputs=lambda: {"x": torch.randn(8, 4), "many": [torch.rand(4), {"deep": torch.rand(4)}]})
def nested(x, many):
    return x * many[0] * many[1]["deep"]

@forge_target(inputs=lambda: [torch.randn(8), torch.randn(8), torch.randn(8)])
def any_number(first, *others):
    return first + sum(others)

class Gains(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change, self.gain = change, nn.Parameter(torch.ones(16))
        self.weight = nn.Parameter(torch.randn(16, 16))

@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [None])
class Cosine(Gains):
    def forward(self, x):
        return x @ F.normalize(self.weight, dim=-1).T * self.gain

@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [None])
class Logarithmic(Gains):
    def forward(self, x):
        return x @ self.weight.T * self.gain.log()

@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [None])
class Divided(Gains):
    def forward(self, x):
        return x @ (self.weight / self.weight.norm(dim=-1, keepdim=True)).T * self.gain

@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [None])
class Nearest(Gains):
    def forward(self, x):
        return (x @ self.weight.T * self.gain).argmax(-1)

@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [None])
class Routed(Gains):
    def forward(self, x):
        best = (x @ self.weight.T).topk(2)
        return best.values[..., None] * self.weight[best.indices]

@forge_target(inputs=lambda: [torch.randn(8, 16)], init=lambda: [None])
class Strict(Gains):
    def forward(self, x):
        assert bool((self.gain > 0).all())
        return x @ self.weight.T * self.gain

@forge_target(inputs=lambda: [torch.randn(8, 16)], mode="eval")
class Channels(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(16, 4), nn.BatchNorm1d(4)
        self.shift, self.scale = nn.Parameter(-torch.rand(1, 4)), nn.Parameter(torch.rand(4) + 1)

    def forward(self, x):
        return (self.norm(self.up(x)) + self.shift).relu() * self.scale
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    root = tmp_path_factory.mktemp("subjects")
    (root / "targets.py").write_text(TARGETS)
    found = {target.qualname: target for target in discover([Path(root)], root).targets}
    return lambda name: Subject(found[name], "cpu")


def test_inputs_have_the_names_that_their_author_gave(subject: Callable[[str], Subject]) -> None:
    assert subject("hinge").input_name("1") == "input 1 (sign)"
    assert subject("nested").input_name("kw.many.1.deep") == "input many[1]['deep']"
    assert subject("nested").input_name("1.0") == "input 1.0 (many[0])"
    assert [subject("any_number").input_name(path) for path in "02"] == ["input 0 (first)", "input 2 (others[1])"]


@pytest.mark.parametrize(
    ("name", "negative", "empty"),
    [
        ("Cosine", True, True),
        ("Logarithmic", False, True),
        ("Divided", True, False),
        ("Nearest", True, False),  # two empty rows tie
        ("Strict", False, True),
    ],
)
def test_trained_weights_are_such_as_the_reference_bears(
    subject: Callable[[str], Subject], name: str, negative: bool, empty: bool
) -> None:
    found = subject(name)
    seen = set()
    for seed in range(24):
        found.set_weights(Weights(seed))
        state = found.state()
        seen |= {"negative"} if bool((state["gain"] < 0).any()) else set()
        seen |= {"empty"} if bool((state["weight"] == 0).all(-1).any()) else set()
    assert seen == {*(["negative"] if negative else []), *(["empty"] if empty else [])}
    found.set_weights(Weights())
    assert bool((found.state()["gain"] == 1).all())


def test_what_chooses_among_rows_has_no_gaps_in_them(subject: Callable[[str], Subject]) -> None:
    """Half of them would be the same one."""
    found = {name: subject(name) for name in ("Cosine", "Routed")}
    for one in found.values():
        one.set_weights(Weights(1))
    assert not {"blank", "delayed"} & {*(found["Routed"]._borne or ())}
    assert {"blank", "delayed"} <= {*(found["Cosine"]._borne or ())}


def test_a_module_may_add_nothing(subject: Callable[[str], Subject]) -> None:
    found = subject("Channels")
    first = {path: tensor.clone() for path, tensor in found.state().items()}
    added = {"up.bias", "norm.running_mean", "norm.bias", "shift"}
    assert set(found.biases) == added
    found.set_weights(Weights(3, kept=("shift",), unbiased=True))
    assert {path for path, tensor in found.state().items() if not tensor.any()} >= added - {"shift"}
    assert found.state()["shift"].equal(first["shift"])
    found.set_weights(Weights(3))
    assert bool(found.state()["up.bias"].any())
    assert "unbiased" in found.domain.families("default") and "tiny" not in found.domain.families("default")
    assert all(tensor.equal(first[path]) for path, tensor in found.state().items())
