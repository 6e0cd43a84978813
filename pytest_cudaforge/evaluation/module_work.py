"""What kind of work a ModelNew does: which operators run in a call, and do its own kernels make the answer?

Found in untimed calls of fresh workers: one under torch's profiler, and two in which the candidate's own functions
raise, or return garbage and write nothing. Where the answer is right all the same, a fallback made it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from pytest_cudaforge.errors import LaunchFailure, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout, call_layout, output_leaves
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.contract import CallProfile, compare_structure, label_of_call
from pytest_cudaforge.evaluation.extensions import NeedsBuild
from pytest_cudaforge.evaluation.module_building import Workshop
from pytest_cudaforge.evaluation.module_plan import judged_plan
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.oracle import OracleClient, TrialCase
from pytest_cudaforge.evaluation.plan_work import TELLING
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.records import Status, Target, Work
from pytest_cudaforge.runtime.gradients import is_backward

__all__ = ["PROFILED_CALLS", "ModuleWork", "Workbench", "least_own"]

PROFILED_CALLS = 3
#: What own functions do instead of their work, and how the verdict says so.
_SABOTAGES = {"raise": "raise an error", "garbage": "return garbage and write nothing"}


@dataclass(frozen=True)
class ModuleWork:
    """``share`` is the own kernels' part of the measured time; ``detail`` says what else runs, or what was found."""

    work: Work
    share: float
    detail: str


class Workbench:
    """Single untimed calls of one workload, each in a worker of its own. Raises Refusal where the candidate fails."""

    def __init__(
        self, workshop: Workshop, oracle: OracleClient, target: Target, product: Product, hang_limit_s: float
    ) -> None:
        self._workshop, self._oracle, self._target = workshop, oracle, target
        self._product, self._limit_s = product, hang_limit_s

    def open(self) -> None:
        """Import, construct and call the candidate for the first time; what it asks for on the way is built."""
        while True:
            try:
                with self._started("") as (worker, layout, _):
                    worker.run("main", layout.bindings(0), timeout_s=self._limit_s)
                    self._workshop.keep_compiled(worker, self._limit_s)
                return
            except NeedsBuild as need:
                self._workshop.provide(need.request)
            except (LaunchFailure, WorkerFailure) as error:
                raise self._refusal(error) from error

    def seen(self) -> CallProfile:
        """What runs in :data:`PROFILED_CALLS` calls, by torch's profiler in a worker."""
        try:
            with self._started("watch") as (worker, layout, bench):
                profile = worker.profile(layout.bindings(0), PROFILED_CALLS, timeout_s=10 * self._limit_s)
                if profile.own_calls and profile.operators:
                    profile = replace(profile, answered_by=self._answered(worker, layout, bench))
        except (LaunchFailure, WorkerFailure) as error:
            raise self._refusal(error) from error
        # The child's words: who changes what it says can claim kernels, but none that nobody has built.
        return profile if self._workshop.has_own_code else replace(profile, own_calls=0, own_ns=0)

    def _answered(self, worker: ModuleWorker, layout: CallLayout, bench: int) -> str:
        """The operator that gives the answer by itself, whatever the values and weights: what goes on from there may be
        nothing for some (a clamp). Nothing is known where weights stay as constructed."""
        workload = self._product.workload.name
        if self._workshop.kept or is_backward(workload):
            return ""
        families = self._oracle.families(self._target, workload)
        names: tuple[str, ...] | None = None
        for family in ("drawn", *(name for name in TELLING if name in families)):
            case = TrialCase(CHANCE.fresh_seed(), family=family, weights_seed=CHANCE.fresh_seed())
            self._oracle.fill(bench, 0, case, 0)
            found = worker.answering(layout.bindings(0), timeout_s=self._limit_s)
            names = found if names is None else tuple(name for name in names if name in found)
            if not names:
                return ""
        return names[0] if names else ""

    def work(self) -> ModuleWork:
        """Profile a call, then prove that the candidate's own kernels make its answer."""
        profile = self.seen()
        found = label_of_call(profile)
        if profile.own_calls:
            # Two processes at once: each spends its time on imports and a GPU's context.
            with ThreadPoolExecutor(len(_SABOTAGES)) as pool:
                right = list(pool.map(self._right_in_spite_of, _SABOTAGES))
            for text in itertools.compress(_SABOTAGES.values(), right):
                detail = f"the answer is right as well where its own functions {text}: they do not make it"
                return ModuleWork("rewrite", 0.0, detail)
        share = 0.0 if profile.answered_by else profile.own_share
        return ModuleWork(found, share, _described(profile))

    def _refusal(self, error: Exception) -> Refusal:
        status = Status.TIMEOUT if isinstance(error, WorkerTimeout) else Status.RUNTIME_ERROR
        return Refusal(status, f"{self._product.workload.name}: {error}", build=self._workshop.build)

    @contextlib.contextmanager
    def _started(self, sabotage: str) -> Iterator[tuple[ModuleWorker, CallLayout, int]]:
        """A worker on a filled bench: (worker, layout, bench)."""
        layout = call_layout(self._product.traced, frames=1)
        bench, arena = self._oracle.open_bench(self._target, self._product.workload.name, "", layout.data)
        try:
            with self._workshop.start(self._product, sabotage) as worker:
                self._oracle.fill(bench, 0, TrialCase(CHANCE.fresh_seed(), kept=self._workshop.kept), 0)
                worker.attach(0, arena)
                yield worker, layout, bench
        finally:
            arena.close()
            self._oracle.close_bench(bench)

    def _right_in_spite_of(self, sabotage: str) -> bool:
        plan, workload = self._product.traced.main, self._product.workload
        try:
            with self._started(sabotage) as (worker, layout, bench):
                returned = worker.run("main", layout.bindings(0), timeout_s=self._limit_s)
                worker.stop()
                if compare_structure(returned, workload):
                    return False
                outputs = output_leaves(judged_plan(plan, returned), layout, 0)
                return not self._oracle.check(bench, 0, outputs, zones=False).mismatches
        except (LaunchFailure, WorkerFailure, Refusal):
            return False


def _described(profile: CallProfile) -> str:
    if profile.compiled:
        return "it uses torch.compile"
    if profile.answered_by:
        return f"{profile.answered_by} gives the answer by itself: its own functions add nothing to it"
    others = sorted(profile.general, key=lambda pair: -pair[1])[:3]
    total = profile.total_ns
    if not others or not total:
        return ""
    named = ", ".join(f"{name} ({ns / total:.0%} of the time)" for name, ns in others)
    return f"beside its own kernels run {named}" if profile.own_calls else f"what runs is {named}"


def least_own(works: list[ModuleWork]) -> ModuleWork:
    """The verdict over several workloads: the one with the least work of its own."""
    order: tuple[Work, ...] = ("kernel", "mixed", "library", "rewrite")
    worst = max(works, key=lambda found: order.index(found.work))
    return replace(worst, share=min(found.share for found in works))
