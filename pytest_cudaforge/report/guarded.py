"""What the guard found, as text for a terminal, as Markdown for a pull request, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_cudaforge.display import columns
from pytest_cudaforge.guard import Finding, duration
from pytest_cudaforge.guarded import Change, GuardRecord, GuardReport, Verdict
from pytest_cudaforge.report.escaping import plain, xml
from pytest_cudaforge.report.markdown import escape, fence

__all__ = [
    "HEADER",
    "changes_of",
    "counted",
    "markdown",
    "properties_of",
    "record_text",
    "row_of",
    "shown",
    "summary_lines",
]

_ORDER: tuple[Verdict, ...] = ("failed", "regression", "unfit", "inconclusive", "cancelled", "skipped", "pass")
_SIGNS: dict[Verdict, str] = {"failed": "❌", "regression": "❌", "unfit": "⚠️", "inconclusive": "❔", "pass": "✅"}
_NAMES = {"base": "merge base", "eager": "eager", "compile": "torch.compile"}
HEADER = ("kernel", "outcome", "vs merge base", "vs eager", "vs compile", "a call", "remark")


def properties_of(record: GuardRecord, report: GuardReport) -> list[tuple[str, str]]:
    """JUnit properties of one item."""
    found = {
        "guard": record.outcome,
        "base": report.base_sha,
        "unchanged_since": record.since,
        "isolation": record.isolation,
        **{f"slowdown_{one.question}": f"{one.slowdown.speedup:.4g}" for one in _of(record, "base")},
        **{f"speedup_{one.question}": f"{one.slowdown.speedup:.4g}" for one in _of(record, "eager", "compile")},
        "lost_ns": next((f"{one.lost_ns:.4g}" for one in record.findings if one.outcome == "regression"), ""),
        "changed": "; ".join(change.text for change in record.changes),
        "machine": report.machine,
    }
    return [(name, plain(value)) for name, value in found.items() if value]


def record_text(record: GuardRecord, report: GuardReport) -> str:
    """One answer in full: what was found, what the change may not decide, how to see it again."""
    lines = [record.text or record.reason]
    if not record.findings and record.outcome != "pass":
        lines.append(f"  reproduce: {record.command}")
    lines += [f"changed: {change.text}" for change in record.changes]
    lines += [f"note: {note}" for note in record.notes]
    lines += [f"alarm: {alarm}" for alarm in report.alarms if record.outcome == "regression"]
    return plain("\n".join(lines))


def changes_of(report: GuardReport) -> tuple[Change, ...]:
    """All that is not as it was at the merge base, each once."""
    found = [*report.changes, *(change for record in report.records for change in record.changes)]
    return tuple(dict.fromkeys(found))


def summary_lines(report: GuardReport) -> list[str]:
    """The table, worst first, and what else a reader has to know."""
    if report.error:
        return plain(report.error).splitlines()
    told = [f"against {report.base}", f"machine: {report.machine}", f"runner: {report.runner}"]
    lines = [line for line in told if not line.endswith(": ")] if report.records else []
    rows = [row_of(record) for record in shown(report)]
    lines += columns(HEADER, rows) if rows else []
    lines += [f"changed: {change.text}" for change in changes_of(report)]
    lines += [f"removed: {name}" for name in report.removed]
    lines += [f"note: {note}" for note in report.notes]
    lines += report.alarms
    if rows:
        lines.append(counted(report))
    return [plain(line) for line in lines]


def counted(report: GuardReport) -> str:
    outcomes = [record.outcome for record in shown(report)]
    counts = [(name, outcomes.count(name)) for name in _ORDER]
    return ", ".join(f"{count} {name}" for name, count in counts if count) + f" in {report.seconds:.0f} s"


def shown(report: GuardReport) -> list[GuardRecord]:
    """One row a workload: whether it is right is told in its race's, where there is one."""
    raced = {(record.id.rpartition("::")[0], record.workload) for record in report.records if record.raced}
    alone = [one for one in report.records if one.raced or (one.id.rpartition("::")[0], one.workload) not in raced]
    return _worst_first(alone)


def _worst_first(records: Sequence[GuardRecord]) -> list[GuardRecord]:
    """By outcome, then by what is lost."""

    def rank(record: GuardRecord) -> tuple[int, float]:
        slower = max((one.slowdown.speedup for one in _of(record, "base")), default=0.0)
        return _ORDER.index(record.outcome), -slower

    return sorted(records, key=rank)


def row_of(record: GuardRecord) -> tuple[str, ...]:
    known = {one.question: one for one in record.findings}
    base = known.get("base")
    against = f"{base.slowdown.speedup - 1.0:+.1%}" if base is not None else "unchanged" if record.since else "-"
    times = [_speedup(known.get(name)) for name in ("eager", "compile")]
    call = next((duration(one.candidate_ns) for one in record.findings if one.candidate_ns), "-")
    return record.id, record.outcome, against, *times, call, _remark(record)


def _remark(record: GuardRecord, limit: int = 100) -> str:
    if record.outcome == "pass":
        return f"unchanged since {record.since}" if record.since else ""
    told = " ".join(record.reason.split())
    return told if len(told) <= limit else told[: limit - 3] + "..."


def _speedup(finding: Finding | None) -> str:
    return "-" if finding is None else f"{finding.slowdown.speedup:.2f}x"


def _of(record: GuardRecord, *questions: str) -> list[Finding]:
    return [finding for finding in record.findings if finding.question in questions]


# -- for a pull request and for programs ---------------------------------------------------------------------------


def markdown(report: GuardReport) -> str:
    """The run as Markdown: a table, what failed in full, what was changed. Nothing in it is taken as markup."""
    if report.error:
        return f"**The guard could not run.**\n\n{fence(plain(report.error))}\n"
    told = [f"Kernels against {report.base} on {report.machine}.", f"Runner: {report.runner}" if report.runner else ""]
    lines = [part for line in told if line for part in (escape(line), "")]
    if report.records:
        header = ("", *HEADER)
        lines += ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for record in shown(report):
        cells = (_SIGNS.get(record.outcome, ""), *(escape(" ".join(plain(text).split())) for text in row_of(record)))
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", escape(counted(report)), ""] if report.records else ["Nothing was guarded.", ""]
    for record in shown(report):
        if record.outcome in report.failing:
            lines += [f"<details><summary>{xml(record.id)}: {record.outcome}</summary>", ""]
            lines += [fence(record_text(record, report)), "", "</details>", ""]
    lines += _listed("Changed by this branch", [change.text for change in changes_of(report)])
    lines += _listed("Removed kernels", report.removed)
    lines += _listed("Alarms", report.alarms)
    lines += _listed("Notes", report.notes)
    return "\n".join(lines).rstrip() + "\n"


def _listed(title: str, items: Sequence[str]) -> list[str]:
    return [f"**{title}**", "", *(f"- {escape(' '.join(plain(item).split()))}" for item in items), ""] if items else []
