"""The ladder of profiles: one candidate, one workload, the highest rung that this machine lets us stand on.

ncu (hardware counters) → cupti (kernel times) → static (binary, plan and roofline). No rung is ever fatal: where one
cannot be reached the profile says why and the next lower one answers. Nothing here is part of a verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.static_profile import static_facts, static_kernels, work_ns
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.records import Candidate, Depth, DeviceFacts, Profile, Target, TargetFacts

__all__ = ["ProfiledCall", "longest", "static_profile", "unbuilt"]


@dataclass(frozen=True)
class ProfiledCall:
    """What is looked at. ``lined`` compiles a binary of the product once more with line numbers, or returns None."""

    candidate: Candidate
    target: Target
    facts: TargetFacts
    product: Product
    device: DeviceFacts
    lined: Callable[[Binary], Binary | None] = lambda binary: None


def longest(products: Sequence[Product], facts: TargetFacts, device: DeviceFacts) -> Product:
    """The product of the workload that takes longest at the speed of light."""
    return max(products, key=lambda product: work_ns(product.workload, facts.precision, device))


def static_profile(call: ProfiledCall, depth: Depth) -> Profile:
    """The lowest rung; it always answers."""
    began = time.monotonic()
    profile = Profile(
        rung="static",
        depth=depth,
        candidate=call.candidate.digest,
        workload=call.product.workload.name,
        kernels=static_kernels(call.product, call.device),
        facts=static_facts(call.product, call.facts.precision, call.device),
    )
    return replace(profile, seconds=round(time.monotonic() - began, 3))


def unbuilt(candidate: Candidate, depth: Depth, reason: str) -> Profile:
    """What is left to say of a candidate that cannot be built (any more)."""
    return Profile("static", depth, candidate.digest, "", notes=(f"the candidate could not be built: {reason}",))
