"""Whether every number on a page of evidence stands in the records it was made from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_cudaforge import attempts, figures
from pytest_cudaforge.records import Baseline, DeviceFacts, Evaluation, Round, to_json


def numbers(value: Any) -> Iterator[float]:
    """Every number of a record's JSON, those inside its texts included."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, str):
        yield from itertools.chain.from_iterable((figure.shown, figure.value) for figure in figures.read(value))
    elif isinstance(value, list):
        if len(value) == 3 and isinstance(value[1], float) and isinstance(value[2], str):
            yield from (figure.value for figure in figures.read(f"{value[1]!r} {value[2]}"))
        yield from itertools.chain.from_iterable(map(numbers, value))
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(numbers, value.values()))


def shares(verdict: Evaluation, tried: Sequence[Round]) -> Iterator[float]:
    """What the page reckons from numbers of the records: shares of the profiled time and of the bound, gains."""
    durations = [kernel.duration_ns or 0.0 for kernel in verdict.profile.kernels] if verdict.profile else []
    yield from (duration / sum(durations) for duration in durations if sum(durations))
    for workload in verdict.timing.workloads if verdict.timing else ():
        yield (workload.roofline_ns or 0.0) / workload.candidate.median_ns
    yield from (attempt.measured for attempt in attempts.remember(tried) if attempt.measured is not None)


def stands(figure: figures.Figure, known: set[float]) -> bool:
    """As the record has it, or as nanoseconds or per cent of it, to three digits (shares of the bound: to two)."""
    readings = [figure.shown, figure.value, figure.value * 1e9, figure.value * 100, figure.value * 1e6]
    rounding = max(0.006, 1.01 * figure.slack) if figure.dimension == "share" else 0.006
    return any(math.isclose(reading, number, rel_tol=rounding) for reading in readings for number in known)


def foreign(
    text: str,
    verdict: Evaluation,
    baselines: Sequence[Baseline] = (),
    tried: Sequence[Round] = (),
    device: DeviceFacts | None = None,
) -> list[str]:
    """The figures of a page that stand in none of the records it was made from."""
    known = set(numbers(to_json([verdict, baselines, device, tried]))) | set(shares(verdict, tried))
    return [figure.text for figure in figures.read(text) if not stands(figure, known)]
