"""The one model of rows that every report is written from. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_cudaforge.records import Evaluation, Guard, Outcome, Round, Timing, Trace, Usage
from pytest_cudaforge.report.standings import Standing, judged_round, standings, timing_of

__all__ = [
    "RoundRow",
    "Row",
    "Totals",
    "geometric_mean",
    "guard_limits",
    "outcome_text",
    "round_row",
    "row",
    "rows",
    "sol_percent",
    "totals",
    "totals_of",
]

#: Outcomes of targets that were really tried: what shares and means are taken over.
TRIED = ("forged", "kept_reference", "failed")
#: What each outcome means to a reader.
_OUTCOMES: Mapping[Outcome, str] = {
    "forged": "Forged: the winner is correct and faster",
    "kept_reference": "Kept the reference",
    "failed": "No correct candidate",
    "skipped": "Skipped",
    "pending": "Pending",
    "cancelled": "Cancelled",
    "error": "Error",
}


@dataclass(frozen=True)
class Row:
    """One target's line. Speedups are the fresh re-measurement's; a kept reference is 1.0: what the user has then.

    ``sol_percent*``: the roofline's time ÷ the measured one, of eager, ``torch.compile`` and the candidate of the last
    verdict, as geometric means over workloads; None where nobody knows the roofline.
    """

    target: str
    language: str
    outcome: Outcome
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
    sol_percent_eager: float | None = None
    sol_percent_compile: float | None = None
    sol_percent: float | None = None

    @property
    def sol_percent_now(self) -> float | None:
        """What the user has after the run: the winner's, or else eager's."""
        return self.sol_percent if self.outcome == "forged" else self.sol_percent_eager


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
    sol_percent: float | None = None


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
    near, judged = standings(trace), judged_round(trace)
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
        sol_percent_eager=_mean_sol(near, "eager"),
        sol_percent_compile=_mean_sol(near, "compile"),
        sol_percent=_mean_sol(near, f"round {judged.number}") if judged is not None else None,
    )


def outcome_text(trace: Trace) -> str:
    """What became of the target, in a few words that say no more than was won."""
    if trace.outcome == "forged" and trace.final is not None and trace.final.work == "compiler":
        return "A compiler configuration, not a kernel, is correct and faster"
    return _OUTCOMES[trace.outcome]


def _grade(entries: Sequence[Round]) -> str:
    verdicts = [entry.evaluation for entry in entries if entry.evaluation is not None]
    return verdicts[-1].isolation.grade if verdicts else ""


def round_row(entry: Round) -> RoundRow:
    """The line of one round."""
    verdict = entry.evaluation
    timing = timing_of(verdict)
    return RoundRow(
        number=entry.number,
        kind=entry.kind,
        parent=entry.parent,
        status=verdict.status.value if verdict is not None else "NO CANDIDATE",
        recorded_status=entry.recorded_status,
        speedup_eager=timing.speedup_eager if timing else None,
        speedup_compile=timing.speedup_compile if timing else None,
        note=_round_note(entry, verdict),
        sol_percent=sol_percent(timing),
    )


def sol_percent(timing: Timing | None) -> float | None:
    """The candidate's, as geometric mean over the workloads; None where one of them has no roofline."""
    timed = timing.workloads if timing is not None else ()
    shares = [100.0 * entry.roofline_ns / entry.candidate.median_ns for entry in timed if entry.roofline_ns]
    return geometric_mean(shares) if len(shares) == len(timed) else None


def _mean_sol(near: Sequence[Standing], party: str) -> float | None:
    return geometric_mean([entry.sol_percent for entry in near if entry.party == party])


def _round_note(entry: Round, verdict: Evaluation | None) -> str:
    parts = [entry.failure, f"same as round {entry.duplicate_of}" if entry.duplicate_of is not None else ""]
    parts += [verdict.reason if verdict is not None and not verdict.passed else "", *entry.notes]
    return "; ".join(part for part in parts if part)


def guard_limits(guard: Guard) -> tuple[str, ...]:
    """Where a kernel may be used, in words; nothing where it may be used wherever its workloads go."""
    limits = ["contiguous tensors only"] if guard.contiguous_only else []
    limits += [f"aligned to {guard.align_bytes} bytes"] if guard.align_bytes > 1 else []
    if guard.drawn_shapes_only:
        return (*limits, "the drawn shapes only")
    limits += [f"{', '.join(map(str, guard.fixed_sizes))} as drawn"] if guard.fixed_sizes else []
    return (*limits, "sizes equal where the drawn ones are") if guard.equal_sizes_only else tuple(limits)


def totals(traces: Sequence[Trace], usage: Usage, seconds: float) -> Totals:
    """Summary figures of a session."""
    return totals_of(rows(traces), usage, seconds)


def totals_of(lines: Sequence[Row], usage: Usage, seconds: float) -> Totals:
    """As :func:`totals`, from rows."""
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
