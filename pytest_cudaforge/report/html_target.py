"""One target's part of the page: its rounds, its speed, what the Judge said, what changed, how right it is."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pytest_cudaforge.figures import show
from pytest_cudaforge.records import CaseResult, Evaluation, Round, Timing, Trace, Verification
from pytest_cudaforge.report import amounts, pictures, svg
from pytest_cudaforge.report.escaping import one_line
from pytest_cudaforge.report.html_profile import profile_part
from pytest_cudaforge.report.html_words import badge, bullets, cut, definitions, figure, folded, meter, table, tiles
from pytest_cudaforge.report.markup import Markup, joined, tag
from pytest_cudaforge.report.profile_rows import beyond_roofline, profiles
from pytest_cudaforge.report.rows import Row, guard_limits, outcome_text, round_row
from pytest_cudaforge.report.standings import standings
from pytest_cudaforge.report.trail import Advice, advice

__all__ = ["target_section"]

_MAX_LINES = 400
_CASES_SHOWN = 12


def target_section(anchor: str, trace: Trace, line: Row) -> Markup:
    """Everything about one target. ``anchor`` is ours, never a name that somebody gave."""
    return tag(
        "section",
        tag("h2", trace.target, " ", tag("span", trace.language, class_="faint")),
        tag("p", tag("b", f"{outcome_text(trace)}."), " ", trace.reason),
        bullets(trace.notes),
        _figures(line),
        _rounds(trace),
        _speed(trace),
        profile_part(profiles(trace)),
        _trail(advice(trace.rounds)),
        _sources(trace.rounds),
        _accuracy(trace.final or _last(trace.rounds)),
        _circumstances(trace),
        id=anchor,
    )


def _last(entries: Sequence[Round]) -> Evaluation | None:
    """The verdict to show where nothing was re-evaluated: the last that passed, else the last that verified."""
    verdicts = [entry.evaluation for entry in entries if entry.evaluation is not None]
    passed = [verdict for verdict in verdicts if verdict.passed]
    tried = [verdict for verdict in verdicts if verdict.verification is not None]
    known = passed or tried or verdicts
    return known[-1] if known else None


def _figures(line: Row) -> Markup:
    shown = [
        (amounts.times(line.speedup_eager), "vs eager"),
        (amounts.times(line.speedup_compile), "vs torch.compile"),
        (amounts.percent(line.sol_percent), "of the speed of light"),
        (amounts.percent(line.sol_percent_eager), "eager's"),
        (amounts.percent(line.sol_percent_compile), "torch.compile's"),
        (str(line.rounds) if line.rounds else "", "rounds"),
        (amounts.money(line.usage), "cost"),
        (line.isolation, "isolation grade"),
        (line.work, "work"),
    ]
    return tiles(shown)


# -- rounds ----------------------------------------------------------------------------------------------------------


def _rounds(trace: Trace) -> Markup | None:
    if not trace.rounds:
        return None
    lines = [round_row(entry) for entry in trace.rounds]
    replayed = any(line.recorded_status for line in lines)
    header = [">round", "kind", ">from", "status", *(["recorded"] if replayed else [])]
    header += [">vs eager", ">vs compile", ">speed of light", "~remark"]
    cells = [
        (
            f"{line.number}★" if line.number == trace.winner else line.number,
            line.kind,
            line.parent,
            badge(line.status, "good" if line.status == "PASSED" else "bad"),
            *([line.recorded_status] if replayed else []),
            amounts.times(line.speedup_eager),
            amounts.times(line.speedup_compile),
            amounts.percent(line.sol_percent),
            one_line(line.note, 300),
        )
        for line in lines
    ]
    best = next((index for index, line in enumerate(lines) if line.number == trace.winner), None)
    return joined(
        tag("h3", "Rounds"),
        figure(pictures.rounds(trace), "Speedup by round, as measured in that round; a star marks the winner."),
        table(header, cells, best=best),
        _logs(trace.rounds),
    )


def _logs(entries: Sequence[Round]) -> list[Markup]:
    failed = [
        (entry.number, entry.evaluation.build.log)
        for entry in entries
        if entry.evaluation is not None and entry.evaluation.build is not None and not entry.evaluation.passed
    ]
    return [folded(f"Build log of round {number}", tag("pre", cut(log))) for number, log in failed if log]


# -- speed -----------------------------------------------------------------------------------------------------------


def _speed(trace: Trace) -> Markup | None:
    near, device = standings(trace), trace.hardware
    timing = trace.final.timing if trace.final is not None else None
    shown = [figure(svg.standing_bars(near), "The roofline's time ÷ the measured time.")]
    if device is not None:
        roofline = svg.rooflines(near, device.bandwidth_bytes_per_s, device.peak_flops)
        shown.append(figure(roofline, "Under the device's measured ceilings."))
    if timing is None and not any(shown):
        return None
    over = any(entry.sol_percent > 105 for entry in near)
    note = (
        "Over 100 %: data came from a cache that the bound does not count on, operations were saved, or a ceiling was "
    )
    return joined(
        tag("h3", "Speed"),
        _times(timing) if timing is not None else None,
        tag("p", why) if trace.final is not None and (why := beyond_roofline(trace.final)) else None,
        tag("div", shown, class_="pictures"),
        tag("p", note + "measured too low.", class_="faint") if over else None,
    )


def _times(timing: Timing) -> Markup:
    header = ["~workload", ">candidate", ">eager", ">torch.compile", ">vs eager", ">vs torch.compile", ">launches"]
    cells = [
        (
            entry.workload,
            amounts.median(entry.candidate),
            amounts.median(entry.eager),
            amounts.median(entry.compile),
            amounts.interval(entry.vs_eager),
            amounts.interval(entry.vs_compile),
            entry.launches,
        )
        for entry in timing.workloads
    ]
    clock = {"events": "device events", "supervisor": "the supervisor's clock"}[timing.clock]
    said = tag(
        "p", "Decision: ", tag("b", timing.decision), f", by {clock}, re-measured after the rounds. {timing.note}"
    )
    return joined(said, table(header, cells))


# -- the Judge -------------------------------------------------------------------------------------------------------


def _trail(told: Sequence[Advice]) -> Markup | None:
    return joined(tag("h3", "What the Judge said"), [_advice(one) for one in told]) if told else None


def _advice(one: Advice) -> Markup:
    about = f" about round {one.about}" if one.about is not None else ""
    told = [("Evidence", line) for line in one.evidence]
    told += [*one.said, ("Cites", "; ".join(one.cites)), ("Brought", one.brought)]
    return tag(
        "div",
        tag("p", tag("b", f"Before round {one.number}"), f" ({one.kind}{about})"),
        [tag("p", tag("span", f"{name}: ", class_="faint"), text) for name, text in told if text],
        [tag("p", tag("span", "Not in the evidence: ", class_="bad"), doubt) for doubt in one.doubts],
        class_="said",
    )


# -- sources ---------------------------------------------------------------------------------------------------------


def _sources(entries: Sequence[Round]) -> Markup | None:
    known = {entry.number: dict(entry.candidate.files) for entry in entries if entry.candidate is not None}
    parts = [
        _source(entry, known[entry.number], known.get(entry.parent) if entry.parent is not None else None)
        for entry in entries
        if entry.number in known and entry.duplicate_of is None
    ]
    return joined(tag("h3", "What changed between rounds"), parts) if parts else None


def _source(entry: Round, files: Mapping[str, str], parent: Mapping[str, str] | None) -> Markup:
    if parent is None:
        inside = [joined(tag("p", tag("code", name)), tag("pre", cut(text))) for name, text in sorted(files.items())]
        return folded(f"Round {entry.number}, the whole candidate", inside)
    lines = [line for name in sorted({*files, *parent}) for line in _difference(name, parent, files)]
    added, gone = (sum(line[:1] == sign and line[:3] != sign * 3 for line in lines) for sign in "+-")
    counted = f"{added} line{'' if added == 1 else 's'} added, {gone} removed"
    summary = f"Round {entry.number} against round {entry.parent}: {counted}"
    kept = lines[:_MAX_LINES]
    rest = [tag("p", f"… {len(lines) - len(kept)} more lines", class_="faint")] if len(kept) < len(lines) else []
    return folded(summary, tag("pre", [_coloured(line) for line in kept]), rest)


def _difference(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    old, new = before.get(name, "").splitlines(), after.get(name, "").splitlines()
    return list(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="", n=2))


def _coloured(line: str) -> Markup:
    shade = {"+": "add", "-": "del", "@": "faint"}.get(line[:1])
    text = line[:400] + "\n"
    return tag("span", text, class_=shade) if shade else joined(text)


# -- accuracy --------------------------------------------------------------------------------------------------------


def _accuracy(final: Evaluation | None) -> Markup | None:
    found = final.verification if final is not None else None
    if final is None or found is None or not found.cases:
        return None
    passed = sum(case.passed for case in found.cases)
    worst = "every output is exact" if found.worst_ratio is None else f"worst error ratio {found.worst_ratio:.3g}"
    said = f"{passed} of {len(found.cases)} cases passed; {worst}. Oracle: {found.oracle}. The error ratio is the "
    said += "candidate's error against the oracle ÷ the reference's own rounding error."
    cells = [_case(case) for case in sorted(found.cases, key=_worst_first)]
    header = ["~workload", "~case", "kind", "verdict", ">error ratio", ">allowed", "used up", "~what is wrong"]
    return joined(
        tag("h3", "Accuracy against the oracle"),
        tag("p", said),
        table(header, cells[:_CASES_SHOWN]),
        folded(f"{len(cells) - _CASES_SHOWN} more cases", table(header, cells[_CASES_SHOWN:]))
        if len(cells) > _CASES_SHOWN
        else None,
        _guard(found),
    )


def _worst_first(case: CaseResult) -> tuple[bool, float]:
    return case.passed, -_used(case)


def _used(case: CaseResult) -> float:
    return case.error_ratio / case.bound if case.error_ratio is not None and case.bound else 0.0


def _case(case: CaseResult) -> tuple[Markup | str, ...]:
    wrong = "; ".join(f"{one.output}: {one.detail}" for one in case.mismatches)
    return (
        case.workload,
        case.case,
        "contract" if case.contract else "probe",
        badge("passed", "good") if case.passed else badge("failed", "bad" if case.contract else "calm"),
        "" if case.error_ratio is None else f"{case.error_ratio:.3g}",
        "" if case.bound is None else f"{case.bound:.3g}",
        meter(_used(case)) if case.error_ratio is not None else "",
        one_line(wrong or case.note, 300),
    )


def _guard(found: Verification) -> Markup | None:
    limits = guard_limits(found.guard)
    said = f"Used for {', '.join(limits)}; the reference runs otherwise." if limits else ""
    told = [said] if said else []
    if found.sanitizer is not None:
        report = found.sanitizer
        ran = ", ".join(report.tools) or "nothing ran"
        told.append(f"compute-sanitizer on workload {report.workload}: {ran}, {len(report.findings)} findings")
        told += [f"{one.tool}: {one.kind}, {one.kernel} at {one.place}: {one.detail}" for one in report.findings]
    return bullets([*told, *found.guard.reasons])


# -- where it was measured -------------------------------------------------------------------------------------------


def _circumstances(trace: Trace) -> Markup | None:
    final, device = trace.final or _last(trace.rounds), trace.hardware
    told: list[tuple[str, str]] = []
    if device is not None:
        told.append(("device", f"{device.name} ({device.arch})"))
        told += [("processors", str(device.sm_count))] if device.sm_count else []
        if device.bandwidth_bytes_per_s:
            told.append(("bandwidth, measured", show(device.bandwidth_bytes_per_s, "byte/s")))
        told += [
            (f"cache of {show(size, 'byte')}, measured", show(speed, "byte/s"))
            for size, speed in device.cache_bandwidths
        ]
        told += [(f"peak {name}, measured", show(peak, "FLOP/s")) for name, peak in device.peak_flops]
    if final is not None:
        told += [] if device is not None else [("device", final.device)]
        told += [(name, value) for name, value in final.environment if value]
        grade = f"grade {final.isolation.grade}"
        told.append(("isolation", "; ".join([grade, *final.isolation.reasons])))
    told += [("files", ", ".join(trace.files))] if trace.files else []
    told += [("spent", f"{amounts.spent(trace.usage)}, {trace.seconds:.0f} s")] if trace.seconds else []
    shown = definitions(told)
    return joined(tag("h3", "Environment"), shown) if shown else None
