"""Histories made up for the tests: what a runner would have written over many runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone

from pytest_cudaforge.history import GuardRun, Measurement
from pytest_cudaforge.machine import Machine, Toolchain
from pytest_cudaforge.measurements import Judgement
from pytest_cudaforge.records import Ratio, Sample

H200 = Machine(
    device="NVIDIA H200",
    arch="sm_90",
    cpu="Intel Xeon Platinum 8480C",
    cores=16,
    device_id="1a2b3c4d",
    kernel="Linux 6.8.0",
    python="3.12.3",
    toolchain=Toolchain("2.11.0+cu130", "3.6.0", "13.0", "580.95.05", "nvrtc 13.0.88"),
)
NEWER = replace(H200, toolchain=replace(H200.toolchain, torch="2.12.0+cu130", driver="590.10"))
NORM = "layers.py::RMSNorm"
_START = datetime(2026, 9, 1, 6, tzinfo=timezone.utc)


def run(number: int, machine: Machine = H200) -> GuardRun:
    """The run of day ``number``."""
    time = (_START + timedelta(days=number)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return GuardRun(f"run{number:09d}", time, f"{number:040x}", f"{max(0, number - 1):040x}", machine)


def measurement(
    number: int,
    times: dict[str, float],
    *,
    target: str = NORM,
    workload: str = "w0",
    kernel: str = "a" * 64,
    target_digest: str = "d" * 64,
    machine: Machine = H200,
    outcome: str = "pass",
    spread: float = 0.01,
    disturbed: str = "",
    width: float = 0.01,
) -> Measurement:
    """``times``: median ns by party; its blocks spread by ``spread``, its ratios are known to ``width``."""
    candidate = times["candidate"]
    judgements = [
        Judgement(party, "pass", _ratio(time / candidate, width), 0.0)
        for party, time in times.items()
        if party in _ASKED
    ]
    if "base" in times:
        judgements.append(Judgement("base", outcome, _ratio(candidate / times["base"], width), 0.0))
    return Measurement(
        run=run(number, machine),
        target=target,
        target_digest=target_digest,
        kernel=kernel,
        language="cuda",
        workload=workload,
        what="forward",
        clock="events",
        parties=tuple((party, _sample(time, spread)) for party, time in times.items()),
        processes=4,
        outcome=outcome,
        judgements=tuple(judgements),
        disturbed=disturbed,
    )


_ASKED = ("eager", "compile")


def _sample(time: float, spread: float) -> Sample:
    return Sample(time, time * (1 - spread), time * (1 + spread), 960, 32)


def _ratio(value: float, width: float) -> Ratio:
    return Ratio(value, value * (1 - width), value * (1 + width))


def days(count: int, times: Callable[[int], dict[str, float]], **more: object) -> list[Measurement]:
    """One measurement a day."""
    return [measurement(number, times(number), **more) for number in range(count)]  # type: ignore[arg-type]


def noisy(spread: float, seed: int = 1) -> Callable[[float], float]:
    """``time`` as a runner with this standard deviation (share) would see it."""
    generator = random.Random(seed)
    return lambda time: time * (1.0 + generator.gauss(0.0, spread))


def split(history: Sequence[Measurement]) -> tuple[list[Measurement], list[Measurement]]:
    """(the history, the last run of it)"""
    last = history[-1].run.id
    return list(history), [one for one in history if one.run.id == last]
