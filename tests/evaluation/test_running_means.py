"""A running mean may err as the mean of its values does, however near to zero it is."""

from __future__ import annotations

import pytest
import torch

from pytest_cudaforge.evaluation.precision import Fp64Mode

_UNIT = 2.0**-24


def _running(noise: float, momentum: float | None = 0.1, train: bool = True, shift: float = 0.0) -> torch.Tensor:
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm2d(80, momentum=momentum).double().train(train)
    x = torch.randn(24, 80, 9, 11, dtype=torch.float64) + shift
    with torch.no_grad(), Fp64Mode(noise=noise) as mode:
        norm(x)
    assert mode.spreads or not train
    assert norm.running_mean is not None
    return norm.running_mean


@pytest.mark.parametrize("momentum", [0.1, 0.5])
def test_it_is_moved_by_what_a_mean_of_such_values_errs(momentum: float) -> None:
    moved = _running(_UNIT, momentum) - _running(0.0, momentum)
    # A share of a unit roundoff of values of size 1, with the root of 2376 terms.
    assert torch.allclose(moved, torch.full_like(moved, momentum * _UNIT * 2376**0.5 / 128), rtol=0.02)
    assert float(moved.abs().max()) > 1e-3 * momentum * _UNIT * float(_running(0.0, momentum).abs().max())


def test_it_grows_with_the_values_and_not_with_the_mean() -> None:
    near, far = (_running(_UNIT, shift=shift) - _running(0.0, shift=shift) for shift in (0.0, 10.0))
    assert float(far.mean() / near.mean()) == pytest.approx(101**0.5, rel=0.05)


def test_in_evaluation_nothing_moves() -> None:
    assert torch.equal(_running(_UNIT, train=False), _running(0.0, train=False))
