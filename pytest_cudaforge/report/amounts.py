"""Numbers as a report shows them: with their unit, and no more digits than were measured."""

from __future__ import annotations

from pytest_cudaforge.figures import show
from pytest_cudaforge.records import Ratio, Sample, Usage

__all__ = ["count", "interval", "median", "money", "nanoseconds", "percent", "quantity", "spent", "times"]


def times(value: float | None) -> str:
    """``1.43×``; nothing where nothing was measured."""
    return "" if value is None else f"{value:.2f}×"


def interval(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.speedup:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"


def median(sample: Sample | None) -> str:
    return nanoseconds(sample.median_ns if sample is not None else None)


def nanoseconds(time_ns: float | None) -> str:
    if time_ns is None:
        return ""
    return f"{time_ns / 1e3:.2f} µs" if time_ns < 1e6 else f"{time_ns / 1e6:.3f} ms"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def count(value: int | None) -> str:
    return "" if value is None else str(value)


def quantity(value: float | None, unit: str) -> str:
    """A profiler's figure as the Judge saw it; nothing where there is none."""
    return "" if value is None else show(value, unit)


def money(usage: Usage) -> str:
    if usage.usd is None:
        return "price unknown" if usage.input_tokens or usage.output_tokens else ""
    return f"${usage.usd:.4f}" if usage.usd else "$0"


def spent(usage: Usage) -> str:
    tokens = f"{usage.input_tokens} tokens in, {usage.output_tokens} out"
    price = money(usage)
    return f"{tokens}, {price}" if price else tokens
