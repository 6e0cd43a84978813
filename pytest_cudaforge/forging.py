"""One ``pytest --forge`` run: what is collected, when the forging session runs, and how its records reach the items.

Without xdist the session runs between collection and the first item. Under xdist the controller collects nothing
itself: it forges when the first worker reports the selected ids, before any item is scheduled, and the workers read
the records from a file whose name they were given at their start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cudaforge.discovery import Discovery, Problem, discover
from pytest_cudaforge.errors import ForgeError, UsageError
from pytest_cudaforge.items import ForgeFile, ForgeFolder, ForgeItem
from pytest_cudaforge.records import Target, Trace, from_json, to_json

if TYPE_CHECKING:
    from pytest_cudaforge.config import ForgeConfig
    from pytest_cudaforge.evaluation.evaluator import Evaluator
    from pytest_cudaforge.events import Observer
    from pytest_cudaforge.session import SessionOptions, SessionResult

__all__ = [
    "ForgeRun",
    "Records",
    "check_writable",
    "exchange_file",
    "forge_config",
    "given_path",
    "scan_paths",
    "search_start",
    "with_own_runs",
]

ITEM_SUFFIX = "::forge"
STOPPED = "forging was stopped by Ctrl-C; finished rounds are kept and will be resumed"


@dataclass(frozen=True)
class Records:
    """What the forging session left: traces by target id, or why there are none."""

    traces: tuple[Trace, ...] = ()
    error: str = ""
    interrupted: bool = False

    def of(self, target: str) -> tuple[Trace, ...]:
        return tuple(trace for trace in self.traces if trace.target == target)


@dataclass(eq=False)  # pluggy keeps plugins in sets
class ForgeRun:
    """The plugin that is registered under ``--forge`` only; ``config`` settings are checked before anything starts."""

    pytest_config: pytest.Config
    settings: ForgeConfig
    exchange: Path
    strict: bool = False
    records: Records | None = None
    result: SessionResult | None = None
    _summary: list[str] = field(default_factory=list)
    _discovery: Discovery | None = None
    _children: dict[Path, set[Path]] = field(default_factory=dict)

    @classmethod
    def prepare(cls, config: pytest.Config) -> ForgeRun:
        """Read the settings; raises ``pytest.UsageError`` where they are wrong."""
        from pytest_cudaforge.config import or_compiler

        try:
            settings = with_own_runs(or_compiler(forge_config(config), os.environ))
            for option in ("json", "html"):
                check_writable(given_path(config, config.getoption(f"forge_{option}")), f"--forge-{option}")
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            # `testpaths` name tests, not targets.
            config.args[:] = [str(path) for path in settings.forge_paths] or [str(config.invocation_params.dir)]
        given = getattr(config, "workerinput", {}).get("cudaforge_records")
        return cls(config, settings, Path(given) if given else exchange_file(), bool(config.getoption("forge_strict")))

    # -- collection ------------------------------------------------------------------------------------------

    @property
    def discovery(self) -> Discovery:
        """The scan of the paths given, made once."""
        if self._discovery is None:
            paths = scan_paths(self.pytest_config)
            root = self.pytest_config.rootpath
            self._discovery = discover(paths, root, no_recurse=self.pytest_config.getini("norecursedirs"))
            found = {root / target.path for target in self._discovery.targets}
            found |= {root / problem.path for problem in self._discovery.problems}
            self._index(found | set(paths))
        return self._discovery

    def _index(self, paths: Iterable[Path]) -> None:
        for path in paths:
            for child in (path, *path.parents):
                self._children.setdefault(child.parent, set()).add(child)

    def children(self, folder: Path) -> list[Path]:
        """Files and folders of ``folder`` that hold targets or were given, in order."""
        self.discovery  # noqa: B018 (makes the index)
        return sorted(child for child in self._children.get(folder, ()) if child != folder)

    def findings(self, path: Path) -> list[Target | Problem]:
        """Targets and problems of one file, in the order of their lines."""
        root = self.pytest_config.rootpath
        records: list[Target | Problem] = [*self.discovery.targets, *self.discovery.problems]
        return sorted([record for record in records if root / record.path == path], key=_line_of)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector:
        return ForgeFolder.from_parent(parent, path=path, run=self)

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        # Test modules of the same path are left alone: under --forge nothing but targets is collected.
        yield
        return [ForgeFile.from_parent(parent, path=file_path, run=self)] if file_path.suffix == ".py" else []

    # -- the session -----------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        if self._forges_here and not session.testsfailed and not session.config.option.collectonly:
            self._forge([item.target for item in session.items if isinstance(item, ForgeItem)])
        result = yield
        if self.records is not None and self.records.interrupted:
            raise session.Interrupted(STOPPED)
        return result

    @property
    def _forges_here(self) -> bool:
        config = self.pytest_config
        return not hasattr(config, "workerinput") and not config.pluginmanager.has_plugin("dsession")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["cudaforge_records"] = str(self.exchange)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        # All workers must have collected the same ids, so the first answer is everybody's.
        if self.records is None and not self.pytest_config.option.collectonly:
            selected = set(ids)
            self._forge([target for target in self.discovery.targets if target.id + ITEM_SUFFIX in selected])
            assert self.records is not None
            self.exchange.write_text(json.dumps(to_json(self.records)), encoding="utf-8")
            if self.records.interrupted:
                # Ctrl-C reached the workers too: nobody is left to report, and xdist would trip over them.
                raise pytest.Session.Interrupted(STOPPED)

    def _forge(self, targets: Sequence[Target]) -> None:
        if not targets:
            self.records = Records()
            return
        from pytest_cudaforge.session import forge_all
        from pytest_cudaforge.wiring import open_evaluator

        paths = self.pytest_config.getini("pythonpath")
        try:
            evaluators = open_evaluator(self.settings, python_paths=paths, workloads=self.settings.workloads)
            with evaluators as evaluator, self._observer(targets) as observer:
                if self.pytest_config.option.forge_dry_run:
                    self.records = self._plan(targets, evaluator)
                    return
                self.result = forge_all(targets, self.settings, evaluator, observer, options=self._options())
            self.records = Records(self.result.traces, interrupted=self.result.interrupted)
            self._write_reports(self.result)
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
        except ForgeError as error:
            self.records = Records(error=str(error))

    def _plan(self, targets: Sequence[Target], evaluator: Evaluator) -> Records:
        """``--forge-dry-run``: say what a run would do; every item is skipped."""
        from pytest_cudaforge.planning import plan_work, render_plan

        plan = plan_work(targets, self.settings, evaluator)
        self._summary = render_plan(plan)
        return Records(
            tuple(
                Trace(entry.target, entry.language, "error" if entry.problem else "skipped", entry.problem or "dry run")
                for entry in plan.targets
            )
        )

    def _options(self) -> SessionOptions:
        from pytest_cudaforge.session import SessionOptions

        option = self.pytest_config.option
        return SessionOptions(
            fresh=option.forge_fresh,
            record=given_path(self.pytest_config, option.forge_record),
            branch=option.forge_branch,
            stop_after_failure=option.maxfail == 1,
        )

    @contextlib.contextmanager
    def _observer(self, targets: Sequence[Target]) -> Iterator[Observer]:
        """The live table where somebody watches a terminal, else plain lines."""
        from pytest_cudaforge.display import PlainLines

        config = self.pytest_config
        verbosity = config.get_verbosity()
        if sys.stdout.isatty() and verbosity >= 0 and os.environ.get("TERM") != "dumb":
            from rich.console import Console

            from pytest_cudaforge.live import LiveTable

            console = Console(no_color=True if config.option.color == "no" else None)
            with LiveTable(console, [target.id for target in targets], verbosity) as table:
                yield table
            return
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        yield PlainLines(reporter.write_line if reporter is not None else print, verbosity)

    def _write_reports(self, result: SessionResult) -> None:
        """The page of the run, and the JSON document where one was asked for."""
        from pytest_cudaforge.report import html
        from pytest_cudaforge.report import json as json_report
        from pytest_cudaforge.report.environment import environment_of

        told, option = environment_of(result.traces), self.pytest_config.option
        path = given_path(self.pytest_config, option.forge_json)
        if path is not None:
            json_report.write(path, json_report.document(result.traces, result.totals, environment=told))
        page = html.document(result.traces, result.totals, environment=told, notes=result.notes)
        given = given_path(self.pytest_config, option.forge_html)
        try:
            html.write(given or self.settings.run_dir / "report.html", page)
        except UsageError as error:
            if given is not None:
                raise
            # Nobody asked for this file: the run is worth more than its page.
            self._summary.append(f"note: {error.what}")
        else:
            self._summary.append(f"report: {_shown(given or self.settings.run_dir / 'report.html')}")

    def _summarise(self, result: SessionResult) -> list[str]:
        from pytest_cudaforge.display import summary_lines

        lines = summary_lines(result.traces, result.totals)
        lines += [f"note: {note}" for note in result.notes]
        if result.commit is not None:
            verb = "committed on" if result.commit.changed else "nothing new for"
            lines.append(f"{verb} branch {result.commit.branch} ({result.commit.sha[:12]})")
        return lines + self._summary

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = self._summarise(self.result) if self.result is not None else self._summary
        if lines:
            terminalreporter.section("forged kernels" if self.result is not None else "dry run")
        for line in lines:
            terminalreporter.write_line(line)

    def records_here(self) -> Records:
        """The session's records, wherever it ran. Raises ``ForgeError`` where a remote worker cannot see them."""
        if self.records is None:
            try:
                self.records = from_json(Records, json.loads(self.exchange.read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise ForgeError(
                    f"this worker cannot read the forging session's records: {error}",
                    expected="xdist workers on the controller's own machine",
                    remedy="run with -n N, or without xdist",
                ) from None
        assert self.records is not None
        return self.records

    def pytest_unconfigure(self) -> None:
        if not hasattr(self.pytest_config, "workerinput"):
            with contextlib.suppress(OSError):
                self.exchange.unlink()


def _line_of(record: Target | Problem) -> int:
    return record.line


def exchange_file() -> Path:
    """A new file for what the controller tells the workers."""
    handle, name = tempfile.mkstemp(prefix="cudaforge-records-", suffix=".json")
    os.close(handle)
    return Path(name)


def given_path(config: pytest.Config, name: str | None) -> Path | None:
    """A file named on the command line, absolute."""
    return config.invocation_params.dir / name if name else None


def check_writable(path: Path | None, option: str) -> None:
    """Raises :class:`UsageError` before the work, not after it; folders that are missing are made later."""
    if path is None:
        return
    folder = next(parent for parent in path.parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{option}: {path} cannot be written", expected="a file in a folder that can be written")


def _shown(path: Path) -> str:
    """As somebody would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def scan_paths(config: pytest.Config) -> list[Path]:
    """The files and folders that pytest's arguments name, absolute, without what follows ``::`` or ``[``."""
    paths = []
    for argument in config.args:
        name = argument.partition("[")[0].partition("::")[0]
        path = Path(os.path.abspath(config.invocation_params.dir / name))
        if not path.exists() and config.option.pyargs:
            path = _package_path(name) or path
        paths.append(path)
    return paths


def _package_path(name: str) -> Path | None:
    from importlib.util import find_spec

    try:
        spec = find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    if spec is None or not spec.origin:
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def forge_config(config: pytest.Config) -> ForgeConfig:
    """cudaforge.yaml < environment < pytest's ini file and command line. Raises ``ConfigError``."""
    from pytest_cudaforge.config import load

    settings = ("device", "arch", "rounds", "config", "isolation", "profile", "max_usd", "max_minutes", "workloads")
    options: dict[str, object] = {name: config.getoption("forge_" + name) for name in settings}
    if options["config"] is not None:  # a path that was typed is one from where it was typed
        options["config"] = str(config.invocation_params.dir / str(options["config"]))
    options["chat.coder.provider"] = config.getoption("forge_coder")
    if config.getini("forge_paths"):
        options["forge_paths"] = [str(path) for path in config.getini("forge_paths")]
    if config.getini("forge_dir"):
        options["forge_dir"] = str(config.rootpath / str(config.getini("forge_dir")))
    return load(options, root=config.rootpath, start=search_start(config), environ=os.environ)


def with_own_runs(settings: ForgeConfig) -> ForgeConfig:
    """For some workloads alone: rounds that were measured on others are not to be resumed."""
    if settings.workloads is None:
        return settings
    patterns = sorted(settings.workloads)
    readable = re.sub(r"[^A-Za-z0-9]+", "_", "-".join(patterns)).strip("_")[:40]
    name = f"workloads-{readable}-{hashlib.sha256(json.dumps(patterns).encode()).hexdigest()[:6]}"
    return replace(settings, run_dir=settings.run_dir / name)


def search_start(config: pytest.Config) -> Path:
    """Where the search for cudaforge.yaml begins, upwards: the folder that all paths given share, as pytest finds its
    own ini file; without any, the working directory."""
    here = config.invocation_params.dir
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        return here
    given = [path for argument in config.args if (path := here / argument.partition("::")[0]).exists()]
    shared = Path(os.path.commonpath(given)) if given else here
    return shared if shared.is_dir() else shared.parent
