"""One run of the guard: each selected kernel verified, raced against its merge base and its reference, and decided.

The order of the stages is here, the decision in :mod:`pytest_cudaforge.guard`, the measuring in the evaluator. What
decides (settings, promises, a target's terms) is the merge base's; see :mod:`pytest_cudaforge.trusted`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pytest_cudaforge import guard, hardware, machine, merge_base, trusted
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import DeviceError, OracleError, UsageError
from pytest_cudaforge.guard import Circumstances, Finding, Promises, Thresholds
from pytest_cudaforge.guarded import Change, GuardRecord, Verdict
from pytest_cudaforge.kernel_cases import repo_root, target_of
from pytest_cudaforge.records import Candidate, DeviceFacts, Evaluation, Race, RaceFailure, Target
from pytest_cudaforge.runtime.manifest import Entry, Manifest
from pytest_cudaforge.wiring import cache_dir, open_evaluator

if TYPE_CHECKING:
    from pytest_cudaforge.config import ForgeConfig
    from pytest_cudaforge.evaluation.evaluator import Evaluator
    from pytest_cudaforge.evaluation.oracle import OracleClient
    from pytest_cudaforge.merge_base import MergeBase

__all__ = ["BaseTree", "GuardSession", "GuardedKernel", "Runner"]

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class GuardedKernel:
    """A kernel, some of whose workloads were selected. ``place``: the id of its file, with which its items' ids begin."""

    place: str
    manifest: Path
    entry: Entry
    workloads: tuple[str, ...]

    def item(self, workload: str) -> str:
        return f"{self.place}::guard[{workload}]"


@dataclass(frozen=True)
class Runner:
    """What is known of the machine that races: ``text`` of its calibration, and whether its word counts."""

    facts: DeviceFacts
    machine: machine.Machine
    thresholds: Thresholds
    text: str
    fit: bool = True


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
        path = self.root / target.path
        if Path(target.root) != root:
            return None
        found = discover([path], self.root).targets if path.is_file() else ()
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
class _Case:
    """A kernel ready to be raced. ``base`` None: new, or the same byte for byte (``since`` names the commit then)."""

    kernel: GuardedKernel
    target: Target
    candidate: Candidate
    base_entry: Entry | None
    base: Candidate | None
    since: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    promises: Mapping[str, Promises]


@dataclass(frozen=True)
class Raced:
    """What the history keeps of a kernel: its races and what was found in them."""

    case: _Case
    runner: Runner
    races: tuple[Race, ...]
    findings: tuple[Finding, ...]


class _Settled(Exception):
    """The kernel's answer is known before any race."""

    def __init__(self, outcome: Verdict, reason: str, *, changes: Sequence[Change] = ()) -> None:
        super().__init__(reason)
        self.outcome, self.reason, self.changes = outcome, reason, tuple(changes)


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
    _runners: dict[str, Runner | str] = field(default_factory=dict)
    _base_oracle: OracleClient | None = None

    def __enter__(self) -> GuardSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- one kernel

    def decide(self, kernel: GuardedKernel) -> tuple[GuardRecord, ...]:
        """A record for each selected workload. Raises the evaluator's SituationErrors that would meet every kernel."""
        began = time.perf_counter()
        try:
            records = self._decided(kernel)
        except _Settled as settled:
            records = [self._settled(kernel, name, settled) for name in kernel.workloads]
        except (UsageError, OracleError) as error:
            records = [self._failed(kernel, name, str(error)) for name in kernel.workloads]
        share = round((time.perf_counter() - began) / max(1, len(records)), 3)
        records = [replace(record, seconds=share) for record in records]
        for record in records:
            self.on_record(record)
        return tuple(records)

    def _decided(self, kernel: GuardedKernel) -> list[GuardRecord]:
        runner = self._runner(kernel.entry)
        evaluator = self._evaluator(kernel.entry)
        case = self._case(kernel, evaluator, runner)
        evaluation = evaluator.evaluate(
            case.candidate, case.target, timing=False, workloads=kernel.workloads, guard=kernel.entry.guard
        )
        self._require_right(case, evaluation)
        grade = evaluation.isolation.grade
        return [replace(record, isolation=grade) for record in self._raced(case, evaluator, runner)]

    def _raced(self, case: _Case, evaluator: Evaluator, runner: Runner) -> list[GuardRecord]:
        names = case.kernel.workloads
        races = evaluator.race(case.candidate, case.target, base=case.base, workloads=names)
        if isinstance(races, RaceFailure):
            raise _failure(races, case)
        first = {race.workload: self._assessed(race, case, runner) for race in races}
        suspected = [name for name in names if guard.suspects(first.get(name, ()))]
        findings = {**first, **(self._confirmed(case, evaluator, runner, first, suspected) if suspected else {})}
        self.raced.append(Raced(case, runner, races, tuple(one for found in findings.values() for one in found)))
        by_name = {race.workload: race for race in races}
        return [self._answer(case, runner, name, findings.get(name, ()), by_name.get(name)) for name in names]

    def _assessed(self, race: Race, case: _Case, runner: Runner) -> tuple[Finding, ...]:
        return guard.assess(race, case.promises[race.workload], runner.thresholds)

    def _confirmed(
        self,
        case: _Case,
        evaluator: Evaluator,
        runner: Runner,
        first: Mapping[str, Sequence[Finding]],
        suspected: Sequence[str],
    ) -> dict[str, tuple[Finding, ...]]:
        """An independent sitting, in fresh processes, of what looks slower."""
        again = evaluator.race(case.candidate, case.target, base=case.base, workloads=suspected)
        if isinstance(again, RaceFailure):
            raise _failure(again, case)
        second = {race.workload: self._assessed(race, case, runner) for race in again}
        return {name: guard.confirm(first[name], second.get(name, ())) for name in suspected}

    # -- what is raced

    def _case(self, kernel: GuardedKernel, evaluator: Evaluator, runner: Runner) -> _Case:
        """Raises UsageError where the kernel is not what its manifest says."""
        entry = kernel.entry
        target = target_of(entry, repo_root(kernel.manifest, entry, self.root))
        candidate = Candidate.of(entry.language, entry.sources(kernel.manifest))
        manifest, notes = self.base.manifest_of(kernel.manifest, self.root), []
        found = None
        try:
            found = next((one for one in self.base.entries(manifest) if one.key == entry.key), None)
        except UsageError as error:
            notes.append(f"the merge base's manifest cannot be read: {error.what}")
        target, changes = self._on_trusted_terms(target, evaluator, notes)
        changes += trusted.promise_changes(entry, found) + trusted.guard_changes(entry, found)
        base = self._base_candidate(manifest, found, notes)
        since = self._unchanged_since(manifest, found, candidate, base)
        return _Case(
            kernel,
            target,
            candidate,
            found,
            None if since else base,
            since,
            changes,
            tuple(notes),
            {name: self._promises(kernel, manifest, found, name, runner) for name in kernel.workloads},
        )

    def _on_trusted_terms(
        self, target: Target, evaluator: Evaluator, notes: list[str]
    ) -> tuple[Target, tuple[Change, ...]]:
        """The target on the terms of the merge base's version of it, which has to be imported only where it differs."""
        old = self.base.target_like(target, self.root)
        if old is None or old.digest == target.digest:
            return target, ()
        changed = Change(target.id, "source", old.digest[:12], target.digest[:12], obeyed=True)
        try:
            theirs = self._oracle_of_base().terms(old)
        except (UsageError, OracleError, DeviceError) as error:
            notes.append(f"the merge base's options of {target.id} cannot be read, today's were used: {error.what}")
            return target, (changed,)
        terms, changes = trusted.trusted_terms(target.id, theirs, evaluator.oracle.terms(target))
        return replace(target, terms=terms), (changed, *changes)

    def _base_candidate(self, manifest: Path | None, entry: Entry | None, notes: list[str]) -> Candidate | None:
        if manifest is None or entry is None:
            return None
        try:
            return Candidate.of(entry.language, entry.sources(manifest))
        except UsageError as error:
            notes.append(f"the merge base's kernel was left out: {error.what}")
            return None

    def _unchanged_since(
        self, manifest: Path | None, entry: Entry | None, candidate: Candidate, base: Candidate | None
    ) -> str:
        if manifest is None or entry is None or base is None or base.digest != candidate.digest:
            return ""
        # The worktree lies below rootdir's place in the repo.
        folder = (manifest.parent / entry.directory).relative_to(self.base.root)
        return merge_base.last_change(self.base.commit, self.base.commit.prefix / folder)

    def _promises(
        self, kernel: GuardedKernel, manifest: Path | None, found: Entry | None, name: str, runner: Runner
    ) -> Promises:
        promised = trusted.promised_at_base(kernel.entry, found, name)
        if promised is None:
            return Promises()
        ours = found is None or all(one.name != name for one in found.workloads)
        entry, place = (kernel.entry, kernel.manifest) if ours or found is None else (found, manifest)
        assert place is not None
        return Promises.of(
            promised.speedup_eager,
            promised.speedup_compile,
            measured_on=(_measured_on(entry, place), entry.torch),
            here=(runner.facts.name, runner.machine.toolchain.torch),
        )

    def _require_right(self, case: _Case, evaluation: Evaluation) -> None:
        """Raises _Settled where the kernel is wrong, or its manifest allows what was not verified."""
        from pytest_cudaforge.display import evaluation_text

        if not evaluation.passed:
            raise _Settled("failed", evaluation_text(evaluation), changes=case.changes)
        # Nothing outside its guard was probed: one that is wider than what was found to be right is narrower here.
        verified = evaluation.verification.guard if evaluation.verification is not None else None
        if verified is not None and trusted.wider(case.kernel.entry.guard, verified):
            told = "; ".join(verified.reasons) or "see its guard"
            reason = f"its manifest entry lets dispatch use it where it is not right: {told}"
            raise _Settled("failed", reason, changes=case.changes)

    # -- answers

    def _answer(
        self, case: _Case, runner: Runner, name: str, findings: Sequence[Finding], race: Race | None
    ) -> GuardRecord:
        outcome = _outcome(findings, runner.fit)
        reason = _reason(findings, case, outcome, runner)
        record = self._record(case.kernel, name, outcome, reason)
        told = Circumstances(
            kernel=record.id,
            machine=runner.machine.text,
            command=record.command,
            base=f"{self.base.commit.ref} at {self.base.commit.told}",
            runner=runner.text,
        )
        notes = (*case.notes, *(race.notes if race is not None else ()))
        unraced = [f"against its version at the merge base: unchanged since {case.since}"] if case.since else []
        return replace(
            record,
            findings=tuple(findings),
            text="\n".join([*unraced, *(guard.describe(finding, told) for finding in _worst_first(findings))]),
            changes=case.changes,
            notes=notes,
            since=case.since,
        )

    def _record(self, kernel: GuardedKernel, name: str, outcome: Verdict, reason: str) -> GuardRecord:
        item = kernel.item(name)
        return GuardRecord(
            item,
            kernel.entry.target,
            name,
            outcome,
            reason,
            language=kernel.entry.language,
            arch=kernel.entry.arch,
            command=f"pytest --forge-guard --forge-base {self.base.commit.short} '{item}'",
        )

    def _settled(self, kernel: GuardedKernel, name: str, settled: _Settled) -> GuardRecord:
        record = self._record(kernel, name, settled.outcome, settled.reason.splitlines()[0])
        return replace(record, text=settled.reason, changes=settled.changes)

    def _failed(self, kernel: GuardedKernel, name: str, text: str) -> GuardRecord:
        return replace(self._record(kernel, name, "failed", text.splitlines()[0]), text=text)

    # -- devices

    def _runner(self, entry: Entry) -> Runner:
        """Raises _Settled where this kernel's hardware is not here."""
        device = self._device_name(entry.arch)
        if device not in self._runners:
            try:
                self._runners[device] = self.runner_of(hardware.detect_in_child(device))
            except DeviceError as error:
                self._runners[device] = error.what
        found = self._runners[device]
        if isinstance(found, str):
            raise _Settled("skipped", f"this kernel was made for {entry.arch}; {found}")
        if found.facts.arch != entry.arch:
            raise _Settled("skipped", f"this kernel was made for {entry.arch}; the GPU here is {found.facts.arch}")
        return found

    def _device_name(self, arch: str) -> str:
        if arch == "cpu":
            return "cpu"
        return self.settings.device if self.settings.device.startswith("cuda") else "cuda:0"

    def _evaluator(self, entry: Entry) -> Evaluator:
        device = self._device_name(entry.arch)
        if device not in self._evaluators:
            opened = open_evaluator(self.settings, device=device, python_paths=(*self.python_paths, self.root))
            self._evaluators[device] = self._stack.enter_context(opened)
        return self._evaluators[device]

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


# -- words -------------------------------------------------------------------------------------------------------


def _failure(failure: RaceFailure, case: _Case) -> _Settled:
    reason = f"{failure.workload}: {failure.status.value} in the race: {failure.reason}"
    return _Settled("failed", reason, changes=case.changes)


_ORDER: tuple[guard.GuardOutcome, ...] = ("regression", "inconclusive", "pass")


def _worst_first(findings: Sequence[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: _ORDER.index(finding.outcome))


def _outcome(findings: Sequence[Finding], fit: bool) -> Verdict:
    if not findings:
        return "inconclusive"
    worst = _worst_first(findings)[0].outcome
    return "unfit" if worst == "regression" and not fit else worst


def _reason(findings: Sequence[Finding], case: _Case, outcome: Verdict, runner: Runner) -> str:
    if not findings:
        return "nothing was measured"
    if outcome == "pass":
        parts = [_short(finding) for finding in findings]
        return ", ".join([*parts, f"unchanged since {case.since}"] if case.since else parts)
    worst = _worst_first(findings)[0].text
    return f"this runner is unfit and decides nothing: {worst}" if outcome == "unfit" else worst


def _short(finding: Finding) -> str:
    if finding.question == "base":
        return f"{finding.slowdown.speedup:.3f}x the base's time"
    return f"{finding.slowdown.speedup:.2f}x {finding.question}"


def _measured_on(entry: Entry, manifest: Path) -> str:
    """The name of the device that the entry's promises were measured on; of a CPU its verdict tells it."""
    if entry.arch != "cpu":
        return entry.device
    try:
        verdict = json.loads((manifest.parent / entry.directory / "evaluation.json").read_text(encoding="utf-8"))
        return str(dict(verdict["environment"])["device"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
