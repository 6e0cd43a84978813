"""Quantiles against published tables."""

from __future__ import annotations

import math

import pytest

from pytest_cudaforge.distributions import binomial_interval, student_t


@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [(0.995, 1, 63.657), (0.995, 2, 9.925), (0.995, 6, 3.707), (0.975, 10, 2.228), (0.975, 1e6, 1.960), (0.5, 3, 0.0)],
)
def test_student_t(probability: float, degrees: float, value: float) -> None:
    assert student_t(probability, degrees) == pytest.approx(value, abs=6e-4)
    assert student_t(1.0 - probability, degrees) == pytest.approx(-value, abs=6e-4)


@pytest.mark.parametrize(
    ("count", "trials", "low", "high"),
    [(0, 60, 0.0, 0.0596), (39, 40, 0.8684, 0.99937), (40, 40, 0.9119, 1.0), (5, 10, 0.1871, 0.8129), (0, 0, 0.0, 1.0)],
)
def test_binomial_interval(count: int, trials: int, low: float, high: float) -> None:
    assert binomial_interval(count, trials) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_what_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match="degrees"):
        student_t(0.9, 0)
    with pytest.raises(ValueError, match="no count"):
        binomial_interval(3, 2)
    assert math.isfinite(student_t(0.9999, 0.5))
