"""One run of the guard: each selected kernel verified, raced against its merge base and its reference, and decided.

The order of the stages is here, the decision in :mod:`pytest_cudaforge.guard`, the measuring in the evaluator. What
decides (settings, promises, a target's terms) is the merge base's; see :mod:`pytest_cudaforge.trusted`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pytest_cudaforge import guard, hardware, languages, machine, merge_base, reach, trusted
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import DeviceError, OracleError, StaleEntry, ToolchainError, UsageError
from pytest_cudaforge.guard import Circumstances, Finding, Promises, Thresholds
from pytest_cudaforge.guarded import Cause, Change, GuardRecord, Verdict
from pytest_cudaforge.kernel_cases import Case, Inspector, NotHere, repo_root, target_of
from pytest_cudaforge.records import Candidate, DeviceFacts, Race, RaceFailure, Target
from pytest_cudaforge.runtime.manifest import Entry, EntryWorkload, Manifest
from pytest_cudaforge.wiring import cache_dir, open_evaluator

if TYPE_CHECKING:
    from pytest_cudaforge.config import ForgeConfig
    from pytest_cudaforge.evaluation.evaluator import Evaluator
    from pytest_cudaforge.evaluation.oracle import OracleClient
    from pytest_cudaforge.evaluation.race import Reference
    from pytest_cudaforge.merge_base import MergeBase

__all__ = ["BaseTree", "GuardSession", "GuardedKernel", "Runner"]

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class GuardedKernel:
    """A kernel, some of whose items were selected. ``place``: its file's id, with which its items' ids begin. ``cases``
    and ``races``: names of workloads, of those that are to be verified and of those that are to be raced as well."""

    place: str
    manifest: Path
    entry: Entry
    cases: tuple[str, ...] = ()
    races: tuple[str, ...] = ()

    @property
    def workloads(self) -> tuple[EntryWorkload, ...]:
        """All that were selected, in the manifest's order."""
        return tuple(one for one in self.entry.workloads if one.name in (*self.cases, *self.races))

    def items(self, workload: str) -> Iterator[tuple[str, bool]]:
        """Ids of the selected items of a workload, and whether they ask for a race."""
        if workload in self.cases:
            yield f"{self.place}::case[{workload}]", False
        if workload in self.races:
            yield f"{self.place}::guard[{workload}]", True


@dataclass(frozen=True)
class Runner:
    """What is known of the machine that races: ``text`` of its calibration, and whether its word counts."""

    facts: DeviceFacts
    machine: machine.Machine
    thresholds: Thresholds
    text: str
    fit: bool = True

    @property
    def told(self) -> str:
        """``NVIDIA H200 (sm_90, id 1a2b3c4d), 16 cores of Intel Xeon: fit; false alarms 0 of 60, ...``"""
        return f"{self.machine.hardware}: {self.text}"


@dataclass(frozen=True)
class BaseTree:
    """The merge base's files: rootdir in its worktree, and where its kernels lie there."""

    commit: MergeBase
    root: Path
    forge_dir: Path

    def manifest_of(self, head: Path, root: Path) -> Path | None:
        """The merge base's manifest for the head's ``head``: at the same place, else where it kept its kernels."""
        places = [self.root / head.relative_to(root)] if head.is_relative_to(root) else []
        return next((path for path in [*places, self.forge_dir / MANIFEST] if path.is_file()), None)

    def target_like(self, target: Target, root: Path) -> Target | None:
        """The merge base's version of a target; None where it has none."""
        own = Path(target.root)
        if not own.is_relative_to(root):
            return None
        # Paths of entries may begin at a folder below rootdir.
        there = self.root / own.relative_to(root)
        path = there / target.path
        found = discover([path], there).targets if path.is_file() else ()
        return next((one for one in found if one.id == target.id), None)

    @functools.cached_property
    def manifests(self) -> dict[Path, Manifest]:
        return {}

    def entries(self, manifest: Path | None) -> tuple[Entry, ...]:
        """Raises ConfigError where the merge base's manifest cannot be read."""
        if manifest is None:
            return ()
        if manifest not in self.manifests:
            self.manifests[manifest] = Manifest.load(manifest)
        return self.manifests[manifest].entries


@dataclass(frozen=True)
class _Entrant:
    """A kernel ready to be raced. ``base`` None: new, or the same byte for byte (``since`` names the commit then), or
    not to be had although there is one (``compared`` asks for it all the same)."""

    kernel: GuardedKernel
    target: Target
    candidate: Candidate
    base: Candidate | None
    since: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    promises: Mapping[str, Promises]
    compared: bool


@dataclass(frozen=True)
class Raced:
    """What the history keeps: races and what was found in them. ``kernel``: digest of the kernel, of a plain module
    that of its source; ``language``: "" of a plain module."""

    target: Target
    kernel: str
    language: str
    runner: Runner
    races: tuple[Race, ...]
    findings: tuple[Finding, ...]


class _Failed(Exception):
    """The kernel did not come through the race."""


@dataclass
class GuardSession:
    """A context manager: its children end with it. ``settings`` are trusted ones. ``runner_of`` says what is known of a
    device; ``on_record`` is told each answer at once."""

    settings: ForgeConfig
    root: Path
    base: BaseTree
    runner_of: Callable[[DeviceFacts], Runner]
    on_record: Callable[[GuardRecord], None]
    python_paths: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    raced: list[Raced] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _evaluators: dict[str, Evaluator] = field(default_factory=dict)
    _runners: dict[str, Runner] = field(default_factory=dict)
    _terms: dict[str, tuple[Target, tuple[Change, ...], tuple[str, ...]]] = field(default_factory=dict)
    _base_oracle: OracleClient | None = None

    def __post_init__(self) -> None:
        self._inspector = Inspector(self.root, self._evaluator, lambda target: self._on_trusted_terms(target)[0])

    def __enter__(self) -> GuardSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- one kernel

    def decide(self, kernel: GuardedKernel) -> tuple[GuardRecord, ...]:
        """A record for each selected item. Raises the evaluator's errors that would meet every kernel."""
        began = time.perf_counter()
        records = [record for workload in kernel.workloads for record in self._verified(kernel, workload)]
        right = [record.workload for record in records if record.raced and record.outcome == "pass"]
        answers = self._answers(kernel, right) if right else {}
        records = [answers.get(record.id, record) for record in records]
        share = round((time.perf_counter() - began) / max(1, len(records)), 3)
        records = [replace(record, seconds=share) for record in records]
        for record in records:
            self.on_record(record)
        return tuple(records)

    def _verified(self, kernel: GuardedKernel, workload: EntryWorkload) -> list[GuardRecord]:
        """Is it right? On the terms of the merge base."""
        from pytest_cudaforge.display import evaluation_text

        outcome: Verdict
        cause: Cause = ""
        grade = ""
        try:
            verdict = self._inspector.check(Case(kernel.manifest, kernel.entry, workload))
            outcome, text = ("pass", "correct") if verdict.evaluation.passed and not verdict.wider else ("failed", "")
            grade = verdict.evaluation.isolation.grade
            text = text or "\n".join(filter(None, (verdict.wider, evaluation_text(verdict.evaluation))))
        except StaleEntry as error:
            outcome, cause, text = "skipped", "stale", str(error)
        except NotHere as error:
            outcome, cause, text = "skipped", "absent", str(error)
        except ToolchainError:
            text = _missing_toolchain(kernel.entry.language)
            if not text:
                raise
            outcome, cause = "skipped", "toolchain"
        except (UsageError, OracleError) as error:
            outcome, text = "failed", str(error)
        text = text.replace(f"{self.root}/", "")
        records = [self._record(kernel, workload.name, item, raced) for item, raced in kernel.items(workload.name)]
        told = {"reason": text.splitlines()[0], "text": text, "isolation": grade}
        changes = self._outgrown(kernel) if cause == "stale" else () if cause else self._changes_of(kernel)
        known = {"outcome": outcome, "cause": cause, "changes": changes, **told}
        return [replace(record, **known) for record in records]  # type: ignore[arg-type]

    def _outgrown(self, kernel: GuardedKernel) -> tuple[Change, ...]:
        """That the kernel's reference has changed since the merge base: this very change made the kernel stale."""
        entry = kernel.entry
        try:
            root = repo_root(kernel.manifest, entry, self.root)
        except StaleEntry:
            return ()
        found = discover([root / entry.path], root).targets
        now = next((target for target in found if target.id == entry.target), None)
        before = self.base.target_like(now, self.root) if now is not None else None
        if now is None or before is None or before.digest == now.digest:
            return ()
        return (Change(now.id, "source", before.digest[:12], now.digest[:12], obeyed=True),)

    def _answers(self, kernel: GuardedKernel, names: Sequence[str]) -> dict[str, GuardRecord]:
        """By item: how fast it is, of the workloads on which it is right."""
        evaluator, runner = self._evaluator(_device(kernel.entry.arch)), self._runner(kernel.entry.arch)
        entrant = self._entrant(kernel, names, runner)
        records = [self._record(kernel, name, item, True) for name, item in _races_of(kernel, names)]
        records = [replace(one, changes=entrant.changes, notes=entrant.notes, since=entrant.since) for one in records]
        try:
            races, findings = two_sittings(
                lambda chosen: self._raced(evaluator, entrant, chosen or names),
                lambda race: guard.assess(race, entrant.promises[race.workload], runner.thresholds),
                names,
            )
        except _Failed as error:
            return {one.id: replace(one, outcome="failed", reason=str(error), text=str(error)) for one in records}
        digest, language = entrant.candidate.digest, entrant.candidate.language
        self.raced.append(Raced(entrant.target, digest, language, runner, races, findings))
        answers = []
        for record in records:
            own = [finding for finding in findings if finding.workload == record.workload]
            notes = [note for race in races if race.workload == record.workload for note in race.notes]
            answer = self._since(self._answer(runner, record, own, notes), entrant)
            asked = entrant.compared and not any(finding.question == "base" for finding in own)
            answers.append(_uncompared(answer) if asked and answer.outcome == "pass" else answer)
        return {record.id: record for record in answers}

    def _since(self, record: GuardRecord, entrant: _Entrant) -> GuardRecord:
        """Which commits may have made it slower."""
        if record.outcome not in ("regression", "unfit"):
            return record
        entry = entrant.kernel.entry
        places = (entrant.kernel.manifest.parent / entry.directory, Path(entrant.target.root) / entry.path)
        inside = [place.relative_to(self.root) for place in places if place.is_relative_to(self.root)]
        paths = [self.base.commit.prefix / place for place in inside]
        if not paths:
            return record
        commits = merge_base.commits_since(self.base.commit, paths)
        note = f"kernel and target were changed since by {', '.join(commits)}" if commits else ""
        return replace(record, notes=(*record.notes, note)) if note else record

    def _raced(self, evaluator: Evaluator, entrant: _Entrant, names: Sequence[str]) -> tuple[Race, ...]:
        """One sitting of each workload, in fresh processes. Raises _Failed."""
        races = evaluator.race(
            entrant.candidate,
            entrant.target,
            base=entrant.base,
            budget_s=self.settings.timing_budget_s,
            references=_promised(entrant, names),
            workloads=names,
        )
        if isinstance(races, RaceFailure):
            raise _Failed(f"{races.workload}: {races.status.value} in the race: {races.reason}")
        return races

    # -- one plain module

    def decide_module(self, item: str, target: Target) -> GuardRecord:
        """A module without a forged kernel, against its version at the merge base."""
        began = time.perf_counter()
        command = f"pytest --forge-guard --forge-base {self.base.commit.short} '{item}'"
        record = GuardRecord(item, target.id, "", "cancelled", command=command)
        try:
            record = self._module_answer(record, target)
        except (UsageError, OracleError) as error:
            record = replace(record, outcome="failed", reason=error.what, text=str(error))
        record = replace(record, seconds=round(time.perf_counter() - began, 3))
        self.on_record(record)
        return record

    def _module_answer(self, record: GuardRecord, target: Target) -> GuardRecord:
        base = self.base.target_like(target, self.root)
        if base is None:
            reason = "new: the merge base has nothing to compare it with"
            return replace(record, outcome="skipped", cause="new", reason=reason, text=reason)
        changed = reach.difference(target, base, self.python_paths)
        if not changed:
            reason = "all that its import runs of the repo is the merge base's"
            return replace(record, outcome="pass", reason=reason, text=reason, since=self.base.commit.short)
        device = hardware.choose(self.settings.device)
        runner, evaluator = self._runner_of(device), self._evaluator(device)
        if target.guard is None and not evaluator.guarded(target):
            reason = "its mark says guard=False, as importing it tells"
            return replace(record, outcome="skipped", cause="unasked", reason=reason, text=reason)
        moved, changes, notes = self._on_trusted_terms(target)
        races, findings = two_sittings(
            lambda chosen: evaluator.race_modules(
                moved, base, workloads=chosen, budget_s=self.settings.timing_budget_s
            ),
            lambda race: guard.assess(race, Promises(), runner.thresholds),
            None,
        )
        self.raced.append(Raced(target, target.digest, "", runner, races, findings))
        record = replace(record, arch=runner.facts.arch, changes=changes, notes=(*notes, changed))
        apart = [f"{race.workload or 'all workloads'}: {race.disturbed}" for race in races if not race.blocks]
        answer = self._answer(runner, record, findings, [*apart, *(note for race in races for note in race.notes)])
        return _uncompared(answer) if apart and answer.outcome == "pass" else answer

    # -- what is raced

    def _entrant(self, kernel: GuardedKernel, names: Sequence[str], runner: Runner) -> _Entrant:
        entry = kernel.entry
        candidate = Candidate.of(entry.language, entry.sources(kernel.manifest))
        target, _, notes = self._on_trusted_terms(target_of(entry, repo_root(kernel.manifest, entry, self.root)))
        manifest, found, unread = self._at_base(kernel)
        base, missing = _candidate_of(manifest, found)
        since = self._unchanged_since(manifest, found) if base is not None and base.digest == candidate.digest else ""
        return _Entrant(
            kernel,
            target,
            candidate,
            None if since else base,
            since,
            self._changes_of(kernel),
            (*notes, *unread, *missing),
            {name: self._promises(kernel, manifest, found, name, runner) for name in names},
            compared=found is not None and not since,
        )

    def _at_base(self, kernel: GuardedKernel) -> tuple[Path | None, Entry | None, tuple[str, ...]]:
        """The merge base's manifest and entry of this kernel, and why they are not there."""
        manifest = self.base.manifest_of(kernel.manifest, self.root)
        try:
            entries = self.base.entries(manifest)
        except UsageError as error:
            return None, None, (f"the merge base's manifest cannot be read: {error.what}",)
        return manifest, next((one for one in entries if one.key == kernel.entry.key), None), ()

    def _changes_of(self, kernel: GuardedKernel) -> tuple[Change, ...]:
        _, found, _ = self._at_base(kernel)
        changes = trusted.promise_changes(kernel.entry, found) + trusted.guard_changes(kernel.entry, found)
        known = (changed for target, changed, _ in self._terms.values() if target.id == kernel.entry.target)
        return next(known, ()) + changes

    def _on_trusted_terms(self, target: Target) -> tuple[Target, tuple[Change, ...], tuple[str, ...]]:
        """The target on the terms of the merge base's version of it, what changed, and notes. That version is imported
        only where something that its import runs differs."""
        if target.id not in self._terms:
            self._terms[target.id] = self._found_terms(target)
        return self._terms[target.id]

    def _found_terms(self, target: Target) -> tuple[Target, tuple[Change, ...], tuple[str, ...]]:
        old = self.base.target_like(target, self.root)
        if old is None or not reach.difference(target, old, self.python_paths):
            return target, (), ()
        changed: tuple[Change, ...] = ()
        if old.digest != target.digest:
            changed = (Change(target.id, "source", old.digest[:12], target.digest[:12], obeyed=True),)
        try:
            theirs = self._oracle_of_base().terms(old)
            ours = self._any_evaluator().oracle.terms(target)
        except (UsageError, OracleError, DeviceError) as error:
            note = f"the merge base's options of {target.id} cannot be read, today's were used: {error.what}"
            return target, changed, (note,)
        terms, changes = trusted.trusted_terms(target.id, theirs, ours)
        return replace(target, terms=terms), (*changed, *changes), ()

    def _unchanged_since(self, manifest: Path | None, entry: Entry | None) -> str:
        assert manifest is not None and entry is not None
        folder = (manifest.parent / entry.directory).relative_to(self.base.root)
        return merge_base.last_change(self.base.commit, self.base.commit.prefix / folder)

    def _promises(
        self, kernel: GuardedKernel, manifest: Path | None, found: Entry | None, name: str, runner: Runner
    ) -> Promises:
        """The merge base's where it knows the workload, else the head's own."""
        known = found is not None and any(one.name == name for one in found.workloads)
        entry, place = (found, manifest) if known else (kernel.entry, kernel.manifest)
        assert entry is not None and place is not None
        promised = next(one for one in entry.workloads if one.name == name)
        return Promises.of(
            *promised.promised,
            measured_on=(_measured_on(entry, place), entry.torch),
            here=(_device_told(runner.facts), runner.machine.toolchain.torch),
        )

    # -- answers

    def _record(self, kernel: GuardedKernel, name: str, item: str, raced: bool) -> GuardRecord:
        return GuardRecord(
            item,
            kernel.entry.target,
            name,
            "cancelled",
            raced,
            language=kernel.entry.language,
            arch=kernel.entry.arch,
            command=f"pytest --forge-guard --forge-base {self.base.commit.short} '{item}'",
        )

    def _answer(
        self, runner: Runner, record: GuardRecord, findings: Sequence[Finding], notes: Sequence[str]
    ) -> GuardRecord:
        """``record`` with what was found, and the notes of its races."""
        commit = self.base.commit
        told = Circumstances(
            kernel=record.id,
            machine=runner.machine.text,
            command=record.command,
            base=f"{commit.ref} at {commit.told}",
            runner=runner.text,
        )
        outcome = _outcome(findings, runner.fit)
        return replace(
            record,
            outcome=outcome,
            reason=_reason(findings, record.since, outcome) if findings or not notes else notes[0],
            findings=tuple(findings),
            text=_text(findings, record.since, told),
            notes=tuple(dict.fromkeys((*record.notes, *notes))),
        )

    # -- devices and children

    def _runner(self, arch: str) -> Runner:
        return self._runner_of(_device(arch))

    def _runner_of(self, device: str) -> Runner:
        if device not in self._runners:
            self._runners[device] = self.runner_of(hardware.detect_in_child(device))
        return self._runners[device]

    def _evaluator(self, device: str) -> Evaluator:
        if device not in self._evaluators:
            opened = open_evaluator(self.settings, device=device, python_paths=(*self.python_paths, self.root))
            self._evaluators[device] = self._stack.enter_context(opened)
        return self._evaluators[device]

    def _any_evaluator(self) -> Evaluator:
        return next(iter(self._evaluators.values()), None) or self._evaluator("cpu")

    def _oracle_of_base(self) -> OracleClient:
        """Imports the merge base's files: in a process of its own, since their names are the head's."""
        if self._base_oracle is None:
            from pytest_cudaforge.evaluation.oracle import OracleClient

            paths = (*self._moved(self.python_paths), str(self.base.root))
            client = OracleClient("cpu", cache_dir=cache_dir(self.environ), python_paths=paths)
            self._base_oracle = self._stack.enter_context(client)
        return self._base_oracle

    def _moved(self, paths: Sequence[str]) -> Iterator[str]:
        """The same places in the merge base's tree."""
        for path in map(Path, paths):
            yield str(self.base.root / path.relative_to(self.root) if path.is_relative_to(self.root) else path)


def two_sittings(
    race: Callable[[Sequence[str] | None], tuple[Race, ...]],
    assess: Callable[[Race], tuple[Finding, ...]],
    workloads: Sequence[str] | None,
) -> tuple[tuple[Race, ...], tuple[Finding, ...]]:
    """What one sitting says; where it suspects something, what independent ones confirm. The races are the first."""
    races = race(workloads)
    first = [finding for one in races for finding in assess(one)]
    names = dict.fromkeys(finding.workload for finding in first)
    sittings = {name: [[finding for finding in first if finding.workload == name]] for name in names}
    while suspected := tuple(name for name, said in sittings.items() if guard.unsettled(said)):
        again = [finding for one in race(suspected) for finding in assess(one)]
        for name in suspected:
            sittings[name].append([finding for finding in again if finding.workload == name])
    return races, tuple(finding for said in sittings.values() for finding in guard.confirm(*said))


def _device(arch: str) -> str:
    return "cpu" if arch == "cpu" else "cuda:0"


def _missing_toolchain(language: str) -> str:
    """Why this machine cannot build the language, by its own word: not one that a candidate's source brought about."""
    return languages.load(language).availability() if language in languages.LANGUAGES else ""


def _promised(entrant: _Entrant, names: Sequence[str]) -> tuple[Reference, ...]:
    """What the kernel is raced against besides its base: nothing is compiled where no promise is about that."""
    compiled = any(entrant.promises[name].compile is not None for name in names)
    return ("eager", "compile") if compiled else ("eager",)


def _races_of(kernel: GuardedKernel, names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, item) for name in names for item, raced in kernel.items(name) if raced]


def _candidate_of(manifest: Path | None, entry: Entry | None) -> tuple[Candidate | None, tuple[str, ...]]:
    """The merge base's kernel, or a note why it is not to be had."""
    if manifest is None or entry is None:
        return None, ()
    try:
        return Candidate.of(entry.language, entry.sources(manifest)), ()
    except UsageError as error:
        return None, (f"the merge base's kernel was left out: {error.what}",)


# -- words -------------------------------------------------------------------------------------------------------


_NAMES = {"base": "against its version at the merge base", "eager": "against eager", "compile": "against torch.compile"}
_ORDER: tuple[guard.GuardOutcome, ...] = ("regression", "inconclusive", "pass")


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _ORDER.index(finding.outcome))


def _outcome(findings: Sequence[Finding], fit: bool) -> Verdict:
    if not findings:
        return "inconclusive"
    worst = _worst_first(findings)[0].outcome
    return "unfit" if worst == "regression" and not fit else worst


def _reason(findings: Sequence[Finding], since: str, outcome: Verdict) -> str:
    if not findings:
        return "nothing was measured"
    if outcome == "pass":
        parts = [_short(finding) for finding in findings]
        return ", ".join([*parts, f"unchanged since {since}"] if since else parts)
    worst = _worst_first(findings)[0].text
    return f"this runner is unfit and decides nothing: {worst}" if outcome == "unfit" else worst


def _text(findings: Sequence[Finding], since: str, told: Circumstances) -> str:
    """The worst answer in full, the others in a line each."""
    lines = [f"its version at the merge base is the same: unchanged since {since}"] if since else []
    for place, finding in enumerate(_worst_first(findings)):
        if not place:
            lines.append(guard.describe(finding, told))
        else:
            call = " (a call with its gradients)" if finding.what == "backward" else ""
            lines.append(f"  {_NAMES[finding.question]}{call}: {finding.outcome}: {finding.text}")
    return "\n".join(lines) or "nothing was measured"


def _uncompared(record: GuardRecord) -> GuardRecord:
    """There is a version at the merge base, and it could not be raced: what was not compared did not pass."""
    reason = "not held against its version at the merge base: " + (
        record.notes[0] if record.notes else "it did not run"
    )
    return replace(record, outcome="inconclusive", reason=reason, text=f"{reason}\n{record.text}")


def _short(finding: Finding) -> str:
    if finding.question == "base":
        return f"{finding.slowdown.speedup:.3f}x the base's time"
    return f"{finding.slowdown.speedup:.2f}x {finding.question}"


def _measured_on(entry: Entry, manifest: Path) -> str:
    """The device that the entry's promises were measured on; of a CPU its verdict tells it."""
    if entry.arch != "cpu":
        return entry.device
    try:
        verdict = json.loads((manifest.parent / entry.directory / "evaluation.json").read_text(encoding="utf-8"))
        told = dict(verdict["environment"])
        return f"{told['device']} with {told['threads']} threads"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _device_told(facts: DeviceFacts) -> str:
    """As :func:`_measured_on` says it: what a reference gains by more threads is not what a kernel does."""
    if facts.kind == "cuda":
        return facts.name
    return f"{facts.name} with {len(os.sched_getaffinity(0))} threads"
