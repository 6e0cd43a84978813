"""One report of a whole workflow from those of its jobs: JSON, history and a summary. JUnit is :mod:`merging`'s.

What forge jobs report comes from machines that ran candidate code: documents are read with limits, put together again
from their typed parts, and one that is not what we write is left out with a word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudaforge_action.artifact import read_json
from cudaforge_action.branch import Kernel
from cudaforge_action.shards import REPORTS, ShardError
from pytest_cudaforge import history
from pytest_cudaforge.errors import StoreError
from pytest_cudaforge.records import Usage, from_json, to_json
from pytest_cudaforge.report import json as documents
from pytest_cudaforge.report.rows import Row, totals_of
from pytest_cudaforge.store import total_usage

__all__ = ["Document", "document", "merge_histories", "read_document"]

_MOST_TARGETS = 10_000


@dataclasses.dataclass(frozen=True)
class Document:
    """What one job reported of its targets: their rows, and the whole of what it says of each."""

    rows: tuple[Row, ...]
    targets: tuple[Mapping[str, Any], ...]
    environment: Mapping[str, str]
    seconds: float


def read_document(path: Path) -> Document:
    """A ``--forge-json`` document. Raises :class:`ShardError` for one that is none."""
    data = read_json(path, REPORTS["report.json"])
    known = isinstance(data, dict) and (data.get("format"), data.get("version")) == (
        documents.FORMAT,
        documents.VERSION,
    )
    targets = data.get("targets") if known else None
    if not isinstance(targets, list) or len(targets) > _MOST_TARGETS:
        raise _wrong(path, "it is no report of a forging run")
    names = [field.name for field in dataclasses.fields(Row)]
    try:
        rows = tuple(from_json(Row, {name: one[name] for name in names if name in one}) for one in targets)
        seconds = from_json(float, data.get("totals", {}).get("seconds", 0.0))
        environment = {str(name): str(value) for name, value in data.get("environment", {}).items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _wrong(path, str(error)) from None
    return Document(rows, tuple(targets), environment, seconds)


def _wrong(path: Path, why: str) -> ShardError:
    return ShardError(f"{path.name} cannot be merged: {why[:300]}", expected="what --forge-json writes")


def document(parts: Mapping[str, Document], published: Sequence[Kernel]) -> dict[str, Any]:
    """All shards' documents as one, in the format of each. ``published``: what became of the winners, by digest."""
    rows = [row for part in parts.values() for row in part.rows]
    usage = total_usage([row.usage for row in rows]) if rows else Usage()
    merged = {name: value for part in parts.values() for name, value in part.environment.items()}
    return {
        "format": documents.FORMAT,
        "version": documents.VERSION,
        "environment": merged,
        "totals": to_json(totals_of(rows, usage, sum(part.seconds for part in parts.values()))),
        "targets": [{**target, "shard": shard} for shard, part in parts.items() for target in part.targets],
        "published": [
            {
                "target": kernel.entry.target,
                "language": kernel.entry.language,
                "arch": kernel.entry.arch,
                "variant": kernel.entry.variant,
                "directory": kernel.entry.directory,
                "files": to_json(kernel.entry.files),
            }
            for kernel in published
        ],
    }


def merge_histories(into: Path, others: Iterable[Path]) -> str:
    """Every line of the files that are there, once. Why it could not be done, "" where it was."""
    try:
        history.merge(into, [other for other in others if other.is_file() and not other.is_symlink()])
    except StoreError as error:
        return str(error)
    return ""
