"""What torch must not do for the first time in several threads at once.

torch hands contiguous floats to MKL's vector functions, from each thread of its own a part. MKL finds out in a
function's first call which kernel it has for it; where several threads make that call, one may compute its whole part
by a kernel of half the digits (pytorch/pytorch#188792). An honest candidate's first answer, or a reference's, is wrong
then.
"""

from __future__ import annotations

from typing import Any

__all__ = ["settle_vector_math"]

_FUNCTIONS = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor"),
    *("lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sigmoid", "sin", "sinh", "sqrt"),
    *("tan", "tanh", "trunc"),
)


def settle_vector_math(torch: Any) -> None:
    """Call each of them once in both precisions, on one element, which no second thread takes part in."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
