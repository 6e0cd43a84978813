"""What a plan sees of tensors, modules and the device: metadata, never values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_cudaforge.errors import PlanError
from pytest_cudaforge.facts import DeviceFacts
from pytest_cudaforge.plan import DTYPE_BYTES, Role, TensorSpec, View, decode_spec
from pytest_cudaforge.runtime import geometry
from pytest_cudaforge.runtime.geometry import Layout, integer
from pytest_cudaforge.runtime.natives import MissingAttribute
from pytest_cudaforge.runtime.values import DType, Meter, Native, StandIn, bind, describe, did_you_mean, dtype_named


class Storage:
    """Where a stand-in's elements lie: it becomes a buffer of the plan when a step or an output first names it."""

    __slots__ = ("role", "source", "spec")

    def __init__(self, role: Role, spec: TensorSpec, source: str = "") -> None:
        self.role: Role = role
        self.spec = spec
        self.source = source


class TensorStandIn(StandIn):
    """Shape, dtype and strides of a tensor; its methods give views of the same storage."""

    plan_leaf = True

    def __init__(self, storage: Storage, layout: Layout, device: DeviceStandIn, name: str) -> None:
        self.storage = storage
        self.layout = layout
        self.device = device
        self.name = name

    @property
    def kind(self) -> str:  # type: ignore[override]  # it names the tensor, where others name their class
        return f"the tensor {self.name}" if self.name else "a tensor"

    @property
    def dtype(self) -> str:
        return self.storage.spec.dtype

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.layout.shape, self.dtype, self.layout.strides)

    def view_of(self, buffer: int) -> View:
        return View(buffer, self.layout.shape, self.layout.strides, self.layout.offset)

    def attribute(self, name: str) -> Any:
        if name in _FACTS:
            return _FACTS[name](self)
        if name in _METHODS:
            return _method_of(self, name)
        remedy = _ELSEWHERE.get(name, self.advice())
        known = (*_FACTS, *_METHODS)
        raise MissingAttribute(
            f"{self.kind} has no attribute {name!r} in a plan{'' if name in _ELSEWHERE else did_you_mean(name, known)}",
            expected=", ".join(known),
            remedy=remedy,
        )

    def item(self, key: Any) -> TensorStandIn:
        return self.with_layout(geometry.indexed(self.layout, key))

    def length(self) -> int:
        if not self.layout.shape:
            raise PlanError(f"len() of {self.kind}, which has no dimension")
        return self.layout.shape[0]

    def elements(self) -> Sequence[Any]:
        if self.length() > geometry.MAX_PIECES:
            raise PlanError(f"{self.kind} has {self.length()} rows", remedy="loop over rows inside the kernel")
        return [self.item(i) for i in range(self.length())]

    def text(self) -> str:
        return f"<{self.dtype} tensor of shape {self.layout.shape}>"

    def advice(self) -> str:
        return 'a plan never sees values: compute in a kernel, or call op("aten....", ...)'

    def with_layout(self, layout: Layout) -> TensorStandIn:
        return TensorStandIn(self.storage, layout, self.device, self.name)


_ELSEWHERE = {
    "data_ptr": "pass the tensor itself as an argument of launch",
    "item": "pass the tensor to the kernel, which reads it",
    "tolist": "pass the tensor to the kernel, which reads it",
    "float": 'convert in the kernel, or use op("aten._to_copy", x, dtype="float32")',
    "half": 'convert in the kernel, or use op("aten._to_copy", x, dtype="float16")',
    "to": 'convert in the kernel, or use op("aten._to_copy", x, dtype="float32")',
    "clone": 'use op("aten.clone", x)',
    "zero_": "use zeros(shape, dtype)",
    "fill_": "write it in a kernel",
    "new_empty": "use empty(shape, x.dtype)",
    "new_zeros": "use zeros(shape, x.dtype)",
}


def _method_of(tensor: TensorStandIn, name: str) -> Native:
    def call(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
        result = _METHODS[name](tensor, args, kwargs)
        if type(result) is tuple:
            meter.charge(4 * len(result))  # split, chunk and unbind make a stand-in for each piece
        return result

    return Native(name, call)


def _no_arguments(tensor: TensorStandIn, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    bind(name, args, kwargs, ())


def _size(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dim = bind("size", args, kwargs, (), {"dim": None})["dim"]
    return tensor.layout.shape if dim is None else _at(tensor, tensor.layout.shape, dim, "size")


def _stride(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dim = bind("stride", args, kwargs, (), {"dim": None})["dim"]
    return tensor.layout.strides if dim is None else _at(tensor, tensor.layout.strides, dim, "stride")


def _at(tensor: TensorStandIn, values: tuple[int, ...], dim: Any, name: str) -> int:
    number = integer(dim, f"{name}() dimension")
    if not -len(values) <= number < len(values):
        raise PlanError(f"{name}({number}) of a tensor of shape {tensor.layout.shape}")
    return values[number]


def _constant(name: str, value: Callable[[TensorStandIn], Any]) -> Callable[..., Any]:
    def call(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _no_arguments(tensor, name, args, kwargs)
        return value(tensor)

    return call


def _is_contiguous(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> bool:
    if args or kwargs:
        raise PlanError("is_contiguous() takes no argument in a plan", remedy="compare x.stride() for other formats")
    return tensor.layout.contiguous


def _contiguous(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    _no_arguments(tensor, "contiguous", args, kwargs)
    if tensor.layout.contiguous:
        return tensor
    raise PlanError(
        f"contiguous() of {tensor.kind} with shape {tensor.layout.shape} and strides {tensor.layout.strides} is a copy",
        remedy='pass the strides to the kernel, use op("aten.clone", x, memory_format="contiguous_format"), '
        'or raise Unsupported("needs contiguous x")',
    )


def _reshape_like(name: str) -> Callable[..., TensorStandIn]:
    def call(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
        shape = _shape_arguments(name, args, kwargs)
        return tensor.with_layout(geometry.viewed(tensor.layout, shape, name))

    return call


def _shape_arguments(name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    if kwargs:
        args = [*args, *(value for key, value in kwargs.items() if key in ("shape", "size", "dims"))]
        unknown = [key for key in kwargs if key not in ("shape", "size", "dims")]
        if unknown:
            raise PlanError(f"{name}() has no argument {unknown[0]!r}")
    if not args:
        raise PlanError(f"{name}() misses its sizes")
    if isinstance(args[0], str):
        raise PlanError(f"{name}() to another dtype", remedy="a kernel may read the same bytes as any type: use void*")
    return geometry.sizes(args, name)


def _expand(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    return tensor.with_layout(geometry.expanded(tensor.layout, _shape_arguments("expand", args, kwargs)))


def _like(name: str, change: Callable[[Layout, Layout], Layout]) -> Callable[..., TensorStandIn]:
    def call(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
        other = bind(name, args, kwargs, ("other",))["other"]
        if not isinstance(other, TensorStandIn):
            raise PlanError(f"{name}() of {describe(other)}", expected="a tensor")
        return tensor.with_layout(change(tensor.layout, other.layout))

    return call


def _permute(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    return tensor.with_layout(geometry.permuted(tensor.layout, _shape_arguments("permute", args, kwargs)))


def _transpose(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    bound = bind("transpose", args, kwargs, ("dim0", "dim1"))
    return tensor.with_layout(geometry.transposed(tensor.layout, bound["dim0"], bound["dim1"]))


def _t(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    _no_arguments(tensor, "t", args, kwargs)
    return _transposed_matrix(tensor)


def _transposed_matrix(tensor: TensorStandIn) -> TensorStandIn:
    rank = len(tensor.layout.shape)
    if rank > 2:
        raise PlanError(f"t of a tensor of shape {tensor.layout.shape}", remedy="use transpose(-2, -1)")
    return tensor if rank < 2 else tensor.with_layout(geometry.transposed(tensor.layout, 0, 1))


def _matrix_transpose(tensor: TensorStandIn) -> TensorStandIn:
    return tensor.with_layout(geometry.transposed(tensor.layout, -2, -1))


def _squeeze(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    dim = bind("squeeze", args, kwargs, (), {"dim": None})["dim"]
    dims = None if dim is None else tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    return tensor.with_layout(geometry.squeezed(tensor.layout, dims))


def _unsqueeze(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    dim = bind("unsqueeze", args, kwargs, ("dim",))["dim"]
    return tensor.with_layout(geometry.unsqueezed(tensor.layout, dim))


def _flatten(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    bound = bind("flatten", args, kwargs, (), {"start_dim": 0, "end_dim": -1})
    return tensor.with_layout(geometry.flattened(tensor.layout, bound["start_dim"], bound["end_dim"]))


def _unflatten(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    bound = bind("unflatten", args, kwargs, ("dim", "sizes"))
    axis = geometry.dimension(tensor.layout, bound["dim"], "unflatten dimension")
    sizes = geometry.sizes([bound["sizes"]], "unflatten")
    shape = (*tensor.layout.shape[:axis], *sizes, *tensor.layout.shape[axis + 1 :])
    return tensor.with_layout(geometry.viewed(tensor.layout, shape, "unflatten"))


def _narrow(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    bound = bind("narrow", args, kwargs, ("dim", "start", "length"))
    return tensor.with_layout(geometry.narrowed(tensor.layout, bound["dim"], bound["start"], bound["length"]))


def _select(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    bound = bind("select", args, kwargs, ("dim", "index"))
    axis = geometry.dimension(tensor.layout, bound["dim"], "select dimension")
    return tensor.with_layout(geometry.selected(tensor.layout, axis, bound["index"]))


def _chunk(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> tuple[TensorStandIn, ...]:
    bound = bind("chunk", args, kwargs, ("chunks",), {"dim": 0})
    return tuple(tensor.with_layout(part) for part in geometry.chunked(tensor.layout, bound["chunks"], bound["dim"]))


def _split(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> tuple[TensorStandIn, ...]:
    if "split_size_or_sections" in kwargs:
        kwargs = {**kwargs, "split_size": kwargs["split_size_or_sections"]}
        del kwargs["split_size_or_sections"]
    bound = bind("split", args, kwargs, ("split_size",), {"dim": 0})
    return tuple(tensor.with_layout(part) for part in geometry.split(tensor.layout, bound["split_size"], bound["dim"]))


def _unbind(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> tuple[TensorStandIn, ...]:
    dim = bind("unbind", args, kwargs, (), {"dim": 0})["dim"]
    axis = geometry.dimension(tensor.layout, dim, "unbind dimension")
    if not tensor.layout.shape or tensor.layout.shape[axis] > geometry.MAX_PIECES:
        raise PlanError(
            f"unbind() of a tensor of shape {tensor.layout.shape} along {axis}", expected="1 to 4096 pieces"
        )
    return tuple(
        tensor.with_layout(geometry.selected(tensor.layout, axis, i)) for i in range(tensor.layout.shape[axis])
    )


def _detach(tensor: TensorStandIn, args: list[Any], kwargs: dict[str, Any]) -> TensorStandIn:
    _no_arguments(tensor, "detach", args, kwargs)
    return tensor


_FACTS: dict[str, Callable[[TensorStandIn], Any]] = {
    "shape": lambda tensor: tensor.layout.shape,
    "dtype": lambda tensor: DType(tensor.dtype),
    "ndim": lambda tensor: len(tensor.layout.shape),
    "device": lambda tensor: tensor.device,
    "is_cuda": lambda tensor: bool(tensor.device.attribute("type") == "cuda"),
    "itemsize": lambda tensor: DTYPE_BYTES[tensor.dtype],
    "nbytes": lambda tensor: tensor.layout.numel * DTYPE_BYTES[tensor.dtype],
    "data": lambda tensor: tensor,
    "T": _transposed_matrix,
    "mT": _matrix_transpose,
}

_METHODS: dict[str, Callable[[TensorStandIn, list[Any], dict[str, Any]], Any]] = {
    "size": _size,
    "stride": _stride,
    "numel": _constant("numel", lambda tensor: tensor.layout.numel),
    "nelement": _constant("nelement", lambda tensor: tensor.layout.numel),
    "dim": _constant("dim", lambda tensor: len(tensor.layout.shape)),
    "element_size": _constant("element_size", lambda tensor: DTYPE_BYTES[tensor.dtype]),
    "is_floating_point": _constant("is_floating_point", lambda tensor: "float" in tensor.dtype),
    "is_contiguous": _is_contiguous,
    "contiguous": _contiguous,
    "detach": _detach,
    "view": _reshape_like("view"),
    "reshape": _reshape_like("reshape"),
    "expand": _expand,
    "permute": _permute,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "t": _t,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "flatten": _flatten,
    "ravel": _flatten,
    "view_as": _like("view_as", lambda mine, other: geometry.viewed(mine, other.shape, "view_as")),
    "reshape_as": _like("reshape_as", lambda mine, other: geometry.viewed(mine, other.shape, "reshape_as")),
    "expand_as": _like("expand_as", lambda mine, other: geometry.expanded(mine, other.shape)),
    "unflatten": _unflatten,
    "narrow": _narrow,
    "select": _select,
    "chunk": _chunk,
    "split": _split,
    "unbind": _unbind,
}


# -- module and device -------------------------------------------------------------------------------------------


class ModuleStandIn(StandIn):
    """A module's attributes by name; ModuleLists and ModuleDicts also by index, key and iteration."""

    def __init__(self, spec: Any, path: str, device: DeviceStandIn) -> None:
        self._spec = spec
        self._path = path
        self._device = device
        self._values: dict[str, Any] = {}

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"{self._path} ({self._spec['class']})"

    def attribute(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._mirrored(name)
        return self._values[name]

    def _mirrored(self, name: str) -> Any:
        attributes = self._spec["attributes"]
        if name in attributes:
            return mirrored(attributes[name], f"{self._path}.{name}", self._device)
        if name in ("keys", "values", "items") and "keys" in self._spec:
            return Native(name, lambda meter, args, kwargs: self._listed(name))
        raise MissingAttribute(
            f"{self.kind} has no attribute {name!r}{did_you_mean(name, attributes)}",
            expected=", ".join(list(attributes)[:60]) or "a module with attributes",
            remedy="a plan calls no methods or forward of a module" if name in ("forward", "parameters") else "",
        )

    def _listed(self, name: str) -> list[Any]:
        keys = self._spec["keys"]
        if name == "keys":
            return list(keys)
        return [(key, self.attribute(key)) if name == "items" else self.attribute(key) for key in keys]

    def item(self, key: Any) -> Any:
        if "items" in self._spec:
            names = self._spec["items"]
            if isinstance(key, slice):
                return [self.attribute(name) for name in names[key]]
            number = integer(key, f"index into {self.kind}")
            if not -len(names) <= number < len(names):
                raise PlanError(f"index {number} is out of range for {self.kind} of length {len(names)}")
            return self.attribute(names[number])
        if "keys" in self._spec and type(key) is str and key in self._spec["keys"]:
            return self.attribute(key)
        raise PlanError(f"{self.kind} has no item {describe(key)}", expected=", ".join(self._spec.get("keys", ())))

    def elements(self) -> Sequence[Any]:
        if "keys" in self._spec:
            return list(self._spec["keys"])
        if "items" in self._spec:
            return [self.attribute(name) for name in self._spec["items"]]
        raise PlanError(f"{self.kind} cannot be iterated or measured with len()")

    def contains(self, value: Any) -> bool:
        return value in self._spec.get("keys", ())

    def advice(self) -> str:
        return "a plan cannot call a module: launch a kernel with its weights, or use op(...)"


def mirrored(data: Any, path: str, device: DeviceStandIn) -> Any:
    """The plan's value for one entry of a ModuleSpec. Raises PlanError for what is not mirrored."""
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        spec = decode_spec(data["tensor"], path)
        return tensor_for(Storage("state", spec, data["path"]), device, path)
    if "module" in data:
        return ModuleStandIn(data["module"], path, device)
    if "list" in data:
        return [mirrored(item, f"{path}[{i}]", device) for i, item in enumerate(data["list"])]
    if "tuple" in data:
        return tuple(mirrored(item, f"{path}[{i}]", device) for i, item in enumerate(data["tuple"]))
    if "dict" in data:
        return {key: mirrored(item, f"{path}[{key!r}]", device) for key, item in data["dict"]}
    if "float" in data:
        return float(data["float"])
    if "dtype" in data:
        return dtype_named(data["dtype"], path)
    return OpaqueStandIn(path, str(data.get("opaque", "object")))


class OpaqueStandIn(StandIn):
    """An attribute that a plan cannot see into (a function, an object); it is there, and that is all."""

    def __init__(self, path: str, type_name: str) -> None:
        self._path = path
        self._type_name = type_name

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"{self._path} (a {self._type_name}, which a plan cannot use)"

    def advice(self) -> str:
        return "a plan sees tensors, numbers, strings and nested modules only"


class DeviceStandIn(StandIn):
    """``device.sm_count`` and the other facts a plan may depend on; also ``x.device``."""

    kind = "device"

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts

    def attribute(self, name: str) -> Any:
        if name in ("sm_count", "max_shared_bytes", "l2_bytes", "arch"):
            return getattr(self.facts, name)
        if name == "type":
            return self.facts.kind
        known = ("sm_count", "max_shared_bytes", "l2_bytes", "arch", "type")
        raise MissingAttribute(
            f"device has no attribute {name!r}{did_you_mean(name, known)}", expected=", ".join(known)
        )

    def text(self) -> str:
        return self.facts.kind


def tensor_for(storage: Storage, device: DeviceStandIn, name: str) -> TensorStandIn:
    """A stand-in that spans its storage."""
    return TensorStandIn(storage, Layout(storage.spec.shape, storage.spec.strides), device, name)
