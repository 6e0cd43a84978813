"""What of a module a bound plan watches, against changes of every kind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_cudaforge.runtime.circumstances import same, survey
from pytest_cudaforge.runtime.signature import describe_module, module_tensors

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
        self.register_buffer("steps", torch.zeros(3))
        self.table = torch.ones(2)
        self.parts = [torch.ones(2), 3, {"a": 1.5}]
        self.eps = 1e-6
        self.kind = "rms"
        self.dtype = torch.float32
        self._private = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_nothing_changed() -> None:
    module = Block()
    assert survey(module).hold(CPU, vars(module))


def test_the_tensors_are_those_a_plan_sees() -> None:
    """The same paths as describe_module, so that a plan's state finds its slot."""
    module = Block()
    circumstances = survey(module)
    assert {slot.path for slot in circumstances.slots} == set(module_tensors(module))
    by_path = dict(zip((slot.path for slot in circumstances.slots), circumstances.tensors(vars(module)), strict=True))
    assert all(by_path[path] is tensor for path, tensor in module_tensors(module).items())


@pytest.mark.parametrize("path", ["steps", "table", "layers.0.weight", "parts.0"])
def test_values_count_where_they_are_held(path: str) -> None:
    module = Block()
    free, held = survey(module), survey(module, {path})
    assert held.hold(CPU, vars(module))
    with torch.no_grad():
        module_tensors(module)[path].add_(0)
    assert free.hold(CPU, vars(module)) and not held.hold(CPU, vars(module))
    again = survey(module, {path})
    assert again.hold(CPU, vars(module))
    module.steps, module.table, module.parts[0] = module.steps.clone(), module.table.clone(), torch.ones(2)
    module.layers[0].weight = nn.Parameter(torch.ones(4, 4))
    assert not again.hold(CPU, vars(module))


def test_a_tensor_that_counts_no_versions_is_never_as_it_was() -> None:
    module = Block()
    with torch.inference_mode():
        module.steps = torch.zeros(3)
    assert survey(module).hold(CPU, vars(module)) and not survey(module, {"steps"}).hold(CPU, vars(module))


def test_watching_values_keeps_no_module_alive() -> None:
    module = Block()
    module.watch = survey(module, {"steps", "table"})  # type: ignore[assignment]
    gone = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert gone() is None
    finally:
        gc.enable()


def _assign(name: str, value: Any) -> Callable[[Block], None]:
    return lambda module: setattr(module, name, value)


CHANGES: dict[str, Callable[[Block], Any]] = {
    "a number": _assign("eps", 1e-5),
    "its sign at zero": lambda m: setattr(m, "eps", -0.0),
    "its type": _assign("eps", 1),
    "a string": _assign("kind", "layer"),
    "a dtype": _assign("dtype", torch.float16),
    "an attribute goes": lambda m: delattr(m, "eps"),
    "train mode": lambda m: m.train(),
    "a child's mode": lambda m: m.layers[0].train(),
    "a list's item": lambda m: m.parts.__setitem__(1, 4),
    "a nested value": lambda m: m.parts[2].__setitem__("a", 2.5),
    "a longer list": lambda m: m.parts.append(1),
    "a child is replaced": lambda m: m.layers.__setitem__(0, nn.Linear(4, 4)),
    "a child is added": lambda m: m.layers.append(nn.Linear(4, 4)),
    "a parameter appears": lambda m: setattr(m.layers[1], "bias", nn.Parameter(torch.zeros(4))),
    "a parameter goes": lambda m: setattr(m.layers[0], "bias", None),
    "a parameter's dtype": lambda m: m.layers[0].half(),
    "a parameter's shape": lambda m: setattr(m.layers[0].weight, "data", torch.zeros(2, 8)),
    "a parameter's strides": lambda m: setattr(m.layers[0].weight, "data", m.layers[0].weight.data.t()),
    "a parameter's device": lambda m: m.layers[0].to("meta"),
    "a buffer's shape": lambda m: setattr(m, "steps", torch.zeros(4)),
    "a plain tensor's dtype": _assign("table", torch.ones(2).double()),
    "a tensor becomes sparse": _assign("table", torch.ones(2).to_sparse()),
    "a parametrisation": lambda m: torch.nn.utils.parametrize.register_parametrization(
        m.layers[0], "weight", nn.Identity()
    ),
}


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_a_change_is_seen(change: Callable[[Block], Any]) -> None:
    module = Block().eval()
    if change is CHANGES["its sign at zero"]:
        module.eps = 0.0
    circumstances = survey(module)
    assert circumstances.hold(CPU, vars(module))
    change(module)
    assert not circumstances.hold(CPU, vars(module))
    assert describe_module(module) is not None


NO_CHANGES: dict[str, Callable[[Block], Any]] = {
    "new values": lambda m: m.layers[0].weight.data.fill_(3),
    "a new tensor of the same kind": lambda m: setattr(m.layers[0].weight, "data", torch.zeros(4, 4)),
    "a new parameter of the same kind": lambda m: setattr(m.layers[0], "weight", nn.Parameter(torch.zeros(4, 4))),
    "an equal number": lambda m: setattr(m, "eps", float("1e-6")),
    "a private attribute": _assign("_private", 2),
    "a state dict": lambda m: m.load_state_dict(Block().state_dict()),
}


@pytest.mark.parametrize("change", list(NO_CHANGES.values()), ids=list(NO_CHANGES))
def test_what_no_plan_can_see_is_no_change(change: Callable[[Block], Any]) -> None:
    module = Block()
    circumstances = survey(module)
    change(module)
    assert circumstances.hold(CPU, vars(module))


def test_a_cycle_and_a_shared_child_end() -> None:
    module = Block()
    module.layers.append(module.layers[0])
    module.layers[0].parent = [module]
    assert survey(module).hold(CPU, vars(module))


def test_a_function_has_no_circumstances() -> None:
    assert survey(None).hold(CPU, {})


@pytest.mark.parametrize(
    ("now", "then", "equal"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (float("nan"), float("nan"), True),
        (0.0, -0.0, False),
        ([1, [2.0]], [1, [2.0]], True),
        ((1,), [1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (object, object, True),
    ],
)
def test_sameness(now: Any, then: Any, equal: bool) -> None:
    assert same(now, then) is equal
