"""What outputs lie in where that is no plain container, from the oracle's tree to a dispatched call."""

from __future__ import annotations

import dataclasses
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forged_layers import Repo

from pytest_cudaforge import apply
from pytest_cudaforge.errors import Unsupported
from pytest_cudaforge.runtime.containers import alike, containers_of, in_containers, makers_of
from pytest_cudaforge.runtime.signature import flatten_output


class State(NamedTuple):
    hidden: Any
    cell: Any


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    logits: Any = None
    state: Any = None

    def __post_init__(self) -> None:
        self.update(logits=self.logits, state=self.state)


X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("output", "plain"),
    [
        (X, X),
        ([X, (X, 2)], [X, (X, 2)]),
        (State(X, X), (X, X)),
        ({"best": X.max(1), "more": [State(X, None)]}, {"best": (X, X), "more": [(X, None)]}),
        (ModelOutput(X, State(X, X)), {"logits": X, "state": (X, X)}),
        (OrderedDict(a=X), {"a": X}),
    ],
)
def test_plain_containers_become_what_the_original_has(output: Any, plain: Any) -> None:
    _, tree = flatten_output(output)
    found = in_containers(plain, makers_of(containers_of(json.loads(json.dumps(tree))), __name__))
    for made in (found, alike(plain, output)):
        assert flatten_output(made)[1] == tree


def test_names_are_there_again() -> None:
    _, tree = flatten_output({"best": X.max(1), "state": State(X, X)})
    found = in_containers({"best": (X, X), "state": (X, X)}, makers_of(containers_of(tree), __name__))
    assert found["best"].values is X and found["state"].cell is X


def test_a_class_under_another_name_of_its_module() -> None:
    makers = makers_of((("out", "another_package.layers.State"),), __name__)
    assert type(in_containers((X, X), makers)) is State


@pytest.mark.parametrize(
    "name", ["nowhere.State", "State", "container of one class or another", "json.loads", f"{__name__}.X"]
)
def test_a_class_that_is_not_here(name: str) -> None:
    with pytest.raises(Unsupported, match="which is not here"):
        makers_of((("out", name),), "json")


SOURCE = """
from typing import NamedTuple
import torch
from pytest_cudaforge import forge_target

class State(NamedTuple):
    hidden: torch.Tensor
    cell: torch.Tensor

@forge_target(inputs=lambda: [torch.randn(4, 8)])
def step(x):
    return State(x + 1, x * 3)
"""
KERNEL = """
extern "C" void step(const float* x, float* h, float* c, long long n) {
  for (long long i = 0; i < n; ++i) { h[i] = 2 * (x[i] + 1); c[i] = 6 * x[i]; }
}
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    h, c = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    launch("step", args=(x, h, c, x.numel()))
    return h, c
"""


@pytest.mark.parametrize(("held", "served"), [("State", "kernel"), ("Gone", "reference")])
def test_who_reads_a_dispatched_answer_by_name(tmp_path: Path, held: str, served: str) -> None:
    repo = Repo(tmp_path, SOURCE)
    x = torch.randn(4, 8)
    repo.forge("step", KERNEL, PLAN, (x,), containers=(("out", f"{repo.file.stem}.{held}"),))
    report = apply(repo.module)
    with torch.no_grad():
        for _ in range(3):
            answer = repo.module.step(x)
            assert type(answer) is repo.module.State
            assert torch.equal(answer.cell, (6 if served == "kernel" else 3) * x)
    reasons = [reason for found in report.fallbacks.values() for reason in found]
    assert bool(reasons) is (served == "reference") and all("which is not here" in reason for reason in reasons)
