"""Where a reference turns numbers into whole ones, or into yes and no: is what it decides on exact? In the oracle's
process only.

A value that lies on the very edge (a half that is rounded) goes the reference's way in every honest kernel only where
nothing was rounded before: 0.75 / 0.3 is 2.5 or a little less, as one divides or multiplies. So the operators that
decide are watched, in the reference's precision and in fp64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = [
    "ACCUMULATING",
    "CHOOSING",
    "EXTREMAL",
    "ORDERING",
    "SCORING",
    "SUBTRACTING",
    "SUMMING",
    "WEIGHING",
    "DecidingMode",
    "MarginMode",
    "NamingMode",
    "decided_by_rounding",
    "exact",
    "kept",
]

_DECIDE = frozenset(
    [
        *("round", "floor", "ceil", "trunc", "fix", "frac", "sign", "sgn", "heaviside", "floor_divide", "remainder"),
        *("fmod", "gt", "lt", "ge", "le", "eq", "ne", "bucketize", "searchsorted", "_to_copy", "copy"),
    ]
)


@undisabled
class DecidingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the floating numbers that operators decide on, in the order they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Before it runs: what works in place leaves nothing to look at.
        decides = func.overloadpacket.__name__.rstrip("_") in _DECIDE or str(func) == "aten.div.Tensor_mode"
        given = [kept(a) for a in args if decides and isinstance(a, Tensor) and a.is_floating_point()]
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, (tuple, list)) else [result]
        casts = "copy" in func.overloadpacket.__name__
        if not casts or not any(isinstance(value, Tensor) and value.is_floating_point() for value in results):
            self.found += given
        return result


#: Operators that put values in order, or look for a place in it.
ORDERING = frozenset(
    [
        *("sort", "argsort", "topk", "kthvalue", "median", "nanmedian", "mode", "msort", "cummax", "cummin"),
        *("unique", "_unique2", "unique_dim", "unique_consecutive"),
    ]
)
#: What keeps the largest so far, in a queue or a register, has most to do where values rise, or fall.
EXTREMAL = frozenset(
    [
        *("amax", "amin", "max", "min", "aminmax", "_aminmax", "argmax", "argmin"),
        *(
            f"{how}max_pool{dims}d{what}"
            for how in ("", "adaptive_")
            for dims in (1, 2, 3)
            for what in ("", "_with_indices")
        ),
    ]
)
#: What adds many numbers up: where these rise or fall, sums on the way are far larger than what they come to, and who
#: adds one after another rounds more than who adds by halves, which is nobody's fault.
SUMMING = frozenset(
    [
        *("sum", "nansum", "mean", "nanmean", "cumsum", "logcumsumexp", "prod", "cumprod", "dot", "vdot", "mv", "mm"),
        *("bmm", "addmm", "addmv", "baddbmm", "addbmm", "norm", "linalg_vector_norm", "var", "std", "var_mean"),
        *("std_mean", "convolution", "native_layer_norm", "native_group_norm", "native_batch_norm", "_cdist_forward"),
        *("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "embedding_bag", "bincount"),
        *(f"avg_pool{dims}d" for dims in (1, 2, 3)),
        *(f"_adaptive_avg_pool{dims}d" for dims in (2, 3)),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"),
    ]
)
#: What differences, and distances, are made by.
SUBTRACTING = frozenset({"sub", "rsub", "_cdist_forward", "_euclidean_dist", "dist", "addcmul"})
#: Those that order, and operators that choose one of many by its value.
CHOOSING = ORDERING | {"argmax", "argmin", "max", "min"}
#: Those that weigh many scores against each other, as far as they are below the largest.
SCORING = frozenset(
    [
        *("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "logcumsumexp"),
        *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"),
    ]
)
#: Those that weigh many against each other by exponentials.
WEIGHING = frozenset({"softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "exp"})
#: Those that carry along a dimension what they have so far; and gates, which others repeat in a loop to do the same, so
#: often at least.
ACCUMULATING = frozenset(
    [
        *("cumsum", "cumprod", "logcumsumexp", "lstm", "gru", "mkldnn_rnn_layer", "_cudnn_rnn", "quantized_lstm"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    ]
)
_GATES, _LOOPED = ("sigmoid", "tanh", "exp", "softplus", "log_sigmoid_forward"), 4


@undisabled
class NamingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operators run, by name, and whether one of those that round took a number halfway between two."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.halves = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.counts)

    @property
    def accumulates(self) -> bool:
        """Does anything of what was seen carry something along?"""
        return bool(ACCUMULATING & self.names) or any(self.counts[gate] >= _LOOPED for gate in _GATES)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        self.counts[name] += 1
        if name == "round" and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self.halves |= bool(((args[0] - args[0].floor()) == 0.5).any())
        return func(*args, **(kwargs or {}))


def kept(tensor: Tensor) -> Tensor:
    """A copy, which later work in place leaves alone; as small as it was, for a reference may decide often."""
    return tensor.detach().clone()


def exact(found: Sequence[Tensor], wide: Sequence[Tensor]) -> bool:
    """Are the numbers in ``found`` those that fp64 has in ``wide``, each of them?"""
    pairs = zip(found, wide, strict=False)
    return len(found) == len(wide) and all(
        a.shape == b.shape and torch.equal(_in_fp64(a), _in_fp64(b)) for a, b in pairs
    )


def _in_fp64(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64, copy=True)


#: Comparisons, and orders: what two honest kernels may answer differently where rounding took the difference.
_COMPARE, _ORDER = frozenset({"gt", "lt", "ge", "le"}), frozenset({"sort", "topk"})
#: In units of the roundoff, and of the reference's own error: how far apart two honest kernels' numbers may lie.
_NEAR, _ERRORS = 64.0, 8.0


@undisabled
class MarginMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the two sides of each comparison of floating numbers, and the neighbours in each order, as they run; with
    the roundoff of their dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Tensor, Tensor, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.overloadpacket.__name__.rstrip("_"), args[0] if args else None
        if isinstance(given, Tensor) and given.is_floating_point():
            roundoff = torch.finfo(given.dtype).eps
            if name in _COMPARE:
                other = torch.as_tensor(args[1], device=given.device)
                self.found.append((_in_fp64(given), _in_fp64(other), roundoff))
            elif name in _ORDER and given.dim():
                ordered = _ordered(given, name, args, kwargs or {})
                self.found.append((ordered[..., :-1], ordered[..., 1:], roundoff))
        return func(*args, **(kwargs or {}))


def _ordered(given: Tensor, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    place = 1 if name == "sort" else 2
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    return _in_fp64(given).movedim(dim, -1).sort(dim=-1).values


def decided_by_rounding(
    found: Sequence[tuple[Tensor, Tensor, float]], wide: Sequence[tuple[Tensor, Tensor, float]]
) -> int:
    """How many of the decisions in ``found`` are on numbers that were rounded, and so near each other that rounding
    decided. ``wide``: the same of a run in fp64; where that decided on something else, nothing is known: 0."""
    if [left.shape for left, _, _ in found] != [left.shape for left, _, _ in wide]:
        return 0
    count = 0
    for (left, right, roundoff), (true_left, true_right, _) in zip(found, wide, strict=True):
        errors = (left - true_left).abs() + (right - true_right).abs()
        reach = torch.maximum(_ERRORS * errors, _NEAR * roundoff * (left.abs() + right.abs()))
        count += int(((errors > 0) & ((left - right).abs() <= reach)).sum())
    return count
