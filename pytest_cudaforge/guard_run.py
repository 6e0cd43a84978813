"""The order of a whole run of the guard: worktree, trusted settings, kernel by kernel, what is gone, history."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_cudaforge import calibration, history, trusted
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import StoreError, UsageError
from pytest_cudaforge.forging import given_path
from pytest_cudaforge.guard_options import BaseOptions, read_base_options
from pytest_cudaforge.guard_session import BaseTree, GuardedKernel, GuardSession, Raced, Runner
from pytest_cudaforge.guarded import Change, GuardRecord, GuardReport
from pytest_cudaforge.machine import describe
from pytest_cudaforge.merge_base import MergeBase, changed_files, worktree
from pytest_cudaforge.plugin import MANIFEST_NAME, forge_dir
from pytest_cudaforge.records import DeviceFacts, Target
from pytest_cudaforge.runtime.manifest import Manifest
from pytest_cudaforge.wiring import cache_dir

__all__ = ["guard_all", "runner_of"]


def guard_all(
    config: pytest.Config,
    settings: ForgeConfig,
    base: MergeBase,
    changes: tuple[Change, ...],
    kernels: Sequence[GuardedKernel],
    modules: Sequence[tuple[str, Target]],
    publish: Callable[[GuardReport], None],
    on_record: Callable[[GuardRecord], None],
) -> None:
    """Decide all kernels, and all modules (an item's id and the target).

    ``publish`` gets the report after each, ``on_record`` each answer. Raises ForgeError for what meets every kernel: no
    device, no sandbox, no git.
    """
    report = GuardReport(base=f"{base.ref} at {base.told}", base_sha=base.sha)
    publish(report)
    with worktree(base) as folder:
        root = folder / base.prefix
        options = read_base_options(config, root)
        settings, report = _settled(config, settings, options, replace(report, changes=changes))
        at_base = options.forge_dir if isinstance(options, BaseOptions) else root / "forged"
        tree = BaseTree(base, root, at_base)
        changed = changed_files(base)
        unguarded = _unguarded(changed, root, config.rootpath, base.prefix)
        report = replace(
            report,
            changes=(*report.changes, *trusted.suspicious_files(changed), *unguarded),
            removed=_removed(tree, forge_dir(config)),
            strict=settings.guard.inconclusive == "fail",
        )
        publish(report)
        runners: dict[str, Runner] = {}

        def known(facts: DeviceFacts) -> Runner:
            runners[facts.arch] = runner_of(settings, facts)
            return runners[facts.arch]

        paths = [str(path) for path in config.getini("pythonpath")]
        with GuardSession(settings, config.rootpath, tree, known, on_record, paths, dict(os.environ)) as session:
            decisions = [functools.partial(session.decide, kernel) for kernel in kernels]
            decisions += [functools.partial(_one, session, item, target) for item, target in modules]
            for decide in decisions:
                report = replace(report, records=(*report.records, *decide()))
                report = replace(report, machine=_joined(one.machine.text for one in runners.values()))
                report = replace(report, runner=_joined(one.text for one in runners.values()))
                publish(report)
                if config.option.maxfail == 1 and report.count(*report.failing):
                    break
            given = given_path(config, config.option.forge_history)
            publish(_with_history(report, session.raced, base, given or settings.history, settings.history_mb))


def _one(session: GuardSession, item: str, target: Target) -> tuple[GuardRecord, ...]:
    return (session.decide_module(item, target),)


def _settled(
    config: pytest.Config, settings: ForgeConfig, options: BaseOptions | str, report: GuardReport
) -> tuple[ForgeConfig, GuardReport]:
    """The settings that count; what the head says otherwise goes into the report."""
    if isinstance(options, str):
        note = f"the merge base's settings cannot be read, today's were used: {options}"
        return settings, replace(report, notes=(*report.notes, note))
    settings, changes = options.trusted(settings)
    return settings, replace(report, changes=(*report.changes, *changes))


@functools.lru_cache(maxsize=4)
def _calibration(facts: DeviceFacts, folder: Path) -> calibration.Calibration | None:
    # It keeps every block it was reckoned from, and both the header and the race want it.
    return calibration.load(facts, folder)


def runner_of(settings: ForgeConfig, facts: DeviceFacts) -> Runner:
    """What calibration says of this machine, and the thresholds that follow from it and from the settings."""
    known, given = _calibration(facts, cache_dir(os.environ)), settings.guard
    thresholds = calibration.thresholds_from(
        known,
        facts.kind,
        relative=given.relative,
        absolute_ns=given.absolute_us * 1e3,
        promise_margin=given.promise_margin,
    )
    text = known.text if known is not None else "not calibrated (cudaforge calibrate measures its false alarms)"
    return Runner(facts, describe(facts), thresholds, text, fit=known is None or known.fit)


def _with_history(
    report: GuardReport, raced: Sequence[Raced], base: MergeBase, path: Path, megabytes: float
) -> GuardReport:
    """What the run says beside earlier ones; its own measurements are added to them. A history that cannot be read or
    written fails nothing; one that this very change brings along excuses nothing."""
    runs = {one.runner.machine: history.new_run(one.runner.machine, base.head, base.sha) for one in raced}
    samples = [sample for one in raced for sample in _samples(one, runs[one.runner.machine])]
    if not samples:
        return report
    own = _is_changed(path, base)
    try:
        past = history.read(path)
        history.append(path, samples, max_bytes=int(megabytes * 1e6))
    except StoreError as error:
        return replace(report, notes=(*report.notes, f"the history was not kept: {error.what}"))
    found = history.alarms(past.measurements, samples, raced[0].runner.thresholds)
    report = replace(report, alarms=history.lines(found), notes=(*report.notes, *past.notes))
    if own:
        note = f"{path.name} is not what it is at the merge base: whatever it says, regressions count"
        return replace(report, notes=(*report.notes, note))
    records = tuple(_doubted(record, history.doubtful(found, record.target)) for record in report.records)
    return replace(report, records=records)


def _is_changed(path: Path, base: MergeBase) -> bool:
    """Is it a tracked file that differs from the merge base's?"""
    place = path.resolve()
    return place.is_relative_to(base.top) and place.relative_to(base.top).as_posix() in changed_files(base)


def _samples(raced: Raced, run: history.GuardRun) -> Iterator[history.Measurement]:
    for race in raced.races:
        sample = history.measured(
            race,
            raced.findings,
            run=run,
            target=raced.target.id,
            target_digest=raced.target.digest,
            kernel=raced.kernel,
            language=raced.language,
        )
        if sample is not None:
            yield sample


def _doubted(record: GuardRecord, doubt: str) -> GuardRecord:
    """A promise that is broken on a sick runner says nothing; what is slower than its base is so all the same."""
    slower = any(one.question == "base" and one.outcome == "regression" for one in record.findings)
    if record.outcome != "regression" or slower or not doubt:
        return record
    reason = f"the runner may be at fault: {doubt}"
    return replace(record, outcome="inconclusive", reason=reason, text=f"{reason}\n{record.text}")


def _unguarded(changed: Sequence[str], base: Path, head: Path, prefix: Path) -> tuple[Change, ...]:
    """Modules that the merge base guards and the head does not, in the files that differ."""
    names = [Path(name).relative_to(prefix) for name in changed if Path(name).is_relative_to(prefix)]
    files = [name for name in names if name.suffix == ".py"]
    before = discover([base / name for name in files], base).targets
    now = {target.id for target in discover([head / name for name in files], head).targets if target.guard is not False}
    gone = [target.id for target in before if target.guard is not False and target.id not in now]
    return tuple(Change(name, "guard=True", "given", "gone", obeyed=True) for name in gone)


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
