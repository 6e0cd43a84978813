"""Baselines in rotation: eager and compiled reference over several drawn input sets. In the oracle's process only."""

from __future__ import annotations

import functools
import time
import timeit
from typing import Any

import torch

from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.evaluation.generated import captured, kernels_of
from pytest_cudaforge.evaluation.precision import precision_flags
from pytest_cudaforge.evaluation.subject import Subject
from pytest_cudaforge.evaluation.tensors import fetch
from pytest_cudaforge.runtime.signature import flatten_output

__all__ = ["Rotation"]

_RECOMPILES = 256
#: Tries of writing answers; the first touches pages.
_WRITINGS = 8


class Rotation:
    """``frames`` input sets of one workload and the parties that can be run over them: "eager", "compile"."""

    def __init__(self, subject: Subject, workload: str, frames: int) -> None:
        self.subject, self.workload = subject, workload
        began = time.perf_counter()
        self.sets = [subject.draw(workload, 1000 + i) for i in range(frames)]
        #: What drawing one set takes.
        self.draw_s = (time.perf_counter() - began) / frames
        self.calls: dict[str, Any] = {"eager": subject.function}
        self.position = 0
        #: By input set where each output of a call is copied to; nothing where no answers are fetched.
        self._places: list[dict[str, torch.Tensor]] = []

    def redraw(self, seed: int) -> None:
        """Other values in every input set, as drawn: calls that write their inputs leave others there."""
        for number in range(len(self.sets)):
            self.sets[number] = self.subject.draw(self.workload, seed + number)
        self.position = 0

    @property
    def parties(self) -> list[str]:
        return list(self.calls)

    def compile(self) -> str:
        """Add torch.compile's version; returns "" or, in words, why there is none. Never raises for its failures."""
        subject = self.subject
        if subject.compile_note:
            return subject.compile_note
        if subject.compiled is None:
            subject.compiled = compiled_function(subject)
        try:
            with captured() as texts:
                for _ in range(2):
                    self._call(subject.compiled, 0)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a compiler of many parts; none of them is ours
            first = str(error).strip().splitlines() or [""]
            subject.compile_note = f"torch.compile failed: {type(error).__name__}: {first[0][:300]}"
            return subject.compile_note
        self.calls["compile"] = subject.compiled
        if texts:  # nothing is compiled again for shapes that were seen before
            subject.generated[self.workload] = kernels_of(texts)
        return ""

    @property
    def generated(self) -> str:
        """torch.compile's kernels for this workload; "" where none were caught."""
        return self.subject.generated.get(self.workload, "")

    def hold_places(self, wanted: bool) -> None:
        """Have memory for every set's answers, for ``fetched`` calls, or give it back."""
        self._places = []
        for position in range(len(self.sets)) if wanted else ():
            leaves, _ = flatten_output(self._call(self.calls["eager"], position))
            tensors = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
            self._places.append({path: torch.empty_like(tensor) for path, tensor in tensors.items()})

    def run_many(self, party: str, calls: int, *, fetched: bool = False) -> None:
        """Call ``party`` so often, rotating over the input sets, and wait for the device. ``fetched``: each answer is
        copied to its place, as a candidate's are (:meth:`hold_places`)."""
        if party not in self.calls:
            raise UsageError(f"no party {party!r} in this rotation", expected=", ".join(self.calls))
        function, count = self.calls[party], len(self.sets)
        with precision_flags(self.subject.options.precision), torch.no_grad():
            for i in range(self.position, self.position + calls):
                args, kwargs = self.sets[i % count]
                output = function(*args, **kwargs)
                if fetched:
                    fetch(output, self._places[i % count])
        self.position = (self.position + calls) % count
        if self.subject.device.type == "cuda":
            torch.cuda.synchronize(self.subject.device)

    def writing_ns(self, answers: int) -> float:
        """What the fastest of some tries takes to write an answer into memory, the least that any call does
        (:meth:`hold_places` knows the answers). By a clock of this process. On a GPU by device events and ``answers``
        at once, since it is not the host's time that is asked for; on a CPU one by one, as calls write them."""
        shapes = [(place.shape, place.dtype) for place in self._places[0].values()]
        device = self.subject.device

        def write(count: int) -> None:
            for shape, dtype in shapes:
                torch.empty((count, *shape), dtype=dtype, device=device).fill_(0)

        if device.type == "cuda":
            with torch.cuda.device(device):
                taken = _clock(device.index or 0).sample([_TorchCall(write, (answers,), {})], _WRITINGS, 0)[:_WRITINGS]
        else:
            taken = [1e9 * timeit.timeit(lambda: write(1), number=answers) for _ in range(_WRITINGS)]
        return float(min(taken)) / answers

    def _call(self, function: Any, position: int) -> Any:
        args, kwargs = self.sets[position % len(self.sets)]
        with precision_flags(self.subject.options.precision), torch.no_grad():
            return function(*args, **kwargs)

    def time_events(
        self, party: str, samples: int, flush_bytes: int, *, probed: bool = False, warm: bool = True
    ) -> list[list[int]]:
        """CUDA only: cold device time of one call per sample in ns, by the very clock that times candidates, and the
        times of its probe, none where it is not ``probed``. ``warm``: after a call on each input set."""
        bounds = [_TorchCall(self.calls[party], args, kwargs) for args, kwargs in self.sets]
        first, count = self.position, len(bounds)
        self.position = (first + samples) % count
        device = self.subject.device
        with precision_flags(self.subject.options.precision), torch.no_grad(), torch.cuda.device(device):
            clock = _clock(device.index or 0)
            rotated = [bounds[(first + i) % count] for i in range(count)]
            times: list[int] = clock.sample(rotated, samples, flush_bytes, warm=warm, probed=probed)
        return [times[:samples], times[samples + 2 :]]


class _TorchCall:
    """One call of a reference on one input set, as the event clock runs it (on torch's default stream, stream 0)."""

    def __init__(self, function: Any, args: Any, kwargs: Any) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs

    def run(self) -> None:
        self._function(*self._args, **self._kwargs)


@functools.lru_cache(maxsize=4)
def _clock(device: int) -> Any:
    from pytest_cudaforge.evaluation.event_clock import EventClock

    return EventClock(device)


def compiled_function(subject: Subject) -> Any:
    """torch.compile of the target with static shapes, one per subject."""
    config = torch._dynamo.config
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, max(_RECOMPILES, getattr(config, name)))
    return torch.compile(subject.function, dynamic=False)
