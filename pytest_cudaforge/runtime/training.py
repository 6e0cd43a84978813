"""A forged kernel under autograd: forward's replay with its verified backward behind it.

A backward serves exactly what was drawn when it was verified: those shapes, dtypes and strides, contiguous gradients,
aligned tensors. Whatever else requires grad goes to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pytest_cudaforge.plan import LaunchPlan, TensorSpec, View, contiguous_strides, scratch_layout
from pytest_cudaforge.runtime.calls import LoadedPlan, allocator, on_device, stream_of
from pytest_cudaforge.runtime.circumstances import Circumstances, tensor_in
from pytest_cudaforge.runtime.containers import alike
from pytest_cudaforge.runtime.gradients import GRADIENT, MODULE, OUTPUT
from pytest_cudaforge.runtime.signature import flatten_output, unflatten_output

__all__ = ["BoundBackward", "backward_arguments"]

#: Verified at addresses that are multiples of this.
_ALIGN_BYTES = 16


def backward_arguments(forward: LaunchPlan) -> dict[str, Any]:
    """``out`` and ``grad_out`` as specs, for the signature that ``plan_backward`` is traced for."""

    def specs(value: Any, gradient: bool) -> Any:
        if isinstance(value, View):
            dtype = forward.buffers[value.buffer].spec.dtype
            floating = dtype.startswith(("float", "bfloat"))
            return TensorSpec(value.shape, dtype, contiguous_strides(value.shape)) if floating or not gradient else None
        if isinstance(value, (list, tuple)):
            return type(value)(specs(item, gradient) for item in value)
        if isinstance(value, dict):
            return {key: specs(item, gradient) for key, item in value.items()}
        return None if gradient else value

    return {OUTPUT: specs(forward.outputs, False), GRADIENT: specs(forward.outputs, True)}


class BoundBackward:
    """One signature's backward, bound to one module. ``input_paths`` are those of forward's tensors, in order.

    Its *sources* are those tensors, then the tensors of the module that it reads or has a gradient of.
    """

    def __init__(
        self, loaded: LoadedPlan, input_paths: Sequence[str], circumstances: Circumstances, device: torch.device
    ) -> None:
        plan = loaded.plan
        self._loaded, self._plan, self._device = loaded, plan, device
        self._input_paths = tuple(input_paths)
        read = {buffer.source for buffer in plan.buffers if buffer.role == "state"}
        trained = {key.removeprefix(MODULE) for key in plan.outputs if key.startswith(MODULE)}
        self._all_slots = circumstances.slots
        self._slots = [slot for slot in circumstances.slots if slot.path in read | trained]
        keys = [*self._input_paths, *(MODULE + slot.path for slot in self._slots)]
        self._views: list[View | None] = [plan.outputs.get(key) for key in keys]
        #: What the plan reads: its buffer by the place of a source, or by the path of an output or of its gradient.
        self._read_sources = {
            place: index
            for index, buffer in enumerate(plan.buffers)
            for place, key in enumerate(keys)
            if buffer.role in ("input", "state") and key == (MODULE if buffer.role == "state" else "") + buffer.source
        }
        own = [(index, b.source) for index, b in enumerate(plan.buffers) if b.role == "input"]
        self._read_outputs = {source[len(_OUT) :]: index for index, source in own if _below(source, _OUT)}
        self._read_grads = {source[len(_GRAD) :]: index for index, source in own if _below(source, _GRAD)}
        layout = scratch_layout(plan)
        self._arena_bytes, self._arena = layout.total_bytes, sorted(layout.offsets.items())
        self._fresh = sorted(index for index in plan.output_buffers if plan.buffers[index].role == "scratch")
        self._empty, self._stream = allocator(device), stream_of(device)
        several = device.type == "cuda" and torch.cuda.device_count() > 1
        self._run = on_device(self._replay, device.index) if several else self._replay

    def obstacle(self, tensors: Sequence[torch.Tensor], own: dict[str, Any]) -> str:
        """Why these inputs and the module's tensors as they are now cannot be trained; "" where they can."""
        sources = self.sources(tensors, own)
        covered = {id(tensor) for tensor, view in zip(sources, self._views, strict=True) if view is not None}
        named = list(zip(self._input_paths, tensors, strict=True))
        named += [(slot.path, tensor_in(slot, own)) for slot in self._all_slots]
        for path, tensor in named:
            if tensor.requires_grad and id(tensor) not in covered:
                return f"{path} requires grad, and plan_backward has no gradient of it"
        if any(sources[place].data_ptr() % _ALIGN_BYTES for place in self._read_sources):
            return "an input or weight is misaligned: its backward was verified for aligned ones"
        return ""

    def sources(self, tensors: Sequence[torch.Tensor], own: dict[str, Any]) -> list[torch.Tensor]:
        """What gradients may flow to, in order."""
        return [*tensors, *(tensor_in(slot, own) for slot in self._slots)]

    def attached(self, output: Any, sources: Sequence[torch.Tensor]) -> Any:
        """``output``, as forward's replay left it, with this backward as its history."""
        leaves, tree = flatten_output(output)
        made = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        # One history for each: neither a view nor a tensor that is returned twice can have that.
        once = {id(leaf): path for path, leaf in made.items()}
        made = {p: leaf.clone() if leaf._is_view() or once[id(leaf)] != p else leaf for p, leaf in made.items()}
        results = _Replayed.apply(self, made, *sources)  # type: ignore[no-untyped-call]
        return alike(unflatten_output(tree, {**leaves, **dict(zip(made, results, strict=True))}), output)

    def kept(self, made: dict[str, torch.Tensor], sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the plan reads of sources and outputs, in the order that :meth:`gradients` wants."""
        outputs = [made[OUTPUT + rest] for rest in self._read_outputs]
        return [*(sources[place] for place in self._read_sources), *outputs]

    def gradients(self, kept: Sequence[torch.Tensor], grads: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradient of each source, None where there is none. Raises LaunchFailure."""
        count = len(self._read_sources)
        tensors = dict(zip(self._read_sources.values(), kept[:count], strict=True))
        outputs = dict(zip(self._read_outputs.values(), kept[count:], strict=True))
        given = {index: grads[OUTPUT + rest] for rest, index in self._read_grads.items()}
        buffers = self._plan.buffers
        return self._run({i: _as_verified(t, buffers[i].spec) for i, t in (tensors | outputs | given).items()})

    def _replay(self, tensors: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        plan, bases = self._plan, dict(tensors)
        for index in self._fresh:
            spec = plan.buffers[index].spec
            bases[index] = self._empty(spec.shape, spec.strides, getattr(torch, spec.dtype))
        arena = self._empty((self._arena_bytes,), (1,), torch.uint8) if self._arena_bytes else None
        base = arena.data_ptr() if arena is not None else 0
        addresses = [0] * len(plan.buffers)
        for index, tensor in bases.items():
            addresses[index] = tensor.data_ptr()
        for index, offset in self._arena:
            addresses[index] = base + offset
        self._loaded.run(addresses, self._stream(self._device.index or 0))
        return self._separate(bases)

    def _separate(self, bases: dict[int, torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients, no two of them in one buffer: autograd adds to a gradient in place later on."""
        found: list[torch.Tensor | None] = []
        taken: set[int] = set()
        for view in self._views:
            if view is None:
                found.append(None)
                continue
            base = bases[view.buffer]
            gradient = base.as_strided(view.shape, view.strides, base.storage_offset() + view.offset)
            found.append(gradient.clone() if view.buffer in taken else gradient)
            taken.add(view.buffer)
        return found


_OUT, _GRAD = f"kw.{OUTPUT}", f"kw.{GRADIENT}"


def _below(path: str, root: str) -> bool:
    return path == root or path.startswith(root + ".")


def _as_verified(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """With the strides that the plan knows, at an aligned address: what hooks saved may have come back otherwise."""
    if tensor.stride() == spec.strides and not tensor.data_ptr() % _ALIGN_BYTES:
        return tensor
    return torch.empty_strided(spec.shape, spec.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Replayed(torch.autograd.Function):
    """Forward has run already; its outputs come in a dict by path, through which autograd does not look."""

    @staticmethod
    def forward(
        ctx: Any, bound: BoundBackward, made: dict[str, torch.Tensor], *sources: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.bound, ctx.paths = bound, tuple(made)
        ctx.save_for_backward(*bound.kept(made, sources))
        ctx.mark_non_differentiable(*(tensor for tensor in made.values() if not tensor.is_floating_point()))
        return tuple(made.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = ctx.bound.gradients(ctx.saved_tensors, dict(zip(ctx.paths, grads, strict=True)))
        wanted = ctx.needs_input_grad[2:]
        return (None, None, *(grad if needed else None for grad, needed in zip(found, wanted, strict=True)))
