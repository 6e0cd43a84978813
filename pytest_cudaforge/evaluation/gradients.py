"""A target's backward as a subject of its own. In the oracle's process only.

A call of it takes what forward takes, what forward returned (``out``) and a gradient for each floating output
(``grad_out``); it returns the gradients of inputs and parameters. So everything that holds for a forward is asked of a
backward by the same code: fp64 oracle and tolerance rule, secret values, poison, red zones, untouched inputs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.cases import BIG_CALL_FAMILIES
from pytest_cudaforge.evaluation.decisions import exact
from pytest_cudaforge.evaluation.domain import TYING, Domain
from pytest_cudaforge.evaluation.faults import is_fatal
from pytest_cudaforge.evaluation.kinks import KinkMode, same_zeros
from pytest_cudaforge.evaluation.precision import (
    Fp64Mode,
    declared_dtype,
    declared_limits,
    precision_flags,
    widened,
)
from pytest_cudaforge.evaluation.rarities import OF_RARITIES
from pytest_cudaforge.evaluation.structures import Structure
from pytest_cudaforge.evaluation.subject import Subject, in_one_storage
from pytest_cudaforge.records import Target
from pytest_cudaforge.runtime.gradients import GRADIENT, MODULE, OUTPUT, forward_workload
from pytest_cudaforge.runtime.signature import (
    flatten_call,
    flatten_output,
    split_call,
    unflatten_call,
    unflatten_output,
)

__all__ = ["GradientSubject"]

_OWN_ARGUMENTS = (OUTPUT, GRADIENT)
#: A relative error (rms) of gradients that have lost their leading digit.
LOST = 0.1
#: What losses are multiplied by, as mixed precision does, in one draw of two; fewer times where fp16 has the gradients.
_LOSS_SCALES, _HALF_LOSS_SCALES = (2.0**16, 2.0**-16, 2.0**-36), (2.0**4, 2.0**-4)
#: The share of zeros in a gradient that has passed a ReLU, or dropout.
_ZEROED = 0.75
#: How often a gradient is such a one, and how often rows of it are in balance.
_THINNED, _BALANCED = 0.45, 0.35
#: Draws by smaller seeds, from which an input's structure is told, have a plain gradient for each output.
_LEAST_SECRET = 1 << 20


class GradientSubject(Subject):
    """As Subject, of the backward. Workloads go by their backward names (runtime.gradients.backward_workload).

    Gradients are asked for of every parameter that trains as constructed, and of the inputs that the target draws with
    ``requires_grad``; where it draws none so, of every floating input.
    """

    #: Where a row of weights is zero there may be more than one right gradient.
    habits = ("turned", "muted", "faded", "strayed")
    #: Gradients flow through views and saved tensors that do not tell which sums are behind them.
    tells_sums_apart = False

    def __init__(self, target: Target, device: str, python_paths: tuple[str, ...] = ()) -> None:
        super().__init__(target, device, python_paths)
        #: May forward's places be any of equal ones, and so a gradient's?
        self.any_index = bool(self.options.index_outputs)
        #: Paths of gradients that autograd gave in a storage of one before them, as of x + y.
        self._together: tuple[str, ...] = ()
        # What the author says of outputs says nothing of gradients.
        self.options = replace(self.options, index_outputs=(), atol=None, rtol=None)

    def _new_domain(self) -> Domain:
        return GradientDomain(self)

    def why_none(self, workload: str) -> str:
        """Why the backward of a forward that writes nothing cannot be verified; "" where it can."""
        if set(_OWN_ARGUMENTS) & _argument_names(self.code):
            return f"the reference has an argument named {OUTPUT} or {GRADIENT}, which plan_backward has for itself"
        leaves, _ = flatten_call(*self.draw(workload, 0))
        tensors = [leaf for leaf in (*leaves.values(), *self.state().values()) if isinstance(leaf, torch.Tensor)]
        if any(tensor.is_complex() for tensor in tensors):
            return "gradients of complex tensors are not verified"
        try:
            found = self.run(self.function, *self.draw(workload, 0))
        except TargetError as error:
            if is_fatal(error):
                raise
            return f"the reference has no backward: {error.what.splitlines()[-1]}"
        return "" if found else "no input and no parameter has a gradient"

    # -- what a call takes

    def draw(self, workload: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self._draw_call(workload, seed)
        out = self._forward(args, kwargs)
        generator = torch.Generator(device=self.device).manual_seed(seed ^ 0x96AD)
        leaves, tree = flatten_output(out)
        grads = {path: _gradient_like(leaf, generator) for path, leaf in leaves.items()}
        if seed >= _LEAST_SECRET:
            grads = _of_some_loss(grads, random.Random(seed))
        return args, {**kwargs, OUTPUT: out, GRADIENT: unflatten_output(tree, grads)}

    def completed(self, leaves: dict[str, Any], tree: Any) -> dict[str, Any]:
        """``leaves`` with what forward returns for these inputs and the weights as they are now."""
        args, kwargs = self._without_own(*unflatten_call(tree, leaves))
        found, _ = flatten_call((), {OUTPUT: self._forward(args, kwargs)})
        return {**leaves, **found}

    def both(self, leaves: dict[str, Any], tree: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The reference's gradients and the oracle's; none of the oracle's where there is no fp64 form."""
        with precision_flags(self.options.precision):
            found = self.run(self.function, *unflatten_call(tree, leaves))
        wide = {path: widened(leaf) for path, leaf in leaves.items()}
        mode = Fp64Mode(declared_dtype(leaves, self.state()))
        try:
            with mode, declared_limits(mode.declared):
                return found, self.run(self.wide(), *unflatten_call(tree, wide))
        except torch.OutOfMemoryError:
            return found, {}
        except TargetError as error:
            if is_fatal(error):
                raise
            return found, {}

    def input_name(self, path: str) -> str:
        own = path.split(".")[:2]
        if own == ["kw", OUTPUT]:
            return f"{OUTPUT}, what forward returned"
        return GRADIENT if own == ["kw", GRADIENT] else super().input_name(path)

    def output_name(self, path: str) -> str:
        key = path.removeprefix("out.")
        if key.startswith(MODULE):
            return f"the gradient of {self.state_name(key.removeprefix(MODULE))}"
        return f"the gradient of {super().input_name(key)}" if key != path else path

    # -- what it returns

    @property
    def function(self) -> Any:
        return self._gradients_of(super().function)

    def wide(self) -> Any:
        return self._gradients_of(super().wide())

    def _gradients_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def gradients(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            return self._gradients(function, args, kwargs)

        return gradients

    def _gradients(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        given, _ = flatten_output(kwargs[GRADIENT])
        leaves, tree = flatten_call(*self._without_own(args, kwargs))
        parameters = dict(function.named_parameters()) if isinstance(function, torch.nn.Module) else {}
        sources = {MODULE + path: parameters[path] for path in self.trained}
        with torch.enable_grad(), _requiring_grad(sources.values()):
            inputs = {path: leaves[path].detach().requires_grad_() for path in self._wanted(leaves)}
            positional, named = unflatten_call(tree, {**leaves, **inputs})
            outputs, _ = flatten_output(function(*positional, **named))
            sources |= inputs
            pairs = [(outputs[path], grad) for path, grad in given.items() if isinstance(grad, torch.Tensor)]
            pairs = [(output, grad) for output, grad in pairs if output.requires_grad]
            found = _grads_of(pairs, list(sources.values()))
        grads_of = {key: grad for key, grad in sorted(zip(sources, found, strict=True)) if grad is not None}
        self._together = in_one_storage({f"out.{key}": grad for key, grad in grads_of.items()})
        return {key: grad.clone(memory_format=torch.contiguous_format) for key, grad in grads_of.items()}

    def in_one_storage(self, outputs: Mapping[str, Any]) -> tuple[str, ...]:
        """As autograd gave them last: ``outputs`` are copies."""
        return tuple(path for path in self._together if path in outputs)

    def _wanted(self, leaves: Mapping[str, Any]) -> list[str]:
        floating = [p for p, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        return [path for path in floating if path in self._asked] or floating

    # -- forward

    def _forward(self, args: Any, kwargs: Any) -> Any:
        """What forward returns, each tensor contiguous and of its own."""
        with precision_flags(self.options.precision):
            output = self.run(super().function, args, kwargs)
        leaves, tree = flatten_output(output)
        own = {
            path: leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, torch.Tensor) else leaf
            for path, leaf in leaves.items()
        }
        return unflatten_output(tree, own)

    def _draw_call(self, workload: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return super().draw(forward_workload(workload), seed)

    _asked: frozenset[str] = frozenset()

    def _draw_on_device(self, make: Callable[[], Any], seed: int) -> Any:
        drawn = super()._draw_on_device(make, seed)
        leaves, _ = flatten_call(*split_call(drawn))
        asked = [p for p, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        self._asked = frozenset(asked)
        return drawn

    @staticmethod
    def _without_own(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {name: value for name, value in kwargs.items() if name not in _OWN_ARGUMENTS}


#: Redraws of values that tie, which say nothing where nothing has a kink.
_SMOOTH = ("padded", "exact")


class GradientDomain(Domain):
    """As Domain, of the backward: what is more where gradients are asked for, and what is not right any more."""

    def __init__(self, subject: GradientSubject) -> None:
        super().__init__(subject)
        self.subject: GradientSubject = subject
        self._digits: dict[tuple[str, str], bool] = {}
        self._smoothly: dict[str, dict[str, bool]] = {}

    def structures(self, workload: str, *, widen: bool = True) -> dict[str, Structure]:
        found = super().structures(workload, widen=widen)
        # What forward returned follows from the rest.
        for path in found:
            if path.split(".")[:2] == ["kw", OUTPUT]:
                found[path] = "drawn"
        return found

    def families(
        self, workload: str, most: int | None = None, *, without: Collection[str] = (), rare: bool = True
    ) -> tuple[str, ...]:
        found: list[str] = []
        smooth = self._smooth(workload)
        forward = super().families(workload, without=without, rare=rare)
        taken = [*(known for known in forward if known not in smooth), *smooth]
        # What nothing else shows comes first; integers that hardly ever are drawn, beside all that, at last.
        seldom = [known for known in taken if known in OF_RARITIES]
        others = sorted((k for k in taken if k not in seldom), key=lambda family: family not in ("ties", *_SMOOTH))
        for known in others:
            if most is not None and len(found) >= most:
                break
            # At a tie (of a maximum, at a kink) rounding may say what is right: rows nearly vanish, not wholly.
            family = "small" if known == "faint" else known
            if (family in (*TYING, "missing") and family not in smooth) or (
                family != known and not self._takes(workload, family, self.structures(workload))
            ):
                continue
            if self._tried(family, functools.partial(self._keeps_digits, workload, family)):
                found.append(family)
        if most is None or most > BIG_CALL_FAMILIES:
            keeps = functools.partial(self._keeps_digits, workload)
            found += [family for family in seldom if self._tried(family, functools.partial(keeps, family))]
        return tuple(found)

    def _smooth(self, workload: str) -> tuple[str, ...]:
        """Families that are taken where nothing has a kink but norms at zero: rows of zeros, as what fills up a batch
        is trained on, too, and zeros and ones here and there, several in a row, so that factors are nothing."""
        structures, known = self.structures(workload), self._smoothly.setdefault(workload, {})
        for family in _SMOOTH if "generic" in structures.values() and not known else ():
            bent, wide = KinkMode(), KinkMode()

            def takes(family: str = family, bent: KinkMode = bent, wide: KinkMode = wide) -> bool:
                smooth = lambda _: not (bent.turns or bent.free)  # noqa: E731
                watched = self._watched(workload, family, structures, (bent, wide), smooth)
                return watched and same_zeros(bent.found, wide.found)

            known[family] = self._agrees(takes)
        return tuple(family for family in _SMOOTH if known.get(family))

    def _takes_ties(self, workload: str, family: str, structures: Mapping[str, Structure]) -> bool:
        """Does an operator take values that nobody has rounded that shares a gradient among equal ones, or gives it to
        the first, by torch's promise; and so does all else that has a kink?"""
        if self.subject.any_index:
            return False
        found, wide = KinkMode(), KinkMode()
        watched = self._watched(
            workload, family, structures, (found, wide), lambda _: found.promised and not found.free
        )
        return watched and exact(found.found, wide.found)

    def _keeps_digits(self, workload: str, family: str) -> bool:
        """Are the reference's own gradients about right there? Where terms cancel to nothing (a softmax of one entry)
        they are what rounding left, and so are any honest kernel's."""
        key = (workload, family)
        if key not in self._digits:
            leaves, tree = flatten_call(*self.subject.draw(workload, 1))
            self.redraw(workload, leaves, family, 1)
            with self.subject.as_constructed():
                found, exact = self.subject.both(leaves, tree)
            self._digits[key] = all(_about_right(found[path], value) for path, value in exact.items() if path in found)
        return self._digits[key]


def _about_right(found: torch.Tensor, exact: torch.Tensor) -> bool:
    error, scale = (float(t.double().square().mean()) if t.numel() else 0.0 for t in (found.double() - exact, exact))
    return not error > LOST**2 * scale


def _argument_names(called: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return frozenset()  # a callable of C code, or one that hides its signature


@contextlib.contextmanager
def _requiring_grad(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Parameters require grad inside; they go by ``requires_grad_(False)`` everywhere else in the oracle."""
    held = list(parameters)
    for parameter in held:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in held:
            parameter.requires_grad_(False)


def _grads_of(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], sources: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Gradients of ``sources``, those of outputs that a loss does not take left out: zeros where nothing else has any;
    None where no output at all depends on one."""
    outs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
    told = [(output, grad) for output, grad in pairs if bool((grad != 0).any())]
    if not told or len(told) == len(pairs):
        return torch.autograd.grad(outs, sources, grads, allow_unused=True)
    every = torch.autograd.grad(outs, sources, grads, allow_unused=True, retain_graph=True)
    some = torch.autograd.grad([o for o, _ in told], sources, [g for _, g in told], allow_unused=True)
    zeros = (None if grad is None else torch.zeros_like(grad) for grad in every)
    return [zero if grad is None else grad for grad, zero in zip(some, zeros, strict=True)]


def _of_some_loss(grads: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """``grads`` as another loss would have them: scaled, that of one output alone, half of the times each; mostly
    zeros, as behind a ReLU, or in balance, as a difference's are. Backward is linear in them, whatever they come to."""
    found = {path: grad for path, grad in grads.items() if isinstance(grad, torch.Tensor)}
    if len(found) > 1 and chance.random() < 0.5:
        one = chance.choice(list(found))
        found = {path: grad if path == one else torch.zeros_like(grad) for path, grad in found.items()}
    if chance.random() < 0.5:
        halves = any(grad.dtype == torch.float16 for grad in found.values())
        scale = chance.choice(_HALF_LOSS_SCALES if halves else _LOSS_SCALES)
        found = {path: grad * scale for path, grad in found.items()}
    kind, generator = chance.random(), torch.Generator().manual_seed(chance.getrandbits(62))
    if kind < _THINNED:
        found = {path: _thinned(grad, generator) for path, grad in found.items()}
    elif kind < _THINNED + _BALANCED:
        found = {path: _balanced(grad, generator) for path, grad in found.items()}
    return {**grads, **found}


def _thinned(grad: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """With zeros for three of four elements; that of one number stays."""
    kept = torch.rand(grad.shape, generator=generator) >= _ZEROED
    return grad * kept.to(grad.device) if grad.numel() > 1 else grad


def _balanced(grad: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """With rows, about every other one, of as many ones as minus ones, times the gradient's size: their sum is nothing,
    and they are not."""
    if not grad.dim() or grad.shape[-1] < 2:
        return grad
    half = grad.shape[-1] // 2
    order = torch.rand(grad.shape, generator=generator).argsort(-1)
    signs = (order < half).double() - ((order >= half) & (order < 2 * half)).double()
    size = float(grad.double().square().mean().sqrt())
    signs *= 2.0 ** round(math.log2(size)) if size else 0.0
    chosen = torch.rand((*grad.shape[:-1], 1), generator=generator) < 0.5
    return torch.where(chosen.to(grad.device), signs.to(grad.device, grad.dtype), grad)


def _gradient_like(leaf: Any, generator: torch.Generator) -> Any:
    """A normal gradient for a floating tensor, else None."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return None
    wide = torch.float64 if leaf.dtype == torch.float64 else torch.float32
    return torch.randn(leaf.shape, dtype=wide, device=leaf.device, generator=generator).to(leaf.dtype)
