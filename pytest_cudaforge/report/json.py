"""The versioned document behind ``--forge-json``: for programs, so its fields only grow within a version."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_cudaforge.guarded import GuardReport
from pytest_cudaforge.records import Round, Trace, to_json
from pytest_cudaforge.report import files
from pytest_cudaforge.report.rows import Totals, row
from pytest_cudaforge.report.standings import standings

__all__ = ["FORMAT", "VERSION", "document", "write"]

FORMAT = "cudaforge-report"
VERSION = 1


def document(
    traces: Sequence[Trace],
    totals: Totals,
    *,
    environment: Mapping[str, str] | None = None,
    guard: GuardReport | None = None,
) -> dict[str, Any]:
    """The whole session as plain JSON data; sources are named by their digest, they lie in the run directory.
    ``guard``: what a run of the guard found, which forges nothing.

    Its schema: :mod:`report.schema`.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "environment": dict(environment or {}),
        "totals": to_json(totals),
        "targets": [_target(trace) for trace in traces],
        **({"guard": to_json(guard)} if guard is not None else {}),
    }


def write(path: Path, data: Mapping[str, Any]) -> None:
    """Raises :class:`UsageError` where the path given by the user cannot be written."""
    files.write(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", "--forge-json")


def _target(trace: Trace) -> dict[str, Any]:
    data: dict[str, Any] = to_json(row(trace))
    data["notes"] = list(trace.notes)
    data["final"] = to_json(trace.final)
    data["baselines"] = to_json(trace.baselines)
    data["hardware"] = to_json(trace.hardware)
    data["standings"] = [{**to_json(entry), "sol_percent": entry.sol_percent} for entry in standings(trace)]
    data["rounds"] = [_round(entry) for entry in trace.rounds]
    return data


def _round(entry: Round) -> dict[str, Any]:
    data: dict[str, Any] = to_json(entry)
    data["candidate"] = entry.candidate.digest if entry.candidate is not None else None
    return data
