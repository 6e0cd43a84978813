"""The untrusted child that runs a ModelNew.

The candidate's host code shares the child, so nothing the child says is believed: outputs are copied into the arena
before a request is answered and judged there by the oracle. The child sees the candidate's text, init arguments, the
shape of the calls and one case's inputs; never a seed that yields other cases, never an expected output.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_cudaforge import plan
from pytest_cudaforge.errors import (
    DeviceError,
    ForgeError,
    LaunchFailure,
    UsageError,
)
from pytest_cudaforge.evaluation import extensions
from pytest_cudaforge.evaluation.arena import DeviceArena, HostArena, checked, driver_of
from pytest_cudaforge.evaluation.changes import decode_changes, writers
from pytest_cudaforge.evaluation.channel import Channel, Request
from pytest_cudaforge.evaluation.contract import OVERLAPS
from pytest_cudaforge.evaluation.extensions import NEVER
from pytest_cudaforge.evaluation.module_answers import (
    as_it_was,
    copy_of,
    holders,
    lists_and_dicts,
    overwrite,
    share,
    sharing,
    uses,
)
from pytest_cudaforge.evaluation.module_faults import CandidateError, CandidateFile, short
from pytest_cudaforge.evaluation.module_gradients import Gradients, forward_keywords
from pytest_cudaforge.evaluation.module_instances import Instances
from pytest_cudaforge.evaluation.module_requests import (
    ALONE,
    ANSWERING,
    ATTACH,
    BROKEN,
    CALL_ANOTHER,
    COMPILED,
    DETACH,
    DEVICE_REFUSED,
    LAUNCH_REFUSED,
    NEEDS_BUILD,
    OK,
    PROFILE,
    RELOAD,
    RUN,
    RUN_CHANGED,
    RUN_FRESH,
    RUN_KEPT,
    RUN_MANY,
    START,
    TORCH_THREADS,
    TURN,
    ModuleRecipe,
    NewInstance,
)
from pytest_cudaforge.evaluation.onlookers import Onlookers
from pytest_cudaforge.evaluation.sealing import sealed
from pytest_cudaforge.evaluation.settings import (
    DRAWN,
    OPENMP_THREADS,
    TORCH_OPERATORS,
    Randomness,
    allocated_bytes,
    changed,
    device_settings,
    found_settings,
    keep_freed_memory,
    openmp_counts,
    operators_at_first,
    torch_operators,
    torch_settings,
)
from pytest_cudaforge.evaluation.worker import ALLOCATED, LEFT, Binding
from pytest_cudaforge.plan import Buffer, LaunchPlan

if TYPE_CHECKING:
    import torch

    from pytest_cudaforge.evaluation.crowd import Crowd

__all__ = ["serve"]

_STATE = "the module's parameters and buffers, as state_dict has them"
#: What torch's allocator may take of a device's memory; the rest is the oracle's and its references'.
_MEMORY_SHARE = 0.6
#: How often a GPU is looked at between calls, after how long, and what waiting for an idle one takes at most.
_IDLE_LOOKS, _IDLE_S, _IDLE_NS = 5, 0.01, 300_000
#: How long calls on copies of the inputs go on.
_FRESH_NS = 400_000_000
#: A call has so much memory more for weights in another place.
_MOST_SEALED_BYTES = 1 << 29
#: Before anybody can change them.
_sleep, _clock = time.sleep, time.perf_counter_ns
#: Some 5 ms: longer than host code takes from forward's first line to its last launch.
_LATE_CYCLES = 10_000_000
#: A priority that the driver takes for the greatest it has.
_FIRST = -(1 << 10)
#: Where a module holds its answers as well, further ones are kept for so long, of so many bytes and calls in all.
_KEEP_ON_NS, _KEEP_ON_BYTES, _MOST_KEPT_ON = 1_000_000_000, 1 << 27, 1 << 16


def serve(channel: Channel) -> None:
    """Answer requests until the supervisor is gone."""
    service = _Service()
    while True:
        request = channel.receive_request()
        status, text, blob = OK, "", b""
        try:
            if request.operation == COMPILED:
                blob = extensions.packed_cache()
            else:
                text = service.answer(request)
        except CandidateError as error:
            status, text = error.status, str(error)
        except DeviceError as error:
            status = DEVICE_REFUSED if request.operation in (START, ATTACH) else LAUNCH_REFUSED
            text = str(error)
        except (ForgeError, ValueError) as error:
            status, text = LAUNCH_REFUSED, str(error)
        except (ImportError, OSError, MemoryError, KeyError, AttributeError, TypeError, RuntimeError) as error:
            status, text = BROKEN, f"{type(error).__name__}: {error}"
        missing = extensions.missing()
        if missing is not None:
            # Whatever the candidate made of the refusal, a fallback included: it starts again with the extension.
            status, text = NEEDS_BUILD, missing
        channel.send_reply(request.nonce, status, text=text if status in (OK, NEEDS_BUILD) else text[:8000], blob=blob)


class Bound:
    """One buffer set: the call's arguments over the arena, the places of its outputs, state to load."""

    def __init__(self, service: _Service, bindings: Sequence[Sequence[int]]) -> None:
        device = service.device
        self.inputs: dict[str, tuple[int, torch.Tensor]] = {}
        self.state: dict[str, tuple[int, torch.Tensor]] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        by_buffer: dict[int, torch.Tensor] = {}
        for index, (buffer, binding) in enumerate(zip(service.plan.buffers, bindings, strict=True)):
            tensor = service.tensor(buffer, binding[0], binding[1])
            by_buffer[index] = tensor
            if buffer.role == "input":
                self.inputs[buffer.source] = (index, tensor)
            elif buffer.role == "state":
                self.state[buffer.source] = (index, tensor)
        for path, view in service.output_views:
            self.outputs[path] = by_buffer[view.buffer]
        self.args, self.kwargs = self._call(service)
        self.device = device

    def _call(self, service: _Service) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return service.unflatten({**service.leaves, **{path: tensor for path, (_, tensor) in self.inputs.items()}})

    def on(self, service: _Service, inputs: dict[str, tuple[int, torch.Tensor]]) -> Bound:
        """The same, with ``inputs`` in the place of its own."""
        other = copy.copy(self)
        other.inputs = inputs
        other.args, other.kwargs = other._call(service)
        return other


def _asking(tensor: torch.Tensor) -> torch.Tensor:
    """In the same memory, a tensor that asks for a gradient where it is one of floats."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


class _Service:
    """The candidate, the attached arenas and what is bound of them."""

    def __init__(self) -> None:
        self.plan = LaunchPlan((), (), None)
        self.output_views: list[tuple[str, plan.View]] = []
        self.leaves: dict[str, Any] = {}
        self._arenas: dict[int, HostArena | DeviceArena] = {}
        self._bound: dict[tuple[Binding, ...], Bound] = {}
        self._rotation: list[Bound] = []
        #: (place in the arena, what the last call returned) of its outputs
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Answers that are kept, each with a copy.
        self._kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self._gradients: Gradients | None = None
        self._called: Bound | None = None
        self._tree: Any = None
        self._driver: Any = None
        self._crowd: Crowd | None = None
        #: The stream of the device whose kernels go first, once there is one.
        self._first: Any = None
        #: Before the first call. What importing the file has set is its author's say, and answers are judged with it.
        self._settings: dict[str, object] = {}
        #: Before the file was imported: what is nobody's to change.
        self._found: dict[str, object] = {}

    def answer(self, request: Request) -> str:
        asked = request.payload
        if request.operation == START:
            return self._start(asked, request.blob)
        if request.operation == ATTACH:
            self._attach(asked, request.descriptors[0])
        elif request.operation == DETACH:
            self._detach(asked["slot"])
        elif request.operation == RELOAD:
            self._renew(asked.get("how", "beside"))
        elif request.operation == CALL_ANOTHER:
            self._call_another(asked["bindings"])
        elif request.operation == RUN:
            how = {name: asked[name] for name in ("late", "elsewhere", "write_over")}
            return self._run(asked["bindings"], **how)
        elif request.operation == RUN_MANY:
            self._run_many(asked["sets"], asked["calls"], asked["first_set"], asked["among"])
            if asked["shows_state"]:
                self._show_state(self._rotation[0])
        elif request.operation == RUN_FRESH:
            return str(self._run_fresh(asked["bindings"], asked["calls"]))
        elif request.operation == RUN_CHANGED:
            self._run_changed(asked, request.blob)
        elif request.operation == TORCH_THREADS:
            self._torch.set_num_threads(asked["count"])
        elif request.operation == TURN:
            self._turn(asked)
        elif request.operation == RUN_KEPT:
            return "{} {}".format(*self._run_kept(asked["sets"], asked["order"], first=asked["first"]))
        elif request.operation == LEFT:
            left = changed(self._settings, self._settings_now())
            found = changed(self._found, found_settings(self._torch))
            drawn = [DRAWN] if self._random.drawn else []
            drawn += [TORCH_OPERATORS] if torch_operators(self._torch) else []
            drawn += [_STATE] if self._instances.replaced() else []
            every = [*left, *found, *drawn, *self._modes(), *self._random.reseeded, *self._at_work(), *self._staying()]
            return json.dumps(list(dict.fromkeys([*every, *self._onlookers.seen])))
        elif request.operation == ALLOCATED:
            on_gpu = self.device.type == "cuda"
            return str(self._torch.cuda.memory_allocated(self.device) if on_gpu else allocated_bytes())
        elif request.operation == PROFILE:
            return self._profile(asked["bindings"], asked["calls"])
        elif request.operation == ANSWERING:
            return self._answering(asked["bindings"])
        return ""

    # -- making the candidate

    def _start(self, asked: Any, blob: bytes) -> str:
        import torch

        from pytest_cudaforge.evaluation.precision import precision_flags

        self._torch, self._random = torch, Randomness(torch)
        self._delay: Callable[[int], None] = torch.cuda._sleep
        # As it is now: the candidate may put something else in its place.
        self._profiled = extensions.sealed(extensions.profiled)
        self._recipe = ModuleRecipe(**asked["recipe"])
        self.device = torch.device(asked["device"])
        self._turn(asked)
        torch.set_num_threads(self._recipe.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        else:
            torch.cuda.set_device(self.device)
            torch.cuda.set_per_process_memory_fraction(_MEMORY_SHARE, self.device)
            self._driver = driver_of(self.device.index or 0)
            self._wait = self._driver.cuCtxSynchronize
        # For good, since this process runs nothing else: a context that nobody holds would end at once.
        self._precision = precision_flags(self._recipe.precision)
        self._precision.__enter__()
        torch.set_grad_enabled(False)
        folder = Path(tempfile.gettempdir())
        self._found = found_settings(torch)
        self._file = CandidateFile(folder / Path(self._recipe.file_name).name)
        self._onlookers = Onlookers()
        self._threads = (threading.current_thread(), *threading.enumerate())
        operators_at_first(torch)
        libraries, compiled = _cut(asked["libraries"], blob)
        extensions.install(folder, libraries, self._recipe.sabotage)
        extensions.unpack_cache(compiled)
        self._file.path.write_text(self._recipe.source, encoding="utf-8")
        self._instances = Instances(self._file, self._recipe, self.device)
        extensions.change_triton()
        self._instances.construct()
        self._settings = self._settings_now()
        known = {**self._instances.state, **self._instances.attributes}
        state = [[path, list(t.shape), str(t.dtype).removeprefix("torch.")] for path, t in known.items()]
        return json.dumps({"state": state})

    def _turn(self, asked: Any) -> None:
        """Take up the calls of a workload."""
        from pytest_cudaforge.evaluation.cases import tree_leaves

        self.plan = plan.decode(asked["traced"]).main
        self.output_views = [(p, v) for p, v in tree_leaves(self.plan.outputs, "out") if isinstance(v, plan.View)]
        self._called = None
        self.leaves = {path: _plain(leaf) for path, leaf in asked["leaves"].items()}
        self._tree, self._shared = asked["tree"], frozenset(asked["shared"])
        self._gradients = (
            Gradients([path for path, _ in self.output_views], self._shared) if asked["backward"] else None
        )
        self._bound.clear()
        self._held = []

    def _renew(self, how: NewInstance) -> None:
        self._held = []
        if how not in ALONE:
            self._instances.add(how)
            return
        kept, self._kept = self._kept, []
        self._bound.clear()
        self._instances.replace(how, [copied for answer in kept for _, copied in answer])
        if not all(as_it_was(tensor, copied) for answer in kept for tensor, copied in answer):
            raise CandidateError(LAUNCH_REFUSED, "answers that were kept changed when the module was gone")

    def _call_another(self, bindings: Sequence[Sequence[int]]) -> None:
        bound = self._bind(bindings)
        self._instances.call_others(bound.args, bound.kwargs)
        if self._driver is not None:
            checked(self._driver.cuCtxSynchronize(), "calling an instance of other settings")

    def _settings_now(self) -> dict[str, object]:
        found = torch_settings(self._torch, team=self.device.type == "cpu")
        if self._driver is None:
            return found
        return {**found, **device_settings(self._driver, self._torch.cuda.current_stream().cuda_stream, self._torch)}

    def _modes(self) -> tuple[str, ...]:
        """All other calls are made where no gradients are recorded, by as many threads as there are cores: who turns
        the one off, or puts the other there, leaves no trace."""
        torch = self._torch
        if self._called is None:
            return ()
        threads = torch.get_num_threads()
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        counts = openmp_counts()
        try:
            self._call(self._called)
            found = {
                "torch.is_grad_enabled()": torch.is_grad_enabled(),
                "torch.get_num_threads()": torch.get_num_threads() == 1,
                OPENMP_THREADS: not changed({OPENMP_THREADS: counts}, {OPENMP_THREADS: openmp_counts()}),
            }
        except CandidateError:
            return ()  # nobody promised gradients
        finally:
            torch.set_grad_enabled(False)
            torch.set_num_threads(threads)
        self._synchronize()
        return tuple(name for name, kept in found.items() if not kept)

    def _staying(self) -> tuple[str, ...]:
        """Is there a thread of Python's that a process waits for as it ends, although all calls have returned? Those of
        executors are told when it does."""
        told = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", {})
        others = [thread for thread in threading.enumerate() if not thread.daemon and thread not in self._threads]
        found = [thread for thread in others if thread not in told]
        return ("the threads that a process waits for as it ends",) if found else ()

    def _at_work(self) -> tuple[str, ...]:
        """Is a GPU busy although no call is being made, each time that it is looked at?"""
        if self._driver is None:
            return ()
        for _ in range(_IDLE_LOOKS):
            self._synchronize()
            _sleep(_IDLE_S)
            began = _clock()
            self._wait()
            if _clock() - began < _IDLE_NS:
                return ()
        return ("the device, which works on although no call is being made",)

    # -- memory

    def _attach(self, asked: Any, fd: int) -> None:
        self._detach(asked["slot"])
        if self.device.type == "cpu":
            arena = HostArena.attach(fd, asked["nbytes"], asked["readonly"])
            self._arenas[asked["slot"]] = arena
            arena.guard(asked["guards"])
        else:
            index = self.device.index or 0
            self._arenas[asked["slot"]] = DeviceArena.attach(fd, asked["nbytes"], index, asked["readonly"])

    def _detach(self, slot: int) -> None:
        arena = self._arenas.pop(slot, None)
        if arena is not None:
            self._bound.clear()
            self._held = []
            self._called = None
            arena.close()

    def tensor(self, buffer: Buffer, slot: int, offset: int) -> torch.Tensor:
        """The buffer's memory, without a copy."""
        from pytest_cudaforge.evaluation.tensors import tensor_at

        arena = self._arenas.get(slot)
        if arena is None or offset < 0 or offset + buffer.spec.extent_bytes > arena.nbytes:
            raise LaunchFailure(f"a buffer of {buffer.spec.extent_bytes} bytes at {offset} is outside its arena")
        return tensor_at(arena.address + offset, buffer.spec, self.device)

    def unflatten(self, leaves: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        from pytest_cudaforge.runtime.signature import unflatten_call

        return unflatten_call(self._tree, leaves)

    def _bind(self, bindings: Sequence[Sequence[int]]) -> Bound:
        key = tuple((slot, offset) for slot, offset in bindings)
        if key not in self._bound:
            self._bound[key] = Bound(self, bindings)
        return self._bound[key]

    # -- calls

    @property
    def _function(self) -> Callable[..., Any]:
        """What a call is a call of: the model, or forward and backward in one."""
        return (
            self._instances.model
            if self._gradients is None
            else functools.partial(self._gradients.of, self._instances.model)
        )

    def _call(self, bound: Bound) -> Any:
        doing, onlookers = "forward" if self._gradients is None else "forward and backward", self._onlookers

        def called() -> Any:
            answer = self._function(*bound.args, **bound.kwargs)
            # Nothing is called here that an onlooker might take for its last moment.
            for place, usual in onlookers.usual:
                if onlookers.words[place] != usual:
                    onlookers.left = True
            return answer

        return self._file.guarded(LAUNCH_REFUSED, doing, called)

    def _called_training(self, bound: Bound) -> Any:
        """As elsewhere, with inputs and parameters that ask for gradients; nobody goes back through the answer."""
        written = self._recipe.written if self._recipe is not None else ()
        named = self._instances.model.named_parameters()
        trained = [p for path, p in named if p.is_floating_point() and path not in written]
        inputs = {path: (index, _asking(tensor)) for path, (index, tensor) in bound.inputs.items()}
        for parameter in trained:
            parameter.requires_grad_(True)
        try:
            return self._called_elsewhere(bound.on(self, inputs))
        finally:
            for parameter in trained:
                parameter.requires_grad_(False)

    def _called_elsewhere(self, bound: Bound) -> Any:
        """In a new thread, whose settings are torch's own, as a server's or DataParallel's are."""
        torch = self._torch
        with ThreadPoolExecutor(1) as pool:

            def call() -> Any:
                with torch.enable_grad():
                    if self.device.type == "cuda":
                        torch.cuda.set_device(self.device)
                    return self._call(bound)

            return pool.submit(call).result()

    def _run(self, bindings: Sequence[Sequence[int]], *, late: bool, elsewhere: str, write_over: bool) -> str:
        with self._ahead() if late and self.device.type == "cuda" else contextlib.nullcontext():
            return self._run_there(bindings, late=late, elsewhere=elsewhere, write_over=write_over)

    @contextlib.contextmanager
    def _ahead(self) -> Iterator[None]:
        """In a stream whose kernels go before those of all others: what is left to another one, and not waited for,
        then comes after the answer was fetched. It and the default stream wait for each other, as many count on."""
        if self._first is None:
            driver = driver_of(self.device.index or 0)
            flag = driver.CUstream_flags.CU_STREAM_DEFAULT
            stream = checked(driver.cuStreamCreateWithPriority(flag, _FIRST), "a stream")
            made: Any = self._torch.cuda.ExternalStream
            self._first = made(int(stream), device=self.device)
        with self._torch.cuda.stream(self._first):
            yield

    def _run_there(self, bindings: Sequence[Sequence[int]], *, late: bool, elsewhere: str, write_over: bool) -> str:
        bound = self._bind(bindings)
        self._load_weights(bound)
        self._random.scatter()
        if late and self.device.type == "cuda":
            bound = self._written_late(bound)
        if self.device.type == "cuda":
            self._crowded().soil()
        inference = elsewhere == "inference"
        if inference and self._gradients is not None:
            self._begin_in_inference_mode(bound)
            inference = False
        with self._torch.inference_mode() if inference else contextlib.nullcontext():
            with self._sealed(bound) if elsewhere == "sealed" else contextlib.nullcontext():
                with extensions.sabotaged_operators():
                    calls = {"thread": self._called_elsewhere, "training": self._called_training}
                    output = calls.get(elsewhere, self._call)(bound)
                # Before weights are where they were: it says which of them an answer is a view of.
                leaves, copied = self._deliver(bound, output)
            self._called = bound
            self._random.look()
        self._show_state(bound)
        # What was made under inference mode may be written nowhere else.
        held, self._held = self._held, [] if inference else copied
        own = {place.data_ptr() for place in bound.outputs.values()}
        for place, tensor in held:
            # What the call before returned must be right still: the oracle compares its place again.
            if place.data_ptr() not in own:
                place.copy_(tensor)
        for _, tensor in held if write_over else ():
            overwrite(tensor)  # as a caller may, in an answer that is its own
        self._synchronize()
        return json.dumps(leaves)

    def _sealed(self, bound: Bound) -> contextlib.AbstractContextManager[None]:
        """With parameters and buffers of the reference's names that nobody can write, but for those that the reference
        writes, or that are gigabytes. (A plain attribute may be anybody's workspace.)"""
        state = self._instances.state
        written = {id(state[path]) for path in self._recipe.written if path in state}
        own = [tensor for path, tensor in state.items() if path in bound.state and id(tensor) not in written]
        sizes = itertools.accumulate(tensor.nbytes for tensor in own)
        return sealed(tensor for tensor, size in zip(own, sizes, strict=True) if size <= _MOST_SEALED_BYTES)

    def _begin_in_inference_mode(self, bound: Bound) -> None:
        """Forward alone, before it is trained: no gradient can be asked for there."""
        forward = functools.partial(self._instances.model, *bound.args, **forward_keywords(bound.kwargs))
        with self._torch.inference_mode():
            self._file.guarded(LAUNCH_REFUSED, "forward", forward)

    def _crowded(self) -> Crowd:
        if self._crowd is None:
            from pytest_cudaforge.evaluation.crowd import Crowd

            self._crowd = Crowd(self.device.index or 0)
        return self._crowd

    def _written_late(self, bound: Bound) -> Bound:
        """The same call on copies of its inputs, which the stream of the caller writes in some milliseconds: as behind
        a layer that is still at work."""
        fresh = {path: (index, tensor.clone()) for path, (index, tensor) in bound.inputs.items()}
        for _, late in fresh.values():
            late.fill_(math.nan if late.is_floating_point() or late.is_complex() else 0)
        self._synchronize()
        self._delay(_LATE_CYCLES)
        for path, (_, late) in fresh.items():
            late.copy_(bound.inputs[path][1])
        return bound.on(self, fresh)

    def _run_many(self, sets: Sequence[Any] | None, calls: int, first: int, among: int | None) -> None:
        """Outputs of the last call of every set are in the arena when this returns; nothing is kept meanwhile."""
        if sets is not None:
            self._rotation = [self._bind(bindings) for bindings in sets]
        rotation = self._rotation[:among]
        bounds = [*rotation[first:], *rotation[:first]]
        self._load_weights(bounds[0])
        self._held = []
        from pytest_cudaforge.evaluation.tensors import fetch

        model, count = self._function, len(bounds)
        try:
            for i in range(calls - count):
                bound = bounds[i % count]
                model(*bound.args, **bound.kwargs)
            for i in range(max(0, calls - count), calls):
                bound = bounds[i % count]
                fetch(model(*bound.args, **bound.kwargs), bound.outputs)
        except NEVER:
            raise CandidateError(NEEDS_BUILD, "") from None
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise CandidateError(LAUNCH_REFUSED, f"forward failed\n{self._file.own_frames(error)}") from error
        self._synchronize()

    def _run_fresh(self, bindings: Sequence[Sequence[int]], calls: int) -> int:
        """After how many calls nobody but this function holds memory of the inputs; those that were not made count."""
        bound = self._bind(bindings)
        self._load_weights(bound)
        self._held = []
        memory: list[list[torch.UntypedStorage]] = []
        until = _clock() + _FRESH_NS  # what is new to a module for each address may take long
        while len(memory) < calls and _clock() < until:
            fresh = {path: (index, copy_of(tensor)) for path, (index, tensor) in bound.inputs.items()}
            memory.append([tensor.untyped_storage() for _, tensor in fresh.values()])
            self._call(bound.on(self, fresh))
            del fresh
        self._synchronize()
        gc.collect()
        alone = holders(self._torch.empty(1).untyped_storage())
        return calls - sum(any(holders(storage) > alone for storage in call) for call in memory)

    def _run_changed(self, asked: Any, blob: bytes) -> None:
        """As :meth:`_run_many`, with other values written before some of the calls."""
        from pytest_cudaforge.evaluation.tensors import fetch

        bounds = [self._bind(bindings) for bindings in asked["sets"]]
        self._load_weights(bounds[0])
        self._held = []
        model, count, calls = self._function, len(bounds), asked["calls"]
        with writers(decode_changes(asked["changes"], blob), self._address, self._driver) as written:
            try:
                for call in range(calls):
                    for write in written.get(call, ()):
                        write()
                    bound = bounds[call % count]
                    output = model(*bound.args, **bound.kwargs)
                    if call >= calls - count:
                        fetch(output, bound.outputs)
            except NEVER:
                raise CandidateError(NEEDS_BUILD, "") from None
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                raise CandidateError(LAUNCH_REFUSED, f"forward failed\n{self._file.own_frames(error)}") from error
            self._synchronize()

    def _run_kept(self, sets: Sequence[Any], order: Sequence[int], *, first: bool) -> tuple[int, int]:
        """How many answers are no longer what they were when they were returned, and how many share a storage with
        another one: autograd's versions are a storage's, and all of it lives as long as one of them."""
        bounds = [self._bind(bindings) for bindings in sets]
        self._load_weights(bounds[0])
        self._held, self._kept = [], [] if first else self._kept
        given = {id(one) for bound in bounds for one in lists_and_dicts((bound.args, dict(bound.kwargs)))}
        containers: list[Any] = []
        for at in order:
            answer = self._call(bounds[at])
            containers += [one for one in lists_and_dicts(answer) if id(one) not in given]
            tensors = self._own_tensors(bounds[at], answer)
            del answer
            # A caller may keep views of answers and nothing else, or the answers.
            kept = [tensor.detach() for tensor in tensors] if first else tensors
            self._kept.append([(tensor, tensor.clone()) for tensor in kept])
            del tensors, kept  # else it were held here, and known to be in use
        if not first and self._holds_answers():
            self._keep_on(bounds)
        self._synchronize()
        changed_ = sum(not all(as_it_was(tensor, copy) for tensor, copy in answer) for answer in self._kept)
        # Who keeps a dict of answers has another call's in it, where both are in one.
        changed_ += len(containers) - len({id(one) for one in containers})
        return changed_, sharing([tensor for tensor, _ in answer] for answer in self._kept)

    def _holds_answers(self) -> bool:
        """Does somebody else hold most of the answers that are kept, as who gives each of many in turn does?"""

        def held_by(answers: Iterable[Sequence[tuple[torch.Tensor, Any]]]) -> list[tuple[int, int]]:
            return [(sys.getrefcount(tensor), uses(tensor)) for answer in answers for tensor, _ in answer]

        (alone,) = held_by([[(self._torch.empty(1), None)]])
        # Of the first half views are kept.
        found = held_by(self._kept[-(-len(self._kept) // 2) :])
        return 2 * sum(held[0] > alone[0] or held[1] > alone[1] for held in found) > len(found)

    def _keep_on(self, bounds: Sequence[Bound]) -> None:
        """As many answers more as there is time and memory for: sooner or later one lies where an early one does."""
        kept: list[list[torch.Tensor]] = []
        until, taken = time.perf_counter_ns() + _KEEP_ON_NS, 0
        while time.perf_counter_ns() < until and taken < _KEEP_ON_BYTES and len(kept) < _MOST_KEPT_ON:
            bound = bounds[len(kept) % len(bounds)]
            kept.append(self._own_tensors(bound, self._call(bound)))
            taken += sum(tensor.nbytes for tensor in kept[-1])
        self._synchronize()

    def _own_tensors(self, bound: Bound, output: Any) -> list[torch.Tensor]:
        """The tensors of an answer that lie neither in the call's inputs nor in the module's state."""
        from pytest_cudaforge.errors import TargetError
        from pytest_cudaforge.runtime.signature import flatten_output

        try:
            leaves, _ = flatten_output(output)
        except TargetError:
            return []
        tensors = [leaf for leaf in leaves.values() if type(leaf) is self._torch.Tensor]
        return [tensor for tensor in tensors if self._alias(tensor, bound) is None]

    def _address(self, slot: int, offset: int) -> int:
        if slot not in self._arenas:
            raise LaunchFailure(f"no arena is attached under slot {slot}")
        return self._arenas[slot].address + offset

    def _matched(self, bound: Bound) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """(buffer, the reference's tensor, the candidate's) where name, shape and dtype are the same."""
        now = ((path, self._instances.attribute(path)) for path in self._instances.attributes)
        state = {**self._instances.state, **{path: tensor for path, tensor in now if tensor is not None}}
        for path, tensor in state.items():
            if path in bound.state:
                index, place = bound.state[path]
                if tensor.shape == place.shape and tensor.dtype == place.dtype:
                    yield index, place, tensor

    def _load_weights(self, bound: Bound) -> None:
        """Only where they changed: a module may know its weights by their version."""
        for _, place, tensor in self._matched(bound):
            if not self._same(tensor, place):
                tensor.copy_(place)

    def _same(self, tensor: torch.Tensor, place: torch.Tensor) -> bool:
        """An attribute may lie elsewhere before the first call: a module does not take it along to a device."""
        return self._torch.equal(tensor.to(place.device), place)

    def _show_state(self, bound: Bound) -> None:
        """What forward wrote into its state goes where the oracle compares it."""
        for _, place, tensor in self._matched(bound):
            if not self._same(tensor, place):  # what forward leaves alone may be mapped read-only
                place.copy_(tensor)

    def _deliver(self, bound: Bound, output: Any) -> tuple[list[Any], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Copy fitting outputs into the arena: (what was returned, as data; (place, tensor) pairs copied)."""
        from pytest_cudaforge.errors import TargetError
        from pytest_cudaforge.runtime.signature import flatten_output, named_parts

        try:
            leaves, tree = flatten_output(output)
        except TargetError as error:
            return [["out", {"opaque": short(error.what)}]], []
        told: list[Any] = [[path[:200], {"fields": list(names)}] for path, names in named_parts(tree)]
        copied = []
        seen: dict[str, torch.Tensor] = {}
        for path, leaf in leaves.items():
            description = self._describe(leaf, bound)
            first = self._overlapped(leaf, seen) if path not in self._shared else None
            if first is not None:
                description = {"opaque": short(f"a tensor that {OVERLAPS.format(first)}")}
            elif isinstance(leaf, self._torch.Tensor):
                seen[path[:200]] = leaf
            told.append([path[:200], description])
            place = bound.outputs.get(path)
            if place is None or "tensor" not in description:
                continue
            if place.shape == leaf.shape and place.dtype == leaf.dtype:
                place.copy_(leaf)
                copied += [(place, leaf)] if description["alias"] is None else []
        return told, copied

    def _describe(self, leaf: Any, bound: Bound) -> dict[str, Any]:
        from pytest_cudaforge.runtime.signature import spec_of

        torch = self._torch
        if not isinstance(leaf, torch.Tensor):
            return {"value": plan.encode_tree(leaf)}
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            return {"opaque": short(f"a {type(leaf).__name__}, which is no plain tensor")}
        if leaf.is_inference() and not torch.is_inference_mode_enabled():
            return {"opaque": "an inference tensor, which code that records gradients cannot use"}
        if leaf.device != self.device and leaf.device.type != self.device.type:
            return {"opaque": short(f"a tensor on {leaf.device}")}
        try:
            spec = spec_of(leaf)
        except UsageError as error:
            return {"opaque": short(error.what)}
        return {"tensor": plan.encode_spec(spec), "alias": self._alias(leaf, bound)}

    def _overlapped(self, leaf: Any, seen: Mapping[str, torch.Tensor]) -> str | None:
        """The output before this one that it shares elements with."""
        torch = self._torch
        if not isinstance(leaf, torch.Tensor):
            return None
        return next((path for path, other in seen.items() if share(leaf, other)), None)

    def _alias(self, leaf: torch.Tensor, bound: Bound) -> list[int] | None:
        """[buffer, byte offset] of the input or parameter whose memory the output shares."""
        if not leaf.numel():
            return None
        address = leaf.data_ptr()
        owners = [(index, tensor) for index, tensor in bound.inputs.values()]
        owners += [(index, tensor) for index, _, tensor in self._matched(bound)]
        for index, tensor in owners:
            begin = tensor.data_ptr()
            extent = self.plan.buffers[index].spec.extent_bytes
            if tensor.numel() and begin <= address < begin + extent:
                return [index, address - begin]
        return None

    def _synchronize(self) -> None:
        # By the driver, and not by torch.cuda.synchronize: the candidate may have replaced that.
        if self.device.type == "cuda":
            checked(self._wait(), "running forward")

    def _profile(self, bindings: Sequence[Sequence[int]], calls: int) -> str:
        bound = self._bind(bindings)
        self._load_weights(bound)
        self._call(bound)
        self._synchronize()
        return json.dumps(self._profiled(lambda: self._call(bound), calls, self.device.type == "cuda"))

    def _answering(self, bindings: Sequence[Sequence[int]]) -> str:
        from pytest_cudaforge.errors import TargetError
        from pytest_cudaforge.evaluation.answering import answering
        from pytest_cudaforge.runtime.signature import flatten_output

        bound = self._bind(bindings)
        self._load_weights(bound)
        given = [*(tensor for _, tensor in bound.inputs.values()), *self._instances.state.values()]
        try:
            return ",".join(answering(lambda: flatten_output(self._call(bound))[0], given))
        except (CandidateError, TargetError):
            return ""  # nobody promised to run while somebody watches


def _cut(sizes: Sequence[Sequence[Any]], blob: bytes) -> tuple[dict[str, bytes], bytes]:
    """The libraries by key, and what follows them."""
    found, offset = {}, 0
    for key, size in sizes:
        found[str(key)] = blob[offset : offset + size]
        offset += size
    return found, blob[offset:]


def _plain(leaf: Any) -> Any:
    return float(leaf["float"]) if isinstance(leaf, dict) else leaf
