"""The same call again: one look in C at all tensors of a call, and if nothing changed straight to the launches.

A dispatched call has to be sure that everything its plan was traced for still holds. Asked in Python, that is five
attributes a tensor; torch's compiler has a C function for the same question (``TensorGuards``: type, dispatch keys,
dtype, device, shape, strides, ``requires_grad``). Dispatch keys include what this thread is doing: autocast, inference
mode, transforms, tracing and dispatch modes change them, so that such a call misses and takes the long way, which
knows what to do. All of this is private to torch: where a part of it is missing there are no shortcuts, and nothing
else changes.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad

from pytest_cudaforge.runtime.calls import REFERENCE, BoundCall, Direct, on_device
from pytest_cudaforge.runtime.circumstances import PLAIN_TYPES, same
from pytest_cudaforge.runtime.modes import function_modes, switched_off

__all__ = ["MISS", "Shortcut", "shortcut_of"]

#: A shortcut's answer where it does not know the call.
MISS = object()
#: ``(own, args, kwargs)`` -> output, REFERENCE or MISS; ``own`` is the module's ``__dict__``.
Shortcut = Callable[[dict[str, Any], tuple[Any, ...], Mapping[str, Any]], Any]

_SCALARS = (bool, int, float, str, type(None))
_guards = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


def _nothing() -> Any:
    raise AssertionError("a plan that is not direct has no parts")


_NOT_DIRECT = Direct(_nothing, None, None, [], 0, _nothing, [], _nothing)


def shortcut_of(
    call: BoundCall, own: dict[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Shortcut | None:
    """A shortcut for calls like this one, which ``call`` has just answered; None where there can be none.

    Arguments may be tensors, numbers, strings and None; containers go the long way.
    """
    values = (*args, *kwargs.values())
    places = [place for place, value in enumerate(values) if type(value) in PLAIN_TYPES]
    scalars = [(place, value) for place, value in enumerate(values) if type(value) in _SCALARS]
    if not places or len(places) + len(scalars) < len(values):
        return None
    tensors = [*(values[place] for place in places), *call.circumstances.tensors(own)]
    check = _checker(tensors)
    if check is None:
        return None
    run = _guarded(call, check, (len(args), tuple(kwargs)), (places, scalars), _any_graded(tensors))
    return on_device(run, call.device.index) if call.several_devices else run


def _any_graded(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _checker(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """What says whether tensors are like these, called as now; None where this torch cannot tell."""
    first: dict[int, int] = {}
    twins = [(place, first[id(t)]) for place, t in enumerate(tensors) if first.setdefault(id(t), place) != place]
    unique = [tensors[place] for place in first.values()]
    sizes, strides = [list(tensor.shape) for tensor in unique], [list(tensor.stride()) for tensor in unique]
    try:
        check: Callable[..., bool] = _guards(*unique, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[misc]
        if check(*unique) is not True:
            return None
    except (TypeError, SystemError, RuntimeError):  # another torch's idea of this class, or none
        return None
    return _with_twins(check, twins, list(first.values())) if twins else check


def _with_twins(
    check: Callable[..., bool], twins: Sequence[tuple[int, int]], unique: Sequence[int]
) -> Callable[..., bool]:
    """TensorGuards wants every tensor once: one that came twice has to come twice again, at the same places."""

    def check_unique(*tensors: torch.Tensor) -> bool:
        for place, first in twins:
            if tensors[place] is not tensors[first]:
                return False
        return check(*[tensors[place] for place in unique])

    return check_unique


def _guarded(
    call: BoundCall,
    check: Callable[..., bool],
    form: tuple[int, tuple[str, ...]],
    arguments: tuple[Sequence[int], Sequence[tuple[int, Any]]],
    graded: bool,
) -> Shortcut:
    """Everything in local names and in one frame: on a GPU's host an attribute look-up here and a frame there add up
    to a third of a call."""
    own_probes, probes, slots = call.circumstances
    count, keywords = form
    places, scalars = arguments
    holders = [(slot.container, slot.name) for slot in slots]
    # Most modules have one weight, or none.
    holder, name_held = holders[0] if len(holders) == 1 and holders[0][0] is not None else (None, "")
    direct = call.direct(len(places))
    straight = direct is not None
    new, pick, new_arena, layout, mask, current_stream, bounds, take = direct or _NOT_DIRECT
    reduce, either, data_ptr = functools.reduce, operator.or_, torch.Tensor.data_ptr
    grad_enabled = torch.is_grad_enabled

    def run(own: dict[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if (
            len(args) != count
            or switched_off()
            or function_modes()
            or forward_ad._current_level >= 0
            or (graded and grad_enabled())
        ):
            return MISS
        values: Any = args
        if keywords or kwargs:
            if tuple(kwargs) != keywords:
                return MISS
            values = (*args, *kwargs.values())
        if scalars:
            for place, value in scalars:
                now = values[place]
                if now is not value and not same(now, value):
                    return MISS
            values = [values[place] for place in places]
        try:
            for name, value in own_probes:
                now = own[name]
                if now is not value and not same(now, value):
                    return MISS
            for container, name, value in probes:
                now = container[name]
                if now is not value and not same(now, value):
                    return MISS
            if holder is not None:
                tensors = (*values, holder[name_held])
            else:
                tensors = (*values, *[(own if where is None else where)[name] for where, name in holders])
        except (KeyError, IndexError):
            return MISS
        if not check(*tensors):
            return MISS
        if not straight:
            return call.run_fitting(tensors, own)
        output = new()
        if new_arena is None:
            ordered = (*tensors, output) if pick is None else pick((*tensors, output))
            addresses: Any = map(data_ptr, ordered)
        else:
            arena = new_arena()  # torch's allocator orders its reuse by stream
            found = [*map(data_ptr, (*tensors, output, arena))]
            addresses = [found[place] + offset for place, offset in layout]
        if mask:
            addresses = [*addresses]
            if reduce(either, addresses) & mask:
                return REFERENCE
        try:
            bound = bounds.pop()
        except IndexError:
            bound = take()
        stream = current_stream()
        if stream != bound.stream:
            bound.queue_on(stream)
        if bound.moving:
            addresses = [*addresses]
            for step in bound.moving:
                step.point(addresses)
        bound.fill(*addresses)
        for launch in bound.calls:
            code = launch()
            if code:
                bound.retry_or_raise(launch, code)
        bounds.append(bound)
        return output

    return run
