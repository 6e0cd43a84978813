"""The statistics against known answers."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from pytest_cudaforge import trend


def test_the_slope_is_not_moved_by_an_outlier() -> None:
    values = [2.0 * index + 1.0 for index in range(11)]
    values[4] = 500.0
    assert trend.slope(values) == pytest.approx(2.0)


def test_kendalls_test_knows_a_worked_example() -> None:
    """n = 10, no ties, S = 45: variance 125, z = 44 / sqrt(125)."""
    assert trend.rising(range(10)) == pytest.approx(0.5 * math.erfc(44 / math.sqrt(125) / math.sqrt(2)), rel=1e-6)
    assert trend.rising(range(10, 0, -1)) == 1.0
    assert trend.rising([3.0] * 12) == 1.0


def test_a_series_with_memory_is_judged_with_more_care() -> None:
    """Values that stay near the one before have fewer of them that say something anew."""
    generator, wandering = random.Random(3), [0.0]
    while len(wandering) < 60:
        wandering.append(0.9 * wandering[-1] + generator.gauss(0, 1))
    assert trend._memory(wandering) > 2.0
    assert trend._memory([generator.gauss(0, 1) for _ in range(60)]) == pytest.approx(1.0, abs=0.6)


def test_the_limit_of_a_short_past_is_far() -> None:
    past = [100.0, 101.0, 99.0, 100.0, 101.0, 99.0]
    assert (
        trend.limit(past, 0.001, least_spread=0.0, far=10.0)
        > trend.limit(past * 4, 0.001, least_spread=0.0, far=10.0)
        > 101.0
    )
    assert trend.limit([100.0] * 6, 0.001, least_spread=1.0, far=10.0) > 100.0 + 3.0


def test_one_bad_day_does_not_widen_the_spread() -> None:
    calm = [100.0, 101.0, 99.0, 100.5, 99.5, 100.0, 101.0, 99.0]
    assert trend.clipped_spread([*calm, 160.0], 2.0) < 1.1
    assert trend.clipped_spread(calm, 2.0) == statistics.stdev(calm)


def test_the_first_and_the_last_third() -> None:
    assert trend.thirds([1, 2, 3, 50, 60, 70, 11, 12, 13]) == 10
