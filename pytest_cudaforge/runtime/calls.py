"""One traced plan bound to one module: tensors in, the reference's output structure out. The fast path of dispatch.

Everything that can be known per signature is worked out in the constructor; a call collects addresses, takes output
buffers from torch's allocator, points a prepared :class:`~pytest_cudaforge.runtime.replay.Bound` at them and runs it.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pytest_cudaforge.errors import Unsupported
from pytest_cudaforge.languages.binary import Binary
from pytest_cudaforge.plan import (
    Launch,
    LaunchPlan,
    LibraryCall,
    TensorSpec,
    View,
    call_writes,
    scratch_layout,
)
from pytest_cudaforge.runtime.circumstances import Circumstances, Slot, tensor_in
from pytest_cudaforge.runtime.containers import Makers, in_containers
from pytest_cudaforge.runtime.graphs import FEWEST_STEPS, PlanGraphs
from pytest_cudaforge.runtime.replay import Bound, Program

__all__ = [
    "REFERENCE",
    "STALE",
    "BoundCall",
    "Direct",
    "LoadedPlan",
    "allocator",
    "is_whole",
    "on_device",
    "stream_of",
    "written_buffers",
]

#: Answers of a call in place of an output: run the reference this time / the module changed, bind anew.
REFERENCE = object()
STALE = object()


class LoadedPlan:
    """A launch plan with its loaded program; shared by all modules of the same signature, and by threads.

    ``bounds`` is a pool: a Bound holds one call's addresses, so each call takes one out and puts it back.
    """

    def __init__(self, plan: LaunchPlan, program: Program, written: frozenset[int]) -> None:
        self.plan = plan
        self.program = program
        self.written = written
        self.bounds: list[Bound] = []

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Run the plan on these buffers. Raises LaunchFailure."""
        bound = self.take()
        bound.run_on(addresses, stream)
        self.bounds.append(bound)

    def take(self) -> Bound:
        """One out of the pool; whoever takes it appends it to ``bounds`` again."""
        try:
            return self.bounds.pop()
        except IndexError:
            return self.program.bind([0] * len(self.plan.buffers))


def written_buffers(plan: LaunchPlan, binaries: Sequence[Binary]) -> frozenset[int]:
    """Inputs and state that the plan may write: passed to a pointer that is not const, or an op's ``out``."""
    by_constants = {binary.constants: binary for binary in binaries}
    found: set[int] = set()
    for step in plan.steps:
        if isinstance(step, Launch):
            kernel = by_constants[step.constants].kernel(step.kernel)
            params = kernel.params if kernel else ()
            for param, argument in zip(params, step.args, strict=False):
                if isinstance(argument, View) and not param.startswith("const "):
                    found.add(argument.buffer)
        elif isinstance(step, LibraryCall):
            found.update(call_writes(step))
    return frozenset(index for index in found if plan.buffers[index].role in ("input", "state"))


def allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """``empty_strided`` on the current device; torch's own short cut for generated code, where this torch has it."""
    quick = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", None)
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class Direct(NamedTuple):
    """Of a plan that returns its one fresh buffer. ``pick`` brings tensors and output into the order of the plan's
    buffers, None: they are. ``arena`` makes the block for scratch, None: there is none; with it ``layout`` has each
    buffer's place among tensors, output and arena, and its offset there. ``mask``: bits that no address may have."""

    output: Callable[[], torch.Tensor]
    pick: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] | None
    arena: Callable[[], torch.Tensor] | None
    layout: list[tuple[int, int]]
    mask: int
    stream: Callable[[], int]
    bounds: list[Bound]
    take: Callable[[], Bound]


class BoundCall:
    """``run`` takes the tensors of one call in the order of :func:`runtime.signature.flatten_call`.

    ``align_bytes`` is the guard's: a misaligned input or weight goes to the reference. ``graphs``: a plan of several
    launches runs as a CUDA graph where its addresses come again.
    """

    def __init__(
        self,
        main: LoadedPlan,
        prepare: LoadedPlan | None,
        input_paths: Sequence[str],
        circumstances: Circumstances,
        device: torch.device,
        align_bytes: int = 1,
        graphs: bool = False,
        makers: Makers = MappingProxyType({}),
    ) -> None:
        self.circumstances = circumstances
        self._makers = makers
        #: Dispatch's own: the kernel that this came from; its backward, or why there is none, once it was asked for.
        self.kernel: Any = None
        self.backward: Any = None
        self._main, self._prepare = main, prepare
        self.device, self._index = device, device.index if device.type == "cuda" else -1
        self._align_mask = align_bytes - 1
        self._empty = allocator(device)
        self._written = main.written
        # A pointer that is merely not const tells little, as many authors leave it out: the first run shows.
        self._suspects = main.written - main.plan.output_buffers
        self._sources(main.plan, input_paths)
        self._results(main.plan)
        prepared = _Prepared(prepare, circumstances, device, self._align_mask) if prepare is not None else None
        self._prepared = prepared
        #: Whether the current device may be another one than the call's.
        self.several_devices = device.type == "cuda" and torch.cuda.device_count() > 1
        self._current_stream = stream_of(device)
        worth = graphs and device.type == "cuda" and len(main.plan.steps) >= FEWEST_STEPS
        self._graphs = PlanGraphs(main.run, self._empty, self._fresh, self._arena_bytes, self._arena) if worth else None
        self._choose_path()

    def _choose_path(self) -> None:
        self._single = self._whole and not self._written
        if self._written:
            self._graphs = None
        special = self._prepared or self._graphs
        self._direct = self._single and not special and len(self._main.plan.buffers) > 1

    def _sources(self, plan: LaunchPlan, input_paths: Sequence[str]) -> None:
        positions = {path: i for i, path in enumerate(input_paths)}
        slots = {slot.path: slot for slot in self.circumstances.slots}
        self._blank = [0] * len(plan.buffers)
        self._inputs: list[tuple[int, int]] = []
        self._state: list[tuple[int, Slot]] = []
        self._fixed: list[tuple[int, str]] = []
        for index, buffer in enumerate(plan.buffers):
            if buffer.role == "input":
                self._inputs.append((index, positions[buffer.source]))
            elif buffer.role == "state":
                self._state.append((index, slots[buffer.source]))
            elif buffer.role == "prepared":
                self._fixed.append((index, buffer.source))

    def _results(self, plan: LaunchPlan) -> None:
        outputs = sorted(plan.output_buffers)
        fresh = [index for index in outputs if plan.buffers[index].role == "scratch"]
        specs = [plan.buffers[index].spec for index in fresh]
        self._fresh = [
            (index, spec.shape, spec.strides, getattr(torch, spec.dtype))
            for index, spec in zip(fresh, specs, strict=True)
        ]
        layout = scratch_layout(plan)
        self._arena_bytes = layout.total_bytes
        self._arena = sorted(layout.offsets.items())
        # Most plans return one fresh buffer as it stands.
        self._whole = isinstance(plan.outputs, View) and len(fresh) == 1 and is_whole(plan.outputs, specs[0])

    @property
    def plan(self) -> LaunchPlan:
        """Forward's plan."""
        return self._main.plan

    @property
    def writes(self) -> bool:
        """Whether the plan may write tensors that are the caller's."""
        return bool(self._written)

    def run(self, tensors: Sequence[torch.Tensor], own: dict[str, Any]) -> Any:
        """The output, REFERENCE or STALE; ``own`` is the module's ``__dict__``. Raises LaunchFailure, Unsupported."""
        if not self.circumstances.hold(self.device, own):
            return STALE
        return self.run_fitting(tensors, own)

    def run_fitting(self, tensors: Sequence[torch.Tensor], own: dict[str, Any]) -> Any:
        """:meth:`run` where somebody else made sure that module and tensors are what the plan was bound for."""
        return on_device(self._run, self._index)(tensors, own) if self.several_devices else self._run(tensors, own)

    def direct(self, count: int) -> Direct | None:
        """What it takes to run this plan without further ado, given ``count`` tensors of the call followed by the
        module's in the order of slots; None where it does not return its one fresh buffer and need nothing else."""
        if not self._direct:
            return None
        slots = {slot.path: count + place for place, slot in enumerate(self.circumstances.slots)}
        places = dict(self._inputs) | {index: slots[slot.path] for index, slot in self._state}
        ((_, shape, strides, dtype),) = self._fresh
        # The output comes behind all of them.
        last = count + len(self.circumstances.slots)
        order = [places.get(index, last) for index in range(len(self._main.plan.buffers))]
        straight = order == list(range(last + 1))
        inside = dict(self._arena)
        return Direct(
            functools.partial(self._empty, shape, strides, dtype),
            None if straight or inside else operator.itemgetter(*order),
            functools.partial(self._empty, (self._arena_bytes,), (1,), torch.uint8) if inside else None,
            [(last + 1 if i in inside else place, inside.get(i, 0)) for i, place in enumerate(order)],
            self._align_mask,
            functools.partial(self._current_stream, self._index),
            self._main.bounds,
            self._main.take,
        )

    def _run(self, tensors: Sequence[torch.Tensor], own: dict[str, Any]) -> Any:
        addresses = self._blank.copy()
        callers = self._callers_tensors(tensors, own)
        for index, tensor in callers.items():
            addresses[index] = tensor.data_ptr()
            if addresses[index] & self._align_mask:
                return REFERENCE
        if self._written and self._overlap(callers):
            return REFERENCE
        before = {index: callers[index].clone() for index in self._suspects}
        prepared = self._prepared.tensors(own) if self._prepared is not None else {}
        for index, source in self._fixed:
            addresses[index] = prepared[source].data_ptr()
        stream = self._current_stream(self._index)
        replayed = self._graphs.outputs(addresses, stream) if self._graphs is not None else None
        fresh = replayed if replayed is not None else self._launched(addresses, stream)
        if before:
            self._settle(callers, before)
        return fresh[0] if self._single else self._outputs(callers, fresh, prepared)

    def _launched(self, addresses: list[int], stream: int) -> list[torch.Tensor]:
        """Run the plan; its fresh outputs."""
        fresh = []
        for index, shape, strides, dtype in self._fresh:
            fresh.append(self._empty(shape, strides, dtype))
            addresses[index] = fresh[-1].data_ptr()
        # One block per call: torch's allocator orders its reuse by stream, and a CUDA graph keeps it alive.
        arena = self._empty((self._arena_bytes,), (1,), torch.uint8) if self._arena_bytes else None
        base = arena.data_ptr() if arena is not None else 0
        for index, offset in self._arena:
            addresses[index] = base + offset
        self._main.run(addresses, stream)
        return fresh

    def _settle(self, callers: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> None:
        """After the first run: which tensors does the plan really write? Those count a version from now on."""
        changed = {index for index, was in before.items() if not torch.equal(callers[index], was)}
        self._written = (self._written - self._suspects) | changed
        self._suspects = frozenset()
        self._choose_path()

    def _callers_tensors(self, tensors: Sequence[torch.Tensor], own: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Inputs and weights by buffer."""
        found = {index: tensors[position] for index, position in self._inputs}
        found.update((index, tensor_in(slot, own)) for index, slot in self._state)
        return found

    def _overlap(self, callers: dict[int, torch.Tensor]) -> bool:
        """Whether a tensor that the plan writes shares bytes with another one: kernels may assume that none do."""
        buffers = self._main.plan.buffers
        spans = []
        for index, tensor in callers.items():
            start = tensor.data_ptr()
            spans.append((index, start, start + buffers[index].spec.extent_bytes))
        return any(a[0] != b[0] and a[1] < b[2] and b[1] < a[2] for a in spans if a[0] in self._written for b in spans)

    def _outputs(
        self, callers: dict[int, torch.Tensor], fresh: Sequence[torch.Tensor], prepared: dict[str, torch.Tensor]
    ) -> Any:
        bases = dict(callers)
        for index in self._written:
            if not bases[index].is_inference():
                torch.autograd.graph.increment_version(bases[index])
        bases.update((index, tensor) for (index, *_), tensor in zip(self._fresh, fresh, strict=True))
        bases.update((index, prepared[source]) for index, source in self._fixed)
        outputs = _tree(self._main.plan.outputs, bases, self._main.plan)
        return in_containers(outputs, self._makers) if self._makers else outputs


class _Prepared:
    """What ``prepare`` returned for the module's present weights; made again when one of them changes.

    A change shows in a weight's address, or in its version counter (every in-place change outside ``.data`` counts).
    """

    def __init__(self, loaded: LoadedPlan, circumstances: Circumstances, device: torch.device, align_mask: int) -> None:
        self._loaded, self._device, self._align_mask = loaded, device, align_mask
        self._empty = allocator(device)
        slots = {slot.path: slot for slot in circumstances.slots}
        self._state = [
            (index, slots[buffer.source]) for index, buffer in enumerate(loaded.plan.buffers) if buffer.role == "state"
        ]
        self._lock = threading.Lock()
        self._made: tuple[Any, dict[str, torch.Tensor]] | None = None

    def tensors(self, own: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The prepared tensors by path. Raises LaunchFailure, and Unsupported for weights that hide their changes."""
        weights = [tensor_in(slot, own) for _, slot in self._state]
        try:
            stamp = [(t.data_ptr(), t._version) for t in weights]
        except RuntimeError:  # inference tensors count no versions
            raise Unsupported("weights are inference tensors: a change of them could not be seen") from None
        made = self._made
        if made is None or made[0] != stamp:
            with self._lock:
                made = self._made = (stamp, self._run(weights))
        return made[1]

    def _run(self, weights: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        from pytest_cudaforge.runtime.signature import flatten_output

        plan = self._loaded.plan
        # A weight may be a view into a flat parameter; a copy is aligned, and costs no call anything.
        aligned = [weight.clone() if weight.data_ptr() & self._align_mask else weight for weight in weights]
        bases = dict(zip((index for index, _ in self._state), aligned, strict=True))
        scratch = [index for index, buffer in enumerate(plan.buffers) if buffer.role == "scratch"]
        for index in scratch:
            spec = plan.buffers[index].spec
            bases[index] = self._empty(spec.shape, spec.strides, getattr(torch, spec.dtype))
        stream = stream_of(self._device)(self._device.index or 0)
        self._loaded.run([bases[index].data_ptr() for index in range(len(plan.buffers))], stream)
        if self._device.type == "cuda":
            # Later calls may come on other streams.
            torch.cuda.current_stream(self._device).synchronize()
        leaves, _ = flatten_output(_tree(plan.outputs, bases, plan))
        return {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}


def on_device(run: Callable[..., Any], index: int) -> Callable[..., Any]:
    """``run`` with the GPU ``index`` as the current one, which is where allocator and driver work."""

    def run_there(*arguments: Any) -> Any:
        if torch.cuda.current_device() == index:
            return run(*arguments)
        with torch.cuda.device(index):
            return run(*arguments)

    return run_there


def is_whole(view: View, spec: TensorSpec) -> bool:
    """Whether the view is all of its buffer."""
    return (view.shape, view.strides, view.offset) == (spec.shape, spec.strides, 0)


def _tree(value: Any, bases: dict[int, torch.Tensor], plan: LaunchPlan) -> Any:
    """The output tree with tensors for Views: a whole buffer's own tensor, else a view of it."""
    if isinstance(value, View):
        base = bases[value.buffer]
        if is_whole(value, plan.buffers[value.buffer].spec):
            return base
        return base.as_strided(value.shape, value.strides, base.storage_offset() + value.offset)
    if isinstance(value, (list, tuple)):
        return type(value)(_tree(item, bases, plan) for item in value)
    if isinstance(value, dict):
        return {key: _tree(item, bases, plan) for key, item in value.items()}
    return value


def stream_of(device: torch.device) -> Callable[[int], int]:
    """What gives the handle of the current stream of the device with an index; 0 on a CPU."""
    if device.type != "cuda":
        return lambda _: 0
    quick = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if quick is not None:
        return quick  # type: ignore[no-any-return]
    return lambda index: int(torch.cuda.current_stream(index).cuda_stream)
