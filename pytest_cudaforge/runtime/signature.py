"""What a plan is traced for: the metadata of one call, of the module it goes to, and of the device.

Calls and outputs are pytrees: tensors, numbers, strings and None in lists, tuples and dicts. A *path* names a leaf:
``"0"`` the first positional argument, ``"1.mask"`` nested, ``"kw.mask"`` a keyword argument, ``"out"``, ``"out.0"``,
``"out.logits"`` in an output. Torch is imported only where a tensor or module is touched.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import hashlib
import json
import math
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.errors import PlanError, TargetError, UsageError
from pytest_cudaforge.facts import DeviceFacts, from_json, to_json
from pytest_cudaforge.plan import DTYPE_BYTES, TensorSpec, decode_spec, encode_spec

if TYPE_CHECKING:
    import torch

__all__ = [
    "Leaf",
    "Signature",
    "attribute_in",
    "config_attributes",
    "describe_module",
    "flatten_call",
    "flatten_output",
    "module_tensors",
    "named_parts",
    "spec_of",
    "split_call",
    "split_init",
    "unflatten_call",
    "unflatten_output",
]

Leaf = TensorSpec | int | float | bool | str | None
ModuleSpec = dict[str, Any]

MAX_DEPTH = 32
MAX_ITEMS = 4096


# -- calls -------------------------------------------------------------------------------------------------------


def split_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What an ``inputs`` function returned, as positional and keyword arguments.

    list or tuple: positional · dict: keyword · ``(list or tuple, dict)`` with string keys: both · else: one positional.
    """
    if isinstance(inputs, dict):
        return (), _keyword_names(inputs)
    if isinstance(inputs, (list, tuple)):
        if _is_positional_and_keyword(inputs):
            return tuple(inputs[0]), _keyword_names(inputs[1])
        return tuple(inputs), {}
    return (inputs,), {}


def split_init(init: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What an ``init`` function returned, by the rule of :func:`split_call`; None means no arguments."""
    return ((), {}) if init is None else split_call(init)


def _is_positional_and_keyword(inputs: Any) -> bool:
    return (
        type(inputs) is tuple
        and len(inputs) == 2
        and isinstance(inputs[0], (list, tuple))
        and isinstance(inputs[1], dict)
        and all(isinstance(key, str) for key in inputs[1])
    )


def _keyword_names(arguments: dict[Any, Any]) -> dict[str, Any]:
    for key in arguments:
        if not (isinstance(key, str) and key.isidentifier()):
            raise TargetError(
                f"the inputs have a keyword argument named {key!r}",
                expected="names that a call can use",
                remedy="return [the_dict] where the dict itself is the one positional argument",
            )
    return dict(arguments)


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Leaves by path, in order, and the tree as JSON data. Raises TargetError for a leaf no plan can take."""
    leaves: dict[str, Any] = {}
    flattener = _Flattener(leaves)
    positional = [flattener.node(value, str(i)) for i, value in enumerate(args)]
    keyword = [[name, flattener.node(value, f"kw.{name}")] for name, value in kwargs.items()]
    return leaves, {"args": positional, "kwargs": keyword}


def unflatten_call(tree: Any, leaves: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of :func:`flatten_call`, with any values in place of the leaves."""
    args = tuple(_rebuild(node, leaves) for node in tree["args"])
    return args, {name: _rebuild(node, leaves) for name, node in tree["kwargs"]}


def flatten_output(value: Any) -> tuple[dict[str, Any], Any]:
    """Leaves by path (``"out"`` for a single tensor) and the tree as JSON data."""
    leaves: dict[str, Any] = {}
    return leaves, _Flattener(leaves).node(value, "out")


def unflatten_output(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The inverse of :func:`flatten_output`, with any values in place of the leaves; named tuples are plain ones."""
    return _rebuild(tree, leaves, named=False)


class _Flattener:
    """Collects leaves by path; containers become ``{"list": [...]}``, ``{"tuple": [...]}``, ``{"dict": [[k, v]]}``."""

    def __init__(self, leaves: dict[str, Any]) -> None:
        self._leaves = leaves

    def node(self, value: Any, path: str, depth: int = 0) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            raise TargetError(f"{path}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, Mapping):
            for key in value:
                if type(key) not in (str, int):
                    raise TargetError(f"{path}: a dict with the key {key!r}", expected="strings or integers as keys")
            items = [[key, self.node(item, f"{path}.{key}", depth + 1)] for key, item in value.items()]
            return _named("dict", items, value, dict)
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            nodes = [self.node(item, f"{path}.{i}", depth + 1) for i, item in enumerate(value)]
            return _named(kind, nodes, value, list if kind == "list" else tuple)
        if path in self._leaves:
            raise TargetError(f"two leaves have the path {path}", remedy="use dict keys without dots and of one type")
        self._leaves[path] = _checked_leaf(value, path)
        return {"leaf": path}


def _named(kind: str, nodes: list[Any], value: Any, plain: type) -> dict[str, Any]:
    """``type`` tells a named tuple or a dict subclass from the plain container that rebuilding gives."""
    node: dict[str, Any] = {kind: nodes}
    if type(value) is not plain:
        node["type"] = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind == "tuple" and hasattr(value, "_fields"):
            node["fields"] = list(value._fields)
        elif kind == "dict" and dataclasses.is_dataclass(value):
            node["fields"] = [key for key, _ in nodes]
    return node


def named_parts(tree: Any, path: str = "out") -> Iterator[tuple[str, tuple[str, ...]]]:
    """(path, names) of each container in an output's tree whose parts are read as attributes: a named tuple, a model's
    output. Torch's own return types are not told: to most they are plain tuples."""
    if "fields" in tree:
        yield path, tuple(tree["fields"])
    kind = next((kind for kind in ("list", "tuple", "dict") if kind in tree), None)
    for key, node in () if kind is None else tree[kind] if kind == "dict" else enumerate(tree[kind]):
        yield from named_parts(node, f"{path}.{key}")


def _checked_leaf(value: Any, path: str) -> Any:
    if value is None or type(value) in (int, float, bool, str) or isinstance(value, TensorSpec):
        return value
    # Stand-ins and spec views carry a spec of their own; a torch tensor is known by torch itself.
    if _is_tensor(value) or hasattr(value, "plan_leaf"):
        return value
    raise TargetError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__}",
        expected="tensors, numbers, strings and None in lists, tuples and dicts",
        remedy="wrap the module so that its forward takes and returns these",
    )


def _is_tensor(value: Any) -> bool:
    # Without importing torch: a tensor cannot exist before torch is loaded.
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)


def _rebuild(node: Any, leaves: Mapping[str, Any], *, named: bool = True) -> Any:
    if "leaf" in node:
        return leaves[node["leaf"]]
    if "list" in node:
        return [_rebuild(item, leaves, named=named) for item in node["list"]]
    if "tuple" in node:
        items = [_rebuild(item, leaves, named=named) for item in node["tuple"]]
        fits = named and "fields" in node
        return _named_tuple(node["type"], tuple(node["fields"]))(*items) if fits else tuple(items)
    return {key: _rebuild(item, leaves, named=named) for key, item in node["dict"]}


@functools.lru_cache(maxsize=64)
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """The class of this name where its module is here, as it is beside the target's own code, else one like it."""
    for module in (found for known, found in list(sys.modules.items()) if name.startswith(f"{known}.")):
        try:
            made = functools.reduce(getattr, name.removeprefix(f"{module.__name__}.").split("."), module)
        except AttributeError:
            continue
        if isinstance(made, type) and issubclass(made, tuple) and getattr(made, "_fields", None) == fields:
            return made
    return collections.namedtuple(name.rpartition(".")[2], fields)


# -- tensors and modules -----------------------------------------------------------------------------------------


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Shape, dtype and strides (in elements). Raises UsageError for a layout or dtype that no plan can name."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or dtype not in DTYPE_BYTES:
        raise UsageError(
            f"a {tensor.layout} tensor of dtype {tensor.dtype}",
            expected=f"a dense tensor of one of {', '.join(DTYPE_BYTES)}",
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UsageError(
            "a lazily conjugated or negated tensor",
            expected="a tensor whose memory holds its values",
            remedy="call .resolve_conj().resolve_neg() on it",
        )
    return TensorSpec(tuple(tensor.shape), dtype, tuple(tensor.stride()))


def describe_module(module: torch.nn.Module) -> ModuleSpec:
    """The module's attributes without leading underscore, nested, as JSON data; it holds no values of tensors.

    ``{"class": name, "attributes": {name: value}, "items": [...] | "keys": [...]}`` where a value is a plain number,
    string, bool or None, or one of ``{"tensor": spec, "path": p}``, ``{"module": spec}``, ``{"list": [...]}``,
    ``{"tuple": [...]}``, ``{"dict": [[k, v]]}``, ``{"float": "inf"}``, ``{"dtype": "float32"}``, ``{"opaque": type}``.
    A dataclass instance or a namespace (a module's ``config``) is written like a module.
    ``items`` (ModuleList, Sequential, ParameterList) and ``keys`` (ModuleDict, ParameterDict) name attributes in order.
    """
    return _Describer().module(module, "", 0)


def attribute_in(spec: ModuleSpec, path: str) -> Any:
    """What a description has under ``norm.eps``. Raises KeyError where there is nothing, or no plain value: a number, a
    string, a bool, None, or a list or tuple of such."""
    *owners, name = path.split(".")
    for owner in owners:
        spec = spec["attributes"][owner]["module"]
    value = spec["attributes"][name]
    if not _is_plain(value):
        raise KeyError(path)
    return value


def _is_plain(value: Any) -> bool:
    if not isinstance(value, dict):
        return isinstance(value, (bool, int, float, str, type(None)))
    for kind in ("list", "tuple"):
        if kind in value:
            return all(_is_plain(one) for one in value[kind])
    return "float" in value or "dtype" in value


def config_attributes(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain configuration object (a dataclass instance, a namespace), or None for anything else.

    They are mirrored like a submodule's. Other objects are not: their graphs may be the whole program.
    """
    plain = isinstance(value, (types.SimpleNamespace, argparse.Namespace))
    if (plain or (dataclasses.is_dataclass(value) and not isinstance(value, type))) and hasattr(value, "__dict__"):
        found: dict[str, Any] = vars(value)
        return found
    return None


def module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor :func:`describe_module` mentions, by the same path: parameters, buffers, plain attributes."""
    describer = _Describer()
    describer.module(module, "", 0)
    return describer.tensors


class _Describer:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._open: set[int] = set()

    def module(self, module: torch.nn.Module, path: str, depth: int) -> ModuleSpec:
        self._open.add(id(module))
        attributes = {
            name: self.value(value, f"{path}.{name}" if path else name, depth + 1)
            for name, value in _attributes(module)
        }
        self._open.discard(id(module))
        spec: ModuleSpec = {"class": type(module).__name__, "attributes": attributes}
        return spec | _element_names(module)

    def value(self, value: Any, path: str, depth: int) -> Any:
        import torch

        if depth > MAX_DEPTH:
            return {"opaque": "nested too deeply"}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.nn.Module):
            return {"opaque": "cycle"} if id(value) in self._open else {"module": self.module(value, path, depth)}
        if value is None or type(value) in (bool, int, str):
            return value if type(value) is not str or len(value) <= MAX_ITEMS else {"opaque": "long str"}
        if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        return self._container(value, path, depth)

    def _config(self, value: Any, config: dict[str, Any], path: str, depth: int) -> ModuleSpec:
        self._open.add(id(value))
        public = [(name, item) for name, item in config.items() if not name.startswith("_")]
        attributes = {name: self.value(item, f"{path}.{name}", depth + 1) for name, item in public}
        self._open.discard(id(value))
        return {"class": type(value).__name__, "attributes": attributes}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        from torch.nn.parameter import is_lazy

        if is_lazy(value):
            return {"opaque": "uninitialized tensor"}
        try:
            spec = spec_of(value)
        except UsageError:
            return {"opaque": f"{value.layout} tensor of {value.dtype}"}
        self.tensors[path] = value
        return {"tensor": encode_spec(spec), "path": path}

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, (list, tuple)) and len(value) <= MAX_ITEMS:
            items = [self.value(item, f"{path}.{i}", depth + 1) for i, item in enumerate(value)]
            return {"list" if isinstance(value, list) else "tuple": items}
        if isinstance(value, dict) and len(value) <= MAX_ITEMS and all(type(key) in (str, int) for key in value):
            return {"dict": [[key, self.value(item, f"{path}.{key}", depth + 1)] for key, item in value.items()]}
        config = config_attributes(value)
        if config is not None and id(value) not in self._open and len(config) <= MAX_ITEMS:
            return {"module": self._config(value, config, path, depth)}
        # Only the type's name: an object's own text could hold an address, which would make every signature new.
        return {"opaque": type(value).__name__}


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, submodules, plain attributes, then simple constants of the class; no properties are run."""
    seen: set[str] = set()
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    constants = _class_constants(type(module))
    for group in (module._parameters, module._buffers, module._modules, own, constants):
        for name, value in group.items():
            if name not in seen and not name.startswith("_"):
                seen.add(name)
                yield name, value


def _class_constants(kind: type) -> dict[str, Any]:
    import torch

    simple = (bool, int, float, str, tuple, type(None))
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") or base in (torch.nn.Module, object):
            continue
        for name, value in vars(base).items():
            if isinstance(value, simple) and not name.startswith("_"):
                found.setdefault(name, value)
    return found


def _element_names(module: torch.nn.Module) -> dict[str, list[str]]:
    from torch import nn

    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return {"items": list(module._modules)}
    if isinstance(module, nn.ParameterList):
        return {"items": [str(i) for i in range(len(module))]}
    if isinstance(module, (nn.ModuleDict, nn.ParameterDict)):
        return {"keys": [str(key) for key in module]}
    return {}


# -- the signature -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signature:
    """Everything a plan can depend on. ``module`` is None for a function target."""

    inputs: tuple[tuple[str, Leaf], ...]
    input_tree: Any
    module: ModuleSpec | None
    device: DeviceFacts
    language: str

    @classmethod
    def of(
        cls,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        module: ModuleSpec | None,
        device: DeviceFacts,
        language: str,
    ) -> Signature:
        """The signature of a call with real tensors (or TensorSpecs in their place)."""
        leaves, tree = flatten_call(args, kwargs)
        inputs = tuple((path, spec_of(leaf) if _is_tensor(leaf) else leaf) for path, leaf in leaves.items())
        return cls(inputs, tree, module, device, language)

    def key(self) -> str:
        """sha256 over what a plan can see: equal keys give equal plans. Device index, uuid and clocks do not count."""
        device = self.device
        facts = [device.kind, device.arch, device.sm_count, device.l2_bytes, device.max_shared_bytes]
        data = self.to_json() | {"device": [*facts, device.memory_bytes]}
        return hashlib.sha256(json.dumps(data, allow_nan=False, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [[path, _encode_leaf(leaf)] for path, leaf in self.inputs],
            "input_tree": self.input_tree,
            "module": self.module,
            "device": to_json(self.device),
            "language": self.language,
        }

    @classmethod
    def from_json(cls, data: Any) -> Signature:
        """Raises PlanError naming what is off."""
        try:
            inputs = tuple((str(path), _decode_leaf(leaf, str(path))) for path, leaf in data["inputs"])
            device = from_json(DeviceFacts, data["device"])
            return cls(inputs, data["input_tree"], data["module"], device, str(data["language"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"this is no signature: {error}", expected="the data of Signature.to_json") from None


def _encode_leaf(leaf: Leaf) -> Any:
    if isinstance(leaf, TensorSpec):
        return {"tensor": encode_spec(leaf)}
    if isinstance(leaf, float) and not math.isfinite(leaf):
        return {"float": repr(leaf)}
    return leaf


def _decode_leaf(data: Any, path: str) -> Leaf:
    if isinstance(data, dict):
        if "tensor" in data:
            return decode_spec(data["tensor"], path)
        return float(data["float"])
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    raise ValueError(f"{path} is a {type(data).__name__}")
