"""What a call ought to give: the reference's answer, the fp64 oracle's, and all that a bound follows from."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pytest_cudaforge.errors import DeviceError, TargetError
from pytest_cudaforge.evaluation.correctness import TOLERANCES, Rule
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.frames import Case, Frame
from pytest_cudaforge.evaluation.leaning import LeaningMode
from pytest_cudaforge.evaluation.pointing import Pointed, PointingMode, pointed_by
from pytest_cudaforge.evaluation.precision import (
    FEW,
    Fp64Mode,
    declared_dtype,
    declared_limits,
    precision_flags,
    widened,
)
from pytest_cudaforge.evaluation.subject import Subject
from pytest_cudaforge.evaluation.usual import UsualErrors
from pytest_cudaforge.runtime.signature import flatten_output, module_tensors, unflatten_call

__all__ = ["SUM_NOISE", "Expected", "Expecting", "find_aliases", "oracle_in_slabs"]

#: Pieces of the leading dimension where the oracle has to be run in slabs.
SLABS = 16
#: More runs of a reference that is declared non-deterministic; its own spread is the tolerance.
SPREAD_RUNS = 4
#: Above this a second run of the oracle costs too much.
_MOST = 1 << 24
#: Runs of an fp64 reference, each rounded otherwise, and its largest outputs that are held against those.
_LEANING_RUNS, _LEANING_MOST = 2, 1 << 26
#: What a tree over a sum's terms leaves, in unit roundoffs of the root of their squares' sum, and room for bad luck.
SUM_NOISE = 4.0


@dataclass
class Expected:
    """Reference and oracle of one case: output leaves, mutated inputs and state by path.

    ``summed``: the longest sum behind an output, by path; ``reduction`` the longest of all. ``noise``: how far rounding
    moves outputs of few elements (rms). ``spread``: what more runs gave where the reference is non-deterministic.
    ``moved``: paths whose noise is that of other roundings, which all elements may have in common. ``pointed``: the
    search behind an index output, and what it searched in fp64. ``usual``: how far the reference is
    off as a rule, where that was asked for.
    """

    case: Case
    reference: dict[str, Any]
    oracle: dict[str, Any]
    mutated: dict[str, tuple[Tensor, Tensor]]
    aliases: dict[str, str]
    partial: bool
    reduction: int
    summed: dict[str, int] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    spread: list[dict[str, Any]] = field(default_factory=list)
    moved: frozenset[str] = frozenset()
    pointed: dict[str, tuple[Pointed, Tensor]] = field(default_factory=dict)
    usual: UsualErrors | None = None

    def rule(self, path: str, atol: float | None = None, rtol: float | None = None) -> Rule:
        reduction = self.summed.get(path, self.reduction)
        alike = self.case.family == "lowered" or path in self.moved
        return Rule(reduction, self.partial, self.noise.get(path, 0.0), atol, rtol, alike)

    def spread_of(self, path: str) -> list[Tensor]:
        return [outputs[path] for outputs in self.spread if path in outputs]


class Expecting:
    """Runs reference and oracle of one subject's workload, with the weights that the subject has at the time."""

    def __init__(self, subject: Subject, workload: str) -> None:
        self.subject, self.workload = subject, workload

    def compute(self, case: Case, frame: Frame) -> Expected:
        subject = self.subject
        reference, mutated, aliases = self.reference_run(frame)
        runs = SPREAD_RUNS if subject.options.nondeterministic else 0
        spread = [outputs | changed for outputs, changed, _ in (self.reference_run(frame) for _ in range(runs))]
        try:
            oracle, oracle_mutated, mode = self._run_oracle(frame, mutated)
        except torch.OutOfMemoryError:
            if mutated:
                raise
            oracle, mode = oracle_in_slabs(subject, frame.tree, frame.inputs, reference)
            oracle_mutated = {}
        except TargetError:
            # The reference runs, its fp64 form does not (own kernels inside, checks of a dtype): it judges itself.
            oracle, oracle_mutated, mode = _self_oracle(frame, reference)
        pairs = {key: (tensor, oracle_mutated.get(key, tensor.double())) for key, tensor in mutated.items()}
        summed = {path: mode.summed(value) for path, value in (oracle | oracle_mutated).items()}
        noise = self._noise(
            frame, mutated, oracle, oracle_mutated, _MOST if mode.spreads else FEW if mode.cancels else 0
        )
        double = declared_dtype(frame.inputs, subject.state()) == torch.float64
        moved = self._moved_by_rounding(frame, {**reference, **mutated}) if double else {}
        noise |= {path: max(noise.get(path, 0.0), error) for path, error in moved.items()}
        pointed = self._pointed(frame, mutated) if subject.options.index_outputs else {}
        return Expected(
            case,
            reference,
            oracle,
            pairs,
            aliases,
            mode.partial,
            mode.reduction,
            summed,
            noise,
            spread,
            frozenset(moved),
            pointed,
        )

    def _pointed(self, frame: Frame, mutated: Mapping[str, Tensor]) -> dict[str, tuple[Pointed, Tensor]]:
        """By index output: the search that made it, and the fp64 form of what it searched."""
        watched, wide = PointingMode(), PointingMode()
        with watched:
            outputs, _, _ = self.reference_run(frame)
        try:
            with wide:
                self._run_oracle(frame, mutated)
        except (TargetError, torch.OutOfMemoryError):
            wide.found.clear()
        result = {}
        for path, value in outputs.items():
            number = pointed_by(value, watched.found) if self.is_index(path) and isinstance(value, Tensor) else None
            if number is not None:
                search = watched.found[number]
                fits = len(wide.found) == len(watched.found) and wide.found[number].source.shape == search.source.shape
                result[path] = (search, wide.found[number].source.double() if fits else search.source.double())
        return result

    def reference_run(self, frame: Frame) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
        """Outputs, what was written (by ``input/<path>``, ``state/<path>``) and aliases; state is put back."""
        subject, mutates = self.subject, self.subject.mutates(self.workload)
        before = {p: t.clone() for p, t in subject.state().items() if f"state/{p}" in mutates}
        leaves = {p: v.clone() if f"input/{p}" in mutates else v for p, v in frame.inputs.items()}
        outputs, aliases = self.run_reference(frame.tree, leaves)
        mutated = {f"input/{p}": t for p, t in leaves.items() if f"input/{p}" in mutates}
        mutated |= {f"state/{p}": subject.state()[p].clone() for p in before}
        with torch.no_grad():
            for path, tensor in before.items():
                subject.state()[path].copy_(tensor)
        return outputs, mutated, aliases

    def _noise(
        self,
        frame: Frame,
        mutated: Mapping[str, Tensor],
        oracle: Mapping[str, Any],
        written: Mapping[str, Tensor],
        most: int,
    ) -> dict[str, float]:
        """How far the rounding of its sums moves each floating output of at most so many elements, and what the
        reference writes into its inputs and its state."""
        oracle = {**oracle, **written}
        few = {p: v for p, v in oracle.items() if isinstance(v, Tensor) and 0 < v.numel() <= most}
        few = {path: value for path, value in few.items() if value.is_floating_point() or value.is_complex()}
        if not few:
            return {}
        declared = declared_dtype(frame.inputs, self.subject.state())
        unit = TOLERANCES["float64" if declared == torch.float64 else "float32"].unit_roundoff
        try:
            outputs, changed, _ = self._run_oracle(frame, mutated, noise=SUM_NOISE * unit)
        except torch.OutOfMemoryError:
            return {}
        moved = {**outputs, **changed}
        found = {path: float((moved[path] - value).abs().square().mean().sqrt()) for path, value in few.items()}
        return {path: error for path, error in found.items() if math.isfinite(error)}

    def _moved_by_rounding(self, frame: Frame, plain: Mapping[str, Any]) -> dict[str, float]:
        """By what (rms) fp64 outputs move where each operator rounds otherwise: nothing finer tells how far the
        reference itself is off (stochastic arithmetic, CADNA)."""
        doubles = {p: v for p, v in plain.items() if isinstance(v, Tensor) and v.dtype == torch.float64}
        floats = {path: value for path, value in doubles.items() if 0 < value.numel() <= _LEANING_MOST}
        found: dict[str, float] = {}
        for seed in range(_LEANING_RUNS if floats else 0):
            try:
                with LeaningMode(seed, each=seed % 2 == 1):
                    outputs, written, _ = self.reference_run(frame)
            except torch.OutOfMemoryError:
                return found
            except TargetError as error:
                if is_fatal(error):
                    raise
                return found
            others = {**outputs, **written}
            for path, value in floats.items():
                if others[path].shape == value.shape:
                    moved = (others[path] - value).nan_to_num(0.0, 0.0, 0.0)
                    top = float(moved.abs().max()) or 1.0  # squares of what is small vanish
                    found[path] = max(found.get(path, 0.0), top * float((moved / top).square().mean().sqrt()))
        return found

    def run_reference(self, tree: Any, leaves: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        args, kwargs = unflatten_call(tree, leaves)
        with precision_flags(self.subject.options.precision):
            outputs, _ = flatten_output(self.subject.run(self.subject.function, args, kwargs))
        return outputs, find_aliases(outputs, {**leaves, **self.subject.state()})

    def _run_oracle(
        self, frame: Frame, mutated: Mapping[str, Tensor], noise: float = 0.0
    ) -> tuple[dict[str, Any], dict[str, Tensor], Fp64Mode]:
        wide = self.subject.wide()
        leaves = {path: widened(leaf, f"input/{path}" in mutated) for path, leaf in frame.inputs.items()}
        args, kwargs = unflatten_call(frame.tree, leaves)
        mode = Fp64Mode(declared_dtype(frame.inputs, self.subject.state()), noise=noise)
        mode.pooled = not self.subject.tells_sums_apart
        with mode, declared_limits(mode.declared):
            outputs, _ = flatten_output(self.subject.run(wide, args, kwargs))
        changed = {f"input/{path}": leaf for path, leaf in leaves.items() if f"input/{path}" in mutated}
        if isinstance(wide, torch.nn.Module):
            state = module_tensors(wide)
            changed |= {f"state/{p}": t.clone() for p, t in state.items() if f"state/{p}" in mutated}
        return outputs, changed, mode

    def is_index(self, path: str) -> bool:
        """Does the target declare this output to be one of ``index_outputs``?"""
        declared = self.subject.options.index_outputs
        return path in declared or path.removeprefix("out.") in declared

    def usual_errors(self, expected: Expected, frame: Frame) -> UsualErrors:
        """How far the reference is off as a rule; remembered with what is expected."""
        if expected.usual is None:

            def errors(inputs: Mapping[str, Any], mode: contextlib.AbstractContextManager[Any]) -> dict[str, Tensor]:
                other = replace(frame, inputs=dict(inputs))
                with mode:
                    outputs, mutated, _ = self.reference_run(other)
                exact, _, _ = self._run_oracle(other, mutated)
                floats = {p: v for p, v in outputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
                return {path: value.double() - exact[path] for path, value in floats.items()}

            expected.usual = UsualErrors(frame.inputs, errors)
        return expected.usual


def _self_oracle(frame: Frame, reference: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Fp64Mode]:
    mode = Fp64Mode()
    mode.partial = mode.pooled = True
    tensors = [leaf for leaf in frame.inputs.values() if isinstance(leaf, Tensor) and leaf.dim()]
    mode.reduction = max((int(tensor.shape[-1]) for tensor in tensors), default=1)
    return {path: widened(value) for path, value in reference.items()}, {}, mode


def oracle_in_slabs(
    subject: Subject, tree: Any, leaves: Mapping[str, Any], reference: Mapping[str, Any]
) -> tuple[dict[str, Any], Fp64Mode]:
    """The oracle in pieces along the leading dimension, for calls whose fp64 form does not fit the device.

    Only where every output has that dimension and the reference itself gives the same on a piece as on the whole.
    Raises DeviceError otherwise.
    """
    torch.cuda.empty_cache()
    outputs = {path: value for path, value in reference.items() if isinstance(value, Tensor)}
    sizes = {int(value.shape[0]) if value.dim() else 0 for value in outputs.values()}
    size = sizes.pop()
    if sizes or size < 2:
        raise _no_slabs(subject, "its outputs share no leading dimension")
    step = max(1, size // SLABS)
    pieces: dict[str, list[Tensor]] = {path: [] for path in outputs}
    for start in range(0, size, step):
        part, mode = _oracle_of_slab(subject, tree, leaves, outputs, slice(start, start + step), size)
        for path, value in part.items():
            pieces[path].append(value)
    joined = {path: torch.cat(parts) for path, parts in pieces.items()}
    return {path: joined.get(path, value) for path, value in reference.items()}, mode


def _oracle_of_slab(
    subject: Subject, tree: Any, leaves: Mapping[str, Any], outputs: Mapping[str, Tensor], part: slice, size: int
) -> tuple[dict[str, Tensor], Fp64Mode]:
    cut = {path: _cut(leaf, part, size) for path, leaf in leaves.items()}
    if part.start == 0:
        with precision_flags(subject.options.precision):
            own, _ = flatten_output(subject.run(subject.function, *unflatten_call(tree, cut)))
        for path, whole in outputs.items():
            if not torch.allclose(own[path], whole[part], rtol=1e-3, atol=1e-5, equal_nan=True):
                raise _no_slabs(subject, "it does not treat the leading dimension's entries one by one")
    wide = {path: widened(leaf) for path, leaf in cut.items()}
    mode = Fp64Mode(declared_dtype(leaves, subject.state()))
    mode.pooled = True  # the pieces are joined outside of it
    with mode, declared_limits(mode.declared):
        found, _ = flatten_output(subject.run(subject.wide(), *unflatten_call(tree, wide)))
    return {path: found[path] for path in outputs}, mode


def _cut(leaf: Any, part: slice, size: int) -> Any:
    return leaf[part] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size else leaf


def _no_slabs(subject: Subject, why: str) -> DeviceError:
    return DeviceError(
        f"{subject.target.id}: the fp64 oracle does not fit the device's memory, and {why}",
        remedy="declare a smaller workload",
    )


def find_aliases(outputs: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, str]:
    """Output leaf -> the input or state leaf whose storage it shares."""
    storages = {t.untyped_storage().data_ptr(): path for path, t in others.items() if isinstance(t, Tensor)}
    found = {}
    for path, value in outputs.items():
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in storages and value.numel():
            found[path] = storages[value.untyped_storage().data_ptr()]
    return found
