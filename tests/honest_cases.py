"""Honest candidates of many kinds, in ``tests/honest/<language>/<name>/``: what a verdict must accept.

Written for the evaluator by people who had not read it, and checked by other means: against fp64 on many values, under
address and undefined-behaviour sanitizers, those for a GPU in emulators. A case holds a target, a candidate's files and
``case.json`` with what it is and which other work its user allows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Candidate, Target

ROOT = Path(__file__).parent / "honest"
_NO_FILES = ("target.py", "case.json")


@dataclass(frozen=True)
class HonestCase:
    """``allow``: as a user would pass it beside "kernel"."""

    name: str
    target: Target
    candidate: Candidate
    allow: tuple[str, ...]


def honest_cases(*languages: str) -> list[HonestCase]:
    """Those in these languages, by name."""
    folders = [folder for language in languages for folder in sorted((ROOT / language).iterdir())]
    return [_read(folder) for folder in folders]


def _read(folder: Path) -> HonestCase:
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in _NO_FILES)
    files = {path.name: path.read_text("utf-8") for path in paths}
    told = json.loads((folder / "case.json").read_text("utf-8"))
    (target,) = discover([folder / "target.py"], folder).targets
    return HonestCase(folder.name, target, Candidate.of(folder.parent.name, files), tuple(told["allow"]))
