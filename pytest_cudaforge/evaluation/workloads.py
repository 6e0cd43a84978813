"""Which of a target's workloads count."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import replace

from pytest_cudaforge.errors import ConfigError, TargetError
from pytest_cudaforge.records import TargetFacts, WorkloadFacts

__all__ = ["chosen", "matching"]


def matching(facts: TargetFacts, patterns: Sequence[str] | None) -> TargetFacts:
    """The facts with the workloads that a pattern fits. Raises TargetError where none does."""
    if patterns is None:
        return facts
    chosen = tuple(one for one in facts.workloads if any(fnmatch.fnmatchcase(one.name, p) for p in patterns))
    if not chosen:
        names = ", ".join(workload.name for workload in facts.workloads)
        raise TargetError(
            f"{facts.target_id} has no workload like {' or '.join(patterns)}", expected=f"some of {names}"
        )
    return replace(facts, workloads=chosen, chosen=len(chosen) < len(facts.workloads))


def chosen(facts: TargetFacts, names: Sequence[str] | None) -> list[WorkloadFacts]:
    """Raises ConfigError for a name that no workload has."""
    known = {workload.name: workload for workload in facts.workloads}
    for name in names or ():
        if name not in known:
            raise ConfigError(f"{facts.target_id} has no workload {name!r}", expected=", ".join(known))
    return [known[name] for name in names] if names is not None else list(known.values())
