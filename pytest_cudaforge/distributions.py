"""Quantiles that few measurements need: Student's t and the binomial's exact interval. Standard library only.

Both rest on the regularised incomplete beta function, by its continued fraction (DLMF 8.17.22, evaluated by Lentz's
method). ``statistics.NormalDist`` is all that the standard library has, and scipy would cost a second of import.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

__all__ = ["binomial_interval", "student_t"]

_TINY, _EPSILON, _MOST_TERMS, _HALVINGS = 1e-300, 1e-14, 1000, 200


@functools.lru_cache(maxsize=4096)
def student_t(probability: float, degrees: float) -> float:
    """The value that a variable of Student's t distribution stays below with ``probability``; ``degrees`` of freedom
    need not be whole. Raises ValueError outside 0 < probability < 1 and degrees > 0."""
    if not 0.0 < probability < 1.0 or degrees <= 0.0:
        raise ValueError(f"no quantile {probability:g} of Student's t with {degrees:g} degrees of freedom")
    if probability < 0.5:
        return -student_t(1.0 - probability, degrees)
    tail = 2.0 * (1.0 - probability)
    share = _solve(lambda x: _beta_share(degrees / 2.0, 0.5, x), tail)
    return math.sqrt(degrees * (1.0 / share - 1.0))


def binomial_interval(count: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """What share may lie behind ``count`` of ``trials``: the exact two-sided interval of Clopper and Pearson (1934),
    which never promises too much, however few the trials. Without trials anything may: (0, 1).

    Raises ValueError where ``count`` is not within 0 and ``trials``.
    """
    if not 0 <= count <= trials:
        raise ValueError(f"{count} of {trials} is no count")
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if count == 0 else _solve(lambda x: _beta_share(count, trials - count + 1, x), tail)
    high = 1.0 if count == trials else _solve(lambda x: _beta_share(count + 1, trials - count, x), 1.0 - tail)
    return low, high


def _solve(rising: Callable[[float], float], wanted: float) -> float:
    """x within 0 and 1 where ``rising`` is ``wanted``, by halving."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return high


def _beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # The fraction converges fast below the mean; above it the symmetric one does.
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - math.exp(log_front) * _fraction(b, a, 1.0 - x) / b
    return math.exp(log_front) * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        for term in (even, odd):
            d, c = 1.0 / _away(1.0 + term * d), _away(1.0 + term / c)
            value *= d * c
        if abs(d * c - 1.0) < _EPSILON:
            break
    return value


def _away(value: float) -> float:
    """``value``, but never zero."""
    return value if abs(value) > _TINY else _TINY
