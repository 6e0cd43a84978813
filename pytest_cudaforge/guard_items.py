"""The guard's collectors and items: they report what the guard's session found, and do no work themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaforge.items import STRICT, ItemFailure, ReportedItem, skip

if TYPE_CHECKING:
    from pytest_cudaforge.guarding import GuardRun
    from pytest_cudaforge.records import Target
    from pytest_cudaforge.runtime.manifest import Entry

__all__ = ["GuardFile", "GuardFolder", "GuardItem", "ModuleNode"]


class GuardFolder(pytest.Directory):
    """A folder on the way to something guarded. Unlike ``Package`` it never imports an ``__init__.py``."""

    def __init__(self, *, run: GuardRun, **rest: Any) -> None:
        super().__init__(**rest)
        self.run = run

    def collect(self) -> Iterator[pytest.Collector]:
        for path in self.run.children(self.path):
            given = self.session.isinitpath(path, with_parents=True)
            if not given and self.ihook.pytest_ignore_collect(collection_path=path, config=self.config):
                continue
            if path.is_dir():
                collector = self.ihook.pytest_collect_directory(path=path, parent=self)
                if collector is not None:
                    yield collector
            elif path.suffix == ".py":
                yield GuardFile.from_parent(self, path=path, run=self.run)


class GuardFile(pytest.File):
    """A Python file with guarded modules: scanned, never imported."""

    def __init__(self, *, run: GuardRun, **rest: Any) -> None:
        super().__init__(**rest)
        self.run = run

    def collect(self) -> Iterator[pytest.Collector]:
        for target in self.run.modules(self.path):
            yield ModuleNode.from_parent(self, name=target.qualname, run=self.run, target=target)


class ModuleNode(pytest.Collector):
    """The middle of ``layers.py::Norm::guard``."""

    def __init__(self, *, run: GuardRun, target: Target, **rest: Any) -> None:
        super().__init__(**rest)
        self.run, self.target = run, target

    def collect(self) -> Iterator[pytest.Item]:
        item: GuardItem = GuardItem.from_parent(self, name="guard", run=self.run, title=self.target.id)
        item.line = self.target.line
        yield item


class GuardItem(ReportedItem):
    """One workload of a forged kernel (``manifest``, ``entry``, ``workload``), or a plain module: ``case[workload]``
    asks whether it is right, ``guard[workload]`` and ``guard`` whether it is as fast as well."""

    def __init__(
        self,
        *,
        run: GuardRun,
        title: str,
        manifest: Path | None = None,
        entry: Entry | None = None,
        workload: str = "",
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.run, self.title, self.manifest, self.entry, self.workload = run, title, manifest, entry, workload
        self.add_marker(pytest.mark.cudaforge)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.line - 1, f"{self.title} {self.name}"

    def runtest(self) -> None:
        from pytest_cudaforge.report.escaping import plain
        from pytest_cudaforge.report.guarded import properties_of, record_text

        report = self.run.report_here()
        record = report.of(self.nodeid)
        if record is None:
            if report.error:
                raise ItemFailure(report.error)
            skip("cancelled: the guard ended before this kernel")
        self.user_properties += properties_of(record, report)
        text = record_text(record, report)
        if record.outcome in report.failing:
            raise ItemFailure(text)
        if record.outcome == "skipped" and self.config.getoption("forge_strict"):
            raise ItemFailure(f"{text}\n{STRICT}")
        self.add_report_section("call", "guard", text)
        if record.outcome != "pass":
            skip(plain(f"{record.outcome}: {record.reason}"))
