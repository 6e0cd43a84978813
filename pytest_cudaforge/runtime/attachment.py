"""What an applied module carries: its bound calls by input signature, and the way to the reference.

The instance holds it in its own ``__dict__``; :mod:`runtime.dispatch` puts it there.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from pytest_cudaforge import hardware
from pytest_cudaforge.errors import BuildFailure, ForgeError, SituationError, Unsupported, UsageError
from pytest_cudaforge.facts import DeviceFacts
from pytest_cudaforge.runtime import guards
from pytest_cudaforge.runtime.calls import REFERENCE, STALE, BoundCall, LoadedPlan
from pytest_cudaforge.runtime.circumstances import PLAIN_TYPES, Circumstances, survey
from pytest_cudaforge.runtime.configured import Configured
from pytest_cudaforge.runtime.containers import makers_of
from pytest_cudaforge.runtime.kernels import Kernel
from pytest_cudaforge.runtime.modes import is_plain, obstacle
from pytest_cudaforge.runtime.shortcut import MISS, Shortcut, shortcut_of
from pytest_cudaforge.runtime.signature import (
    Leaf,
    ModuleSpec,
    Signature,
    describe_module,
    flatten_call,
    module_tensors,
    spec_of,
)
from pytest_cudaforge.runtime.training import BoundBackward, backward_arguments

__all__ = [
    "Attachment",
    "Dispatch",
    "ForgeWarning",
    "device_facts",
    "device_name",
    "place_reason",
    "state_reason",
]

_MOST_SIGNATURES = 512
#: For one signature: under no_grad, in inference mode, with an input that requires grad, ...
_MOST_SHORTCUTS = 4
_NOTHING: dict[str, Any] = {}
_NOT_PLAIN = "an input is no plain tensor, number or container of these"
_PLAIN_SCALARS = frozenset({bool, int, str, type(None)})


class ForgeWarning(UserWarning):
    """A forged kernel could not be used and the reference runs instead."""


class Dispatch:
    """A target's reference and its kernels; shared by all modules of the class. ``kind`` is None for a function."""

    def __init__(
        self,
        kind: type | None,
        reference: Callable[..., Any],
        kernels: Sequence[Kernel | Configured],
        graphs: bool = False,
    ) -> None:
        self.kind = kind
        self.reference = reference
        self.kernels = tuple(kernels)
        self.graphs = graphs
        #: Paths of tensors whose values a kernel may have built in.
        self.held = frozenset(path for kernel in kernels for path, _ in kernel.entry.buffers)
        self.trains = any(kernel.entry.backward for kernel in kernels)
        self.names = guards.parameter_names(reference, method=kind is not None)
        self._warned: set[str] = set()

    def best_first(self, inputs: guards.Inputs) -> list[Kernel | Configured]:
        """The kernels in the order in which a call with these inputs tries them; a kernel goes before the compiler."""
        if len(self.kernels) == 1:
            return list(self.kernels)
        order = guards.ranked([kernel.entry for kernel in self.kernels], inputs, self.names)
        return sorted((self.kernels[place] for place in order), key=lambda kernel: isinstance(kernel, Configured))

    def warn_once(self, kernel: Kernel | Configured, error: ForgeError) -> None:
        """One warning per kernel and process, however many modules and signatures meet it."""
        if kernel.entry.directory not in self._warned:
            self._warned.add(kernel.entry.directory)
            text = f"{kernel.entry.target}: the reference runs, not the forged {kernel.entry.directory}: {error}"
            warnings.warn(text, ForgeWarning, stacklevel=2)


class Refusal:
    """In place of a BoundCall: this signature goes to the reference for as long as the module stays as it is."""

    def __init__(self, reason: str, circumstances: Circumstances, device: torch.device) -> None:
        self.reason = reason
        self.circumstances = circumstances
        self.device = device

    def run(self, tensors: Sequence[torch.Tensor], own: dict[str, Any]) -> Any:
        """REFERENCE, or STALE once the module changed."""
        return REFERENCE if self.circumstances.hold(self.device, own) else STALE


class ConfiguredCall(Refusal):
    """In place of a BoundCall: torch's compiler answers this signature. To everybody who knows no configurations it is
    a refusal, which is what a call under autograd gets."""

    def __init__(self, kernel: Configured, circumstances: Circumstances, device: torch.device) -> None:
        super().__init__("a compiler configuration is for forward only: called without no_grad", circumstances, device)
        self.kernel = kernel


class _Site(NamedTuple):
    """One call as it was made; ``module`` is None for a function."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def described(self) -> ModuleSpec | None:
        return describe_module(self.module) if self.module is not None else None

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return module_tensors(self.module) if self.module is not None else _NOTHING


class _Known(NamedTuple):
    """A shortcut, with the bound call that it leads to."""

    run: Shortcut
    key: tuple[Any, ...]
    call: BoundCall


def _first_shape(args: tuple[Any, ...]) -> Any:
    return args[0].shape if args and type(args[0]) in PLAIN_TYPES else None


class Attachment:
    """One applied module's (or function's) bound calls. ``declined`` counts calls to the reference, by reason."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._owner: Callable[[], Any] | None = None
        self._calls: dict[tuple[Any, ...], BoundCall | Refusal] = {}
        #: Short ways, with how many were made for a signature; by the shape of the first argument; the last one.
        self._learned: dict[tuple[Any, ...], tuple[_Known | None, int]] = {}
        self._known: dict[Any, _Known] = {}
        self._last: _Known | None = None
        #: What the module has in common with others that share compiled code (runtime.dynamo).
        self.form = ""
        self._lock = threading.RLock()
        self.declined: Counter[str] = Counter()
        _alive.add(self)

    def own(self, module: Any) -> Attachment:
        """Say whose attachment this is (None: a function's)."""
        self._owner = weakref.ref(module) if module is not None else lambda: None
        return self

    # A copy is another module's: it binds its own calls. A pickle must load where this package is not installed.

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        return self._anew()

    def _anew(self) -> Attachment:
        fresh = Attachment(self._dispatch)
        fresh.form = self.form
        return fresh

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return (str, ("was applied in the process that wrote this",))

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``forward`` of an applied module, or the call of an applied function (``module`` None)."""
        owner = self._owner
        if owner is None or owner() is not module:
            return self._of(module).call(module, args, kwargs)
        own = module.__dict__ if module is not None else _NOTHING
        known = self._last
        if known is not None:
            try:
                output = known.run(own, args, kwargs)
                if output is MISS and (other := self._known.get(_first_shape(args), known)) is not known:
                    known = self._last = other
                    output = known.run(own, args, kwargs)
            except ForgeError as error:
                self._broken(known.key, known.call, error)
                return self._decline(error.what, module, args, kwargs)
            if output is REFERENCE:
                return self._decline(_reason(known.call), module, args, kwargs)
            if output is not MISS:
                return output
        return self._call(_Site(module, args, kwargs), own, known)

    def _call(self, site: _Site, own: dict[str, Any], missed: _Known | None) -> Any:
        """The long way: every question asked one by one. ``missed`` is the shortcut that did not know this call."""
        if not is_plain():
            return self._decline(obstacle(), *site)
        tensors: list[torch.Tensor] = []
        parts: list[Any] = []
        if not _collect(site.args, tensors, parts) or (site.kwargs and not _collect_named(site.kwargs, tensors, parts)):
            return self._decline(_NOT_PLAIN, *site)
        key = tuple(parts)
        call = self._calls.get(key) or self._bind(key, site, tensors)
        if torch.is_grad_enabled() and _any_requires_grad(tensors, call.circumstances, own):
            return self._train(key, call, site, tensors)
        try:
            output = call.run(tensors, own)
            if output is STALE:
                self._forget()
                call = self._bind(key, site, tensors)
                output = call.run(tensors, own)
        except ForgeError as error:
            call, output = self._broken(key, call, error), REFERENCE
        if output is REFERENCE or output is STALE:
            if isinstance(call, ConfiguredCall) and output is REFERENCE:
                return self._compiled(key, call, site)
            return self._decline(_reason(call), *site)
        if isinstance(call, BoundCall):
            self._learn(key, call, site, missed)
        return output

    def _learn(self, key: tuple[Any, ...], call: BoundCall, site: _Site, missed: _Known | None) -> None:
        """The next call like this one takes the short way."""
        known, made = self._learned.get(key, (None, 0))
        if known is None or known is missed:
            # One that has just missed belongs to another mode; a call that comes in many of them gets no more.
            if made >= _MOST_SHORTCUTS:
                return
            own = site.module.__dict__ if site.module is not None else _NOTHING
            run = shortcut_of(call, own, site.args, site.kwargs)
            known = _Known(run, key, call) if run is not None else None
            self._learned[key] = (known, made + 1)
            if known is None:
                return
        if len(self._known) >= _MOST_SIGNATURES:
            self._known.clear()
        self._known[_first_shape(site.args)] = self._last = known

    def _forget(self) -> None:
        self._calls.clear()
        self._learned.clear()
        self._known.clear()
        self._last = None

    def _compiled(self, key: tuple[Any, ...], call: ConfiguredCall, site: _Site) -> Any:
        """A call that torch's compiler answers; the reference where the compiler fails, before anything ran."""
        reason = call.kernel.obstacle()
        if reason:
            return self._decline(reason, *site)
        lead = () if self._dispatch.kind is None else (site.module,)
        try:
            return call.kernel.run(*lead, *site.args, **site.kwargs)
        except BuildFailure as failure:
            error = failure
        except torch._dynamo.exc.TorchDynamoException as failure:
            first = (str(failure).strip().splitlines() or [""])[0]
            error = BuildFailure(f"torch.compile failed: {type(failure).__name__}: {first[:300]}")
        self._dispatch.warn_once(call.kernel, error)
        self._calls[key] = Refusal(error.what, call.circumstances, call.device)
        return self._decline(error.what, *site)

    def _train(
        self, key: tuple[Any, ...], call: BoundCall | Refusal, site: _Site, tensors: Sequence[torch.Tensor]
    ) -> Any:
        """A call that autograd follows: forward's kernel with its verified backward behind it, if it has one."""
        if not self._dispatch.trains:
            return self._decline(_needs_grad(tensors), *site)
        own = site.module.__dict__ if site.module is not None else _NOTHING
        if not call.circumstances.hold(call.device, own):
            self._forget()
            call = self._bind(key, site, tensors)
        if isinstance(call, Refusal):
            return self._decline(call.reason, *site)
        try:
            backward: BoundBackward | str = call.backward or self._bind_backward(call, site)
            reason = backward if isinstance(backward, str) else backward.obstacle(tensors, own)
            if isinstance(backward, str) or reason:
                return self._decline(reason, *site)
            with torch.no_grad():
                output = call.run(tensors, own)
        except ForgeError as error:
            return self._decline(_reason(self._broken(key, call, error)), *site)
        if output is REFERENCE or output is STALE:
            return self._decline(_reason(call), *site)
        return backward.attached(output, backward.sources(tensors, own))

    def _bind_backward(self, call: BoundCall, site: _Site) -> BoundBackward | str:
        """The backward of a bound forward, or why there is none; kept with it."""
        with self._lock:
            kernel: Kernel = call.kernel
            if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return "first trained call of this signature inside a CUDA graph capture: call once before capturing"
            found: BoundBackward | str = _no_backward(kernel, site, self._dispatch.names)
            if not found:
                leaves, _ = flatten_call(site.args, site.kwargs)
                paths = [path for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)]
                signature = _signature(site, device_facts(call.device), kernel, backward_arguments(call.plan))
                try:
                    loaded = kernel.load_backward(signature, device_name(call.device))
                    found = state_reason(loaded) or BoundBackward(loaded, paths, call.circumstances, call.device)
                except ForgeError as error:
                    self._dispatch.warn_once(kernel, error)
                    found = error.what
            call.backward = found
            return found

    @property
    def ran_on_cpu(self) -> bool:
        """Whether a kernel of this process's CPU was bound."""
        return any(isinstance(call, BoundCall) and call.device.type == "cpu" for call in self._calls.values())

    def begin_anew(self) -> None:
        """Drop bound calls and locks, as after a fork."""
        self._lock = threading.RLock()
        self._calls, self._learned, self._known, self._last = {}, {}, {}, None
        for kernel in self._dispatch.kernels:
            kernel.begin_anew()

    def _of(self, module: Any) -> Attachment:
        """The attachment of a copy, which came with the copied ``__dict__``."""
        if self._owner is None:
            return self.own(module)
        fresh = self._anew().own(module)
        module.__dict__.update({name: fresh for name, value in vars(module).items() if value is self})
        return fresh

    def _decline(self, reason: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.declined[reason] += 1
        if self._dispatch.kind is None:
            return self._dispatch.reference(*args, **kwargs)
        return self._dispatch.reference(module, *args, **kwargs)

    # -- the first call of a signature -------------------------------------------------------------------------

    def _bind(self, key: tuple[Any, ...], site: _Site, tensors: Sequence[torch.Tensor]) -> BoundCall | Refusal:
        with self._lock:
            circumstances = survey(site.module, self._dispatch.held)
            known = [*tensors, *circumstances.tensors(vars(site.module) if site.module is not None else _NOTHING)]
            device = known[0].device if known else torch.device("cpu")
            reason = _unusable(known, device)
            if reason:
                return Refusal(reason, circumstances, device)
            call = self._first_fitting(site, circumstances, device)
            while len(self._calls) >= _MOST_SIGNATURES:
                oldest = next(iter(self._calls))
                self._calls.pop(oldest, None)
                self._learned.pop(oldest, None)
            self._calls[key] = call
            return call

    def _first_fitting(self, site: _Site, circumstances: Circumstances, device: torch.device) -> BoundCall | Refusal:
        leaves, _ = flatten_call(site.args, site.kwargs)
        inputs = [(path, spec_of(leaf) if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves.items()]
        paths = [path for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)]
        training = getattr(site.module, "training", None)
        reasons = []
        for kernel in self._dispatch.best_first(inputs):
            try:
                facts = device_facts(device)
                reason = place_reason(kernel, facts) or guards.refusal(
                    kernel.entry, inputs, self._dispatch.names, training, site.described, site.tensors
                )
                if not reason and isinstance(kernel, Configured):
                    return ConfiguredCall(kernel, circumstances, device)
                if not reason and isinstance(kernel, Kernel):
                    loaded = kernel.load(_signature(site, facts, kernel), device_name(device))
                    reason = state_reason(loaded.main, loaded.prepare)
                if not reason:
                    align_bytes = max(kernel.entry.guard.align_bytes, 1)
                    graphs = self._dispatch.graphs
                    makers = makers_of(kernel.entry.containers, self._dispatch.reference.__module__)
                    given = (paths, circumstances, device, align_bytes, graphs, makers)
                    call = BoundCall(loaded.main, loaded.prepare, *given)
                    call.kernel = kernel
                    return call
            except ForgeError as error:
                reason = self._failure(kernel, inputs, error)
            reasons.append(reason)
        return Refusal("; ".join(dict.fromkeys(reasons)) or "no kernel", circumstances, device)

    def _failure(self, kernel: Kernel | Configured, inputs: Sequence[tuple[str, Leaf]], error: ForgeError) -> str:
        """A refusal by the plan, or anything at all outside the drawn signatures, is no news; the rest warns once."""
        drawn = guards.was_drawn(kernel.entry, inputs, self._dispatch.names)
        if isinstance(error, (SituationError, UsageError)) or (drawn and not isinstance(error, Unsupported)):
            self._dispatch.warn_once(kernel, error)
        return error.what

    def _broken(self, key: tuple[Any, ...], call: BoundCall | Refusal, error: ForgeError) -> Refusal:
        """A launch failed: no more of it. Where it may have begun to write the caller's tensors, say so loudly."""
        if isinstance(call, BoundCall) and call.writes:
            raise error
        if not isinstance(error, Unsupported):
            self._dispatch.warn_once(self._dispatch.kernels[0], error)
        self._learned.clear()
        self._known.clear()
        self._last = None
        refusal = self._calls[key] = Refusal(error.what, call.circumstances, call.device)
        return refusal


def _reason(call: BoundCall | Refusal) -> str:
    return call.reason if isinstance(call, Refusal) else "an input or weight is misaligned, or inputs overlap"


def _needs_grad(tensors: Sequence[torch.Tensor]) -> str:
    who = "inputs require" if any(tensor.requires_grad for tensor in tensors) else "parameters require"
    return f"{who} grad: called without no_grad"


def _any_requires_grad(tensors: Sequence[torch.Tensor], circumstances: Circumstances, own: dict[str, Any]) -> bool:
    for tensor in tensors:
        if tensor.requires_grad:
            return True
    try:
        return any(tensor.requires_grad for tensor in circumstances.tensors(own))
    except (KeyError, IndexError):  # a parameter is gone; the call will find that out
        return False


def _unusable(tensors: Sequence[torch.Tensor], device: torch.device) -> str:
    """Why these inputs and module tensors cannot go to a kernel together; "" where they can."""
    if device.type not in ("cpu", "cuda"):
        return f"tensors are on {device.type}"
    if any(tensor.device != device for tensor in tensors):
        return "inputs and parameters are on several devices"
    if any(type(tensor) not in PLAIN_TYPES or tensor.is_neg() or tensor.is_conj() for tensor in tensors):
        return "a parameter or buffer is no plain tensor"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "first call of this signature inside a CUDA graph capture: call once before capturing"
    return ""


def place_reason(kernel: Kernel | Configured, facts: DeviceFacts) -> str:
    entry = kernel.entry
    if entry.arch not in (facts.arch, f"{facts.arch}a", f"{facts.arch}f"):
        return f"forged for {entry.arch}, called on {facts.arch}"
    if facts.kind == "cpu" and _forked_from_threads:
        return "this process was forked from one where OpenMP threads ran a kernel"
    return ""


def state_reason(*loaded: LoadedPlan | None) -> str:
    """Weights are verified as the module's constructor lays them out, and no probe moves them."""
    for part in loaded:
        for buffer in part.plan.buffers if part else ():
            if buffer.role == "state" and not buffer.spec.contiguous:
                return f"{buffer.source} is not contiguous"
    return ""


def device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"cuda:{device.index}"


def _signature(
    site: _Site, facts: DeviceFacts, kernel: Kernel, more: Mapping[str, Any] = MappingProxyType(_NOTHING)
) -> Signature:
    return Signature.of(site.args, {**site.kwargs, **more}, site.described(), facts, kernel.entry.language)


def _no_backward(kernel: Kernel, site: _Site, names: Sequence[str]) -> str:
    """Why the kernel's gradients cannot serve this call; "" where they can."""
    if not kernel.entry.backward:
        return "the kernel is for forward only: called without no_grad"
    leaves, _ = flatten_call(site.args, site.kwargs)
    inputs = [(path, spec_of(leaf) if isinstance(leaf, torch.Tensor) else leaf) for path, leaf in leaves.items()]
    if not guards.was_drawn(kernel.entry, inputs, names):
        return "gradients were verified for the drawn shapes and strides only"
    return ""


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    # CUDA is in use in this process already: a tensor on the device brought us here.
    return hardware.detect(device_name(device))


# -- the signature of a call -----------------------------------------------------------------------------------


def _collect(values: Sequence[Any], tensors: list[torch.Tensor], parts: list[Any]) -> bool:
    """Append the tensors of ``values`` and what tells one signature from another; False where a leaf is not plain."""
    for value in values:
        kind = type(value)
        if kind in PLAIN_TYPES:
            if value.is_neg() or value.layout is not torch.strided:
                return False
            tensors.append(value)
            parts += (value.shape, value.stride(), value.dtype, value.device)
        elif not _collect_plain(value, kind, tensors, parts):
            return False
    return True


def _collect_plain(value: Any, kind: type, tensors: list[torch.Tensor], parts: list[Any]) -> bool:
    # The kind belongs to the key: 1, 1.0 and True are equal and mean different plans.
    if kind in _PLAIN_SCALARS:
        parts += (kind, value)
        return True
    if kind is float:
        parts += (kind, value.hex())
        return True
    if kind is list or kind is tuple:
        parts += (kind, len(value))
        return _collect(value, tensors, parts)
    return kind is dict and _collect_named(value, tensors, parts)


def _collect_named(values: dict[Any, Any], tensors: list[torch.Tensor], parts: list[Any]) -> bool:
    if not all(type(name) in (str, int) for name in values):
        return False
    parts += (dict, *((type(name), name) for name in values))
    return _collect(tuple(values.values()), tensors, parts)


# -- forks -----------------------------------------------------------------------------------------------------

_alive: weakref.WeakSet[Attachment] = weakref.WeakSet()
_forked_from_threads = False


def _after_fork() -> None:
    """In a forked child (a data loader's worker) threads that held a lock are gone, and so are OpenMP's.

    A kernel that has run in the parent left OpenMP believing in a pool of threads that the child does not have; the
    next parallel region would wait for them for ever. So the child binds anew, and on the CPU to the reference.
    """
    global _forked_from_threads
    alive = list(_alive)
    _forked_from_threads = _forked_from_threads or any(attachment.ran_on_cpu for attachment in alive)
    for attachment in alive:
        attachment.begin_anew()


os.register_at_fork(after_in_child=_after_fork)
