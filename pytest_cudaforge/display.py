"""What a person sees: a live table or plain lines while forging, readable records afterwards. Text, no verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pytest_cudaforge.events import ForgeEvent
from pytest_cudaforge.records import CaseResult, Evaluation, Round, SanitizerReport, Timing, Trace, Usage
from pytest_cudaforge.report.escaping import plain
from pytest_cudaforge.report.profile_rows import profiles
from pytest_cudaforge.report.rows import Totals, round_row, row, rows
from pytest_cudaforge.report.trail import bounds

__all__ = [
    "PlainLines",
    "columns",
    "evaluation_text",
    "properties_of",
    "round_table",
    "sanitizer_lines",
    "speedup_text",
    "summary_lines",
    "trace_text",
    "usage_text",
]


#: Measurement error of time and ceiling together, in percent.
_STILL_A_BOUND = 105.0


def speedup_text(speedup: float | None) -> str:
    """``1.43x``; a dash where nothing was measured."""
    return "-" if speedup is None else f"{speedup:.2f}x"


def sol_text(sol_percent: float | None) -> str:
    """``87%`` of the speed of light; a dash where nobody knows the roofline, ``>100%`` where it bounds nothing (data in
    caches that it does not know, a ceiling that was measured too low)."""
    if sol_percent is None:
        return "-"
    return f"{sol_percent:.0f}%" if sol_percent <= _STILL_A_BOUND else ">100%"


def usage_text(usage: Usage) -> str:
    """``$0.02``; tokens where the price of the model is not known; a dash where nothing was asked."""
    tokens = usage.input_tokens + usage.output_tokens
    if not tokens:
        return "-"
    return f"{tokens} tokens" if usage.usd is None else money_text(usage.usd)


def money_text(usd: float) -> str:
    """``$1.20``, with four digits below a cent."""
    return f"${usd:.4f}" if 0 < usd < 0.01 else f"${usd:.2f}"


def properties_of(traces: Sequence[Trace]) -> list[tuple[str, str]]:
    """JUnit properties of one target; with several languages, those of the one that got furthest."""
    if not traces:
        return []
    line = row(min(traces, key=_rank))
    return [(name, value) for name, value in {
        "status": line.outcome,
        "rounds": str(line.rounds),
        "speedup_eager": "" if line.speedup_eager is None else f"{line.speedup_eager:.4g}",
        "speedup_compile": "" if line.speedup_compile is None else f"{line.speedup_compile:.4g}",
        "usd": "" if line.usage.usd is None else f"{line.usage.usd:.6g}",
        "isolation": line.isolation,
        "files": " ".join(line.files),
    }.items() if value]  # fmt: skip


def _rank(trace: Trace) -> int:
    order = ("forged", "kept_reference", "failed", "error", "pending", "skipped", "cancelled")
    return order.index(trace.outcome)


# -- records as text -------------------------------------------------------------------------------------------


def trace_text(traces: Sequence[Trace], *, failed: bool = False) -> str:
    """What happened to one target: outcome, table of rounds, notes, files; ``failed`` adds the last verdict in full."""
    return plain("\n\n".join(_one_trace(trace, failed) for trace in traces))


def _one_trace(trace: Trace, failed: bool) -> str:
    lines = [f"{trace.target} ({trace.language}): {trace.outcome}" + (f": {trace.reason}" if trace.reason else "")]
    lines += round_table(trace.rounds, trace.winner)
    lines += _bound_lines(trace)
    lines += [f"note: {note}" for note in trace.notes]
    verdicts = [entry.evaluation for entry in trace.rounds if entry.evaluation is not None]
    if failed and verdicts and not verdicts[-1].passed:
        lines += ["last verdict:", *("  " + line for line in evaluation_text(verdicts[-1]).splitlines())]
    lines += ["files:", *(f"  {name}" for name in trace.files)] if trace.files else []
    return "\n".join(lines)


def _bound_lines(trace: Trace) -> list[str]:
    """What holds back the kernels of the last candidate that was profiled, with the figures that show it."""
    found = profiles(trace)
    if found is None:
        return []
    return [f"profile of {found.after_name}, {line}" for line in bounds(found.after)]


def round_table(rounds: Sequence[Round], winner: int | None = None) -> list[str]:
    """One line per round: number, kind, status, speedups, how near the roofline, what was wrong; the winner's star."""
    lines = [round_row(entry) for entry in rounds]
    cells = [
        (
            f"{line.number}{'*' if line.number == winner else ''}",
            entry.kind,
            line.status,
            speedup_text(line.speedup_eager),
            speedup_text(line.speedup_compile),
            sol_text(line.sol_percent),
            _one_line(line.note),
        )
        for line, entry in zip(lines, rounds, strict=True)
    ]
    return columns(("round", "kind", "status", "vs eager", "vs compile", "roofline", "remark"), cells) if cells else []


def columns(header: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns; the last column is not padded."""
    grid = [tuple(header), *(tuple(line) for line in cells)]
    widths = [max(len(line[column]) for line in grid) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in grid]


def _one_line(text: str, limit: int = 120) -> str:
    first = " ".join(text.split())
    return first if len(first) <= limit else first[: limit - 3] + "..."


def evaluation_text(evaluation: Evaluation) -> str:
    """A verdict in a few lines: status, reason, isolation, cases by workload, speedups, build log where it failed."""
    lines = [evaluation.status.value + (f": {evaluation.reason}" if evaluation.reason else "")]
    isolation = evaluation.isolation
    lines.append(f"isolation {isolation.grade}" + (f" ({'; '.join(isolation.reasons)})" if isolation.reasons else ""))
    if evaluation.verification is not None:
        lines += _verification_lines(evaluation.verification.cases)
        reasons = evaluation.verification.guard.reasons
        lines += [f"note: {reason}" for reason in reasons if evaluation.passed and reason.startswith("input ")]
        lines += sanitizer_lines(evaluation.verification.sanitizer)
    timing = evaluation.timing
    if timing is not None:
        lines.append(
            f"{timing.decision}: {speedup_text(timing.speedup_eager)} vs eager, "
            f"{speedup_text(timing.speedup_compile)} vs compile" + (f" ({timing.note})" if timing.note else "")
        )
        lines += _host_lines(timing)
    if evaluation.build is not None and evaluation.build.log and not evaluation.passed:
        lines += ["build log:", *("  " + line for line in evaluation.build.log.splitlines())]
    # A compiler repeats what a candidate wrote; a terminal must not act on it.
    return plain("\n".join(lines))


def _host_lines(timing: Timing) -> list[str]:
    """Device and host times of workloads that may be bound by their launches, us per call."""
    lines = []
    for entry in timing.workloads:
        host = entry.host
        if host is not None and host.eager_ns is not None:
            device_us = (
                f"device {entry.candidate.median_ns / 1e3:.2f} against {entry.eager.median_ns / 1e3:.2f} us eager"
            )
            host_us = f"host {host.candidate_ns / 1e3:.2f} against {host.eager_ns / 1e3:.2f} us eager"
            lines.append(f"workload {entry.workload}, launch-bound: {device_us}, {host_us}")
    return lines


def _verification_lines(cases: Sequence[CaseResult]) -> list[str]:
    lines = []
    for workload in dict.fromkeys(case.workload for case in cases):
        own = [case for case in cases if case.workload == workload and case.contract]
        lines.append(f"workload {workload}: {sum(case.passed for case in own)} of {len(own)} cases right")
        for case in own:
            lines += [f"  {case.case}: {wrong.output}: {wrong.detail}" for wrong in case.mismatches if not case.passed]
    return lines


def sanitizer_lines(report: SanitizerReport | None) -> list[str]:
    """What compute-sanitizer found, and which of its tools did not run; nothing where it was not asked."""
    if report is None:
        return []
    clean = "nothing found" if report.tools and not report.findings else ""
    ran = f"{', '.join(report.tools) or 'did not run'} ({report.seconds:.1f} s)"
    lines = [f"compute-sanitizer on workload {report.workload}: {ran}" + (f": {clean}" if clean else "")]
    for found in report.findings:
        where = f"kernel {found.kernel} at {found.place}" if found.kernel else f"at {found.place}"
        note = "" if found.refuses else " (reported only)"
        detail = f": {found.detail}" if found.detail else ""
        lines.append(f"  {found.tool}: {found.kind}, {where}, {found.count} times{detail}{note}")
    return lines + [f"  note: {note}" for note in report.notes]


# -- the end -----------------------------------------------------------------------------------------------------


def summary_lines(traces: Sequence[Trace], total: Totals) -> list[str]:
    """What ``--forge`` prints last: a line per target, the files, and figures over several targets."""
    cells = [
        (
            line.target,
            line.language,
            line.outcome,
            speedup_text(line.speedup_eager),
            speedup_text(line.speedup_compile),
            sol_text(line.sol_percent_now),
            str(line.rounds),
            usage_text(line.usage),
            _one_line(line.reason, 60),
        )
        for line in rows(traces)
    ]
    header = ("target", "language", "outcome", "vs eager", "vs compile", "roofline", "rounds", "cost", "remark")
    lines = columns(header, cells)
    # Four files a kernel would push the figures off the screen; their folder says where they are.
    places = dict.fromkeys(_folder(name) for line in rows(traces) for name in line.files)
    lines += ["", "files:", *(f"  {place}" for place in sorted(places))] if places else []
    return [plain(line) for line in lines] + (_totals_lines(total) if total.targets > 1 else [])


def _totals_lines(total: Totals) -> list[str]:
    lines = ["", f"{total.forged} of {total.targets} targets forged, {total.tried} tried"]
    if total.correct is not None:
        lines[-1] += f"; a correct candidate for {total.correct:.0%}"
    cells = [
        ("eager", _share_text(total.fast_1_eager), speedup_text(total.median_eager), speedup_text(total.geomean_eager)),
        (
            "compile",
            _share_text(total.fast_1_compile),
            speedup_text(total.median_compile),
            speedup_text(total.geomean_compile),
        ),
    ]
    lines += columns(("baseline", "fast_1", "median", "geomean"), cells) if total.tried else []
    return [*lines, f"cost {usage_text(total.usage)}, {total.seconds:.0f} s"]


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


# -- while it runs -----------------------------------------------------------------------------------------------

#: What is written at which verbosity, least first; a failure or a stop is never left out.
_QUIET = frozenset({"done", "stopping"})
_NORMAL = _QUIET | {"note", "waiting", "headroom", "finished", "selecting"}


class PlainLines:
    """An observer for logs and pipes: one line per event that matters at this verbosity (-q, none, -v)."""

    def __init__(self, write: Callable[[str], object], verbosity: int = 0) -> None:
        self._write = write
        self._verbosity = verbosity

    def on_event(self, event: ForgeEvent) -> None:
        if self._verbosity > 0 or event.kind in (_NORMAL if self._verbosity == 0 else _QUIET):
            self._write(event_line(event))


def event_line(event: ForgeEvent) -> str:
    """``layers.py::RMSNorm [cpp] round 3 finished: PASSED 1.43x (best 1.43x, $0.02)``."""
    where = event.target + (f" [{event.language}]" if event.language else "")
    kind = "begins" if event.kind == "round" else event.kind
    words = [where or "cudaforge", f"round {event.round}" if event.round else "", kind]
    text = " ".join(word for word in words if word)
    facts = [event.status, speedup_text(event.speedup) if event.speedup is not None else "", event.text]
    said = " ".join(fact for fact in facts if fact)
    so_far = [f"best {speedup_text(event.best)}"] if event.best is not None else []
    so_far += [money_text(event.usd)] if event.usd else []
    return plain(text + (f": {said}" if said else "") + (f" ({', '.join(so_far)})" if so_far else ""))


def _folder(name: str) -> str:
    folder, _, file = name.rpartition("/")
    return name if file == "manifest.json" or not folder else f"{folder}/"
