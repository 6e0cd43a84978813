"""Does one library call of a launch plan give its answer by itself? :mod:`.answering` asks it of a module.

The call is run as a plan of its own, from the inputs and the module's tensors; the oracle judges what it leaves. What
prepares what it takes, or goes on from there, does work; a launch that copies its result does none, however long it
takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pytest_cudaforge.errors import LaunchFailure, WorkerFailure
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout, call_layout, output_leaves, tree_leaves
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.contract import computes
from pytest_cudaforge.evaluation.oracle import OracleClient, TrialCase
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.plan import Buffer, LaunchPlan, TensorSpec, TracedPlan, View, views_in
from pytest_cudaforge.records import Target

__all__ = ["TELLING", "PlanWork"]

#: Values for which what goes on from an operator's answer shows (a clamp, a bend), where the reference takes them.
TELLING = ("large", "shifted")
_GIVEN = frozenset({"input", "state"})


@dataclass(frozen=True)
class PlanWork:
    """Looks at plans of one candidate for ``target``; ``worker_of`` starts a fresh worker with a product loaded."""

    oracle: OracleClient
    target: Target
    worker_of: Callable[[Product], Worker]
    hang_limit_s: float

    def answered_by(self, product: Product) -> str:
        """The operator whose result is right on drawn values and :data:`TELLING` ones, or ""."""
        for op, plan in _alone(product.traced.main):
            if self._is_right(replace(product, traced=TracedPlan(plan))):
                return op
        return ""

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


def _alone(plan: LaunchPlan) -> Iterator[tuple[str, LaunchPlan]]:
    """The computing library calls on nothing but what the plan was given, each as all of a plan, if its result may be
    the answer."""
    outputs = [leaf for _, leaf in tree_leaves(plan.outputs, "out")]
    if len(outputs) != 1 or not isinstance(outputs[0], View) or not plan.launches:
        return
    (answer,) = outputs
    strides = tuple(math.prod(answer.shape[at + 1 :]) for at in range(len(answer.shape)))
    for call in plan.library_calls:
        taken = list(views_in((call.args, [value for _, value in call.kwargs])))
        if (
            not computes(call.op)
            or len(call.outputs) != 1
            or any(plan.buffers[v.buffer].role not in _GIVEN for v in taken)
        ):
            continue
        result, wanted = plan.buffers[call.outputs[0]].spec, plan.buffers[answer.buffer].spec
        if result.dtype == wanted.dtype and math.prod(result.shape) == math.prod(answer.shape):
            used = {call.outputs[0], *(view.buffer for view in taken)}
            buffers = tuple(one if at in used else _nothing(one) for at, one in enumerate(plan.buffers))
            view = View(call.outputs[0], answer.shape, strides)
            yield call.op, replace(plan, buffers=buffers, steps=(call,), outputs=view)


def _nothing(buffer: Buffer) -> Buffer:
    """What nobody uses takes no place: of what was not given, none is laid out."""
    empty = TensorSpec((0,), buffer.spec.dtype, (1,))
    return buffer if buffer.role in _GIVEN else Buffer("scratch", empty)
