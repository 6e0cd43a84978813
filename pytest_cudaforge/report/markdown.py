"""A target's report as markdown, and the summary of a session. Everything a model or a compiler wrote is escaped."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

from pytest_cudaforge.records import Evaluation, Ratio, Round, Sample, Timing, Trace, Usage, Verification
from pytest_cudaforge.report.rows import RoundRow, Row, Totals, round_row, rows

__all__ = ["escape", "fence", "report", "summary"]

#: What starts markup anywhere in a line, and what does so only at its beginning (headings, lists, quotes, rules).
_SPECIAL = re.compile(r"([\\`*{}\[\]|~$]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))")
_LEADING = re.compile(r"^(\d*)([#+\-=.)>])")
_INVISIBLE = "\u200b"


def escape(text: str) -> str:
    """``text`` as one line that renders as itself: no markup, link, HTML, table cell or @mention comes out of it."""
    line = _visible(" ".join(text.split()))
    line = _SPECIAL.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))
    line = _LEADING.sub(r"\1\\\2", line)
    # Mentions, issue numbers and bare URLs are linked after rendering, so a backslash does not stop them.
    return re.sub(r"(@|#(?=\d)|:(?=/)|www(?=\.))", r"\1" + _INVISIBLE, line)


def fence(text: str, language: str = "") -> str:
    """``text`` as a code block, fenced with more backticks than it holds anywhere."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{_visible(text.rstrip())}\n{marks}"


def _visible(text: str) -> str:
    """Without terminal escapes and the characters that turn text around: what is shown is what is there."""
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf"))


def report(trace: Trace) -> str:
    """The readable report of one target: outcome, speedups, accuracy, isolation, rounds, the Judge's trail, cost."""
    parts = [f"# {escape(trace.target)} ({trace.language})", _headline(trace)]
    if trace.final is not None:
        parts += [_speedups(trace.final), _accuracy(trace.final), _kernels(trace.final), _isolation(trace.final)]
    parts += [_rounds(trace.rounds), _trail(trace.rounds), _logs(trace.rounds), _cost(trace)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(traces: Sequence[Trace], total: Totals) -> str:
    """All targets in one table, with the totals below."""
    header = ("target", "language", "outcome", "vs eager", "vs compile", "rounds", "cost", "files")
    return _table(header, [_summary_cells(line) for line in rows(traces)]) + "\n\n" + _totals(total) + "\n"


def _headline(trace: Trace) -> str:
    words = {
        "forged": "Forged: the winner is correct and faster",
        "kept_reference": "Kept the reference",
        "failed": "No correct candidate",
    }
    lines = [f"**{words.get(trace.outcome, trace.outcome.capitalize())}.** {escape(trace.reason)}"]
    lines += [f"- {escape(note)}" for note in trace.notes]
    return "\n".join(lines)


# -- the verdict -----------------------------------------------------------------------------------------------------


def _speedups(final: Evaluation) -> str:
    timing = final.timing
    if timing is None:
        return ""
    cells = [
        (
            escape(entry.workload),
            _time(entry.candidate),
            _time(entry.eager),
            _time(entry.compile),
            _ratio(entry.vs_eager),
            _ratio(entry.vs_compile),
            "" if not entry.roofline_ns else f"{entry.roofline_ns / entry.candidate.median_ns:.0%}",
            str(entry.launches),
        )
        for entry in timing.workloads
    ]
    header = ("workload", "kernel", "eager", "compile", "vs eager", "vs compile", "of roofline", "launches")
    text = f"Decision: **{timing.decision}**, by the clock `{timing.clock}`, re-measured after the rounds. "
    text += "Speedup: median over paired blocks of baseline ÷ kernel, with its interval; times are medians."
    note = f"\n\n{escape(timing.note)}" if timing.note else ""
    return f"## Speed\n\n{text}\n\n{_table(header, cells)}{_launch_bound(timing)}{note}"


def _launch_bound(timing: Timing) -> str:
    """Device and host times of workloads whose calls may take less than their launches."""
    cells = [
        (
            escape(entry.workload),
            _time(entry.candidate),
            _nanoseconds(entry.host.candidate_ns),
            _time(entry.eager),
            _nanoseconds(entry.host.eager_ns),
            _nanoseconds(entry.host.compile_ns),
        )
        for entry in timing.workloads
        if entry.host is not None and entry.host.eager_ns is not None
    ]
    if not cells:
        return ""
    header = ("workload", "kernel, device", "kernel, host", "eager, device", "eager, host", "compile, host")
    text = (
        "Launch-bound: beside the device's time of a cold call, the host's of calls one after another (replay without "
    )
    return f"\n\n{text}torch, the references in torch).\n\n{_table(header, cells)}"


def _accuracy(final: Evaluation) -> str:
    found = final.verification
    if found is None:
        return ""
    passed = sum(1 for case in found.cases if case.passed)
    worst = "exact" if found.worst_ratio is None else f"worst error ratio {found.worst_ratio:.3g}"
    text = f"{passed} of {len(found.cases)} cases passed; {worst} (oracle: {found.oracle})."
    cells = [
        (
            escape(case.workload),
            escape(case.case),
            "contract" if case.contract else "probe",
            "passed" if case.passed else "failed",
            "" if case.error_ratio is None else f"{case.error_ratio:.3g}",
            "" if case.bound is None else f"{case.bound:.3g}",
        )
        for case in found.cases
    ]
    table = _table(("workload", "case", "kind", "verdict", "error ratio", "allowed"), cells)
    return f"## Accuracy\n\n{text}\n\n{table}{_guard(found)}{_sanitizer(found)}"


def _sanitizer(found: Verification) -> str:
    """What compute-sanitizer said of the winner, where it was asked."""
    report = found.sanitizer
    if report is None:
        return ""
    ran = f"compute-sanitizer on workload {escape(report.workload)}: {', '.join(report.tools) or 'nothing ran'}"
    ran += " found nothing." if report.tools and not report.findings else "."
    lines = [
        f"- {one.tool}: {escape(f'{one.kind}, kernel {one.kernel} at {one.place}, {one.count} times; {one.detail}')}"
        for one in report.findings
    ]
    lines += [f"- {escape(note)}" for note in report.notes]
    return f"\n\n{ran}" + ("\n\n" + "\n".join(lines) if lines else "")


def _guard(found: Verification) -> str:
    guard = found.guard
    limits = ["contiguous tensors only"] if guard.contiguous_only else []
    limits += [f"aligned to {guard.align_bytes} bytes"] if guard.align_bytes > 1 else []
    limits += ["the drawn shapes only"] if guard.drawn_shapes_only else []
    reasons = "".join(f"\n- {escape(reason)}" for reason in guard.reasons)
    if not limits:
        return f"\n\nBeside what was asked:{reasons}" if reasons else ""
    return f"\n\nUsed for {', '.join(limits)}; the reference runs otherwise.{reasons}"


def _kernels(final: Evaluation) -> str:
    if final.build is None or not final.build.kernels:
        return ""
    cells = [
        (escape(item.kernel), *(_count(n) for n in (item.registers, item.static_shared_bytes, item.spill_bytes)))
        for item in final.build.kernels
    ]
    table = _table(("kernel", "registers", "shared bytes", "spilled bytes"), cells)
    if not any(any(line[1:]) for line in cells):  # a language that has no such figures
        table = "Kernels: " + ", ".join(line[0] for line in cells) + "."
    share = final.timing.own_share if final.timing is not None else None
    work = f"Work: `{final.work}`" + ("" if share is None else f", own kernels take {share:.0%} of the time") + "."
    return f"## Kernels\n\n{work}\n\n{table}"


def _isolation(final: Evaluation) -> str:
    reasons = "".join(f"\n- {escape(reason)}" for reason in final.isolation.reasons)
    where = ", ".join(f"{escape(name)} {escape(value)}" for name, value in final.environment if value)
    measured = f"\n\nMeasured on {escape(final.device)}" + (f" with {where}." if where else ".")
    return f"## Isolation\n\nGrade **{final.isolation.grade}**.{reasons}{measured}"


# -- the rounds ------------------------------------------------------------------------------------------------------


def _rounds(entries: Sequence[Round]) -> str:
    if not entries:
        return ""
    lines = [round_row(entry) for entry in entries]
    replayed = any(line.recorded_status for line in lines)
    header = ("round", "kind", "from", "status", *(("recorded",) if replayed else ()), "vs eager", "vs compile", "note")
    return f"## Rounds\n\n{_table(header, [_round_cells(line, replayed) for line in lines])}"


def _round_cells(line: RoundRow, replayed: bool) -> tuple[str, ...]:
    return (
        str(line.number),
        line.kind,
        "" if line.parent is None else str(line.parent),
        line.status,
        *((escape(line.recorded_status),) if replayed else ()),
        _speedup(line.speedup_eager),
        _speedup(line.speedup_compile),
        escape(line.note[:200]),
    )


def _trail(entries: Sequence[Round]) -> str:
    told = [(entry.number, entry.feedback) for entry in entries if entry.feedback is not None]
    if not told:
        return ""
    parts = []
    for number, feedback in told:
        names = ("Issue", "Why", "Fix") if feedback.kind == "correction" else ("Bottleneck", "Method", "Plan")
        said = zip(names, (feedback.issue, feedback.why, feedback.action), strict=True)
        lines = [f"- {name}: {escape(text)}" for name, text in said if text]
        parts.append(f"**Before round {number}** ({feedback.kind})\n\n" + "\n".join(lines))
    return "## What the Judge said\n\n" + "\n\n".join(parts)


def _logs(entries: Sequence[Round]) -> str:
    failed = [entry for entry in entries if _build_log(entry)]
    if not failed:
        return ""
    return "## Build logs\n\n" + "\n\n".join(f"Round {entry.number}\n\n{fence(_build_log(entry))}" for entry in failed)


def _build_log(entry: Round) -> str:
    verdict = entry.evaluation
    if verdict is None or verdict.build is None or verdict.status.value != "BUILD_ERROR":
        return ""
    return verdict.build.log[:2000]


def _cost(trace: Trace) -> str:
    return f"## Cost\n\n{_spent(trace.usage)}, {trace.seconds:.1f} s."


# -- the summary -----------------------------------------------------------------------------------------------------


def _summary_cells(line: Row) -> tuple[str, ...]:
    return (
        escape(line.target),
        line.language,
        line.outcome.replace("_", " "),
        _speedup(line.speedup_eager),
        _speedup(line.speedup_compile),
        str(line.rounds),
        _usd(line.usage),
        escape(line.files[0]) if line.files else "",
    )


def _totals(total: Totals) -> str:
    parts = [f"{total.forged} forged of {total.tried} tried ({total.targets} targets)"]
    parts += [f"correct {total.correct:.0%}"] if total.correct is not None else []
    for name, fast, median, geomean in (
        ("eager", total.fast_1_eager, total.median_eager, total.geomean_eager),
        ("compile", total.fast_1_compile, total.median_compile, total.geomean_compile),
    ):
        if fast is not None and median is not None and geomean is not None:
            parts.append(f"vs {name}: fast₁ {fast:.0%}, median {median:.2f}×, geometric mean {geomean:.2f}×")
    return "; ".join([*parts, _spent(total.usage), f"{total.seconds:.1f} s"]) + "."


# -- words -----------------------------------------------------------------------------------------------------------


def _table(header: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join(lines)


def _speedup(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _ratio(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.speedup:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})"


def _time(sample: Sample | None) -> str:
    return _nanoseconds(sample.median_ns if sample is not None else None)


def _nanoseconds(time_ns: float | None) -> str:
    if time_ns is None:
        return ""
    return f"{time_ns / 1e3:.2f} µs" if time_ns < 1e6 else f"{time_ns / 1e6:.3f} ms"


def _count(value: int | None) -> str:
    return "" if value is None else str(value)


def _usd(usage: Usage) -> str:
    if usage.usd is None:
        return "price unknown" if usage.input_tokens or usage.output_tokens else ""
    return f"${usage.usd:.4f}"


def _spent(usage: Usage) -> str:
    tokens = f"{usage.input_tokens} tokens in, {usage.output_tokens} out"
    price = _usd(usage)
    return f"{tokens}, {price}" if price else tokens
