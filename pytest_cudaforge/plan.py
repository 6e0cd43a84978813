"""What a ``plan.py`` may say, and the plain data it leaves behind.

A candidate's ``plan.py`` is parsed and run by :mod:`pytest_cudaforge.runtime.interpreter`, never imported.
It runs once per input signature on stand-ins and leaves a :class:`LaunchPlan`: buffers, steps, outputs.
Its functions are ``plan``, ``prepare`` and, where gradients are asked for, ``plan_backward`` (runtime.gradients).
Everything here is standard library only: production, builder and supervisor all read it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from pytest_cudaforge.errors import PlanError, PlanLimitError, Unsupported, UsageError

__all__ = [
    "DTYPE_BYTES",
    "Buffer",
    "Launch",
    "LaunchPlan",
    "LibraryCall",
    "ScratchLayout",
    "TensorSpec",
    "TracedPlan",
    "Unsupported",
    "View",
    "Zero",
    "decode",
    "device",
    "empty",
    "encode",
    "launch",
    "op",
    "scratch_layout",
    "zeros",
]

#: The dtypes a plan can name, by torch's name, with their size in bytes.
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
}

MAX_LAUNCHES = 4096


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of one tensor: shape and strides in elements, dtype by torch's name ("float32")."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    @property
    def itemsize_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def numel(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def extent(self) -> int:
        """Elements of storage spanned, from the first element to the last (0 for an empty tensor)."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def extent_bytes(self) -> int:
        return self.extent * self.itemsize_bytes

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements; like torch, a zero-sized dimension counts as one."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


Role = Literal["input", "state", "prepared", "scratch"]


@dataclass(frozen=True)
class Buffer:
    """One piece of storage. ``source`` says where a bound one comes from:

    ``input``: path in the flattened call, e.g. ``"0"``, ``"1.mask"``, ``"kw.mask.0"`` (see runtime.signature);
    ``state``: attribute path in the module, e.g. ``"weight"``, ``"layers.0.bias"``;
    ``prepared``: path in what ``prepare`` returned; ``scratch``: allocated per call, ``source == ""``.
    """

    role: Role
    spec: TensorSpec
    source: str = ""


#: How many elements of a window are looked for in another one.
_PLACES = 4096


@dataclass(frozen=True)
class View:
    """A strided window onto a buffer; ``offset`` in elements from the buffer's first element."""

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0


def overlap(one: View, other: View) -> bool:
    """Whether two windows onto a buffer share an element: exact for windows none of whose own elements coincide, as far
    as the first, the last and some thousand elements of either tell."""
    if one.buffer != other.buffer or 0 in one.shape or 0 in other.shape:
        return False
    begins, ends = zip(*((view.offset, view.offset + _extent(view)) for view in (one, other)), strict=True)
    if max(begins) >= min(ends):
        return False
    return any(_holds(other, place) for place in _places(one)) or any(_holds(one, place) for place in _places(other))


def _extent(view: View) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))


def _places(view: View) -> Iterator[int]:
    """Where some of its elements lie, the first and the last among them."""
    count = math.prod(view.shape)
    for number in {*range(0, count, max(1, count // _PLACES | 1)), count - 1}:
        place, rest = view.offset, number
        for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
            place += rest % size * stride
            rest //= size
        yield place


def _holds(view: View, place: int) -> bool:
    rest = place - view.offset
    for stride, size in sorted(zip(view.strides, view.shape, strict=True), reverse=True):
        if stride > 0 and rest >= 0:
            rest -= min(rest // stride, size - 1) * stride
    return rest == 0


Scalar = int | float | bool
Argument = View | int | float | bool | None
Constants = tuple[tuple[str, int | float], ...]


@dataclass(frozen=True)
class Launch:
    """One kernel launch. ``kernel`` is a C++ expression; for cpp, grid and block stay (1, 1, 1).

    For triton it names an instance (``languages.instances``), and block, shared memory and cluster come from Triton.
    """

    kernel: str
    args: tuple[Argument, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    constants: Constants = ()
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    line: int = 0


@dataclass(frozen=True)
class LibraryCall:
    """``op("aten.mm", a, b)``: an ATen overload. ``args``/``kwargs`` hold Views, scalars, None, strings and lists.

    ``outputs`` are the fresh scratch buffers that receive its results, in order.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int, ...]
    line: int = 0


@dataclass(frozen=True)
class Zero:
    """Fill a scratch buffer with zero bytes, at this place in the order of steps."""

    buffer: int


Step = Launch | LibraryCall | Zero


@dataclass(frozen=True)
class LaunchPlan:
    """Buffers, ordered steps and the output tree (View / number / None leaves in lists, tuples and dicts)."""

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    outputs: Any
    unit_constants: tuple[Constants, ...] = field(default=())

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def output_buffers(self) -> frozenset[int]:
        """Indices of the buffers that an output reaches, whatever their role."""
        return frozenset(view.buffer for view in output_views(self.outputs))

    @property
    def library_calls(self) -> tuple[LibraryCall, ...]:
        return tuple(step for step in self.steps if isinstance(step, LibraryCall))


@dataclass(frozen=True)
class TracedPlan:
    """What one tracing leaves; ``prepare`` is the plan that runs once per change of a weight, where there is one."""

    main: LaunchPlan
    prepare: LaunchPlan | None = None


# -- outputs and scratch -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScratchLayout:
    """Where each scratch buffer that is no output lies in the call's one arena, in bytes from the arena's start."""

    total_bytes: int
    offsets: dict[int, int]


def output_views(outputs: Any) -> Iterator[View]:
    """The View leaves of an output tree, depth first, in the order of its lists, tuples and dicts."""
    if isinstance(outputs, View):
        yield outputs
    elif isinstance(outputs, (list, tuple)):
        for item in outputs:
            yield from output_views(item)
    elif isinstance(outputs, dict):
        for item in outputs.values():
            yield from output_views(item)


def views_in(value: Any) -> Iterator[View]:
    """The Views among the arguments of a step, nested lists and tuples included."""
    return output_views(value)


def step_buffers(step: Step) -> tuple[int, ...]:
    """Indices of the buffers a step reads or writes (which of the two, only the kernel knows)."""
    if isinstance(step, Zero):
        return (step.buffer,)
    if isinstance(step, Launch):
        return tuple(arg.buffer for arg in step.args if isinstance(arg, View))
    values = [*step.args, *(value for _, value in step.kwargs)]
    return (*(view.buffer for view in views_in(values)), *step.outputs)


def call_writes(call: LibraryCall) -> frozenset[int]:
    """Buffers an ATen call may write: its fresh outputs; for an ``out`` overload (which has none) every named tensor.

    Out arguments go by many names (``out``, ``values``, ``indices``), and only torch's schema tells them from inputs.
    """
    if call.outputs:
        return frozenset(call.outputs)
    return frozenset(view.buffer for _, value in call.kwargs for view in views_in(value))


def scratch_layout(plan: LaunchPlan, align: int = 256) -> ScratchLayout:
    """Place the scratch buffers that no output reaches, each alive from the first step that names it to the last.

    Buffers whose lives do not overlap share bytes. Offsets are multiples of ``align`` (a power of two). Buffers that no
    step names get an offset too, without room.
    """
    lives = _scratch_lives(plan)
    sizes = {index: _align_up(plan.buffers[index].spec.extent_bytes, align) for index in lives}
    offsets, total_bytes = _shared_places(sizes, lives)
    outputs = plan.output_buffers
    for index, buffer in enumerate(plan.buffers):
        if buffer.role == "scratch" and index not in outputs:
            offsets.setdefault(index, 0)
    return ScratchLayout(total_bytes, offsets)


def _align_up(size: int, align: int) -> int:
    return -(-size // align) * align


def _scratch_lives(plan: LaunchPlan) -> dict[int, tuple[int, int]]:
    """First and last step of every scratch buffer that is used and is no output, in order of the first."""
    outputs = plan.output_buffers
    lives: dict[int, tuple[int, int]] = {}
    for position, step in enumerate(plan.steps):
        for index in step_buffers(step):
            if plan.buffers[index].role == "scratch" and index not in outputs:
                first, _ = lives.get(index, (position, position))
                lives[index] = (first, position)
    return lives


def _shared_places(sizes: dict[int, int], lives: dict[int, tuple[int, int]]) -> tuple[dict[int, int], int]:
    """First fit into the gaps that are free while the buffer lives; ``live`` is kept sorted by offset."""
    offsets: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # (offset, end, last step)
    total_bytes = 0
    for index, (first, last) in lives.items():
        live = [place for place in live if place[2] >= first]
        offset = 0
        for start, end, _ in live:
            if start - offset >= sizes[index]:
                break
            offset = end
        offsets[index] = offset
        bisect.insort(live, (offset, offset + sizes[index], last))
        total_bytes = max(total_bytes, offset + sizes[index])
    return offsets, total_bytes


# -- JSON --------------------------------------------------------------------------------------------------------

FORMAT_VERSION = 1
MAX_BUFFERS = 16_384
MAX_RANK = 32
MAX_BYTES = 1 << 40
MAX_LAUNCH_ARGS = 1024
MAX_TREE_NODES = 65_536
MAX_TREE_DEPTH = 32
MAX_TEXT = 16_384
#: No comment signs: the expression stands inside a line of generated source.
KERNEL_PATTERN = re.compile(r"(?!.*(?://|/\*|\*/))[A-Za-z_:][A-Za-z0-9_:<>,*&()+\-./%=!|~ ]{0,999}")
CONSTANT_PATTERN = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
#: Of any language: macros are upper case (the trace sees to it), Triton's constexpr parameters have any name.
_ANY_CONSTANT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
OP_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}((\.|::)[A-Za-z_][A-Za-z0-9_]{0,63}){0,2}")


def encode(traced: TracedPlan) -> dict[str, Any]:
    """The plan as JSON data (``json.dumps`` with ``allow_nan=False`` works: non-finite floats are marked)."""
    return {
        "version": FORMAT_VERSION,
        "main": _encode_plan(traced.main),
        "prepare": None if traced.prepare is None else _encode_plan(traced.prepare),
    }


def _encode_plan(plan: LaunchPlan) -> dict[str, Any]:
    return {
        "buffers": [[b.role, encode_spec(b.spec), b.source] for b in plan.buffers],
        "steps": [_encode_step(step) for step in plan.steps],
        "outputs": encode_tree(plan.outputs),
    }


def encode_spec(spec: TensorSpec) -> list[Any]:
    """A TensorSpec as ``[shape, dtype, strides]``."""
    return [list(spec.shape), spec.dtype, list(spec.strides)]


def _encode_step(step: Step) -> dict[str, Any]:
    if isinstance(step, Zero):
        return {"step": "zero", "buffer": step.buffer}
    if isinstance(step, LibraryCall):
        return {
            "step": "op",
            "op": step.op,
            "args": encode_tree(step.args),
            "kwargs": [[name, encode_tree(value)] for name, value in step.kwargs],
            "outputs": list(step.outputs),
            "line": step.line,
        }
    return {
        "step": "launch",
        "kernel": step.kernel,
        "args": [encode_tree(arg) for arg in step.args],
        "grid": list(step.grid),
        "block": list(step.block),
        "shared_bytes": step.shared_bytes,
        "constants": [[name, encode_tree(value)] for name, value in step.constants],
        "cluster": None if step.cluster is None else list(step.cluster),
        "cooperative": step.cooperative,
        "line": step.line,
    }


def encode_tree(value: Any) -> Any:
    """Views, numbers, strings and None in lists, tuples and dicts with string or integer keys, as JSON data."""
    if isinstance(value, View):
        return {"view": [value.buffer, list(value.shape), list(value.strides), value.offset]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encode_tree(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[key, encode_tree(item)] for key, item in value.items()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def decode(data: Any) -> TracedPlan:
    """The inverse of :func:`encode`; ``data`` is untrusted and every field is checked.

    Raises PlanError naming the field that is off, PlanLimitError where a cap is passed. What comes back is safe to
    replay as far as the plan goes: every index exists, every view lies inside its buffer, every size is capped.
    """
    record = _Record(data, "plan", ("version", "main", "prepare"))
    if record["version"] != FORMAT_VERSION:
        raise PlanError(f"plan.version is {record['version']!r}", expected=str(FORMAT_VERSION))
    prepare = record["prepare"]
    return TracedPlan(
        _decode_plan(record["main"], "plan.main", _MAIN_ROLES),
        None if prepare is None else _decode_plan(prepare, "plan.prepare", _PREPARE_ROLES),
    )


_MAIN_ROLES = ("input", "state", "prepared", "scratch")
_PREPARE_ROLES = ("state", "scratch")


class _Record:
    """A JSON object with exactly the fields named; reading a field never fails."""

    def __init__(self, data: Any, where: str, names: tuple[str, ...]) -> None:
        if type(data) is not dict or set(data) != set(names):
            got = sorted(map(str, data))[:20] if type(data) is dict else type(data).__name__
            raise PlanError(f"{where} is not an object with the fields {', '.join(names)}: {got}")
        self._data = data

    def __getitem__(self, name: str) -> Any:
        return self._data[name]


def _decode_plan(data: Any, where: str, roles: tuple[str, ...]) -> LaunchPlan:
    record = _Record(data, where, ("buffers", "steps", "outputs"))
    buffers = tuple(
        _decode_buffer(item, f"{where}.buffers[{i}]", roles)
        for i, item in enumerate(_items(record["buffers"], f"{where}.buffers", MAX_BUFFERS))
    )
    reader = _TreeReader(buffers)
    steps = tuple(
        _decode_step(item, f"{where}.steps[{i}]", reader)
        for i, item in enumerate(_items(record["steps"], f"{where}.steps", 4 * MAX_LAUNCHES))
    )
    outputs = reader.read(record["outputs"], f"{where}.outputs")
    plan = LaunchPlan(buffers, steps, outputs)
    if len(plan.launches) + len(plan.library_calls) > MAX_LAUNCHES:
        raise PlanLimitError(f"{where} has more than {MAX_LAUNCHES} launches")
    return dataclasses.replace(plan, unit_constants=distinct_constants(plan.launches))


def distinct_constants(launches: Iterable[Launch]) -> tuple[Constants, ...]:
    """The distinct sets of constants, in order of first use: one binary is built for each."""
    return tuple(dict.fromkeys(launch.constants for launch in launches))


def _items(data: Any, where: str, cap: int) -> list[Any]:
    if type(data) is not list:
        raise PlanError(f"{where} is {type(data).__name__}", expected="a list")
    if len(data) > cap:
        raise PlanLimitError(f"{where} has {len(data)} items", expected=f"at most {cap}")
    return data


def _integer(data: Any, where: str, low: int, high: int) -> int:
    if type(data) is not int or not low <= data <= high:
        raise PlanError(f"{where} is {_short(data)}", expected=f"an integer from {low} to {high}")
    return data


def _integers(data: Any, where: str, cap: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(_integer(item, f"{where}[{i}]", low, high) for i, item in enumerate(_items(data, where, cap)))


def _string(data: Any, where: str, pattern: re.Pattern[str] | None = None) -> str:
    if type(data) is not str or len(data) > MAX_TEXT or (pattern is not None and not pattern.fullmatch(data)):
        raise PlanError(
            f"{where} is {_short(data)}", expected="a string" + (f" like {pattern.pattern}" if pattern else "")
        )
    return data


def _short(data: Any) -> str:
    if isinstance(data, str):
        return repr(data[:60])
    return repr(data)[:60] if isinstance(data, (int, float, bool)) or data is None else f"a {type(data).__name__}"


def decode_spec(data: Any, where: str = "spec") -> TensorSpec:
    """The inverse of :func:`encode_spec`. Raises PlanError naming the field that is off."""
    fields = _items(data, where, 3)
    if len(fields) != 3:
        raise PlanError(f"{where} has {len(fields)} fields", expected="[shape, dtype, strides]")
    shape = _integers(fields[0], f"{where}.shape", MAX_RANK, 0, MAX_BYTES)
    strides = _integers(fields[2], f"{where}.strides", MAX_RANK, 0, MAX_BYTES)
    dtype = fields[1]
    if type(dtype) is not str or dtype not in DTYPE_BYTES:
        raise PlanError(f"{where}.dtype is {_short(dtype)}", expected=f"one of {', '.join(DTYPE_BYTES)}")
    if len(shape) != len(strides):
        raise PlanError(f"{where} has {len(shape)} sizes and {len(strides)} strides", expected="as many of each")
    spec = TensorSpec(shape, dtype, strides)
    if spec.numel > MAX_BYTES:
        raise PlanLimitError(f"{where} has {spec.numel} elements", expected=f"at most {MAX_BYTES}")
    if spec.extent_bytes > MAX_BYTES:
        raise PlanLimitError(f"{where} spans {spec.extent_bytes} bytes", expected=f"at most {MAX_BYTES}")
    return spec


def _decode_buffer(data: Any, where: str, roles: tuple[str, ...]) -> Buffer:
    fields = _items(data, where, 3)
    if len(fields) != 3:
        raise PlanError(f"{where} has {len(fields)} fields", expected="[role, spec, source]")
    role, source = fields[0], _string(fields[2], f"{where}.source")
    if role not in roles:
        raise PlanError(f"{where}.role is {_short(role)}", expected=f"one of {', '.join(roles)}")
    if (role == "scratch") != (source == ""):
        raise PlanError(f"{where}.source is {source[:60]!r} for role {role}", expected="a path, or '' for scratch")
    return Buffer(role, decode_spec(fields[1], f"{where}.spec"), source)


def _decode_step(data: Any, where: str, reader: _TreeReader) -> Step:
    kind = data.get("step") if type(data) is dict else None
    if kind == "zero":
        record = _Record(data, where, ("step", "buffer"))
        return Zero(reader.scratch(record["buffer"], f"{where}.buffer"))
    if kind == "op":
        return _decode_call(data, where, reader)
    if kind == "launch":
        return _decode_launch(data, where, reader)
    raise PlanError(f"{where}.step is {_short(kind)}", expected="zero, op or launch")


def _decode_call(data: Any, where: str, reader: _TreeReader) -> LibraryCall:
    record = _Record(data, where, ("step", "op", "args", "kwargs", "outputs", "line"))
    args = reader.read(record["args"], f"{where}.args")
    if type(args) is not tuple:
        raise PlanError(f"{where}.args is a {type(args).__name__}", expected="a tuple")
    outputs = _items(record["outputs"], f"{where}.outputs", 64)
    return LibraryCall(
        _string(record["op"], f"{where}.op", OP_PATTERN),
        args,
        tuple(_pairs(record["kwargs"], f"{where}.kwargs", reader, re.compile(r"[a-z_][a-z0-9_]{0,63}", re.I))),
        tuple(reader.scratch(item, f"{where}.outputs[{i}]") for i, item in enumerate(outputs)),
        _integer(record["line"], f"{where}.line", 0, 1 << 20),
    )


def _pairs(data: Any, where: str, reader: _TreeReader, pattern: re.Pattern[str]) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for i, item in enumerate(_items(data, where, 256)):
        pair = _items(item, f"{where}[{i}]", 2)
        if len(pair) != 2:
            raise PlanError(f"{where}[{i}] has {len(pair)} fields", expected="[name, value]")
        name = _string(pair[0], f"{where}[{i}]", pattern)
        if name in seen:
            raise PlanError(f"{where} names {name!r} twice")
        seen.add(name)
        yield name, reader.read(pair[1], f"{where}.{name}")


def _decode_launch(data: Any, where: str, reader: _TreeReader) -> Launch:
    names = ["step", "kernel", "args", "grid", "block", "shared_bytes", "constants", "cluster", "cooperative", "line"]
    record = _Record(data, where, tuple(names))
    args = [
        reader.read(item, f"{where}.args[{i}]")
        for i, item in enumerate(_items(record["args"], f"{where}.args", MAX_LAUNCH_ARGS))
    ]
    for i, arg in enumerate(args):
        if not (arg is None or isinstance(arg, (View, int, float))):
            raise PlanError(f"{where}.args[{i}] is a {type(arg).__name__}", expected="a view, a number or null")
    constants = tuple(_pairs(record["constants"], f"{where}.constants", reader, _ANY_CONSTANT))
    for name, value in constants:
        if type(value) not in (int, float):
            raise PlanError(f"{where}.constants.{name} is a {type(value).__name__}", expected="a number")
    if type(record["cooperative"]) is not bool:
        raise PlanError(f"{where}.cooperative is {_short(record['cooperative'])}", expected="true or false")
    return Launch(
        _string(record["kernel"], f"{where}.kernel", KERNEL_PATTERN),
        tuple(args),
        _triple(record["grid"], f"{where}.grid"),
        _triple(record["block"], f"{where}.block"),
        _integer(record["shared_bytes"], f"{where}.shared_bytes", 0, 1 << 31),
        constants,
        None if record["cluster"] is None else _triple(record["cluster"], f"{where}.cluster"),
        record["cooperative"],
        _integer(record["line"], f"{where}.line", 0, 1 << 20),
    )


def _triple(data: Any, where: str) -> tuple[int, int, int]:
    sizes = _integers(data, where, 3, 1, (1 << 31) - 1)
    if len(sizes) != 3:
        raise PlanError(f"{where} has {len(sizes)} sizes", expected="3")
    return (sizes[0], sizes[1], sizes[2])


class _TreeReader:
    """Decodes trees against the buffers of one plan, and counts their nodes."""

    def __init__(self, buffers: tuple[Buffer, ...]) -> None:
        self._buffers = buffers
        self._nodes = 0

    def scratch(self, data: Any, where: str) -> int:
        index = _integer(data, where, 0, len(self._buffers) - 1)
        if self._buffers[index].role != "scratch":
            raise PlanError(f"{where} is buffer {index}, an {self._buffers[index].role}", expected="a scratch buffer")
        return index

    def read(self, data: Any, where: str, depth: int = 0) -> Any:
        self._nodes += 1
        if self._nodes > MAX_TREE_NODES * 4 or depth > MAX_TREE_DEPTH:
            raise PlanLimitError(f"{where} has too many nested values")
        if type(data) is dict:
            return self._read_object(data, where, depth)
        if type(data) is str:
            return _string(data, where)
        if type(data) is int:
            return _integer(data, where, -(1 << 63), (1 << 64) - 1)
        if data is None or type(data) is bool or (type(data) is float and math.isfinite(data)):
            return data
        raise PlanError(f"{where} is {_short(data)}", expected="a view, a number, a string, null, list, tuple or dict")

    def _read_object(self, data: dict[str, Any], where: str, depth: int) -> Any:
        if len(data) == 1:
            ((kind, value),) = data.items()
            if kind == "view":
                return self._read_view(value, where)
            if kind == "float" and value in ("inf", "-inf", "nan"):
                return float(value)
            if kind in ("list", "tuple"):
                items = [
                    self.read(item, f"{where}[{i}]", depth + 1)
                    for i, item in enumerate(_items(value, where, MAX_TREE_NODES))
                ]
                return items if kind == "list" else tuple(items)
            if kind == "dict":
                return self._read_dict(value, where, depth)
        raise PlanError(f"{where} is an object of unknown kind {_short(next(iter(data), None))}")

    def _read_dict(self, value: Any, where: str, depth: int) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for i, item in enumerate(_items(value, where, MAX_TREE_NODES)):
            pair = _items(item, f"{where}[{i}]", 2)
            if len(pair) != 2 or type(pair[0]) not in (str, int) or pair[0] in result:
                raise PlanError(f"{where}[{i}] is no [key, value] with a fresh string or integer key")
            result[pair[0]] = self.read(pair[1], f"{where}.{str(pair[0])[:60]}", depth + 1)
        return result

    def _read_view(self, value: Any, where: str) -> View:
        fields = _items(value, where, 4)
        if len(fields) != 4:
            raise PlanError(f"{where} has {len(fields)} fields", expected="[buffer, shape, strides, offset]")
        index = _integer(fields[0], f"{where}.buffer", 0, len(self._buffers) - 1)
        buffer = self._buffers[index].spec
        spec = decode_spec([fields[1], buffer.dtype, fields[2]], where)
        offset = _integer(fields[3], f"{where}.offset", 0, MAX_BYTES)
        if offset + spec.extent > buffer.extent:
            raise PlanError(
                f"{where} ends at element {offset + spec.extent} of buffer {index}",
                expected=f"a view inside its {buffer.extent} elements",
            )
        return View(index, spec.shape, spec.strides, offset)


# -- what plan.py imports ----------------------------------------------------------------------------------------


def _only_in_a_plan(name: str) -> NoReturn:
    raise UsageError(
        f"{name}() was called outside a plan",
        expected="plan.py to be read by cudaforge: it is data and is never imported",
        remedy="run `cudaforge evaluate TARGET FOLDER` on the folder that holds plan.py",
    )


def empty(shape: Any, dtype: Any) -> Any:
    """In plan.py: a fresh contiguous buffer with undefined contents. ``dtype``: ``x.dtype`` or a name."""
    _only_in_a_plan("empty")


def zeros(shape: Any, dtype: Any) -> Any:
    """In plan.py: a fresh contiguous buffer that is zero when the next launch runs."""
    _only_in_a_plan("zeros")


def launch(
    kernel: str,
    *,
    args: Any,
    grid: Any = 1,
    block: Any = 1,
    shared_bytes: int = 0,
    constants: Any = None,
    cluster: Any = None,
    cooperative: bool = False,
    num_warps: int = 4,
    num_stages: int = 3,
    num_ctas: int = 1,
    maxnreg: int = 0,
) -> None:
    """In plan.py: launch ``kernel`` (a C++ expression such as ``"norm<float, 4>"``) with ``args``.

    Of a Triton kernel: the name of a ``@triton.jit`` function; ``args`` are its parameters in order but for the
    ``tl.constexpr`` ones, which come from ``constants`` by name. ``num_warps`` and what follows are Triton's only.
    """
    _only_in_a_plan("launch")


def op(name: str, *args: Any, **kwargs: Any) -> Any:
    """In plan.py: call an ATen operator, e.g. ``op("aten.mm", a, b)``; returns its output(s)."""
    _only_in_a_plan("op")


class _Device:
    """In plan.py: facts of the device the plan is traced for; part of the signature."""

    def __getattr__(self, name: str) -> Any:
        _only_in_a_plan(f"device.{name}")


device = _Device()
