"""Are a candidate's gradients correct? Its backward plans, verified like forward ones against the backward's oracle."""

from __future__ import annotations

import re
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from pytest_cudaforge.evaluation.building import Kitchen, Product
from pytest_cudaforge.evaluation.cases import BIG_CALL_FAMILIES, tree_leaves
from pytest_cudaforge.evaluation.module_building import Workshop
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.verification import Verifier, is_big
from pytest_cudaforge.records import CaseResult, Mismatch, Target, Verification, WorkloadFacts
from pytest_cudaforge.runtime.gradients import FUNCTION, MODULE, forward_workload

#: As many as reach to "small": rows that vanish, where a gradient divides by their length.
_FAMILIES = 9

__all__ = ["BackwardVerifier", "Backwards", "joined", "of_module", "produce", "refused"]


@dataclass(frozen=True)
class Backwards:
    """The backward products of all workloads; without any, ``note`` says why the kernel is for forward only."""

    products: tuple[Product, ...] = ()
    note: str = ""


def produce(kitchen: Kitchen, oracle: OracleClient, target: Target, names: Collection[str]) -> Backwards:
    """Trace and compile ``plan_backward`` for the backwards of the workloads ``names``. Raises Refusal, TargetError."""
    if not re.search(rf"^def {FUNCTION}\b", kitchen.plan_source, re.MULTILINE):
        return Backwards(note=f"forward only: plan.py has no {FUNCTION}")
    reason, workloads = oracle.backward(target)
    if reason:
        return Backwards(note=f"forward only: {reason}")
    chosen = [workload for workload in workloads if forward_workload(workload.name) in names]
    return Backwards(tuple(kitchen.produce(workload, FUNCTION) for workload in chosen))


def of_module(workshop: Workshop, oracle: OracleClient, target: Target, names: Collection[str]) -> Backwards:
    """A ModelNew's backward is autograd's, through whatever it brings. Raises TargetError."""
    reason, workloads = oracle.backward(target)
    if reason:
        return Backwards(note=f"forward only: {reason}")
    if workshop.kept:
        return Backwards(note="forward only: its parameters have other names, shapes or dtypes than the reference's")
    chosen = [workload for workload in workloads if forward_workload(workload.name) in names]
    return Backwards(tuple(workshop.produce(workload) for workload in chosen))


def joined(forward: Verification, backward: Verification) -> Verification:
    """One verification of both; where the kernel may be used is the forward's to say."""
    ratios = [ratio for ratio in (forward.worst_ratio, backward.worst_ratio) if ratio is not None]
    return replace(
        forward,
        cases=(*forward.cases, *backward.cases),
        oracle="partial" if "partial" in (forward.oracle, backward.oracle) else "fp64",
        worst_ratio=max(ratios, default=None),
    )


class BackwardVerifier(Verifier):
    """As Verifier, without probes: production uses a backward for what was drawn only, and where it is aligned."""

    looks_around = False

    def _most_families(self, workload: WorkloadFacts) -> int | None:
        return BIG_CALL_FAMILIES if is_big(workload) else _FAMILIES

    def _check_structure(self, product: Product) -> None:
        returned = {path for path, _ in tree_leaves(product.traced.main.outputs, "out")}
        expected = {path for path, _ in product.workload.outputs}
        if returned == expected:
            super()._check_structure(product)
            return
        missing, extra = _named(expected - returned), _named(returned - expected)
        details = [f"{FUNCTION} returns no gradient of {missing}"] if missing else []
        details += [f"{FUNCTION} returns a gradient of {extra}, where the reference has none"] if extra else []
        mismatch = Mismatch("gradients", "count", "; ".join(details))
        case = CaseResult(product.workload.name, "structure", True, False, None, None, (mismatch,))
        self.benches.findings.cases.append(case)
        raise self.benches.refusal_of([case])


def _named(paths: AbstractSet[str]) -> str:
    """Gradients by what they are of: ``parameter weight``, ``input 0``."""
    keys = sorted(path.removeprefix("out.") for path in paths - {"out"})
    return ", ".join(f"parameter {key[len(MODULE) :]}" if key.startswith(MODULE) else f"input {key}" for key in keys)


def refused(forward: Verification, refusal: Refusal) -> Refusal:
    """The refusal of a backward with the forward's cases beside its own."""
    found = joined(forward, refusal.verification) if refusal.verification is not None else forward
    return Refusal(refusal.status, refusal.reason, build=refusal.build, verification=found)
