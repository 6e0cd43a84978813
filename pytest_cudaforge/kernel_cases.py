"""The check behind one case of an ordinary pytest run: is a forged kernel still right, against today's reference?"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import DeviceError, TargetError
from pytest_cudaforge.forging import forge_config
from pytest_cudaforge.hardware import detect_in_child
from pytest_cudaforge.items import skip
from pytest_cudaforge.records import Candidate, Evaluation, Target
from pytest_cudaforge.runtime.manifest import Entry
from pytest_cudaforge.wiring import open_evaluator

if TYPE_CHECKING:
    from pytest_cudaforge.evaluation.evaluator import Evaluator

__all__ = ["check_case", "repo_root", "target_of"]

#: The arch of the GPU here, or why there is none; asked once.
_GPU = pytest.StashKey[str]()
_EVALUATORS = pytest.StashKey["dict[str, Evaluator]"]()


def check_case(config: pytest.Config, manifest: Path, entry: Entry) -> Evaluation:
    """Evaluate one entry's kernel without timing it.

    Skips where the kernel's hardware is not here. Raises ``UsageError`` where the files, the manifest or the target
    are not what was verified.
    """
    target = target_of(entry, repo_root(manifest, entry, config.rootpath))
    candidate = Candidate.of(entry.language, entry.sources(manifest))
    device = _device_for(config, entry.arch)
    return _evaluator(config, device, Path(target.root)).evaluate(candidate, target, timing=False)


def _device_for(config: pytest.Config, arch: str) -> str:
    """The device that a kernel of this arch runs on; skips where it is not here."""
    if arch == "cpu":
        return "cpu"
    found = config.stash.get(_GPU, None)
    if found is None:
        try:
            found = detect_in_child("cuda:0").arch
        except DeviceError as error:
            found = error.what
        config.stash[_GPU] = found
    if found != arch:
        here = f"the GPU here is {found}" if found.startswith("sm_") else found
        skip(f"this kernel was made for {arch}; {here}")
    return "cuda:0"


def repo_root(manifest: Path, entry: Entry, default: Path) -> Path:
    """The folder that ``entry.path`` starts from: rootdir, or the nearest one above the manifest that has the file."""
    for folder in (default, *manifest.parents):
        if (folder / entry.path).is_file():
            return folder
    raise TargetError(
        f"{entry.path} is gone, the file of {entry.target}",
        expected="the target that this kernel was forged for",
        remedy="delete the kernel's folder and its entry in manifest.json, or forge again",
    )


def target_of(entry: Entry, root: Path) -> Target:
    """Today's target of an entry. Raises ``TargetError`` where it is gone or differs from what was verified."""
    found = discover([root / entry.path], root)
    for target in found.targets:
        if target.id == entry.target:
            if target.digest != entry.source_digest:
                raise TargetError(
                    f"{entry.target} has changed since its kernel was verified",
                    expected=f"source digest {entry.source_digest[:12]}, found {target.digest[:12]}",
                    remedy="forge again (pytest --forge), or restore the reference",
                )
            return target
    for problem in found.problems:
        if problem.id in (entry.target, entry.path):
            raise TargetError(f"{problem.path}:{problem.line}: {problem.text}")
    raise TargetError(
        f"{entry.target} is gone: {entry.path} holds no such target",
        expected=entry.qualname + ", marked with forge_target",
        remedy="delete the kernel's folder and its entry in manifest.json, or forge again",
    )


def _evaluator(config: pytest.Config, device: str, root: Path) -> Evaluator:
    """One evaluator per device and pytest process, started by the first case and closed at the end."""
    opened = config.stash.setdefault(_EVALUATORS, {})
    if device not in opened:
        settings = forge_config(config)
        stack = contextlib.ExitStack()
        paths = (*config.getini("pythonpath"), root)
        opened[device] = stack.enter_context(open_evaluator(settings, device=device, python_paths=paths))
        config.add_cleanup(stack.close)
    return opened[device]
