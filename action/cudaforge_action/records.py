"""The frozen records that pass between the jobs of a workflow, and between the rooms of this package.

What crosses a job's border is JSON in an artifact, written by a machine that ran code of others: whoever reads it
checks it (:mod:`cudaforge_action.shards`). Units are in the names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pytest_cudaforge.records import Evaluation
from pytest_cudaforge.runtime.manifest import Entry

__all__ = [
    "Annotation",
    "Context",
    "ForgedKernel",
    "ForgedShard",
    "GuardOutcome",
    "GuardRun",
    "Shard",
    "Unchecked",
    "VerifiedKernel",
    "VerifiedShard",
]


@dataclass(frozen=True)
class Context:
    """Where a run stands, in words that all hosts share; "" and None where the host does not say.

    ``event``: the host's own name of what began it. ``sha``: the commit that is checked out, ``head_sha`` the one that
    a status or comment is about (in a pull request its head, which is not what is checked out). ``base_ref``: the
    branch that a pull request goes into. ``number``: the pull or merge request's. ``fork``: does its head lie in
    another repository? ``label``: the one that was just added. ``run_url``: the page of this run.
    ``workflow``: its name.
    """

    host: Literal["github", "gitlab", "plain"]
    workspace: Path
    event: str = ""
    repository: str = ""
    sha: str = ""
    head_sha: str = ""
    ref: str = ""
    base_ref: str = ""
    default_branch: str = ""
    number: int | None = None
    fork: bool = False
    label: str = ""
    api_url: str = ""
    server_url: str = ""
    run_url: str = ""
    run_id: str = ""
    run_attempt: str = ""
    workflow: str = ""


#: What a guard job came to, worst first: it could not say; a kernel is wrong, or something else failed; a kernel is
#: slower; something could not be decided; all that was checked is well.
GuardOutcome = Literal["error", "failed", "regression", "inconclusive", "pass"]


@dataclass(frozen=True)
class Annotation:
    """One remark on the change. ``path`` from the repo's top, posix; ``line`` from 1, 0 where no line is to blame."""

    level: Literal["error", "warning", "notice"]
    title: str
    message: str
    path: str = ""
    line: int = 0


@dataclass(frozen=True)
class Shard:
    """One job of the matrix. ``name`` is unique in a run and safe in an artifact's name (``01-cuda``). ``runs_on``:
    the labels of its runner. ``device``: "cpu", "cuda", or "" for what the runner has. ``targets``: ids.
    ``weight``: how long it is expected to take beside its siblings, without unit."""

    name: str
    runs_on: tuple[str, ...]
    device: str
    targets: tuple[str, ...]
    weight: float = 1.0


@dataclass(frozen=True)
class ForgedKernel:
    """A winner as the machine that forged it tells it: nothing of it is believed but what the kernel's sources are.

    ``digest``: of the candidate (language and sources). ``trace``: the name of its trace's file in the shard.
    ``models``: who was asked, ``prompts``: the digests of what they were asked, in the order of the rounds; () where
    the run directory does not say.
    """

    target: str
    source_digest: str
    language: str
    digest: str
    trace: str
    variant: str = ""
    models: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForgedShard:
    """What one forge job leaves. ``commit``: what was checked out. ``error``: why it ended early, "" else."""

    shard: str
    commit: str
    machine: str = ""
    kernels: tuple[ForgedKernel, ...] = ()
    usd: float | None = None
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class VerifiedKernel:
    """A verdict of a job without token or key, on what it rebuilt from source itself. ``entry``: the manifest's line
    for it; None where it may not be published, and ``reason`` says why not. ``evaluation``: None where there could be
    none (the target differs here, there is no GPU). ``turns``: how often it was judged, until no other work disturbed
    its race."""

    target: str
    source_digest: str
    language: str
    digest: str
    evaluation: Evaluation | None
    entry: Entry | None = None
    reason: str = ""
    variant: str = ""
    turns: int = 1


@dataclass(frozen=True)
class VerifiedShard:
    """What one verify job leaves, beside the files of its kernels below ``forged/``."""

    shard: str
    commit: str
    machine: str = ""
    kernels: tuple[VerifiedKernel, ...] = ()
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Unchecked:
    """What a run of the guard did not check. ``what``: kernels, named as far as there is room, of which there are
    ``count`` (0: all there may be). ``why``, and what would help."""

    what: str
    why: str
    remedy: str = ""
    count: int = 0


@dataclass(frozen=True)
class GuardRun:
    """``run.json``: what a guard job knows beside pytest's own report.

    ``status``: the job's exit status, ``pytest_status``: pytest's (None: it never ran, negative: the signal that ended
    it). ``seconds``: where time went, by phase; ``measuring`` is what verifying and racing took. ``sha``: what was
    checked out. ``error``: why there is no answer. ``note``: what else a reader has to know.
    """

    outcome: GuardOutcome
    status: int
    pytest_status: int | None = None
    seconds: tuple[tuple[str, float], ...] = ()
    unchecked: tuple[Unchecked, ...] = ()
    sha: str = ""
    error: str = ""
    note: str = ""
