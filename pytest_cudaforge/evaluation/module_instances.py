"""A candidate's ModelNew and its instances: the one that is called, and those that live on beside it."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import random
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.evaluation import extensions
from pytest_cudaforge.evaluation.initial import decode_init, other_settings
from pytest_cudaforge.evaluation.module_answers import WRITTEN
from pytest_cudaforge.evaluation.module_faults import CandidateError, CandidateFile
from pytest_cudaforge.evaluation.module_requests import BUILD_REFUSED, LAUNCH_REFUSED, ModuleRecipe, NewInstance
from pytest_cudaforge.evaluation.room import within

if TYPE_CHECKING:
    import torch

__all__ = ["Instances"]

_CLASS_NAME = "ModelNew"
#: How long instances are made, and how many at most, until one lies where another lay.
_CONSTRUCTING_NS, _MOST_ELSEWHERE = 100_000_000, 12
#: Weights of an instance of twice the size, of the one before.
_MOST_DOUBLED_BYTES = 1 << 24
#: What another instance of other settings may take on the host, and on the device, in bytes; and how long the one
#: before may have taken, in ns.
_MOST_BESIDE_BYTES, _MOST_BESIDE_DEVICE_BYTES, _MOST_BESIDE_NS = 1 << 30, 1 << 28, 500_000_000
#: Objects of Python's that are made until one lies at a place that has just become free: more than had been free
#: before, which come first where the place's neighbours had gone earlier.
_MOST_FILLERS = 1 << 18
#: Before anybody can change it.
_clock = time.perf_counter_ns


class Instances:
    """Raises CandidateError, with the candidate's own frames, where its code does not import, construct or copy."""

    def __init__(self, file: CandidateFile, recipe: ModuleRecipe, device: torch.device) -> None:
        import torch

        self._torch, self._file, self._recipe, self.device = torch, file, recipe, device
        #: Instances made before, which live on beside the one that is called.
        self._others: list[Any] = []
        #: What the candidate's constructor took, the last time.
        self._constructing_ns = 0
        #: The one that is called, its parameters and buffers by path, and those of them that a checkpoint knows.
        self.model: Any = None
        self.state: dict[str, torch.Tensor] = {}
        self._saved: frozenset[str] = frozenset()
        #: Plain attributes, which forward may put another tensor into.
        self.attributes: dict[str, torch.Tensor] = {}
        self._class = file.guarded(BUILD_REFUSED, "importing the file", self._import)

    def _import(self) -> Any:
        name = "cudaforge_candidate"
        spec = importlib.util.spec_from_file_location(name, self._file.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        found, Module = getattr(module, _CLASS_NAME, None), self._torch.nn.Module
        if not isinstance(found, type) or not issubclass(found, Module):
            raise CandidateError(
                BUILD_REFUSED,
                f"the file defines no {_CLASS_NAME}\n  expected: class {_CLASS_NAME}(torch.nn.Module) at module level",
            )
        own = [name for name in ("__call__", "_call_impl") if getattr(found, name) is not getattr(Module, name)]
        if own:
            raise CandidateError(
                BUILD_REFUSED,
                f"{_CLASS_NAME} has a {own[0]} of its own, past which no hook and no wrapper of the module comes\n"
                "  expected: forward alone",
            )
        return found

    def construct(self, fillers: list[Any] | None = None) -> None:
        """``fillers``: whose last one goes, and leaves its place to the instance."""
        args, kwargs = decode_init(self._recipe.init)
        self._seed()

        def made() -> Any:
            if fillers:
                fillers.pop()
            return self._class(*args, **kwargs)

        began = _clock()
        model = self._file.guarded(LAUNCH_REFUSED, f"constructing {_CLASS_NAME}", made)
        self._constructing_ns = _clock() - began
        if self._recipe.mode:
            model.train(self._recipe.mode == "train")
        self._take(self._file.guarded(LAUNCH_REFUSED, "moving it to the device", lambda: model.to(self.device)))

    def add(self, how: NewInstance) -> None:
        """Another instance, which is called from now on; those before live on."""
        if how == "otherwise":
            self._construct_otherwise()
            return
        self._others.append(self.model)
        if how == "beside":
            self.construct()
        else:
            copied = functools.partial(self._copied, as_old=how == "copy as old")
            self._take(self._file.guarded(LAUNCH_REFUSED, "copying it (copy.deepcopy)", copied))

    def _copied(self, *, as_old: bool) -> Any:
        """A deep copy whose weights have been written oftener than those that it was copied from, or, once others are
        loaded, as often (``as_old``): who knows its weights by their version takes them for the first one's. torch
        parts a copy's parameters from what shared their memory: of no use then."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self.state.values()}
        own = (value for module in self.model.modules() for value in vars(module).values())
        if any(isinstance(v, self._torch.Tensor) and v.untyped_storage().data_ptr() in weights for v in own):
            raise ValueError("parts of it share its parameters' memory")
        copied = copy.deepcopy(self.model)
        for old, new in zip(self.model.parameters(), copied.parameters(), strict=True):
            wanted = old._version - 1 if as_old else old._version + 1
            while new.is_floating_point() and new._version < wanted:
                new.mul_(1)
        return copied

    def replace(self, how: NewInstance, alike: Sequence[torch.Tensor]) -> None:
        """An instance alone, the "next" one, or where the one before lay if the allocator can be brought to it: its
        weights, or itself. ``alike``: what others write where memory has become free."""
        self._others = []
        if how == "next":
            del self.model, self.state
            gc.collect()
            self.construct()
            return
        before, number = {tensor.data_ptr() for tensor in self.state.values()}, id(self.model)
        del self.model, self.state
        gc.collect()
        written = [self._torch.full_like(tensor, WRITTEN) for tensor in alike]
        del written
        if how == "alone":
            self._construct_at(number)
            return
        until = _clock() + _CONSTRUCTING_NS
        elsewhere: list[Any] = []
        while True:
            self.construct()
            if before & {tensor.data_ptr() for tensor in self.state.values()}:
                return
            if _clock() > until or len(elsewhere) == _MOST_ELSEWHERE:
                return
            elsewhere.append(self.model)

    def _construct_at(self, number: int) -> None:
        """An instance whose ``id`` is this one, if Python's allocator can be brought to it."""
        until = _clock() + 4 * _CONSTRUCTING_NS
        self.construct(self._fillers(number))
        # What is made on the way to an object may take its place for a moment.
        while id(self.model) != number and _clock() < until:
            del self.model, self.state
            self.construct(self._fillers(number))

    def _fillers(self, number: int) -> list[Any]:
        """Objects of the class until one lies at this place: when that one goes, its place is Python's next."""
        fillers: list[Any] = []
        while not hasattr(self._class, "__del__") and len(fillers) < _MOST_FILLERS:
            fillers.append(object.__new__(self._class))
            if id(fillers[-1]) == number:
                break
        return fillers

    def call_others(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Of some, whose sizes are those of the first one, so that the same inputs fit; nobody promised that they take
        the call."""
        others = len(self._others)
        self._construct_otherwise(sizes=False)
        for model in self._others[others:]:
            if self._recipe.mode:
                model.train(self._recipe.mode == "train")
            with contextlib.suppress(CandidateError):
                moving = functools.partial(model.to, self.device)
                moved = self._file.guarded(LAUNCH_REFUSED, "moving it to the device", moving)
                self._file.guarded(LAUNCH_REFUSED, "forward", functools.partial(moved, *args, **kwargs))
        del self._others[others:]  # what it leaves to all of its class stays, its weights need not
        extensions.missing()

    def _construct_otherwise(self, *, sizes: bool = True) -> None:
        """Another layer of the network: with other settings, if it takes such and they need no extension of their own;
        where they leave all ``sizes`` alone, one for each kind of settings that it takes, and one for each setting by
        itself where weights are small.
        Nobody promised that it does. Weights of some size stay as large as they are, as do all where nothing that may
        be a size is to change, and what takes long, or far more memory (a number may be an exponent), is left out."""
        if self._constructing_ns > _MOST_BESIDE_NS:
            return
        given = decode_init(self._recipe.init)
        small = sum(tensor.nbytes for tensor in self.state.values()) <= _MOST_DOUBLED_BYTES
        whole, alone = sizes and small, small and not sizes
        settings = self._file.guarded(
            LAUNCH_REFUSED, "its signature", lambda: other_settings(self._class, *given, whole, alone)
        )
        for args, kwargs in settings:
            self._seed()
            made = functools.partial(self._class, *args, **kwargs)
            before = self._allocated()
            try:
                with within("cpu", _MOST_BESIDE_BYTES):
                    self._others.append(self._file.guarded(LAUNCH_REFUSED, f"constructing {_CLASS_NAME}", made))
            except CandidateError:
                continue
            finally:
                extensions.missing()
            if self._allocated() - before > _MOST_BESIDE_DEVICE_BYTES:
                del self._others[-1]
            elif sizes:
                return
            gc.collect()
            self._torch.cuda.empty_cache()

    def _allocated(self) -> int:
        """Bytes of the device's memory that tensors have; a CPU's process has a limit of its own."""
        return 0 if self.device.type == "cpu" else int(self._torch.cuda.memory_allocated(self.device))

    def _take(self, model: Any) -> None:
        self.model = model.requires_grad_(False)
        self._saved = frozenset(self._file.guarded(LAUNCH_REFUSED, "state_dict()", model.state_dict))
        self.state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.attributes = {
            path: tensor
            for path in self._recipe.written
            if path not in self.state and (tensor := self.attribute(path)) is not None
        }

    def replaced(self) -> bool:
        """Has a call put other parameters or buffers in the place of those that a checkpoint knows, or other values?"""
        now = self._file.guarded(LAUNCH_REFUSED, "state_dict()", lambda: self.model.state_dict(keep_vars=True))
        kept = {path: tensor for path, tensor in self.state.items() if path in self._saved}
        for path, tensor in kept.items():
            other = now.get(path)
            if other is tensor:
                continue
            if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
                return True
            if not self._torch.equal(other, tensor):
                return True
        return False

    def _seed(self) -> None:
        """As the oracle seeds before it constructs the reference."""
        seed = self._recipe.seed
        self._torch.manual_seed(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))

    def attribute(self, path: str) -> torch.Tensor | None:
        """The tensor that a plain attribute holds now."""
        value: Any = self.model
        for name in path.split("."):
            if name.isdigit() and isinstance(value, (list, tuple)):
                value = value[int(name)] if int(name) < len(value) else None
            else:
                value = getattr(value, name, None)
        return value if type(value) is self._torch.Tensor else None
