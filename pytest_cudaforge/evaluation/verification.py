"""Is it correct? Runs a candidate's trials in fresh workers and lets the oracle judge each."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from pytest_cudaforge.errors import (
    ForgeError,
    LaunchFailure,
    Unsupported,
    WorkerCrash,
    WorkerFailure,
    WorkerTimeout,
)
from pytest_cudaforge.evaluation.arena import ALIGN_BYTES, HOST_ALIGN_BYTES
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import (
    BIG_CALL_BYTES,
    BIG_CALL_FAMILIES,
    CALLS_BEFORE,
    CallLayout,
    Trial,
    call_layout,
    contract_trials,
    output_leaves,
)
from pytest_cudaforge.evaluation.changes import changed_burst, drawn_calls
from pytest_cudaforge.evaluation.contract import compare_structure, status_of
from pytest_cudaforge.evaluation.module_plan import judged_plan
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.oracle import Check, ExportedArena, OracleClient, TrialCase
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.worker import Worker, openmp_threads
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.languages.binary import block_sizes
from pytest_cudaforge.plan import LaunchPlan, TracedPlan
from pytest_cudaforge.records import (
    CaseResult,
    DeviceFacts,
    Guard,
    Status,
    Target,
    TargetFacts,
    Verification,
    WorkloadFacts,
)

__all__ = ["Verifier"]

#: Enough to show a pattern; each failing trial costs time and tells less than the one before.
_MAX_FAILED = 3
_MAX_PROBED_WORKLOADS = 6
#: Rounds of calls on the same values, the last output of each compared: at least (where a machine is busy that takes
#: long, and ten times the time is given) and at most.
_REPEATS, _IN_A_ROW = (16, 32), 4
_REPEATS_S = 0.15
#: ... of a C++ plan: so many, for so long, whose answers are compared with each other before the oracle judges one.
_COMPARED, _COMPARED_S = 256, 0.005
#: Bursts in which values change, as long as they take no longer than this together.
_BURSTS, _BURSTS_S = 4, 0.06
#: Answers that are kept while further calls are made: as many at most, and the fewest that say something; how long
#: that may take, and how much memory by kind of device, each answer taken twice.
_KEPT_ANSWERS, _FEWEST_KEPT, _KEPT_S = 300, 3, 0.1
_KEPT_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
#: Calls on copies of their inputs, of which a module may keep a few: at least, and at most.
_FRESH_CALLS = (24, 160)
#: A process that makes no call takes less than this share of a core's time, in one of some intervals at least, each so
#: long: OpenMP's threads look out for work for a while.
_IDLE_SHARE, _IDLE_S = 0.4, (0.03, 0.03, 0.1, 0.3, 0.5)
#: The weights of a module that is made three times, at most.
_MOST_WEIGHTS_BYTES = 1 << 28
#: How long two threads make the same call, twice: at least, and where they hardly meet (on busy cores they take turns);
#: and the fewest calls.
_BESIDE_S, _BESIDE_CALLS = (0.012, 0.4), 2
_AT_ONCE = "while another thread makes the same call with values of its own"
_BETWEEN_CALLS = "values that changed between two of many calls, without a pause"
#: Calls in a batch after which memory is looked at, in time and number; how many batches have to leave how much, and
#: so many times as long ones as much more.
_LEAK_S, _LEAK_CALLS, _LEAK_BATCHES, _LEAK_BYTES = 0.008, 1024, 3, 2 * resource.getpagesize()
_LEAK_FACTORS, _LEAK_MOST_BYTES, _LEAK_FEWEST = (1, 4, 16), 1 << 26, 128
#: How long the unchecked calls before a trial may take.
_CALLS_BEFORE_S = 0.1
#: Where a worker has the arena once more, read-only.
_SEALED_SLOT = 2
#: How many buffers lie at the end of a GPU's mapped memory, one after another; one where a call is larger.
_MOST_EDGES, _EDGES_BYTES = 4, 1 << 28
#: How the names of probes begin that have other values, and other strides, as in ``variants``, which needs torch.
_OTHER, _STRIDED = "other ", "strided"
#: ... and those of probes that say something where a plan takes such a call, and nothing where it does not.
_TALL = "tall"
_IF_TAKEN = ("strided in front", "tiny", _TALL, "only last", "all but last")
_SIZE = re.compile(r"size (\d+) -> (\d+)")
#: A tensor's least alignments that are tried, in this order, and the one that all contract trials have.
_ALIGNMENTS = (1, 16, 32, 64)
_CONTRACT_ALIGNMENT = {"cpu": HOST_ALIGN_BYTES, "cuda": ALIGN_BYTES}
_TRITON_ALIGNMENT = 16
#: More threads than most machines have cores, and as many as a sandbox surely allows.
_MANY_THREADS, _MOST_THREADS = 97, 512
#: What a candidate's buffers may take of the device's memory; the rest is the oracle's and its references'.
_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}


@dataclass
class _Findings:
    cases: list[CaseResult] = field(default_factory=list)
    partial: bool = False
    guard: Guard = field(default_factory=Guard)

    @property
    def verification(self) -> Verification:
        ratios = [case.error_ratio for case in self.cases if case.error_ratio is not None and case.contract]
        oracle: Literal["fp64", "partial"] = "partial" if self.partial else "fp64"
        return Verification(tuple(self.cases), oracle, max(ratios, default=None), self.guard)


class _Untried(Exception):
    """A probe that was not run: the plan refuses it, or has no kernel for it yet."""


class Plans(Protocol):
    """Makes plans and binaries for shapes beside the declared ones."""

    device: DeviceFacts

    def trace(self, workload: WorkloadFacts) -> TracedPlan: ...

    def knows(self, traced: TracedPlan) -> bool: ...

    def compile(self, traced: TracedPlan) -> tuple[Binary, ...]: ...


class Verifier:
    """One candidate's verification. ``worker_of`` starts a fresh worker with a product loaded."""

    def __init__(
        self,
        target: Target,
        facts: TargetFacts,
        kitchen: Plans,
        oracle: OracleClient,
        worker_of: Callable[[Product], Worker],
        *,
        trials: int,
        hang_limit_s: float,
        kept: tuple[str, ...] = (),
        timed_frames: Callable[[WorkloadFacts], int] = lambda workload: 1,
        probed: bool = True,
        guard: Guard | None = None,
    ) -> None:
        self.target, self.facts, self.kitchen, self.oracle = target, facts, kitchen, oracle
        self.worker_of, self.trials, self.hang_limit_s = worker_of, trials, hang_limit_s
        #: State that a module candidate does not take over: it keeps the values of its construction.
        self.kept = kept
        #: How many frames a sitting will lay out.
        self.timed_frames = timed_frames
        #: False: what was not drawn is not tried, and stays outside the guard.
        self.probed = probed
        #: What is outside of it already is not probed.
        self._findings = _Findings(guard=guard or Guard())
        self._excluded = self._findings.guard if guard is not None else None

    def verify(self, products: Sequence[Product]) -> Verification:
        """All contract trials, then the probes. Raises Refusal at the first workload that fails."""
        for product in products:
            self._check_structure(product)
        for product in products:
            most = self._most_families(product.workload)
            families = self.oracle.families(self.target, product.workload.name, most)
            trials = contract_trials(product.workload, families, trials=self.trials)
            if self.oracle.mutates(self.target, product.workload.name):
                # What the trial before wrote there is not what the next one finds.
                trials = tuple(trial for trial in trials if not (trial.renewed or trial.exchanged))
            self._run_contract(product, trials)
        for before, product in itertools.pairwise(products):
            self._check_turns(before, product)
        if not self.probed:
            self._narrow("nothing but the drawn calls was tried", contiguous=True, drawn=True)
        names = [workload.name for workload in self.facts.workloads]
        # Secretly: a kernel must not know which of many workloads nobody looks around.
        probed = set(secrets.SystemRandom().sample(names, min(len(names), _MAX_PROBED_WORKLOADS)))
        for product in products if self.probed else ():
            if product.workload.name in probed:
                self._probe(product)
        return self._findings.verification

    def _most_families(self, workload: WorkloadFacts) -> int | None:
        return BIG_CALL_FAMILIES if _is_big(workload) else None

    def _check_structure(self, product: Product) -> None:
        mismatches = compare_structure(product.traced.main, product.workload)
        if mismatches:
            name = product.workload.name
            self._findings.cases.append(CaseResult(name, "structure", True, False, None, None, mismatches))
            raise self._refusal(self._findings.cases[-1:])

    def _refusal(self, failed: Sequence[CaseResult]) -> Refusal:
        """The gravest status of the failed cases, with the first mismatch that has it."""
        pairs = [(case, mismatch) for case in failed for mismatch in case.mismatches]
        status = status_of(tuple(mismatch for _, mismatch in pairs))
        case, first = next(pair for pair in pairs if status_of((pair[1],)) is status)
        reason = f"{first.output}: {first.detail}" + (f" ({first.pattern})" if first.pattern else "")
        return Refusal(status, f"{case.workload}/{case.case}: {reason}", verification=self._findings.verification)

    # -- contract

    def _run_contract(self, product: Product, trials: Sequence[Trial]) -> None:
        frames = 1 + max(trial.frame for trial in trials)
        # On a host nothing is aligned to more than torch's own tensors are.
        skew = HOST_ALIGN_BYTES if self.kitchen.device.kind == "cpu" else 0
        layout = call_layout(product.traced, frames=frames, skew_bytes=skew)
        self._require_room(product, layout)
        failed: list[CaseResult] = []
        with self._bench(product, layout, "") as run:
            for trial in trials:
                case = self._contract_case(product, run, trial)
                self._findings.cases.append(case)
                failed += [] if case.passed else [case]
                if len(failed) >= _MAX_FAILED:
                    break
            if failed:
                raise self._refusal(failed)
            self._check_left_behind(product, run.worker)
            self._check_left_running(product, run.worker)
            if not _is_big(product.workload):
                self._check_repeated(product, run, trials[-1])
                self._check_leaks(product, run)
                self._check_second_call(product, run, trials[-1])
                self._check_one_after_another(product, run, trials[-1])
                self._check_kept(product, run, trials[-1])
                self._check_second_instance(product, run, trials[-1])
                self._check_beside(product, run, trials[-1])
                self._check_crowded(product, run, trials[-1])
                self._check_late(product, run, trials[-1])
                self._check_changed(product, run, trials[-1])
                self._check_thread_counts(product, run, trials[-1])
                self._check_sealed(product, run, trials[-1])
                self._check_guarded(product, run.worker, trials[-1])
                self._check_edges(product, run.worker, trials[-1])
                if self.probed:
                    self._probe_misaligned(product, run.worker)

    def _require_room(self, product: Product, layout: CallLayout) -> None:
        """A plan may ask for any number of bytes; the oracle would have to fill them."""
        timed = call_layout(product.traced, frames=self.timed_frames(product.workload))
        nbytes, device = max(layout.data["nbytes"], timed.data["nbytes"]), self.kitchen.device
        room = int(_MEMORY_SHARE[device.kind] * device.memory_bytes)
        if room and nbytes > room:
            raise Refusal(
                Status.REJECTED,
                f"{product.workload.name}: the plan's buffers take {nbytes / 2**30:.1f} GiB, "
                f"{room / 2**30:.1f} GiB of {device.name} are to be had",
            )

    def _contract_case(self, product: Product, run: _Run, trial: Trial) -> CaseResult:
        try:
            return run.case(product.workload.name, trial, contract=True)
        except WorkerTimeout as error:
            raise self._broken(product, trial, Status.TIMEOUT, error) from error
        except (WorkerFailure, LaunchFailure) as error:
            raise self._broken(product, trial, Status.RUNTIME_ERROR, error) from error

    def _check_left_behind(self, product: Product, worker: Worker) -> None:
        """A call that is right and leaves another rounding, or another default dtype, makes others wrong."""
        left = worker.left_changed(timeout_s=self.hang_limit_s)
        if left:
            raise Refusal(
                Status.REJECTED,
                f"{product.workload.name}: a call leaves changed what other code answers by: {', '.join(left)}; "
                "put it back before returning",
                verification=self._findings.verification,
            )

    def _check_left_running(self, product: Product, worker: Worker) -> None:
        """Threads that go on when a call has returned take their time from whoever is timed next."""
        for interval_s in _IDLE_S:
            before_ns = worker.processor_ns()
            time.sleep(interval_s)
            if worker.processor_ns() - before_ns < _IDLE_SHARE * interval_s * 1e9:
                return
        raise Refusal(
            Status.REJECTED,
            f"{product.workload.name}: threads of the candidate go on working when its calls have returned",
            verification=self._findings.verification,
        )

    def _check_repeated(self, product: Product, run: _Run, last: Trial) -> None:
        """Many calls on the last trial's values: threads that race each other are right most of the time."""
        if self.oracle.mutates(self.target, product.workload.name):
            return  # the values are no longer those
        trial = replace(last, name="repeated", calls_before=0)
        self._judge_further(product, trial, run.repeated)

    def _judge_further(self, product: Product, trial: Trial, judge: Callable[[str, Trial], CaseResult]) -> None:
        """One trial beside those that were drawn up. Raises Refusal where it fails."""
        try:
            case = judge(product.workload.name, trial)
        except WorkerTimeout as error:
            raise self._broken(product, trial, Status.TIMEOUT, error) from error
        except (WorkerFailure, LaunchFailure) as error:
            raise self._broken(product, trial, Status.RUNTIME_ERROR, error) from error
        self._findings.cases.append(case)
        if not case.passed:
            raise self._refusal([case])

    def _check_leaks(self, product: Product, run: _Run) -> None:
        """Does call after call leave memory behind, or descriptors? A launch plan on a GPU takes none itself."""
        name = product.workload.name
        if (self.kitchen.device.kind == "cuda" and product.traced.main.steps) or self.oracle.mutates(self.target, name):
            return
        leak = run.leak()
        if not leak and run.keeps_inputs():
            leak = "calls keep hold of their inputs, each of them, and of the memory that those take"
        if leak:
            raise Refusal(Status.REJECTED, f"{name}: {leak}", verification=self._findings.verification)

    def _check_second_call(self, product: Product, run: _Run, last: Trial) -> None:
        """Where forward writes its state, from the state that the reference's first call leaves: a counter that is set
        to one, and what is derived from the state as constructed, is right in a first call only."""
        if not any(path.startswith("state/") for path in self.oracle.mutates(self.target, product.workload.name)):
            return
        case = TrialCase(secrets.randbits(62), weights_seed=last.case.weights_seed, advanced=True)
        trial = replace(last, name="a second call", case=case, calls_before=0, renewed=False, exchanged=False)
        self._judge_further(product, trial, lambda name, second: run.case(name, second, contract=True))

    def _check_one_after_another(self, product: Product, run: _Run, last: Trial) -> None:
        """New values in two frames, then a call in each without a pause, as a model makes them: a kernel that takes
        quick calls for a clock's, or keeps something from one to the next, is right in all other trials."""
        if self.oracle.mutates(self.target, product.workload.name):
            return  # what all calls but the last left cannot be told any more
        trial = replace(last, name="one after another", calls_before=0, renewed=False, exchanged=False)
        self._judge_further(product, trial, run.one_after_another)

    def _check_kept(self, product: Product, run: _Run, last: Trial) -> None:
        """Answers that the caller keeps while it goes on, as a loop does that appends them to a list: a module that
        returns memory of its own, in turn, overwrites them sooner or later. A plan's answers lie where the caller says.
        """
        if product.traced.main.steps or self.oracle.mutates(self.target, product.workload.name):
            return
        trial = replace(last, name="answers are kept", calls_before=0, renewed=False, exchanged=False)
        try:
            count, changed = run.kept_answers(trial)
        except WorkerTimeout as error:
            raise self._broken(product, trial, Status.TIMEOUT, error) from error
        except (WorkerFailure, LaunchFailure) as error:
            raise self._broken(product, trial, Status.RUNTIME_ERROR, error) from error
        if changed:
            reason = (
                f"{product.workload.name}: of {count} answers that were kept while the module was called again, "
                f"{changed} changed: return memory of each call's own"
            )
            raise Refusal(Status.REJECTED, reason, verification=self._findings.verification)

    def _check_second_instance(self, product: Product, run: _Run, last: Trial) -> None:
        """Another instance beside the first, as a network's second layer is, with weights of its own: a module that
        keeps what it derived from weights for all of its class answers with the first one's."""
        if product.traced.main.steps or self.oracle.mutates(self.target, product.workload.name):
            return
        weights = (buffer for buffer in product.traced.main.buffers if buffer.role == "state")
        if sum(buffer.spec.extent_bytes for buffer in weights) > _MOST_WEIGHTS_BYTES:
            return  # three of them may be more than there is room for
        assert isinstance(run.worker, ModuleWorker)
        for name in ("a second instance", "a third instance"):  # loaded alike, and the first one long ago
            try:
                # The third one may lie where those before it did: a cache may know weights by their address.
                run.worker.another_instance(name, alone=name == "a third instance", timeout_s=self.hang_limit_s)
            except LaunchFailure:
                return  # nobody promised that there may be two
            case = TrialCase(secrets.randbits(62), weights_seed=secrets.randbits(62))
            trial = replace(last, name=name, case=case, calls_before=0, renewed=False, exchanged=False)
            self._judge_further(product, trial, lambda name, other: run.case(name, other, contract=True))

    def _check_beside(self, product: Product, run: _Run, last: Trial) -> None:
        """Two threads make the call at once, each with values and scratch of its own, as a server's do: a kernel whose
        workspace is static mixes them up."""
        if self.kitchen.device.kind != "cpu" or not product.traced.main.steps:
            return
        if self.oracle.mutates(self.target, product.workload.name):
            return  # the state is one for both, and what many calls left of it cannot be told
        trial = replace(last, name="two callers at once", calls_before=0, renewed=False, exchanged=False)
        with self._bench(product, call_layout(product.traced, frames=1), "", run.worker) as second:
            self._judge_further(product, trial, lambda name, beside: run.beside(second, name, beside))

    def _check_crowded(self, product: Product, run: _Run, last: Trial) -> None:
        """New values, and a call while one multiprocessor is free, or one block's share of it: blocks that else run
        side by side run one after another, so that who reads what others have not written yet finds what the call
        before left. Then two blocks beside others that take their turns: who waits by the clock comes too soon."""
        if self.kitchen.device.kind != "cuda" or not product.traced.main.steps:
            return
        sizes = block_sizes(product.traced.main, product.binaries)
        rooms = [(0, False), *((size, False) for size in sorted({max(sizes), min(sizes)} if sizes else ()))]
        if sizes:
            rooms.append((2 * max(sizes), True))
        for room, at_work in rooms:
            case = TrialCase(secrets.randbits(62), weights_seed=last.case.weights_seed)
            name = f"beside a busy device, {room} threads free" if room else "beside a busy device"
            name += ", its turns taken" if at_work else ""
            trial = replace(last, name=name, case=case, calls_before=0, renewed=False, exchanged=False)
            trial = replace(trial, room=room, at_work=at_work)
            self._judge_further(product, trial, lambda name, crowded: run.case(name, crowded, contract=True))

    def _check_turns(self, product: Product, other: Product) -> None:
        """One instance of a module is called with both workloads by turns: what it sized, or kept, by its first call is
        wrong afterwards. A launch plan has an instance of its own for each."""
        mutated = any(self.oracle.mutates(self.target, one.workload.name) for one in (product, other))
        if product.traced.main.steps or mutated or _is_big(product.workload) or _is_big(other.workload):
            return
        with self._bench(product, call_layout(product.traced, frames=1), "") as run:
            assert isinstance(run.worker, ModuleWorker)
            with self._bench(other, call_layout(other.traced, frames=1), "", run.worker) as second:
                for turned in (run, second, run):
                    run.worker.turn(turned.product.traced, turned.product.workload, timeout_s=self.hang_limit_s)
                    trial = Trial("workloads by turns", TrialCase(secrets.randbits(62)), frame=0, poison=0)
                    self._judge_further(turned.product, trial, functools.partial(turned.case, contract=True))

    def _check_late(self, product: Product, run: _Run, last: Trial) -> None:
        """New values that the caller's stream writes after the call: host code that works in another stream has to
        wait for it. In all other trials the inputs have been there for long."""
        if self.kitchen.device.kind != "cuda" or product.traced.main.steps:
            return
        if self.oracle.mutates(self.target, product.workload.name):
            return  # it would change copies
        case = TrialCase(secrets.randbits(62), weights_seed=last.case.weights_seed)
        trial = replace(last, name="inputs that are still being written", case=case, calls_before=0, renewed=False)
        trial = replace(trial, exchanged=False, late=True)
        self._judge_further(product, trial, lambda name, late: run.case(name, late, contract=True))

    def _check_changed(self, product: Product, run: _Run, last: Trial) -> None:
        """Values that change between two calls of a burst: a kernel that works after a pause only, when somebody may
        have looked or written, is right in all other trials."""
        if self.oracle.mutates(self.target, product.workload.name):
            return  # so many calls have changed their own inputs that no answer can be told any more
        trial = replace(last, name="changed between calls", calls_before=0, renewed=False, exchanged=False)
        self._judge_further(product, trial, run.changed)

    def _check_thread_counts(self, product: Product, run: _Run, last: Trial) -> None:
        """With one OpenMP thread, and with more than there are cores: production's torch.set_num_threads is one that
        no verification foresees, and a kernel that counts on this machine's leaves work undone there, or writes behind
        its arrays."""
        if self.kitchen.device.kind != "cpu" or not product.traced.main.steps:
            return
        usual = openmp_threads()
        trial = replace(last, calls_before=0, renewed=False, exchanged=False)
        for count in sorted({1, min(2 * usual + 1, _MOST_THREADS), _MANY_THREADS}):
            case = replace(last.case, seed=secrets.randbits(62))
            trial = replace(trial, name=f"OpenMP threads: {count}", case=case)
            run.worker.set_threads(count)
            self._judge_further(product, trial, lambda name, counted: run.case(name, counted, contract=True))
        run.worker.set_threads(usual)

    def _check_sealed(self, product: Product, run: _Run, last: Trial) -> None:
        """Once more with inputs, parameters and prepared values mapped read-only: a kernel that writes them and puts
        the old bytes back shows in no comparison. (A module's host code could map a GPU's memory as it likes.)"""
        trial = replace(last, name="sealed inputs", case=replace(last.case, seed=secrets.randbits(62)))
        trial = replace(trial, calls_before=0, renewed=False, exchanged=False)
        run.seal(self.oracle.mutates(self.target, product.workload.name))
        try:
            self._findings.cases.append(run.case(product.workload.name, trial, contract=True))
        except (WorkerCrash, LaunchFailure) as error:
            if isinstance(error, LaunchFailure) and self.kitchen.device.kind == "cpu":
                raise self._broken(product, trial, Status.RUNTIME_ERROR, error) from error
            # A GPU refuses the write itself; all that has changed since the calls before is the mapping.
            reason = f"a call writes to its inputs, parameters or prepared values, and may put the old back: {error}"
            raise self._broken(product, trial, Status.REJECTED, ForgeError(reason)) from error
        except WorkerFailure as error:
            raise self._broken(product, trial, Status.RUNTIME_ERROR, error) from error
        if not self._findings.cases[-1].passed:
            raise self._refusal(self._findings.cases[-1:])

    def _check_guarded(self, product: Product, worker: Worker, last: Trial) -> None:
        """Once more with every buffer's end, then with its start, at a page that cannot be touched: a kernel that reads
        out of bounds and does nothing with it shows in no output."""
        if self.kitchen.device.kind != "cpu":
            return
        case = replace(last.case, seed=secrets.randbits(62))
        trial = replace(last, case=case, calls_before=0, renewed=False, exchanged=False)
        layout = call_layout(product.traced, frames=2, guarded=True)
        with self._bench(product, layout, "", worker) as run:
            for frame, name in enumerate(("at the end of a page", "at the start of a page")):
                trial = replace(trial, name=name, frame=frame)
                try:
                    self._findings.cases.append(run.case(product.workload.name, trial, contract=True))
                except WorkerCrash as error:
                    reason = f"a call reads or writes memory outside a buffer {trial.name}: {error}"
                    raise self._broken(product, trial, Status.REJECTED, ForgeError(reason)) from error
                if not self._findings.cases[-1].passed:
                    raise self._refusal(self._findings.cases[-1:])

    def _check_edges(self, product: Product, worker: Worker, last: Trial) -> None:
        """On a GPU: once more with one buffer after another where mapped memory ends, and with one where it begins."""
        if self.kitchen.device.kind != "cuda":
            return
        usual = call_layout(product.traced, frames=1)
        names = [name for name, _, nbytes in usual.data["regions"] if nbytes]
        if not product.traced.main.steps:  # a module's weights and answers lie in memory of its own
            names = [name for name in names if "/input/" in name]
        most = _MOST_EDGES if usual.data["nbytes"] < _EDGES_BYTES else 1
        for at_end in secrets.SystemRandom().sample(names, min(most, len(names))):
            layout = call_layout(product.traced, frames=1, edges=(names[names.index(at_end) - 1], at_end))
            name = f"{at_end.removeprefix('f0/')} at the end of memory"
            trial = replace(last, name=name, case=replace(last.case, seed=secrets.randbits(62)), frame=0)
            trial = replace(trial, calls_before=0, renewed=False, exchanged=False)
            with self._bench(product, layout, "", worker) as run:
                try:
                    self._findings.cases.append(run.case(product.workload.name, trial, contract=True))
                except (WorkerCrash, LaunchFailure) as error:
                    reason = f"a call touches memory outside a buffer that lies where mapped memory ends: {error}"
                    raise self._broken(product, trial, Status.REJECTED, ForgeError(reason)) from error
            if not self._findings.cases[-1].passed:
                raise self._refusal(self._findings.cases[-1:])

    def _broken(self, product: Product, trial: Trial, status: Status, error: Exception) -> Refusal:
        result = CaseResult(product.workload.name, trial.name, True, False, None, None, (), note=str(error))
        self._findings.cases.append(result)
        verification = self._findings.verification
        return Refusal(status, f"{product.workload.name}/{trial.name}: {error}", verification=verification)

    @contextlib.contextmanager
    def _bench(self, product: Product, layout: CallLayout, variant: str, kept: Worker | None = None) -> Iterator[_Run]:
        """An arena with a worker on it: a fresh one, or ``kept``, which lives on afterwards (slot 1 is then used)."""
        workload = self._probed_workload if variant else product.workload.name
        bench, arena = self.oracle.open_bench(self.target, workload, variant, layout.data)
        worker, slot = kept, 0 if kept is None else 1
        try:
            worker = worker or self._started(product)
            worker.attach(slot, arena, guards=layout.guards)
            yield _Run(self, product, layout, bench, arena, worker, slot)
        except (LaunchFailure, WorkerFailure) as error:
            raise Refusal(Status.RUNTIME_ERROR, str(error), verification=self._findings.verification) from error
        finally:
            if worker is not None and kept is None:
                worker.close()
            arena.close()
            self.oracle.close_bench(bench)

    def _started(self, product: Product) -> Worker:
        try:
            return self.worker_of(product)
        except WorkerTimeout as error:
            raise Refusal(Status.TIMEOUT, str(error), verification=self._findings.verification) from error
        except WorkerFailure as error:
            raise Refusal(Status.RUNTIME_ERROR, str(error), verification=self._findings.verification) from error

    # -- probes

    _probed_workload = ""

    def _probe(self, product: Product) -> None:
        """Run what the contract does not promise; whatever fails narrows the guard."""
        workload = product.workload
        if _is_big(workload):
            self._narrow(
                "the call moves gigabytes and was not probed",
                contiguous=True,
                drawn=True,
                align_bytes=self._contract_alignment,
            )
            return
        excluded = self._excluded
        if excluded is not None and not any(self._is_open(excluded, strided) for strided in (True, False)):
            return
        self._probed_workload = workload.name
        try:
            sizes = 0
            variants = self.oracle.variants(self.target, workload.name)
            for (name, _), members in itertools.groupby(variants, key=_kind_of):
                if name.startswith(_OTHER):
                    for other, variant in members if excluded is None else ():
                        self._probe_other_values(other, variant)
                    continue
                strided = name.startswith(_STRIDED)
                if name.startswith(_IF_TAKEN) and not self._takes(name, product.traced.main):
                    continue
                sizes += not strided
                if excluded is None or self._is_open(excluded, strided):
                    self._probe_variants(list(members), strided)
            if not sizes:
                self._narrow("no neighbouring shape could be drawn", drawn=True)
        finally:
            self._probed_workload = ""

    def _takes(self, name: str, plan: LaunchPlan) -> bool:
        """Is a variant worth a process of its own that says nothing of who does not take it?"""
        if not plan.steps:  # nothing of a module is dispatched to; but what its target promises
            return self.facts.strides == "any" if name.startswith(_STRIDED) else self.facts.dynamic
        # A grid's first dimension is as long as any tensor.
        return not name.startswith(_TALL) or any(max(launch.grid[1:], default=1) > 1 for launch in plan.launches)

    def _is_open(self, excluded: Guard, strided: bool) -> bool:
        """Whether such calls are in use although not drawn, or promised by the target whatever the guard says."""
        promised = self.facts.strides == "any" if strided else self.facts.dynamic
        return promised or not (excluded.contiguous_only if strided else excluded.drawn_shapes_only)

    def _probe_other_values(self, name: str, workload: WorkloadFacts) -> None:
        """An input that is the same in every draw, with other values: right answers are not promised, but who relies on
        them should know."""
        try:
            problem = self._variant_problem(name, workload, contract=False)
        except _Untried as error:
            problem = str(error)
        if problem:
            path = name.removeprefix(_OTHER)
            self._narrow(f"input {path} is the same in every draw; with other values of it: {problem}")

    def _probe_misaligned(self, product: Product, worker: Worker) -> None:
        """The last thing the contract's worker does: a misaligned access may well end it. The guard asks for the least
        alignment with which inputs and weights were right."""
        if any(binary.language == "triton" for binary in product.binaries):
            self._narrow("Triton's kernels are compiled for 16-byte aligned tensors", align_bytes=_TRITON_ALIGNMENT)
            return
        known, most = self._findings.guard.align_bytes, self._contract_alignment
        kept: Worker | None = worker
        tried = [align for align in _ALIGNMENTS if known <= align < most]
        for align, more in zip(tried, [*tried[1:], most], strict=True):
            problem = self._misaligned_problem(product, align, kept)
            if not problem:
                return
            what = "misaligned tensors" if align == 1 else f"tensors aligned to {align} bytes"
            self._narrow(f"{what}: {problem}", align_bytes=more)
            kept = None

    @property
    def _contract_alignment(self) -> int:
        return _CONTRACT_ALIGNMENT[self.kitchen.device.kind]

    def _misaligned_problem(self, product: Product, aligned_to: int, kept: Worker | None) -> str:
        """Once with no tensor aligned to more, then with some that are: a kernel may look at one address and mean all
        of them."""
        plans = [plan for plan in (product.traced.main, product.traced.prepare) if plan is not None]
        places = {buffer.source for plan in plans for buffer in plan.buffers if buffer.role in ("input", "state")}
        if not places:
            return ""
        layout = call_layout(product.traced, frames=2, aligned_to=aligned_to)
        self._probed_workload = product.workload.name
        name = "misaligned" if aligned_to == 1 else f"aligned to {aligned_to} bytes"
        frames = 1 if len(places) == 1 else 2
        problem = self._probe_run(product, layout, "", name, contract=False, kept=kept, frames=frames)
        if problem or self.kitchen.device.kind != "cpu":
            return problem
        # A vector that is aligned crosses no page: only such tensors can end where it reads on.
        layout = call_layout(product.traced, frames=1, aligned_to=aligned_to, guarded=True)
        return self._probe_run(product, layout, "", f"{name}, at the end of a page", contract=False, kept=kept)

    def _probe_variants(self, members: Sequence[tuple[str, WorkloadFacts]], strided: bool) -> None:
        """The first of them that the plan takes. A plan that refuses a size sends production's call to the reference,
        and one that has other constants there would be compiled anew: then the next one tells more."""
        contract = self.facts.strides == "any" if strided else self.facts.dynamic
        if strided and not contract and self._findings.guard.contiguous_only:
            return
        refused = ""
        for name, workload in members:
            try:
                problem = self._variant_problem(name, workload, contract)
            except _Untried as error:
                refused = str(error)
                continue
            self._conclude(name, problem, contract, strided)
            return
        if members[0][0].startswith(_IF_TAKEN):
            return
        # Where nothing but a far size was drawn, it was for kernels that take it as they are.
        if contract or strided or len(members) > 1 or not _grows(members[0][0]):
            self._conclude(members[-1][0], refused, contract, strided)

    def _conclude(self, name: str, problem: str, contract: bool, strided: bool) -> None:
        """Raises Refusal for a problem with what the target promises; any other narrows the guard."""
        if problem and contract:
            case = CaseResult(self._probed_workload, name, True, False, None, None, note=problem)
            self._findings.cases.append(case)
            reason = f"the target promises {'any strides' if strided else 'dynamic shapes'}: {name}: {problem}"
            raise Refusal(Status.REJECTED, reason, verification=self._findings.verification)
        if problem:
            self._narrow(f"{name}: {problem}", contiguous=strided, drawn=not strided)

    def _variant_problem(self, name: str, workload: WorkloadFacts, contract: bool) -> str:
        """ "" where it passes, else what went wrong. Raises _Untried where it was not run for a plan's reasons."""
        try:
            traced = self.kitchen.trace(workload)
        except Unsupported as error:
            raise _Untried(f"plan.py refuses it: {error.what}") from error
        except Refusal as refusal:
            return refusal.reason
        if not contract and not self.kitchen.knows(traced):
            raise _Untried("its kernels are specialised to the drawn shapes by constants")
        mismatches = compare_structure(traced.main, workload)
        if mismatches:
            return f"{mismatches[0].output}: {mismatches[0].detail}"
        try:
            product = Product(workload, traced, self.kitchen.compile(traced))
        except Refusal as refusal:
            return refusal.reason
        return self._probe_run(product, call_layout(traced, frames=1), name, name, contract=contract)

    def _probe_run(
        self,
        product: Product,
        layout: CallLayout,
        variant: str,
        name: str,
        *,
        contract: bool,
        kept: Worker | None = None,
        frames: int = 1,
    ) -> str:
        """ "" where the probe passes in all ``frames``, else what went wrong."""
        case = CaseResult(self._probed_workload, name, contract, False, None, None)
        try:
            with self._bench(product, layout, variant, kept) as run:
                for frame in range(frames):
                    trial = Trial(name, TrialCase(secrets.randbits(62)), frame, 0)
                    case = run.case(self._probed_workload, trial, contract=contract)
                    if not case.passed:
                        break
        except (WorkerFailure, LaunchFailure) as error:
            case = replace(case, passed=False, note=str(error))
        except Refusal as refusal:
            case = replace(case, passed=False, note=refusal.reason)
        self._findings.cases.append(case)
        if case.passed:
            return ""
        return case.note or f"{case.mismatches[0].output}: {case.mismatches[0].detail}"

    def _narrow(self, reason: str, *, contiguous: bool = False, drawn: bool = False, align_bytes: int = 1) -> None:
        guard = self._findings.guard
        self._findings.guard = replace(
            guard,
            contiguous_only=guard.contiguous_only or contiguous,
            align_bytes=max(guard.align_bytes, align_bytes),
            drawn_shapes_only=guard.drawn_shapes_only or drawn,
            reasons=(*guard.reasons, reason),
        )


def _kind_of(variant: tuple[str, WorkloadFacts]) -> tuple[str, bool]:
    """What variants have in common of which the first that can be tried will do: the size that changes, and whether it
    grows."""
    name = variant[0]
    match = _SIZE.fullmatch(name)
    return (f"size {match[1]}", _grows(name)) if match else (name, False)


def _grows(name: str) -> bool:
    match = _SIZE.fullmatch(name)
    return match is not None and int(match[2]) > int(match[1])


def _is_big(workload: WorkloadFacts) -> bool:
    return workload.input_bytes + workload.output_bytes > BIG_CALL_BYTES


class _Run:
    """One worker on one bench."""

    def __init__(
        self,
        verifier: Verifier,
        product: Product,
        layout: CallLayout,
        bench: int,
        arena: ExportedArena,
        worker: Worker,
        slot: int,
    ) -> None:
        self.verifier, self.product, self.layout = verifier, product, layout
        self.bench, self.arena, self.worker, self.slot = bench, arena, worker, slot
        self._weights: tuple[int | None, bool, bool] | None = None
        self._sealed: tuple[int, frozenset[str]] | None = None

    def seal(self, written: frozenset[str]) -> None:
        """From now on the worker has all but outputs, scratch and what the reference writes read-only."""
        # A description that was opened read-only cannot be mapped writable, nor made so later; device memory has no
        # such description, but a launch plan no host code either.
        host = self.verifier.kitchen.device.kind == "cpu"
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

    def _call_often(self, frame: int, calls: int) -> None:
        """``calls`` calls in ``frame``, fewer where they take long; nobody looks at their outputs."""
        sets = [self._bindings(frame)]
        began = time.monotonic()
        done, batch = 0, 1  # a call may take as long as the limit for hangs allows
        while done < calls:
            batch = min(batch, calls - done)
            self.worker.run_many(sets, batch, timeout_s=self.verifier.hang_limit_s)
            done, batch = done + batch, 2 * batch
            spent_s = time.monotonic() - began
            # A busy machine makes calls look slow: the fewest are made all the same, unless they take very long.
            if spent_s > (_CALLS_BEFORE_S if done >= CALLS_BEFORE[0] else 10 * _CALLS_BEFORE_S):
                return

    def leak(self) -> str:
        """What calls leave behind, where they do so in every one of some batches of calls; else ""."""
        sets, limit_s = [self._bindings(0)], self.verifier.hang_limit_s
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
            if leaked_bytes < factor * _LEAK_BYTES:
                return ""
            if leaked_bytes >= _LEAK_MOST_BYTES:
                break  # sixteen times as much may be more than there is
        told = leaked_bytes / (factor * calls)
        return f"every call leaves some {told:.3g} bytes of memory behind: free what a kernel allocates"

    def _growth(self, calls: int, enough_bytes: int) -> tuple[int, int]:
        """Bytes and descriptors that the process grows by in so many calls: the least of some batches, 0 at least.
        ``enough_bytes``: there is no need to go on below."""
        sets, limit_s = [self._bindings(0)], self.verifier.hang_limit_s
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
        worker, limit_s = self.worker, self.verifier.hang_limit_s
        if self.verifier.kitchen.device.kind == "cuda":
            return 0, worker.allocated_bytes(timeout_s=limit_s), 0
        return worker.own_bytes(), worker.allocated_bytes(timeout_s=limit_s), worker.open_files()

    def repeated(self, workload: str, trial: Trial) -> CaseResult:
        """Up to so many calls, and so long, on the values that ``trial`` put there; the first wrong one is told."""
        oracle, began = self.verifier.oracle, time.monotonic()
        leaves = output_leaves(self.product.traced.main, self.layout, trial.frame)
        # A caller may have written into the answer: who finds most of it there may not leave the rest.
        oracle.smudge(self.bench, trial.frame, leaves, secrets.randbits(62))
        for done in range(1, _REPEATS[1] + 1):
            leaves = output_leaves(self._call_in_a_row(trial.frame), self.layout, trial.frame)
            check = oracle.recheck(self.bench, trial.frame, leaves)
            if check.mismatches:
                told = [replace(m, detail=f"a repeated call on the same inputs: {m.detail}") for m in check.mismatches]
                ratio, bound = check.error_ratio, check.bound
                return CaseResult(workload, trial.name, True, False, ratio, bound, tuple(told[:8]))
            if time.monotonic() - began > (_REPEATS_S if done >= _REPEATS[0] else 10 * _REPEATS_S):
                break
        return CaseResult(workload, trial.name, True, True, None, None, ())

    def one_after_another(self, workload: str, trial: Trial) -> CaseResult:
        """Other values in two frames, a call in each by one request, and the answers: of the first, which finds nobody
        at work, and of the second, which comes right behind it."""
        oracle, frames = self.verifier.oracle, secrets.SystemRandom().sample(range(len(self.layout.main)), 2)
        for frame in frames:
            case = replace(trial.case, seed=secrets.randbits(62), family="drawn", kept=self.verifier.kept)
            oracle.fill(self.bench, frame, case, trial.poison)
        self._prepare(trial)
        sets = [self._bindings(frame) for frame in frames]
        self.worker.run_many(sets, len(sets), timeout_s=self.verifier.hang_limit_s)
        check = self._judged(frames)
        told = tuple(replace(m, detail=f"calls one after another: {m.detail}") for m in check.mismatches[:8])
        return CaseResult(workload, trial.name, True, not told, check.error_ratio, check.bound, told)

    def kept_answers(self, trial: Trial) -> tuple[int, int]:
        """Calls on other values in random order, their answers kept: how many, and how many of them changed."""
        if not isinstance(self.worker, ModuleWorker):
            return 0, 0
        frames = range(len(self.layout.main))
        self._draw_anew(trial)
        sets, limit_s = [self._bindings(frame) for frame in frames], self.verifier.hang_limit_s
        call_ns = self.worker.run_many(sets[:1], 2, timeout_s=limit_s) / 2
        room = _KEPT_BYTES[self.verifier.kitchen.device.kind] // max(1, 2 * self.product.workload.output_bytes)
        count = int(min(_KEPT_ANSWERS, room, max(_FEWEST_KEPT, _KEPT_S * 1e9 / max(1.0, call_ns))))
        if count < _FEWEST_KEPT:
            return 0, 0
        changed = 0
        for first in (True, False):
            order = secrets.SystemRandom().choices(frames, k=-(-count // 2) if first else count // 2)
            changed = self.worker.run_kept(sets, order, first=first, timeout_s=limit_s + 10 * _KEPT_S)
            if first:  # who gives the same memory again would else write there what stands there
                self._draw_anew(trial)
        return count, changed

    def _draw_anew(self, trial: Trial) -> None:
        """New values in every frame."""
        for frame in range(len(self.layout.main)):
            case = replace(trial.case, seed=secrets.randbits(62), family="drawn", kept=self.verifier.kept)
            self.verifier.oracle.fill(self.bench, frame, case, trial.poison)

    def keeps_inputs(self) -> bool:
        """Does a module keep hold of the inputs of its calls, of all of them?"""
        workload, limit_s = self.product.workload, self.verifier.hang_limit_s
        if not isinstance(self.worker, ModuleWorker) or not workload.input_bytes:
            return False
        call_ns = max(1, self.worker.run_many([self._bindings(0)], 2, timeout_s=limit_s) // 2)
        room = _KEPT_BYTES[self.verifier.kitchen.device.kind] // workload.input_bytes
        calls = min(_FRESH_CALLS[1], room, max(_FRESH_CALLS[0], int(_KEPT_S * 1e9 / call_ns)))
        return calls >= _FEWEST_KEPT and not self.worker.run_fresh(self._bindings(0), calls, timeout_s=limit_s)

    def beside(self, second: _Run, workload: str, trial: Trial) -> CaseResult:
        """Calls here while another thread makes them on the ``second`` bench, and the other way round."""
        oracle, limit_s = self.verifier.oracle, self.verifier.hang_limit_s
        for run in (self, second):
            case = replace(trial.case, seed=secrets.randbits(62), family="drawn", kept=self.verifier.kept)
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

    def changed(self, workload: str, trial: Trial) -> CaseResult:
        """Bursts of calls in one frame or all of them, whose values change before the last call in each."""
        chance, frames = secrets.SystemRandom(), list(range(len(self.layout.main)))
        for frame in frames:
            case = replace(trial.case, seed=secrets.randbits(62), family="drawn", kept=self.verifier.kept)
            self.verifier.oracle.fill(self.bench, frame, case, trial.poison)
        self._prepare(trial)
        limit_s, began = self.verifier.hang_limit_s, time.monotonic()
        call_ns = self.worker.run_many([self._bindings(0)], 2, timeout_s=limit_s) / 2
        for burst in range(_BURSTS):
            visited = chance.sample(frames, len(frames) if burst % 2 == 0 else 1)
            self._burst(visited, drawn_calls(chance, len(visited), call_ns), renewed=burst == 0)
            check = self._judged(visited)
            if check.mismatches:
                told = tuple(replace(m, detail=f"{_BETWEEN_CALLS}: {m.detail}") for m in check.mismatches[:8])
                return CaseResult(workload, trial.name, True, False, check.error_ratio, check.bound, told)
            if time.monotonic() - began > _BURSTS_S:
                break
        return CaseResult(workload, trial.name, True, True, None, None, ())

    def _burst(self, visited: Sequence[int], calls: int, *, renewed: bool) -> None:
        stage, seeds = self.verifier.oracle.stage, [secrets.randbits(62) for _ in visited]
        pieces = {at: stage(self.bench, frame, seeds[at], renewed=renewed) for at, frame in enumerate(visited)}
        sets = [self._bindings(frame) for frame in visited]
        changed_burst(self.worker, sets, calls, pieces, slot=self.slot, timeout_s=self.verifier.hang_limit_s)

    def _judged(self, frames: Sequence[int]) -> Check:
        """What calls left in the frames: the first wrong answer, or the last right one."""
        plan = self.product.traced.main
        self.worker.stop()
        for frame in frames:
            leaves = output_leaves(plan, self.layout, frame)
            check = self.verifier.oracle.check(self.bench, frame, leaves, zones=False)
            if check.mismatches:
                break
        self.worker.cont()
        return check

    def _prepare(self, trial: Trial) -> None:
        """Have the values of ``prepare`` made anew where the weights are not those that they were made from."""
        weights = (trial.case.weights_seed, trial.exchanged, trial.case.advanced)
        if self.product.traced.prepare is not None and self._weights != weights:
            limit_s = self.verifier.hang_limit_s
            self.worker.run("prepare", self.layout.prepare_bindings(self.slot), timeout_s=limit_s)
            self._weights = weights

    def _call_in_a_row(self, frame: int) -> LaunchPlan:
        """Calls without a pause, so that all threads are awake and meet; the plan that says where outputs lie."""
        plan, limit_s = self.product.traced.main, self.verifier.hang_limit_s
        if plan.steps and self.verifier.kitchen.device.kind == "cpu":
            bindings = self._bindings(frame)
            self.worker.run_repeated(bindings, _COMPARED, most_s=_COMPARED_S, timeout_s=limit_s)
            return plan
        self.worker.run_many([self._bindings(frame)], _IN_A_ROW, timeout_s=limit_s)
        returned = self.worker.run("main", self._bindings(frame), timeout_s=limit_s)
        return plan if returned is None else judged_plan(plan, returned)

    def case(self, workload: str, trial: Trial, *, contract: bool) -> CaseResult:
        """Fill, run and judge one trial. Raises the worker's failures."""
        oracle, limit_s = self.verifier.oracle, self.verifier.hang_limit_s
        if trial.calls_before:
            self._call_often(trial.frame_before, trial.calls_before)
        if trial.renewed:
            oracle.renew(self.bench, [secrets.randbits(62) for _ in self.layout.main])
        elif trial.exchanged:
            oracle.exchange(self.bench, trial.frame, secrets.randbits(62))
        else:
            oracle.fill(self.bench, trial.frame, replace(trial.case, kept=self.verifier.kept), trial.poison)
        self._prepare(trial)
        plan = self.product.traced.main
        bindings = self._bindings(trial.frame)
        room, at_work = trial.room, trial.at_work
        returned = self.worker.run("main", bindings, timeout_s=limit_s, room=room, at_work=at_work, late=trial.late)
        if returned is not None:
            wrong = compare_structure(returned, self.product.workload)
            if wrong:
                return CaseResult(workload, trial.name, contract, False, None, None, wrong)
            plan = judged_plan(plan, returned)
        # A thread that the call left behind must not finish the answer while it is being judged.
        self.worker.stop()
        check = oracle.check(self.bench, trial.frame, output_leaves(plan, self.layout, trial.frame), zones=trial.zones)
        self.worker.cont()
        self.verifier._findings.partial |= check.partial
        passed = not check.mismatches
        return CaseResult(workload, trial.name, contract, passed, check.error_ratio, check.bound, check.mismatches[:8])
