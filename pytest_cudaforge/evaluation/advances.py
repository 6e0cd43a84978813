"""Calls that follow calls: what a reference that writes its state, or its inputs, has left after so many of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.domain import WHOLE
from pytest_cudaforge.evaluation.expectation import Expecting
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.frames import Case, Frame
from pytest_cudaforge.evaluation.teams import one_thread

__all__ = ["Advances"]

#: Values of the calls before a later one; how long these may take, where there are enough of them and where not; how
#: many times as large what they write may be.
_HISTORY, _HISTORY_S, _FEWEST, _GROWN = 4, (0.8, 2.0), 700, 1e3
#: A call on so many elements takes no team of threads.
_FEW_ELEMENTS = 1 << 18


class Advances:
    """Lets the reference of one workload make the calls before a frame's; ``draw``: a case's inputs and their tree."""

    def __init__(self, expecting: Expecting, draw: Callable[[Case], tuple[dict[str, Any], Any]]) -> None:
        self.subject, self.workload = expecting.subject, expecting.workload
        self._expecting, self._draw = expecting, draw
        #: What the calls before have left, by state path.
        self.state: dict[str, Tensor] = {}

    def advance(self, frame: Frame, *, alike: bool = False) -> bool:
        """Let the reference make the calls before, on other inputs or on ``alike`` ones. False where they are fewer, or
        the inputs as drawn although it writes them."""
        case = frame.case
        assert case is not None, "a frame has a case before it is filled"
        self.subject.set_weights(case.weights)
        before = self._written_state()
        left = self._run_on(frame.inputs, frame.tree)
        first = state = self._written_state()
        # Who counts, or keeps places, may come to an end: nobody promised as many calls.
        # On a GPU a place behind the last one ends the process; here it is an exception.
        counts = any(tensor.dtype in WHOLE for tensor in first.values()) and self.subject.device.type != "cpu"
        made = case.advanced == 1
        if not made and not counts and (further := self._go_on(frame, case, left, alike=alike)) is not None:
            later = self._written_state()
            # Nor that what grows from call to call does so for good.
            values = {path: tensor for path, tensor in later.items() if tensor.dtype not in WHOLE}
            if all(_size_of(tensor) <= _GROWN * max(1.0, _size_of(first[p])) for p, tensor in values.items()):
                left, state, made = further, later, True
        self.subject.put_state(state)
        goes_on = self._goes_on_from(frame, left)
        if goes_on:
            frame.inputs = {**frame.inputs, **left}
        self.subject.put_state(before)
        self.state = {path: value for path, value in state.items() if path not in case.kept}
        return made and goes_on

    def _goes_on_from(self, frame: Frame, left: Mapping[str, Any]) -> bool:
        """Are the inputs that a call wrote such that another can be made on them? Nobody promised that for places,
        which may come to an end, nor for what grows from call to call."""
        for path, value in left.items():
            drawn = frame.inputs[path]
            if not isinstance(value, Tensor) or not isinstance(drawn, Tensor):
                return False
            if value.dtype in WHOLE and self.subject.device.type != "cpu":
                return False  # a place behind the last one ends the process there
            wild = value.dtype not in (torch.bool, *WHOLE) and _size_of(value) > _GROWN * max(1.0, _size_of(drawn))
            if wild or (value.is_floating_point() and bool(value.isnan().any())):
                return False
        try:
            if left:
                self._run_on({**frame.inputs, **left}, frame.tree)
        except TargetError as error:
            if is_fatal(error):
                raise
            return False
        return True

    def _go_on(self, frame: Frame, case: Case, left: dict[str, Any], *, alike: bool) -> dict[str, Any] | None:
        """Further calls on what the one before has ``left`` of the inputs, the others other values than those to come,
        for what follows them need not differ from their own, or ``alike``. What the last one left; None where the
        reference makes no such number, or none of ``alike`` ones in time."""
        history = [(frame.inputs, frame.tree)]
        if not alike:
            cases = [replace(case, seed=case.seed ^ (1 + number), family="drawn") for number in range(_HISTORY)]
            history = [self._draw(other) for other in cases]
        began = time.monotonic()
        with _one_thread_for(frame.inputs):
            for number in range(1, case.advanced):
                inputs, tree = history[number % len(history)]
                try:
                    left = self._run_on({**inputs, **left}, tree)
                except TargetError as error:
                    if is_fatal(error):
                        raise
                    return None
                # On busy cores calls look slow: the fewest are made where they do not take very long.
                if time.monotonic() - began > _HISTORY_S[number < _FEWEST]:
                    return None if alike else left
        return left

    def _run_on(self, inputs: Mapping[str, Any], tree: Any) -> dict[str, Any]:
        """The reference, on what it may write into; its state goes on. The inputs that it writes, as they are then."""
        mutates = self.subject.mutates(self.workload)
        inputs = self.subject.completed(dict(inputs), tree)
        leaves = {p: v.clone() if f"input/{p}" in mutates else v for p, v in inputs.items()}
        self._expecting.run_reference(tree, leaves)
        return {p: v for p, v in leaves.items() if f"input/{p}" in mutates}

    def _written_state(self) -> dict[str, Tensor]:
        mutates = self.subject.mutates(self.workload)
        return {path: t.clone() for path, t in self.subject.state().items() if f"state/{path}" in mutates}


def _one_thread_for(inputs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Of many small calls each would wait for a team of threads, beside other processes for long."""
    elements = sum(value.numel() for value in inputs.values() if isinstance(value, Tensor))
    return one_thread() if elements <= _FEW_ELEMENTS else nullcontext()


def _size_of(tensor: Tensor) -> float:
    """The largest magnitude; NaN or infinite where an element is."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
