"""``op("aten.mm", a, b)``: ATen calls of a plan, resolved on torch's meta device and run on real tensors.

Only overloads whose results are fresh tensors of a shape that the metadata fixes; no randomness, no mutation but
``out=``, no views (a plan makes those itself). The same rules hold when a call is run, because a plan may have come
from an untrusted builder.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.errors import LaunchFailure, PlanError
from pytest_cudaforge.plan import OP_PATTERN, LibraryCall, TensorSpec, View, contiguous_strides
from pytest_cudaforge.runtime.signature import spec_of
from pytest_cudaforge.runtime.values import did_you_mean, dtype_named

if TYPE_CHECKING:
    import torch

#: Private ATen names that are useful and pure; every other name with a leading underscore is refused.
_PRIVATE_ALLOWED = (
    *(
        "_softmax",
        "_log_softmax",
        "_to_copy",
        "_scaled_mm",
        "_int_mm",
        "_grouped_mm",
        "_fused_rms_norm",
        "_addmm_activation",
    ),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu"),
)
#: Functions that reach outside their tensors, or need values to know what they return.
_REFUSED = {
    "from_file": "it reads a file",
    "item": "a plan never sees values",
    "equal": "a plan never sees values",
    "allclose": "a plan never sees values",
    "is_nonzero": "a plan never sees values",
    "record_stream": "a plan has one stream",
    "data": "it is no operator",
    **dict.fromkeys(("empty", "empty_like", "empty_strided", "new_empty"), "use empty(shape, dtype)"),
}
_DEFAULT_DEVICE = "cpu"
#: How torch refuses a call; its meta kernels are Python and divide by a stride of zero, or overflow.
_TORCHS_OWN = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ArithmeticError, AttributeError)
_MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")


class MetaShapes:
    """The torch-backed :class:`pytest_cudaforge.runtime.trace.OpShapes`: torch's meta device, no data."""

    def resolve(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
        """Specs of the fresh outputs; empty for an ``out`` overload.

        ``args`` and ``kwargs`` hold TensorSpecs for tensors. Raises PlanError naming what is wrong.
        """
        import torch

        call = _chosen(name, args, kwargs, _meta_tensor)
        with torch.no_grad(), warnings.catch_warnings():
            # An `out` of the wrong shape makes torch warn; it is refused below.
            warnings.simplefilter("ignore")
            result = _invoked(name, call, device="meta")
        if call.writes:
            _check_written(name, call, kwargs)
            return ()
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(_output_spec(name, tensor) for tensor in tensors)


def warm_up() -> None:
    """Resolve one call of each common kind: the first one imports some 800 modules, which a forked process inherits.

    Nothing but imports; starts no thread.
    """
    shapes = MetaShapes()
    square, image = (TensorSpec(shape, "float32", contiguous_strides(shape)) for shape in ((4, 4), (1, 4, 4, 4)))
    calls: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("aten.mm", (square, square)),
        ("aten.addmm", (square, square, square)),
        ("aten.relu", (square,)),
        ("aten._softmax", (square, -1, False)),
        ("aten.sum", (square,)),
        ("aten.native_layer_norm", (square, [4], None, None, 1e-5)),
        ("aten.convolution", (image, image, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
        ("aten.scaled_dot_product_attention", (image, image, image)),
    )
    for name, args in calls:
        with contextlib.suppress(PlanError):  # this torch has no such operator: it will say so when it is asked
            shapes.resolve(name, args, {})


Resolve = Callable[["View | int"], "torch.Tensor"]


def run(call: LibraryCall, resolve: Resolve) -> None:
    """Run one ATen call on tensors. ``resolve`` gives the tensor over a View, or over a whole buffer by its index.

    Results go into the call's output buffers: through an ``out=`` overload where torch has a kernel for one, else
    (convolutions, layer norms, attention) by a copy.
    Raises LaunchFailure with torch's own words.
    """
    import torch

    with torch.no_grad():
        PreparedCall(call).bind(resolve)()


class PreparedCall:
    """An ATen call whose overload is chosen, once; :meth:`bind` fills in tensors, as often as they change.

    Raises LaunchFailure where no overload fits.
    """

    def __init__(self, call: LibraryCall) -> None:
        self._call = call
        try:
            chosen = _chosen(call.op, call.args, dict(call.kwargs), _Place)
        except PlanError as error:
            raise _launch_failure(call, error) from None
        chosen = chosen if chosen.writes else _with_kernel_for_out(chosen)
        twin = None if chosen.writes else _out_twin(chosen.overload)
        if twin is not None and len(twin.out_names) == len(call.outputs):
            outs = {name: _Place(index) for name, index in zip(twin.out_names, call.outputs, strict=True)}
            chosen = _Call(twin.overload, chosen.args, {**chosen.kwargs, **outs}, True)
        self._chosen = chosen

    def bind(self, resolve: Resolve) -> Callable[[], None]:
        """The call on these tensors, to be run without gradients. Running it may raise LaunchFailure."""
        chosen = self._chosen
        args = tuple(_filled(value, resolve) for value in chosen.args)
        kwargs = {name: _filled(value, resolve) for name, value in chosen.kwargs.items()}
        outputs = () if chosen.writes else tuple(resolve(index) for index in self._call.outputs)
        return functools.partial(self._run, _Call(chosen.overload, args, kwargs, chosen.writes), outputs)

    def _run(self, call: _Call, outputs: tuple[torch.Tensor, ...]) -> None:
        try:
            if call.writes:
                _invoked(self._call.op, call)
            else:
                _run_and_copy(self._call.op, call, outputs)
        except PlanError as error:
            raise _launch_failure(self._call, error) from None


@dataclass(frozen=True)
class _Place:
    """Where a tensor goes: a View, or the index of a whole buffer."""

    view: Any


def _filled(value: Any, resolve: Resolve) -> Any:
    if isinstance(value, _Place):
        return resolve(value.view)
    return [_filled(item, resolve) for item in value] if isinstance(value, list) else value


def _launch_failure(call: LibraryCall, error: PlanError) -> LaunchFailure:
    return LaunchFailure(f"plan.py:{call.line}: {error.what}", expected=error.expected, remedy=error.remedy)


def _run_and_copy(name: str, call: _Call, outputs: tuple[torch.Tensor, ...]) -> None:
    result = _invoked(name, call, device=str(outputs[0].device) if outputs else _DEFAULT_DEVICE)
    results = result if isinstance(result, (tuple, list)) else (result,)
    if len(results) != len(outputs):
        raise PlanError(f'op("{name}") gave {len(results)} results', expected=str(len(outputs)))
    for target, value in zip(outputs, results, strict=True):
        if target.shape != value.shape or target.dtype != value.dtype:
            raise PlanError(f'op("{name}") gave {tuple(value.shape)} {value.dtype}', expected=f"{tuple(target.shape)}")
        target.copy_(value)


# -- choosing an overload ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """An overload with its arguments as torch wants them. ``writes``: it is an ``out`` overload."""

    overload: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    writes: bool


@dataclass(frozen=True)
class _Twin:
    overload: Any
    out_names: tuple[str, ...]


def _chosen(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Callable[[Any], Any]) -> _Call:
    """The first overload whose schema the arguments fit, as torch's own resolution would choose."""
    overloads = _overloads(name)
    problems: list[str] = []
    for overload in overloads:
        outs = _out_names(overload)
        if outs and len(overloads) > 1 and not set(outs) & set(kwargs):
            continue
        try:
            bound = _fitted(overload, args, kwargs, tensor)
        except _Misfit as misfit:
            problems.append(f"{_signature(overload)}: {misfit}")
            continue
        _check_allowed(name, overload, bound)
        return _Call(overload, *bound, writes=bool(_out_names(overload)))
    listed = "\n    ".join(problems[:6])
    raise PlanError(f'op("{name}") is called with arguments that fit none of its overloads:\n    {listed}')


@functools.lru_cache(maxsize=512)
def _overloads(name: str) -> tuple[Any, ...]:
    """The overloads a name may mean: ``aten.add.Tensor`` one, ``aten.add`` all, those without ``out`` first."""
    import torch

    packet_name, overload_name = _parts(name)
    if packet_name in _REFUSED:
        raise PlanError(f'op("{name}") is not for plans: {_REFUSED[packet_name]}')
    packet = getattr(torch.ops.aten, packet_name, None) if packet_name in _known_operators() else None
    if packet is None:
        raise PlanError(
            f'op("{name}"): torch has no ATen operator {packet_name!r}{did_you_mean(packet_name, _known_operators())}',
            expected='names such as "aten.mm", "aten.addmm", "aten.linear", "aten.sum.dim_IntList"',
        )
    names = list(packet.overloads())
    if overload_name:
        if overload_name not in names:
            near = did_you_mean(overload_name, names)
            raise PlanError(
                f'op("{name}"): {packet_name} has no overload {overload_name!r}{near}', expected=", ".join(names)
            )
        names = [overload_name]
    found = [getattr(packet, each) for each in names]
    # torch lists them in no order that helps: the default first, those with `out` last.
    return tuple(sorted(found, key=lambda overload: (bool(_out_names(overload)), overload._overloadname != "default")))


def _parts(name: str) -> tuple[str, str]:
    if not OP_PATTERN.fullmatch(name):
        raise PlanError(f"op() of {name[:60]!r}", expected='a name such as "aten.mm" or "aten.sum.dim_IntList"')
    parts = name.replace("::", ".").split(".")
    if parts[0] == "aten":
        parts = parts[1:]
    elif len(parts) == 3 or parts[0] in ("torch", "prims", "quantized", "nvprims"):
        raise PlanError(f'op("{name}") is outside ATen', expected=f'"aten.{parts[-1]}"')
    if not parts or len(parts) > 2:
        raise PlanError(f'op("{name}")', expected='"aten.name" or "aten.name.overload"')
    if parts[0].startswith("_") and parts[0] not in _PRIVATE_ALLOWED:
        raise PlanError(
            f'op("{name}") is private to torch', expected=f"a public operator, or {', '.join(_PRIVATE_ALLOWED)}"
        )
    return parts[0], parts[1] if len(parts) == 2 else ""


@functools.lru_cache(maxsize=1)
def _known_operators() -> frozenset[str]:
    import torch

    names = torch._C._dispatch_get_all_op_names()
    return frozenset(name[6:].split(".")[0] for name in names if name.startswith("aten::"))


def _out_names(overload: Any) -> tuple[str, ...]:
    return tuple(arg.name for arg in overload._schema.arguments if arg.is_out)


def _with_kernel_for_out(call: _Call) -> _Call:
    """The same by an operator that writes in place: torch's relu is clamp_min(x, 0), but its ``out`` copies."""
    import torch

    if call.overload is torch.ops.aten.relu.default:
        values = call.args or tuple(call.kwargs.values())
        return _Call(torch.ops.aten.clamp_min.default, (*values, 0), {}, False)
    return call


@functools.lru_cache(maxsize=512)
def _out_twin(overload: Any) -> _Twin | None:
    """The ``out`` overload with the same other arguments, where there is one with a kernel of its own.

    Most are generated: they allocate, compute and copy, and may resize; we had better do that ourselves.
    """
    import torch

    packet = getattr(torch.ops.aten, overload._schema.name.split("::")[1])
    wanted = [(arg.name, str(arg.type)) for arg in overload._schema.arguments]
    for name in packet.overloads():
        candidate = getattr(packet, name)
        if torch.Tag.generated in candidate.tags:
            continue
        outs = _out_names(candidate)
        rest = [(arg.name, str(arg.type)) for arg in candidate._schema.arguments if not arg.is_out]
        if outs and rest == wanted:
            return _Twin(candidate, outs)
    return None


def _given(overload: Any, bound: tuple[tuple[Any, ...], dict[str, Any]], name: str) -> Any:
    """The value of the argument ``name`` in a fitted call; None where the overload has no such argument."""
    for place, arg in enumerate(overload._schema.arguments):
        if arg.name == name:
            default = arg.default_value if arg.has_default_value() else None
            return bound[0][place] if place < len(bound[0]) else bound[1].get(name, default)
    return None


def _dropout_off(overload: Any, bound: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Attention and RNN operators are random only where their dropout is on."""
    return any(_given(overload, bound, name) == 0 for name in ("dropout_p", "dropout"))


def _updates_statistics(overload: Any, bound: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Normalisations in training change their running statistics, which their schemas do not say."""
    training = any(_given(overload, bound, name) for name in ("training", "train", "use_input_stats"))
    return training and _given(overload, bound, "running_mean") is not None


def _check_allowed(name: str, overload: Any, bound: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Refuses randomness, shapes that depend on values, mutation and views. Raises PlanError."""
    import torch

    tags, schema = set(overload.tags), overload._schema
    if torch.Tag.nondeterministic_seeded in tags and not _dropout_off(overload, bound):
        raise PlanError(f'op("{name}") is random', expected="a deterministic operator: plans have no generator")
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        remedy = "use aten.index_select, aten.gather or aten.embedding" if "index" in name else "compute it in a kernel"
        raise PlanError(f'op("{name}") has an output whose shape depends on values', remedy=remedy)
    for arg in schema.arguments:
        if arg.alias_info is not None and arg.alias_info.is_write and not arg.is_out:
            raise PlanError(
                f'op("{name}") changes its argument {arg.name!r}', remedy="use the functional form without trailing _"
            )
    if _updates_statistics(overload, bound):
        raise PlanError(f'op("{name}") changes its running statistics', remedy="give None for them, or training=False")
    if not _out_names(overload):
        for result in schema.returns:
            if result.alias_info is not None:
                raise PlanError(
                    f'op("{name}") makes a view',
                    remedy="use the tensor's own method, e.g. x.transpose(0, 1): views are free",
                )
            if str(result.type) not in ("Tensor", "List[Tensor]"):
                raise PlanError(f'op("{name}") returns {result.type}', expected="an operator that returns tensors")


def _signature(overload: Any) -> str:
    text = str(overload._schema)
    return text if len(text) <= 200 else text[:197] + "..."


# -- arguments ---------------------------------------------------------------------------------------------------


class _Misfit(Exception):
    """These arguments do not fit this overload; the next one is tried."""


def _fitted(
    overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    schema = overload._schema.arguments
    positional = [arg for arg in schema if not arg.kwarg_only]
    if len(args) > len(positional):
        raise _Misfit(f"takes {len(positional)} positional arguments, got {len(args)}")
    given = {arg.name: value for arg, value in zip(positional, args, strict=False)}
    names = [arg.name for arg in schema]
    for name, value in kwargs.items():
        if name not in names:
            raise _Misfit(f"has no argument {name!r}{did_you_mean(name, names)}")
        if name in given:
            raise _Misfit(f"got {name!r} twice")
        given[name] = value
    for arg in schema:
        if arg.name not in given and not arg.has_default_value():
            raise _Misfit(f"misses {arg.name!r}")
    converted = {arg.name: _converted(arg, given[arg.name], tensor) for arg in schema if arg.name in given}
    by_place = tuple(converted.pop(arg.name) for arg in positional[: len(args)])
    return by_place, converted


def _converted(arg: Any, value: Any, tensor: Callable[[Any], Any]) -> Any:
    """``value`` as the schema's type wants it. Raises _Misfit."""
    kind = str(arg.type)
    optional = kind.startswith("Optional[")
    if value is None:
        if not optional:
            raise _Misfit(f"{arg.name} is None, but it is a {kind}")
        return None
    return _as_kind(arg.name, kind[9:-1] if optional else kind, value, tensor, str(getattr(arg, "real_type", "")))


def _as_kind(name: str, kind: str, value: Any, tensor: Callable[[Any], Any], real: str) -> Any:
    if isinstance(value, (TensorSpec, View)):
        if kind != "Tensor":
            raise _Misfit(f"{name} is a tensor, but it takes a {kind}")
        return tensor(value)
    if kind.startswith("List["):
        inner = kind[5:-1]
        # torch broadcasts a single number over int[2] and the like.
        items = value if isinstance(value, (tuple, list)) else [value]
        if inner == "Tensor" and not isinstance(value, (tuple, list)):
            raise _Misfit(f"{name} takes a list of tensors")
        optional = inner.startswith("Optional[")
        inner = inner[9:-1] if optional else inner
        return [
            None if item is None and optional else _as_kind(name, inner, item, tensor, real.removesuffix("[]"))
            for item in items
        ]
    return _as_scalar(name, kind, value, real)


def _as_scalar(name: str, kind: str, value: Any, real: str) -> Any:
    import torch

    special = next((word for word in ("ScalarType", "MemoryFormat", "Layout") if word in real), "")
    if special == "ScalarType" and isinstance(value, str):
        return getattr(torch, str(dtype_named(value, name)))
    if special == "MemoryFormat" and isinstance(value, str):
        plain = value.removeprefix("torch.")
        if plain in _MEMORY_FORMATS:
            return getattr(torch, plain)
        raise _Misfit(f"{name} is {value[:40]!r}, expected one of {', '.join(_MEMORY_FORMATS)}")
    if special or kind in ("Device", "Generator", "Stream"):
        raise _Misfit(f"{name} cannot be {value!r} in a plan")
    accepted = {
        "int": (int,),
        "SymInt": (int,),
        "float": (int, float),
        "bool": (bool,),
        "number": (bool, int, float),
        "Scalar": (bool, int, float),
        "str": (str,),
    }.get(kind, ())
    if type(value) not in accepted:
        raise _Misfit(f"{name} is {value!r}, but it is a {kind}"[:120])
    return float(value) if kind == "float" else value


def _meta_tensor(spec: Any) -> torch.Tensor:
    import torch

    if isinstance(spec, View):
        raise PlanError("a view without its dtype")
    return torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device="meta")


def _invoked(name: str, call: _Call, device: str = "") -> Any:
    """Call torch; its own error becomes a PlanError. ``device`` goes to factories, which have no tensor to follow."""
    kwargs = dict(call.kwargs)
    if device and any(arg.name == "device" for arg in call.overload._schema.arguments):
        kwargs.setdefault("device", device)
    try:
        return call.overload(*call.args, **kwargs)
    except _TORCHS_OWN as error:
        said = str(error).strip().splitlines()
        raise PlanError(f'op("{name}") failed: {said[0][:400] if said else type(error).__name__}') from None


def _check_written(name: str, call: _Call, given: Mapping[str, Any]) -> None:
    """An ``out`` tensor of another shape would have been resized by torch, away from its buffer."""
    for out_name in _out_names(call.overload):
        spec, tensor = given[out_name], call.kwargs[out_name]
        if tuple(tensor.shape) != spec.shape:
            raise PlanError(
                f'op("{name}") {out_name}= has the shape {spec.shape}',
                expected=f"the result's shape {tuple(tensor.shape)}",
            )


def _output_spec(name: str, tensor: Any) -> TensorSpec:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise PlanError(f'op("{name}") returns {type(tensor).__name__}', expected="an operator that returns tensors")
    return spec_of(tensor)
