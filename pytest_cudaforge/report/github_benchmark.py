"""The newest figures in the format of github-action-benchmark, tool ``customSmallerIsBetter``.

A JSON array of objects with ``name``, ``unit``, ``value`` and the optional ``range`` and ``extra``, as its README says
(https://github.com/benchmark-action/github-action-benchmark, read in November 2026). The action keeps its own history,
by name: names must not change from run to run, nor be the same for two things.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pytest_cudaforge.machine import Machine
from pytest_cudaforge.measurements import Measurement
from pytest_cudaforge.records import Sample
from pytest_cudaforge.report.escaping import marked
from pytest_cudaforge.report.history_rows import last_runs

__all__ = ["entries", "render"]

#: The base is in the history under its own commit already.
_SHOWN = ("candidate", "eager", "compile")


def entries(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One for each party of each workload on each kind of machine, of the newest run's commit; sorted by name."""
    found = {
        _name(one, party): _entry(one, party, sample)
        for one in last_runs(measurements)
        for party, sample in one.parties
        if party in _SHOWN
    }
    return [found[name] for name in sorted(found)]


def render(measurements: Sequence[Measurement]) -> str:
    """The file's text."""
    return json.dumps(entries(measurements), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _entry(one: Measurement, party: str, sample: Sample) -> dict[str, Any]:
    half = (sample.high_ns - sample.low_ns) / 2.0
    return {
        "name": _name(one, party),
        # The same unit for ever: the action compares the bare numbers.
        "unit": "ns",
        "value": sample.median_ns,
        "range": f"± {half:.0f}",
        "extra": marked(
            f"{one.run.machine.text}\nkernel {one.kernel[:12]}, {one.outcome}, {sample.blocks} blocks in "
            f"{one.processes} processes, 5th to 95th percentile"
        ),
    }


def _name(one: Measurement, party: str) -> str:
    """The key tells machines apart whose names are the same."""
    language = f" ({one.language})" if one.language else ""
    who = "kernel" if party == "candidate" else party
    return marked(f"{one.name}{language} {who} on {_machine(one.run.machine)}").replace("\n", " ")


def _machine(machine: Machine) -> str:
    arch = "" if machine.arch == "cpu" else f" {machine.arch}"
    return f"{machine.device}{arch}, {machine.cores} cores #{machine.key}"
