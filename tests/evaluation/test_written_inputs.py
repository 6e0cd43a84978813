"""Inputs that the reference writes: what the oracle expects of a call on what another one left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from judged_targets import find

from pytest_cudaforge.evaluation.bench import Bench
from pytest_cudaforge.evaluation.frames import Case
from pytest_cudaforge.evaluation.rotation import Rotation
from pytest_cudaforge.evaluation.subject import Subject

TARGETS = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(4, 8)])
def grows(x):
    x.add_(1)
    return x * 2

@forge_target(inputs=lambda: [torch.randn(4, 8)])
def explodes(x):
    return x.mul_(1e6)

@forge_target(inputs=lambda: [torch.randn(4, 8)])
def divides(x):
    return x.sub_(x).div_(x)

@forge_target(inputs=lambda: [torch.randn(4, 8), torch.tensor([3])])
def ends(x, place):
    x[place] = 0.0
    place += 1
    return x.sum()

@forge_target(inputs=lambda: [torch.randn(4, 8), torch.tensor([1])])
def counts(x, calls):
    calls += 1
    return x * 2

@forge_target(inputs=lambda: [torch.randn(4, 8), torch.tensor([1])])
def goes_on(x, place):
    x[place] = 0.0
    place += 1
    return x.sum()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "layers.py").write_text(TARGETS)
    return tmp_path


def _bench(root: Path, name: str) -> Bench:
    subject = Subject(find(root, f"::{name}"), "cpu")
    inputs, _, _ = subject.trial_run("default")
    specs: dict[str, Any] = {
        f"f0/input/{path}": [list(value.shape), str(value.dtype).removeprefix("torch."), list(value.stride())]
        for path, value in inputs.items()
    }
    regions = [[region, 4096 * number, 1024] for number, region in enumerate(specs)]
    layout = {"nbytes": 4096 * len(specs), "regions": regions, "redzones": [], "frames": 1, "specs": specs}
    return Bench(subject, "default", "", layout)


def _held(bench: Bench) -> torch.Tensor:
    return bench.bytes[:128].view(torch.float32).view(4, 8).clone()


def test_a_second_calls_inputs_are_what_the_first_left(root: Path) -> None:
    bench = _bench(root, "grows")
    bench.fill(0, Case(7, "drawn", None), 0)
    drawn = _held(bench)
    for _ in range(2):  # filled again it is no third call's
        bench.fill(0, Case(7, "drawn", None, advanced=1), 0)
        assert torch.equal(_held(bench), drawn + 1)
    bench.fill(0, Case(7, "drawn", None, advanced=3), 0)
    assert torch.equal(_held(bench), drawn + 1 + 1 + 1)


def test_a_call_that_follows_is_expected_and_nothing_is_written(root: Path) -> None:
    bench = _bench(root, "grows")
    bench.fill(0, Case(7, "drawn", None), 0)
    drawn = _held(bench)
    assert bench.follow(0, 2)
    assert torch.equal(_held(bench), drawn)
    kinds = {mismatch.kind for mismatch in bench.check(0, {})["mismatches"]}
    assert "values" in kinds or "bias" in kinds  # nobody has added anything yet
    bench.bytes[:128].view(torch.float32).add_(1).add_(1).add_(1)
    assert {mismatch.kind for mismatch in bench.check(0, {})["mismatches"]} == {"count"}  # there is no output


@pytest.mark.parametrize("name", ["explodes", "divides", "ends"])
def test_where_no_call_need_follow_the_first_is_expected(root: Path, name: str) -> None:
    bench = _bench(root, name)
    case = Case(7, "drawn", None)
    bench.fill(0, case, 0)
    drawn = _held(bench)
    assert not bench.follow(0, 1)
    assert bench.frames[0].case == case
    bench.fill(0, Case(7, "drawn", None, advanced=1), 0)
    assert torch.equal(_held(bench), drawn)


def test_places_go_on_where_there_are_more(root: Path) -> None:
    bench = _bench(root, "goes_on")
    bench.fill(0, Case(7, "drawn", None, advanced=1), 0)
    assert bench.frames[0].inputs["1"].tolist() == [2]
    assert bench.frames[0].inputs["0"][1].abs().sum() == 0


@pytest.mark.parametrize(("name", "places"), [("counts", False), ("goes_on", True), ("ends", True), ("grows", False)])
def test_what_merely_counts_is_no_place(root: Path, name: str, places: bool) -> None:
    subject = Subject(find(root, f"::{name}"), "cpu")
    assert subject.keeps_places("default") is places


def test_a_rotation_has_other_values_when_it_is_drawn_anew(root: Path) -> None:
    rotation = Rotation(Subject(find(root, "::grows"), "cpu"), "default", 3)
    before = [args[0].clone() for args, _ in rotation.sets]
    rotation.run_many("eager", 5)
    rotation.redraw(123)
    after = [args[0] for args, _ in rotation.sets]
    assert rotation.position == 0
    assert not any(torch.equal(now, then) for now, then in zip(after, before, strict=True))
    assert all(float(now.abs().max()) < 6 for now in after)
