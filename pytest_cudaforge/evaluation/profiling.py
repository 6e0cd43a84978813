"""The ladder of profiles: one candidate, one workload, the highest rung that this machine lets us stand on.

ncu (hardware counters) → cupti (kernel times) → static (binary, plan and roofline). No rung is ever fatal: where one
cannot be reached the profile says why and the next lower one answers. Nothing here is part of a verdict.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pytest_cudaforge.evaluation.profiled_call import ProfiledCall, longest
from pytest_cudaforge.evaluation.static_profile import static_facts, static_kernels
from pytest_cudaforge.records import Candidate, Depth, Profile

__all__ = ["ProfiledCall", "longest", "static_profile", "unbuilt"]


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
