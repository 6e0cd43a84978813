"""A plan of several launches as a CUDA graph: one call of the driver in place of many.

A graph has the addresses of its tensors built in, so there is one for each set of addresses that comes again: inputs,
weights and stream are its key, and a call with any other goes to the launches themselves. Weights may change in place;
one that moved is another address. Outputs lie in the graph's own memory and are copied into fresh tensors, behind it on
the same stream, so that a later call does not write what an earlier one returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pytest_cudaforge.errors import LaunchFailure

__all__ = ["FEWEST_STEPS", "PlanGraphs"]

#: Below this a graph and the copy of its output cost more than the launches.
FEWEST_STEPS = 3
_MOST_GRAPHS = 8
_MOST_SEEN = 64

#: (buffer, shape, strides, dtype) of a tensor that each call makes anew.
Fresh = tuple[int, Any, Any, torch.dtype]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: list[torch.Tensor]
    arena: torch.Tensor | None


class PlanGraphs:
    """The graphs of one bound plan. ``run``: launches the plan on buffers' addresses and a stream; ``empty`` makes a
    tensor; ``arena``: (buffer, offset) of scratch in one block of ``arena_bytes``."""

    def __init__(
        self,
        run: Callable[[Sequence[int], int], None],
        empty: Callable[[Any, Any, torch.dtype], torch.Tensor],
        fresh: Sequence[Fresh],
        arena_bytes: int,
        arena: Sequence[tuple[int, int]],
    ) -> None:
        self._run, self._empty = run, empty
        self._fresh, self._arena_bytes, self._arena = fresh, arena_bytes, arena
        self._known: dict[tuple[int, ...], _Captured] = {}
        self._seen: dict[tuple[int, ...], None] = {}
        self._lock = threading.Lock()
        self._usable = True

    def outputs(self, addresses: Sequence[int], stream: int) -> list[torch.Tensor] | None:
        """The fresh outputs of a call at these addresses (those of fresh tensors and scratch are zeros); None where
        there is no graph for it: the first time, and inside the caller's own capture. On the current device."""
        if not self._usable or torch.cuda.is_current_stream_capturing():
            return None
        key = (stream, *addresses)
        with self._lock:
            captured = self._known.get(key)
            if captured is None:
                captured = (self._worth_capturing(key) and self._captured(list(addresses))) or None
                if captured is None:
                    return None
                while len(self._known) >= _MOST_GRAPHS:
                    self._known.pop(next(iter(self._known)))
                self._known[key] = captured
            # Under the lock: nobody's replay may come between this one and the copies.
            captured.graph.replay()
            specs = zip(self._fresh, captured.outputs, strict=True)
            return [self._empty(shape, strides, dtype).copy_(output) for (_, shape, strides, dtype), output in specs]

    def _worth_capturing(self, key: tuple[int, ...]) -> bool:
        """Addresses that came once may never come again."""
        if self._seen.pop(key, self) is None:
            return True
        while len(self._seen) >= _MOST_SEEN:
            self._seen.pop(next(iter(self._seen)))
        self._seen[key] = None
        return False

    def _captured(self, addresses: list[int]) -> _Captured | None:
        """The plan as a graph; None, and none ever again, where it cannot be captured."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                # Other threads may go on with what they do.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    outputs, arena = self._record(addresses, side.cuda_stream)
                finally:
                    graph.capture_end()
        except (RuntimeError, LaunchFailure):
            self._usable = False
            return None
        current.wait_stream(side)
        return _Captured(graph, outputs, arena)

    def _record(self, addresses: list[int], stream: int) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        outputs = []
        for index, shape, strides, dtype in self._fresh:
            outputs.append(self._empty(shape, strides, dtype))
            addresses[index] = outputs[-1].data_ptr()
        arena = self._empty((self._arena_bytes,), (1,), torch.uint8) if self._arena_bytes else None
        base = arena.data_ptr() if arena is not None else 0
        for index, offset in self._arena:
            addresses[index] = base + offset
        self._run(addresses, stream)
        return outputs, arena
