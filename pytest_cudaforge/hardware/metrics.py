"""Which metrics a device is asked for, and what is reckoned from their values.

Ratios that show a fault are reckoned here, when a profile is made, and stored in it under names of their own
(``derived__...``): whoever cites one can look it up.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.resources
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_cudaforge.hardware.ncu import Figures

__all__ = ["by_line", "chosen", "derived", "floor", "in_call", "lacking", "load_unknown", "store_unknown", "table"]


@functools.cache
def _data() -> Mapping[str, Any]:
    import yaml

    text = importlib.resources.files("pytest_cudaforge.hardware").joinpath("metrics.yaml").read_text(encoding="utf-8")
    data: Mapping[str, Any] = yaml.safe_load(text)
    return data


def table() -> tuple[tuple[str, ...], ...]:
    """Every entry: names of the same thing, the first that a device has is asked for."""
    return tuple(tuple(names) for part in ("floor", "more") for names in _data()[part])


def floor() -> tuple[tuple[str, ...], ...]:
    """The entries that are CudaForge's."""
    return tuple(tuple(names) for names in _data()["floor"])


def by_line() -> tuple[str, ...]:
    """What a quick profile asks for beside the table, for the source lines alone."""
    return tuple(_data()["lines"])


def in_call(unknown: Collection[str]) -> tuple[str, ...]:
    """What is counted of kernels inside the call, on a device that does not have ``unknown``."""
    return _chosen([tuple(names) for names in _data()["in_call"]], unknown)


def chosen(unknown: Collection[str] | None) -> tuple[str, ...]:
    """The metrics to ask for on a device that does not have ``unknown``; all names where nothing is known yet."""
    return _chosen(table(), unknown)


def _chosen(entries: Sequence[Sequence[str]], unknown: Collection[str] | None) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for names in entries:
        if unknown is None:
            found |= dict.fromkeys(names)
            continue
        name = next((name for name in names if name not in unknown), None)
        if name is not None:
            found[name] = None
    return tuple(found)


def lacking(present: Collection[str]) -> frozenset[str]:
    """Metrics of the table that a device lacks, by those that a report of it holds (all of them were asked for).

    One without a figure may only have no value for that kernel (a ratio of nothing to nothing): it counts as lacking
    where an alternative has a figure, else it is asked for again.
    """
    missing: set[str] = set()
    for names in table():
        if any(name in present for name in names):
            missing |= {name for name in names if name not in present}
    return frozenset(missing)


def load_unknown(file: Path) -> frozenset[str] | None:
    """Metrics that a device does not have, as :func:`store_unknown` left them; None where nobody asked it yet."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(data, dict) and data.get("table") == _table_digest() and isinstance(data.get("unknown"), list)
    return frozenset(map(str, data["unknown"])) if known else None


def store_unknown(file: Path, unknown: Collection[str]) -> None:
    """Keep a device's answer; a place that cannot be written costs the next session a longer question."""
    text = json.dumps({"table": _table_digest(), "unknown": sorted(unknown)})
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)


def _table_digest() -> str:
    return hashlib.sha256(json.dumps(table()).encode()).hexdigest()[:16]


def derived(figures: Figures) -> Iterator[tuple[str, float, str]]:
    """Ratios of one kernel's metrics, as (name, value, unit); those whose parts are missing are left out.

    Shares say how much a pattern matters, not how bad it is where it occurs: of all global sectors those that a better
    pattern would save, of all sectors those of local memory, of all cycles those in which shared memory serves again.
    """

    def value(name: str) -> float | None:
        found = figures.get(name)
        return found[0] if found is not None else None

    sectors, ideal = value("memory_l2_theoretical_sectors_global"), value("memory_l2_theoretical_sectors_global_ideal")
    if sectors and ideal is not None:
        yield "derived__global_excess_sectors_share", 100.0 * (sectors - ideal) / sectors, "%"
    for name, op in (("load", "ld"), ("store", "st")):
        moved = value(f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum")
        requests = value(f"l1tex__t_requests_pipe_lsu_mem_global_op_{op}.sum")
        if moved and requests:
            yield f"derived__global_{name}_sectors_per_request", moved / requests, "sector"
    local = _sum(value, "l1tex__t_sectors_pipe_lsu_mem_local_op_{}.sum")
    globally = _sum(value, "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum")
    if local is not None and globally is not None and local + globally:
        yield "derived__local_sectors_share", 100.0 * local / (local + globally), "%"
    again = _served_again(value)
    cycles, units = value("sm__cycles_active.avg"), value("device__attribute_multiprocessor_count")
    if again is not None and cycles and units:
        yield "derived__shared_conflict_cycles_share", min(100.0, 100.0 * again / (cycles * units)), "%"


def _served_again(value: Callable[[str], float | None]) -> float | None:
    """Wavefronts of shared memory that bank conflicts cost: by the addresses, or as the hardware counted them."""
    wavefronts, ideal = value("memory_l1_wavefronts_shared"), value("memory_l1_wavefronts_shared_ideal")
    if wavefronts is not None and ideal is not None:
        return wavefronts - ideal
    return value("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")


def _sum(value: Callable[[str], float | None], pattern: str, directions: Sequence[str] = ("ld", "st")) -> float | None:
    parts = [value(pattern.format(direction)) for direction in directions]
    return sum(part for part in parts if part is not None) if None not in parts else None
