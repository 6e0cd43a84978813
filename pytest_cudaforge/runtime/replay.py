"""Replay of a launch plan: load its binaries, bind buffers' addresses, run its steps in order.

Torch-free unless a plan has library calls. The devices are :mod:`runtime.replay_cpu` (ctypes) and
:mod:`runtime.replay_cuda` (the CUDA driver); here is what they share. Everything that can be done ahead is done in
``bind``, so that ``run`` is one call per step.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pytest_cudaforge.errors import BuildFailure, DeviceError, LaunchFailure
from pytest_cudaforge.languages.binary import Binary, KernelInfo
from pytest_cudaforge.languages.parameters import check_arguments, pack
from pytest_cudaforge.plan import Launch, LaunchPlan, LibraryCall, TensorSpec, TracedPlan, View, Zero

#: One prepared step; a return value other than None and 0 is the device's error code.
Call = Callable[[], object]


class Pointers:
    """The addresses of a plan's buffers, one 8-byte cell each; argument lists of all its launches point to them."""

    def __init__(self, count: int) -> None:
        self.cells = (ctypes.c_uint64 * max(count, 1))()
        #: ``fill(*addresses)``, all of them at once.
        self.fill: Callable[..., None] = functools.partial(struct.Struct(f"={count}Q").pack_into, self.cells, 0)


class Parameters:
    """The arguments of one launch as the device wants them: the addresses of cells that hold their values.

    A buffer's first element shares the cell in :class:`Pointers`. Numbers have cells of their own, packed once, and
    so has an address inside a buffer, which :meth:`point` fills.
    """

    def __init__(
        self, launch: Launch, params: Sequence[str], itemsizes_bytes: Sequence[int], pointers: Pointers
    ) -> None:
        count = len(launch.args)
        self._pointers = pointers
        self.cells = (ctypes.c_uint64 * max(count, 1))()
        own, shared = ctypes.addressof(self.cells), ctypes.addressof(pointers.cells)
        places = [own + 8 * index for index in range(count)]
        self._inner: list[tuple[int, int, int]] = []
        for index, (argument, param) in enumerate(zip(launch.args, params, strict=True)):
            if isinstance(argument, View):
                offset_bytes = argument.offset * itemsizes_bytes[argument.buffer]
                if offset_bytes:
                    self._inner.append((index, argument.buffer, offset_bytes))
                else:
                    places[index] = shared + 8 * argument.buffer
            elif argument is not None:
                self.cells[index] = int.from_bytes(pack(param, argument).ljust(8, b"\0"), "little")
        self.addresses = (ctypes.c_void_p * max(count, 1))(*places)
        self.moves = bool(self._inner)

    def point(self, buffers: Sequence[int]) -> None:
        """Fill the cells of addresses inside buffers."""
        for index, buffer, offset_bytes in self._inner:
            self.cells[index] = buffers[buffer] + offset_bytes


class BoundStep(Protocol):
    """One step with its arguments in place."""

    @property
    def moves(self) -> bool:
        """Whether it has to be told of new addresses, beyond the cells of :class:`Pointers`."""

    def point(self, buffers: Sequence[int]) -> None:
        """Use these buffer addresses from the next call on."""

    def queue_on(self, stream: int) -> None:
        """Use this stream from the next call on."""

    @property
    def call(self) -> Call:
        """Runs the step; stays the same object across :meth:`point` and :meth:`queue_on`."""


class ReplayDevice(Protocol):
    """Where a program's code is loaded. One instance per program, so that device globals begin afresh."""

    def load(self, launches: Sequence[Launch], binaries: Sequence[Binary]) -> None:
        """Load the binaries these launches use. Raises LaunchFailure for a limit passed or code refused."""

    def bind_launch(
        self, launch: Launch, kernel: KernelInfo, binary: Binary, itemsizes: Sequence[int], pointers: Pointers
    ) -> BoundStep:
        """A launch as a step."""

    def bind_zero(self, buffer: int, nbytes: int) -> BoundStep:
        """A fill with zero bytes as a step."""

    def tensor(self, address: int, spec: TensorSpec) -> Any:
        """A torch tensor of ``spec.extent`` elements at ``address`` (one-dimensional, memory not owned)."""

    def library_scope(self, stream: int) -> Any:
        """A context manager in which torch works on this device and stream."""

    def explain(self, code: int) -> str:
        """An error code in words."""

    def recover(self, call: Call, code: object) -> object:
        """Try a call that gave ``code`` once more where the calling thread's state was to blame; the last code."""

    def variables(self) -> Sequence[tuple[int, int]]:
        """Address and bytes of what the loaded code keeps from call to call: its own static variables."""

    def code(self) -> Sequence[tuple[int, int]]:
        """Address and bytes of the loaded instructions, where they are this process's."""

    def close(self) -> None:
        """Unload."""


class _LibraryStep:
    """An ATen call on tensors that alias the bound buffers; torch is imported here and nowhere else."""

    def __init__(self, call: LibraryCall, plan: LaunchPlan, device: ReplayDevice) -> None:
        from pytest_cudaforge.runtime.library import PreparedCall

        self._prepared = PreparedCall(call)
        self._specs = tuple(buffer.spec for buffer in plan.buffers)
        self._device = device
        self._buffers: tuple[int, ...] = ()
        self._stream = 0
        self._tensors: dict[View | int, Any] = {}
        self._bound: Callable[[], None] | None = None

    moves = True

    def point(self, buffers: Sequence[int]) -> None:
        addresses = tuple(buffers)
        if addresses != self._buffers:
            self._buffers = addresses
            self._tensors.clear()
            self._bound = None

    def queue_on(self, stream: int) -> None:
        self._stream = stream

    @property
    def call(self) -> Call:
        return self._run

    def _run(self) -> None:
        with self._device.library_scope(self._stream):
            if self._bound is None:
                self._bound = self._prepared.bind(self._resolve)
            self._bound()

    def _resolve(self, view: View | int) -> Any:
        """The tensor for a view, or for a whole buffer given by its index."""
        tensor = self._tensors.get(view)
        if tensor is None:
            tensor = self._tensors[view] = self._make(view)
        return tensor

    def _make(self, view: View | int) -> Any:
        if isinstance(view, int):
            spec = self._specs[view]
            view = View(view, spec.shape, spec.strides)
        dtype = self._specs[view.buffer].dtype
        spec = TensorSpec(view.shape, dtype, view.strides)
        address = self._buffers[view.buffer] + view.offset * spec.itemsize_bytes
        return self._device.tensor(address, spec).as_strided(view.shape, view.strides)


class Bound:
    """A program with addresses: ``run()`` as often as wanted. Not for two threads at once.

    ``fill``, ``moving``, ``stream`` and ``calls`` are there for dispatch, which does what :meth:`run_on` does
    within a function of its own.
    """

    def __init__(
        self, steps: Sequence[BoundStep], device: ReplayDevice, names: Sequence[str], count: int, pointers: Pointers
    ) -> None:
        self.fill = pointers.fill
        self.calls = tuple(step.call for step in steps)
        #: Steps that have to be told of new addresses; with most plans there are none.
        self.moving = tuple(step for step in steps if step.moves)
        self.stream = 0
        self._steps = tuple(steps)
        self._device = device
        self._names = tuple(names)
        self._count = count

    def rebind(self, addresses: Sequence[int], stream: object = None) -> None:
        """Use other buffers (and stream) from the next run on; cheaper than a new ``bind``."""
        if len(addresses) != self._count:
            raise ValueError(f"the plan has {self._count} buffers, {len(addresses)} addresses were given")
        handle = stream_handle(stream)
        if handle != self.stream:
            self.queue_on(handle)
        self.fill(*addresses)
        for step in self.moving:
            step.point(addresses)

    def queue_on(self, stream: int) -> None:
        """Use this stream (a handle) from the next run on."""
        for step in self._steps:
            step.queue_on(stream)
        self.stream = stream

    def run(self) -> None:
        """Run every step in order; on a GPU this queues them and returns. Raises LaunchFailure naming the step."""
        for call in self.calls:
            code = call()
            if code:
                self.retry_or_raise(call, code)

    def run_on(self, addresses: Sequence[int], stream: int) -> None:
        """:meth:`rebind` and :meth:`run` in one and unchecked: dispatch counts every microsecond."""
        if stream != self.stream:
            self.queue_on(stream)
        self.fill(*addresses)
        for step in self.moving:
            step.point(addresses)
        for call in self.calls:
            code = call()
            if code:
                self.retry_or_raise(call, code)

    def retry_or_raise(self, call: Call, code: object) -> None:
        """After a call answered ``code``: once more where the thread was to blame. Raises LaunchFailure."""
        again = self._device.recover(call, code)
        if again:
            name = self._names[self.calls.index(call)]
            reason = self._device.explain(int(again) if isinstance(again, int) else 0)
            raise LaunchFailure(f"{name} was refused by the device: {reason}")


class Program:
    """A loaded launch plan. ``close()`` unloads it; also a context manager."""

    def __init__(self, plan: LaunchPlan, binaries: Sequence[Binary], device: ReplayDevice) -> None:
        self.plan = plan
        self._device = device
        self._binaries = {binary.constants: binary for binary in binaries}
        self._closed = False
        device.load(plan.launches, tuple(self._binaries.values()))

    def bind(self, addresses: Sequence[int], stream: object = None) -> Bound:
        """Place every buffer: ``addresses[i]`` is where buffer i's first element lies, whatever its role.

        ``stream`` is a CUDA stream's handle (an int, or an object with ``.handle`` or ``.cuda_stream``); None: the
        default stream. Raises ``ValueError`` for a wrong number of addresses.
        """
        if self._closed:
            raise ValueError("the program is closed")
        wanted = [step for step in self.plan.steps if not self._is_nothing(step)]
        pointers = Pointers(len(self.plan.buffers))
        steps = [self._step(step, pointers) for step in wanted]
        names = [_name(step) for step in wanted]
        bound = Bound(steps, self._device, names, len(self.plan.buffers), pointers)
        bound.rebind(addresses, stream)
        return bound

    def _is_nothing(self, step: Launch | LibraryCall | Zero) -> bool:
        """A fill of no bytes; its buffer may have no address at all."""
        return isinstance(step, Zero) and self.plan.buffers[step.buffer].spec.extent_bytes == 0

    def _step(self, step: Launch | LibraryCall | Zero, pointers: Pointers) -> BoundStep:
        if isinstance(step, Launch):
            binary = self._binaries[step.constants]
            kernel = binary.kernel(step.kernel)
            assert kernel is not None  # load_program checked it
            itemsizes = [buffer.spec.itemsize_bytes for buffer in self.plan.buffers]
            return self._device.bind_launch(step, kernel, binary, itemsizes, pointers)
        if isinstance(step, Zero):
            spec = self.plan.buffers[step.buffer].spec
            return self._device.bind_zero(step.buffer, spec.extent_bytes)
        return _LibraryStep(step, self.plan, self._device)

    def variables(self) -> Sequence[tuple[int, int]]:
        """Address and bytes of the static variables of the loaded code: those in a GPU's global memory, or the
        writable parts of a shared object (none of one that has condition variables, which are glibc's)."""
        return self._device.variables()

    def code(self) -> Sequence[tuple[int, int]]:
        """Address and bytes of the loaded code's instructions; none of a GPU's."""
        return self._device.code()

    def close(self) -> None:
        """Unload the code. Bound programs must not run afterwards."""
        if not self._closed:
            self._closed = True
            self._device.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def load_program(plan: LaunchPlan, binaries: Sequence[Binary], device: str = "cpu") -> Program:
    """Load ``plan`` onto "cpu" or "cuda:N"; every call loads the code anew, so that its globals begin afresh.

    Raises LaunchFailure where arguments, limits or the code are refused, DeviceError where there is no such device.
    """
    try:
        check_arguments(TracedPlan(plan), binaries)
    except BuildFailure as error:
        raise LaunchFailure(error.what, expected=error.expected, remedy=error.remedy) from None
    if plan.library_calls:
        # Before any candidate's shared object: torch's own libraries want their thread-local storage first.
        import torch  # noqa: F401
    return Program(plan, binaries, _open(device))


def _open(device: str) -> ReplayDevice:
    if device == "cpu":
        from pytest_cudaforge.runtime.replay_cpu import CpuDevice

        return CpuDevice()
    kind, _, index = device.partition(":")
    if kind == "cuda" and (index or "0").isdigit():
        from pytest_cudaforge.runtime.replay_cuda import CudaDevice

        return CudaDevice(int(index or "0"))
    raise DeviceError(f"no device is called {device!r}", expected='"cpu" or "cuda:0"')


def stream_handle(stream: object) -> int:
    """A stream as the driver's handle; None is the default stream."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    for name in ("handle", "cuda_stream", "ptr"):
        if hasattr(stream, name):
            return int(getattr(stream, name))
    raise TypeError(f"{stream!r} is no CUDA stream")


def _name(step: Launch | LibraryCall | Zero) -> str:
    if isinstance(step, Launch):
        return f'kernel "{step.kernel}"'
    return f"op {step.op}" if isinstance(step, LibraryCall) else f"the fill of buffer {step.buffer}"
