"""One report of a whole workflow from those of its jobs: JSON, JUnit, history and a page.

What forge jobs report comes from machines that ran candidate code: documents are read with limits, put together again
from their typed parts, and one that is not what we write is left out with a word.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cudaforge_action.artifact import read_bytes, read_json
from cudaforge_action.branch import Kernel
from cudaforge_action.harvest import Harvest
from cudaforge_action.merging import merge_junit
from cudaforge_action.shards import REPORTS, ShardError
from cudaforge_action.story import NONSENSE
from pytest_cudaforge import history
from pytest_cudaforge.errors import StoreError
from pytest_cudaforge.records import Usage, from_json, to_json
from pytest_cudaforge.report import files, html
from pytest_cudaforge.report import json as documents
from pytest_cudaforge.report.rows import Row, totals, totals_of
from pytest_cudaforge.store import total_usage

__all__ = ["Document", "document", "read_document", "write_merged"]

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
    try:
        rows = tuple(_row(one) for one in targets)
        seconds = from_json(float, data.get("totals", {}).get("seconds", 0.0))
        environment = {str(name): str(value) for name, value in data.get("environment", {}).items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise _wrong(path, str(error)) from None
    return Document(rows, tuple(targets), environment, seconds)


def _row(target: Mapping[str, Any]) -> Row:
    """A target's row, whose number of rounds gave way to the rounds themselves."""
    names = {field.name for field in dataclasses.fields(Row)}
    row: Row = from_json(
        Row, {**{name: target[name] for name in names & target.keys()}, "rounds": len(target["rounds"])}
    )
    return row


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


def write_merged(folder: Path, found: Harvest, histories: Sequence[Path] = ()) -> tuple[str, ...]:
    """Write ``forge.json``, ``junit.xml``, ``history.jsonl`` and ``report.html`` of all shards into ``folder``.
    ``histories``: further ones that are to be in it. Returned is what could not be merged, and why: none of it is worth
    a publish. Raises :class:`~pytest_cudaforge.errors.UsageError` where the folder cannot be written."""
    notes: list[str] = []
    parts, junit = {}, {}
    for name, shard in found.forged.items():
        try:
            if "report.json" in shard.reports:
                parts[name] = read_document(shard.folder / "report.json")
            if "junit.xml" in shard.reports:
                junit[name] = read_bytes(shard.folder / "junit.xml", REPORTS["junit.xml"])
        except ShardError as error:
            notes.append(f"shard {name}: {error.what}")
    merged = merge_junit(junit)
    data = json.dumps(document(parts, found.kernels), indent=1, ensure_ascii=False, allow_nan=False)
    files.write(folder / "forge.json", data + "\n", "forge.json")
    files.write(folder / "junit.xml", merged.text.decode("utf-8", "replace"), "junit.xml")
    others = [shard.folder / "history.jsonl" for shard in found.forged.values() if "history.jsonl" in shard.reports]
    notes += [*merged.notes, *_merge_histories(folder / "history.jsonl", [*others, *histories])]
    return (*notes, *_write_page(folder / "report.html", found))


def _merge_histories(into: Path, others: Iterable[Path]) -> list[str]:
    try:
        history.merge(into, [other for other in others if other.is_file()])
    except StoreError as error:
        return [f"the histories were not merged: {error.what}"]
    return []


def _write_page(path: Path, found: Harvest) -> list[str]:
    """Every winner's story, with the verdict that counts where it has one."""
    verdicts = {kernel.digest: kernel.evaluation for one in found.verified.values() for kernel in one.shard.kernels}
    traces = [
        dataclasses.replace(trace, final=verdicts.get(kernel.digest) or trace.final)
        for one in found.forged.values()
        for kernel, trace in one.kernels
    ]
    try:
        total = totals(traces, total_usage([trace.usage for trace in traces]), sum(trace.seconds for trace in traces))
        page = html.document(traces, total)
    except NONSENSE as error:
        return [f"no page of all kernels could be drawn: {type(error).__name__}"]
    html.write(path, page)
    return []
