"""May this entry's kernel be used for this call? What was verified decides; what was not goes to the reference."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.plan import TensorSpec
from pytest_cudaforge.runtime.circumstances import same
from pytest_cudaforge.runtime.manifest import Entry
from pytest_cudaforge.runtime.signature import Leaf, ModuleSpec, attribute_in

if TYPE_CHECKING:
    import torch

__all__ = ["named_paths", "parameter_names", "ranked", "refusal", "was_drawn"]

Inputs = Sequence[tuple[str, Leaf]]
#: More elements no probe has; nor does one reach as many bytes from a tensor's first element to its last one.
_MOST_ELEMENTS = {"cpu": 3 << 24, "cuda": 1 << 27}
_MOST_BYTES = (1 << 31) - 1


def parameter_names(reference: Callable[..., Any], *, method: bool) -> tuple[str, ...]:
    """Names of the reference's positional parameters, ``self`` left out; empty where Python cannot tell."""
    try:
        parameters = list(inspect.signature(reference).parameters.values())
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)[1 if method else 0 :]


def named_paths(inputs: Inputs, names: Sequence[str]) -> dict[str, Leaf]:
    """Leaves by path with positions replaced by parameter names: ``f(x, m)`` and ``f(x, mask=m)`` are one call."""
    return {_named(path, names): leaf for path, leaf in inputs}


def _named(path: str, names: Sequence[str]) -> str:
    head, dot, rest = path.partition(".")
    if head == "kw":
        return rest
    if head.isdigit() and int(head) < len(names):
        return names[int(head)] + dot + rest
    return path


def refusal(
    entry: Entry,
    inputs: Inputs,
    names: Sequence[str],
    training: bool | None,
    describe: Callable[[], ModuleSpec | None] = lambda: None,
    tensors: Callable[[], Mapping[str, torch.Tensor]] | None = None,
) -> str:
    """Why the entry's kernel stays out of this call; "" where it may be used.

    ``training`` is the module's flag, None for a function; ``describe`` tells its attributes, ``tensors`` its tensors
    by path, None where their values are not to be had. Alignment is looked at per call, not here.
    """
    if training is not None and training != (entry.mode == "train"):
        return f"verified in {entry.mode} mode, the module is in {'train' if training else 'eval'} mode"
    call = named_paths(inputs, names)
    reason = _other_attribute(entry, describe) if entry.attributes else ""
    if reason:
        return reason
    reasons = []
    # Values are looked at last: they may have to come from a device.
    for workload in entry.workloads:
        drawn = named_paths(workload.inputs, names)
        reason = _difference(entry, drawn, call) or (_parted(drawn, call) if entry.guard.equal_sizes_only else "")
        if not reason:
            return _other_buffer(entry, tensors) if entry.buffers else ""
        reasons.append(reason)
    return reasons[0] if reasons else "no workload was verified"


def _other_attribute(entry: Entry, describe: Callable[[], ModuleSpec | None]) -> str:
    """The first attribute that is not as it was in verification: a kernel may have its value built in."""
    spec = describe()
    for path, then in entry.attributes if spec is not None else ():
        try:
            now = attribute_in(spec, path) if spec is not None else then
        except KeyError:
            return f"verified with {path} = {_told(then)}, which this module does not have"
        if not same(now, then):
            return f"verified with {path} = {_told(then)}, this module has {_told(now)}"
    return ""


def _other_buffer(entry: Entry, tensors: Callable[[], Mapping[str, torch.Tensor]] | None) -> str:
    """The same of a buffer's values."""
    if tensors is None:
        return f"the values of {entry.buffers[0][0]} may be built in, and compiled code does not watch them"
    # Not imported above: most entries need none of it.
    from pytest_cudaforge.runtime.fingerprints import is_alike

    found = tensors()
    for path, then in entry.buffers:
        if path not in found:
            return f"verified with a buffer {path}, which this module does not have"
        if not is_alike(found[path], then):
            return f"verified with other values in {path}"
    return ""


def _told(value: object) -> str:
    """A value of a description as its author wrote it."""
    if isinstance(value, dict):
        ((kind, inner),) = value.items()
        if kind in ("list", "tuple"):
            return f"({', '.join(_told(one) for one in inner)})"
        return str(inner)
    return repr(value)


def was_drawn(entry: Entry, inputs: Inputs, names: Sequence[str]) -> bool:
    """Whether exactly these shapes, dtypes, strides and values belong to a verified workload."""
    call = named_paths(inputs, names)
    return any(_equal(named_paths(workload.inputs, names), call) for workload in entry.workloads)


def ranked(entries: Sequence[Entry], inputs: Inputs, names: Sequence[str]) -> list[int]:
    """The places of ``entries``, the one to try first in front.

    The nearest verified workload says most about this call, so the entry that has it comes first; of equally near ones
    the one that was measured faster there. What is left is decided by name: the same call takes the same kernel always.
    """
    call = named_paths(inputs, names)

    def order(place: int) -> tuple[float, float, str]:
        entry = entries[place]
        found = [
            (_distance(named_paths(workload.inputs, names), call), -(workload.speedup_eager or 0.0))
            for workload in entry.workloads
        ]
        return (*min(found, default=(math.inf, 0.0)), entry.directory)

    return sorted(range(len(entries)), key=order)


def _distance(drawn: Mapping[str, Leaf], call: Mapping[str, Leaf]) -> float:
    """How far apart the sizes of two calls are: the sum of |log2| ratios of their dimensions; infinite for another
    dtype, rank or set of arguments."""
    if drawn.keys() != call.keys():
        return math.inf
    total = 0.0
    for path, was in drawn.items():
        now = call[path]
        if isinstance(was, TensorSpec) and isinstance(now, TensorSpec):
            if was.dtype != now.dtype or len(was.shape) != len(now.shape):
                return math.inf
            total += sum(abs(math.log2((a + 1) / (b + 1))) for a, b in zip(was.shape, now.shape, strict=True))
        elif isinstance(was, TensorSpec) or isinstance(now, TensorSpec) or not same(now, was):
            return math.inf
    return total


def _equal(drawn: Mapping[str, Leaf], call: Mapping[str, Leaf]) -> bool:
    return drawn.keys() == call.keys() and all(_same_leaf(drawn[path], call[path]) for path in drawn)


def _same_leaf(drawn: Leaf, leaf: Leaf) -> bool:
    return drawn == leaf if isinstance(drawn, TensorSpec) else same(leaf, drawn)


def _difference(entry: Entry, drawn: Mapping[str, Leaf], call: Mapping[str, Leaf]) -> str:
    if drawn.keys() != call.keys():
        return f"called with {_listed(call)}, verified with {_listed(drawn)}"
    for path, was in drawn.items():
        reason = _leaf_difference(entry, path, was, call[path])
        if reason:
            return reason
    return ""


def _parted(drawn: Mapping[str, Leaf], call: Mapping[str, Leaf]) -> str:
    """Two places that have one size in the workload, and have two in this call."""
    first: dict[int, tuple[str, int]] = {}
    for path, was in drawn.items():
        now = call[path]
        if not isinstance(was, TensorSpec) or not isinstance(now, TensorSpec):
            continue
        for dim, (old, new) in enumerate(zip(was.shape, now.shape, strict=True)):
            place, size = first.setdefault(old, (f"{path}[{dim}]", new))
            if old > 1 and size != new:
                return f"{path} has {new} in dimension {dim} and {place} is {size}, verified where they are equal only"
    return ""


def _listed(paths: Mapping[str, Leaf]) -> str:
    return f"({', '.join(paths)})"


def _leaf_difference(entry: Entry, path: str, was: Leaf, now: Leaf) -> str:
    if not isinstance(was, TensorSpec) or not isinstance(now, TensorSpec):
        if isinstance(was, TensorSpec) or isinstance(now, TensorSpec) or not same(now, was):
            return f"{path} is {_shown(now)}, verified with {_shown(was)}"
        return ""
    if was.dtype != now.dtype:
        return f"{path} is {now.dtype}, verified with {was.dtype}"
    if len(was.shape) != len(now.shape):
        return f"{path} has {len(now.shape)} dimensions, verified with {len(was.shape)}"
    if entry.guard.drawn_shapes_only and was.shape != now.shape:
        return f"{path} has shape {now.shape}, verified for {was.shape} only"
    for dim, (then, size) in enumerate(zip(was.shape, now.shape, strict=True)):
        if then in entry.guard.fixed_sizes and size != then:
            return f"{path} has {size} in dimension {dim}, verified for {then} only"
    if entry.guard.contiguous_only and not now.contiguous and was != now:
        return f"{path} is not contiguous"
    if was != now and _overlaps(now) and not _overlaps(was):
        return f"{path} has elements that share memory"
    if 0 in now.shape and 0 not in was.shape:
        return f"{path} is empty, verified with {was.shape}"
    return _beyond_probes(entry, path, was, now)


def _beyond_probes(entry: Entry, path: str, was: TensorSpec, now: TensorSpec) -> str:
    """A kernel may count elements in 32 bits, or in floats, and so may it the places of few that lie far apart."""
    most = _MOST_ELEMENTS["cpu" if entry.arch == "cpu" else "cuda"]
    if now.numel > max(most, was.numel):
        return f"{path} has {now.numel} elements, more than any number that was verified"
    if now.extent_bytes > max(_MOST_BYTES, was.extent_bytes):
        return f"{path} reaches over {now.extent_bytes} bytes, further than any that was verified"
    return ""


def _overlaps(spec: TensorSpec) -> bool:
    """May two elements lie at one address, as where a dimension is expanded? No probe has such inputs."""
    reach = 0
    for stride, size in sorted(zip(spec.strides, spec.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _shown(leaf: Leaf) -> str:
    return f"a {leaf.dtype} tensor" if isinstance(leaf, TensorSpec) else repr(leaf)[:40]
