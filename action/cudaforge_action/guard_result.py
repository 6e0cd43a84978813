"""What a guard job leaves in its folder, and what it comes to: written where it ran, read where it is told.

Whoever reads it is on another machine and trusts none of it: the writer ran the code of a pull request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest_cudaforge.report.json as json_report
from cudaforge_action.artifact import ArtifactError, digest_of, read_json, refuse
from cudaforge_action.records import GuardOutcome, GuardRun, Unchecked
from pytest_cudaforge import durable
from pytest_cudaforge.guarded import Cause, GuardRecord, GuardReport
from pytest_cudaforge.records import from_json, to_json
from pytest_cudaforge.report.escaping import one_line, plain
from pytest_cudaforge.report.guarded import shown

__all__ = [
    "HTML",
    "JSON",
    "JUNIT",
    "RUN",
    "SEVERITY",
    "VOUCHED",
    "GuardResult",
    "digest",
    "error_of",
    "exit_status",
    "judge",
    "read",
    "read_report",
    "unchecked",
    "write_run",
]

JSON, JUNIT, HTML, RUN = "guard.json", "junit.xml", "report.html", "run.json"
#: What the guard's digest is called among those that a job hands on.
VOUCHED = "guard"
#: Worst first.
SEVERITY: Final[tuple[GuardOutcome, ...]] = ("error", "failed", "regression", "inconclusive", "pass")

#: 500 kernels of eight workloads take a tenth of it.
MOST_JSON_BYTES = 32 * 1024 * 1024
MOST_RUN_BYTES = 1024 * 1024
MOST_RECORDS = 20_000
_NAMED = 3
# pytest's own: https://docs.pytest.org/en/stable/reference/exit-codes.html.
_PASSED, _FAILED, _NOTHING_COLLECTED = 0, 1, 5


@dataclass(frozen=True)
class GuardResult:
    """``report``: None where pytest left none."""

    run: GuardRun
    report: GuardReport | None = None

    @property
    def outcome(self) -> GuardOutcome:
        """The worse of what the run says of itself and of what its report says."""
        return worst((self.run.outcome, judge(self.report, self.run.pytest_status)))

    def count(self, *outcomes: str) -> int:
        """Kernels and workloads with one of these outcomes, each once."""
        return sum(record.outcome in outcomes for record in shown(self.report)) if self.report is not None else 0


def worst(outcomes: Iterable[GuardOutcome]) -> GuardOutcome:
    return min(outcomes, key=SEVERITY.index)


def judge(report: GuardReport | None, status: int | None) -> GuardOutcome:
    """What pytest's report and exit status come to together. Neither can make the other's bad news good: a
    ``conftest.py`` can set the status, and a killed run leaves half a report."""
    if report is None or report.error or status not in (_PASSED, _FAILED, _NOTHING_COLLECTED):
        return "error"
    if report.count("failed"):
        return "failed"
    if report.count("regression"):
        return "regression"
    if report.strict and report.count("inconclusive"):
        return "inconclusive"
    if status == _FAILED:  # strict, and something was skipped; or a failure that is none of ours
        return "failed"
    return "inconclusive" if report.count("inconclusive", "unfit", "cancelled") else "pass"


def exit_status(report: GuardReport | None, status: int | None) -> int:
    """The job's: pytest's own, but never 0 where there is bad news."""
    outcome = judge(report, status)
    strict = report is not None and report.strict and report.count("inconclusive") > 0
    if outcome == "error":
        return 2 if status is None or status == _PASSED else status if status > 0 else 128 - status
    return _FAILED if outcome in ("failed", "regression") or strict else status or 0


# -- what was not checked ----------------------------------------------------------------------------------------------

_WHY: Final[dict[Cause, tuple[str, str]]] = {
    "stale": (
        "their reference, workload or torch is not the one they were verified with: production keeps the reference",
        "forge them again (pytest --forge, or this action's mode forge)",
    ),
    "new": ("the merge base has nothing to compare them with", "nothing: once merged they are guarded"),
    "absent": ("", "guard them on a runner with this hardware as well"),
}


def unchecked(report: GuardReport) -> Iterator[Unchecked]:
    """What was left out, by reason; the most first."""
    left = [record for record in shown(report) if record.outcome in ("skipped", "cancelled")]
    reasons = Counter(_why(record) for record in left if record.cause != "unasked")
    for (why, remedy), count in reasons.most_common():
        ids = [record.id for record in left if _why(record) == (why, remedy)]
        yield Unchecked(_named(ids), why, remedy, count)


def _why(record: GuardRecord) -> tuple[str, str]:
    if record.outcome == "cancelled":
        return "the run ended before it came to them", "run the job again"
    why, remedy = _WHY.get(record.cause, ("", ""))
    told = next((line for line in record.text.splitlines() if line.strip().startswith("to do:")), "")
    return why or one_line(plain(record.reason), 300), remedy or one_line(plain(told.strip()[len("to do:") :]), 300)


def _named(ids: Sequence[str]) -> str:
    names = ", ".join(one_line(plain(name), 120) for name in ids[:_NAMED])
    return names + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")


# -- on disk -----------------------------------------------------------------------------------------------------------


def write_run(folder: Path, run: GuardRun) -> None:
    """Raises OSError where it cannot be written."""
    durable.write_file(folder / RUN, json.dumps(to_json(run), indent=1) + "\n")


def digest(folder: Path) -> str:
    """Of what :func:`read` reads. Raises :class:`~cudaforge_action.artifact.ArtifactError`."""
    return digest_of(folder, [name for name in (JSON, RUN) if (folder / name).exists()])


def read(folder: Path) -> GuardResult:
    """What a guard job left. Raises :class:`~cudaforge_action.artifact.ArtifactError` for anything that is not what our
    guard writes, and where there is nothing."""
    if folder.is_symlink() or not (folder / RUN).exists():
        raise refuse(folder / RUN, "is not there: the guard job left no result", "the artifact of a guard job")
    data = read_json(folder / RUN, MOST_RUN_BYTES)
    try:
        run = from_json(GuardRun, data)
    except (ValueError, OverflowError, RecursionError) as error:
        raise refuse(folder / RUN, f"is no record of a guard job: {one_line(plain(str(error)), 300)}") from None
    return GuardResult(run, read_report(folder / JSON) if (folder / JSON).exists() else None)


def read_report(path: Path) -> GuardReport:
    """Raises :class:`~cudaforge_action.artifact.ArtifactError`."""
    data = read_json(path, MOST_JSON_BYTES)
    if not isinstance(data, dict) or data.get("format") != json_report.FORMAT or "guard" not in data:
        raise refuse(path, "is no report of the guard", f"what --forge-json writes ({json_report.FORMAT})")
    try:
        report = from_json(GuardReport, data["guard"])
    except (ValueError, OverflowError, RecursionError) as error:
        raise refuse(path, f"is no report of this version's guard: {one_line(plain(str(error)), 300)}") from None
    assert isinstance(report, GuardReport)
    if len(report.records) > MOST_RECORDS:
        raise refuse(path, f"holds more than {MOST_RECORDS} records")
    return report


def error_of(problem: ArtifactError) -> GuardResult:
    """A folder that cannot be read is an error like any other, to be told where a result would be."""
    return GuardResult(GuardRun("error", 2, error=str(problem)))
