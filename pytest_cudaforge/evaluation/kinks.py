"""Where gradients have a kink, and whether rounding decides on which side of it values lie. In the oracle only.

At a tie of a maximum there is more than one right gradient to a mathematician, and one to torch: amax shares it evenly,
max along a dimension and pooling give it to the first. That can be asked of a kernel where the operator's own input has
been rounded by nobody; else which of two sums is larger is for rounding to say, and the kernel's is as good as torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.evaluation.decisions import kept
from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = ["KinkMode", "same_zeros"]

#: Operators that choose among equal values, by torch's promise always the same way.
_PROMISED = frozenset(
    [
        *("amax", "amin", "max", "min", "maximum", "minimum"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    ]
)
#: Those that make no such promise.
_FREE = frozenset(["topk", "sort", "argsort", "kthvalue", "median", "nanmedian", "mode", "fractional_max_pool2d"])
#: Those whose slope changes somewhere, or whose answer is yes or no.
_BENT = frozenset(
    [
        *("relu", "threshold", "abs", "sign", "clamp", "clamp_min", "clamp_max", "leaky_relu", "hardtanh", "argmax"),
        *("gt", "lt", "ge", "le", "argmin", "floor", "ceil", "round", "trunc", "norm", "linalg_vector_norm", "prelu"),
        *("hardswish", "hardsigmoid", "relu6", "softshrink", "hardshrink", "fmax", "fmin", "cummax", "cummin"),
        *("elu", "_cdist_forward"),
    ]
)
#: Of these, those whose one kink is where all that they take is zero, and whose gradient there is zero by torch's
#: promise (the least of all right ones): who divides by the norm has NaN.
_NORMS = frozenset(["norm", "linalg_vector_norm"])


@undisabled
class KinkMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what such operators take, in the order they run. ``promised``, ``free``: is there one that chooses
    among equal values by torch's promise, or as it likes? ``turns``: is there any other than a norm?"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Tensor] = []
        self.promised, self.free, self.turns = False, False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in _PROMISED or name in _BENT:  # before it runs: what works in place leaves nothing to look at
            self.found += [kept(one) for one in args if isinstance(one, Tensor)]
        self.promised |= name in _PROMISED
        self.free |= name in _FREE
        self.turns |= name in _PROMISED or name in _BENT - _NORMS
        return func(*args, **(kwargs or {}))


def same_zeros(found: Sequence[Tensor], wide: Sequence[Tensor]) -> bool:
    """Are the same elements zero in both? Then none is by rounding, nor would be but for it."""
    if len(found) != len(wide):
        return False
    pairs = zip(found, wide, strict=True)
    return all(one.shape == other.shape and bool(((one == 0) == (other == 0)).all()) for one, other in pairs)
