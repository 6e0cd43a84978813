"""A target's report as markdown, and the summary of a session. Everything a model or a compiler wrote is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pytest_cudaforge.records import Evaluation, HotLine, Profile, Round, Timing, Trace, Verification
from pytest_cudaforge.report import amounts
from pytest_cudaforge.report.escaping import plain
from pytest_cudaforge.report.profile_rows import (
    RUNGS,
    SHOWN_METRICS,
    Profiles,
    beyond_roofline,
    bounds,
    further_rules,
    kernel_rows,
    metric_rows,
    place_of,
    profiles,
)
from pytest_cudaforge.report.rows import (
    RoundRow,
    Row,
    Totals,
    guard_limits,
    outcome_text,
    round_row,
    rows,
)
from pytest_cudaforge.report.standings import standings
from pytest_cudaforge.report.trail import Advice, advice

__all__ = ["escape", "fence", "report", "summary", "table", "unlinked"]

#: What starts markup anywhere in a line, and what does so only at its beginning (headings, lists, quotes, rules).
_SPECIAL = re.compile(r"([\\`*{}\[\]|~$]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))")
_LEADING = re.compile(r"^(\d*)([#+\-=.)>])")
_LINKED = re.compile(r"(@|[#!](?=\d)|\bGH(?=-\d)|:(?=/)|www(?=\.))", re.IGNORECASE)
_INVISIBLE = "\u200b"


def escape(text: str) -> str:
    """``text`` as one line that renders as itself: no markup, link, HTML, table cell or @mention comes out of it."""
    line = plain(" ".join(text.split()))
    line = _SPECIAL.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))
    line = _LEADING.sub(r"\1\\\2", line)
    return unlinked(line)


def unlinked(text: str) -> str:
    """``text`` in which a host links and notifies nobody. Mentions, numbers of issues (``#1``, ``GH-1``) and merge
    requests (``!1``) and bare URLs are found after rendering, so a backslash does not stop them."""
    return _LINKED.sub(r"\1" + _INVISIBLE, text)


def fence(text: str, language: str = "") -> str:
    """``text`` as a code block, fenced with more backticks than it holds anywhere."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{plain(text.rstrip())}\n{marks}"


def report(trace: Trace, *, picture: str = "") -> str:
    """The readable report of one target: outcome, speedups, profile, accuracy, isolation, rounds, the Judge's trail.

    ``picture``: a file beside the report that shows the most of it at a glance.
    """
    parts = [f"# {escape(trace.target)} ({escape(trace.language)})", _headline(trace)]
    parts += [f"![Speedup by round, roofline, time by kernel]({picture})"] if picture else []
    if trace.final is not None:
        parts += [_speedups(trace.final)]
    parts += [_standing(trace), _profile(profiles(trace))]
    if trace.final is not None:
        parts += [_accuracy(trace.final), _kernels(trace.final), _isolation(trace.final)]
    parts += [_rounds(trace.rounds), _trail(advice(trace.rounds)), _logs(trace.rounds), _cost(trace)]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(traces: Sequence[Trace], total: Totals) -> str:
    """All targets in one table, with the totals below."""
    header = ("target", "language", "outcome", "vs eager", "vs compile", "rounds", "cost", "files")
    return table(header, [_summary_cells(line) for line in rows(traces)]) + "\n\n" + _totals(total) + "\n"


def _headline(trace: Trace) -> str:
    lines = [f"**{outcome_text(trace)}.** {escape(trace.reason)}"]
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
            amounts.median(entry.candidate),
            amounts.median(entry.eager),
            amounts.median(entry.compile),
            amounts.interval(entry.vs_eager),
            amounts.interval(entry.vs_compile),
            "" if not entry.roofline_ns else f"{entry.roofline_ns / entry.candidate.median_ns:.0%}",
            str(entry.launches),
        )
        for entry in timing.workloads
    ]
    header = ("workload", "kernel", "eager", "compile", "vs eager", "vs compile", "of roofline", "launches")
    text = f"Decision: **{timing.decision}**, by the clock `{timing.clock}`, re-measured after the rounds. "
    text += "Speedup: median over paired blocks of baseline ÷ kernel, with its interval; times are medians."
    note = f"\n\n{escape(timing.note)}" if timing.note else ""
    note += f"\n\n{why}" if (why := beyond_roofline(final)) else ""
    return f"## Speed\n\n{text}\n\n{table(header, cells)}{_launch_bound(timing)}{note}"


def _launch_bound(timing: Timing) -> str:
    """Device and host times of workloads whose calls may take less than their launches."""
    cells = [
        (
            escape(entry.workload),
            amounts.median(entry.candidate),
            amounts.nanoseconds(entry.host.candidate_ns),
            amounts.median(entry.eager),
            amounts.nanoseconds(entry.host.eager_ns),
            amounts.nanoseconds(entry.host.compile_ns),
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
    return f"\n\n{text}torch, the references in torch).\n\n{table(header, cells)}"


def _standing(trace: Trace) -> str:
    cells = [
        (
            escape(entry.workload),
            entry.party,
            amounts.nanoseconds(entry.time_ns),
            amounts.nanoseconds(entry.roofline_ns),
            amounts.percent(entry.sol_percent),
        )
        for entry in standings(trace)
    ]
    if not cells:
        return ""
    text = "The roofline: the least bytes ÷ measured bandwidth, or the FLOPs ÷ measured peak, whichever takes longer."
    return f"## Speed of light\n\n{text}\n\n{table(('workload', 'who', 'time', 'roofline', 'reached'), cells)}"


# -- the profile -----------------------------------------------------------------------------------------------------


def _profile(found: Profiles | None) -> str:
    if found is None:
        return ""
    profile = found.after
    text = f"{found.after_name.capitalize()}, workload {escape(profile.workload)}: {RUNGS[profile.rung]}."
    text += "".join(f"\n- {escape(note)}" for note in profile.notes)
    parts = [text, _bounds(profile), _time_by_kernel(profile), _metrics(found), _rules(profile), _hot(profile.lines)]
    return "## Profile\n\n" + "\n\n".join(part for part in parts if part)


def _bounds(profile: Profile) -> str:
    lines = []
    for found, gain in bounds(profile):
        told = [f"{name} = {amounts.quantity(value, unit)}" for name, value, unit in found.figures]
        told += [f"estimated gain {gain:.0f} %"] if gain else []
        shown = f" ({escape(', '.join(told))})" if told else ""
        whose = "" if found.own else " (library)"
        lines.append(f"- {escape(found.kernel)}{whose}: **{found.bound}**, {found.explanation}{shown}")
    return "\n".join(lines)


def _time_by_kernel(profile: Profile) -> str:
    cells = [
        (
            escape(line.function[:80]),
            "own" if line.own else "library",
            str(line.launches),
            amounts.nanoseconds(line.duration_ns),
            "" if line.share is None else f"{line.share:.0%}",
            line.shape,
        )
        for line in kernel_rows(profile)
    ]
    return table(("kernel", "whose", "launches", "time", "share", "launch"), cells) if cells else ""


def _metrics(found: Profiles) -> str:
    lines = metric_rows(found)
    if not lines:
        return ""
    cells = [
        (escape(line.name), *(escape(amounts.quantity(value, line.unit)) for value in (line.before, line.after)))
        for line in lines[:SHOWN_METRICS]
    ]
    rest = len(lines) - len(cells)
    more = f"\n\n{rest} more metrics are in `evaluation.json`." if rest else ""
    if found.before is None:
        return table(("metric", found.after_name), [(line[0], line[2]) for line in cells]) + more
    return table(("metric", found.before_name, found.after_name), cells) + more


def _rules(profile: Profile) -> str:
    lines = []
    for found in further_rules(profile):
        gain = "" if found.speedup_percent is None else f" (estimated gain {found.speedup_percent:.0f} %)"
        lines.append(f"- {escape(f'{found.kernel}, {found.rule}{gain}: {found.text}')}")
    return "What the profiler's rules say:\n\n" + "\n".join(lines) if lines else ""


def _hot(lines: Sequence[HotLine]) -> str:
    cells = [
        (
            escape(place_of(line, lines)),
            "" if line.share is None else f"{line.share:.0%}",
            escape(", ".join(f"{name} {amounts.quantity(value, unit)}" for name, value, unit in line.figures)),
            escape(line.source.strip()[:120]),
        )
        for line in lines
    ]
    return table(("line", "of samples", "figures", "source"), cells) if cells else ""


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
    cases = table(("workload", "case", "kind", "verdict", "error ratio", "allowed"), cells)
    return f"## Accuracy\n\n{text}\n\n{cases}{_guard(found)}{_sanitizer(found)}"


def _sanitizer(found: Verification) -> str:
    """What compute-sanitizer said of the winner, where it was asked."""
    report = found.sanitizer
    if report is None:
        return ""
    ran = f"compute-sanitizer on workload {escape(report.workload)}: {escape(', '.join(report.tools)) or 'nothing ran'}"
    ran += " found nothing." if report.tools and not report.findings else "."
    lines = [
        f"- {escape(f'{one.tool}: {one.kind}, kernel {one.kernel} at {one.place}, {one.count} times; {one.detail}')}"
        for one in report.findings
    ]
    lines += [f"- {escape(note)}" for note in report.notes]
    return f"\n\n{ran}" + ("\n\n" + "\n".join(lines) if lines else "")


def _guard(found: Verification) -> str:
    guard, limits = found.guard, guard_limits(found.guard)
    reasons = "".join(f"\n- {escape(reason)}" for reason in guard.reasons)
    if not limits:
        return f"\n\nBeside what was asked:{reasons}" if reasons else ""
    return f"\n\nUsed for {', '.join(limits)}; the reference runs otherwise.{reasons}"


def _kernels(final: Evaluation) -> str:
    if final.build is None or not final.build.kernels:
        return ""
    cells = [
        (escape(item.kernel), *(amounts.count(n) for n in (item.registers, item.static_shared_bytes, item.spill_bytes)))
        for item in final.build.kernels
    ]
    resources = table(("kernel", "registers", "shared bytes", "spilled bytes"), cells)
    if not any(any(line[1:]) for line in cells):  # a language that has no such figures
        resources = "Kernels: " + ", ".join(line[0] for line in cells) + "."
    share = final.timing.own_share if final.timing is not None else None
    work = f"Work: `{final.work}`" + ("" if share is None else f", own kernels take {share:.0%} of the time") + "."
    return f"## Kernels\n\n{work}\n\n{resources}"


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
    return f"## Rounds\n\n{table(header, [_round_cells(line, replayed) for line in lines])}"


def _round_cells(line: RoundRow, replayed: bool) -> tuple[str, ...]:
    return (
        str(line.number),
        line.kind,
        "" if line.parent is None else str(line.parent),
        line.status,
        *((escape(line.recorded_status),) if replayed else ()),
        amounts.times(line.speedup_eager),
        amounts.times(line.speedup_compile),
        escape(line.note[:200]),
    )


def _trail(told: Sequence[Advice]) -> str:
    if not told:
        return ""
    parts = []
    for one in told:
        lines = [f"- Evidence: {escape(line)}" for line in one.evidence]
        lines += [f"- {name}: {escape(text)}" for name, text in one.said]
        lines += [f"- Cites: {escape('; '.join(one.cites))}"] if one.cites else []
        lines += [f"- Not in the evidence: {escape(doubt)}" for doubt in one.doubts]
        lines += [f"- Brought: {one.brought}"]
        parts.append(f"**Before round {one.number}** ({one.kind})\n\n" + "\n".join(lines))
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
    return f"## Cost\n\n{amounts.spent(trace.usage)}, {trace.seconds:.1f} s."


# -- the summary -----------------------------------------------------------------------------------------------------


def _summary_cells(line: Row) -> tuple[str, ...]:
    return (
        escape(line.target),
        escape(line.language),
        line.outcome.replace("_", " "),
        amounts.times(line.speedup_eager),
        amounts.times(line.speedup_compile),
        str(line.rounds),
        amounts.money(line.usage),
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
    return "; ".join([*parts, amounts.spent(total.usage), f"{total.seconds:.1f} s"]) + "."


# -- words -----------------------------------------------------------------------------------------------------------


def table(header: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """A table; its cells are escaped already."""
    names = list(header)
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += ["| " + " | ".join(line) + " |" for line in cells]
    return "\n".join(lines)
