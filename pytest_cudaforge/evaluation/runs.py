"""The ways in which a verification calls a candidate, and has the oracle judge what the calls left.

Which of them a candidate has to pass, and what a failure means, is :mod:`verification`'s.
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import (
    CALLS_BEFORE,
    CallLayout,
    Trial,
    output_leaves,
)
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.changes import changed_burst, drawn_calls
from pytest_cudaforge.evaluation.contract import ROUNDING, compare_structure
from pytest_cudaforge.evaluation.module_plan import judged_plan
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.oracle import Check, ExportedArena, OracleClient, TrialCase
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.plan import LaunchPlan
from pytest_cudaforge.records import (
    CaseResult,
    Guard,
    Mismatch,
    Verification,
)

__all__ = ["AGED_CALLS", "Findings", "Run", "Setting"]

#: Rounds of calls on the same values, the last output of each compared: at least (where a machine is busy that takes
#: long, and ten times the time is given) and at most.
_REPEATS, _IN_A_ROW = (16, 32), 4
_REPEATS_S = 0.15
#: ... where one and the same sum is what all threads end with: a few of a thousand such calls go wrong.
_RACING, _RACING_S = (64, 2048), 0.5
#: Elements of an answer that are changed where it lies, and workspaces with them, before the first of such rounds.
_SMUDGED = (24, 1, 1, 0, 0)
#: ... of a C++ plan: so many, for so long, whose answers are compared with each other before the oracle judges one.
_COMPARED, _COMPARED_S = 256, 0.005
#: Bursts in which values change, as long as they take no longer than this together.
_BURSTS, _BURSTS_S = 4, 0.06
#: Answers that are kept while further calls are made: as many at most, and the fewest that say something; how long
#: that may take, and how much memory by kind of device, each answer taken twice.
_KEPT_ANSWERS, _FEWEST_KEPT, _KEPT_S = 1500, 3, 0.1
#: On busy cores calls look slow: so many are kept where that takes no longer, and some where it takes as long.
_ENOUGH_KEPT, _MOST_KEPT_S, _LEAST_KEPT, _LEAST_KEPT_S = 64, 1.0, 10, 10.0
_KEPT_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
#: ... and how much the fewest of them may take.
_FEWEST_KEPT_BYTES = {"cpu": 1 << 29, "cuda": 1 << 31}
#: Calls in a row, and how many times a single call's bound each of them may be off; how a module's tensors are told.
_ROW, _ROUNDED, _STATE = (3, 12), 4.0, ("parameter ", "buffer ", "attribute ")
#: So many calls after one on other values, each of the last ones right behind those before it: in so long at most.
_COME_AROUND, _COME_AROUND_S = (1, 15, 16, 127, 128, 255, 256, 511, 512, 1023, 1024, 65535, 65536), 0.25
_AROUND = "call number {count} after one on other values"
#: Calls on copies of their inputs, of which a module may keep a few: at least, and at most.
_FRESH_CALLS = (24, 160)
#: How long two threads make the same call, twice: at least, and where they hardly meet (on busy cores they take turns);
#: and the fewest calls.
_BESIDE_S, _BESIDE_CALLS = (0.012, 0.4), 2
_AT_ONCE = "while another thread makes the same call with values of its own"
_FIRST_AT_ONCE = "a first call while another thread makes its first one"
_EDITS, _EDITED = 6, "a call behind others, after a few elements of what they had left were exchanged"
_BETWEEN_CALLS = "values that changed between two of many calls, without a pause"
#: Calls in a batch after which memory is looked at, in time and number; how many batches have to leave how much, and
#: so many times as long ones as much more.
_LEAK_S, _LEAK_CALLS, _LEAK_BATCHES, _LEAK_BYTES = 0.008, 1024, 3, resource.getpagesize()
_LEAK_FACTORS, _LEAK_MOST_BYTES, _LEAK_FEWEST = (1, 4, 16), 1 << 26, 128
#: No kernel holds so many descriptors open; a worker may have twice as many (sandbox.Limits).
_MOST_OPEN = 128
#: How long the unchecked calls before a trial may take.
_CALLS_BEFORE_S = 0.1
#: Calls that are judged as after so many more, or twice that, one after another; an hour's at the most.
AGED_CALLS, _AGES, _MOST_AGE = 4, (1 << 12, 1 << 20, 1 << 27), 1 << 28
#: How long ordinary calls are made and looked at, and how many there are at most; so many times as long where there
#: were but a few, as on busy cores.
ORDINARY_S, _MOST_ORDINARY = {"cpu": 1.0, "cuda": 0.2}, 3000
_FEW_ORDINARY, _LONGER_ORDINARY = 100, 4
#: The share of that which calls on made values get.
_MADE_SHARE = 0.5
_ORDINARY = "one of {count} calls on {family} values"
#: Where a worker has the arena once more, read-only.
_SEALED_SLOT = 2


@dataclass
class Findings:
    """What a verification has seen so far."""

    cases: list[CaseResult] = field(default_factory=list)
    partial: bool = False
    guard: Guard = field(default_factory=Guard)

    @property
    def verification(self) -> Verification:
        ratios = [case.error_ratio for case in self.cases if case.error_ratio is not None and case.contract]
        oracle: Literal["fp64", "partial"] = "partial" if self.partial else "fp64"
        return Verification(tuple(self.cases), oracle, max(ratios, default=None), self.guard)


@dataclass(frozen=True)
class Setting:
    """What all runs of one verification share. ``kept``: state that a module candidate does not take over."""

    oracle: OracleClient
    findings: Findings
    device_kind: str
    hang_limit_s: float
    kept: tuple[str, ...] = ()


class Run:
    """One worker on one bench. Every method raises the worker's failures."""

    def __init__(
        self,
        setting: Setting,
        product: Product,
        layout: CallLayout,
        bench: int,
        arena: ExportedArena,
        worker: Worker,
        slot: int,
    ) -> None:
        self.oracle, self.findings, self.kept = setting.oracle, setting.findings, setting.kept
        self.device_kind, self.hang_limit_s = setting.device_kind, setting.hang_limit_s
        self.product, self.layout = product, layout
        self.bench, self.arena, self.worker, self.slot = bench, arena, worker, slot
        #: What the values of ``prepare`` were made from.
        self._weights: tuple[object, ...] | None = None
        self._sealed: tuple[int, frozenset[str]] | None = None

    def seal(self, written: frozenset[str]) -> None:
        """From now on the worker has all but outputs, scratch and what the reference writes read-only."""
        # A description that was opened read-only cannot be mapped writable, nor made so later; device memory has no
        # such description, but a launch plan no host code either.
        host = self.device_kind == "cpu"
        path = f"/proc/self/fd/{self.arena.fd}"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if host else os.dup(self.arena.fd)
        try:
            self.worker.attach(_SEALED_SLOT, ExportedArena(fd, self.arena.nbytes), readonly=True)
        finally:
            os.close(fd)
        self._sealed = (_SEALED_SLOT, written)

    def _bindings(self, frame: int) -> list[tuple[int, int]]:
        if self._sealed is None:
            return self.layout.bindings(frame, self.slot)
        return self.layout.sealed_bindings(frame, self.slot, *self._sealed)

    def ages(self, trial: Trial) -> Sequence[int | None]:
        """Numbers of calls that a candidate's count of them is to be moved by, one after another; none where it keeps
        no such count. None: until shortly before it wraps. The calls that tell are on new values, and leave no answer
        that is still to be looked at."""
        self._draw_anew(trial)
        self._prepare(trial)
        limit_s = self.hang_limit_s
        found = self.worker.count_calls(self._bindings(0), most_calls=_MOST_AGE, timeout_s=limit_s)
        if not found.words:
            return ()
        room, steps = found.most_calls - AGED_CALLS * (len(_AGES) + 2), list[int]()
        for age in _AGES:
            steps.append(min(room - sum(steps), CHANCE.randrange(age, 2 * age)))
        wraps = 0 < found.wrap_calls <= _MOST_AGE and found.most_calls == _MOST_AGE
        return [*(step for step in steps if step > 0), *([None] if wraps else [])]

    def call(self, frame: int) -> None:
        """One call on what lies in the frame; nobody looks at its outputs."""
        self.worker.run_many([self._bindings(frame)], 1, timeout_s=self.hang_limit_s)

    def unjudged(self, trial: Trial) -> None:
        """One call on a trial's values; nobody looks at its outputs."""
        self.oracle.fill(self.bench, trial.frame, replace(trial.case, kept=self.kept), trial.poison)
        self._weights = None
        self._prepare(trial)
        self.worker.run("main", self._bindings(trial.frame), timeout_s=self.hang_limit_s)

    def of_another(self, trial: Trial) -> None:
        """One call of another instance of a module, of other settings, on a trial's values (``call_another``)."""
        assert isinstance(self.worker, ModuleWorker)
        self.oracle.fill(self.bench, trial.frame, replace(trial.case, kept=self.kept), trial.poison)
        self._weights = None
        self.worker.call_another(self._bindings(trial.frame), timeout_s=self.hang_limit_s)

    def _call_often(self, frame: int, calls: int) -> None:
        """``calls`` calls in ``frame``, fewer where they take long; nobody looks at their outputs."""
        sets = [self._bindings(frame)]
        began = time.monotonic()
        done, batch = 0, 1  # a call may take as long as the limit for hangs allows
        while done < calls:
            batch = min(batch, calls - done)
            self.worker.run_many(sets, batch, timeout_s=self.hang_limit_s)
            done, batch = done + batch, 2 * batch
            spent_s = time.monotonic() - began
            # A busy machine makes calls look slow: the fewest are made all the same, unless they take very long.
            if spent_s > (_CALLS_BEFORE_S if done >= CALLS_BEFORE[0] else 10 * _CALLS_BEFORE_S):
                return

    def leak(self) -> str:
        """What calls leave behind, where they do so in every one of some batches of calls; else ""."""
        sets, limit_s = [self._bindings(0)], self.hang_limit_s
        calls = 2
        while calls < _LEAK_CALLS:  # what is kept for good is there after these, too
            took_ns = min(self.worker.run_many(sets, calls, timeout_s=limit_s) for _ in range(2))
            # Twice: the cores may have been somebody else's once. A few calls say little of what leaks now and then.
            if took_ns > _LEAK_S * 1e9 * (1 if calls >= _LEAK_FEWEST else 10):
                break
            calls *= 4
        # Little might be an allocator's ups and downs: what leaks leaves as much more after so many more calls.
        for factor in _LEAK_FACTORS:
            leaked_bytes, left_open = self._growth(factor * calls, factor * _LEAK_BYTES)
            if left_open:
                return f"calls leave descriptors behind, {left_open} in {factor * calls}: close what a call opens"
            # Who has none left to open opens no more.
            if self.device_kind == "cpu" and (still_open := self.worker.open_files()) > _MOST_OPEN:
                return f"calls leave descriptors behind, {still_open} are open: close what a call opens"
            if leaked_bytes < factor * _LEAK_BYTES:
                return ""
            if leaked_bytes >= _LEAK_MOST_BYTES:
                break  # sixteen times as much may be more than there is
        told = leaked_bytes / (factor * calls)
        return f"every call leaves some {told:.3g} bytes of memory behind: free what a kernel allocates"

    def _growth(self, calls: int, enough_bytes: int) -> tuple[int, int]:
        """Bytes and descriptors that the process grows by in so many calls: the least of some batches, 0 at least.
        ``enough_bytes``: there is no need to go on below."""
        sets, limit_s = [self._bindings(0)], self.hang_limit_s
        least_bytes = least_files = sys.maxsize
        for _ in range(_LEAK_BATCHES):
            before = self._taken()
            self.worker.run_many(sets, calls, timeout_s=limit_s)
            *grown_bytes, grown_files = (now - then for now, then in zip(self._taken(), before, strict=True))
            least_bytes = max(0, min(least_bytes, max(grown_bytes)))
            least_files = max(0, min(least_files, grown_files))
            if least_bytes < enough_bytes and not least_files:
                break
        return least_bytes, least_files

    def _taken(self) -> tuple[int, int, int]:
        """Bytes by the kernel's account, bytes by malloc's, descriptors. With a GPU those that torch has given out
        there, and no others: the driver's own come and go."""
        worker, limit_s = self.worker, self.hang_limit_s
        if self.device_kind == "cuda":
            return 0, worker.allocated_bytes(timeout_s=limit_s), 0
        return worker.own_bytes(), worker.allocated_bytes(timeout_s=limit_s), worker.open_files()

    def repeated(self, workload: str, trial: Trial, *, racing: bool = False) -> CaseResult:
        """Up to so many calls, and so long, on the values that ``trial`` put there; the first wrong one is told.
        ``racing``: by the hundred, as all threads come together there."""
        (least, most), spent_s = (_RACING, _RACING_S) if racing else (_REPEATS, _REPEATS_S)
        oracle, began = self.oracle, time.monotonic()
        leaves = output_leaves(self.product.traced.main, self.layout, trial.frame)
        for done in range(1, most + 1):
            # A caller may have written into the answer: who finds most of it there may not leave the rest. Who looks at
            # some of it sees one of a few elements now and then, and one alone hardly ever.
            for count in _SMUDGED[done - 1 : done]:
                oracle.smudge(self.bench, trial.frame, leaves, CHANCE.fresh_seed(), count)
            leaves = output_leaves(self._call_in_a_row(trial.frame), self.layout, trial.frame)
            check = oracle.recheck(self.bench, trial.frame, leaves)
            if check.mismatches:
                told = [replace(m, detail=f"a repeated call on the same inputs: {m.detail}") for m in check.mismatches]
                ratio, bound = check.error_ratio, check.bound
                return CaseResult(workload, trial.name, True, False, ratio, bound, tuple(told[:8]))
            if time.monotonic() - began > (spent_s if done >= least else 10 * spent_s):
                break
        return CaseResult(workload, trial.name, True, True, None, None, ())

    def one_after_another(self, workload: str, trial: Trial) -> CaseResult:
        """Other values in two frames, a call in each by one request, and the answers: of the first, which finds nobody
        at work, and of the second, which comes right behind it."""
        oracle, frames = self.oracle, CHANCE.sample(range(len(self.layout.main)), 2)
        for frame in frames:
            case = replace(trial.case, seed=CHANCE.fresh_seed(), family="drawn", kept=self.kept)
            oracle.fill(self.bench, frame, case, trial.poison)
        self._prepare(trial)
        sets = [self._bindings(frame) for frame in frames]
        self.worker.run_many(sets, len(sets), timeout_s=self.hang_limit_s)
        check = self._judged(frames)
        # State that forward writes has had two updates, and a module's is shown after single calls only.
        wrong = [m for m in check.mismatches if not _is_written_state(m)]
        told = tuple(replace(m, detail=f"calls one after another: {m.detail}") for m in wrong[:8])
        return CaseResult(workload, trial.name, True, not told, check.error_ratio, check.bound, told)

    def in_a_row(self, workload: str, trial: Trial, *, writes_inputs: bool) -> CaseResult:
        """New values in a frame, calls there by one request, and what the last one left; where they write their inputs
        one more, before which somebody edits what they have left."""
        calls = self._row(trial)
        sets, limit_s = [self._bindings(trial.frame)], self.hang_limit_s
        if calls:
            self._prepare(trial)
            self.worker.run_many(sets, calls, timeout_s=limit_s, shows_state=True)
        found = self._after_row(workload, trial, calls, "right behind the first")
        for _ in range(_EDITS if calls and writes_inputs else 0):
            if not found.passed or not self.oracle.edit(self.bench, trial.frame, CHANCE.fresh_seed()):
                break
            self.worker.run_many(sets, 1, timeout_s=limit_s, shows_state=True)
            check = self._judged([trial.frame])
            told = tuple(replace(m, detail=f"{_EDITED}: {m.detail}") for m in check.mismatches[:8])
            found = CaseResult(workload, trial.name, True, not told, check.error_ratio, check.bound, told)
        return found

    def _row(self, trial: Trial) -> int:
        """Draw new values into a frame, and a number of calls that the oracle is to judge by there; 0 where none may
        follow another."""
        case = replace(trial.case, seed=CHANCE.fresh_seed(), family="drawn", kept=self.kept)
        self.oracle.fill(self.bench, trial.frame, case, trial.poison)
        found = (CHANCE.randint(*_ROW), 2)
        return next((calls for calls in found if self.oracle.follow(self.bench, trial.frame, calls - 1)), 0)

    def _after_row(self, workload: str, trial: Trial, calls: int, told: str) -> CaseResult:
        """What so many calls left. What one has rounded the next may enlarge: only what is wrong by far counts."""
        passed = CaseResult(workload, trial.name, True, True, None, None, ())
        if not calls:
            return passed
        check = self._judged([trial.frame])
        by_far = (check.error_ratio or 0.0) > _ROUNDED * calls * (check.bound or 0.0)
        if not by_far and all(m.kind in ROUNDING for m in check.mismatches):
            return passed
        wrong = tuple(replace(m, detail=f"call number {calls}, {told}: {m.detail}") for m in check.mismatches[:8])
        return CaseResult(workload, trial.name, True, not wrong, check.error_ratio, check.bound, wrong)

    def come_around(self, workload: str, trial: Trial, *, much: TrialCase) -> CaseResult:
        """A call on the values of ``much``, and from then on calls on the trial's: of those that come as much later as
        numbers of few bits count, the answers, as far as there is time."""
        self.unjudged(replace(trial, case=much))
        self.oracle.fill(self.bench, trial.frame, replace(trial.case, kept=self.kept), trial.poison)
        self._prepare(trial)
        sets, limit_s, done, spent_ns = [self._bindings(trial.frame)], self.hang_limit_s, 0, 0
        for count in _COME_AROUND:
            if done and spent_ns / done * (count - done) > _COME_AROUND_S * 1e9:
                break
            spent_ns += self.worker.run_many(sets, count - done, timeout_s=limit_s)
            done, check = count, self._judged([trial.frame])
            if check.mismatches:
                told = tuple(replace(m, detail=f"{_AROUND.format(count=count)}: {m.detail}") for m in check.mismatches)
                return CaseResult(workload, trial.name, True, False, check.error_ratio, check.bound, told[:8])
        return CaseResult(workload, trial.name, True, True, None, None, ())

    def kept_answers(self, trial: Trial) -> tuple[int, int, int]:
        """Calls on other values in random order, their answers kept: how many, how many of them changed, and how many
        share memory with another."""
        if not isinstance(self.worker, ModuleWorker):
            return 0, 0, 0
        frames = range(len(self.layout.main))
        self._draw_anew(trial)
        sets, limit_s = [self._bindings(frame) for frame in frames], self.hang_limit_s
        call_ns = self.worker.run_many(sets[:1], 2, timeout_s=limit_s) / 2
        each = max(1, 2 * self.product.workload.output_bytes)
        room = _KEPT_BYTES[self.device_kind] // each
        if _FEWEST_KEPT * each <= _FEWEST_KEPT_BYTES[self.device_kind]:
            room = max(room, _FEWEST_KEPT)
        calls = 1e9 / max(1.0, call_ns)  # in a second, where nobody else has the cores
        enough = max(min(_ENOUGH_KEPT, _MOST_KEPT_S * calls), min(_LEAST_KEPT, _LEAST_KEPT_S * calls))
        count = int(min(_KEPT_ANSWERS, room, max(_FEWEST_KEPT, _KEPT_S * calls, enough)))
        if count < _FEWEST_KEPT:
            return 0, 0, 0
        changed = shared = 0
        for first in (True, False):
            k = -(-count // 2) if first else count // 2
            # Each frame as often: who gives the same memory again and again shows by other values there.
            order = CHANCE.sample([*frames] * -(-k // len(frames)), k=k)
            changed, shared = self.worker.run_kept(sets, order, first=first, timeout_s=limit_s + 10 * _MOST_KEPT_S)
            if first:  # who gives the same memory again would else write there what stands there
                self._draw_anew(trial)
        return count, changed, shared

    def ordinary(self, workload: str, trial: Trial, *, writes: bool) -> CaseResult:
        """Calls on values of the trial's family, for a while; the first that is plainly wrong is told. ``writes``:
        what forward writes has to be put back before each."""
        frames = [trial.frame] if writes else list(range(len(self.layout.main)))
        sets, plan = [self._bindings(frame) for frame in frames], self.product.traced.main
        leaves = {frame: output_leaves(plan, self.layout, frame) for frame in frames}
        family = trial.case.family
        self._draw_anew(trial, family)
        self._prepare(trial)
        spent_s = ORDINARY_S[self.device_kind] * (1.0 if family == "drawn" else _MADE_SHARE)
        began = time.monotonic()
        for done in itertools.count():
            if done and writes:
                case = replace(trial.case, seed=CHANCE.fresh_seed(), kept=self.kept)
                self.oracle.fill(self.bench, trial.frame, case, trial.poison)
            elif done:
                self.oracle.renew(self.bench, [CHANCE.fresh_seed() for _ in frames], family)
            self.worker.run_many(sets, len(sets), timeout_s=self.hang_limit_s, shows_state=writes)
            check, count = self.oracle.look(self.bench, leaves), (done + 1) * len(frames)
            if check.mismatches:
                told = tuple(
                    replace(m, detail=f"{_ORDINARY.format(count=count, family=family)}: {m.detail}")
                    for m in check.mismatches
                )
                return CaseResult(workload, trial.name, True, False, check.error_ratio, check.bound, told[:8])
            least_s = spent_s if count >= _FEW_ORDINARY else _LONGER_ORDINARY * spent_s
            if time.monotonic() - began > least_s or count >= _MOST_ORDINARY:
                return CaseResult(workload, trial.name, True, True, None, None, ())
        raise AssertionError("unreachable")

    def _draw_anew(self, trial: Trial, family: str = "drawn") -> None:
        """New values in every frame."""
        for frame in range(len(self.layout.main)):
            case = replace(trial.case, seed=CHANCE.fresh_seed(), family=family, kept=self.kept)
            self.oracle.fill(self.bench, frame, case, trial.poison)

    def keeps_inputs(self) -> bool:
        """Does a module keep hold of the inputs of its calls, of all of them?"""
        workload, limit_s = self.product.workload, self.hang_limit_s
        if not isinstance(self.worker, ModuleWorker) or not workload.input_bytes:
            return False
        call_ns = max(1, self.worker.run_many([self._bindings(0)], 2, timeout_s=limit_s) // 2)
        room = _KEPT_BYTES[self.device_kind] // workload.input_bytes
        calls = min(_FRESH_CALLS[1], room, max(_FRESH_CALLS[0], int(_KEPT_S * 1e9 / call_ns)))
        return calls >= _FEWEST_KEPT and not self.worker.run_fresh(self._bindings(0), calls, timeout_s=limit_s)

    def beside(self, second: Run, workload: str, trial: Trial) -> CaseResult:
        """Calls here while another thread makes them on the ``second`` bench, and the other way round."""
        oracle, limit_s = self.oracle, self.hang_limit_s
        for run in (self, second):
            case = replace(trial.case, seed=CHANCE.fresh_seed(), family="drawn", kept=self.kept)
            oracle.fill(run.bench, 0, case, trial.poison)
            run._prepare(trial)
        call_ns = self.worker.run_many([self._bindings(0)], 2, timeout_s=limit_s) / 2
        least, most = (max(_BESIDE_CALLS, int(spent_s * 1e9 / call_ns)) for spent_s in _BESIDE_S)
        for run, other in ((self, second), (second, self)):
            self.worker.run_beside(run._bindings(0), other._bindings(0), least, most, timeout_s=4 * limit_s)
            check = run._judged([0])
            if check.mismatches:
                told = tuple(replace(m, detail=f"{_AT_ONCE}: {m.detail}") for m in check.mismatches[:8])
                return CaseResult(workload, trial.name, True, False, check.error_ratio, check.bound, told)
        return CaseResult(workload, trial.name, True, True, None, None, ())

    def first_at_once(self, second: Run, workload: str, trial: Trial) -> CaseResult:
        """The very first call of this worker's, while another thread makes it on the ``second`` bench."""
        for run in (self, second):
            case = replace(trial.case, seed=CHANCE.fresh_seed(), family="drawn", kept=self.kept)
            self.oracle.fill(run.bench, 0, case, trial.poison)
            run._prepare(trial)
        here, there = self._bindings(0), second._bindings(0)
        self.worker.run_together(here, there, 1, endless=False, timeout_s=2 * self.hang_limit_s)
        for run in (self, second):
            check = run._judged([0])
            if check.mismatches:
                told = tuple(replace(m, detail=f"{_FIRST_AT_ONCE}: {m.detail}") for m in check.mismatches[:8])
                return CaseResult(workload, trial.name, True, False, check.error_ratio, check.bound, told)
        return CaseResult(workload, trial.name, True, True, None, None, ())

    def row_beside(self, second: Run, workload: str, trial: Trial, *, endless: bool) -> CaseResult:
        """Where forward writes its inputs or its state: calls right behind each other while another thread makes them
        on the ``second`` bench, for as long (``endless``) or as often."""
        second._row(trial)
        calls = self._row(trial)
        for run in (self, second) if calls else ():
            run._prepare(trial)
        if calls:
            here, there, limit_s = self._bindings(0), second._bindings(0), self.hang_limit_s
            self.worker.run_together(here, there, calls, endless=endless, timeout_s=4 * limit_s)
        return self._after_row(workload, trial, calls, _AT_ONCE)

    def changed(self, workload: str, trial: Trial, *, writes_inputs: bool = False) -> CaseResult:
        """Bursts of calls in one frame or all of them, whose values change before the last call in each. Where forward
        ``writes_inputs`` too large to be written between two calls, nothing could be expected of the last one."""
        frames = list(range(len(self.layout.main)))
        for frame in frames:
            case = replace(trial.case, seed=CHANCE.fresh_seed(), family="drawn", kept=self.kept)
            self.oracle.fill(self.bench, frame, case, trial.poison)
        self._prepare(trial)
        limit_s, began = self.hang_limit_s, time.monotonic()
        call_ns = self.worker.run_many([self._bindings(0)], 2, timeout_s=limit_s) / 2
        for burst in range(_BURSTS):
            visited = CHANCE.sample(frames, len(frames) if burst % 2 == 0 else 1)
            changes = self._burst(visited, drawn_calls(CHANCE, len(visited), call_ns), renewed=burst == 0)
            if writes_inputs and not all(changes):
                break
            check = self._judged(visited)
            if wrong := [m for m in check.mismatches if not _is_written_state(m)]:
                told = tuple(replace(m, detail=f"{_BETWEEN_CALLS}: {m.detail}") for m in wrong[:8])
                return CaseResult(workload, trial.name, True, False, check.error_ratio, check.bound, told)
            if time.monotonic() - began > _BURSTS_S:
                break
        return CaseResult(workload, trial.name, True, True, None, None, ())

    def _burst(self, visited: Sequence[int], calls: int, *, renewed: bool) -> list[int]:
        """How many pieces of each frame changed."""
        stage, seeds = self.oracle.stage, [CHANCE.fresh_seed() for _ in visited]
        pieces = {at: stage(self.bench, frame, seeds[at], renewed=renewed) for at, frame in enumerate(visited)}
        sets = [self._bindings(frame) for frame in visited]
        changed_burst(self.worker, sets, calls, pieces, slot=self.slot, timeout_s=self.hang_limit_s)
        return [len(found) for found in pieces.values()]

    def _judged(self, frames: Sequence[int]) -> Check:
        """What calls left in the frames: the first wrong answer, or the last right one."""
        plan = self.product.traced.main
        self.worker.stop()
        for frame in frames:
            leaves = output_leaves(plan, self.layout, frame)
            check = self.oracle.check(self.bench, frame, leaves, zones=False)
            if check.mismatches:
                break
        self.worker.cont()
        return check

    def _prepare(self, trial: Trial) -> None:
        """Have the values of ``prepare`` made anew where the weights are not those that they were made from."""
        case = trial.case
        exchanged = trial.name if trial.exchanged else ""
        weights = (case.weights_seed, exchanged, case.advanced, case.others, case.others_seed, case.unbiased)
        if self.product.traced.prepare is not None and self._weights != weights:
            bindings, limit_s = self.layout.prepare_bindings(self.slot), self.hang_limit_s
            # Threads that are started there have no clock in later calls either.
            elsewhere = trial.elsewhere if trial.elsewhere == "clockless" else ""
            self.worker.run("prepare", bindings, timeout_s=limit_s, elsewhere=elsewhere)
            self._weights = weights

    def _call_in_a_row(self, frame: int) -> LaunchPlan:
        """Calls without a pause, so that all threads are awake and meet; the plan that says where outputs lie."""
        plan, limit_s = self.product.traced.main, self.hang_limit_s
        if plan.steps and self.device_kind == "cpu":
            bindings = self._bindings(frame)
            self.worker.run_repeated(bindings, _COMPARED, most_s=_COMPARED_S, timeout_s=limit_s)
            return plan
        self.worker.run_many([self._bindings(frame)], _IN_A_ROW, timeout_s=limit_s)
        returned = self.worker.run("main", self._bindings(frame), timeout_s=limit_s)
        return plan if returned is None else judged_plan(plan, returned)

    def case(self, workload: str, trial: Trial, *, contract: bool) -> CaseResult:
        """Fill, run and judge one trial. Raises the worker's failures."""
        oracle, limit_s = self.oracle, self.hang_limit_s
        if trial.calls_before:
            self._call_often(trial.frame_before, trial.calls_before)
        if trial.renewed:
            oracle.renew(self.bench, [CHANCE.fresh_seed() for _ in self.layout.main])
        elif trial.exchanged:
            seed = CHANCE.fresh_seed()
            oracle.exchange(self.bench, trial.frame, seed, alone=trial.alone, moved=trial.moved)
        else:
            oracle.fill(self.bench, trial.frame, replace(trial.case, kept=self.kept), trial.poison)
        self._prepare(trial)
        plan = self.product.traced.main
        bindings = self._bindings(trial.frame)
        returned = self.worker.run(
            "main",
            bindings,
            timeout_s=limit_s,
            room=trial.room,
            at_work=trial.at_work,
            late=trial.late,
            elsewhere=trial.elsewhere,
        )
        if returned is not None:
            wrong = compare_structure(returned, self.product.workload)
            if wrong:
                return CaseResult(workload, trial.name, contract, False, None, None, wrong)
            plan = judged_plan(plan, returned)
        # A thread that the call left behind must not finish the answer while it is being judged.
        self.worker.stop()
        outputs = output_leaves(plan, self.layout, trial.frame)
        check = oracle.check(self.bench, trial.frame, outputs, zones=trial.zones, told=True)
        self.worker.cont()
        self.findings.partial |= check.partial
        passed = not check.mismatches
        return CaseResult(workload, trial.name, contract, passed, check.error_ratio, check.bound, check.mismatches[:8])


def _is_written_state(mismatch: Mismatch) -> bool:
    """Is it about what forward writes into a parameter or a buffer? (A kernel that writes into others has mutated
    them.)"""
    return mismatch.output.startswith(_STATE) and mismatch.kind != "mutation"
