"""``apply(model)``: production's way to forged kernels, with the reference behind every one of them.

How a swap is made: the target class's ``forward`` becomes one that looks for an attachment in the instance's own
``__dict__``. The class stays the same object and instances keep their class, so ``state_dict``, ``.to()``, hooks,
pickling and ``torch.compile`` work as before (:mod:`runtime.dynamo`). Only modules that were applied have an
attachment; a deep copy gets one of its own, a pickle carries a plain string that means nothing to whoever loads it.

A call goes to the kernel where everything that was verified holds (device arch, dtype, shape, strides, alignment,
mode) and torch is doing nothing special; otherwise to the reference. A kernel that cannot be built or loaded warns
once, and the reference runs.
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from pytest_cudaforge import languages
from pytest_cudaforge.errors import BuildFailure, ConfigError, UsageError
from pytest_cudaforge.runtime import dynamo, lookup
from pytest_cudaforge.runtime.attachment import Attachment, Dispatch, ForgeWarning
from pytest_cudaforge.runtime.configuration import LANGUAGE
from pytest_cudaforge.runtime.configured import Configured
from pytest_cudaforge.runtime.kernels import Kernel
from pytest_cudaforge.runtime.lookup import Located
from pytest_cudaforge.runtime.manifest import Entry
from pytest_cudaforge.runtime.modes import disabled
from pytest_cudaforge.target import options_of

__all__ = ["ApplyReport", "ForgeWarning", "Kept", "Swapped", "apply", "disabled", "restore"]

#: Name of the attachment in an instance's ``__dict__``; with an underscore, so that no plan or signature sees it.
ATTACHMENT = "_cudaforge_attachment"
#: Attributes of a ``forward`` (or function) that dispatches.
_REFERENCE = "__cudaforge_reference__"
_FUNCTION = "__cudaforge_attachment__"


# -- the report ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swapped:
    """One module (``path`` in the model, "" for the model itself) or function whose calls may go to a kernel."""

    path: str
    target: str
    kernel: str
    note: str = ""


@dataclass(frozen=True)
class Kept:
    """One target that keeps its reference, and why."""

    path: str
    target: str
    reason: str


@dataclass(frozen=True)
class ApplyReport:
    """What :func:`apply` did. ``str(report)`` is readable; ``fallbacks`` is live: calls that took the reference."""

    swapped: tuple[Swapped, ...]
    kept: tuple[Kept, ...]
    _attachments: tuple[tuple[str, weakref.ref[Attachment]], ...] = field(default=(), repr=False, compare=False)

    @property
    def fallbacks(self) -> dict[str, dict[str, int]]:
        """By path: why calls since then took the reference, and how many."""
        found = {}
        for path, reference in self._attachments:
            attachment = reference()
            if attachment is not None and attachment.declined:
                found[path] = dict(attachment.declined)
        return found

    @property
    def compiled(self) -> dict[str, dict[str, int]]:
        """By path: what ``torch.compile`` was given for it ("kernel", or "reference: " and why), and how often; modules
        of one class with the same attributes are counted together."""
        found = {}
        for path, reference in self._attachments:
            attachment = reference()
            if attachment is not None and dynamo.decisions(attachment.form):
                found[path] = dynamo.decisions(attachment.form)
        return found

    def __str__(self) -> str:
        lines = [f"forged kernels: {len(self.swapped)} swapped, {len(self.kept)} kept"]
        lines += [
            f"  swapped {_place(row.path)}: {row.target} -> {row.kernel}{_note(row.note)}" for row in self.swapped
        ]
        lines += [f"  kept {_place(row.path)}: {row.target}: {row.reason}" for row in self.kept]
        for path, reasons in self.fallbacks.items():
            lines += [f"  reference ran {count} x in {_place(path)}: {reason}" for reason, count in reasons.items()]
        for path, what in self.compiled.items():
            lines += [f"  compiled {count} x in {_place(path)}: {word}" for word, count in what.items()]
        return "\n".join(lines)


def _place(path: str) -> str:
    return path or "(the model itself)"


def _note(note: str) -> str:
    return f" ({note})" if note else ""


# -- apply -----------------------------------------------------------------------------------------------------


def apply(
    model: torch.nn.Module | types.ModuleType, *, manifest: str | Path | None = None, graphs: bool = False
) -> ApplyReport:
    """Let the targets in ``model`` run their forged kernels wherever these were verified; returns what was done.

    ``model`` is an ``nn.Module``, whose submodules (and itself) of a marked class are swapped in place; or a Python
    module, whose marked functions are replaced by dispatching ones under the same names: code that calls them as
    ``layers.gelu(x)`` is served, a ``from layers import gelu`` made before is not.

    ``manifest`` is a manifest.json or the folder that holds it. Without it ``forged/manifest.json`` is looked for
    beside the target's own file and upwards to the folder its package is imported from (so a package finds what it
    ships), then from the working directory upwards to the repository's root. Applying again replaces what was applied.

    ``graphs``: on a GPU, a plan of several launches is captured as a CUDA graph when a call with the same addresses
    comes again, and its output is copied out of the graph's memory. Worth it for plans of many short launches.

    Raises UsageError for any other ``model``, ConfigError where ``manifest`` is given and cannot be read.
    """
    located = None if manifest is None else lookup.named_manifest(manifest)
    run = _Run(located, graphs)
    if isinstance(model, torch.nn.Module):
        for path, module in model.named_modules():
            run.module(path, module)
    elif isinstance(model, types.ModuleType):
        for name, value in list(vars(model).items()):
            if isinstance(value, types.FunctionType) and options_of(value) is not None:
                run.function(model, name, value)
    else:
        raise UsageError(
            f"apply() was given a {type(model).__name__}",
            expected="an nn.Module, or a Python module with marked functions",
        )
    return ApplyReport(tuple(run.swapped), tuple(run.kept), tuple(run.attachments))


def restore(model: torch.nn.Module | types.ModuleType) -> None:
    """Undo :func:`apply`: the reference runs everywhere in ``model`` again."""
    if isinstance(model, torch.nn.Module):
        for module in model.modules():
            module.__dict__.pop(ATTACHMENT, None)
        return
    for name, value in list(vars(model).items()):
        if hasattr(value, _FUNCTION):
            setattr(model, name, getattr(value, _REFERENCE))


class _Run:
    """One :func:`apply`: manifests found, dispatches made (one per class or function), rows of the report."""

    def __init__(self, located: Located | None, graphs: bool) -> None:
        self._located, self._graphs = located, graphs
        self._dispatches: dict[Any, Dispatch | str] = {}
        self.swapped: list[Swapped] = []
        self.kept: list[Kept] = []
        self.attachments: list[tuple[str, weakref.ref[Attachment]]] = []

    def module(self, path: str, module: torch.nn.Module) -> None:
        kind = type(module)
        if options_of(kind) is None and not self._is_kernelbench(kind):
            return
        module.__dict__.pop(ATTACHMENT, None)
        if "forward" in vars(module):
            self._keep(path, kind, "its forward was replaced on the instance")
            return
        dispatch = self._dispatch(kind)
        if isinstance(dispatch, str):
            self._keep(path, kind, dispatch)
            return
        reason, note = _fit(dispatch, module)
        if reason:
            self._keep(path, kind, reason)
            return
        _install(kind, dispatch.reference)
        attachment = Attachment(dispatch).own(module)
        attachment.form = dynamo.form_of(module, dispatch.kernels, dispatch.names)
        module.__dict__[ATTACHMENT] = attachment
        self._swap(path, dispatch, attachment, note)

    def function(self, namespace: types.ModuleType, name: str, value: Callable[..., Any]) -> None:
        reference = getattr(value, _REFERENCE, value)
        dispatch = self._dispatch(reference)
        if isinstance(dispatch, str):
            setattr(namespace, name, reference)
            self._keep(name, reference, dispatch)
            return
        attachment = Attachment(dispatch).own(None)
        attachment.form = dynamo.form_of(None, dispatch.kernels, dispatch.names)
        setattr(namespace, name, _dispatching_function(reference, attachment))
        self._swap(name, dispatch, attachment, "; ".join(_configurations(dispatch)))

    def _keep(self, path: str, target: Any, reason: str) -> None:
        self.kept.append(Kept(path, f"{target.__module__}.{target.__qualname__}", reason))

    def _swap(self, path: str, dispatch: Dispatch, attachment: Attachment, note: str) -> None:
        target = dispatch.kernels[0].entry.target
        kernels = ", ".join(kernel.entry.directory for kernel in dispatch.kernels)
        self.swapped.append(Swapped(path, target, kernels, note))
        self.attachments.append((path, weakref.ref(attachment)))

    def _is_kernelbench(self, kind: type) -> bool:
        located = self._located_for(kind) if kind.__qualname__ == "Model" else None
        entries = lookup.entries_for(kind, located) if isinstance(located, Located) else ()
        return any(entry.kind == "kernelbench" for entry in entries)

    def _dispatch(self, target: Any) -> Dispatch | str:
        if target not in self._dispatches:
            self._dispatches[target] = self._new_dispatch(target)
        return self._dispatches[target]

    def _located_for(self, target: Any) -> Located | str:
        if self._located is not None:
            return self._located
        try:
            found = lookup.find_manifest(target)
        except ConfigError as error:
            warnings.warn(str(error), ForgeWarning, stacklevel=2)
            return error.what
        return found or "no forged/manifest.json was found; forge first, or name it with apply(model, manifest=...)"

    def _new_dispatch(self, target: Any) -> Dispatch | str:
        located = self._located_for(target)
        if isinstance(located, str):
            return located
        entries = lookup.entries_for(target, located)
        if not entries:
            return f"no forged kernel for it in {located.path}"
        # Kernels for other workloads may have been forged at other times.
        stale = [lookup.staleness(target, entry) for entry in entries]
        entries = tuple(entry for entry, reason in zip(entries, stale, strict=True) if not reason)
        if not entries:
            return stale[0]
        is_class = isinstance(target, type)
        reference = _own_forward(target) if is_class else target
        kernels, reasons = _kernels(entries, located, reference)
        if not kernels:
            return "; ".join(reasons)
        return Dispatch(target if is_class else None, reference, kernels, self._graphs)


def _kernels(
    entries: Sequence[Entry], located: Located, reference: Callable[..., Any]
) -> tuple[list[Kernel | Configured], list[str]]:
    """The entries that can be used here, and for the others why not. A kernel goes before the compiler."""
    kernels: list[Kernel | Configured] = []
    reasons = []
    for entry in sorted(entries, key=lambda entry: entry.language == LANGUAGE):
        reason = _language_reason(entry)
        if not reason:
            try:
                sources, folder = lookup.verified_sources(entry, located), located.path.parent / entry.directory
                configured = entry.language == LANGUAGE
                kernels.append(
                    Configured(entry, folder, sources, reference) if configured else Kernel(entry, folder, sources)
                )
            except (ConfigError, BuildFailure) as error:
                reason = error.what
                warnings.warn(str(error), ForgeWarning, stacklevel=2)
        reasons += [reason] if reason else []
    return kernels, reasons


def _language_reason(entry: Entry) -> str:
    if entry.language not in languages.LANGUAGES and entry.language != LANGUAGE:
        return f"{entry.directory} is of the tier {entry.language!r}, which has host code of its own: not dispatched"
    return ""


def _fit(dispatch: Dispatch, module: torch.nn.Module) -> tuple[str, str]:
    """Why no kernel can serve this module on this machine, and a note about what has to happen first."""
    device = next((t.device.type for t in (*module.parameters(), *module.buffers())), None)
    archs = sorted({kernel.entry.arch for kernel in dispatch.kernels})
    on_gpu, on_cpu = any(arch != "cpu" for arch in archs), "cpu" in archs
    served = (device in (None, "cpu") and on_cpu) or (device in (None, "cuda") and on_gpu)
    if not served and not torch.cuda.is_available():
        return f"forged for {', '.join(archs)}; the module is on {device} and torch sees no GPU here", ""
    notes = [] if served else [f"forged for {', '.join(archs)}; the module is on {device}"]
    modes = {kernel.entry.mode for kernel in dispatch.kernels}
    if modes == {"eval"} and module.training:
        notes.append("in train mode now: the reference runs until .eval()")
    return "", "; ".join([*notes, *_configurations(dispatch)])


def _configurations(dispatch: Dispatch) -> list[str]:
    """What is no kernel says so."""
    found = [kernel for kernel in dispatch.kernels if isinstance(kernel, Configured)]
    return [f"compiler configuration {kernel.configuration}, compiled at the first call" for kernel in found]


# -- the swapped forward ---------------------------------------------------------------------------------------


def _own_forward(kind: type) -> Callable[..., Any]:
    forward = kind.forward  # type: ignore[attr-defined]
    return getattr(forward, _REFERENCE, forward)  # type: ignore[no-any-return]


def _install(kind: type, reference: Callable[..., Any]) -> None:
    """Give the class a ``forward`` that looks for an attachment; once per class and process."""
    if hasattr(vars(kind).get("forward"), _REFERENCE):
        return

    @functools.wraps(reference)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        attachment = self.__dict__.get(ATTACHMENT)
        if is_dynamo_compiling():  # Dynamo folds this to True
            if type(attachment) is Attachment and type(self) is kind and attachment.form:
                served, output = dynamo.traced(self, attachment.form, args, kwargs)
                if served:
                    return output
            return reference(self, *args, **kwargs)
        if type(attachment) is not Attachment or type(self) is not kind:
            return reference(self, *args, **kwargs)
        return attachment.call(self, args, kwargs)

    setattr(forward, _REFERENCE, reference)
    kind.forward = forward  # type: ignore[attr-defined]


def _dispatching_function(reference: Callable[..., Any], attachment: Attachment) -> Callable[..., Any]:
    form = attachment.form

    @functools.wraps(reference)
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            served, output = dynamo.traced(None, form, args, kwargs) if form else (False, None)
            return output if served else reference(*args, **kwargs)
        return attachment.call(None, args, kwargs)

    setattr(function, _REFERENCE, reference)
    setattr(function, _FUNCTION, attachment)
    return function
