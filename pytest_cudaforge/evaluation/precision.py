"""The reference's two arithmetics: its declared precision, and the oracle's fp64. In the oracle's process only.

The oracle is the reference with every floating tensor carried in fp64. A module that says ``x.to(torch.float32)``
inside would otherwise be its own oracle, so down-casts are ignored: a dispatch mode rewrites every dtype an operator
is asked for, and widens every tensor it is given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["Fp64Mode", "precision_flags", "widen"]

_WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
#: Operators whose sums run over what the output no longer has; the longest one sets the tolerance's growth.
_REDUCTIONS = frozenset(
    [
        *("sum", "mean", "var", "std", "var_mean", "std_mean", "prod", "norm", "linalg_vector_norm", "logsumexp"),
        *("_softmax", "_log_softmax", "cumsum", "native_layer_norm", "native_group_norm", "native_batch_norm"),
        *("_native_batch_norm_legit", "_fused_rms_norm", "nll_loss_forward"),
    ]
)
_PRODUCTS = frozenset(["mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul"])


def widen(dtype: torch.dtype) -> torch.dtype:
    """fp64 for a floating dtype, complex128 for a complex one, others as they are."""
    if dtype in _WIDE:
        return _WIDE[dtype]
    return torch.float64 if dtype.is_floating_point else dtype


class Fp64Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Carries every floating tensor in fp64. ``partial`` becomes true where an operator has no such form and the
    declared precision had to be used; ``reduction`` is the longest sum seen (a product's inner length included)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.partial = False
        self.reduction = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        keep = _mutated(func)
        wide_args = tuple(a if i in keep else tree_map(_wide, a) for i, a in enumerate(args))
        wide_kwargs = {k: v if k in keep else tree_map(_wide, v) for k, v in kwargs.items()}
        try:
            result = func(*wide_args, **wide_kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not _lacks_fp64(error):
                raise
            self.partial = True
            result = tree_map(_wide, func(*tree_map(_narrow, args), **tree_map(_narrow, kwargs)))
        self._note_reduction(func, wide_args, result)
        return result if keep else tree_map(_wide, result)

    def _note_reduction(self, func: Any, args: Any, result: Any) -> None:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if not tensors:
            return
        if name in _PRODUCTS:
            operand = tensors[1] if name.startswith(("add", "badd")) and len(tensors) > 1 else tensors[0]
            self.reduction = max(self.reduction, int(operand.shape[-1]) if operand.dim() else 1)
        elif "convolution" in name and len(tensors) > 1:
            self.reduction = max(self.reduction, math.prod(tensors[1].shape[1:]))
        elif "attention" in name and len(tensors) > 1:
            self.reduction = max(self.reduction, int(tensors[1].shape[-2]))
        elif name in _REDUCTIONS:
            self.reduction = max(self.reduction, _reduced_length(name, tensors[0], result))


def _reduced_length(name: str, source: torch.Tensor, result: Any) -> int:
    outs = [t for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)]
    smallest = min((t.numel() for t in outs if t.numel()), default=1)
    if "softmax" in name or name == "cumsum":
        return max(source.shape, default=1)
    return max(1, source.numel() // max(1, smallest))


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


def _narrow(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32) if value.dtype == torch.float64 else value
    return torch.float32 if value is torch.float64 else value


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
