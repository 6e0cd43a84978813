"""What of a module a traced plan depends on, so that one cheap look tells whether it still holds.

A plan is specialised to a module's attributes and to its tensors' metadata. Tracing again on every call would cost
milliseconds; this walks the module once, as :func:`runtime.signature.describe_module` does, and remembers which dict
entry held what.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from pytest_cudaforge.runtime.signature import config_attributes

__all__ = ["PLAIN_TYPES", "Circumstances", "Slot", "same", "survey", "tensor_in"]

#: Subclasses (DTensor, FakeTensor, quantised wrappers, ...) have semantics of their own and go to the reference.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
_SIMPLE = (bool, int, float, str, type(None), torch.dtype)


class Slot(NamedTuple):
    """Where a tensor of the module lies (``container[name]``, None: the module's own dict) and the metadata it had."""

    path: str
    container: Any
    name: Any
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


class Circumstances(NamedTuple):
    """``own``: (name, value then) of the module's own dict; ``probes``: (container, name, value then); ``slots``.

    The module's own dict is not kept but given to each call: the module holds what holds this, and through such a
    circle a deleted model would keep its memory until the next garbage collection.
    """

    own: tuple[tuple[str, Any], ...] = ()
    probes: tuple[tuple[Any, Any, Any], ...] = ()
    slots: tuple[Slot, ...] = ()

    def hold(self, device: torch.device, own: dict[str, Any]) -> bool:
        """Whether attributes and tensors' metadata are as they were, and the tensors on this device."""
        try:
            for name, value in self.own:
                if own[name] is not value and not same(own[name], value):
                    return False
            for container, name, value in self.probes:
                now = container[name]
                if now is not value and not same(now, value):
                    return False
            return all(self._slot_holds(slot, device, own) for slot in self.slots)
        except (KeyError, IndexError, RuntimeError):  # an attribute is gone, or a tensor has no strides any more
            return False

    @staticmethod
    def _slot_holds(slot: Slot, device: torch.device, own: dict[str, Any]) -> bool:
        tensor = tensor_in(slot, own)
        return (
            type(tensor) in PLAIN_TYPES
            and tensor.dtype is slot.dtype
            and tensor.shape == slot.shape
            and tensor.stride() == slot.strides
            and tensor.device == device
        )

    def tensors(self, own: dict[str, Any]) -> Iterator[torch.Tensor]:
        """The module's tensors as they are now. Raises KeyError or IndexError where one is gone."""
        for slot in self.slots:
            yield tensor_in(slot, own)


def tensor_in(slot: Slot, own: dict[str, Any]) -> torch.Tensor:
    """What lies in a slot now."""
    found: torch.Tensor = (own if slot.container is None else slot.container)[slot.name]
    return found


def survey(module: torch.nn.Module | None, held: Collection[str] = ()) -> Circumstances:
    """Everything :func:`describe_module` mentions of ``module``. A tensor of another type is left to the caller.

    ``held``: paths of tensors whose values count, too. Every in-place change outside ``.data`` is seen.
    """
    if module is None:
        return Circumstances()
    walk = _Walk()
    walk.module(module, "")
    own = vars(module)
    return Circumstances(
        own=tuple((name, value) for container, name, value in walk.probes if container is own),
        probes=(
            *(probe for probe in walk.probes if probe[0] is not own),
            *((_Values(module, slot), None, True) for slot in walk.slots if slot.path in held),
        ),
        slots=tuple(slot._replace(container=None) if slot.container is own else slot for slot in walk.slots),
    )


def same(now: Any, then: Any) -> bool:
    """Equality for plain values and containers of them (-0.0 is not 0.0, 1 is not True), identity for all else."""
    if type(now) is not type(then):
        return False
    if isinstance(now, float):
        return bool(now.hex() == then.hex())
    if isinstance(now, _SIMPLE):
        return bool(now == then)
    if isinstance(now, (list, tuple)):
        return len(now) == len(then) and all(a is b or same(a, b) for a, b in zip(now, then, strict=True))
    if isinstance(now, dict):
        return list(now) == list(then) and all(now[key] is then[key] or same(now[key], then[key]) for key in now)
    return now is then


class _Walk:
    def __init__(self) -> None:
        self.probes: list[tuple[Any, Any, Any]] = []
        self.slots: list[Slot] = []
        self._open: set[int] = set()

    def module(self, module: torch.nn.Module, path: str) -> None:
        if id(module) in self._open:  # a cycle
            return
        self._open.add(id(module))
        own = vars(module)
        for container in (module._parameters, module._buffers, module._modules, own):
            for name, value in list(container.items()):
                if not name.startswith("_"):
                    self._entry(container, name, value, f"{path}.{name}" if path else name)
        if isinstance(module, _CONTAINERS):
            self.probes.append((_Length(module._modules), None, len(module._modules)))
        self._open.discard(id(module))

    def _entry(self, container: Any, name: Any, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            self.slots.append(Slot(path, container, name, value.dtype, value.shape, value.stride()))
        elif isinstance(value, torch.nn.Module):
            self.probes.append((container, name, value))
            self.module(value, path)
        elif isinstance(value, (*_SIMPLE, torch.Tensor)):
            self.probes.append((container, name, value))
        elif isinstance(value, (list, tuple, dict)):
            self.probes.append((container, name, _snapshot(value)))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in list(items):
                if not isinstance(item, _SIMPLE):
                    self._entry(value, key, item, f"{path}.{key}")
        else:
            self._config(container, name, value, path)

    def _config(self, container: Any, name: Any, value: Any, path: str) -> None:
        """A configuration object is mirrored in the signature like a submodule, so its attributes count."""
        attributes = config_attributes(value)
        if attributes is None or id(value) in self._open:
            return
        self._open.add(id(value))
        self.probes.append((container, name, value))
        for key, item in list(attributes.items()):
            if not key.startswith("_"):
                self._entry(attributes, key, item, f"{path}.{key}")
        self._open.discard(id(value))


class _Length:
    """A dict's length, asked like an entry: an added submodule is seen by the same loop as a changed attribute."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getitem__(self, _: None) -> int:
        return len(self._container)


class _Values:
    """Are a tensor's values as they were? Asked like an entry, which is True for as long as they are."""

    def __init__(self, module: torch.nn.Module, slot: Slot) -> None:
        # The module's own dict holds what holds this.
        own = slot.container is vars(module)
        self._container: Callable[[], Any] = _own_dict(module) if own else lambda: slot.container
        self._name = slot.name
        tensor = self._container()[self._name]
        self._tensor, self._stamp = weakref.ref(tensor), _stamp_of(tensor)

    def __getitem__(self, _: None) -> bool:
        now: torch.Tensor = self._container()[self._name]
        # One that counts no versions hides its changes.
        return self._stamp is not None and now is self._tensor() and _stamp_of(now) == self._stamp


def _own_dict(module: torch.nn.Module) -> Callable[[], dict[str, Any]]:
    reference = weakref.ref(module)
    return lambda: vars(reference())


def _stamp_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    return None if tensor.is_inference() else (tensor.data_ptr(), tensor._version)


def _snapshot(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_snapshot(item) for item in value)
    return value
