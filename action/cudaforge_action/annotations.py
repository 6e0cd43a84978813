"""What the guard found as remarks on lines: on the target that a kernel stands for. Nothing is imported to find it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from cudaforge_action.guard_result import GuardResult
from cudaforge_action.records import Annotation
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.guarded import GuardRecord, GuardReport
from pytest_cudaforge.report.escaping import one_line, plain
from pytest_cudaforge.report.guarded import record_text, shown

__all__ = ["MOST_OF_A_LEVEL", "Places", "limited", "remarks"]

Level = Literal["error", "warning", "notice"]
#: A step shows ten of each level (https://docs.github.com/actions/reference/limits) and drops the others: one is left
#: for what the step itself may have to say.
MOST_OF_A_LEVEL: Final = 9
_LONGEST_MESSAGE = 3_000
_TITLES: Final = {
    "failed": "Forged kernel is wrong",
    "regression": "Slower than before",
    "unfit": "Slower, says a runner that is unfit to tell",
    "inconclusive": "Could not be decided",
    "skipped": "Not checked",
}


@dataclass
class Places:
    """Where things lie in the checkout at ``top``; pytest's rootdir is ``start`` or a folder above it."""

    top: Path
    start: Path
    _lines: dict[tuple[Path, str], dict[str, int]] = field(default_factory=dict)

    def of(self, record: GuardRecord) -> tuple[str, int]:
        """The target's file and line; the kernel's own file where there is no such target; ("", 0) where neither is."""
        target = record.target.partition("::")[0]
        for root in self._roots(record.id):
            line = self._marked(root, target).get(record.target, 0) if self._inside(root / target) else 0
            if line:
                return self._shown(root / target), line
        kernel = record.id.partition("::")[0]
        file = next((root / kernel for root in self._roots("") if self._inside(root / kernel)), None)
        return (self._shown(file), 1) if file is not None else ("", 0)

    def file(self, name: str) -> str:
        """A file that a change names by its path from rootdir or the top; "" where there is none."""
        found = (root / name for root in (*self._roots(""), self.top) if self._inside(root / name))
        return next(map(self._shown, found), "")

    def _roots(self, item: str) -> Iterator[Path]:
        """Folders that ids may start from: a target's own is rootdir, or one above its kernel."""
        starts = [self.start, *self.start.parents]
        folder = PurePosixPath(item.partition("::")[0]).parent
        starts += [self.start / parent for parent in (folder, *folder.parents) if not parent.is_absolute()]
        yield from dict.fromkeys(start for start in starts if start.is_relative_to(self.top))

    def _inside(self, path: Path) -> bool:
        """Is it a file of the checkout? Ids are text of others."""
        try:
            return path.resolve().is_relative_to(self.top.resolve()) and path.is_file()
        except (OSError, ValueError):
            return False

    def _marked(self, root: Path, name: str) -> dict[str, int]:
        if (root, name) not in self._lines:
            self._lines[root, name] = {target.id: target.line for target in discover([root / name], root).targets}
        return self._lines[root, name]

    def _shown(self, file: Path) -> str:
        return file.resolve().relative_to(self.top.resolve()).as_posix()


def remarks(result: GuardResult, places: Places) -> tuple[Annotation, ...]:
    """All there is to remark, worst first."""
    found: list[Annotation] = []
    if result.run.error:
        found.append(Annotation("error", "The guard could not finish", plain(result.run.error)[-_LONGEST_MESSAGE:]))
    report = result.report
    if report is None:
        return tuple(found)
    found += [_remark(record, report, places) for record in shown(report) if _is_worth_a_remark(record)]
    if left := sum(one.count for one in result.run.unchecked):
        # A green run that looked at nothing must not look like one that found nothing.
        level: Level = "notice" if left < len(shown(report)) else "warning"
        reasons = "\n".join(f"{one.count or 'others'}: {one.why}" for one in result.run.unchecked)
        title = f"{left} not checked" if level == "notice" else "Nothing was checked"
        found.append(Annotation(level, title, plain(reasons)[:_LONGEST_MESSAGE]))
    if report.removed:
        message = "gone since the merge base, and guarded no more: " + ", ".join(report.removed)
        found.append(Annotation("warning", "Removed kernels", plain(message)[:_LONGEST_MESSAGE]))
    for change in report.changes:
        told = "The guard goes by the merge base" if not change.obeyed else "Changed beside the kernels"
        found.append(Annotation("notice", told, plain(change.text)[:_LONGEST_MESSAGE], places.file(change.place)))
    return tuple(found)


def limited(found: Iterable[Annotation], report: str, most: int = MOST_OF_A_LEVEL) -> list[Annotation]:
    """At most ``most`` of each level, the last of which says how many more there are. ``report``: where all are."""
    kept: list[Annotation] = []
    known = list(found)
    levels: Sequence[Level] = ("error", "warning", "notice")
    for level in levels:
        of_level = [one for one in known if one.level == level]
        more = len(of_level) - most + 1 if len(of_level) > most else 0
        kept += of_level[: len(of_level) - more]
        if more:
            kept.append(Annotation(level, f"and {more} more", f"{more} more like these: see {report}"))
    return kept


def _is_worth_a_remark(record: GuardRecord) -> bool:
    """Hardware that is not here is told once, in the summary; a kernel that has become stale on its line."""
    return record.outcome in ("failed", "regression", "unfit", "inconclusive") or record.cause == "stale"


def _remark(record: GuardRecord, report: GuardReport, places: Places) -> Annotation:
    level: Level = "error" if record.outcome in report.failing else "warning"
    if record.outcome == "skipped":
        level = "notice"
    workload = f" [{one_line(plain(record.workload), 60)}]" if record.workload else ""
    title = f"{_TITLES[record.outcome]}: {one_line(plain(record.target), 120)}{workload}"
    path, line = places.of(record)
    return Annotation(level, title, record_text(record, report)[:_LONGEST_MESSAGE], path, line)
