"""What the trusted replays share: one call of a launch plan by our own host code, for a tool to look at.

compute-sanitizer and Nsight Compute each start such a process (:mod:`.sanitized_replay`, :mod:`.profiled_replay`): it
has a session, a folder and a scrubbed environment of its own and is killed at its limit; it is not in the sandbox,
since the tools must reach it, and nothing of the candidate's but device code runs there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout
from pytest_cudaforge.evaluation.sandbox import Defences, child_environment
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.languages.cubin import same_code
from pytest_cudaforge.plan import LaunchPlan, LibraryCall, TensorSpec, views_in

__all__ = ["Buffers", "buffers_of", "outcome_of", "replay_environment", "with_lines"]

#: A float of 0.0115, 1.06 or nearly nothing, by its width; an index of zero.
_FLOAT_FILL, _OTHER_FILL = 0x3C, 0


@dataclass(frozen=True)
class Buffers:
    """``memory``: [name, bytes, offset of its values or None, fill byte or None]; ``main`` and ``prepare``: name and
    shift in bytes of each buffer of that plan."""

    memory: list[list[Any]]
    main: list[list[Any]]
    prepare: list[list[Any]]


def buffers_of(product: Product, layout: CallLayout) -> Buffers:
    """Every buffer of the call in memory of its own, with values where the verification puts some."""
    memory: dict[str, list[Any]] = {}
    places: dict[str, list[list[Any]]] = {"main": [], "prepare": []}
    parts = (("main", product.traced.main, layout.main[0]), ("prepare", product.traced.prepare, layout.prepare))
    for part, launches, regions in parts:
        if launches is None:
            continue
        filled = _library_written(launches)
        for index, (buffer, (region, shift)) in enumerate(zip(launches.buffers, regions, strict=True)):
            if buffer.role == "scratch" and not region.startswith("prepared/"):
                named = f"output {index}" if index in launches.output_buffers else f"scratch {index}"
                name, shift = named, 0
            else:
                name = region.partition("/")[2] if region.startswith("f0/") else region
            valued = buffer.role in ("input", "state")
            offset = layout.offsets[region] if valued else None
            fill = _fill_of(buffer.spec) if index in filled and not valued else None
            entry = memory.setdefault(name, [name, 0, offset, fill])
            entry[1] = max(entry[1], buffer.spec.extent_bytes + shift)
            entry[3] = entry[3] if entry[3] is not None else fill
            places[part].append([name, shift])
    return Buffers(list(memory.values()), places["main"], places["prepare"])


def _library_written(launches: LaunchPlan) -> set[int]:
    """Buffers that a library call writes: its own outputs, and tensors among its options, which are ``out=`` ones."""
    found: set[int] = set()
    for step in launches.steps:
        if isinstance(step, LibraryCall):
            found.update(step.outputs)
            found.update(view.buffer for _, value in step.kwargs for view in views_in(value))
    return found


def _fill_of(spec: TensorSpec) -> int:
    return _FLOAT_FILL if spec.dtype.startswith(("float", "bfloat", "complex")) else _OTHER_FILL


def with_lines(binary: Binary, lined: Callable[[Binary], Binary | None]) -> Binary:
    """The same kernels with line numbers where their code is the same, else the binary as it is.

    ``lined`` compiles a binary once more with line numbers, or returns None.
    """
    other = lined(binary)
    if other is None:
        return binary
    try:
        same = same_code(binary.code, other.code)
    except BuildFailure:
        same = False
    return replace(binary, code=other.code) if same else binary


def replay_environment(folder: Path) -> dict[str, str]:
    """The scrubbed environment of a tool and the replay that it starts; home and temporary files are in ``folder``."""
    root = str(Path(__file__).resolve().parents[2])
    own = {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": root}
    return {**child_environment(os.environ, Defences()), **own}


def outcome_of(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
