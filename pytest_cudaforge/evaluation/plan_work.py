"""Do a launch plan's library calls give its answer by themselves? :mod:`.answering` asks it of a module.

One of them, or several, each of which goes on from those before it, are run as a plan of their own, from the inputs and
the module's tensors; the oracle judges what they leave. What prepares what they take, or goes on from there, does work;
a launch that copies the result does none, however long it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pytest_cudaforge.errors import LaunchFailure, WorkerFailure
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout, call_layout, output_leaves, tree_leaves
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.contract import label_of
from pytest_cudaforge.evaluation.oracle import OracleClient, TrialCase
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.plan import Buffer, LaunchPlan, LibraryCall, TensorSpec, TracedPlan, View, views_in
from pytest_cudaforge.records import Target, Work

__all__ = ["TELLING", "Answered", "PlanWork"]

#: Values for which what goes on from an operator's answer shows (a clamp, a bend), where the reference takes them.
TELLING = ("large", "shifted")
_GIVEN = frozenset({"input", "state"})
#: So many results are looked at, at most, the last ones.
_MOST = 4


@dataclass(frozen=True)
class Answered:
    """``op``: the operator whose result is the answer. ``work``: what is done where nothing else is."""

    op: str
    work: Work


@dataclass(frozen=True)
class PlanWork:
    """Looks at plans of one candidate for ``target``; ``worker_of`` starts a fresh worker with a product loaded."""

    oracle: OracleClient
    target: Target
    worker_of: Callable[[Product], Worker]
    hang_limit_s: float

    def answered_by(self, product: Product) -> Answered | None:
        """The operator whose result is right on drawn values and :data:`TELLING` ones, or None."""
        for op, plan in _without_launches(product.traced.main):
            if self._is_right(replace(product, traced=TracedPlan(plan))):
                return Answered(op, label_of(plan))
        return None

    def _is_right(self, product: Product) -> bool:
        workload, layout = product.workload.name, call_layout(product.traced, frames=1)
        families = self.oracle.families(self.target, workload)
        bench, arena = self.oracle.open_bench(self.target, workload, "", layout.data)
        try:
            with self.worker_of(product) as worker:
                worker.attach(0, arena)
                told = ("drawn", *(family for family in TELLING if family in families))
                return all(self._is_right_on(family, product, layout, bench, worker) for family in told)
        except (LaunchFailure, WorkerFailure):
            return False
        finally:
            arena.close()
            self.oracle.close_bench(bench)

    def _is_right_on(self, family: str, product: Product, layout: CallLayout, bench: int, worker: Worker) -> bool:
        case = TrialCase(CHANCE.fresh_seed(), family=family, weights_seed=CHANCE.fresh_seed())
        self.oracle.fill(bench, 0, case, 0)
        worker.run("main", layout.bindings(0), timeout_s=self.hang_limit_s)
        return not self.oracle.check(bench, 0, output_leaves(product.traced.main, layout, 0), zones=False).mismatches


def _without_launches(plan: LaunchPlan) -> Iterator[tuple[str, LaunchPlan]]:
    """Library calls on nothing but what the plan was given, and such calls' results, as all of a plan, where the last
    one's result may be the answer: each with what it goes on from, the last ones first."""
    outputs = [leaf for _, leaf in tree_leaves(plan.outputs, "out")]
    if len(outputs) != 1 or not isinstance(outputs[0], View) or not plan.launches:
        return
    (answer,), calls = outputs, plan.library_calls
    chains = _chains(plan)
    fitting = [chain for chain in chains if _may_be(plan, calls[chain[-1]], answer)]
    strides = tuple(math.prod(answer.shape[at + 1 :]) for at in range(len(answer.shape)))
    for chain in fitting[: -_MOST - 1 : -1]:
        steps = tuple(calls[number] for number in chain)
        used = {at for step in steps for at in (*step.outputs, *_taken(step))}
        buffers = tuple(one if at in used else _nothing(one) for at, one in enumerate(plan.buffers))
        view = View(steps[-1].outputs[0], answer.shape, strides)
        yield steps[-1].op, replace(plan, buffers=buffers, steps=steps, outputs=view)


def _chains(plan: LaunchPlan) -> list[tuple[int, ...]]:
    """By library call behind which there is no launch's work: the numbers of the calls that it goes on from, and its
    own."""
    made: dict[int, tuple[int, ...]] = {}
    found = []
    for number, call in enumerate(plan.library_calls):
        taken = _taken(call)
        if all(at in made or plan.buffers[at].role in _GIVEN for at in taken):
            before = {step for at in taken for step in made.get(at, ())}
            found.append((*sorted(before), number))
            made |= dict.fromkeys(call.outputs, found[-1])
    return found


def _taken(call: LibraryCall) -> list[int]:
    return [view.buffer for view in views_in((call.args, [value for _, value in call.kwargs]))]


def _may_be(plan: LaunchPlan, call: LibraryCall, answer: View) -> bool:
    """Does ``call`` make as many elements, of one type with those of the answer, and nothing else?"""
    if len(call.outputs) != 1:
        return False
    result, wanted = plan.buffers[call.outputs[0]].spec, plan.buffers[answer.buffer].spec
    return result.dtype == wanted.dtype and math.prod(result.shape) == math.prod(answer.shape)


def _nothing(buffer: Buffer) -> Buffer:
    """What nobody uses takes no place: of what was not given, none is laid out."""
    empty = TensorSpec((0,), buffer.spec.dtype, (1,))
    return buffer if buffer.role in _GIVEN else Buffer("scratch", empty)
