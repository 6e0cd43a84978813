"""One version of a plain module in a race: its calls, forward or with their gradients, on values that both versions
have. In an oracle's process only, and never two versions in one: their modules have the same names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.correctness import Rule, judge_output
from pytest_cudaforge.evaluation.initial import encode_init
from pytest_cudaforge.evaluation.precision import Fp64Mode, declared_dtype, declared_limits, precision_flags
from pytest_cudaforge.evaluation.rotation import Rotation
from pytest_cudaforge.evaluation.subject import INIT_SEED, Subject, seed_generators
from pytest_cudaforge.records import WorkloadFacts, to_json
from pytest_cudaforge.runtime.signature import (
    flatten_call,
    flatten_output,
    spec_of,
    split_call,
)

__all__ = ["Version", "VersionRotation"]

_STATE = "state"


class Version(Subject):
    """As Subject, and remembers which inputs the target draws with ``requires_grad``."""

    _asked: frozenset[str] = frozenset()

    def _draw_on_device(self, make: Callable[[], Any], seed: int) -> Any:
        drawn = super()._draw_on_device(make, seed)
        leaves, _ = flatten_call(*split_call(drawn))
        self._asked = frozenset(p for p, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.requires_grad)
        return drawn

    def told(self) -> dict[str, Any]:
        """What tells two versions apart before they race. Runs no forward: what it returns may be anything."""
        return {
            "workloads": [to_json(self._workload(name)) for name in self.options.input_sets],
            "state": {path: _shape_of(tensor) for path, tensor in self.state().items()},
            "init": self.init_text(),
            "mode": self.options.mode,
            "grad": self.options.grad,
        }

    def _workload(self, name: str) -> WorkloadFacts:
        leaves, tree = flatten_call(*self.draw(name, 0))
        tensors = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor)]
        return WorkloadFacts(
            name=name,
            inputs=tuple((path, spec_of(v) if isinstance(v, Tensor) else v) for path, v in leaves.items()),
            input_tree=tree,
            outputs=(),
            output_tree=None,
            input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            state_bytes=0,
            output_bytes=0,
            flops=0,
        )

    def init_text(self) -> Any:
        """The constructor's arguments as plain data; None where they are none, which says nothing about them."""
        try:
            return encode_init(*self.init_arguments())
        except TargetError:
            return None

    def wanted(self, leaves: Mapping[str, Any]) -> list[str]:
        """Paths of the inputs whose gradients are asked for: those drawn so, else every floating one."""
        floating = [p for p, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return [path for path in floating if path in self._asked] or floating

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that train as constructed."""
        named = dict(self.module.named_parameters()) if self.module is not None else {}
        return [named[path] for path in self.trained]

    def keep_as_constructed(self, path: str, values: Tensor) -> None:
        """``values`` are from now on what the tensor at ``path`` is constructed with."""
        with torch.no_grad():
            self.state()[path].copy_(values)
        self._constructed[path] = self.state()[path].detach().clone()


class VersionRotation(Rotation):
    """One version over its input sets; its only party is "eager". ``backward``: a call is forward and the gradients of
    inputs and parameters. Call :meth:`prepare` before it is timed."""

    subject: Version

    def __init__(self, subject: Version, workload: str, frames: int, backward: bool) -> None:
        # Calls that were timed before may have changed it, each version's another number of times.
        subject.restore()
        super().__init__(subject, workload, frames)
        self.backward = backward

    # -- values

    def prints(self) -> dict[str, Any]:
        """What each value of the call and of the module is, short: (spec and checksum) by its place."""
        return {place: _print_of(value) for place, value in self._values()}

    def give(self, path: Path, wanted: Collection[str]) -> dict[str, list[int]]:
        """Write the tensors of the places ``wanted`` to the file ``path``: offset and size by place."""
        places, offset = {}, 0
        with path.open("wb") as file:
            for place, value in self._values():
                if isinstance(value, Tensor) and place in wanted:
                    places[place] = [offset, _write(file, value)]
                    offset += places[place][1]
        return places

    def take(self, path: Path, places: Mapping[str, list[int]]) -> None:
        """Put in place what :meth:`give` wrote: inputs, and state of the same name and shape."""
        own = dict(self._values())
        with path.open("rb") as file:
            for place, (offset, nbytes) in places.items():
                value = own.get(place)
                if not isinstance(value, Tensor) or nbytes != value.numel() * value.element_size() or not nbytes:
                    continue
                file.seek(offset)
                given = _read(file, value)
                kind, _, inner = place.partition("/")
                if kind == _STATE:
                    self.subject.keep_as_constructed(inner, given)
                else:
                    with torch.no_grad():
                        value.copy_(given)

    def _values(self) -> Iterator[tuple[str, Any]]:
        for path, tensor in self.subject.state().items():
            yield f"{_STATE}/{path}", tensor
        for number, (args, kwargs) in enumerate(self.sets):
            leaves, _ = flatten_call(args, kwargs)
            for path, leaf in leaves.items():
                yield f"{number}/{path}", leaf

    # -- answers

    def answer(self, path: Path | None) -> dict[str, Any]:
        """Specs and checksums of the outputs on the first input set; ``path``: where to write them as well."""
        outputs = self._outputs()
        if path is not None:
            with path.open("wb") as file:
                for value in outputs.values():
                    if isinstance(value, Tensor):
                        _write(file, value)
        return {name: _print_of(value) for name, value in outputs.items()}

    def disagreements(self, path: Path) -> list[str]:
        """How the other version's outputs, written by its :meth:`answer`, differ from these beyond the tolerance."""
        outputs, (exact, mode), options = self._outputs(), self._exact(), self.subject.options
        found = []
        with path.open("rb") as file:
            for name, own in outputs.items():
                if not isinstance(own, Tensor) or not own.numel():
                    continue
                given = _read(file, own)
                wide = exact.get(name, own.double() if own.is_floating_point() else own)
                rule = Rule(mode.summed(wide), mode.partial or name not in exact, 0.0, options.atol, options.rtol)
                judged = judge_output(name, given, own, wide, rule)
                found += [f"{name}: {mismatch.detail}" for mismatch in judged.mismatches]
        return found

    def _outputs(self) -> dict[str, Any]:
        """Its tensors and numbers by path; none where it returns something else, which is nothing to compare."""
        args, kwargs = self.sets[0]
        seed_generators(INIT_SEED)
        with self.subject.as_constructed(), precision_flags(self.subject.options.precision):
            output = self.subject.run(self.subject.function, *_copied(args, kwargs))
        try:
            leaves, _ = flatten_output(output)
        except TargetError:
            return {}
        plain = (path for path, value in leaves.items() if not isinstance(value, Tensor) or _is_plain(value))
        return {path: leaves[path] for path in sorted(plain)}

    def _exact(self) -> tuple[dict[str, Any], Fp64Mode]:
        """The outputs carried in fp64; none where there is no such form."""
        args, kwargs = _copied(*self.sets[0])
        leaves, _ = flatten_call(args, kwargs)
        args, kwargs = tree_map(_widened, (args, kwargs))
        mode = Fp64Mode(declared_dtype(leaves, self.subject.state()))
        seed_generators(INIT_SEED)
        try:
            with mode, declared_limits(mode.declared):
                outputs, _ = flatten_output(self.subject.run(self.subject.wide(), args, kwargs))
        except (TargetError, torch.OutOfMemoryError):
            return {}, mode
        return outputs, mode

    # -- calls

    def prepare(self) -> None:
        """Make the calls that are timed, and run each input set once. Raises TargetError for what the version raises,
        and where there is nothing to take a gradient of."""
        if self.backward:
            # One step per input set, which has the tensors that its gradients are of.
            self.sets = [((_Step(self.subject, args, kwargs),), {}) for args, kwargs in self.sets]
            self.calls = {"eager": _run_step}
        for args, kwargs in self.sets[:1]:
            with precision_flags(self.subject.options.precision):
                self.subject.run(self.calls["eager"], args, kwargs)


class _Step:
    """One call and its gradients, over and over on the same values."""

    def __init__(self, subject: Version, args: Any, kwargs: Any) -> None:
        leaves, _ = flatten_call(args, kwargs)
        inputs = {id(leaves[path]): leaves[path].detach().requires_grad_() for path in subject.wanted(leaves)}
        self._args, self._kwargs = tree_map(lambda leaf: inputs.get(id(leaf), leaf), (args, kwargs))
        self._function = subject.function
        parameters = subject.parameters()
        for parameter in parameters:
            parameter.requires_grad_(True)
        self._sources = [*parameters, *inputs.values()]
        with precision_flags(subject.options.precision):
            outputs = subject.run(self._forward, (), {})
        self._paths = [p for p, out in outputs.items() if isinstance(out, Tensor) and out.requires_grad]
        if not self._paths or not self._sources:
            raise TargetError(f"{subject.target.id}: no input and no parameter has a gradient")
        generator = torch.Generator(device=subject.device).manual_seed(INIT_SEED)
        self._gradients = [_gradient_like(outputs[path], generator) for path in self._paths]

    def _forward(self) -> dict[str, Any]:
        with torch.enable_grad():
            found = self._function(*self._args, **self._kwargs)
        # What flattening costs is no part of a call where there is nothing to flatten.
        return {"": found} if isinstance(found, Tensor) else flatten_output(found)[0]

    def run(self) -> None:
        outputs = self._forward()
        wanted = [outputs[path] for path in self._paths]
        _run_backward(wanted, self._gradients, self._sources)


def _run_step(step: _Step) -> None:
    step.run()


def _run_backward(outputs: list[Tensor], gradients: list[Tensor], sources: list[Tensor]) -> None:
    """torch.autograd.grad without its checks: for those it imports a computer algebra system, which takes seconds in
    every fresh process."""
    run: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:  # before torch 2.2
        run = torch.autograd.Variable._execution_engine.run_backward
    run(tuple(outputs), tuple(gradients), False, False, tuple(sources), allow_unreachable=True, accumulate_grad=False)


def _gradient_like(output: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(output.shape, dtype=torch.float32, device=output.device, generator=generator)
    return values.to(output.dtype)


def _copied(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The same values in tensors of their own: a forward may write its inputs."""
    own: tuple[Any, Any] = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    return own


def _widened(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _is_plain(value: Tensor) -> bool:
    """Has it elements in memory, one beside the other?"""
    return value.layout == torch.strided and not value.is_nested and value.device.type != "meta"


def _shape_of(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _print_of(value: Any) -> Any:
    """``[[shape, dtype], checksum]`` of a tensor, ``[value]`` of anything else."""
    if not isinstance(value, Tensor):
        return [repr(value)]
    data = _bytes_of(value)
    words = data.view(torch.int32) if data.numel() % 4 == 0 else data
    # The second sum tells values in another order.
    sums = [int(part.sum(dtype=torch.int64)) for part in (words, words[::3])]
    return [_shape_of(value), sums]


def _bytes_of(value: Tensor) -> Tensor:
    data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return data.clone() if data.storage_offset() % 4 else data


def _write(file: IO[bytes], value: Tensor) -> int:
    """The elements in order, as bytes; how many."""
    data = _bytes_of(value).cpu()
    if data.numel():
        file.write((ctypes.c_char * data.numel()).from_address(data.data_ptr()))
    return data.numel()


def _read(file: IO[bytes], like: Tensor) -> Tensor:
    """What :func:`_write` wrote of a tensor of that shape and dtype, on that device."""
    data = torch.frombuffer(bytearray(file.read(like.numel() * like.element_size())), dtype=torch.uint8)
    return data.view(like.dtype).reshape(like.shape).to(like.device)
