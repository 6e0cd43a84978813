"""Which targets a trivial kernel could pass, and which cannot be forged at all. In the oracle's process only.

A trivial kernel is one that returns zeros, the answer to another draw, one of its inputs, or that ignores its inputs or
its weights. Each is held against the verdict's own rule on the verdict's own kinds of trials: other draws, other
weights, redrawn inputs. It is a finding only where it survives all of them; the first that refuses it clears the
target, so an honest target costs a handful of runs of its reference, and no oracle.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.correctness import Rule, judge_output
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.precision import Fp64Mode, precision_flags, widen
from pytest_cudaforge.evaluation.subject import Subject, Weights, seed_generators
from pytest_cudaforge.evaluation.undisabled import undisabled
from pytest_cudaforge.records import LintFinding
from pytest_cudaforge.runtime.signature import flatten_call, flatten_output, unflatten_call

__all__ = ["lint"]

_WEIGHTS = 20_260_101
#: Elements looked at where an impression is enough, evenly spread.
_SAMPLE = 1 << 16
#: Outputs that differ by more than this share of their size need no oracle to be told apart, unless they are so small
#: that they may be nothing but rounding.
_ALIKE, _MAYBE_ROUNDING = 0.1, 1e-4
#: Smaller outputs vanish on any device that flushes denormals, and in any tolerance.
_TINY = 1e-30
#: From these shares of NaN, infinity or one single value on, an output shows nothing, or little.
_NOTHING, _LITTLE, _SATURATED = 0.999, 0.1, 0.99
#: Inputs that are changed one by one.
_MAX_INPUTS = 8

Leaves = dict[str, Any]


def lint(subject: Subject, workload: str) -> list[LintFinding]:
    """What is wrong with one workload as a task; those that refuse it first.

    Raises TargetError where the target's own code fails as drawn. Weights and state are as constructed afterwards.
    """
    found: list[LintFinding] = []
    with subject.as_constructed():
        try:
            found.extend(_Linter(subject, workload).findings())
        except torch.OutOfMemoryError:
            # Several answers are held at once here, more than a verdict needs.
            found.append(LintFinding("memory", "not all probes were taken: the device has too little memory", False))
    return sorted(found, key=lambda finding: not finding.refuses)


@dataclass
class _Answer:
    """The reference's answer to one probe. ``inputs`` are those before the call; ``outputs`` include what it wrote."""

    probe: str
    inputs: Leaves
    tree: Any
    weights: int | None
    outputs: Leaves
    judged_by: tuple[Leaves, dict[str, Rule]] | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {path: value for path, value in self.outputs.items() if isinstance(value, Tensor)}


@dataclass
class _Suspect:
    """A trivial kernel that no probe has refused yet. ``answers``: its outputs for a probe, None where it has none."""

    kind: str
    text: str
    answers: Callable[[_Answer], Leaves | None]
    probes: list[str] = field(default_factory=list)
    worst: float = 0.0
    bound: float = 0.0

    def finding(self) -> LintFinding:
        how = f"largest error ratio {self.worst:.2g}, {self.bound:.3g} allowed" if self.worst else "bit by bit"
        return LintFinding(self.kind, f"{self.text}; right on all of {', '.join(self.probes)} ({how})")


class _Linter:
    """Probes of one workload. Runs the reference with seeded generators and under the target's precision."""

    def __init__(self, subject: Subject, workload: str) -> None:
        self.subject, self.workload = subject, workload
        self.written = subject.mutates(workload)
        parameters = subject.module.parameters() if subject.module is not None else ()
        self.weighted = any(p.is_floating_point() and p.numel() for p in parameters)

    def findings(self) -> Iterator[LintFinding]:
        first = self._answer("the first draw", *self._inputs(1), None)
        early = [*self._not_reproducible(first)]
        other = self._answer("another draw", *self._inputs(2), None)
        early += [*_not_static(self.subject, first, other)]
        yield from early
        if any(finding.refuses for finding in early):
            return
        try:
            answers = [first, other, *self._reweighted(other)]
        except TargetError as error:
            if is_fatal(error):
                raise
            yield LintFinding("weights", f"it fails on re-randomised weights, which every verdict uses: {error.what}")
            return
        yield from _empty_outputs(answers)
        trivial = self._trivial(answers)
        yield from trivial
        if not trivial:
            yield from _constant_parts(answers)
            yield from self._idle_inputs(first, other)
            yield from self._carried(first)

    # -- running the reference

    def _inputs(self, seed: int, family: str = "drawn") -> tuple[Leaves, Any]:
        leaves, tree = flatten_call(*self.subject.draw(self.workload, seed))
        self.subject.domain.redraw(self.workload, leaves, family, seed)
        return leaves, tree

    def _answer(
        self, probe: str, inputs: Leaves, tree: Any, weights: int | None, seed: int = 0, calls: int = 1
    ) -> _Answer:
        """Run the reference on copies of what it writes, after seeding every generator with ``seed``; the last of so
        many ``calls``."""
        subject = self.subject
        subject.set_weights(Weights(weights))
        state = subject.state()
        try:
            for _ in range(calls):
                leaves = {p: leaf.clone() if f"input/{p}" in self.written else leaf for p, leaf in inputs.items()}
                seed_generators(seed)
                with precision_flags(subject.options.precision):
                    returned = subject.run(subject.function, *unflatten_call(tree, leaves))
            outputs = {path: _owned(value, state) for path, value in flatten_output(returned)[0].items()}
            outputs |= {f"written input {p}": leaf for p, leaf in leaves.items() if f"input/{p}" in self.written}
            outputs |= {f"written state {p}": t.clone() for p, t in state.items() if f"state/{p}" in self.written}
        finally:
            if any(path.startswith("state/") for path in self.written):
                subject.restore()
        return _Answer(probe, inputs, tree, weights, outputs)

    def _carried(self, first: _Answer) -> Iterator[LintFinding]:
        """Outputs that the state which a call leaves behind changes: every trial begins with it anew."""
        if not any(path.startswith("state/") for path in self.written):
            return
        again = self._answer("the next call", first.inputs, first.tree, first.weights, calls=2)
        changed = [
            p for p, v in first.outputs.items() if not p.startswith("written ") and not _equal(v, again.outputs[p])
        ]
        for path in changed:
            text = f"{path} changes from one call to the next on the same inputs, by the state that forward writes"
            yield LintFinding("state", f"{text}: a verdict shows the first call alone", False)

    def _oracle(self, answer: _Answer) -> tuple[Leaves, dict[str, Rule]]:
        """The fp64 run of an answer's call and the rules it gives; the reference itself where there is no such run."""
        if answer.judged_by is not None:
            return answer.judged_by
        subject, options = self.subject, self.subject.options
        subject.set_weights(Weights(answer.weights))
        leaves = {path: _wide(leaf, f"input/{path}" in self.written) for path, leaf in answer.inputs.items()}
        mode = Fp64Mode()
        seed_generators(0)
        found: Leaves = {}
        try:
            with mode:
                found = flatten_output(subject.run(subject.wide(), *unflatten_call(answer.tree, leaves)))[0]
        except (TargetError, torch.OutOfMemoryError) as error:
            if is_fatal(error):
                raise
            mode.partial = True
        oracle = {p: found.get(p, _wide(value, False)) for p, value in answer.outputs.items()}
        summed = {path: mode.summed(found[path]) if path in found else mode.reduction for path in oracle}
        rules = {p: Rule(n, mode.partial, atol=options.atol, rtol=options.rtol) for p, n in summed.items()}
        answer.judged_by = oracle, rules
        return answer.judged_by

    def _reweighted(self, answer: _Answer) -> list[_Answer]:
        return [self._answer("other weights", answer.inputs, answer.tree, _WEIGHTS)] if self.weighted else []

    # -- can it be forged at all

    def _not_reproducible(self, first: _Answer) -> Iterator[LintFinding]:
        with _DynamicShapes() as dynamic:
            again = self._answer("the same call", first.inputs, first.tree, None)
        drawn = _generators(self.subject.device)
        seed_generators(0)
        if different := _different(first, again):
            if self._judged(again.outputs, first) is not None:
                yield LintFinding("order", f"two runs on the same inputs differ by their rounding: {different}", False)
            elif not self.subject.options.nondeterministic:
                what = f"two runs on the same inputs differ beyond rounding: {different}"
                yield LintFinding("nondeterministic", f"{what}; make it reproducible, or declare nondeterministic=True")
        elif drawn != _generators(self.subject.device):
            reseeded = self._answer("another seed", first.inputs, first.tree, None, seed=1)
            if self._judged(reseeded.outputs, first) is None:
                different = _different(first, reseeded)
                what = f"not forgeable: it draws random numbers, and the same inputs give other outputs: {different}"
                yield LintFinding("random", f"{what}; use eval mode, or make the random numbers an input")
        if dynamic.operators:
            yield from self._shaped_by_values(first, dynamic.operators)

    def _shaped_by_values(self, first: _Answer, operators: Sequence[str]) -> Iterator[LintFinding]:
        """``x[x != 0]`` has one shape for all dense draws: every second element is set to zero, too."""
        halved = {path: _halved(leaf) for path, leaf in first.inputs.items()}
        try:
            answer = self._answer("every second element zero", halved, first.tree, None)
        except TargetError as error:
            if is_fatal(error):
                raise
            return  # such values mean nothing to it
        for path, (was, now) in _shapes_apart(first, answer).items():
            what = f"{path} is {was} as drawn and {now} with every second element zero ({', '.join(operators)})"
            yield LintFinding("shape", f"not forgeable: output shapes depend on values: {what}")

    # -- trivial kernels

    def _trivial(self, answers: list[_Answer]) -> list[LintFinding]:
        """Suspects that survive the probes at hand, and then the redrawn inputs that verdicts use."""
        suspects = list(self._suspects(answers))
        for answer in answers:
            suspects = [suspect for suspect in suspects if self._survives(suspect, answer)]
        weights = answers[-1].weights
        families = self.subject.domain.families(self.workload) if suspects else ()
        for number, family in enumerate(families):
            if not suspects:
                break
            answer = self._answer(f"{family} inputs", *self._inputs(10 + number, family), weights)
            suspects = [suspect for suspect in suspects if self._survives(suspect, answer)]
        kinds = {suspect.kind for suspect in suspects}
        # What returns a constant ignores its inputs and its weights anyway.
        redundant = {"weights"} if "copy" in kinds else set()
        redundant |= {"inputs", "weights"} if kinds & {"constant", "zeros"} else set()
        return [suspect.finding() for suspect in suspects if suspect.kind not in redundant]

    def _suspects(self, answers: Sequence[_Answer]) -> Iterator[_Suspect]:
        first, other, last = answers[0], answers[1], answers[-1]
        same_inputs = not any(True for _ in _moving(first, other))
        yield _Suspect("zeros", "zeros would pass", _zeros)
        same = " (every draw gives the same inputs)" if same_inputs else ""
        yield _Suspect(
            "constant", f"a constant would pass{same}", lambda answer: None if answer is first else first.outputs
        )
        fixed = {} if same_inputs else {p: v for p, v in first.outputs.items() if _equal(v, other.outputs.get(p))}
        if (sources := _copied(first, fixed)) is not None:
            named = [f"{path} is {self.subject.input_name(source)}" for path, source in sources.items()]
            names = ", ".join([*named, *(f"{path} is always the same" for path in fixed)])
            yield _Suspect("copy", f"a copy would pass: {names}", lambda answer: _copies(answer, sources) | fixed)
        if not same_inputs:
            text = "a kernel that ignores its inputs would pass"
            yield _Suspect("inputs", text, lambda answer: _for_other_inputs(answer, first, last))
        if self.weighted:
            text = "a kernel that ignores every weight would pass"
            yield _Suspect("weights", text, lambda answer: self._for_own_weights(answer, other, last))

    def _for_own_weights(self, answer: _Answer, other: _Answer, last: _Answer) -> Leaves | None:
        """What a kernel answers that has the weights as constructed built in."""
        if answer.weights is None:
            return None
        if answer is last:
            return other.outputs
        return self._answer("weights as constructed", answer.inputs, answer.tree, None).outputs

    def _survives(self, suspect: _Suspect, answer: _Answer) -> bool:
        given = suspect.answers(answer)
        if given is None:
            return True  # this probe says nothing about it
        judged = self._judged(given, answer, sure=bool(suspect.probes))
        if judged is None:
            return False
        suspect.probes.append(answer.probe)
        if judged[0] > suspect.worst:
            suspect.worst, suspect.bound = judged
        return True

    def _judged(self, outputs: Leaves, answer: _Answer, *, sure: bool = False) -> tuple[float, float] | None:
        """Largest error ratio and its bound of outputs that the verdict's rule accepts; None where it does not.

        ``sure``: they were right before, so they are judged even where they look different: both may be rounding.
        """
        if not _alike(outputs, answer.outputs, sure=sure):
            return None
        if all(_equal(outputs[path], value) for path, value in answer.outputs.items()):
            return 0.0, 0.0
        oracle, rules = self._oracle(answer)
        worst = (0.0, 0.0)
        for path, value in answer.tensors.items():
            judgement = judge_output(path, outputs[path], value, oracle[path], rules[path])
            if judgement.mismatches:
                return None
            worst = max(worst, (judgement.error_ratio or 0.0, judgement.bound or 0.0))
        return worst

    # -- inputs by themselves

    def _idle_inputs(self, first: _Answer, other: _Answer) -> Iterator[LintFinding]:
        moving = list(_moving(first, other))
        for path, leaf in first.inputs.items():
            if isinstance(leaf, Tensor) and leaf.numel() and path not in moving:
                text = "is the same in every draw: a kernel may have its values built in"
                yield LintFinding("input", f"{self.subject.input_name(path)} {text}", False)
        whole = [path for path in moving if not first.inputs[path].is_floating_point()]
        # Indices, lengths and offsets may hang together: they are changed all at once.
        groups = [[path] for path in moving if path not in whole] + ([whole] if whole else [])
        for group in groups[:_MAX_INPUTS] if len(groups) > 1 else ():
            if self._idle(group, first, other):
                names = " and ".join(self.subject.input_name(path) for path in group)
                text = "does not matter: another draw of it alone gives the same outputs"
                yield LintFinding("input", f"{names} {text}", False)

    def _idle(self, group: Sequence[str], first: _Answer, other: _Answer) -> bool:
        inputs = {path: other.inputs[path] if path in group else leaf for path, leaf in first.inputs.items()}
        try:
            answer = self._answer("one other input", inputs, first.tree, None)
        except TargetError as error:
            if is_fatal(error):
                raise
            return False  # the inputs hang together, so it matters
        return self._judged(first.outputs, answer) is not None


@undisabled
class _DynamicShapes(TorchDispatchMode):
    """Notes the operators whose output's shape depends on values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in getattr(func, "tags", ()) and str(func) not in self.operators:
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def _not_static(subject: Subject, first: _Answer, other: _Answer) -> Iterator[LintFinding]:
    """Shapes, containers and plain numbers must be the same for all draws: a plan is made once."""
    for path, leaf in first.inputs.items():
        if _shape(leaf) != _shape(other.inputs.get(path)):
            what = f"{subject.input_name(path)} is {_shape(leaf)} in one draw and {_shape(other.inputs.get(path))}"
            yield LintFinding("draws", f"not forgeable: {what} in another; draw one shape, and more as workloads")
            return
    for path, (was, now) in _shapes_apart(first, other).items():
        what = f"{path} is {was} for one draw and {now} for another"
        yield LintFinding("shape", f"not forgeable: output shapes depend on values: {what}")
    for path, value in first.outputs.items():
        again = other.outputs.get(path)
        if not isinstance(value, Tensor) and not isinstance(again, Tensor) and not _equal(value, again):
            what = f"{path} is {value!r} for one draw and {again!r} for another"
            yield LintFinding("number", f"not forgeable: a plain number depends on values: {what}; return a tensor")


def _shapes_apart(first: _Answer, other: _Answer) -> dict[str, tuple[str, str]]:
    paths = dict.fromkeys([*first.outputs, *other.outputs])
    pairs = ((path, _shape(first.outputs.get(path)), _shape(other.outputs.get(path))) for path in paths)
    return {path: (was, now) for path, was, now in pairs if was != now}


def _shape(leaf: Any) -> str:
    return f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else "no tensor"


def _empty_outputs(answers: Sequence[_Answer]) -> Iterator[LintFinding]:
    """Outputs in which there is little or nothing to be right or wrong about."""
    floats = [path for path, value in answers[0].tensors.items() if value.is_floating_point() and value.numel()]
    only = len(floats) == len(answers[0].outputs)
    for path in floats:
        values = [answer.tensors[path] for answer in answers]
        finite = max(float(_some(value).isfinite().double().mean()) for value in values)
        if 1.0 - finite >= _LITTLE:
            what = f"{1.0 - finite:.4g} of {path} is NaN or infinite in every probe"
            lost = only and len(floats) == 1 and 1.0 - finite >= _NOTHING
            yield LintFinding("nonfinite", f"{what}: a constant NaN or infinity would pass" if lost else what, lost)
            continue
        top = max(float(_some(value).nan_to_num(0.0, 0.0, 0.0).abs().max()) for value in values)
        if 0.0 < top < _TINY and all(float(value.float().nan_to_num(0.0).abs().max()) < _TINY for value in values):
            what = f"{path} is nowhere larger than {top:.2g}: zeros would pass"
            yield LintFinding("tiny", what, only and len(floats) == 1)
        elif (share := min(_share_of_one_value(value) for value in values)) >= _SATURATED:
            yield LintFinding("saturated", f"{share:.4g} of {path} is one single value in every probe", False)


def _share_of_one_value(tensor: Tensor) -> float:
    sample = _some(tensor)
    return float((sample == sample.mode().values).double().mean()) if sample.numel() > 99 else 0.0


def _constant_parts(answers: Sequence[_Answer]) -> Iterator[LintFinding]:
    """Among several outputs, those that are the same in every probe."""
    for path, value in answers[0].tensors.items():
        counted = path.startswith("written ") and not value.is_floating_point()  # a counter of calls
        if value.numel() and not counted and all(_equal(value, answer.outputs[path]) for answer in answers[1:]):
            yield LintFinding("output", f"{path} is the same in every probe: a constant would pass there", False)


# -- trivial answers


def _zeros(answer: _Answer) -> Leaves:
    return {p: torch.zeros_like(v) if isinstance(v, Tensor) else v for p, v in answer.outputs.items()}


def _copied(answer: _Answer, fixed: Leaves) -> dict[str, str] | None:
    """By output, the input that it nearly equals; None where one that is not among the ``fixed`` equals none, and where
    all are fixed."""
    found = {}
    for path, value in answer.outputs.items():
        if path in fixed:
            continue
        inputs = ((p, leaf) for p, leaf in answer.inputs.items() if isinstance(leaf, Tensor) and leaf.numel())
        source = next((p for p, leaf in inputs if isinstance(value, Tensor) and _alike({"": leaf}, {"": value})), None)
        if source is None:
            return None
        found[path] = source
    return found or None


def _copies(answer: _Answer, sources: dict[str, str]) -> Leaves:
    return {path: answer.inputs[source] for path, source in sources.items()}


def _for_other_inputs(answer: _Answer, first: _Answer, last: _Answer) -> Leaves | None:
    """What the reference answered to other inputs under the same weights."""
    told = first if answer.weights is None else last
    return None if answer is told else told.outputs


def _moving(first: _Answer, other: _Answer) -> Iterator[str]:
    """Inputs that another draw changes."""
    for path, leaf in first.inputs.items():
        if isinstance(leaf, Tensor) and not _equal(leaf, other.inputs[path]):
            yield path


# -- tensors


def _owned(value: Any, state: dict[str, Tensor]) -> Any:
    """A copy where the output is a piece of the state, which is put back under it."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    shared = isinstance(value, Tensor) and value.numel() and value.untyped_storage().data_ptr() in storages
    return value.clone() if shared else value


def _wide(leaf: Any, written: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.clone() if written and widen(leaf.dtype) == leaf.dtype else leaf.to(widen(leaf.dtype))


def _halved(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    changed = leaf.clone().flatten()
    changed[::2] = 0.0
    return changed.view(leaf.shape)


def _some(tensor: Tensor) -> Tensor:
    """Elements evenly spread over the tensor, as fp64."""
    flat = tensor.detach().flatten()
    flat = flat[:: 1 + flat.numel() // _SAMPLE]
    return torch.view_as_real(flat).flatten().double() if flat.is_complex() else flat.double()


def _alike(given: Leaves, expected: Leaves, *, sure: bool = False) -> bool:
    """Could the rule accept these outputs? A cheap look that an honest target's outputs do not survive.

    ``sure``: only what must be equal is looked at, such as shapes and integers.
    """
    for path, value in expected.items():
        other = given.get(path)
        if not isinstance(value, Tensor) or not isinstance(other, Tensor):
            if not _equal(value, other):
                return False
        elif value.shape != other.shape or value.dtype != other.dtype:
            return False
        elif not (value.is_floating_point() or value.is_complex()):
            if not torch.equal(value, other):
                return False
        elif not sure and value.numel() and not _near(_some(other), _some(value)):
            return False
    return True


def _near(given: Tensor, expected: Tensor) -> bool:
    finite = expected.isfinite()
    if not torch.equal(finite, given.isfinite()):
        return False
    error, size = (given - expected)[finite], expected[finite]
    if not size.numel():
        return True
    small = float(size.abs().max()) < _MAYBE_ROUNDING
    return small or float(error.square().mean()) <= _ALIKE**2 * float(size.square().mean())


def _equal(first: Any, other: Any) -> bool:
    """The same value, NaN equal to itself."""
    if not isinstance(first, Tensor) or not isinstance(other, Tensor):
        return type(first) is type(other) and bool(first == other or (first != first and other != other))
    if first.shape != other.shape or first.dtype != other.dtype:
        return False
    if torch.equal(first, other):
        return True
    if not torch.equal(_some(first).nan_to_num(0.0), _some(other).nan_to_num(0.0)):
        return False
    return bool(((first == other) | ((first != first) & (other != other))).all())


def _different(first: _Answer, other: _Answer) -> str:
    """The first output that is not the same, in words with numbers; "" where all are."""
    for path, value in first.outputs.items():
        now = other.outputs.get(path)
        if _equal(value, now):
            continue
        if not isinstance(value, Tensor) or not isinstance(now, Tensor) or value.shape != now.shape:
            return f"{path} is {_told(value)}, then {_told(now)}"
        apart = (_some(value) - _some(now)).abs().nan_to_num(0.0)
        return f"{path} by up to {float(apart.max()):.2g} where it is up to {float(_some(value).abs().max()):.2g}"
    return ""


def _told(value: Any) -> str:
    return _shape(value) if isinstance(value, Tensor) else repr(value)


def _generators(device: torch.device) -> tuple[Any, ...]:
    """The state of every generator that forward might use, comparable."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    numpy = sys.modules.get("numpy")
    drawn = repr(numpy.random.get_state()) if numpy is not None else ""
    return (*(state.numpy().tobytes() for state in states), random.getstate(), drawn)
