"""The order of a whole run of the guard: worktree, trusted settings, kernel by kernel, what is gone, history."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_cudaforge import trusted
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.guard import Thresholds
from pytest_cudaforge.guard_options import BaseOptions, read_base_options
from pytest_cudaforge.guard_session import BaseTree, GuardedKernel, GuardSession, Runner
from pytest_cudaforge.guarded import Change, GuardRecord, GuardReport
from pytest_cudaforge.machine import describe
from pytest_cudaforge.merge_base import MergeBase, changed_files, worktree
from pytest_cudaforge.plugin import MANIFEST_NAME, forge_dir
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime.manifest import Manifest

__all__ = ["guard_all"]


def guard_all(
    config: pytest.Config,
    settings: ForgeConfig,
    base: MergeBase,
    changes: tuple[Change, ...],
    kernels: Sequence[GuardedKernel],
    publish: Callable[[GuardReport], None],
    on_record: Callable[[GuardRecord], None],
) -> None:
    """Decide all kernels; ``publish`` gets the report after each, ``on_record`` each answer. Raises ForgeError for what
    meets every kernel: no device, no sandbox, no git."""
    report = GuardReport(base=f"{base.ref} at {base.told}", base_sha=base.sha)
    publish(report)
    with worktree(base) as folder:
        root = folder / base.prefix
        options = read_base_options(config, root)
        settings, report = _settled(config, settings, options, replace(report, changes=changes))
        at_base = options.forge_dir if isinstance(options, BaseOptions) else root / "forged"
        tree = BaseTree(base, root, at_base)
        report = replace(
            report,
            changes=(*report.changes, *trusted.suspicious_files(changed_files(base))),
            removed=_removed(tree, forge_dir(config)),
            strict=settings.guard.inconclusive == "fail",
        )
        publish(report)
        runners: dict[str, Runner] = {}

        def runner_of(facts: DeviceFacts) -> Runner:
            runners[facts.arch] = _runner(settings, facts)
            return runners[facts.arch]

        paths = [str(path) for path in config.getini("pythonpath")]
        with GuardSession(settings, config.rootpath, tree, runner_of, on_record, paths, dict(os.environ)) as session:
            for kernel in kernels:
                report = replace(report, records=(*report.records, *session.decide(kernel)))
                report = replace(report, machine=_joined(one.machine.text for one in runners.values()))
                report = replace(report, runner=_joined(one.text for one in runners.values()))
                publish(report)
                if config.option.maxfail == 1 and report.count(*report.failing):
                    break


def _settled(
    config: pytest.Config, settings: ForgeConfig, options: BaseOptions | str, report: GuardReport
) -> tuple[ForgeConfig, GuardReport]:
    """The settings that count; what the head says otherwise goes into the report."""
    if isinstance(options, str):
        note = f"the merge base's settings cannot be read, today's were used: {options}"
        return settings, replace(report, notes=(*report.notes, note))
    settings, changes = options.trusted(settings)
    return settings, replace(report, changes=(*report.changes, *changes))


def _runner(settings: ForgeConfig, facts: DeviceFacts) -> Runner:
    given = settings.guard
    thresholds = Thresholds(given.relative, given.absolute_us * 1e3, promise_margin=given.promise_margin)
    return Runner(facts, describe(facts), thresholds, "not calibrated: `cudaforge calibrate` measures its noise")


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _removed(tree: BaseTree, folder: Path) -> tuple[str, ...]:
    """Kernels that the merge base has and the head has not."""
    path = folder / MANIFEST_NAME
    try:
        before = Manifest.load(tree.forge_dir / MANIFEST_NAME).entries
        now = {entry.key for entry in Manifest.load(path).entries} if path.is_file() else set()
    except UsageError:
        return ()
    gone = [entry for entry in before if entry.key not in now]
    return tuple(f"{entry.target} ({entry.language}, {entry.arch})" for entry in gone)
