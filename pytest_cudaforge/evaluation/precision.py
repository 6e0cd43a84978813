"""The reference's two arithmetics: its declared precision, and the oracle's fp64. In the oracle's process only.

The oracle is the reference with every floating tensor carried in fp64. A module that says ``x.to(torch.float32)``
inside would otherwise be its own oracle, so down-casts are ignored: a dispatch mode rewrites every dtype an operator
is asked for, and widens every tensor it is given. What a dtype *means* stays: casts to integers, ``torch.finfo``.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pytest_cudaforge.evaluation.undisabled import undisabled

__all__ = ["FEW", "Fp64Mode", "declared_dtype", "declared_limits", "precision_flags", "widen", "widened"]

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
#: Operators whose sums run over what the output no longer has (all other dimensions, a window, a batch).
_REDUCTIONS = frozenset(
    [
        *("sum", "nansum", "mean", "var", "std", "var_mean", "std_mean", "prod", "norm", "linalg_vector_norm", "trace"),
        *("logsumexp", "native_layer_norm", "native_group_norm", "native_batch_norm", "cudnn_batch_norm"),
        *("_native_batch_norm_legit", "_batch_norm_with_update", "_fused_rms_norm", "nll_loss_forward"),
        *("nll_loss2d_forward", "mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"),
        *("multi_margin_loss", "multilabel_margin_loss_forward", "_cdist_forward", "_euclidean_dist"),
        *("_pdist_forward", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
        *("scatter_add", "index_add", "_embedding_bag", "_embedding_bag_forward_only", "segment_reduce"),
    ]
)
#: Operators that sum along the dimension of their second argument.
_ALONG = frozenset(["_softmax", "_log_softmax", "cumsum", "logcumsumexp", "cumprod"])
#: Beginnings and ends of names of operators that combine whole rows, however they do it.
_WHOLE = re.compile(r"^_?(fft|linalg|cudnn_rnn|thnn_fused|lstm|gru|rnn|cholesky|lu_|triangular)|_rnn|_lstm|_gru")
_PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul"])
#: Linear in each operand, so that the root of the same operator on squares is the scale of their sums' rounding.
_LINEAR_SUMS = frozenset(["sum", "mean", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"])
#: A running variance (Welford's) errs by this share of a unit roundoff times mean times deviation, not squared as a
#: one-pass formula does; measured 0.1 to 0.4, the noise's own factor included in what is allowed.
_SPREADS, _SPREAD_NOISE = frozenset(["var", "var_mean", "std", "std_mean"]), 0.05
#: Operators that return what they normalised, the means and the reciprocal deviations. Where they have few means, one
#: that the reference got nearly right would set the bound: a serial one errs by this share of a unit roundoff times
#: the root of the sum's length (measured: a third, and what the bound multiplies included in what is allowed).
_NORMS, _FEW_MEANS, _MEAN_NOISE = (
    frozenset(["native_layer_norm", "native_group_norm", "native_batch_norm"]),
    64,
    1 / 128,
)
_LONGEST_SERIAL = 1 << 16
#: Operators that write a running mean (their fourth argument), and where their momentum stands. It errs as those means
#: do, by their share of the values that were summed, however near to zero it is itself.
_RUNNING = {
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"), 6),
    "_batch_norm_with_update": 5,
}
#: Outputs of so few elements have no norm to speak of: a single lucky one would set the bound.
FEW = 256
_BEHIND = "_cudaforge_summed"  # attribute of a tensor: the longest sum behind it


def widen(dtype: torch.dtype) -> torch.dtype:
    """fp64 for a floating dtype, complex128 for a complex one, others as they are."""
    if dtype in _WIDE:
        return _WIDE[dtype]
    return torch.float64 if dtype.is_floating_point else dtype


def widened(leaf: Any, clone: bool = False) -> Any:
    """A tensor in fp64 or complex128; what is neither as it is, or a copy of it."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        return leaf.double() if leaf.dtype != torch.float64 else leaf.clone()
    if leaf.is_complex():
        return leaf.to(torch.complex128)
    return leaf.clone() if clone else leaf


def declared_dtype(leaves: Mapping[str, Any], state: Mapping[str, Any]) -> torch.dtype:
    """What the reference computes in: the dtype of its first floating input or parameter."""
    tensors = (leaf for leaf in (*leaves.values(), *state.values()) if isinstance(leaf, torch.Tensor))
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)


@undisabled
class Fp64Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries every floating tensor in fp64.

    ``partial`` becomes true where an operator has no such form and the declared precision had to be used.
    ``reduction`` is the longest single sum seen (a product's inner length included), :meth:`summed` the longest one
    behind a tensor; ``pooled``: these cannot be told apart. ``cancels`` becomes true where a sum has few results, which
    may cancel to almost nothing, ``spreads`` where a variance was taken; with ``noise`` (a unit roundoff) those are
    moved by what rounding such a sum leaves.
    """

    def __init__(self, declared: torch.dtype = torch.float32, *, noise: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.declared, self.noise = declared, noise
        self.partial = self.cancels = self.spreads = False
        self.reduction = 1
        self.pooled = False
        self._noisy = 0

    def summed(self, value: Any) -> int:
        """The longest sum behind ``value``, as far as that can be told apart from those behind others."""
        return self.reduction if self.pooled else int(getattr(value, _BEHIND, 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) == "aten.view.dtype":
            return self._reinterpreted(func, args)
        keep = _mutated(func)
        wide_args = tuple(a if i in keep else tree_map(_wide, a) for i, a in enumerate(args))
        wide_kwargs = {k: v if k in keep else tree_map(_wide, v) for k, v in kwargs.items()}
        try:
            result = func(*wide_args, **wide_kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not _lacks_fp64(error):
                raise
            self.partial = True
            result = tree_map(_wide, func(*tree_map(self._narrow, args), **tree_map(self._narrow, kwargs)))
        result = result if keep else tree_map(_wide, result)
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        own = _summed_length(name, wide_args, result)
        if own > 1 and name in _LINEAR_SUMS and isinstance(result, torch.Tensor) and result.numel() <= FEW:
            self.cancels = True
            if self.noise and result.is_floating_point():
                result = self._moved(func, wide_args, wide_kwargs, result)
        if own > 1 and name in _SPREADS:
            self.spreads = True
            if self.noise:
                result = self._spread_moved(name, own, wide_args[0], result)
        if name in _NORMS and result[1].numel() <= _FEW_MEANS:
            self.spreads = True
            if self.noise:
                result = (self._mean_moved(own, wide_args, result), *result[1:])
        if name in _RUNNING and _writes_means(name, args):
            self.spreads = True
            if self.noise:
                momentum = args[_RUNNING[name]]
                self._move_running(own, wide_args[0], wide_args[3], 1.0 if momentum is None else momentum)
        written = [value for i, value in enumerate(args) if i in keep]
        self._remember(own, (args, kwargs), (result, written), written)
        return result

    def _remember(self, own: int, given: Any, made: Any, written: Any) -> None:
        length = max([own, *(getattr(t, _BEHIND, 1) for t in _tensors(given))])
        self.reduction = max(self.reduction, own)
        if length > 1:
            for tensor in _tensors(made):
                setattr(tensor, _BEHIND, length)
            # What is written through a view is behind its base, too, which has no way to know.
            self.pooled |= any(tensor._is_view() for tensor in _tensors(written))

    def _spread_moved(self, name: str, own: int, source: torch.Tensor, result: Any) -> Any:
        first = result[0] if isinstance(result, tuple) else result
        # Every mean is taken to be as far from zero as all of the input is.
        by = self.noise * _SPREAD_NOISE * source.square().mean().sqrt() * min(1.0, (4096 / own) ** 0.75)
        moved = first + (by if name.startswith("std") else by * first.abs().sqrt())
        return (moved, *result[1:]) if isinstance(result, tuple) else moved

    def _mean_moved(self, own: int, args: Any, result: Any) -> Any:
        """What was normalised with a mean that is off, by as much in each deviation as in their root mean square."""
        source, deviations = args[0], result[2]
        scale = source.square().mean().sqrt() * deviations.square().mean().sqrt()
        weight = next((a.square().mean().sqrt() for a in args[1:3] if isinstance(a, torch.Tensor)), 1.0)
        return result[0] + self.noise * _MEAN_NOISE * math.sqrt(min(own, _LONGEST_SERIAL)) * scale * weight

    def _move_running(self, own: int, source: torch.Tensor, mean: torch.Tensor, momentum: float) -> None:
        by = self.noise * _MEAN_NOISE * math.sqrt(min(own, _LONGEST_SERIAL)) * momentum
        mean.add_(by * source.square().mean().sqrt())

    def _moved(self, func: Any, args: Any, kwargs: Any, result: torch.Tensor) -> torch.Tensor:
        """``result`` off by the rounding of its sum: no two sums by the same amount, so that they do not cancel."""
        squares = [_square(a) if isinstance(a, torch.Tensor) else a for a in args]
        scale = func(*squares, **kwargs).sqrt()
        if "mean" in str(func):
            scale = scale / math.sqrt(max(1, args[0].numel() // max(1, result.numel())))
        self._noisy += 1
        amount = self.noise * (1.0 + (0.618 * self._noisy) % 1.0)
        moved: torch.Tensor = result + amount * scale * (1.0 if self._noisy % 2 else -1.0)
        return moved

    def _reinterpreted(self, func: Any, args: Any) -> Any:
        """Bits as another type have no fp64 form: those of the declared precision are looked at."""
        self.partial = True
        return tree_map(_wide, func(*tree_map(self._narrow, args[:1]), *args[1:]))

    def _narrow(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.declared) if value.dtype == torch.float64 else value
        return self.declared if value is torch.float64 else value


def _writes_means(name: str, args: Sequence[Any]) -> bool:
    """Does such an operator train, on a module that keeps running means?"""
    if len(args) <= _RUNNING[name] or not isinstance(args[3], torch.Tensor):
        return False
    return name == "_batch_norm_with_update" or bool(args[5])


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _square(value: torch.Tensor) -> torch.Tensor:
    return value * value.conj() if value.is_complex() else value * value


def _summed_length(name: str, args: Any, result: Any) -> int:
    """How many terms one sum of this operator has; 1 where it does not sum."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not tensors:
        return 1
    source = tensors[0]
    if name in _PRODUCTS:
        operand = tensors[1] if name.startswith(("add", "badd")) and len(tensors) > 1 else source
        return int(operand.shape[-1]) if operand.dim() else 1
    if "convolution" in name and len(tensors) > 1:
        kernel = tensors[1]
        transposed = len(args) > 6 and args[6] is True
        return max(1, kernel.numel() // max(1, int(kernel.shape[int(transposed)])))
    if "attention" in name and len(tensors) > 1:
        return max(int(tensors[1].shape[-2]), int(source.shape[-1]))
    if name in _ALONG and source.dim():
        return int(source.shape[args[1]]) if len(args) > 1 and isinstance(args[1], int) else max(source.shape)
    if _WHOLE.search(name) and name not in _REDUCTIONS:
        return max(source.shape, default=1)
    if name in _REDUCTIONS:
        source = max(tensors, key=torch.numel) if name in ("scatter_add", "index_add") else source
        smallest = min((t.numel() for t in _tensors(result) if t.numel()), default=1)
        return max(1, source.numel() // max(1, smallest))
    return 1


def _mutated(func: Any) -> set[int | str]:
    """Positions and names of arguments that ``func`` writes: they must stay the tensors they are."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return set()
    found: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.update((position, argument.name))
    return found


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if widen(value.dtype) == value.dtype else value.to(widen(value.dtype))
    return widen(value) if isinstance(value, torch.dtype) else value


def _lacks_fp64(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError) or any(
        sign in text
        for sign in ("not implemented for 'Double'", "Double", "float64", "scalar type", "unsupported dtype")
    )


@contextlib.contextmanager
def precision_flags(precision: str) -> Iterator[None]:
    """Set torch's switches as the target declares, and put back what was there.

    "fp32" is strict; "default" leaves torch's own (a KernelBench file's user gets those); others allow TF32, which a
    half-precision target's fp32 side products may use.
    """
    if precision == "default":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32)
    allowed = precision not in ("fp32", "fp64")
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextlib.contextmanager
def declared_limits(declared: torch.dtype) -> Iterator[None]:
    """``torch.finfo`` of an fp64 tensor tells what the reference's own dtype has: an epsilon or a mask's value taken
    from it belongs to the task, not to the arithmetic."""
    real = torch.finfo

    def finfo(dtype: torch.dtype | None = None) -> Any:
        asked = torch.get_default_dtype() if dtype is None else dtype
        return real(declared if asked == torch.float64 else asked)

    torch.finfo = finfo  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.finfo = real  # type: ignore[misc]
