"""The rung below hardware counters: names, times and shapes of a call's kernels, from CUPTI through torch's profiler.

No privilege is needed for it. It looks at the same trusted replay as Nsight Compute does, from inside
(:mod:`.profiled_replay`), and costs torch's start-up.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_cudaforge.evaluation.counter_reading import readable_name
from pytest_cudaforge.evaluation.profiled_call import ProfiledCall
from pytest_cudaforge.evaluation.replayed import Refused, Replayed
from pytest_cudaforge.records import Profile, ProfiledKernel

__all__ = ["TracedKernel", "look", "parse_trace"]

_CALLS, _BIG_CALLS, _BIG_BYTES = 5, 2, 1 << 30
_LIMIT_S = 60.0
_MOST_TRACE_BYTES = 64 << 20
#: A trace's words for what Nsight Compute has a name for.
_NAMES = {
    "registers per thread": ("launch__registers_per_thread", "register/thread"),
    "warps per SM": ("launch__warps_per_sm", "warp"),
}


@dataclass(frozen=True)
class TracedKernel:
    """One launch as CUPTI saw it; ``name`` is demangled."""

    name: str
    duration_ns: float
    grid: tuple[int, ...]
    block: tuple[int, ...]
    figures: tuple[tuple[str, float, str], ...]


def look(replayed: Replayed, call: ProfiledCall, static: Profile) -> Profile:
    """``static`` with the times of its kernels. Raises Refused."""
    nbytes = call.product.workload.input_bytes + call.product.workload.output_bytes
    calls = _BIG_CALLS if nbytes > _BIG_BYTES else _CALLS
    with replayed.prepared(call, watch="trace", calls=calls, limit_s=_LIMIT_S) as folder:
        argv = [sys.executable, "-B", "-m", "pytest_cudaforge.evaluation.profiled_replay", str(folder)]
        replayed.run(argv, folder, _LIMIT_S)
        kernels = parse_trace(_text(folder / "trace.json"))
    if not kernels:
        raise Refused("torch's profiler saw no kernels (CUPTI is not available here)", lasting=True)
    found = tuple(_kernels(kernels, calls, call, static))
    total_ns = sum(kernel.duration_ns or 0.0 for kernel in found)
    own_ns = sum(kernel.duration_ns or 0.0 for kernel in found if kernel.own)
    facts = (("kernel_time", total_ns, "ns"), ("own_share", 100.0 * own_ns / total_ns if total_ns else 0.0, "%"))
    return replace(static, rung="cupti", kernels=found, facts=(*static.facts, *facts))


def parse_trace(text: str) -> tuple[TracedKernel, ...]:
    """The kernels of a Chrome trace that torch's profiler wrote, in order of their start."""
    try:
        events = json.loads(text)["traceEvents"]
    except (ValueError, KeyError, TypeError):
        return ()
    kernels = [event for event in events if isinstance(event, dict) and event.get("cat") == "kernel"]
    return tuple(_kernel(event) for event in sorted(kernels, key=lambda event: float(event.get("ts", 0.0))))


def _kernel(event: Mapping[str, Any]) -> TracedKernel:
    args = event.get("args", {})
    figures = tuple(
        (name, float(args[key]), unit)
        for key, (name, unit) in _NAMES.items()
        if isinstance(args.get(key), (int, float))
    )
    grid, block = (tuple(int(size) for size in args.get(key, ())) for key in ("grid", "block"))
    return TracedKernel(str(event.get("name", "")), float(event.get("dur", 0.0)) * 1e3, grid, block, figures)


def _kernels(
    kernels: Sequence[TracedKernel], calls: int, call: ProfiledCall, static: Profile
) -> Iterator[ProfiledKernel]:
    """One record for each name and shape, with the median call's time; the longest first."""
    own = {readable_name(k.symbol): k.expression for binary in call.product.binaries for k in binary.kernels}
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[TracedKernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.name, kernel.grid, kernel.block), []).append(kernel)
    found = []
    for (name, grid, block), members in groups.items():
        function = own.get(bare_name(name))
        launches = max(1, round(len(members) / calls))
        duration_ns = statistics.median(member.duration_ns for member in members) * launches
        compiled = next(
            (k for k in static.kernels if k.function == function and (k.grid, k.block) == (grid, block)), None
        )
        figures = {figure[0]: figure for figure in members[0].figures}
        figures |= {figure[0]: figure for figure in (compiled.metrics if compiled is not None else ())}
        time = ("gpu__time_duration.sum", duration_ns / launches, "ns")
        metrics = (time, *figures.values())
        named = function if function is not None else bare_name(name)
        found.append(ProfiledKernel(named, function is not None, launches, duration_ns, grid, block, metrics))
    yield from sorted(found, key=lambda kernel: -(kernel.duration_ns or 0.0))


def bare_name(name: str) -> str:
    """``void at::native::f<int>(float*)`` without its return type, template arguments and parameters."""
    kept, depth = [], 0
    for char in name.replace("(anonymous namespace)::", ""):
        if char == "(" and not depth:
            break
        depth += (char == "<") - (char == ">")
        if not depth and char != ">":
            kept.append(char)
    return "".join(kept).strip().rpartition(" ")[2][:120]


def _text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_TRACE_BYTES)
    except OSError:
        return ""
