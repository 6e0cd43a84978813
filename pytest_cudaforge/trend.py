"""Is a new value out of its own past? Does a series rise? Pure statistics, standard library only.

Sources: Student's prediction interval for one more observation; the slope of Theil (1950) and Sen (J. Am. Stat. Assoc.
63, 1968); the trend test of Mann (Econometrica 13, 1945) and Kendall (Rank Correlation Methods, 1975) with its
correction for ties, and for a memory of the series the variance of Hamed and Rao (J. Hydrology 204, 1998).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from pytest_cudaforge.distributions import student_t

__all__ = ["clipped_spread", "limit", "rising", "slope", "thirds"]


def clipped_spread(values: Sequence[float], far: float) -> float:
    """The standard deviation after values more than ``far`` above the median are pulled there, one in ten (rounded up)
    at most: a bad day in the past must not hide the next one. Needs two values."""
    ordered, median = sorted(values), statistics.median(values)
    for index in range(len(ordered) - math.ceil(len(ordered) / 10), len(ordered)):
        ordered[index] = min(ordered[index], median + far)
    return statistics.stdev(ordered)


def limit(past: Sequence[float], chance: float, *, least_spread: float, far: float) -> float:
    """What one more value of the same kind as ``past`` passes with the probability ``chance`` only, by Student's
    prediction interval about the median. The past is taken to spread by ``least_spread`` at least; bad days in it are
    those ``far`` above its median."""
    count = len(past)
    spread = max(clipped_spread(past, far), least_spread)
    return statistics.median(past) + student_t(1.0 - chance, count - 1) * spread * math.sqrt(1.0 + 1.0 / count)


def slope(values: Sequence[float]) -> float:
    """Theil and Sen's: the median of the slopes between all pairs, per step."""
    pairs = [(values[j] - values[i]) / (j - i) for i in range(len(values)) for j in range(i + 1, len(values))]
    return statistics.median(pairs)


def thirds(values: Sequence[float]) -> float:
    """The median of the last third less that of the first."""
    part = len(values) // 3
    return statistics.median(values[-part:]) - statistics.median(values[:part])


def rising(values: Sequence[float]) -> float:
    """The probability of so many rising pairs in a series without a trend: Mann and Kendall's test, one-sided.

    Runs of one runner remember each other (a warm week): Hamed and Rao's variance allows for that, over lags whose
    correlation of the ranks is clear of zero; it only ever makes the test more careful here.
    """
    count = len(values)
    rises = sum(_sign(values[j] - values[i]) for i in range(count) for j in range(i + 1, count))
    if rises <= 0:
        return 1.0
    ties = sum(size * (size - 1) * (2 * size + 5) for size in Counter(values).values())
    variance = (count * (count - 1) * (2 * count + 5) - ties) / 18.0 * _memory(values)
    return 1.0 - statistics.NormalDist().cdf((rises - 1) / math.sqrt(variance)) if variance > 0 else 1.0


def _memory(values: Sequence[float]) -> float:
    """n / n* of Hamed and Rao, at least 1: how many times the variance of independent values."""
    count = len(values)
    step = slope(values)
    # What differs by rounding alone is equal.
    ranks = _ranks([round(value - step * index, 9) for index, value in enumerate(values)])
    mean = statistics.fmean(ranks)
    centered = [rank - mean for rank in ranks]
    total = sum(value * value for value in centered)
    if not total:
        return 1.0
    clear, more = 1.645 / math.sqrt(count), 0.0
    for lag in range(1, count - 2):
        correlation = sum(centered[i] * centered[i + lag] for i in range(count - lag)) / total
        if abs(correlation) > clear:
            more += (count - lag) * (count - lag - 1) * (count - lag - 2) * correlation
    return max(1.0, 1.0 + 2.0 / (count * (count - 1) * (count - 2)) * more)


def _ranks(values: Sequence[float]) -> list[float]:
    """Equal values share the middle of their ranks."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
