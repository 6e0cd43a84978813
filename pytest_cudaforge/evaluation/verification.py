"""Is it correct? The order of a verdict's questions: the contract's trials, circumstances, and what lies around.

What is tried there is :mod:`cases`', :mod:`checks`' and :mod:`probes`' to say, how a candidate is called :mod:`runs`'.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from pytest_cudaforge.evaluation.arena import HOST_ALIGN_BYTES
from pytest_cudaforge.evaluation.benches import Benches
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import (
    BIG_CALL_BYTES,
    BIG_CALL_FAMILIES,
    CallLayout,
    Trial,
    call_layout,
    contract_trials,
)
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.checks import Bout, checks_for, turns
from pytest_cudaforge.evaluation.contract import compare_structure
from pytest_cudaforge.evaluation.oracle import OracleClient, TrialCase
from pytest_cudaforge.evaluation.probes import Plans, Prober, narrow
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.runs import Findings, Run, Setting
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.records import CaseResult, Guard, Status, Target, TargetFacts, Verification, WorkloadFacts

__all__ = ["Verifier", "is_big"]

#: Enough to show a pattern; each failing trial costs time and tells less than the one before.
_MAX_FAILED = 3
#: Answers whose error comes to so much of its bound are tried with so many other values, the worst of them first: of
#: who errs by what the values happen to be, one draw says little, and tomorrow's verdict should be today's. Honest
#: kernels come to 0.25 of it, rarely to 0.35.
_NEAR, _NEAREST, _OTHER_VALUES = 0.3, 3, 4
_MAX_PROBED_WORKLOADS = 6
#: What a candidate's buffers may take of the device's memory; the rest is the oracle's and its references'.
_MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.6}


class Verifier:
    """One candidate's verification. ``worker_of`` starts a fresh worker with a product loaded."""

    #: Whether production uses what was not drawn, too.
    looks_around = True

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
        self.trials, self.hang_limit_s = trials, hang_limit_s
        #: How many frames a sitting will lay out.
        self.timed_frames = timed_frames
        #: False: what was not drawn is not tried, and stays outside the guard.
        self.probed = probed
        #: What is outside of it already is not probed.
        self.excluded = guard
        setting = Setting(oracle, Findings(guard=guard or Guard()), kitchen.device.kind, hang_limit_s, kept)
        self.benches = Benches(target, setting, worker_of)

    def verify(self, products: Sequence[Product]) -> Verification:
        """All contract trials, then the probes. Raises Refusal at the first workload that fails."""
        for product in products:
            self._check_structure(product)
        for product in products:
            self._fulfil_contract(product)
        for before, product in itertools.pairwise(products):
            self._take_turns(before, product)
        if not self.probed:
            narrow(self.benches, "nothing but the drawn calls was tried", contiguous=True, drawn=True)
        elif self.looks_around:
            self._probe(products)
        return self.benches.findings.verification

    def _mutated(self, product: Product) -> frozenset[str]:
        return self.oracle.mutates(self.target, product.workload.name)

    def _most_families(self, workload: WorkloadFacts) -> int | None:
        return BIG_CALL_FAMILIES if is_big(workload) else None

    def _check_structure(self, product: Product) -> None:
        if not self.kitchen.tells_structure:
            return  # a call does
        mismatches = compare_structure(product.traced.main, product.workload)
        if mismatches:
            case = CaseResult(product.workload.name, "structure", True, False, None, None, mismatches)
            self.benches.findings.cases.append(case)
            raise self.benches.refusal_of([case])

    # -- contract

    def _fulfil_contract(self, product: Product) -> None:
        """Every trial of a workload, then every circumstance that concerns the candidate."""
        frames, trials = self._trials(product)
        # On a host nothing is aligned to more than torch's own tensors are.
        skew = HOST_ALIGN_BYTES if self.kitchen.device.kind == "cpu" else 0
        paged = self.kitchen.device.kind == "cpu"
        layout = call_layout(product.traced, frames=frames, skew_bytes=skew, paged=paged)
        self._require_room(product, layout)
        with self.benches.open(product, layout) as run:
            last = self._pass_trials(product, run, trials)
            mutated, big = self._mutated(product), is_big(product.workload)
            bout = self._bout(product, run, last, mutated)
            own_code = self.kitchen.own_code
            for check in checks_for(product, bout.device_kind, mutates=bool(mutated), big=big, own_code=own_code):
                check.made(bout)
            if self.probed and self.looks_around and not big:
                self._prober(product).look_at_alignment(run.worker)

    def _trials(self, product: Product) -> tuple[int, tuple[Trial, ...]]:
        """(frames that they need, trials)."""
        families = self.oracle.families(self.target, product.workload.name, self._most_families(product.workload))
        trials = contract_trials(product.workload, families, trials=self.trials)
        if any(not path.startswith("input/") for path in self._mutated(product)):
            # State that the trial before wrote is not what the next one should find; inputs are all written again.
            trials = tuple(trial for trial in trials if not (trial.renewed or trial.exchanged))
        return 1 + max(trial.frame for trial in trials), trials

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

    def _pass_trials(self, product: Product, run: Run, trials: Sequence[Trial]) -> Trial:
        """The last trial; its values lie there. Raises Refusal where one fails."""
        failed: list[CaseResult] = []
        near: list[tuple[float, Trial]] = []
        for trial in trials:
            case = self.benches.judged(product, trial, functools.partial(run.case, contract=True))
            failed += [] if case.passed else [case]
            near += [(_nearness(case), trial)] if _nearness(case) >= _NEAR else []
            if len(failed) >= _MAX_FAILED:
                break
        if failed:
            raise self.benches.refusal_of(failed)
        near.sort(key=lambda found: -found[0])
        return self._try_other_values(product, run, [trial for _, trial in near], trials[-1])

    def _try_other_values(self, product: Product, run: Run, near: Sequence[Trial], last: Trial) -> Trial:
        """Some of the trials ``near`` their bounds, with other values of the same family and under other weights where
        they had any of their own. Then the ``last`` one over again, as that is what checks go on from."""
        if not near:
            return last
        most, times = (1, 1) if is_big(product.workload) else (_NEAREST, _OTHER_VALUES)
        found = [
            Trial(f"{trial.name}, other values", self._other_values(trial), trial.frame, trial.poison)
            for trial in near[:most]
            for _ in range(times)
        ]
        found.append(Trial(last.name, last.case, last.frame, last.poison))
        for trial in found:
            self.benches.require(product, trial, functools.partial(run.case, contract=True))
        return found[-1]

    @staticmethod
    def _other_values(trial: Trial) -> TrialCase:
        weights_seed = None if trial.case.weights_seed is None else CHANCE.fresh_seed()
        return replace(trial.case, seed=CHANCE.fresh_seed(), weights_seed=weights_seed)

    def _bout(self, product: Product, run: Run, last: Trial, mutated: frozenset[str]) -> Bout:
        kind, limit_s = self.kitchen.device.kind, self.hang_limit_s
        return Bout(self.target, product, kind, self.oracle, self.benches, limit_s, run, last, mutated)

    def _take_turns(self, product: Product, other: Product) -> None:
        """Both workloads of a module by turns."""
        pair = (product, other)
        if product.traced.main.steps or any(self._mutated(one) or is_big(one.workload) for one in pair):
            return
        with self.benches.open(product, call_layout(product.traced, frames=1)) as run:
            last = Trial("workloads by turns", TrialCase(CHANCE.fresh_seed()), frame=0, poison=0)
            turns(self._bout(product, run, last, frozenset()), other)

    # -- probes

    def _prober(self, product: Product) -> Prober:
        return Prober(self.benches, product, self.facts, self.kitchen, self.excluded)

    def _probe(self, products: Sequence[Product]) -> None:
        """Run what the contract does not promise; whatever fails narrows the guard."""
        names = [workload.name for workload in self.facts.workloads]
        # Secretly: a kernel must not know which of many workloads nobody looks around.
        probed = set(CHANCE.sample(names, min(len(names), _MAX_PROBED_WORKLOADS)))
        for product in products:
            if product.workload.name not in probed:
                continue
            prober = self._prober(product)
            if is_big(product.workload):
                prober.leave_alone()
                continue
            if product.traced.main.steps:
                prober.look_elsewhere()
            prober.look_around()


def _nearness(case: CaseResult) -> float:
    """The error as a share of its bound; 0 where nothing was measured."""
    return case.error_ratio / case.bound if case.error_ratio is not None and case.bound else 0.0


def is_big(workload: WorkloadFacts) -> bool:
    """Whether a call moves so much that one frame and few trials have to do."""
    return workload.input_bytes + workload.output_bytes > BIG_CALL_BYTES
