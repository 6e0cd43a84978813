"""In which order alignments are tried, and what a guard asks for then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_cudaforge.evaluation.probes import Prober
from pytest_cudaforge.evaluation.runs import Findings
from pytest_cudaforge.records import Guard

KEPT: Any = "the worker of the contract"


def _tried(kind: str, needs: int, known: int = 1) -> tuple[list[tuple[int, bool]], Guard]:
    """What was tried, and whether with the kept worker, of a kernel that needs so much; the guard."""
    findings: Findings = Findings(guard=Guard(align_bytes=known))
    benches: Any = SimpleNamespace(findings=findings)
    kitchen: Any = SimpleNamespace(device=SimpleNamespace(kind=kind))
    product: Any = SimpleNamespace(binaries=())
    facts: Any = SimpleNamespace(strides="drawn")
    prober, tried = Prober(benches, product, facts, kitchen, None), list[tuple[int, bool]]()

    def problem(aligned_to: int, kept: Any) -> str:
        tried.append((aligned_to, kept is KEPT))
        return "misaligned address" if aligned_to < needs else ""

    prober._misaligned_problem = problem  # type: ignore[method-assign]
    prober.look_at_alignment(KEPT)
    return tried, findings.guard


@pytest.mark.parametrize(
    ("needs", "on_cpu", "on_gpu"),
    [
        (1, [(1, True)], [(16, True), (1, True)]),
        (16, [(1, True), (16, False)], [(16, True), (1, True)]),
        (32, [(1, True), (16, False), (32, False)], [(16, True), (32, False)]),
        (64, [(1, True), (16, False), (32, False)], [(16, True), (32, False), (64, False)]),
        (128, [(1, True), (16, False), (32, False)], [(16, True), (32, False), (64, False)]),
    ],
)
def test_a_gpus_worker_outlives_what_most_kernels_ask_for(
    needs: int, on_cpu: list[tuple[int, bool]], on_gpu: list[tuple[int, bool]]
) -> None:
    for kind, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        tried, guard = _tried(kind, needs)
        assert tried == expected
        assert guard.align_bytes == (min(needs, 64) if kind == "cpu" else needs if needs <= 64 else 256)
        assert len(guard.reasons) == len([align for align, _ in tried if align < needs])
    assert needs != 16 or guard.reasons == ("misaligned tensors: misaligned address",)
    assert needs != 32 or guard.reasons == ("tensors aligned to 16 bytes: misaligned address",)


def test_less_than_a_guard_asks_for_is_not_tried() -> None:
    assert _tried("cuda", 1, known=16)[0] == [(16, True)]
    assert _tried("cuda", 64, known=32)[0] == [(32, True), (64, False)]
