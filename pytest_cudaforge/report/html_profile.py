"""What a profile saw, as part of the page: the bound, time by kernel, metrics before and after, hot lines."""

from __future__ import annotations

from pytest_cudaforge.hardware.diagnosis import Diagnosis
from pytest_cudaforge.records import Profile
from pytest_cudaforge.report import amounts
from pytest_cudaforge.report.html_words import bullets, cut, figure, folded, table
from pytest_cudaforge.report.markup import Markup, joined, tag
from pytest_cudaforge.report.pictures import time_by_kernel
from pytest_cudaforge.report.profile_rows import (
    RUNGS,
    SHOWN_METRICS,
    Profiles,
    bounds,
    further_rules,
    metric_rows,
    place_of,
)

__all__ = ["profile_part"]


def profile_part(found: Profiles | None) -> Markup | None:
    if found is None:
        return None
    profile = found.after
    said = f"{found.after_name.capitalize()}, workload {profile.workload}: {RUNGS[profile.rung]}."
    return joined(
        tag("h3", "Where the time goes"),
        tag("p", said),
        bullets(profile.notes),
        _bounds(profile),
        figure(
            time_by_kernel(profile), "Time by kernel, under the profiler: a share of the call, not the verdict's time."
        ),
        _metrics(found),
        _rules(profile),
        _hot_lines(profile),
        _remarks(profile),
    )


def _bounds(profile: Profile) -> Markup | None:
    return bullets(_bound(found, gain) for found, gain in bounds(profile))


def _bound(found: Diagnosis, gain: float | None) -> Markup:
    told = [f"{name} = {amounts.quantity(value, unit)}" for name, value, unit in found.figures]
    told += [f"estimated gain {gain:.0f} %"] if gain else []
    shown = f" ({', '.join(told)})" if told else ""
    return joined(
        tag("code", found.kernel),
        ": " if found.own else " (library): ",
        tag("b", found.bound),
        f", {found.explanation}{shown}",
    )


def _metrics(found: Profiles) -> Markup | None:
    lines = metric_rows(found)
    if not lines:
        return None
    before = [f">{found.before_name}"] if found.before is not None else []
    cells = [
        (
            tag("code", line.name),
            *([amounts.quantity(line.before, line.unit)] if before else []),
            amounts.quantity(line.after, line.unit),
        )
        for line in lines
    ]
    header = ["~metric", *before, f">{found.after_name}"]
    rest = cells[SHOWN_METRICS:]
    return joined(
        tag("p", "Metrics before and after:" if before else "Metrics:"),
        table(header, cells[:SHOWN_METRICS]),
        folded(f"{len(rest)} more metrics", table(header, rest)) if rest else None,
    )


def _rules(profile: Profile) -> Markup | None:
    rules = further_rules(profile)
    if not rules:
        return None
    cells = [
        (
            rule.kernel,
            rule.rule,
            "" if rule.speedup_percent is None else f"{rule.speedup_percent:.0f} %",
            rule.text,
        )
        for rule in rules
    ]
    return folded("What the profiler's rules say", table(["~kernel", "rule", ">estimated gain", "~text"], cells))


def _hot_lines(profile: Profile) -> Markup | None:
    if not profile.lines:
        return None
    cells = [
        (
            place_of(line, profile.lines),
            amounts.percent(line.share and 100 * line.share),
            tag("code", line.source.strip()[:160]),
            ", ".join(f"{name} {amounts.quantity(value, unit)}" for name, value, unit in line.figures),
        )
        for line in profile.lines
    ]
    return joined(tag("p", "Hot lines:"), table(["line", ">of samples", "~source", "~figures"], cells))


def _remarks(profile: Profile) -> Markup | None:
    return folded("Remarks of the tools", tag("pre", cut("\n".join(profile.remarks)))) if profile.remarks else None
