"""The Judge's trail as rows: what it was shown, what it said, what that brought. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_cudaforge.attempts import gain_of
from pytest_cudaforge.figures import show
from pytest_cudaforge.hardware.diagnosis import diagnose
from pytest_cudaforge.records import Feedback, Profile, Round
from pytest_cudaforge.report import amounts
from pytest_cudaforge.report.rows import round_row

__all__ = ["Advice", "advice", "bounds"]


@dataclass(frozen=True)
class Advice:
    """What the Judge said before a round, and what came of it.

    ``evidence``: what the profile of the round it was about shows, a line for each kernel, with its figures. ``said``
    are (heading, text); ``cites`` the figures it acted on; ``doubts`` what of it the evidence does not bear out.
    ``brought``: the outcome in words. ``gain``: how many times as fast the round is as the one it was about, by one
    sitting where one held both; ``expected``: the Judge's own guess of that.
    """

    number: int
    kind: str
    about: int | None
    evidence: tuple[str, ...]
    said: tuple[tuple[str, str], ...]
    cites: tuple[str, ...]
    doubts: tuple[str, ...]
    brought: str
    gain: float | None
    expected: float | None


def advice(entries: Sequence[Round]) -> tuple[Advice, ...]:
    """In the order of the rounds."""
    known = {entry.number: entry for entry in entries}
    return tuple(_advice(entry, entry.feedback, known) for entry in entries if entry.feedback is not None)


def _advice(entry: Round, feedback: Feedback, known: Mapping[int, Round]) -> Advice:
    about = known.get(entry.parent) if entry.parent is not None else None
    seen = about.evaluation.profile if about is not None and about.evaluation is not None else None
    gain = gain_of(entry, about) if about is not None else None
    return Advice(
        number=entry.number,
        kind=feedback.kind,
        about=entry.parent,
        evidence=bounds(seen) if seen is not None and feedback.kind == "optimization" else (),
        said=_said(feedback),
        cites=feedback.cites,
        doubts=feedback.doubts,
        brought=_brought(entry, about, gain, feedback.expected),
        gain=gain,
        expected=feedback.expected,
    )


def bounds(profile: Profile) -> tuple[str, ...]:
    """``ncu, norm_gelu: memory bandwidth (dram__throughput… 72.6 %, …)`` for each kernel whose bound is known."""
    return tuple(
        f"{profile.rung}, {one.kernel}: {one.bound} ("
        + ", ".join(f"{name} {show(value, unit)}" for name, value, unit in one.figures)
        + ")"
        for one in diagnose(profile)
        if one.bound != "unknown"
    )


def _said(feedback: Feedback) -> tuple[tuple[str, str], ...]:
    names = ("Issue", "Why", "Fix") if feedback.kind == "correction" else ("Bottleneck", "Method", "Plan")
    said = (*zip(names, (feedback.issue, feedback.why, feedback.action), strict=True), ("Place", feedback.place))
    return tuple((name, text) for name, text in said if text)


def _brought(entry: Round, about: Round | None, gain: float | None, expected: float | None) -> str:
    line, before = round_row(entry), round_row(about) if about is not None else None
    text = line.status if line.speedup_eager is None else f"{amounts.times(line.speedup_eager)} vs eager"
    if before is not None and before.speedup_eager is not None:
        text += f", round {before.number} had {amounts.times(before.speedup_eager)}"
    text += f": {gain:.2f} times as fast" if gain is not None else ""
    return text + (f" (expected: {expected:.2f})" if expected is not None else "")
