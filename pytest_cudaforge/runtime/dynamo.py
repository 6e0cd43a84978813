"""Forged kernels inside ``torch.compile``: a launch plan becomes one operator, ``cudaforge::replay``.

While Dynamo traces an applied module it runs :func:`traced` symbolically. What decides is a function of constants that
Dynamo calls for real: shapes, dtypes and strides of the call, and the module's *form* (class, attributes, paths of its
tensors). So Dynamo's own guards cover all that the decision depends on, and layers of one form share compiled code.
Where the kernel fits, the graph holds the operator; where it does not (dynamic shapes, gradients, autocast, a plan that
writes its inputs), the reference is traced, as if nothing had been applied.

The operator names its plan by a digest of its contents: compiled graphs are cached on disk, and a number that means
one plan today may mean another one tomorrow.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pytest_cudaforge.errors import ForgeError
from pytest_cudaforge.plan import TensorSpec, View, encode_spec, scratch_layout
from pytest_cudaforge.runtime import guards
from pytest_cudaforge.runtime.calls import LoadedPlan, allocator, is_whole, on_device, stream_of
from pytest_cudaforge.runtime.circumstances import same
from pytest_cudaforge.runtime.kernels import Kernel
from pytest_cudaforge.runtime.signature import ModuleSpec, Signature, describe_module, flatten_call

__all__ = ["Form", "decisions", "form_of", "traced"]

_SIMPLE = (bool, int, float, str, type(None))
_MOST_PROBES = 256
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
#: Below this, Dynamo has not been seen to take all of :func:`traced`, and the reference is compiled.
LEAST_TORCH = (2, 11)
_CHANGED = "an attribute changed since apply(): apply again"
#: What a plan returns its tensors in.
_TENSOR, _LIST, _TUPLE, _DICT = range(4)


# -- what Dynamo runs: constants, loops over tuples and attribute look-ups only -------------------------------------


def traced(module: Any, form: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(whether the kernel serves this call, its output) while Dynamo traces an applied module or function."""
    if _exporting():
        return _decline(form, "an exported program has to run where no kernels are"), None
    attributes, numbers, paths = _form_paths(form)
    for path, then in numbers:  # which Dynamo may hold for symbols
        value = _at(module, path)
        if not isinstance(value, float) or value != then:
            return _decline(form, _CHANGED), None
    now = []
    for path in attributes:
        value = _at(module, path)
        if not (value is None or isinstance(value, (int, str, tuple, list, torch.dtype))):
            return _decline(form, _CHANGED), None
        now.append(value)
    if not _as_applied(form, tuple(now)):
        return _decline(form, _CHANGED), None
    # Not imported above: it takes a second, which Dynamo has spent by now.
    is_static = torch.fx.experimental.symbolic_shapes.has_static_value
    tensors: list[torch.Tensor] = []
    metas: list[tuple[bool, Any]] = []
    for value in (*args, *kwargs.values()):
        if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
            tensors.append(value)
            metas.append((True, None))
        elif value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and is_static(value)):
            metas.append((False, value))
        else:
            return _decline(form, "an argument is no plain tensor, integer, string or None"), None
    for path in paths:
        value = _at(module, path)
        if not (type(value) is torch.Tensor or type(value) is torch.nn.Parameter):
            return _decline(form, "a parameter or buffer is no plain tensor"), None
        tensors.append(value)
    specs = []
    for tensor in tensors:
        for size in tensor.shape:
            if not is_static(size):
                return _decline(form, "shapes are dynamic"), None
        if tensor.requires_grad and torch.is_grad_enabled():
            return _decline(form, "compiled for gradients, not under no_grad"), None
        specs.append((tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device))
    decision = _decide(form, len(args), tuple(kwargs), tuple(metas), tuple(specs))
    if decision is None:
        return False, None
    plan, picks, container, names = decision
    outputs = torch.ops.cudaforge.replay([tensors[place] for place in picks], plan)
    if container == _TENSOR:
        return True, outputs[0]
    if container == _LIST:
        return True, list(outputs)
    if container == _TUPLE:
        return True, tuple(outputs)
    return True, {name: outputs[place] for place, name in enumerate(names)}


def _at(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = getattr(module, name)
    return module


# -- forms --------------------------------------------------------------------------------------------------------


#: (plan, which tensors it takes, what its outputs are returned in, a dict's keys).
_Decision = tuple[str, tuple[int, ...], int, tuple[Any, ...]]


class Form(NamedTuple):
    """What the modules of one form have in common. ``spec``: a description of one of them."""

    kernels: tuple[Any, ...]
    names: tuple[str, ...]
    probes: tuple[tuple[tuple[str, ...], str, Any], ...]
    paths: tuple[tuple[str, ...], ...]
    spec: ModuleSpec | None
    reasons: Counter[str]


_forms: dict[str, Form] = {}
_lock = threading.RLock()


def decisions(form: str) -> dict[str, int]:
    """What was decided for modules of a form while they were compiled, and how often."""
    return dict(_forms[form].reasons) if form in _forms else {}


def form_of(module: torch.nn.Module | None, kernels: Sequence[Any], names: Sequence[str]) -> str:
    """The form of an applied module (or of a function: None), for :func:`traced`; "" where there can be none."""
    walk = _Walk()
    if _TORCH < LEAST_TORCH:
        return ""
    if module is not None and not walk.module(module, ()):
        return ""
    usable = tuple(kernel for kernel in kernels if isinstance(kernel, Kernel))
    if not usable or len(walk.probes) > _MOST_PROBES:
        return ""
    digests = [[kernel.entry.directory, [file.sha256 for file in kernel.entry.files]] for kernel in usable]
    shown = [type(module).__module__, type(module).__qualname__, digests, repr(walk.probes), repr(walk.paths)]
    key = hashlib.sha256(json.dumps(shown).encode()).hexdigest()
    with _lock:
        known = _forms.get(key)
        try:
            spec = known.spec if known is not None else describe_module(module) if module is not None else None
        except ForgeError:
            return ""
        reasons = known.reasons if known is not None else Counter()
        # The kernels of the last apply() count, as elsewhere.
        _forms[key] = Form(usable, tuple(names), tuple(walk.probes), tuple(walk.paths), spec, reasons)
    return key


class _Walk:
    """Attributes that a plan may look at, as far as Dynamo can read them back; tensors by path."""

    def __init__(self) -> None:
        self.probes: list[tuple[tuple[str, ...], str, Any]] = []
        self.paths: list[tuple[str, ...]] = []
        self._open: set[int] = set()

    def module(self, module: torch.nn.Module, path: tuple[str, ...]) -> bool:
        if id(module) in self._open:
            return False
        self._open.add(id(module))
        for group in (module._parameters, module._buffers, module._modules, vars(module)):
            for name, value in list(group.items()):
                if not name.startswith("_") and not self._entry(value, (*path, name)):
                    return False
        self._open.discard(id(module))
        return True

    def _entry(self, value: Any, path: tuple[str, ...]) -> bool:
        if isinstance(value, torch.Tensor):
            self.paths.append(path)
        elif isinstance(value, torch.nn.Module):
            return self.module(value, path)
        elif type(value) in _SIMPLE or (type(value) in (tuple, list) and all(type(one) in _SIMPLE for one in value)):
            self.probes.append((path, type(value).__name__, list(value) if type(value) is list else value))
        elif isinstance(value, torch.dtype):
            self.probes.append((path, "dtype", value))
        elif isinstance(value, (list, tuple, dict)) or not callable(value):
            return False  # tensors in containers, configuration objects: the reference is traced
        return True


# -- the decision, made by a real call ----------------------------------------------------------------------------


def _exporting() -> bool:
    # Asked for real: older Dynamos take torch.compiler.is_exporting() for true in every compilation.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def _form_paths(form: str) -> tuple[Any, Any, Any]:
    """Paths of attributes, floats with their values, paths of tensors."""
    found = _forms[form]
    floats = tuple((path, value) for path, kind, value in found.probes if kind == "float")
    return tuple(path for path, kind, _ in found.probes if kind != "float"), floats, found.paths


def _as_applied(form: str, values: tuple[Any, ...]) -> bool:
    """Whether attributes are what they were: compared for real, and guarded by Dynamo, which handed them over."""
    then = [value for _, kind, value in _forms[form].probes if kind != "float"]
    return all(same(now, was) for now, was in zip(values, then, strict=True))


def _decline(form: str, reason: str) -> bool:
    """False, with the reason kept."""
    _forms[form].reasons[f"reference: {reason}"] += 1
    return False


def _decide(
    form: str,
    count: int,
    keywords: tuple[str, ...],
    metas: tuple[tuple[bool, Any], ...],
    specs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...],
) -> _Decision | None:
    """What the graph gets, or None where the reference is to be traced."""
    known = _forms[form]
    with _lock:
        try:
            decision = _fitting(known, count, keywords, metas, specs)
        except ForgeError as error:
            decision = error.what
        known.reasons[f"reference: {decision}" if isinstance(decision, str) else "kernel"] += 1
        return None if isinstance(decision, str) else decision


# Dynamo calls these for real and takes what they return for constants (torch.compiler.assume_constant_result does no
# more than this, and importing it costs a second).
_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]
_form_paths._dynamo_marked_constant = True  # type: ignore[attr-defined]
_as_applied._dynamo_marked_constant = True  # type: ignore[attr-defined]
_decline._dynamo_marked_constant = True  # type: ignore[attr-defined]
_decide._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fitting(
    form: Form, count: int, keywords: Sequence[str], metas: Sequence[tuple[bool, Any]], specs: Sequence[Any]
) -> _Decision | str:
    from pytest_cudaforge.runtime.attachment import device_facts, device_name, place_reason, state_reason

    devices = {device for *_, device in specs}
    if len(devices) != 1:
        return "inputs and parameters are on several devices, or there are none"
    device = devices.pop()
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if device.type not in ("cpu", "cuda"):
        return f"tensors are on {device.type}"
    facts = device_facts(device)
    tensors = [TensorSpec(shape, str(dtype).removeprefix("torch."), strides) for shape, strides, dtype, _ in specs]
    args, kwargs = _call_of(count, keywords, metas, tensors)
    leaves, _ = flatten_call(args, kwargs)
    inputs = list(leaves.items())
    paths = [path for path, leaf in inputs if isinstance(leaf, TensorSpec)]
    state = [".".join(path) for path in form.paths]
    spec = _redescribed(form.spec, dict(zip(state, tensors[len(paths) :], strict=True)))
    training = spec["attributes"].get("training") if spec is not None else None
    reasons = []
    order = guards.ranked([kernel.entry for kernel in form.kernels], inputs, form.names)
    for kernel in (form.kernels[place] for place in order):
        reason = place_reason(kernel, facts) or guards.refusal(kernel.entry, inputs, form.names, training, lambda: spec)
        if not reason:
            signature = Signature.of(args, kwargs, spec, facts, kernel.entry.language)
            loaded = kernel.load(signature, device_name(device))
            reason = state_reason(loaded.main) or ("it prepares weights" if loaded.prepare is not None else "")
        if not reason and kernel.entry.containers:
            reason = "its outputs are in a container that has names"
        if not reason:
            replay = _Replay(loaded.main, device, _align_bytes(kernel))
            reason = replay.obstacle or ("it writes its inputs" if replay.changes_inputs() else "")
        if not reason:
            known = [*(("input", path) for path in paths), *(("state", path) for path in state)]
            buffers = [loaded.main.plan.buffers[index] for index in replay.sources]
            picks = tuple(known.index((buffer.role, buffer.source)) for buffer in buffers)
            return _published(kernel, signature, replay, device), picks, replay.container, replay.names
        reasons.append(reason)
    return "; ".join(dict.fromkeys(reasons)) or "no kernel"


def _call_of(
    count: int, keywords: Sequence[str], metas: Sequence[tuple[bool, Any]], tensors: Sequence[TensorSpec]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with specs in place of its tensors."""
    remaining = iter(tensors)
    values = [next(remaining) if is_tensor else value for is_tensor, value in metas]
    return tuple(values[:count]), dict(zip(keywords, values[count:], strict=True))


def _redescribed(spec: Any, tensors: Mapping[str, TensorSpec]) -> Any:
    """A module's description with other tensors at its paths: of this very module, after a ``.half()`` say."""
    if isinstance(spec, dict):
        if "tensor" in spec and spec.get("path") in tensors:
            return {**spec, "tensor": encode_spec(tensors[spec["path"]])}
        return {key: _redescribed(value, tensors) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_redescribed(value, tensors) for value in spec]
    return spec


# -- the operator -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """What a digest stands for: loaded once per device."""

    kernel: Kernel
    signature: Signature
    on: dict[torch.device, _Replay]


class _Replay:
    """A loaded plan as a function of tensors: its inputs and the module's, in the order of its buffers."""

    def __init__(self, loaded: LoadedPlan, device: torch.device, align_bytes: int) -> None:
        self._loaded, self._device, self._mask = loaded, device, align_bytes - 1
        plan = loaded.plan
        self.sources = [i for i, buffer in enumerate(plan.buffers) if buffer.role in ("input", "state")]
        self._specs = [plan.buffers[index].spec for index in self.sources]
        views, self.container, self.names = _flat(plan.outputs)
        self.obstacle = self._obstacle(views)
        self._fresh = [
            (view.buffer, view.shape, view.strides, _dtype(plan.buffers[view.buffer].spec)) for view in views
        ]
        layout = scratch_layout(plan)
        self._arena_bytes, self._arena = layout.total_bytes, sorted(layout.offsets.items())
        self._empty, self._stream = allocator(device), stream_of(device)
        several = device.type == "cuda" and torch.cuda.device_count() > 1
        self.run = on_device(self._run, device.index) if several else self._run

    def _obstacle(self, views: Sequence[View]) -> str:
        """Why this plan is no function of its tensors; "" where it is one."""
        plan = self._loaded.plan
        fresh = [plan.buffers[view.buffer].role == "scratch" for view in views]
        whole = [is_whole(view, plan.buffers[view.buffer].spec) for view in views]
        if not views or not all(fresh) or not all(whole) or len({view.buffer for view in views}) < len(views):
            return "its outputs are no fresh tensors in a flat container"
        if plan.output_buffers != {view.buffer for view in views} or not self.sources:
            return "it takes or returns no tensors"
        return ""

    def changes_inputs(self) -> bool:
        """Whether a run on drawn values writes what it was given; a pointer that is not const says little."""
        if not self._loaded.written:
            return False
        tensors = [_drawn(spec, self._device) for spec in self._specs]
        before = [tensor.clone() for tensor in tensors]
        self.run(tensors)
        return not all(torch.equal(now, was) for now, was in zip(tensors, before, strict=True))

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        addresses = [0] * len(self._loaded.plan.buffers)
        kept = []
        for index, spec, tensor in zip(self.sources, self._specs, tensors, strict=True):
            # A compiler may lay an intermediate out as it likes.
            if tensor.stride() != spec.strides or tensor.data_ptr() & self._mask:
                tensor = self._empty(spec.shape, spec.strides, tensor.dtype).copy_(tensor)
            kept.append(tensor)
            addresses[index] = tensor.data_ptr()
        outputs = []
        for index, shape, strides, dtype in self._fresh:
            outputs.append(self._empty(shape, strides, dtype))
            addresses[index] = outputs[-1].data_ptr()
        arena = self._empty((self._arena_bytes,), (1,), torch.uint8) if self._arena_bytes else None
        base = arena.data_ptr() if arena is not None else 0
        for index, offset in self._arena:
            addresses[index] = base + offset
        self._loaded.run(addresses, self._stream(self._device.index or 0))
        return outputs

    def fake(self, device: torch.device) -> list[torch.Tensor]:
        """Outputs without values, for the compiler."""
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) for _, shape, strides, dtype in self._fresh
        ]


def _dtype(spec: TensorSpec) -> torch.dtype:
    found: torch.dtype = getattr(torch, spec.dtype)
    return found


def _drawn(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    # Indices may be among integers: zeros are valid ones.
    tensor = torch.empty_strided(spec.shape, spec.strides, dtype=_dtype(spec), device=device)
    return tensor.normal_() if tensor.dtype in (torch.float32, torch.float64) else tensor.zero_()


def _flat(outputs: Any) -> tuple[list[View], int, tuple[Any, ...]]:
    """An output tree's views, what they are returned in, and a dict's keys. No views: it is nested, or no tensors."""
    if isinstance(outputs, View):
        return [outputs], _TENSOR, ()
    if isinstance(outputs, dict):
        values, container, names = list(outputs.values()), _DICT, tuple(outputs)
    elif isinstance(outputs, (list, tuple)):
        values, container, names = list(outputs), _LIST if isinstance(outputs, list) else _TUPLE, ()
    else:
        return [], _TENSOR, ()
    return (values if all(isinstance(value, View) for value in values) else []), container, names


_sources: dict[str, _Source] = {}


def _published(kernel: Kernel, signature: Signature, replay: _Replay, device: torch.device) -> str:
    """The digest under which the operator finds this plan."""
    parts = [[file.sha256 for file in kernel.entry.files], kernel.entry.language, kernel.entry.arch, signature.key()]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    _sources.setdefault(digest, _Source(kernel, signature, {})).on[device] = replay
    _operator()
    return digest


def _replay_of(plan: str, device: torch.device) -> _Replay:
    source = _sources[plan]
    found = source.on.get(device)
    if found is None:
        from pytest_cudaforge.runtime.attachment import device_name

        loaded = source.kernel.load(source.signature, device_name(device)).main
        found = source.on[device] = _Replay(loaded, device, _align_bytes(source.kernel))
    return found


def _align_bytes(kernel: Kernel) -> int:
    return max(kernel.entry.guard.align_bytes, 1)


def _replay(tensors: Sequence[torch.Tensor], plan: str) -> list[torch.Tensor]:
    global _ran_on_cpu
    if tensors[0].device.type == "cpu":
        _ran_on_cpu = True
    outputs: list[torch.Tensor] = _replay_of(plan, tensors[0].device).run(tensors)
    return outputs


def _fake_replay(tensors: Sequence[torch.Tensor], plan: str) -> list[torch.Tensor]:
    return next(iter(_sources[plan].on.values())).fake(tensors[0].device)


_library: Any = None
_ran_on_cpu = False


def _after_fork() -> None:
    """In a forked child OpenMP believes in threads that are gone (see runtime.attachment). Compiled code has no
    reference to go to, so its kernels do without: as many threads as torch gives a data loader's worker."""
    global _lock
    _lock = threading.RLock()
    if _ran_on_cpu:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libgomp.so.1").omp_set_num_threads(1)


os.register_at_fork(after_in_child=_after_fork)


def _operator() -> None:
    """Define ``cudaforge::replay``, once per process and not before it is wanted."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("cudaforge", "FRAGMENT")  # type: ignore[no-untyped-call]
    tags = [torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)]
    _library.define("replay(Tensor[] tensors, str plan) -> Tensor[]", tags=tags)
    for key in ("CPU", "CUDA"):
        _library.impl("replay", _replay, key)
    torch.library.register_fake("cudaforge::replay", _fake_replay, lib=_library)
