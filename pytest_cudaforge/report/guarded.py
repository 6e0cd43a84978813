"""What the guard found, as text for a terminal, as Markdown for a pull request, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pytest_cudaforge.display import columns
from pytest_cudaforge.guard import Finding, duration
from pytest_cudaforge.guarded import Change, GuardRecord, GuardReport, Verdict
from pytest_cudaforge.report.escaping import one_line, plain, xml
from pytest_cudaforge.report.markdown import escape, fence, unlinked

__all__ = [
    "HEADER",
    "changes_of",
    "counted",
    "fitting",
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
    lines += [f"alarm: {alarm}" for alarm in report.alarms[:20] if record.outcome == "regression"]
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


#: Of one answer told in full, of one entry of a list, of a row's id: what is longer is cut.
_LONGEST_TEXT, _LONGEST_ENTRY, _LONGEST_ID = 6_000, 600, 240


def markdown(report: GuardReport, *, limit_bytes: int | None = None) -> str:
    """The run as Markdown: a table, what failed in full, what was changed. Nothing in it is taken as markup.

    ``limit_bytes``: the most it may take in UTF-8, at least 16 384: a quarter is for what was changed, half of the rest
    for the table, the others for what failed. What has no room is counted; what is worst comes first.
    """
    if report.error:
        return f"**The guard could not run.**\n\n{fence(_cut(report.error))}\n"
    told = [f"Kernels against {report.base}{' on ' * bool(report.machine)}{report.machine}."] if report.base else []
    told += [f"Runner: {report.runner}"] if report.runner else []
    lines = [part for line in told for part in (escape(one_line(line, _LONGEST_ENTRY)), "")]
    lists = _lists(report, _share(limit_bytes, 4))
    room = None if limit_bytes is None else limit_bytes - _size(lines) - _size(lists) - 256
    table = _table(report, _share(room, 2))
    lines += [*table, "", escape(counted(report)), ""] if report.records else ["Nothing was guarded.", ""]
    lines += _failures(report, None if room is None else room - _size(table))
    return "\n".join([*lines, *lists]).rstrip() + "\n"


def _share(room: int | None, of: int) -> int | None:
    return None if room is None else room // of


def _table(report: GuardReport, room: int | None) -> list[str]:
    header = ("", *HEADER)
    top = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    records = shown(report)
    kept = fitting(map(_row, records), None if room is None else room - _size(top))
    left = len(records) - len(kept)
    return [*top, *kept, *(["", f"… and {left} more, none of them worse."] if left else [])]


def _row(record: GuardRecord) -> str:
    name, *cells = row_of(record)
    told = (escape(plain(text)) for text in (one_line(name, _LONGEST_ID), *cells))
    return "| " + " | ".join((_SIGNS.get(record.outcome, ""), *told)) + " |"


def _failures(report: GuardReport, room: int | None) -> list[str]:
    failing = [record for record in shown(report) if record.outcome in report.failing]
    blocks = (
        f"<details><summary>{_summary(record.id)}: {record.outcome}</summary>\n\n"
        f"{fence(_cut(record_text(record, report)))}\n\n</details>\n"
        for record in failing
    )
    kept = fitting(blocks, room)
    left = len(failing) - len(kept)
    return [*kept, *([f"… and {left} more that fail.", ""] if left else [])]


def _summary(name: str) -> str:
    """Text between HTML's own tags, where hosts differ in how much Markdown they still see."""
    text = unlinked(xml(one_line(name, _LONGEST_ID)))
    return re.sub(r"[\[\]`*_|~\\]", lambda found: f"&#x{ord(found[0]):x};", text)


def _lists(report: GuardReport, room: int | None) -> list[str]:
    return [
        *_listed("Changed by this branch", [change.text for change in changes_of(report)], _share(room, 2)),
        *_listed("Removed kernels", report.removed, _share(room, 4)),
        *_listed("Alarms", report.alarms, _share(room, 8)),
        *_listed("Notes", report.notes, _share(room, 8)),
    ]


def _listed(title: str, items: Sequence[str], room: int | None) -> list[str]:
    if not items:
        return []
    lines = (f"- {escape(one_line(plain(item), _LONGEST_ENTRY))}" for item in items)
    kept = fitting(lines, None if room is None else room - len(title) - 64)
    left = len(items) - len(kept)
    return [f"**{title}**", "", *kept, *([f"- … and {left} more"] if left else []), ""]


def fitting(blocks: Iterable[str], room: int | None) -> list[str]:
    """The first blocks, as many as ``room`` bytes hold with a line's end each; all of them where there is no limit."""
    if room is None:
        return list(blocks)
    kept = []
    for block in blocks:
        room -= _size([block])
        if room < 0:
            break
        kept.append(block)
    return kept


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode("utf-8", "replace")) + 1 for line in lines)


def _cut(text: str) -> str:
    text = plain(text)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "\n[cut]"
