"""Records that production needs as well as the rooms of :mod:`pytest_cudaforge.records`, and records as JSON.

Standard library only, and few: making a frozen dataclass costs half a millisecond of a process's first call.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["DeviceFacts", "Guard", "KernelResources", "from_json", "to_json"]


@dataclass(frozen=True)
class DeviceFacts:
    """The device at hand, detected. ``arch`` is "cpu" or "sm_90". Where measured: peaks as (precision, FLOP/s), caches
    as (capacity in bytes, bytes/s), innermost first."""

    kind: Literal["cpu", "cuda"]
    name: str
    arch: str
    index: int = 0
    uuid: str = ""
    sm_count: int = 0
    l2_bytes: int = 0
    max_shared_bytes: int = 0
    memory_bytes: int = 0
    clock_mhz: int = 0
    bandwidth_bytes_per_s: float | None = None
    peak_flops: tuple[tuple[str, float], ...] = ()
    cache_bandwidths: tuple[tuple[int, float], ...] = ()
    extra: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class KernelResources:
    """Static facts of one compiled kernel; None where the language has no such thing."""

    kernel: str
    registers: int | None = None
    static_shared_bytes: int | None = None
    local_bytes: int | None = None
    spill_bytes: int | None = None
    max_threads: int | None = None


@dataclass(frozen=True)
class Guard:
    """Where dispatch may use the kernel; narrowed by failed probes.

    ``fixed_sizes``: where a verified workload has one of these in a dimension of an input, a call has to have it, too.
    ``equal_sizes_only``: sizes of inputs that are equal in a verified workload have to be equal in a call.
    """

    contiguous_only: bool = False
    align_bytes: int = 1
    drawn_shapes_only: bool = False
    fixed_sizes: tuple[int, ...] = ()
    equal_sizes_only: bool = False
    reasons: tuple[str, ...] = ()


# -- JSON ------------------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """A record (or a nest of them) as plain JSON data. Non-finite floats become the strings "nan", "inf", "-inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return "nan" if value != value else ("inf" if value > 0 else "-inf")
    return value


def from_json(kind: Any, data: Any) -> Any:
    """The inverse of :func:`to_json` for annotation ``kind``. Raises ``ValueError`` naming the field that is off."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin is typing.Union or origin is types.UnionType:
        return _union_from_json(args, data)
    if origin is Literal:
        if data not in args:
            raise ValueError(f"{data!r} is not one of {args}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"expected a list, got {data!r}")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(from_json(args[0], item) for item in data)
        if len(args) != len(data):
            raise ValueError(f"expected {len(args)} items, got {len(data)}")
        return tuple(from_json(arg, item) for arg, item in zip(args, data, strict=True))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _record_from_json(kind, data)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(data)
    if kind is float and isinstance(data, (int, float, str)) and not isinstance(data, bool):
        if isinstance(data, str) and data not in ("nan", "inf", "-inf"):
            raise ValueError(f"expected a number, got {data!r}")
        return float(data)
    if kind is type(None) and data is None:
        return None
    if isinstance(kind, type) and type(data) is kind:
        return data
    raise ValueError(f"expected {kind}, got {data!r}")


def _union_from_json(args: tuple[Any, ...], data: Any) -> Any:
    # Exact types first, so that True stays a bool and 1 an int in `int | float | bool`.
    for arg in args:
        if isinstance(arg, type) and type(data) is arg:
            return data
    for arg in args:
        try:
            return from_json(arg, data)
        except ValueError:
            continue
    raise ValueError(f"{data!r} fits none of {args}")


@functools.cache
def _hints_of(kind: type) -> dict[str, Any]:
    """Kept: to evaluate annotations anew for each record was a fifth of what the supervisor does in a verdict."""
    return typing.get_type_hints(kind)


def _record_from_json(kind: type, data: Any) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__}: expected an object, got {type(data).__name__}")
    hints = _hints_of(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = set(data) - set(fields)
    if unknown:
        raise ValueError(f"{kind.__name__}: unknown field(s) {sorted(unknown)}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        try:
            values[name] = from_json(hints[name], value)
        except ValueError as error:
            raise ValueError(f"{kind.__name__}.{name}: {error}") from None
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
