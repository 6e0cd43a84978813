"""``python -m cudaforge_action.verification``: rebuild what a forge job won from its sources, and judge it anew.

A process of its own: its environment holds no key and no token, and if a kernel takes it down, whoever started it still
tells what was verified before. Of the forge job's folder nothing counts but sources; target, promise, guard, report and
entry are of this checkout and this device.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cudaforge_action.held import checked_out
from cudaforge_action.project import Project, project_at
from cudaforge_action.records import ForgedKernel, VerifiedKernel, VerifiedShard
from cudaforge_action.shards import FORGED_DIR, candidate_of, read_forged, write_verified
from pytest_cudaforge import hardware, machine
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import DeviceError, ForgeError, OracleError, TargetError, ToolchainError
from pytest_cudaforge.evaluation.evaluator import Evaluator
from pytest_cudaforge.languages import DEVICE_LANGUAGES
from pytest_cudaforge.publishing import MANIFEST, publish, refusal, variant_of
from pytest_cudaforge.records import Candidate, Evaluation, Round, Target, TargetFacts, Trace
from pytest_cudaforge.runtime import configuration
from pytest_cudaforge.strategies import speedup_of
from pytest_cudaforge.wiring import open_evaluator

__all__ = ["UNFINISHED", "main", "until_undisturbed"]

UNFINISHED = "the verify job ended before it was done"
#: A race among busy processes says nothing of a kernel, and a night's work is not given up for one busy minute: it is
#: held again once all others of the shard have their verdicts, after pauses of twice the length each time.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 160.0
_NOTE = "verified anew from its source, by a job that has no key"


def main(argv: Sequence[str] | None = None) -> int:
    """Verify one shard. 0, or 2 where the shard cannot be read or the machine cannot judge anything."""
    parser = argparse.ArgumentParser(prog="cudaforge_action.verification")
    for name in ("forged", "verified", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--device", default="")
    parser.add_argument("--quiet-minutes", type=float, default=0.0)
    parser.add_argument("--path", action="append", default=[], help="what was collected: it decides where ids start")
    given = parser.parse_args(argv)
    try:
        project = project_at(given.folder, os.environ, given.path)
        _Verifying(given.forged, given.verified, project, given.device, given.quiet_minutes).run()
    except ForgeError as error:
        print(f"cudaforge: {error}", file=sys.stderr)
        return 2
    return 0


class _NotVerified(Exception):
    """There is no verdict; the text says why."""


@dataclass
class _Verifying:
    """One shard. The folder is written anew after each kernel."""

    forged: Path
    verified: Path
    project: Project
    device: str
    quiet_minutes: float = 0.0
    _done: list[VerifiedKernel] = field(default_factory=list)
    _opened: dict[str, Evaluator] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _name: str = ""
    _commit: str = ""
    _machine: str = ""
    _began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        shard = read_forged(self.forged)
        self._name = shard.shard.shard
        self._commit = checked_out(self.project.root)
        self._write(UNFINISHED)
        with self._stack:
            for kernel, trace in shard.kernels:
                self._done.append(self._judged(kernel, trace))
                self._write(UNFINISHED)
            for place in until_undisturbed(self._done, self.quiet_minutes * 60.0):
                self._done[place] = self._judged(*shard.kernels[place], turn=self._done[place].turns + 1)
                self._write(UNFINISHED)
        self._write("")

    def _write(self, error: str) -> None:
        seconds = round(time.monotonic() - self._began, 3)
        shard = VerifiedShard(self._name, self._commit, self._machine, tuple(self._done), seconds, error)
        write_verified(self.verified, shard)

    # -- one kernel ----------------------------------------------------------------------------------------------------

    def _judged(self, kernel: ForgedKernel, trace: Trace, turn: int = 1) -> VerifiedKernel:
        candidate = candidate_of(kernel, trace)
        told = VerifiedKernel(kernel.target, kernel.source_digest, kernel.language, candidate.digest, None, turns=turn)
        try:
            target = self._target(kernel)
            evaluator = self._evaluator(kernel, trace)
            facts = evaluator.facts(target)
            _refuse(target, facts, candidate, evaluator)
            told = dataclasses.replace(told, variant=variant_of(facts))
            verdict = _without_paths(self._verdict(candidate, target, evaluator))
        except _NotVerified as lacking:
            return _said(told, str(lacking))
        except (TargetError, DeviceError, OracleError, ToolchainError) as error:
            return _said(told, str(error))
        reason = _why_not(verdict, facts, turn)
        told = dataclasses.replace(told, evaluation=verdict)
        return _said(told, reason) if reason else self._published(told, candidate, target, facts, evaluator)

    def _target(self, kernel: ForgedKernel) -> Target:
        """Today's target. Raises :class:`_NotVerified` where it is gone, or differs from what was forged for."""
        path = self.project.root / kernel.target.partition("::")[0]
        if path.is_symlink() or not path.is_file():
            raise _NotVerified(f"{path.name} is gone from this checkout")
        found = discover([path], self.project.root)
        target = next((target for target in found.targets if target.id == kernel.target), None)
        if target is None:
            raise _NotVerified("its target is gone from this checkout")
        if target.digest != kernel.source_digest:
            raise _NotVerified("its target has changed since it was forged")
        return target

    def _evaluator(self, kernel: ForgedKernel, trace: Trace) -> Evaluator:
        """Raises :class:`_NotVerified` where this machine does not have the kernel's device."""
        device = self._device_of(kernel, trace)
        if device not in self._opened:
            if device != "cpu":
                try:
                    hardware.detect_in_child(device)
                except DeviceError as error:
                    raise _NotVerified(f"there is no GPU here to verify it on: {error.what}") from None
            settings = dataclasses.replace(self.project.settings, isolation="auto")
            paths, workloads = self.project.python_paths, settings.workloads
            evaluator = open_evaluator(settings, device=device, python_paths=paths, workloads=workloads)
            self._opened[device] = self._stack.enter_context(evaluator)
            self._machine = machine.describe(evaluator.device).text
        return self._opened[device]

    def _device_of(self, kernel: ForgedKernel, trace: Trace) -> str:
        if kernel.language in DEVICE_LANGUAGES:
            wanted = "cuda"
        elif kernel.language == configuration.LANGUAGE:
            # A compiler's options fit the device they were searched on; what it was the forge job says.
            wanted = "cpu" if trace.final is not None and trace.final.device == "cpu" else "cuda"
        else:
            wanted = "cpu"
        if self.device and self.device != wanted:
            raise _NotVerified(f"this job verifies on {self.device} only")
        configured = self.project.settings.device
        return wanted if wanted == "cpu" else (configured if configured.startswith("cuda") else "cuda:0")

    def _verdict(self, candidate: Candidate, target: Target, evaluator: Evaluator) -> Evaluation:
        """As a winner gets it at the end of the loop: built past the cache, sanitized, timed; twice where that leaves
        it open. One that was disturbed has further turns, later."""
        verdict = evaluator.evaluate(candidate, target, fresh=True)
        if verdict.passed and verdict.timing is not None and verdict.timing.decision == "inconclusive":
            verdict = evaluator.evaluate(candidate, target, fresh=True)
        if verdict.passed and evaluator.kind == "cuda" and self.project.settings.profile != "never":
            verdict = _profiled(verdict, candidate, target, evaluator)
        return verdict

    def _published(
        self, told: VerifiedKernel, candidate: Candidate, target: Target, facts: TargetFacts, evaluator: Evaluator
    ) -> VerifiedKernel:
        verdict, forge_dir = told.evaluation, self.verified / FORGED_DIR
        assert verdict is not None
        trace = Trace(
            target=target.id,
            language=candidate.language,
            outcome="forged",
            reason=f"{speedup_of(verdict.timing):.2f}x as fast as the faster baseline",
            rounds=(Round(1, "first", None, candidate, verdict),),
            winner=1,
            final=verdict,
            seconds=verdict.seconds,
            notes=(_NOTE, *([_turns(told.turns)] if told.turns > 1 else [])),
            baselines=evaluator.baselines(target, candidate.language),
            hardware=evaluator.device,
        )
        item = publish(trace, target, facts, forge_dir, builds=evaluator.builds)
        # The shard says what is in it; a manifest would say it twice.
        (forge_dir / MANIFEST).unlink()
        return dataclasses.replace(told, entry=item.entry)


def until_undisturbed(
    kernels: Sequence[VerifiedKernel], patience_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[int]:
    """The places of kernels that are to be judged again, after a pause each time: those whose last race other work
    disturbed, as ``kernels`` holds them by then. What a race left open that nobody disturbed is open for good. All
    pauses together take no more than ``patience_s``."""
    pause_s = _FIRST_PAUSE_S
    while (waiting := [place for place, told in enumerate(kernels) if _was_disturbed(told)]) and pause_s <= patience_s:
        count = f"{len(waiting)} race{'s' if len(waiting) > 1 else ''}"
        print(f"cudaforge: other work on this machine disturbed {count}: again in {pause_s:.0f} s", flush=True)
        sleep(pause_s)
        yield from waiting
        patience_s, pause_s = patience_s - pause_s, min(2.0 * pause_s, _LONGEST_PAUSE_S)


def _was_disturbed(told: VerifiedKernel) -> bool:
    timing = told.evaluation.timing if told.evaluation is not None and told.evaluation.passed else None
    return timing is not None and timing.decision == "disturbed"


def _turns(count: int) -> str:
    return f"other work disturbed its races in {count - 1} of {count} turns, and the last one counts"


def _said(told: VerifiedKernel, reason: str) -> VerifiedKernel:
    return dataclasses.replace(told, reason=reason[:2000])


def _refuse(target: Target, facts: TargetFacts, candidate: Candidate, evaluator: Evaluator) -> None:
    """What the loop asks before its first round. Raises :class:`_NotVerified`."""
    if candidate.language not in (*facts.languages, configuration.LANGUAGE):
        raise _NotVerified(f"the target is forged in {', '.join(facts.languages)} only, not in {candidate.language}")
    faults = evaluator.lint(target)
    if faults:
        raise _NotVerified("the linter refuses this target: " + "; ".join(faults))


def _why_not(verdict: Evaluation, facts: TargetFacts, turn: int) -> str:
    """Why it is not published, "" where it is."""
    if not verdict.passed:
        return f"{verdict.status.value}: {verdict.reason}"
    speedup = speedup_of(verdict.timing)
    if verdict.timing is None or verdict.timing.decision != "faster":
        return _undecided(verdict.timing.decision if verdict.timing is not None else "not timed", speedup, turn)
    if speedup < facts.min_speedup:
        return f"it is {speedup:.2f}x as fast as the faster baseline, less than min_speedup {facts.min_speedup:g}"
    return refusal(verdict)


def _undecided(decision: str, speedup: float, turn: int) -> str:
    """A race that other work disturbed says nothing about the kernel, whatever its figure is."""
    again = f" in turn {turn}" if turn > 1 else ""
    told = f"{speedup:.2f}x against the faster baseline, {decision}{again}"
    if decision in ("disturbed", "inconclusive"):
        return f"it is correct, but its race has no winner ({told}): verify it again while the machine is quiet"
    return f"it is correct, but not faster ({told})"


def _profiled(verdict: Evaluation, candidate: Candidate, target: Target, evaluator: Evaluator) -> Evaluation:
    """With a look at where its time goes, for who reads of it; no verdict is lost for want of one."""
    try:
        return dataclasses.replace(verdict, profile=evaluator.profile(candidate, target, depth="full"))
    except DeviceError:
        raise
    except ForgeError as error:
        print(f"cudaforge: {target.id} could not be profiled: {error.what}", file=sys.stderr)
        return verdict


def _without_paths(verdict: Evaluation) -> Evaluation:
    if verdict.profile is None:
        return verdict
    return dataclasses.replace(verdict, profile=dataclasses.replace(verdict.profile, report=""))


if __name__ == "__main__":
    sys.exit(main())
