"""Collectors and items: targets under ``--forge``, and the cases of forged kernels in an ordinary run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pytest

if TYPE_CHECKING:
    from pytest_cudaforge.case_run import CaseRun
    from pytest_cudaforge.discovery import Problem
    from pytest_cudaforge.forging import ForgeRun
    from pytest_cudaforge.kernel_cases import Case
    from pytest_cudaforge.records import Target, Trace
    from pytest_cudaforge.runtime.manifest import Entry

__all__ = ["CaseItem", "ForgeFile", "ForgeFolder", "ForgeItem", "ForgedFolder", "ItemFailure", "ProblemItem"]


class ItemFailure(Exception):
    """A failure whose text is the whole report: a traceback through this plugin would tell the user nothing."""


def skip(reason: str) -> NoReturn:
    """Skip the item that runs; reported at the item's own place, not at a line of this plugin."""
    raise pytest.skip.Exception(reason, _use_item_location=True)


class ReportedItem(pytest.Item):
    """An item marked ``cudaforge`` that reports :class:`ItemFailure` as plain text."""

    line = 1

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from pytest_cudaforge.errors import ForgeError

        if isinstance(excinfo.value, (ItemFailure, ForgeError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.line - 1, self.nodeid.partition("::")[2]


# -- pytest --forge --------------------------------------------------------------------------------------------


class ForgeFolder(pytest.Directory):
    """A folder on the way to targets. Unlike ``Package`` it never imports an ``__init__.py``."""

    def __init__(self, *, run: ForgeRun, **rest: Any) -> None:
        super().__init__(**rest)
        self.run = run

    def collect(self) -> Iterator[pytest.Collector]:
        for path in self.run.children(self.path):
            given = self.session.isinitpath(path, with_parents=True)
            if not given and self.ihook.pytest_ignore_collect(collection_path=path, config=self.config):
                continue
            if path.is_dir():
                yield ForgeFolder.from_parent(self, path=path, run=self.run)
            elif path.suffix == ".py":
                yield ForgeFile.from_parent(self, path=path, run=self.run)


class ForgeFile(pytest.File):
    """A Python file that is scanned, never imported."""

    def __init__(self, *, run: ForgeRun, **rest: Any) -> None:
        super().__init__(**rest)
        self.run = run

    def collect(self) -> Iterator[pytest.Item | pytest.Collector]:
        for record in self.run.findings(self.path):
            qualname = record.id.partition("::")[2]
            if qualname:
                yield TargetNode.from_parent(self, name=qualname, run=self.run, record=record)
            else:
                yield ProblemItem.from_parent(self, name="forge", problem=record)


class TargetNode(pytest.Collector):
    """The middle of ``layers.py::RMSNorm::forge``."""

    def __init__(self, *, run: ForgeRun, record: Target | Problem, **rest: Any) -> None:
        super().__init__(**rest)
        self.run, self.record = run, record

    def collect(self) -> Iterator[pytest.Item]:
        from pytest_cudaforge.discovery import Problem

        if isinstance(self.record, Problem):
            yield ProblemItem.from_parent(self, name="forge", problem=self.record)
        else:
            yield ForgeItem.from_parent(self, name="forge", run=self.run, target=self.record)


class ProblemItem(ReportedItem):
    """Something that was meant to be a target and cannot be one; fails with the reason."""

    def __init__(self, *, problem: Problem, **rest: Any) -> None:
        super().__init__(**rest)
        self.problem, self.line = problem, problem.line
        self.add_marker(pytest.mark.cudaforge)

    def runtest(self) -> None:
        raise ItemFailure(f"{self.problem.path}:{self.problem.line}: {self.problem.text}")


class ForgeItem(ReportedItem):
    """Reports what the forging session found for one target; does no work itself."""

    def __init__(self, *, run: ForgeRun, target: Target, **rest: Any) -> None:
        super().__init__(**rest)
        self.run, self.target, self.line = run, target, target.line
        self.add_marker(pytest.mark.cudaforge)

    def runtest(self) -> None:
        from pytest_cudaforge.display import properties_of, trace_text
        from pytest_cudaforge.report.escaping import plain

        records = self.run.records_here()
        traces = records.of(self.target.id)
        self.user_properties += properties_of(traces)
        if not traces:
            if records.error:
                raise ItemFailure(records.error)
            skip("cancelled: the forging session ended before this target")
        verdict = verdict_of(traces, strict=self.run.strict)
        if verdict == "passed":
            self.add_report_section("call", "forge", trace_text(traces))
        elif verdict == "failed":
            raise ItemFailure(f"{trace_text(traces, failed=True)}\n{self._where()}")
        else:
            skip(plain("; ".join(_skip_reason(trace) for trace in traces)))

    def _where(self) -> str:
        folder = self.run.settings.run_dir / "runs" / self.target.slug
        shown = folder.relative_to(self.config.rootpath) if folder.is_relative_to(self.config.rootpath) else folder
        return f"every prompt, reply and verdict: {shown}"


def _skip_reason(trace: Trace) -> str:
    return trace.reason if trace.outcome == "skipped" else f"{trace.outcome}: {trace.reason}"


def verdict_of(traces: Sequence[Trace], *, strict: bool) -> Literal["passed", "failed", "skipped"]:
    """How an item reports its target's outcomes; one language that got a kernel is enough.

    ``strict``: whatever brought no new kernel is a failure, a kept reference and a pending reply too.
    """
    outcomes = {trace.outcome for trace in traces}
    if "forged" in outcomes or ("kept_reference" in outcomes and not strict):
        return "passed"
    return "failed" if strict or outcomes & {"failed", "error"} else "skipped"


# -- plain pytest: the cases of forged kernels -----------------------------------------------------------------

STRICT = "--forge-strict: what cannot be verified fails"
#: The plugin that is registered under --forge-guard (guarding.py) and makes the items of kernels then.
GUARD_PLUGIN = "cudaforge-guard"


class ForgedFolder(pytest.Directory):
    """The folder with ``manifest.json``, or a folder below it; nothing in it is collected but the entries."""

    def __init__(self, *, manifest: Path | None = None, **rest: Any) -> None:
        super().__init__(**rest)
        self.manifest = manifest if manifest is not None else self.path / "manifest.json"

    def collect(self) -> Iterator[pytest.Collector]:
        from pytest_cudaforge.errors import UsageError
        from pytest_cudaforge.runtime.manifest import Manifest

        try:
            entries = Manifest.load(self.manifest).entries
        except UsageError as error:
            raise self.CollectError(str(error)) from None
        places = {self.manifest.parent / entry.directory: entry for entry in entries}
        listed: dict[tuple[str, str], frozenset[str]] = {}
        for entry in entries:
            names = frozenset(workload.name for workload in entry.workloads)
            listed[entry.target, entry.arch] = listed.get((entry.target, entry.arch), frozenset()) | names
        for child in sorted({step for place in places for step in _steps(self.path, place)}):
            if child in places:
                entry = places[child]
                known: dict[str, Any] = {"entry": entry, "listed": listed[entry.target, entry.arch]}
                yield KernelFolder.from_parent(self, path=child, manifest=self.manifest, **known)
            else:
                yield ForgedFolder.from_parent(self, path=child, manifest=self.manifest)


def _steps(folder: Path, place: Path) -> Iterator[Path]:
    if place != folder and place.is_relative_to(folder):
        yield folder / place.relative_to(folder).parts[0]


class KernelFolder(pytest.Directory):
    """``forged/rms_norm-3f9a1c/cpu``. ``listed``: workloads of its target that it or another kernel was verified on."""

    def __init__(self, *, manifest: Path, entry: Entry, listed: frozenset[str], **rest: Any) -> None:
        super().__init__(**rest)
        self.manifest, self.entry, self.listed = manifest, entry, listed

    def collect(self) -> Iterator[pytest.Collector]:
        names = [file.name for file in self.entry.files]
        if not names:
            raise self.CollectError(f"{self.manifest}: the entry of {self.entry.target} names no files; forge it again")
        name = "plan.py" if "plan.py" in names else names[0]
        known: dict[str, Any] = {"manifest": self.manifest, "entry": self.entry, "listed": self.listed}
        yield KernelFile.from_parent(self, path=self.path / name, **known)


class KernelFile(pytest.File):
    """The kernel's plan (read as data, never imported): a real file, so that ids work as arguments and with --lf."""

    def __init__(self, *, manifest: Path, entry: Entry, listed: frozenset[str], **rest: Any) -> None:
        super().__init__(**rest)
        self.manifest, self.entry, self.listed = manifest, entry, listed

    def collect(self) -> Iterator[pytest.Item]:
        from pytest_cudaforge.case_run import CaseRun
        from pytest_cudaforge.kernel_cases import Case

        if not self.entry.workloads:
            raise self.CollectError(
                f"{self.manifest}: the entry of {self.entry.target} names no workloads; forge it again"
            )
        guard = self.config.pluginmanager.get_plugin(GUARD_PLUGIN)
        if guard is not None:
            yield from guard.items_of(self)
            return
        run = CaseRun.of(self.config)
        for workload in self.entry.workloads:
            case = Case(self.manifest, self.entry, workload, self.listed)
            yield CaseItem.from_parent(self, name=f"case[{workload.name}]", run=run, case=case)


class CaseItem(ReportedItem):
    """Is this kernel still right on this workload? Correctness only, in sandboxed children; no clock, no LLM."""

    def __init__(self, *, run: CaseRun, case: Case, **rest: Any) -> None:
        super().__init__(**rest)
        self.run, self.case = run, case
        self.add_marker(pytest.mark.cudaforge)
        entry = case.entry
        self.extra_keyword_matches |= {entry.qualname, entry.language, entry.arch}

    def reportinfo(self) -> tuple[Path, int, str]:
        entry = self.case.entry
        return self.path, 0, f"{entry.target} ({entry.language}, {entry.arch}) {self.name}"

    def runtest(self) -> None:
        from pytest_cudaforge.display import evaluation_text
        from pytest_cudaforge.errors import StaleEntry
        from pytest_cudaforge.kernel_cases import NotHere

        entry = self.case.entry
        self.user_properties += [("target", entry.target), ("workload", self.case.workload.name)]
        self.user_properties += [("language", entry.language), ("arch", entry.arch)]
        try:
            verdict = self.run.verdict(self)
        except StaleEntry as stale:
            self._unverified("stale", str(stale))
        except NotHere as reason:
            self._unverified("not here", str(reason))
        evaluation = verdict.evaluation
        self.user_properties += [("status", evaluation.status.value), ("isolation", evaluation.isolation.grade)]
        text = evaluation_text(evaluation)
        if not evaluation.passed:
            raise ItemFailure(text)
        if verdict.wider:
            raise ItemFailure(f"{verdict.wider}\n{text}")
        self.add_report_section("call", "forge", text)
        if verdict.unlisted:
            self._tell_of(verdict.unlisted)

    def _unverified(self, status: str, reason: str) -> NoReturn:
        self.user_properties.append(("status", status))
        if self.config.getoption("forge_strict"):
            raise ItemFailure(f"{reason}\n{STRICT}")
        skip(reason)

    def _tell_of(self, unlisted: Sequence[str]) -> None:
        """Workloads that came after the kernel: production keeps the reference for them."""
        names = ", ".join(map(repr, unlisted))
        reason = f"{self.case.entry.target}: its kernel has no verdict on {names}; forge again (pytest --forge)"
        if self.config.getoption("forge_strict"):
            raise ItemFailure(f"{reason}\n{STRICT}")
        self.warn(pytest.PytestWarning(reason))
