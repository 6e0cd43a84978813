"""On what compute-sanitizer is let loose, and how often: the smallest workload's call, once per plan and binaries."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import call_layout
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.sanitizer import MOST_BYTES, Sanitizer, call_bytes, find_sanitizer, fingerprint
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.languages.binary import launches_of
from pytest_cudaforge.records import SanitizerReport, Target

__all__ = ["Sanitizing", "joined"]


def joined(forward: SanitizerReport, backward: SanitizerReport) -> SanitizerReport:
    """One report on the plans of a call and of its gradients; ``tools`` are those that looked at both."""
    return SanitizerReport(
        f"{forward.workload}, {backward.workload}",
        tuple(tool for tool in forward.tools if tool in backward.tools),
        (*forward.findings, *backward.findings),
        (*forward.notes, *(f"{backward.workload}: {note}" for note in backward.notes)),
        round(forward.seconds + backward.seconds, 3),
    )


class Sanitizing:
    """Thread-safe. Reports are kept: a winner that is evaluated afresh twice is looked at once."""

    def __init__(self, device: str, oracle: OracleClient) -> None:
        self._device, self._oracle = device, oracle
        self._lock = threading.Lock()
        self._reports: dict[str, SanitizerReport] = {}

    def examine(
        self, target: Target, products: Sequence[Product], lined: Callable[[Binary], Binary | None]
    ) -> SanitizerReport:
        """The report on the smallest of ``products``; ``lined`` compiles a binary once more with line numbers.

        Raises OracleError and TargetError where its inputs cannot be drawn.
        """
        product = min(products, key=call_bytes)
        if reason := _why_not(product):
            return SanitizerReport(product.workload.name, (), notes=(reason,))
        program = find_sanitizer(os.environ)
        if program is None:
            return SanitizerReport(product.workload.name, (), notes=("compute-sanitizer was not found here",))
        key = f"{target.digest} {fingerprint(product)}"
        with self._lock:
            if key not in self._reports:
                self._reports[key] = self._examine(target, product, Sanitizer(program, self._device, lined))
            return self._reports[key]

    def _examine(self, target: Target, product: Product, sanitizer: Sanitizer) -> SanitizerReport:
        layout = call_layout(product.traced, frames=1)
        bench, arena = self._oracle.open_bench(target, product.workload.name, "", layout.data)
        try:
            self._oracle.fill_all(bench, [CHANCE.fresh_seed()], 0)
            values = self._oracle.snapshot(bench)
        finally:
            arena.close()
            self._oracle.close_bench(bench)
        try:
            return sanitizer.examine(product, layout, values)
        finally:
            values.close()


def _why_not(product: Product) -> str:
    """Why this product is not looked at; "" where it is."""
    if not launches_of(product.traced):
        return "the plan launches no kernel of its own"
    nbytes = call_bytes(product)
    if nbytes > MOST_BYTES:
        return (
            f"compute-sanitizer was left out: the smallest workload moves {nbytes >> 20} MiB, "
            f"more than {MOST_BYTES >> 20} MiB"
        )
    return ""
