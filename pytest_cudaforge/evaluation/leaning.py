"""The reference with each of its operators a little off to one side. In the oracle's process only.

Roundings of a reference go either way, and a mean over thousands of rows has next to none of them left: 1 - cos of rows
that point nearly the same way. A kernel whose square root is off by the same last bit in every row (a GPU's approximate
ones are) is as good row by row, and its mean is off by all of that. How far such a bias moves an answer tells how well
it is conditioned (compare stochastic arithmetic, CADNA and Verificarlo, which perturb each operation's result).
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = ["CORRECTLY_ROUNDED", "LeaningMode"]

#: Operators that round nothing: they choose, move, copy or make values, or change their signs.
_EXACT = frozenset(
    [
        *("abs", "neg", "relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "threshold", "maximum", "minimum"),
        *("amax", "amin", "max", "min", "sort", "topk", "where", "masked_fill", "sign", "round", "floor", "ceil"),
        *("trunc", "clone", "_to_copy", "cat", "stack", "gather", "index", "index_select", "embedding", "flip", "roll"),
        *("arange", "linspace", "full", "ones", "zeros", "empty", "new_full", "new_ones", "new_zeros", "new_empty"),
        *("full_like", "ones_like", "zeros_like", "empty_like", "new_empty_strided", "empty_strided", "scalar_tensor"),
        *("eye", "tril", "triu", "repeat", "constant_pad_nd", "max_pool2d_with_indices", "lift_fresh_copy"),
    ]
)


#: Operators of which there is one right result, rounded once: whoever makes the same ones has the same bits.
CORRECTLY_ROUNDED = frozenset(
    [
        *("add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "reciprocal", "sqrt", "square"),
        *("fmod", "remainder", "floor_divide"),
    ]
)


@undisabled
class LeaningMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each new floating result of an operator that rounds is larger, or smaller, by one eps of its dtype throughout, or
    by up to ``most``: which of them is drawn by ``seed``. What works in place, what nothing is rounded in, and those in
    ``alike``, stay. ``each``: not throughout, but each element by up to as much of its own size, or of what is usual in
    its row, as sums differ that come in another order."""

    def __init__(self, seed: int, *, most: int = 1, alike: frozenset[str] = frozenset(), each: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._chance, self._most, self._exact, self._each = random.Random(seed), most, _EXACT | alike, each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self._exact or any(
            one.alias_info is not None for one in func._schema.returns
        ):
            return result
        side = self._chance.choice((-1.0, 1.0)) * self._chance.randint(1, self._most)
        if isinstance(result, (tuple, list)):
            return type(result)(self._moved(one, side) for one in result)
        return self._moved(result, side)

    def _moved(self, value: Any, side: float) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        by = side * torch.finfo(value.dtype).eps
        if not self._each or value.itemsize == 1 or not value.numel():
            return value * (1.0 + by)
        generator = torch.Generator(device=value.device).manual_seed(self._chance.getrandbits(62))
        wide = value if value.itemsize == 8 else value.float()
        share = torch.empty_like(wide).uniform_(-1.0, 1.0, generator=generator)
        size = wide.abs().nan_to_num_(0.0, 0.0, 0.0)  # what is barred by -inf stays so
        if size.dim() > 1:  # of rows that nearly vanish beside others a sum is as exact
            size = torch.maximum(size, wide.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True).sqrt())
        return (wide + by * share * size).to(value.dtype)
