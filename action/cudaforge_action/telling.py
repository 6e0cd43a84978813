"""What the guard found, as the page of a run, as a comment on a pull request, and in one line. Worst news first.

Everything in it that comes from a report is text of others: it is escaped where it is put in, cut where it is long, and
the whole is kept below what the hosts take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cudaforge_action.guard_result import GuardResult
from cudaforge_action.merge_request import inert
from cudaforge_action.records import GuardOutcome, Unchecked
from pytest_cudaforge.guarded import GuardRecord
from pytest_cudaforge.report.escaping import one_line, plain
from pytest_cudaforge.report.guarded import changes_of, fitting, markdown
from pytest_cudaforge.report.markdown import escape, fence

__all__ = ["COMMENT_BYTES", "SUMMARY_BYTES", "comment", "headline", "is_news", "sign", "summary", "times"]

#: GitHub drops a step's summary above 1 MiB whole (https://docs.github.com/actions/reference/limits), and refuses a
#: comment above 65 536 characters. Bytes are counted, which are never fewer than characters.
SUMMARY_BYTES: Final = 1_000_000
COMMENT_BYTES: Final = 65_000
_SIGNS: Final[dict[GuardOutcome, str]] = {
    "error": "❌",
    "failed": "❌",
    "regression": "❌",
    "inconclusive": "❔",
    "pass": "✅",
}
_LONGEST_ERROR = 8_000


def headline(result: GuardResult) -> str:
    """``2 slower, 1 wrong, 4 undecided, of 31``: plain text of our own words and numbers."""
    counts = [
        (result.count("failed"), "wrong"),
        (result.count("regression"), "slower"),
        (result.count("unfit"), "slower on a runner that is unfit"),
        (result.count("inconclusive"), "undecided"),
        (result.count("skipped", "cancelled"), "not checked"),
    ]
    told = [f"{count} {what}" for count, what in counts if count]
    good = result.count("pass")
    if good and not told and result.outcome == "pass":
        return f"{good} as right and as fast as before"
    found = ", ".join([*told, *([f"{good} passed"] if good else [])])
    # What fails and is no kernel's fault: strict, or a test of the repo's own.
    wrong = {"error": "the guard could not finish", "failed": "" if result.count("failed") else "failed"}
    return "; ".join(filter(None, (wrong.get(result.outcome, ""), found))) or "nothing to guard"


def sign(result: GuardResult) -> str:
    """Green only where something was checked, or where there was nothing to check."""
    blind = result.outcome == "pass" and result.count("skipped", "cancelled") and not result.count("pass")
    return "⚠️" if blind else _SIGNS[result.outcome]


def summary(result: GuardResult, *, limit_bytes: int = SUMMARY_BYTES) -> str:
    """The step's summary: what was found, what was not checked, where time went."""
    top = [f"## {sign(result)} Forged kernels: {headline(result)}", "", *_problem(result), *_missed(result)]
    seconds = times(result)
    bottom = [f"<sub>{escape('Time: ' + seconds)}</sub>"] if seconds else []
    return _page(top, result, bottom, limit_bytes)


def comment(result: GuardResult, *, marker: str, title: str, sha: str, run_url: str) -> str:
    """The comment, below :data:`COMMENT_BYTES`. ``marker``: its first line, which a reader does not see. ``sha`` and
    ``run_url`` are the reporting job's own. Its last line is all that differs between two runs that found the same."""
    top = [marker, f"### {sign(result)} {escape(title)}: {headline(result)}", ""]
    top += [f"At {sha[:12]}.", ""] if sha else []
    linked = run_url.startswith("http") and run_url.isprintable() and not set(run_url) & set(" ()<>")
    link = f"[The run]({run_url}) has the whole report. " if linked else ""
    bottom = [f"<sub>{link}Guarded by pytest-cudaforge.</sub>"]
    return _page([*top, *_problem(result), *_missed(result)], result, bottom, COMMENT_BYTES)


def times(result: GuardResult) -> str:
    """``93.1 s: measuring 80.2 s, collecting 4.0 s, …``"""
    known = [(name, seconds) for name, seconds in result.run.seconds if 0.0 <= seconds < 1e7]
    total = sum(seconds for _, seconds in known)
    parts = (f"{one_line(plain(name), 40)} {seconds:.1f} s" for name, seconds in known[:12])
    return f"{total:.1f} s: {', '.join(parts)}" if known else ""


def _page(top: Sequence[str], result: GuardResult, bottom: Sequence[str], limit_bytes: int) -> str:
    # A line that begins with a slash is a command to GitLab, and to bots on GitHub, even inside a code block.
    above, below = inert("\n".join(top)), "\n".join(["", *bottom, ""])
    room = limit_bytes - len(above.encode()) - len(below.encode())
    body = ""
    if result.report is not None and not result.report.error:
        body = inert(markdown(result.report, limit_bytes=room))
        # What makes lines inert takes bytes of its own.
        body = body if len(body.encode()) <= room else inert(markdown(result.report, limit_bytes=room // 2))
    return f"{above}\n{body}{below}"


def _problem(result: GuardResult) -> list[str]:
    """Why there is no answer, and what else is to be known of the run."""
    lines = [f"Note: {escape(one_line(plain(result.run.note), 600))}", ""] if result.run.note else []
    error = result.run.error or (result.report.error if result.report is not None else "")
    if error:
        kept = plain(error) if len(error) <= _LONGEST_ERROR else "[cut]\n" + plain(error[-_LONGEST_ERROR:])
        lines += ["**The guard could not finish.**", "", fence(kept), ""]
    return lines


def _missed(result: GuardResult) -> list[str]:
    """What was not checked, as a list."""
    rows = list(map(_left_out, result.run.unchecked[:200]))
    if not rows:
        return []
    kept = fitting(rows, 8_000)
    more = len(result.run.unchecked) - len(kept)
    return ["**Not checked**", "", *kept, *([f"- … and for {more} more reasons"] if more else []), ""]


def _left_out(one: Unchecked) -> str:
    what = f"{one.count}: {one.what}" if one.count else one.what
    told = [part for part in (one.what and what, one.why) if part]
    text = escape(one_line(plain(" — ".join(told)), 900))
    return f"- {text}" + (f" (to do: {escape(one_line(plain(one.remedy), 400))})" if one.remedy else "")


# -- is there anything to say? -----------------------------------------------------------------------------------------


def is_news(result: GuardResult, when: str) -> bool:
    """Is there something to write a comment about, by the input ``comment``? ``failures``: what fails the job.
    ``changes``: that, and kernels or references that this change touches, whose figures are news when they are good,
    too. ``auto``: also what could not be decided, and settings that the change would have other than they are."""
    if result.outcome in ("error", "failed", "regression") or result.run.status:
        return True
    report = result.report
    if report is None or when == "failures":
        return False
    if report.removed or any(map(_is_touched, report.records)):
        return True
    return when == "auto" and bool(result.outcome == "inconclusive" or changes_of(report))


def _is_touched(record: GuardRecord) -> bool:
    """Is it other than at the merge base, as far as it was looked at here?"""
    raced_anew = bool(record.findings) and not record.since
    return record.cause == "new" or raced_anew or any(change.name == "source" for change in record.changes)
