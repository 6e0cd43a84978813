"""What one run of the guard found, as records that go to JSON and back. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytest_cudaforge.guard import Finding

__all__ = ["Cause", "Change", "GuardRecord", "GuardReport", "Verdict"]

#: ``pass``, ``regression`` and ``inconclusive`` are guard.assess's. ``unfit``: a regression, said by a runner that
#: calibration calls unfit. ``failed``: the kernel is wrong, or not what its manifest says. ``skipped``: it cannot be
#: measured here. ``cancelled``: the run ended before it.
Verdict = Literal["pass", "regression", "inconclusive", "unfit", "failed", "skipped", "cancelled"]
#: Why something was skipped. ``stale``: its kernel was verified with another reference, workload or torch. ``absent``:
#: the hardware is not here. ``toolchain``: its compiler is not. ``new``: the merge base has nothing like it.
#: ``unasked``: importing it tells that no guard is wanted. ``""``: not skipped.
Cause = Literal["", "stale", "absent", "toolchain", "new", "unasked"]


@dataclass(frozen=True)
class Change:
    """Something that decides a verdict and is not as it was at the merge base. ``place``: a file, or an id. ``base``
    and ``head`` as text, "" where there is none. ``obeyed``: which one was used: the head's, or the merge base's."""

    place: str
    name: str
    base: str
    head: str
    obeyed: bool = False

    @property
    def text(self) -> str:
        """``layers.py::Norm: atol 0.5, at the merge base none: not obeyed``"""
        said = f"{self.place}: {self.name} {self.head or 'none'}, at the merge base {self.base or 'none'}"
        return said if self.obeyed else f"{said}: not obeyed"


@dataclass(frozen=True)
class GuardRecord:
    """One item's answer: a workload of one kernel, or a module. ``id``: the item's. ``raced``: it asks for the time,
    too; else only whether the kernel is right. ``language``: "" of a plain module.
    ``since``: the commit since which the kernel is as it is, where it is the merge base's byte for byte; its version
    there is not raced then. ``reason``: the answer in one line, ``text`` in full. ``seconds``: of the whole decision,
    shared among the workloads of a kernel. ``cause``: why it was skipped."""

    id: str
    target: str
    workload: str
    outcome: Verdict
    raced: bool = True
    reason: str = ""
    text: str = ""
    language: str = ""
    arch: str = ""
    findings: tuple[Finding, ...] = ()
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    since: str = ""
    command: str = ""
    isolation: str = ""
    seconds: float = 0.0
    cause: Cause = ""


@dataclass(frozen=True)
class GuardReport:
    """A run of the guard. ``base``: the merge base as text, ``runner``: what calibration says of this machine.
    ``changes`` concern no kernel in particular; ``removed``: kernels of the merge base that are gone. ``alarms``: what
    the history says. ``strict``: what is inconclusive fails, too. ``error``: why there are no records."""

    records: tuple[GuardRecord, ...] = ()
    base: str = ""
    base_sha: str = ""
    machine: str = ""
    runner: str = ""
    changes: tuple[Change, ...] = ()
    removed: tuple[str, ...] = ()
    alarms: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    strict: bool = False
    error: str = ""
    seconds: float = 0.0

    @property
    def failing(self) -> tuple[Verdict, ...]:
        """Outcomes that fail a build."""
        return ("regression", "failed", "inconclusive") if self.strict else ("regression", "failed")

    def of(self, item: str) -> GuardRecord | None:
        """The record of the item with this id."""
        return next((record for record in self.records if record.id == item), None)

    def count(self, *outcomes: Verdict) -> int:
        return sum(record.outcome in outcomes for record in self.records)
