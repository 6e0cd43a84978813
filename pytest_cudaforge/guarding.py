"""One ``pytest --forge-guard`` run: what is collected, when the guard's session runs, how its report reaches the items.

As in :mod:`pytest_cudaforge.forging` the session runs once, in the controller, for the selected items: without xdist
between collection and the first item, under xdist before any item is scheduled, so that nothing of ours overlaps a
timed block. The workers read the report from a file whose name they were given at their start.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaforge.discovery import NEVER, discover
from pytest_cudaforge.errors import DeviceError, ForgeError, UsageError
from pytest_cudaforge.forging import check_writable, exchange_file, forge_config, given_path, scan_paths
from pytest_cudaforge.guard_items import GuardFile, GuardFolder, GuardItem
from pytest_cudaforge.guarded import Change, GuardRecord, GuardReport
from pytest_cudaforge.merge_base import MergeBase
from pytest_cudaforge.plugin import DEFAULT_FORGE_DIR, MANIFEST_NAME, forge_dir
from pytest_cudaforge.records import Target, from_json, to_json
from pytest_cudaforge.runtime.manifest import Entry, Manifest
from pytest_cudaforge.termination import EXIT_STATUS, Terminated, orderly_end

if TYPE_CHECKING:
    from pytest_cudaforge.config import ForgeConfig
    from pytest_cudaforge.guard_session import GuardedKernel
    from pytest_cudaforge.items import KernelFile

__all__ = ["GuardRun"]

_NOTHING = (
    "nothing to guard: no {manifest} was found, and no target says @forge_target(guard=True); "
    "forge first (pytest --forge), or give the paths of the kernels"
)


@dataclass(frozen=True)
class _Selected:
    """A kernel's item: where its file is as an id, and what it stands for."""

    place: str
    manifest: Path
    entry: Entry
    workload: str
    raced: bool


@dataclass(eq=False)  # pluggy keeps plugins in sets
class GuardRun:
    """The plugin that is registered under ``--forge-guard`` only. ``base`` is None in xdist's workers."""

    pytest_config: pytest.Config
    settings: ForgeConfig
    exchange: Path
    base: MergeBase | None
    changes: tuple[Change, ...] = ()
    report: GuardReport | None = None
    _children: dict[Path, set[Path]] | None = None
    _modules: dict[Path, list[Target]] = field(default_factory=dict)

    @classmethod
    def prepare(cls, config: pytest.Config) -> GuardRun:
        """Read the settings and find the merge base; raises ``pytest.UsageError`` where either cannot be."""
        from pytest_cudaforge.guard_options import trusted_base

        worker = getattr(config, "workerinput", None)
        try:
            settings = forge_config(config)
            for option in ("json", "html", "history"):
                check_writable(given_path(config, config.getoption(f"forge_{option}")), f"--forge-{option}")
            base, changes = (None, ()) if worker is not None else trusted_base(config)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            # `testpaths` name tests, not kernels.
            given = [str(path) for path in settings.forge_paths] or [str(config.invocation_params.dir)]
            config.args[:] = [*given, *_beside(given, forge_dir(config))]
        given_file = worker.get("cudaforge_guard") if worker is not None else None
        return cls(config, settings, Path(given_file) if given_file else exchange_file(), base, changes)

    # -- collection ------------------------------------------------------------------------------------------

    def children(self, folder: Path) -> list[Path]:
        """Files and folders of ``folder`` that are guarded, lead to something guarded, or were given; in order."""
        if self._children is None:
            paths = scan_paths(self.pytest_config)
            self._modules = self._guarded_modules(paths)
            self._children = {}
            for path in {*paths, *_forged_folders(paths, self.pytest_config), *self._modules}:
                for child in (path, *path.parents):
                    self._children.setdefault(child.parent, set()).add(child)
        return sorted(child for child in self._children.get(folder, ()) if child != folder)

    def _guarded_modules(self, paths: Sequence[Path]) -> dict[Path, list[Target]]:
        """Files with modules that ask for a guard and have no forged kernel, which would be guarded in their place."""
        root = self.pytest_config.rootpath
        found = discover(paths, root, no_recurse=self.pytest_config.getini("norecursedirs"))
        # What only importing could tell was meant to be guarded by whoever wrote it.
        asked = [target for target in found.targets if target.guard is not False]
        forged = _forged_targets(forge_dir(self.pytest_config)) if asked else set()
        modules: dict[Path, list[Target]] = {}
        for target in asked:
            if target.id not in forged:
                modules.setdefault(root / target.path, []).append(target)
        return modules

    def modules(self, path: Path) -> list[Target]:
        """The guarded modules of one file, in the order of their lines."""
        self.children(path.parent)
        return self._modules.get(path, [])

    def items_of(self, parent: KernelFile) -> Iterator[GuardItem]:
        """A kernel's items: is it right, and is it as fast, for each workload that its manifest names."""
        entry = parent.entry
        for workload in entry.workloads:
            for what in ("case", "guard"):
                item: GuardItem = GuardItem.from_parent(
                    parent,
                    name=f"{what}[{workload.name}]",
                    run=self,
                    title=f"{entry.target} ({entry.language}, {entry.arch})",
                    manifest=parent.manifest,
                    entry=entry,
                    workload=workload.name,
                )
                item.extra_keyword_matches |= {entry.qualname, entry.language, entry.arch}
                yield item

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        if _is_forged(path, self.pytest_config):
            return None  # the plugin's own collector knows it
        return GuardFolder.from_parent(parent, path=path, run=self)

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        # Test modules of the same path are left alone: under --forge-guard nothing but what is guarded is collected.
        yield
        return [GuardFile.from_parent(parent, path=file_path, run=self)] if file_path.suffix == ".py" else []

    # -- the session -----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        if self._guards_here and not session.testsfailed and not session.config.option.collectonly:
            items = [item for item in session.items if isinstance(item, GuardItem)]
            chosen = [_selected(item) for item in items if item.entry is not None]
            self._guard(chosen, [item.nodeid for item in items])
        return (yield)

    @property
    def _guards_here(self) -> bool:
        config = self.pytest_config
        return not hasattr(config, "workerinput") and not config.pluginmanager.has_plugin("dsession")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["cudaforge_guard"] = str(self.exchange)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        # All workers must have collected the same ids, so the first answer is everybody's.
        if self.report is None and not self.pytest_config.option.collectonly:
            self._guard(list(_named(ids, self.pytest_config.rootpath)), ids)
            assert self.report is not None
            self.exchange.write_text(json.dumps(to_json(self.report)), encoding="utf-8")

    def _guard(self, selected: Sequence[_Selected], ids: Sequence[str]) -> None:
        assert self.base is not None
        chosen = set(ids)
        self.children(self.pytest_config.rootpath)
        targets = [target for found in self._modules.values() for target in found]
        modules = [(name, target) for target in targets if (name := f"{target.id}::guard") in chosen]
        began = time.monotonic()
        self.report = GuardReport(base=self.base.told)
        try:
            with orderly_end():
                self._decide(self.base, grouped(selected), modules)
        except Terminated:
            # As after Ctrl-C: pytest ends its session, and what was decided is told.
            self._conclude(began)
            pytest.exit("the guard was ended by SIGTERM", returncode=EXIT_STATUS)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        except ForgeError as error:
            self.report = replace(self.report, error=str(error))
        except KeyboardInterrupt:
            self._conclude(began)  # what was decided is told
            raise
        self._conclude(began)

    def _conclude(self, began: float) -> None:
        assert self.report is not None
        self.report = replace(self.report, seconds=round(time.monotonic() - began, 1))
        self._write_reports(self.report)

    def _decide(self, base: MergeBase, kernels: Sequence[GuardedKernel], modules: Sequence[tuple[str, Target]]) -> None:
        """Fills the report as it goes, so that what was decided before Ctrl-C is told."""
        from pytest_cudaforge.guard_run import guard_all

        def publish(report: GuardReport) -> None:
            self.report = report

        guard_all(self.pytest_config, self.settings, base, self.changes, kernels, modules, publish, self._note)

    def _note(self, record: GuardRecord) -> None:
        """One line at once: a run of many kernels takes minutes."""
        from pytest_cudaforge.report.escaping import one_line, plain

        reporter = self.pytest_config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and self.pytest_config.get_verbosity() >= 0:
            text = one_line(plain(f"{record.outcome}: {record.id}: {record.reason}"), 160)
            reporter.write_line(f"{text} ({record.seconds:.1f} s)")

    def _write_reports(self, report: GuardReport) -> None:
        from pytest_cudaforge.records import Usage
        from pytest_cudaforge.report import html, html_guarded
        from pytest_cudaforge.report import json as json_report
        from pytest_cudaforge.report.environment import environment_of
        from pytest_cudaforge.report.rows import totals

        option = self.pytest_config.option
        path = given_path(self.pytest_config, option.forge_json)
        page = given_path(self.pytest_config, option.forge_html)
        told = {**environment_of(()), "machine": report.machine}
        try:
            if path is not None:
                figures = totals((), Usage(), report.seconds)
                json_report.write(path, json_report.document((), figures, environment=told, guard=report))
            if page is not None:
                html.write(page, html_guarded.page(report))
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None

    def report_here(self) -> GuardReport:
        """The session's report, wherever it ran. Raises ``ForgeError`` where a remote worker cannot see it."""
        if self.report is None:
            try:
                self.report = from_json(GuardReport, json.loads(self.exchange.read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise ForgeError(
                    f"this worker cannot read the guard's report: {error}",
                    expected="xdist workers on the controller's own machine",
                    remedy="run with -n N, or without xdist",
                ) from None
        assert self.report is not None
        return self.report

    # -- what is shown ---------------------------------------------------------------------------------------

    def pytest_report_header(self) -> list[str]:
        if self.base is None:
            return []
        lines = [f"guard: against {self.base.ref} at {self.base.told}"]
        if self.base.is_head:
            lines.append("guard: HEAD is the merge base itself; --forge-base HEAD^ would hold it against its parent")
        if not self.pytest_config.option.collectonly:
            lines.append(f"guard: {self._runner_here()}")
        return lines

    def _runner_here(self) -> str:
        """What is known of the device that is raced on, as far as one can tell before anything was selected."""
        from pytest_cudaforge import hardware
        from pytest_cudaforge.guard_run import runner_of

        try:
            return runner_of(self.settings, hardware.detect_in_child(hardware.choose(self.settings.device))).told
        except DeviceError as error:
            return error.what

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
        if report.skipped and dict(getattr(report, "user_properties", ())).get("guard") in ("inconclusive", "unfit"):
            word = dict(report.user_properties)["guard"]
            return str(word), "?", str(word).upper()
        return None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not terminalreporter.stats.get("deselected"):
            folder = forge_dir(self.pytest_config) / MANIFEST_NAME
            terminalreporter.write_line(_NOTHING.format(manifest=folder))
        if self.report is None:
            return
        from pytest_cudaforge.report.guarded import summary_lines

        terminalreporter.section("guarded kernels")
        for line in summary_lines(self.report):
            terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        if not hasattr(self.pytest_config, "workerinput"):
            with contextlib.suppress(OSError):
                self.exchange.unlink()


# -- what was selected -------------------------------------------------------------------------------------------


def _selected(item: GuardItem) -> _Selected:
    assert item.manifest is not None and item.entry is not None
    place, _, name = item.nodeid.rpartition("::")
    return _Selected(place, item.manifest, item.entry, item.workload, name.startswith("guard["))


def _named(ids: Iterable[str], root: Path) -> Iterator[_Selected]:
    """What the ids that a worker collected stand for."""
    known: dict[Path, Manifest] = {}
    for name in ids:
        place, _, item = name.rpartition("::")
        what, _, workload = item.partition("[")
        if what not in ("case", "guard") or not workload.endswith("]"):
            continue
        folder = Path(os.path.abspath(root / place)).parent
        manifests = [parent / MANIFEST_NAME for parent in folder.parents if (parent / MANIFEST_NAME).is_file()]
        for manifest in manifests[:1]:
            if manifest not in known:
                known[manifest] = Manifest.load(manifest)
            found = (one for one in known[manifest].entries if manifest.parent / one.directory == folder)
            yield from (_Selected(place, manifest, entry, workload[:-1], what == "guard") for entry in found)


def grouped(selected: Iterable[_Selected]) -> list[GuardedKernel]:
    """Each kernel once, with its selected workloads, in the order of the items."""
    from pytest_cudaforge.guard_session import GuardedKernel

    found: dict[str, GuardedKernel] = {}
    for one in selected:
        known = found.get(one.place) or GuardedKernel(one.place, one.manifest, one.entry)
        if one.raced:
            found[one.place] = replace(known, races=(*known.races, one.workload))
        else:
            found[one.place] = replace(known, cases=(*known.cases, one.workload))
    return list(found.values())


def _forged_targets(folder: Path) -> set[str]:
    """Ids of the targets that have a forged kernel; a manifest that cannot be read is told where it is collected."""
    try:
        return {entry.target for entry in Manifest.load(folder / MANIFEST_NAME).entries}
    except UsageError:
        return set()


def _beside(given: Sequence[str], folder: Path) -> list[str]:
    """The folder of kernels, where it exists and lies below none of the paths given."""
    if not (folder / MANIFEST_NAME).is_file() or any(folder.is_relative_to(path) for path in given):
        return []
    return [str(folder)]


def _is_forged(path: Path, config: pytest.Config) -> bool:
    return (path / MANIFEST_NAME).is_file() and (path.name == DEFAULT_FORGE_DIR or path == forge_dir(config))


def _forged_folders(paths: Sequence[Path], config: pytest.Config) -> Iterator[Path]:
    """Folders of forged kernels at, above and below the paths."""
    for path in paths:
        if path.is_dir():
            for place, folders, files in os.walk(path):
                if MANIFEST_NAME in files and _is_forged(Path(place), config):
                    folders.clear()
                    yield Path(place)
                if "pyvenv.cfg" in files:
                    folders.clear()
                folders[:] = [name for name in folders if not name.startswith(".") and name not in NEVER]
