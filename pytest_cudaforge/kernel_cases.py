"""The check behind one case of an ordinary pytest run: is a forged kernel still right, against today's reference?

A case fails where production would run something that is not right, or not what was verified. It is *unverified* where
production has no use for the kernel as things are (its target has changed or is gone, its hardware is not here): then
nothing is checked, and the reason is said.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_cudaforge.discovery import Discovery, discover
from pytest_cudaforge.errors import DeviceError, StaleEntry, TargetError
from pytest_cudaforge.hardware import detect_in_child
from pytest_cudaforge.records import Candidate, Evaluation, Guard, Target, WorkloadFacts
from pytest_cudaforge.runtime.manifest import Entry, EntryWorkload

if TYPE_CHECKING:
    from pytest_cudaforge.evaluation.evaluator import Evaluator

__all__ = ["Case", "Inspector", "NotHere", "Verdict", "repo_root", "target_of"]


class NotHere(Exception):
    """The hardware that a kernel was made for is not here."""


@dataclass(frozen=True)
class Case:
    """One workload of one forged kernel. ``listed``: all workloads of its target that some kernel was verified on."""

    manifest: Path
    entry: Entry
    workload: EntryWorkload
    listed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Verdict:
    """What a case came to. ``wider``: why the manifest lets the kernel be used where it is wrong, "" where it is right.
    ``unlisted``: workloads of the target that the manifest knows nothing of."""

    evaluation: Evaluation
    wider: str = ""
    unlisted: tuple[str, ...] = ()


@dataclass
class Inspector:
    """What all cases of a process share. Thread-safe. ``evaluator_of``: the evaluator of a device, opened when first
    asked for; ``root``: where ``Entry.path`` starts from as a rule. ``on_terms``: a target with the terms that count
    (the guard takes the merge base's), None: its own."""

    root: Path
    evaluator_of: Callable[[str], Evaluator]
    on_terms: Callable[[Target], Target] | None = None
    _gpu: str = ""
    _scans: dict[tuple[Path, Path], Discovery] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _device_lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, case: Case) -> Verdict:
        """Evaluate a case without timing it.

        Raises StaleEntry and NotHere where there is nothing to verify, ConfigError where a file is not the one that was
        verified, and what ``Evaluator.evaluate`` raises.
        """
        entry = case.entry
        # First: whatever else is the matter, a kernel that nobody verified is not to be in the repo.
        candidate = Candidate.of(entry.language, entry.sources(case.manifest))
        self._require_torch(entry)
        target = self._target(case)
        target = self.on_terms(target) if self.on_terms is not None else target
        device = self._device_for(entry.arch)
        evaluator, name = self.evaluator_of(device), case.workload.name
        # A GPU's memory is one candidate's at a time: what fits alone must not fail beside another.
        with self._device_lock if device != "cpu" else contextlib.nullcontext():
            drawn = {workload.name: workload for workload in evaluator.facts(target).workloads}
            _require_drawn(case, drawn.get(name))
            evaluation = evaluator.evaluate(candidate, target, timing=False, workloads=[name], guard=entry.guard)
        listed = case.listed | {workload.name for workload in entry.workloads}
        return Verdict(evaluation, _wider(entry.guard, evaluation), tuple(name for name in drawn if name not in listed))

    def _device_for(self, arch: str) -> str:
        """Raises NotHere."""
        if arch == "cpu":
            return "cpu"
        found = self._gpu_here()
        if found != arch:
            here = f"the GPU here is {found}" if found.startswith("sm_") else found
            raise NotHere(f"this kernel was made for {arch}; {here}")
        return "cuda:0"

    def _gpu_here(self) -> str:
        """The arch of the GPU here, or why there is none; asked once."""
        with self._lock:
            if not self._gpu:
                try:
                    self._gpu = detect_in_child("cuda:0").arch
                except DeviceError as error:
                    self._gpu = error.what
            return self._gpu

    def _target(self, case: Case) -> Target:
        root = repo_root(case.manifest, case.entry, self.root)
        file = root / case.entry.path
        with self._lock:
            if (file, root) not in self._scans:
                self._scans[file, root] = discover([file], root)
            found = self._scans[file, root]
        return _target_in(found, case.entry)

    def _require_torch(self, entry: Entry) -> None:
        """Raises StaleEntry where the kernel was verified against another major version's operators."""
        here, was = _torch_here(), entry.torch
        if here and was and _major(here) != _major(was):
            raise StaleEntry(
                f"{entry.target}: its kernel was verified with torch {was}, here is torch {here}",
                expected=f"torch {_major(was)}",
                remedy="forge again with this torch (pytest --forge)",
            )


def repo_root(manifest: Path, entry: Entry, default: Path) -> Path:
    """The folder that ``entry.path`` starts from: rootdir, or the nearest one above the manifest that has the file."""
    for folder in (default, *manifest.parents):
        if (folder / entry.path).is_file():
            return folder
    raise StaleEntry(
        f"{entry.path} is gone, the file of {entry.target}",
        expected="the target that this kernel was forged for",
        remedy="delete the kernel's folder and its entry in manifest.json, or forge again",
    )


def target_of(entry: Entry, root: Path) -> Target:
    """Today's target of an entry. Raises ``StaleEntry`` where it is gone or differs from what was verified."""
    return _target_in(discover([root / entry.path], root), entry)


def _target_in(found: Discovery, entry: Entry) -> Target:
    for target in found.targets:
        if target.id == entry.target:
            if target.digest != entry.source_digest:
                raise StaleEntry(
                    f"{entry.target} has changed since its kernel was verified",
                    expected=f"source digest {entry.source_digest[:12]}, found {target.digest[:12]}",
                    remedy="forge again (pytest --forge), or restore the reference",
                )
            return target
    for problem in found.problems:
        if problem.id in (entry.target, entry.path):
            raise TargetError(f"{problem.path}:{problem.line}: {problem.text}")
    raise StaleEntry(
        f"{entry.target} is gone: {entry.path} holds no such target",
        expected=entry.qualname + ", marked with forge_target",
        remedy="delete the kernel's folder and its entry in manifest.json, or forge again",
    )


def _require_drawn(case: Case, today: WorkloadFacts | None) -> None:
    """Raises StaleEntry where the target draws another call than the kernel was verified on."""
    name, target = case.workload.name, case.entry.target
    remedy = "forge again (pytest --forge): production keeps the reference for calls that were not verified"
    if today is None:
        what = f"{target} has no workload {name!r} any more"
        raise StaleEntry(what, expected="the workload that its kernel was verified on", remedy=remedy)
    was, now = _shapes(case.workload.inputs), _shapes(today.inputs)
    changed = [path for path in {**was, **now} if was.get(path) != now.get(path)]
    if changed:
        first = changed[0]
        raise StaleEntry(
            f"{target}: workload {name!r} is another than its kernel was verified on",
            expected=f"input {first}: {was.get(first, 'none')}, found {now.get(first, 'none')}",
            remedy=remedy,
        )


def _shapes(inputs: tuple[tuple[str, object], ...]) -> Mapping[str, str]:
    """By path: a tensor's dtype, shape and strides; a plain value may differ from draw to draw."""
    from pytest_cudaforge.plan import TensorSpec

    return {
        path: f"{leaf.dtype} {list(leaf.shape)} strides {list(leaf.strides)}"
        if isinstance(leaf, TensorSpec)
        else "no tensor"
        for path, leaf in inputs
    }


def _wider(promised: Guard, evaluation: Evaluation) -> str:
    """Where dispatch would use the kernel although a probe failed there."""
    if evaluation.verification is None:
        return ""
    found = evaluation.verification.guard
    lost = [
        text
        for text, holds in (
            ("other strides than the drawn ones", found.contiguous_only and not promised.contiguous_only),
            (f"tensors not aligned to {found.align_bytes} bytes", found.align_bytes > promised.align_bytes),
            ("other shapes than the drawn ones", found.drawn_shapes_only and not promised.drawn_shapes_only),
            (
                f"other sizes than {', '.join(map(str, found.fixed_sizes))}",
                bool(set(found.fixed_sizes) - set(promised.fixed_sizes)) and not promised.drawn_shapes_only,
            ),
            (
                "sizes that differ where the drawn ones are equal",
                found.equal_sizes_only and not (promised.equal_sizes_only or promised.drawn_shapes_only),
            ),
        )
        if holds
    ]
    if not lost:
        return ""
    reasons = "; ".join(found.reasons[len(promised.reasons) :])
    return f"the manifest lets it be used for {' and '.join(lost)}, where it fails: {reasons}"


def _major(version: str) -> str:
    return version.partition(".")[0]


def _torch_here() -> str:
    """The version of torch that children import; not imported here."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
