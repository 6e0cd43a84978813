"""Do torch's operators give a module's answer by themselves, from what the module was given? In the worker only.

A function that calls attention and multiplies the result by one has a kernel, and that kernel takes time: its share
says nothing. So operators are watched as they run. Where one takes nothing but the call's inputs, the module's tensors
and what such operators have made of them, and returns what the module does, nothing else made the answer. Own kernels
that prepare what it takes (that unpack weights), or go on from there, do work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytest_cudaforge.evaluation.contract import is_torchs, works
from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = ["answering"]

#: So far apart, relative to the answer's norm, lie what is the same but for a rounding.
_SAME = {2: 2e-2, 4: 1e-5, 8: 1e-10}
#: Of so many operators, the last ones, what they returned is kept.
_MOST = 32
#: So many elements are compared at once, in fp64.
_PIECE = 1 << 24


def answering(call: Callable[[], Mapping[str, Any]], given: Iterable[Tensor]) -> tuple[str, ...]:
    """The operators of which each gives the first of all floating answers of ``call`` (outputs by path), in the order
    they run; none where another answer is no operator's. ``given``: the call's inputs and the module's tensors. Tensors
    of any shape; nothing is changed."""
    mode = _Library(list(given))
    with mode:
        outputs = call()
    answers = [value for value in outputs.values() if isinstance(value, Tensor) and value.is_floating_point()]
    if not answers or any(answer.numel() < 2 for answer in answers):
        return ()
    names = [tuple(dict.fromkeys(name for name, found in mode.found if _same(found, answer))) for answer in answers]
    return names[0] if all(names) else ()


@undisabled
class _Library(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what operators return that take nothing but what was given, or what they have made, in the order they
    run. ``made``: by where it lies, the latest of these, as others may have written there since, and whether it is
    more than a copy of something. Memory that is handed out is among them, with whatever it holds: that is never what
    the call goes on to write there, as each question comes with new values."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = given
        self.found: deque[tuple[str, Tensor]] = deque(maxlen=_MOST)
        self.made: dict[tuple[int, int], tuple[Tensor, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = f"{func.namespace}::{func.overloadpacket.__name__}"
        taken = list(_tensors_in((args, kwargs or {})))
        plain = is_torchs(name) and bool(taken) and all(map(self._is_plain, taken))
        worked = plain and (works(name) or any(self._made_of(tensor)[1] for tensor in taken))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_in(result) if plain else ():
            if tensor.is_floating_point() and not self._was_given(tensor):
                kept = tensor.detach().clone()
                self.made.pop(_place(tensor), None)
                self.made[_place(tensor)] = kept, worked
                self.found.extend([(name, kept)] if worked else [])
        while len(self.made) > _MOST:
            del self.made[next(iter(self.made))]
        return result

    def _made_of(self, tensor: Tensor) -> tuple[Tensor | None, bool]:
        return self.made.get(_place(tensor), (None, False))

    def _is_plain(self, tensor: Tensor) -> bool:
        made, _ = self._made_of(tensor)
        return self._was_given(tensor) or (made is not None and _same(tensor, made))

    def _was_given(self, tensor: Tensor) -> bool:
        """In the memory of something given, or with the same values."""
        place = tensor.untyped_storage().data_ptr()
        return any(place == one.untyped_storage().data_ptr() or _same(tensor, one) for one in self.given)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _same(found: Tensor, answer: Tensor) -> bool:
    if found.numel() != answer.numel() or not found.is_floating_point() or not answer.is_floating_point():
        return False
    near = max(_SAME.get(one.element_size(), 0.0) for one in (found, answer))
    apart = size = 0.0
    flat, other = found.detach().flatten(), answer.detach().flatten()
    for begin in range(0, len(flat), _PIECE):
        left, right = (one[begin : begin + _PIECE] for one in (flat, other))
        apart += float((left.double() - right.double()).square().sum())
        size += float(right.double().square().sum())
    return apart <= near**2 * size
