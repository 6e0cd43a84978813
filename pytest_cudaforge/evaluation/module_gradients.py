"""A ModelNew's forward and backward as one call, which takes what forward takes, and returns gradients.

The counterpart of :mod:`gradients`, where the reference's are made, in the candidate's process. Between forward and
backward the module is called once more, on other values, as a layer is that a network uses twice; every other time the
gradient that comes in is no contiguous tensor, as behind a transpose; and what forward returned must stay as it was.
One call in three is two, in each of which half of the tensors need no gradient, as when weights are frozen. In one of
four nobody holds the answers themselves, as where what follows needs them no more: others lie where they lay.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.evaluation.module_answers import as_it_was, share
from pytest_cudaforge.runtime.gradients import GRADIENT, MODULE, OUTPUT

if TYPE_CHECKING:
    import torch

__all__ = ["NO_GRADIENTS", "Gradients", "NoGradients", "forward_keywords"]

NO_GRADIENTS = "forward records no gradients"
#: One call in so many has half of the tensors frozen, then the other half.
_FROZEN = 3
#: Before one backward in so many there are so many calls of forward, as take no longer than this.
_OFTEN, _OUTSTANDING = 4, (40, 0.05)
#: ... and of those one in eight has more, for longer, and as many behind them whose answers nobody keeps.
_SELDOM, _OUTSTANDING_LONG, _FORGOTTEN = 32, (600, 0.5), (5000, 0.5)
#: One call in so many holds no answers. In one of so many answers are added to others.
_LET_GO, _RESIDUAL = 4, 5
#: Sums that come in no order differ by less, as a share of the largest gradient.
_ALIKE = 1e-3
#: Gradients of which memory has few elements (see :func:`_once`).
_FEW_IN_MEMORY = ("all", "rows", "first", "second")
#: Gradients that are kept until the next call are no larger.
_KEPT_BYTES = 1 << 26


class NoGradients(Exception):
    """No output depends on inputs or parameters in a way that autograd knows."""


def forward_keywords(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Of a call of forward and backward in one: those of forward's own."""
    return {name: value for name, value in kwargs.items() if name not in (OUTPUT, GRADIENT)}


class Gradients:
    """``paths``: of the gradients to be returned, "out.0" of input 0, "out.module.weight" of parameter weight.
    ``together``: of those that the reference has in one storage with one before."""

    def __init__(self, paths: Sequence[str], together: Collection[str] = ()) -> None:
        self._keys = [path.removeprefix("out.") for path in paths]
        self._together = frozenset(path.removeprefix("out.") for path in together)
        self._calls = 0
        #: Where answers lay that nobody holds any more.
        self._left: frozenset[int] = frozenset()
        #: What backward returned last, and copies of it.
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Gradients by key, each contiguous and of its own. Raises NoGradients, and what the model raises."""
        import torch

        parameters = dict(model.named_parameters(remove_duplicate=False))
        trained = {key: parameters.get(key.removeprefix(MODULE)) for key in self._keys if key.startswith(MODULE)}
        weights = {key: weight for key, weight in trained.items() if weight is not None}
        self._calls += 1
        found: dict[str, torch.Tensor] = {}
        for keys in self._parts():
            part = {key: weight for key, weight in weights.items() if key in keys}
            for weight in part.values():
                weight.requires_grad_(True)
            try:
                with torch.enable_grad():
                    found |= self._gradients(model, keys, part, args, kwargs)
            finally:
                for weight in part.values():
                    weight.requires_grad_(False)
        return {key: found[key] for key in sorted(found)}

    def _parts(self) -> list[list[str]]:
        """Keys of tensors that need gradients at once: all of them, or one half and then the other."""
        if self._calls % _FROZEN or len(self._keys) < 2:
            return [self._keys]
        drawn = random.SystemRandom().sample(self._keys, len(self._keys))
        return [drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]]

    def _gradients(
        self,
        model: Callable[..., Any],
        keys: Collection[str],
        weights: Mapping[str, torch.Tensor],
        args: Any,
        kwargs: Mapping[str, Any],
    ) -> dict[str, torch.Tensor]:
        import torch

        from pytest_cudaforge.runtime.signature import flatten_call, flatten_output, unflatten_call

        given, _ = flatten_output(kwargs[GRADIENT])
        own = forward_keywords(kwargs)
        leaves, tree = flatten_call(args, own)
        asked = [key for key in keys if not key.startswith(MODULE)]
        inputs = {key: leaves[key].detach().requires_grad_() for key in asked}
        positional, named = unflatten_call(tree, {**leaves, **inputs})
        outputs, _ = flatten_output(self._answer(model, positional, named))
        grads = {path: grad for path, grad in given.items() if isinstance(grad, torch.Tensor)}
        # An output that the loss does not take has no gradient at all.
        told = {path: grad for path, grad in grads.items() if bool((grad != 0).any())} or grads
        pairs = [(outputs.get(path), grad) for path, grad in told.items()]
        recorded = [(out, grad) for out, grad in pairs if isinstance(out, torch.Tensor) and out.requires_grad]
        sources = {**weights, **inputs}
        if not recorded and len(told) < len(grads):
            return {key: torch.zeros_like(source) for key, source in sources.items()}
        if not recorded and len(keys) < len(self._keys):
            raise RuntimeError(f"forward records no gradients where all but {_named(keys)} are frozen")
        if not recorded:
            raise NoGradients(NO_GRADIENTS)
        others = {key: tensor.detach().flip(0) if tensor.dim() else tensor for key, tensor in inputs.items()}
        positional, named = unflatten_call(tree, {**leaves, **others})
        tensors = (leaf for leaf in (*leaves.values(), *outputs.values()) if isinstance(leaf, torch.Tensor))
        held = self._called_on(model, positional, named, sum(tensor.nbytes for tensor in tensors))
        returned = [(out.detach(), out.detach().clone()) for out, _ in recorded]
        given_grads = [grad if self._calls % 2 else _scattered(grad, self._calls // 2) for _, grad in recorded]
        if self._calls % 2 == 0:
            _compare_losses([out for out, _ in recorded], list(sources.values()))
        found = self._backward([out for out, _ in recorded], list(sources.values()), given_grads)
        if not all(as_it_was(now, was) for now, was in returned):
            raise RuntimeError("backward changed what forward had returned: a caller may still need it")
        kept = {key: grad for key, grad in zip(sources, found, strict=True) if grad is not None}
        if len(told) < len(grads):
            kept = {key: kept.get(key, torch.zeros_like(source)) for key, source in sources.items()}
        self._require_apart(kept)
        written = [*given_grads, *leaves.values(), *weights.values()]
        self._look_back([grad for grad in kept.values() if not _lies_in(grad, written)])
        del held
        missing = [key for key in keys if key not in kept]
        if missing:
            raise RuntimeError(f"autograd gives no gradient of {_named(missing)}, for which the reference has one")
        return {key: grad.clone(memory_format=torch.contiguous_format) for key, grad in kept.items()}

    def _backward(
        self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of ``sources``. In one call of some the outputs are added to others, as in a residual block: what
        comes in goes past the module as well, and nobody but autograd holds it (not gigabytes, which take room)."""
        import torch

        past = self._calls % _RESIDUAL == 0 and sum(out.nbytes for out in outputs) <= _KEPT_BYTES
        others = [torch.zeros_like(out, requires_grad=True) for out in outputs] if past else []
        with torch.enable_grad():
            sums = [(out + other) * 1 for out, other in zip(outputs, others, strict=True)] if others else outputs
        found = torch.autograd.grad(sums, [*sources, *others], grads, allow_unused=True)
        pairs = zip(found[len(sources) :], grads, strict=False)
        if not all(now is not None and as_it_was(now, was) for now, was in pairs):
            raise RuntimeError("backward changed the gradient that it was given, which others need (a residual)")
        return found[: len(sources)]

    def _require_apart(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Raises RuntimeError where two gradients are views of the same elements, which the reference's are not:
        autograd makes them ``.grad``, and who clips one in place writes both. One tensor for both it copies itself."""
        for key, before in ((key, other) for key in sorted(grads) for other in sorted(grads) if other < key):
            apart = key not in self._together and grads[key] is not grads[before]
            if apart and share(grads[key], grads[before]):
                raise RuntimeError(f"backward gives the gradients of {_named([before, key])} in one memory")

    def _called_on(self, model: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], call_bytes: int) -> list[Any]:
        """Answers of a call, now and then of some dozens, or hundreds, all of which could still be trained through: a
        layer of a network that is unrolled, or a loss that is added up. What is saved for backward is each call's own.
        """
        import torch

        answers = [] if self._left else [self._answer(model, args, kwargs)]
        answers += self._called_where_it_lay(model, args, kwargs, call_bytes)

        def call_on(most: int, most_s: float, keep: bool) -> None:
            began = time.perf_counter()
            for _ in range(most):
                answer = self._answer(model, args, kwargs)
                if keep:
                    answers.append(answer)
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    torch.cuda.synchronize()  # hundreds that are only queued may take minutes
                if time.perf_counter() - began > most_s:
                    return

        if self._calls % _OFTEN == 1:
            most, most_s = _OUTSTANDING_LONG if self._calls % _SELDOM == 1 else _OUTSTANDING
            call_on(min(most, _KEPT_BYTES // max(1, call_bytes)), most_s, keep=True)
        if self._calls % _SELDOM == 1:
            call_on(*_FORGOTTEN, keep=False)
        return answers

    def _called_where_it_lay(
        self, model: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], call_bytes: int
    ) -> list[Any]:
        """Answers, until one of them lies where one lay that is held no more."""
        import torch

        from pytest_cudaforge.runtime.signature import flatten_output

        began, most, most_s = time.perf_counter(), *_OUTSTANDING
        answers: list[Any] = []
        while self._left and len(answers) < max(2, min(most, _KEPT_BYTES // max(1, call_bytes))):
            answers.append(model(*args, **kwargs))
            leaves = flatten_output(answers[-1])[0].values()
            if self._left & {leaf.data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}:
                break
            if time.perf_counter() - began > most_s:
                break
        self._left = frozenset()
        return answers

    def _answer(self, model: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What it returns; of one call in some, what comes of a product of each tensor with one, whose backward needs
        none of the two, so that nothing but autograd's own notes is left of the answer."""
        import torch

        from pytest_cudaforge.runtime.signature import flatten_output, unflatten_output

        answer = model(*args, **kwargs)
        if self._calls % _LET_GO:
            return answer
        leaves, tree = flatten_output(answer)
        floats = {path for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        self._left = self._left or frozenset(leaves[path].data_ptr() for path in floats)
        return unflatten_output(tree, {path: leaf * 1 if path in floats else leaf for path, leaf in leaves.items()})

    def _look_back(self, returned: Sequence[torch.Tensor]) -> None:
        """Raises RuntimeError where this backward wrote into what the one before returned, as what adds up gradients
        may hold it. The ones of this one are kept for the next, unless they are large."""
        if not all(as_it_was(now, was) for now, was in self._kept):
            raise RuntimeError("backward changed the gradients that an earlier one had returned: return new tensors")
        small = sum(grad.nbytes for grad in returned) <= _KEPT_BYTES
        self._kept = [(grad, grad.clone()) for grad in returned] if small else []


def _lies_in(tensor: torch.Tensor, others: Sequence[Any]) -> bool:
    """Is its memory that of one of them, which is written anew for the next call?"""
    import torch

    at = tensor.data_ptr()
    storages = [one.untyped_storage() for one in others if isinstance(one, torch.Tensor)]
    return any(one.data_ptr() <= at < one.data_ptr() + one.nbytes() for one in storages)


def _compare_losses(outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Gradients of sums of the outputs, of which memory has few elements (see :func:`_once`), and of the same losses by
    other means; what was saved is there for the next after each. Raises RuntimeError."""
    import torch

    tried: list[list[tuple[int, ...]]] = []
    for way in _FEW_IN_MEMORY:
        once = [_once(out, way) for out in outputs]
        strides = [one.stride() for one in once]
        if strides in tried:  # of matrices the first row is all that memory has, either way
            continue
        tried.append(strides)
        found = [
            torch.autograd.grad(outputs, sources, grads, allow_unused=True, retain_graph=True)
            for grads in (once, [one.contiguous() for one in once])
        ]
        _require_alike(*found)


def _once(output: torch.Tensor, way: str) -> torch.Tensor:
    """A gradient of ``output`` of which memory has one element, that of a sum, or one row, that of a sum over rows that
    is weighted, or one of what its first or its second dimension counts, that of a sum over samples or over places."""
    import torch

    shape = list(output.shape)
    kept = {"all": [], "rows": shape[-1:], "first": shape[1:], "second": shape[:1] + [1] * bool(shape[1:]) + shape[2:]}
    memory = [1] * (len(shape) - len(kept[way])) + kept[way]
    ones = torch.ones(memory, dtype=output.dtype, device=output.device)
    weights = ones if way == "all" else ones.flatten().cumsum(0).div(max(1, ones.numel())).view(memory)
    return weights.expand_as(output)


def _require_alike(found: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> None:
    """Gradients by an expanded one and by a contiguous one. Raises RuntimeError."""
    import torch

    for one, other in zip(found, others, strict=True):
        if (one is None) != (other is None):
            raise RuntimeError("backward gives a gradient of a loss in one of two ways to write it")
        if one is not None and other is not None:
            scale = float(other.detach().abs().nan_to_num(posinf=0.0).max()) if other.numel() else 0.0
            near = torch.isclose(one, other, rtol=_ALIKE, atol=_ALIKE * scale, equal_nan=True)
            if not bool(near.all()):
                raise RuntimeError("backward takes another gradient for the expanded one of a sum (strides of 0)")


def _named(keys: Collection[str]) -> str:
    names = (f"parameter {k.removeprefix(MODULE)}" if k.startswith(MODULE) else f"input {k}" for k in keys)
    return ", ".join(names)


def _scattered(grad: torch.Tensor, number: int) -> torch.Tensor:
    """The same values with other strides, one way after another: behind a transpose of two dimensions (merged heads),
    rows of a wider one, as behind a concatenation, or samples of more places than these."""
    import torch

    if grad.dim() < 2:
        return torch.stack([grad, grad], -1)[..., 0] if grad.dim() else grad
    ways = _ways_to_lie(grad.dim())
    one, other = ways[number % len(ways)]
    if one != other:
        return grad.transpose(one, other).contiguous().transpose(one, other)
    return torch.cat([grad, grad.narrow(one, 0, min(1, grad.shape[one]))], one).narrow(one, 0, grad.shape[one])


def _ways_to_lie(dims: int) -> list[tuple[int, int]]:
    """Pairs of dimensions that change places; of one with itself: the one that is a part of a longer one. Those first
    that lie around most."""
    swaps = [(one, other) for one in range(dims) for other in range(one + 1, dims)]
    first = [(0, dims - 1), (dims - 1, dims - 1), (1, 1), (0, 1)]
    return list(dict.fromkeys([*first, *swaps, *((dim, dim) for dim in range(1, dims))]))
