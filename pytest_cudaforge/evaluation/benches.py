"""Where a verification's calls are made: arenas of the oracle's, with workers on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from pytest_cudaforge.errors import LaunchFailure, WorkerFailure, WorkerTimeout
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout, Trial
from pytest_cudaforge.evaluation.contract import status_of
from pytest_cudaforge.evaluation.refusal import Refusal
from pytest_cudaforge.evaluation.runs import Findings, Run, Setting
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.records import CaseResult, Status, Target

__all__ = ["Benches"]


class Benches:
    """Opens runs for one candidate. ``worker_of`` starts a fresh worker with a product loaded."""

    def __init__(self, target: Target, setting: Setting, worker_of: Callable[[Product], Worker]) -> None:
        self.target, self.setting, self.worker_of = target, setting, worker_of

    @property
    def findings(self) -> Findings:
        return self.setting.findings

    @contextlib.contextmanager
    def open(
        self, product: Product, layout: CallLayout, *, variant: str = "", workload: str = "", kept: Worker | None = None
    ) -> Iterator[Run]:
        """An arena with a worker on it: a fresh one, or ``kept``, which lives on afterwards (slot 1 is then used).

        ``variant`` of ``workload``: calls that were not drawn. Raises Refusal where the worker fails.
        """
        oracle = self.setting.oracle
        bench, arena = oracle.open_bench(self.target, workload or product.workload.name, variant, layout.data)
        worker, slot = kept, 0 if kept is None else 1
        try:
            worker = worker or self.started(product)
            worker.attach(slot, arena, guards=layout.guards)
            yield Run(self.setting, product, layout, bench, arena, worker, slot)
        except (LaunchFailure, WorkerFailure) as error:
            raise self.refusal(Status.RUNTIME_ERROR, str(error)) from error
        finally:
            if worker is not None and kept is None:
                worker.close()
            arena.close()
            oracle.close_bench(bench)

    def started(self, product: Product) -> Worker:
        """A fresh worker with the product loaded. Raises Refusal where it fails."""
        try:
            return self.worker_of(product)
        except WorkerTimeout as error:
            raise self.refusal(Status.TIMEOUT, str(error)) from error
        except WorkerFailure as error:
            raise self.refusal(Status.RUNTIME_ERROR, str(error)) from error

    def refusal(self, status: Status, reason: str) -> Refusal:
        """With all that was found so far."""
        return Refusal(status, reason, verification=self.findings.verification)

    def refusal_of(self, failed: Sequence[CaseResult]) -> Refusal:
        """The gravest status of the failed cases, with the first mismatch that has it."""
        pairs = [(case, mismatch) for case in failed for mismatch in case.mismatches]
        status = status_of(tuple(mismatch for _, mismatch in pairs))
        case, first = next(pair for pair in pairs if status_of((pair[1],)) is status)
        reason = f"{first.output}: {first.detail}" + (f" ({first.pattern})" if first.pattern else "")
        return self.refusal(status, f"{case.workload}/{case.case}: {reason}")

    def broken(self, product: Product, trial: Trial, status: Status, error: Exception) -> Refusal:
        """A trial that came to no answer."""
        name = product.workload.name
        self.findings.cases.append(CaseResult(name, trial.name, True, False, None, None, (), note=str(error)))
        return self.refusal(status, f"{name}/{trial.name}: {error}")

    def judged(self, product: Product, trial: Trial, judge: Callable[[str, Trial], CaseResult]) -> CaseResult:
        """One trial, noted, whatever comes of it. Raises Refusal where it came to no answer."""
        try:
            case = judge(product.workload.name, trial)
        except WorkerTimeout as error:
            raise self.broken(product, trial, Status.TIMEOUT, error) from error
        except (WorkerFailure, LaunchFailure) as error:
            raise self.broken(product, trial, Status.RUNTIME_ERROR, error) from error
        self.findings.cases.append(case)
        return case

    def require(self, product: Product, trial: Trial, judge: Callable[[str, Trial], CaseResult]) -> None:
        """Raises Refusal where a trial fails."""
        case = self.judged(product, trial, judge)
        if not case.passed:
            raise self.refusal_of([case])
