"""Folders as forge and verify jobs leave them, without forging anything: for tests of who reads them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from cudaforge_action.records import ForgedKernel, ForgedShard, VerifiedKernel, VerifiedShard
from cudaforge_action.shards import FORGED_DIR, write_forged, write_verified
from flow_records import make_candidate, make_evaluation, make_facts, make_target

from pytest_cudaforge.publishing import MANIFEST, publish
from pytest_cudaforge.records import Candidate, Evaluation, Feedback, Round, Status, Target, Trace, Usage

COMMIT = "c" * 40


def target(root: Path, name: str = "scale", source: str = "class Scale: ...") -> Target:
    """One of ``layers.py``, whose digest is its source's."""
    return make_target(root, name, source, hashlib.sha256(source.encode()).hexdigest())


def trace(of: Target, text: str = "fast", speedup: float = 2.0, **verdict: object) -> Trace:
    """A winner in its second round, after a broken first one."""
    candidate = make_candidate(text)
    evaluation = dataclasses.replace(make_evaluation(candidate, speedup=speedup, target=of.id), **verdict)  # type: ignore[arg-type]
    broken = make_candidate(f"broken {text}")
    failed = make_evaluation(broken, Status.BUILD_ERROR, target=of.id)
    advice = Feedback("correction", "a typo", "line 1", "mend it")
    rounds = (
        Round(1, "first", None, broken, failed, usage=Usage(100, 50, usd=0.01)),
        Round(2, "correction", 1, candidate, evaluation, advice, usage=Usage(200, 90, usd=0.02)),
    )
    return Trace(of.id, "cpp", "forged", "round 2 is faster", rounds, 2, evaluation, Usage(300, 140, usd=0.03))


def winner(made: Trace) -> tuple[Candidate, Evaluation]:
    candidate = made.rounds[-1].candidate
    assert candidate is not None and made.final is not None
    return candidate, made.final


def forged(folder: Path, targets: Sequence[Target], *, text: str = "fast", speedup: float = 2.0) -> ForgedShard:
    """A forge job's folder; its name is the shard's."""
    traces = {f"{one.slug}-cpp.json": trace(one, text, speedup) for one in targets}
    kernels = tuple(
        ForgedKernel(one.id, one.digest, "cpp", winner(made)[0].digest, name)
        for one, (name, made) in zip(targets, traces.items(), strict=True)
    )
    shard = ForgedShard(folder.name, COMMIT, "a test's machine", kernels, usd=0.03 * len(kernels), seconds=12.5)
    write_forged(folder, shard, traces)
    return shard


def verified(
    folder: Path, targets: Sequence[Target], *, text: str = "fast", speedup: float = 2.0, commit: str = COMMIT
) -> VerifiedShard:
    """A verify job's folder; its name is the shard's."""
    kernels = tuple(_verified(folder, one, trace(one, text, speedup)) for one in targets)
    (folder / FORGED_DIR / MANIFEST).unlink(missing_ok=True)
    shard = VerifiedShard(folder.name, commit, "a test's machine", kernels, seconds=4.5)
    write_verified(folder, shard)
    return shard


def _verified(folder: Path, of: Target, made: Trace) -> VerifiedKernel:
    candidate, evaluation = winner(made)
    item = publish(made, of, make_facts(of), folder / FORGED_DIR)
    return VerifiedKernel(of.id, of.digest, "cpp", candidate.digest, evaluation, item.entry)
