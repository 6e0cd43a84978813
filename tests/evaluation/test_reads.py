"""Which attributes a forward reads."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.oracle_child import target_facts
from pytest_cudaforge.evaluation.reads import reads_of
from pytest_cudaforge.evaluation.subject import Subject
from pytest_cudaforge.runtime.fingerprints import is_alike


@dataclass(frozen=True)
class Config:
    scale: float = 0.5
    name: str = "unread"


class Own(nn.Module):
    def __getattribute__(self, name: str) -> object:
        return super().__getattribute__(name)


class Net(Own):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=1e-3)
        self.config, self.space = Config(), types.SimpleNamespace(shift=1.0)
        self.layer, self.gain, self._hidden = 3, (1, 2), 7

    @property
    def doubled(self) -> int:
        return 2 * self.gain[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.config.scale * self.doubled * self._hidden + self.space.shift


def test_what_is_read_and_nothing_else() -> None:
    net, other = Net(), Net()
    with reads_of(net) as found:
        net(torch.randn(2, 8))
        assert other.layer == 3
    # A namespace's class cannot be watched; its owner's attribute can.
    assert found >= {"norm.normalized_shape", "norm.eps", "config", "config.scale", "gain", "space"}
    assert not found & {"layer", "config.name", "_hidden", "norm.elementwise_affine", "space.shift"}
    assert "__getattribute__" not in {*vars(nn.LayerNorm), *vars(Config), *vars(Net)} and "__getattribute__" in vars(
        Own
    )
    assert net.layer == 3 and "layer" not in found


def test_it_ends_where_forward_raises() -> None:
    net = Net()
    with pytest.raises(RuntimeError), reads_of(net):
        net(torch.randn(2, 7))
    assert "__getattribute__" not in vars(nn.LayerNorm)


TARGET = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(4, 8)])
class Scaled(nn.Module):
    def __init__(self, layer=0):
        super().__init__()
        self.norm, self.calls, self.layer, self.dtype = nn.LayerNorm(8), 0, layer, torch.float32

    def forward(self, x):
        self.calls += 1
        return self.norm(x.to(self.dtype)) if self.training is False else x

@forge_target(inputs=lambda: [torch.randn(4, 8)])
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 8).tril())
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("unread", torch.zeros(3))
        self.table, self.weight, self.norm = torch.arange(8.0), nn.Parameter(torch.ones(8)), nn.BatchNorm1d(8)

    def forward(self, x):
        self.calls += 1
        return self.norm(x * self.mask + self.table * self.weight)

@forge_target(inputs=lambda: [torch.randn(4, 8)])
def plain(x):
    return x * 2
"""


@pytest.fixture
def subjects(tmp_path: Path) -> Iterator[dict[str, Subject]]:
    (tmp_path / "targets.py").write_text(TARGET)
    yield {target.qualname: Subject(target, "cpu") for target in discover([tmp_path], tmp_path).targets}


def test_facts_tell_values_but_not_of_what_changes(subjects: dict[str, Subject]) -> None:
    assert dict(target_facts(subjects["Scaled"]).attributes) == {
        "dtype": {"dtype": "float32"},
        "norm.eps": 1e-5,
        "norm.normalized_shape": {"tuple": [8]},
    }
    assert target_facts(subjects["plain"]).attributes == ()


def test_facts_tell_what_no_trial_changes_of_the_tensors_that_are_read(subjects: dict[str, Subject]) -> None:
    """Neither what is drawn anew (weights, running statistics) nor what forward writes."""
    masked = subjects["Masked"]
    buffers = dict(target_facts(masked).buffers)
    assert buffers.keys() == {"mask", "table"}
    assert is_alike(torch.ones(4, 8).tril(), buffers["mask"]) and is_alike(torch.arange(8.0), buffers["table"])
    assert masked.module is not None and masked.module.calls == 0
    assert target_facts(subjects["Scaled"]).buffers == target_facts(subjects["plain"]).buffers == ()
