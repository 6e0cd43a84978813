"""Is it correct? Runs a candidate's trials in fresh workers and lets the oracle judge each."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

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
    CallLayout,
    Trial,
    call_layout,
    contract_trials,
)
from pytest_cudaforge.evaluation.contract import compare_structure, status_of
from pytest_cudaforge.evaluation.module_worker import ModuleWorker, NewInstance
from pytest_cudaforge.evaluation.oracle import OracleClient, TrialCase
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.runs import AGED_CALLS, Findings, Run, Setting
from pytest_cudaforge.evaluation.settings import DRAWN
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
#: How many calls of the reference's there were before later ones: some, as what wears off may be nothing at last.
_LATER_CALLS = ((300, 700), (1500, 3000))
#: Loaded alike, and the first one long ago. Whoever goes by where weights lie, or the module itself, by a number that a
#: copy takes over, or by what all of its class have in common, answers with another one's.
_INSTANCES: dict[str, NewInstance] = {
    "a second instance": "beside",
    "a copy": "copy",
    "a third instance": "weights alone",
    "a fourth instance": "alone",
}
#: A process that makes no call takes less than this share of a core's time, in one of some intervals at least, each so
#: long: OpenMP's threads look out for work for a while.
_IDLE_SHARE, _IDLE_S = 0.4, (0.03, 0.03, 0.1, 0.3, 0.5)
#: The weights of a module that is made three times, at most.
_MOST_WEIGHTS_BYTES = 1 << 28
#: How many buffers lie at the end of a GPU's mapped memory, one after another; one where a call is larger.
_MOST_EDGES, _EDGES_BYTES = 4, 1 << 28
#: How the names of probes begin that have other values, and other strides, as in ``variants``, which needs torch.
_OTHER, _STRIDED = "other ", "strided"
#: ... and those of probes that say something where a plan takes such a call, and nothing where it does not.
_TALL = "tall"
_IF_TAKEN = ("strided in front", "strided order", "tiny", _TALL, "only last", "all but last")
_SIZE = re.compile(r"size (\d+) -> (\d+)")
#: A tensor's least alignments that are tried, in this order, and the one that all contract trials have.
_ALIGNMENTS = (1, 16, 32, 64)
_CONTRACT_ALIGNMENT = {"cpu": HOST_ALIGN_BYTES, "cuda": ALIGN_BYTES}
_TRITON_ALIGNMENT = 16
#: More threads than most machines have cores, and as many as a sandbox surely allows.
_MANY_THREADS, _MOST_THREADS = 97, 512
#: What a candidate's buffers may take of the device's memory; the rest is the oracle's and its references'.
_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}


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
        #: How many frames a sitting will lay out.
        self.timed_frames = timed_frames
        #: False: what was not drawn is not tried, and stays outside the guard.
        self.probed = probed
        #: What is outside of it already is not probed.
        self._findings = Findings(guard=guard or Guard())
        self._setting = Setting(oracle, self._findings, kitchen.device.kind, hang_limit_s, kept)
        self._excluded = self._findings.guard if guard is not None else None

    def verify(self, products: Sequence[Product]) -> Verification:
        """All contract trials, then the probes. Raises Refusal at the first workload that fails."""
        for product in products:
            self._check_structure(product)
        for product in products:
            most = self._most_families(product.workload)
            families = self.oracle.families(self.target, product.workload.name, most)
            trials = contract_trials(product.workload, families, trials=self.trials)
            if self._mutated(product):
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

    def _mutated(self, product: Product) -> frozenset[str]:
        """What the reference writes of its inputs and its state, by path."""
        return self.oracle.mutates(self.target, product.workload.name)

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
            self._check_left_behind(product, run, trials[-1])
            self._check_left_running(product, run.worker)
            if not _is_big(product.workload):
                self._check_repeated(product, run, trials[-1])
                self._check_leaks(product, run)
                self._check_second_call(product, run, trials[-1])
                self._check_one_after_another(product, run, trials[-1])
                self._check_kept(product, run, trials[-1])
                self._check_second_instance(product, run, trials[-1])
                self._check_shortcuts(product, run, trials[-1])
                self._check_beside(product, run, trials[-1])
                self._check_crowded(product, run, trials[-1])
                self._check_late(product, run, trials[-1])
                self._check_changed(product, run, trials[-1])
                self._check_thread_counts(product, run, trials[-1])
                self._check_aged(product, run, trials[-1])
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

    def _contract_case(self, product: Product, run: Run, trial: Trial) -> CaseResult:
        try:
            return run.case(product.workload.name, trial, contract=True)
        except WorkerTimeout as error:
            raise self._broken(product, trial, Status.TIMEOUT, error) from error
        except (WorkerFailure, LaunchFailure) as error:
            raise self._broken(product, trial, Status.RUNTIME_ERROR, error) from error

    def _check_left_behind(self, product: Product, run: Run, last: Trial) -> None:
        """A call that is right and leaves another rounding, or another default dtype, makes others wrong."""
        try:
            left = self._changed_settings(product, run, last)
        except WorkerTimeout as error:
            raise self._broken(product, last, Status.TIMEOUT, error) from error
        if DRAWN in left and self.oracle.draws(self.target, product.workload.name):
            left = tuple(name for name in left if name != DRAWN)
        if left:
            raise Refusal(
                Status.REJECTED,
                f"{product.workload.name}: a call leaves changed what other code answers by: {', '.join(left)}; "
                "put it back before returning",
                verification=self._findings.verification,
            )

    def _changed_settings(self, product: Product, run: Run, last: Trial) -> tuple[str, ...]:
        """By name. A C++ plan makes one more call: who takes all cores leaves no trace where there were as many threads
        before; with one more none of the team goes unasked."""
        usual = openmp_threads() if self.kitchen.device.kind == "cpu" and product.traced.main.steps else 0
        if usual:
            run.worker.set_threads(usual + 1)
            run.call(last.frame)
        left = run.worker.left_changed(timeout_s=self.hang_limit_s)
        if usual:
            run.worker.set_threads(usual)
        return left

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

    def _check_repeated(self, product: Product, run: Run, last: Trial) -> None:
        """Many calls on the last trial's values: threads that race each other are right most of the time."""
        if self._mutated(product):
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

    def _check_leaks(self, product: Product, run: Run) -> None:
        """Does call after call leave memory behind, or descriptors? A launch plan on a GPU takes none itself."""
        name = product.workload.name
        if (self.kitchen.device.kind == "cuda" and product.traced.main.steps) or self._mutated(product):
            return
        leak = run.leak()
        if not leak and run.keeps_inputs():
            leak = "calls keep hold of their inputs, each of them, and of the memory that those take"
        if leak:
            raise Refusal(Status.REJECTED, f"{name}: {leak}", verification=self._findings.verification)

    def _check_second_call(self, product: Product, run: Run, last: Trial) -> None:
        """Where forward writes its state, from the state that the reference's first call leaves: a counter that is set
        to one, and what is derived from the state as constructed, is right in a first call only. Then from what some
        hundreds of the reference's calls leave: a table that is full, a correction that wears off."""
        if not any(path.startswith("state/") for path in self._mutated(product)):
            return
        later = (("a later call", secrets.SystemRandom().randrange(*calls)) for calls in _LATER_CALLS)
        for name, calls in (("a second call", 1), *later):
            case = TrialCase(secrets.randbits(62), weights_seed=last.case.weights_seed, advanced=calls)
            trial = replace(last, name=name, case=case, calls_before=0, renewed=False, exchanged=False)
            self._judge_further(product, trial, lambda name, second: run.case(name, second, contract=True))

    def _check_one_after_another(self, product: Product, run: Run, last: Trial) -> None:
        """New values in two frames, then a call in each without a pause, as a model makes them: a kernel that takes
        quick calls for a clock's, or keeps something from one to the next, is right in all other trials."""
        if self._mutated(product):
            return  # what all calls but the last left cannot be told any more
        trial = replace(last, name="one after another", calls_before=0, renewed=False, exchanged=False)
        self._judge_further(product, trial, run.one_after_another)

    def _check_kept(self, product: Product, run: Run, last: Trial) -> None:
        """Answers that the caller keeps while it goes on, as a loop does that appends them to a list: a module that
        returns memory of its own, in turn, overwrites them sooner or later. A plan's answers lie where the caller says.
        """
        if product.traced.main.steps or self._mutated(product):
            return
        trial = replace(last, name="answers are kept", calls_before=0, renewed=False, exchanged=False)
        try:
            count, changed, shared = run.kept_answers(trial)
        except WorkerTimeout as error:
            raise self._broken(product, trial, Status.TIMEOUT, error) from error
        except (WorkerFailure, LaunchFailure) as error:
            raise self._broken(product, trial, Status.RUNTIME_ERROR, error) from error
        if changed or shared:
            what = f"{changed} changed" if changed else f"{shared} are parts of one storage with another call's"
            reason = (
                f"{product.workload.name}: of {count} answers that were kept while the module was called again, "
                f"{what}: return memory of each call's own"
            )
            raise Refusal(Status.REJECTED, reason, verification=self._findings.verification)

    def _check_second_instance(self, product: Product, run: Run, last: Trial) -> None:
        """Another instance beside the first, as a network's second layer is, with weights of its own: a module that
        keeps what it derived from weights for all of its class answers with the first one's."""
        if product.traced.main.steps or self._mutated(product):
            return
        weights = (buffer for buffer in product.traced.main.buffers if buffer.role == "state")
        if sum(buffer.spec.extent_bytes for buffer in weights) > _MOST_WEIGHTS_BYTES:
            return  # three of them may be more than there is room for
        assert isinstance(run.worker, ModuleWorker)
        for name, how in _INSTANCES.items():
            try:
                run.worker.another_instance(name, how=how, timeout_s=self.hang_limit_s)
            except LaunchFailure as error:
                if name == "a second instance":
                    return  # nobody promised that there may be two
                if how == "copy":
                    continue  # nor that it can be copied
                raise self._broken(product, replace(last, name=name), Status.RUNTIME_ERROR, error) from error
            case = TrialCase(secrets.randbits(62), weights_seed=secrets.randbits(62))
            trial = replace(last, name=name, case=case, calls_before=0, renewed=False, exchanged=False)
            self._judge_further(product, trial, lambda name, other: run.case(name, other, contract=True))

    def _check_shortcuts(self, product: Product, run: Run, last: Trial) -> None:
        """Values that leave an operation nothing to do: host code that then returns its input itself gives the caller
        what it must not write into. How near the answers come is the contract trials' to say."""
        if product.traced.main.steps or self._mutated(product):
            return

        def judged(name: str, trial: Trial) -> CaseResult:
            found = run.case(name, trial, contract=True)
            kept = tuple(mismatch for mismatch in found.mismatches if mismatch.kind in ("structure", "mutation"))
            return replace(found, passed=not kept, error_ratio=None, bound=None, mismatches=kept)

        for family in self.oracle.shortcuts(self.target, product.workload.name):
            case = TrialCase(secrets.randbits(62), family, last.case.weights_seed)
            trial = replace(last, name=family, case=case, calls_before=0, renewed=False, exchanged=False)
            self._judge_further(product, trial, judged)

    def _check_beside(self, product: Product, run: Run, last: Trial) -> None:
        """Two threads make the call at once, each with values and scratch of its own, as a server's do: a kernel whose
        workspace is static mixes them up."""
        if self.kitchen.device.kind != "cpu" or not product.traced.main.steps:
            return
        if self._mutated(product):
            return  # the state is one for both, and what many calls left of it cannot be told
        trial = replace(last, name="two callers at once", calls_before=0, renewed=False, exchanged=False)
        with self._bench(product, call_layout(product.traced, frames=1), "", run.worker) as second:
            self._judge_further(product, trial, lambda name, beside: run.beside(second, name, beside))

    def _check_crowded(self, product: Product, run: Run, last: Trial) -> None:
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
        mutated = any(self._mutated(one) for one in (product, other))
        if product.traced.main.steps or mutated or _is_big(product.workload) or _is_big(other.workload):
            return
        with self._bench(product, call_layout(product.traced, frames=1), "") as run:
            assert isinstance(run.worker, ModuleWorker)
            with self._bench(other, call_layout(other.traced, frames=1), "", run.worker) as second:
                for turned in (run, second, run):
                    run.worker.turn(turned.product.traced, turned.product.workload, timeout_s=self.hang_limit_s)
                    trial = Trial("workloads by turns", TrialCase(secrets.randbits(62)), frame=0, poison=0)
                    self._judge_further(turned.product, trial, functools.partial(turned.case, contract=True))

    def _check_late(self, product: Product, run: Run, last: Trial) -> None:
        """New values that the caller's stream writes after the call: host code that works in another stream has to
        wait for it. In all other trials the inputs have been there for long."""
        if self.kitchen.device.kind != "cuda" or product.traced.main.steps:
            return
        if self._mutated(product):
            return  # it would change copies
        case = TrialCase(secrets.randbits(62), weights_seed=last.case.weights_seed)
        trial = replace(last, name="inputs that are still being written", case=case, calls_before=0, renewed=False)
        trial = replace(trial, exchanged=False, late=True)
        self._judge_further(product, trial, lambda name, late: run.case(name, late, contract=True))

    def _check_changed(self, product: Product, run: Run, last: Trial) -> None:
        """Values that change between two calls of a burst: a kernel that works after a pause only, when somebody may
        have looked or written, is right in all other trials."""
        if self._mutated(product):
            return  # so many calls have changed their own inputs that no answer can be told any more
        trial = replace(last, name="changed between calls", calls_before=0, renewed=False, exchanged=False)
        self._judge_further(product, trial, run.changed)

    def _check_thread_counts(self, product: Product, run: Run, last: Trial) -> None:
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

    def _check_aged(self, product: Product, run: Run, last: Trial) -> None:
        """As after thousands of calls, and after as many as an hour makes, where the code keeps count of its calls:
        what does less from then on, and a ticket that wraps, is right in all other trials."""
        if not product.traced.main.steps or self._mutated(product):
            return
        trial = replace(last, calls_before=0, renewed=False, exchanged=False)
        limit_s, aged = self.hang_limit_s, False
        # Also where blocks come one after another: who sums up too early may be slower than those that it forgot.
        busy = 0 if self.kitchen.device.kind == "cuda" else None
        for further in run.ages():
            run.worker.advance_calls(further, timeout_s=limit_s)
            aged, calls = True, "as many calls as its count of them can hold" if further is None else f"{further} calls"
            for number in range(AGED_CALLS):
                case = TrialCase(secrets.randbits(62), weights_seed=last.case.weights_seed)
                trial = replace(trial, name=f"as after {calls} more", case=case, room=busy if number % 2 else None)
                self._judge_further(product, trial, lambda name, later: run.case(name, later, contract=True))
        if aged:
            run.worker.reload("the checks that follow", timeout_s=limit_s)

    def _check_sealed(self, product: Product, run: Run, last: Trial) -> None:
        """Once more with inputs, parameters and prepared values mapped read-only: a kernel that writes them and puts
        the old bytes back shows in no comparison. (A module's host code could map a GPU's memory as it likes.)"""
        trial = replace(last, name="sealed inputs", case=replace(last.case, seed=secrets.randbits(62)))
        trial = replace(trial, calls_before=0, renewed=False, exchanged=False)
        run.seal(self._mutated(product))
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
    def _bench(self, product: Product, layout: CallLayout, variant: str, kept: Worker | None = None) -> Iterator[Run]:
        """An arena with a worker on it: a fresh one, or ``kept``, which lives on afterwards (slot 1 is then used)."""
        workload = self._probed_workload if variant else product.workload.name
        bench, arena = self.oracle.open_bench(self.target, workload, variant, layout.data)
        worker, slot = kept, 0 if kept is None else 1
        try:
            worker = worker or self._started(product)
            worker.attach(slot, arena, guards=layout.guards)
            yield Run(self._setting, product, layout, bench, arena, worker, slot)
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
        # A grid's first dimension is as long as any tensor, but what is counted in it may have no room for as many.
        deep = any(max(launch.grid[1:], default=1) > 1 for launch in plan.launches)
        return not name.startswith(_TALL) or deep or self.facts.dynamic

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
        # A GPU's worker does not survive a misaligned vector, and a fresh one takes its time: what most kernels ask for
        # comes first there, less only where that is right.
        less = tried[:1] if self.kitchen.device.kind == "cuda" and tried[:2] == [1, 16] else []
        upwards = tried[len(less) :]
        for align, more in zip(upwards, [*upwards[1:], most], strict=True):
            if self._right_where_aligned(product, align, more, kept):
                break
            kept = None
        if less and kept is not None:
            self._right_where_aligned(product, 1, 16, kept)

    def _right_where_aligned(self, product: Product, align: int, more: int, kept: Worker | None) -> bool:
        """Where it is not, the guard asks for ``more``."""
        problem = self._misaligned_problem(product, align, kept)
        if problem:
            what = "misaligned tensors" if align == 1 else f"tensors aligned to {align} bytes"
            self._narrow(f"{what}: {problem}", align_bytes=more)
        return not problem

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
                    # Weights as constructed are often all alike: whose they are shows in no answer.
                    drawn = TrialCase(secrets.randbits(62), weights_seed=secrets.randbits(62))
                    case = run.case(self._probed_workload, Trial(name, drawn, frame, 0), contract=contract)
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
