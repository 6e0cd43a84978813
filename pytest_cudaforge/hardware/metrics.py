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

__all__ = [
    "by_line",
    "chosen",
    "contradicted",
    "derived",
    "floor",
    "in_call",
    "lacking",
    "load_unknown",
    "store_unknown",
    "table",
]


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


_GLOBAL, _WAVEFRONTS = "memory_l2_theoretical_sectors", "memory_l1_wavefronts"
_SECTORS = "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"


def derived(figures: Figures) -> Iterator[tuple[str, float, str]]:
    """Ratios of one kernel's metrics, as (name, value, unit); those whose parts are missing are left out.

    Shares say how much a pattern matters, not how bad it is where it occurs: of all global sectors those that a better
    pattern would save, of all sectors those of local memory, of all cycles those in which shared memory serves again.
    """

    value = functools.partial(_value, figures)
    excess = _excess_sectors(figures)
    if excess is not None and excess[1]:
        yield "derived__global_excess_sectors_share", 100.0 * excess[0] / excess[1], "%"
    for name, op in (("load", "ld"), ("store", "st")):
        moved = value(_SECTORS.format(op))
        requests = value(f"l1tex__t_requests_pipe_lsu_mem_global_op_{op}.sum")
        if moved and requests:
            yield f"derived__global_{name}_sectors_per_request", moved / requests, "sector"
    local = _sum(value, "l1tex__t_sectors_pipe_lsu_mem_local_op_{}.sum")
    globally = _sum(value, _SECTORS)
    if local is not None and globally is not None and local + globally:
        yield "derived__local_sectors_share", 100.0 * local / (local + globally), "%"
    again = _served_again(figures)
    cycles, units = value("sm__cycles_active.avg"), value("device__attribute_multiprocessor_count")
    if again is not None and cycles and units:
        yield "derived__shared_conflict_cycles_share", min(100.0, 100.0 * again / (cycles * units)), "%"


def _value(figures: Figures, name: str) -> float | None:
    found = figures.get(name)
    return found[0] if found is not None else None


def _excess_sectors(figures: Figures) -> tuple[float, float] | None:
    """Sectors of global memory that a better pattern would save, of so many in all.

    By the addresses of a kernel's instructions ncu reckons half as many again for an asynchronous copy to shared memory
    as the copy moves, so where the sectors were counted, no more than those are in excess.
    """
    sectors = _value(figures, f"{_GLOBAL}_global")
    ideal = _value(figures, f"{_GLOBAL}_global_ideal")
    if sectors is None or ideal is None:
        return None
    counted = _sum(functools.partial(_value, figures), _SECTORS)
    if counted is not None:
        # Devices or versions that do not tell these apart have none of them to tell.
        atomic = (_value(figures, _SECTORS.format(kind)) or 0.0 for kind in ("atom", "red"))
        sectors = min(sectors, max(counted + sum(atomic), ideal))
    return sectors - ideal, sectors


def _served_again(figures: Figures) -> float | None:
    """Wavefronts of shared memory that bank conflicts cost: as the hardware counted them, else by the addresses (by
    which asynchronous copies have some that never happen)."""
    counted = _value(figures, "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")
    wavefronts, ideal = _value(figures, f"{_WAVEFRONTS}_shared"), _value(figures, f"{_WAVEFRONTS}_shared_ideal")
    if counted is not None or wavefronts is None or ideal is None:
        return counted
    return wavefronts - ideal


def contradicted(figures: Figures) -> frozenset[str]:
    """What was reckoned by a kernel's addresses and did not happen: "global" accesses, "shared" ones, or neither.

    That is where less than half of the excess was counted.
    """
    told = set()
    excess, sectors = _excess_sectors(figures), _value(figures, f"{_GLOBAL}_global")
    if excess is not None and sectors is not None and 2.0 * excess[0] < sectors - (excess[1] - excess[0]):
        told.add("global")
    wavefronts, ideal = _value(figures, f"{_WAVEFRONTS}_shared"), _value(figures, f"{_WAVEFRONTS}_shared_ideal")
    again = _served_again(figures)
    if again is not None and wavefronts is not None and ideal is not None and 2.0 * again < wavefronts - ideal:
        told.add("shared")
    return frozenset(told)


def _sum(value: Callable[[str], float | None], pattern: str, directions: Sequence[str] = ("ld", "st")) -> float | None:
    parts = [value(pattern.format(direction)) for direction in directions]
    return sum(part for part in parts if part is not None) if None not in parts else None
