"""The pictures of one target, from its trace: for the page, and as one file for a pull request."""

from __future__ import annotations

from pytest_cudaforge.records import Profile, Trace
from pytest_cudaforge.report import amounts, svg
from pytest_cudaforge.report.profile_rows import kernel_rows, profiles
from pytest_cudaforge.report.rows import round_row
from pytest_cudaforge.report.standings import standings

__all__ = ["rounds", "summary", "time_by_kernel"]

_MOST_KERNELS = 24


def summary(trace: Trace) -> svg.Picture | None:
    """Rounds, roofline and time by kernel in one picture; None where there is nothing to see."""
    found = profiles(trace)
    return svg.stacked(
        f"What was forged for {trace.target}",
        (
            ("Speedup by round", rounds(trace)),
            ("Percent of the speed of light", svg.standing_bars(standings(trace))),
            ("Time by kernel", time_by_kernel(found.after) if found is not None else None),
        ),
    )


def rounds(trace: Trace) -> svg.Picture | None:
    return svg.rounds([round_row(entry) for entry in trace.rounds], trace.winner)


def time_by_kernel(profile: Profile) -> svg.Picture | None:
    lines = [line for line in kernel_rows(profile) if line.duration_ns is not None]
    shown = [
        svg.Bar(
            line.function,
            line.duration_ns or 0.0,
            ", ".join(
                part
                for part in (
                    amounts.percent(line.share and 100 * line.share),
                    amounts.nanoseconds(line.duration_ns),
                    "" if line.launches == 1 else f"{line.launches} launches",
                    "" if line.own else "library",
                )
                if part
            ),
            "one" if line.own else "library",
        )
        for line in lines[:_MOST_KERNELS]
    ]
    return svg.bars("Time by kernel", shown)
