"""What is profiled: one call of one workload of a candidate that passed before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.static_profile import work_ns
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.records import Candidate, DeviceFacts, Target, TargetFacts

__all__ = ["ProfiledCall", "longest"]


@dataclass(frozen=True)
class ProfiledCall:
    """``lined`` compiles a binary of the product once more with line numbers, or returns None. ``working_set_bytes``:
    what the timed calls touch in turn, where caches may hold it (see ``roofline.bandwidth``)."""

    candidate: Candidate
    target: Target
    facts: TargetFacts
    product: Product
    device: DeviceFacts
    lined: Callable[[Binary], Binary | None] = lambda binary: None
    working_set_bytes: int | None = None


def longest(products: Sequence[Product], facts: TargetFacts, device: DeviceFacts) -> Product:
    """The product of the workload that takes longest at the speed of light."""
    return max(products, key=lambda product: work_ns(product.workload, facts.precision, device))
