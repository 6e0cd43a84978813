"""The one model of rows that every report is written from. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_cudaforge.records import Evaluation, Round, Trace, Usage

__all__ = ["RoundRow", "Row", "Totals", "geometric_mean", "round_row", "row", "rows", "totals"]

#: Outcomes of targets that were really tried: what shares and means are taken over.
TRIED = ("forged", "kept_reference", "failed")


@dataclass(frozen=True)
class Row:
    """One target's line. Speedups are the fresh re-measurement's; a kept reference is 1.0: what the user has then."""

    target: str
    language: str
    outcome: str
    reason: str
    rounds: int
    winner: int | None
    correct: bool
    speedup_eager: float | None
    speedup_compile: float | None
    decision: str
    work: str
    isolation: str
    usage: Usage
    seconds: float
    files: tuple[str, ...]


@dataclass(frozen=True)
class RoundRow:
    """One round's line. ``recorded_status`` is what a replayed conversation saw elsewhere, "" where none is played."""

    number: int
    kind: str
    parent: int | None
    status: str
    recorded_status: str
    speedup_eager: float | None
    speedup_compile: float | None
    note: str


@dataclass(frozen=True)
class Totals:
    """Over several targets. Shares and means are over the ``tried`` ones (not skipped, pending, cancelled, error).

    ``correct``: share with a correct candidate. ``fast_1_*``: share whose winner is correct and faster than that
    baseline. Medians and geometric means are over targets with a correct candidate that was timed against it; a kept
    reference counts as 1.0 against eager. ``usd`` None: at least one price is unknown.
    """

    targets: int
    tried: int
    forged: int
    correct: float | None
    fast_1_eager: float | None
    fast_1_compile: float | None
    median_eager: float | None
    median_compile: float | None
    geomean_eager: float | None
    geomean_compile: float | None
    usage: Usage
    seconds: float


def rows(traces: Sequence[Trace]) -> tuple[Row, ...]:
    """One row per trace, in order."""
    return tuple(row(trace) for trace in traces)


def row(trace: Trace) -> Row:
    """The line of one target."""
    final, kept = trace.final, trace.outcome == "kept_reference"
    timing = final.timing if final is not None and trace.outcome == "forged" else None
    return Row(
        target=trace.target,
        language=trace.language,
        outcome=trace.outcome,
        reason=trace.reason,
        rounds=len(trace.rounds),
        winner=trace.winner,
        correct=any(entry.evaluation is not None and entry.evaluation.passed for entry in trace.rounds),
        speedup_eager=timing.speedup_eager if timing else (1.0 if kept else None),
        speedup_compile=timing.speedup_compile if timing else None,
        decision=timing.decision if timing else "",
        work=(final.work or "") if final else "",
        isolation=final.isolation.grade if final else _grade(trace.rounds),
        usage=trace.usage,
        seconds=trace.seconds,
        files=trace.files,
    )


def _grade(entries: Sequence[Round]) -> str:
    verdicts = [entry.evaluation for entry in entries if entry.evaluation is not None]
    return verdicts[-1].isolation.grade if verdicts else ""


def round_row(entry: Round) -> RoundRow:
    """The line of one round."""
    verdict = entry.evaluation
    timing = verdict.timing if verdict is not None else None
    return RoundRow(
        number=entry.number,
        kind=entry.kind,
        parent=entry.parent,
        status=verdict.status.value if verdict is not None else "NO CANDIDATE",
        recorded_status=entry.recorded_status,
        speedup_eager=timing.speedup_eager if timing else None,
        speedup_compile=timing.speedup_compile if timing else None,
        note=_round_note(entry, verdict),
    )


def _round_note(entry: Round, verdict: Evaluation | None) -> str:
    parts = [entry.failure, f"same as round {entry.duplicate_of}" if entry.duplicate_of is not None else ""]
    parts += [verdict.reason if verdict is not None and not verdict.passed else "", *entry.notes]
    return "; ".join(part for part in parts if part)


def totals(traces: Sequence[Trace], usage: Usage, seconds: float) -> Totals:
    """Summary figures of a session."""
    lines = rows(traces)
    tried = [line for line in lines if line.outcome in TRIED]
    eager = [line.speedup_eager for line in tried if line.speedup_eager is not None]
    compiled = [line.speedup_compile for line in tried if line.speedup_compile is not None]
    return Totals(
        targets=len(lines),
        tried=len(tried),
        forged=sum(1 for line in lines if line.outcome == "forged"),
        correct=_share([line.correct for line in tried]),
        fast_1_eager=_share([(line.speedup_eager or 0.0) > 1.0 for line in tried]),
        fast_1_compile=_share([(line.speedup_compile or 0.0) > 1.0 for line in tried]) if compiled else None,
        median_eager=statistics.median(eager) if eager else None,
        median_compile=statistics.median(compiled) if compiled else None,
        geomean_eager=geometric_mean(eager),
        geomean_compile=geometric_mean(compiled),
        usage=usage,
        seconds=seconds,
    )


def geometric_mean(values: Sequence[float]) -> float | None:
    """None where there is nothing to average, or a value that has no logarithm."""
    if not values or min(values) <= 0:
        return None
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None
