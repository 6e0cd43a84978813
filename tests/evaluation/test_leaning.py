"""The reference, rounded otherwise: throughout to one side, or element by element."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaforge.evaluation.leaning import CORRECTLY_ROUNDED, LeaningMode  # noqa: E402

EPS = torch.finfo(torch.float32).eps
X = torch.linspace(-2, 2, 257)


def _under(mode: LeaningMode, work: str) -> torch.Tensor:
    with mode:
        found: torch.Tensor = getattr(X, work)()
    return found


@pytest.mark.parametrize("most", [1, 4])
def test_all_elements_lean_to_one_side(most: int) -> None:
    sides = set()
    for seed in range(20):
        off = (_under(LeaningMode(seed, most=most), "exp").double() / X.exp().double() - 1) / EPS
        assert bool((off > 0).all() or (off < 0).all())
        assert float(off.abs().min()) > 0.4 and float(off.abs().max()) < most + 0.6
        sides.add(float(off.mean()) > 0)
    assert sides == {True, False}


def test_each_element_is_off_by_itself_and_none_by_more_than_is_usual() -> None:
    rows = torch.stack([X, 1e-6 * X])
    with LeaningMode(3, each=True):
        found = rows.sin()
    off = (found.double() - rows.sin().double()) / EPS
    usual = rows.sin().square().mean(-1, keepdim=True).sqrt()
    assert bool((off > 0.1 * usual).any(-1).all() and (off < -0.1 * usual).any(-1).all())
    assert bool((off.abs() <= 1.6 * torch.maximum(rows.sin().abs(), usual)).all())
    assert torch.equal(_under(LeaningMode(3, each=True), "sin"), _under(LeaningMode(3, each=True), "sin"))
    assert not torch.equal(_under(LeaningMode(3, each=True), "sin"), _under(LeaningMode(4, each=True), "sin"))


def test_what_is_barred_stays_so() -> None:
    """An additive mask of -inf, as attention's is: what it bars is no chance of a NaN."""
    barred = torch.tensor([[0.5, float("-inf"), float("inf")], [float("nan"), 1.0, 2.0]])
    for each in (False, True):
        with LeaningMode(2, each=each):
            found = barred + X[:3]
        assert torch.equal(found.isfinite(), barred.isfinite()) and torch.equal(found.isnan(), barred.isnan())


@pytest.mark.parametrize("each", [False, True])
def test_what_rounds_nothing_stays(each: bool) -> None:
    mode = LeaningMode(1, each=each, alike=CORRECTLY_ROUNDED)
    for work in ("abs", "neg", "relu", "floor", "reciprocal", "sort", "argmax", "clone"):
        with mode:
            found = getattr(X, work)()
        expected = getattr(X, work)()
        pairs = zip(found, expected, strict=True) if work == "sort" else [(found, expected)]
        assert all(torch.equal(one, other) for one, other in pairs), work


def test_what_works_in_place_and_other_types_stay() -> None:
    with LeaningMode(1, each=True):
        changed = X.clone().exp_()
        assert torch.equal(torch.arange(5).cumsum(0), torch.tensor([0, 1, 3, 6, 10]))
        assert torch.empty(0).exp().shape == (0,)
    assert torch.equal(changed, X.exp())
