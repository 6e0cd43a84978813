"""Targets that a trivial kernel would pass, or that no plan can do, are told with their probe; honest ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from judged_targets import TRIVIAL

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.linter import lint
from pytest_cudaforge.evaluation.subject import Subject
from pytest_cudaforge.records import LintFinding

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from pytest_cudaforge import forge_target
"""

REFUSED = (
    TRIVIAL
    + """
@forge_target(inputs=lambda: [torch.randn(8, 64)])
def zeros(x):
    return x - x

@forge_target(inputs=lambda: [torch.ones(8, 64)])
def fixed_inputs(x):
    return x.cumsum(-1)

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def not_a_number(x):
    return (x - x.amax() - 1).sqrt()

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def tiny(x):
    return x * 1e-35

@forge_target(inputs=lambda: [torch.randn(8, 64), torch.randn(8, 64)], mode="eval")
class Identity(nn.Module):
    def forward(self, x, y):
        return {"out": F.dropout(y, 0.5, self.training), "first": x.contiguous()}

@forge_target(inputs=lambda: [torch.randn(8, 64)], init=lambda: [64])
class OnlyWeights(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n))
    def forward(self, x):
        return torch.softmax(self.weight, -1) + 0 * x.clamp(0, 0)

@forge_target(inputs=lambda: [torch.randn(8, 64)], init=lambda: [64])
class ShiftedSoftmax(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(()))
    def forward(self, x):
        return torch.softmax(x + self.shift, -1)

@forge_target(inputs=lambda: [torch.randn(8, 64)], mode="train")
class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
    def forward(self, x):
        return self.drop(x)

@forge_target(inputs=lambda: [torch.randn(8, 64)])
class CountsItsCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return x * self.calls

calls = []

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def counts_calls(x):
    calls.append(1)
    return x + len(calls)

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def positive_ones(x):
    return x[x > 0]

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def filled_ones(x):
    return x[x != 0]

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def plain_number(x):
    return x * 2, float(x.max())

@forge_target(inputs=lambda: [torch.randn(int(torch.randint(3, 99, ())), 4)])
def any_length(x):
    return x * 2

@forge_target(inputs=lambda: [torch.randn(8, 64)], init=lambda: [64])
class PositiveWeights(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(n))
    def forward(self, x):
        if self.scale.abs().max() > 0:
            raise ValueError("scale must be zero")
        return x * self.scale
"""
)

WANTED = {
    "zeros": ("zeros", "zeros would pass; right on all of the first draw, another draw, shifted inputs"),
    "uniform_mean": ("constant", "a constant would pass; right on all of another draw"),
    "nothing_but_rounding": ("zeros", "zeros would pass"),
    "below_rounding": ("copy", "a copy would pass: out is input 0 (x)"),
    "fixed_inputs": ("constant", "every draw gives the same inputs"),
    "not_a_number": ("nonfinite", "1 of out is NaN or infinite in every probe: a constant NaN"),
    "tiny": ("tiny", "e-35: zeros would pass"),
    "Identity": ("copy", "out.out is input 1 (y), out.first is input 0 (x)"),
    "CountsItsCalls": ("copy", "out is input 0 (x), written state calls is always the same; right on all of"),
    "OnlyWeights": ("inputs", "a kernel that ignores its inputs would pass"),
    "ShiftedSoftmax": ("weights", "a kernel that ignores every weight would pass; right on all of other weights"),
    "Dropout": ("random", "not forgeable: it draws random numbers"),
    "counts_calls": ("nondeterministic", "two runs on the same inputs differ beyond rounding: out by up to 1 "),
    "positive_ones": ("shape", "not forgeable: output shapes depend on values: out is float32 ("),
    "filled_ones": ("shape", "out is float32 (512,) as drawn and float32 (256,) with every second element zero"),
    "plain_number": ("number", "not forgeable: a plain number depends on values: out.1 is "),
    "any_length": ("draws", "not forgeable: input 0 (x) is float32 ("),
    "PositiveWeights": ("weights", "it fails on re-randomised weights"),
}

HONEST = """
@forge_target(inputs=lambda: [torch.rand(8, 64)])
def relu_of_positive_draws(x):
    return torch.relu(x)

@forge_target(inputs=lambda: [torch.rand(64, 8), torch.randint(0, 8, (64,))])
def loss(x, labels):
    return F.cross_entropy(x, labels)

@forge_target(inputs=lambda: [torch.randn(8, 64), torch.ones(8, 8).tril()])
def masked(x, mask):
    return mask @ x

@forge_target(inputs=lambda: [torch.randn(8, 64), torch.randn(8, 64)])
def one_idle_input(x, unused):
    return x * 2, x.shape[0], torch.arange(4)

@forge_target(inputs=lambda: [torch.randn(8, 64)], mode="train")
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
    def forward(self, x):
        return self.norm(x)

@forge_target(inputs=lambda: [torch.randn(8, 64)])
class Drifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
    def forward(self, x):
        self.mean += x.mean()
        return x.exp() + self.mean

@forge_target(inputs=lambda: [torch.randn(64, 64), 0.5])
def scale_(x, factor):
    x.mul_(factor)
    return x

@forge_target(inputs=lambda: [torch.randn(8, 64)], nondeterministic=True)
def declared(x):
    return torch.rand(8).sum() * 0 + x + torch.rand(8, 64, generator=torch.Generator().manual_seed(torch.seed()))

@forge_target(inputs=lambda: [torch.randn(8, 64)], init=lambda: [])
class WithEmptyParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.where = nn.Parameter(torch.empty(0))
    def forward(self, x):
        return x.exp()

@forge_target(inputs=lambda: [torch.randn(300, 16)])
def rows_that_win(x):
    return x.argmax(-1)

@forge_target(inputs=lambda: [torch.randn(8, 64), torch.randn(8, 64).to(torch.float8_e4m3fn)])
def eight_bits(x, y):
    return x.to(torch.float8_e4m3fn), y.float().exp().to(torch.float8_e4m3fn)

@forge_target(inputs=lambda: [torch.randn(8, 64)])
def forgets_its_random_start(x):
    return x + 1e-12 * torch.randn(64) + x.exp()

@forge_target(inputs=lambda: [torch.randn(64)], init=lambda: [])
class OneRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.bias = nn.Parameter(torch.zeros(64))
    def forward(self, x):
        return F.layer_norm(x, (64,), self.weight, self.bias)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linted")
    (folder / "refused.py").write_text(HEAD + REFUSED)
    (folder / "honest.py").write_text(HEAD + HONEST)
    return folder


def subject(root: Path, file: str, name: str) -> Subject:
    found = {target.qualname: target for target in discover([root / file], root).targets}
    return Subject(found[name], "cpu")


def names(text: str) -> list[str]:
    lines = text.splitlines()
    after = [lines[i + 1] for i, line in enumerate(lines) if line.startswith("@forge_target")]
    return [line.split()[1].split("(")[0].rstrip(":") for line in after]


@pytest.mark.parametrize("name", names(REFUSED))
def test_a_target_that_shows_nothing_is_refused_with_its_probe(root: Path, name: str) -> None:
    found = [finding for finding in lint(subject(root, "refused.py", name), "default") if finding.refuses]
    kind, text = WANTED[name]
    assert kind in [finding.kind for finding in found], found
    assert any(text in finding.text for finding in found if finding.kind == kind), found


@pytest.mark.parametrize("name", names(HONEST))
def test_an_honest_target_is_not_refused(root: Path, name: str) -> None:
    assert [finding for finding in lint(subject(root, "honest.py", name), "default") if finding.refuses] == []


def test_notes_are_told_but_refuse_nothing(root: Path) -> None:
    notes = [finding.text for finding in lint(subject(root, "honest.py", "one_idle_input"), "default")]
    assert any("input 1 (unused) does not matter" in text for text in notes)
    assert any("out.2 is the same in every probe" in text for text in notes)
    (note,) = lint(subject(root, "honest.py", "masked"), "default")
    assert note == LintFinding(
        "input", "input 1 (mask) is the same in every draw: a kernel may have its values built in", False
    )


def test_outputs_that_change_from_call_to_call_are_told(root: Path) -> None:
    notes = [finding for finding in lint(subject(root, "honest.py", "Drifting"), "default") if finding.kind == "state"]
    assert [note.refuses for note in notes] == [False]
    assert "out changes from one call to the next on the same inputs" in notes[0].text


def test_weights_and_state_are_as_constructed_afterwards(root: Path) -> None:
    normed = subject(root, "honest.py", "Normed")
    before = {path: tensor.clone() for path, tensor in normed.state().items()}
    assert lint(normed, "default") == []
    assert all(torch.equal(tensor, before[path]) for path, tensor in normed.state().items())


STATEFUL = """
@forge_target(inputs=lambda: [torch.rand(8, 4)], mode="train")
class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
    def forward(self, x):
        y = self.norm(x)
        if x.min() < 0 or x.abs().max() > 1:
            raise ValueError("values must lie in [0, 1]")
        return y

@forge_target(inputs=lambda: [torch.rand(8, 4)], mode="train")
class Failing(Picky):
    def forward(self, x):
        self.norm(x)
        raise ValueError("never")
"""


@pytest.mark.parametrize("name", ["Picky", "Failing"])
def test_state_is_put_back_where_the_targets_code_raises(tmp_path: Path, name: str) -> None:
    (tmp_path / "stateful.py").write_text(HEAD + STATEFUL)
    picky = subject(tmp_path, "stateful.py", name)
    before = {path: tensor.clone() for path, tensor in picky.state().items()}
    if name == "Picky":
        assert picky.domain.structures("default") == {"0": "unit"}
        assert picky.domain.families("default") == ("shifted", "sparse", "floor", "ceiling")
    else:
        with pytest.raises(TargetError, match="never"):
            lint(picky, "default")
    assert all(torch.equal(tensor, before[path]) for path, tensor in picky.state().items())
