"""What can be judged without running anything: the outputs' structure, and what kind of work a plan is. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_cudaforge.evaluation.cases import tree_leaves
from pytest_cudaforge.plan import LaunchPlan, TensorSpec, View, overlap
from pytest_cudaforge.records import Mismatch, Status, Work, WorkloadFacts
from pytest_cudaforge.runtime.gradients import is_backward

__all__ = [
    "OVERLAPS",
    "ROUNDING",
    "CallProfile",
    "compare_structure",
    "computes",
    "is_library",
    "is_torchs",
    "label_of",
    "label_of_call",
    "status_of",
]

#: Kinds of mismatches that rounding may add up to.
ROUNDING = frozenset({"values", "slice", "bias"})

_COPIES = ("clone", "copy_", "contiguous", "_to_copy", "cat", "stack")
#: ATen operators that a kernel may well leave to a library: products, convolutions, attention and copies.
_LIBRARY_OPS = frozenset(
    [
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "matmul",
        "linear",
        "mv",
        "addmv",
        "dot",
        "einsum",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "_convolution",
        "mkldnn_convolution",
        "thnn_conv2d",
        "_slow_conv2d_forward",
        "slow_conv3d",
        "slow_conv3d_forward",
        "slow_conv_transpose2d",
        "slow_conv_transpose3d",
        "_nnpack_spatial_convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "_conv_depthwise2d",
        "mkldnn_linear",
        "outer",
        "ger",
        "addr",
        "addbmm",
        "chain_matmul",
        "vdot",
        "inner",
        "tensordot",
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
        "_scaled_dot_product_attention_math",
        *_COPIES,
        "library",  # what an extension calls by itself
    ]
)
#: Namespaces of operators that torch keeps for libraries' products and convolutions, fused or quantised.
_LIBRARY_NAMESPACES = frozenset(
    ["mkldnn", "mkl", "onednn", "quantized", "_quantized", "fbgemm", "mkldnn_prepacked", "prepacked", "xnnpack"]
)
#: Own kernels below this share of the time make a library's work; other operators above the second make it mixed.
_LIBRARY_SHARE = 0.05
_MIXED_SHARE = 0.10


#: What is said of an output that lies in another's memory.
OVERLAPS = "shares memory with {}; the reference's lie apart"


_Order = Literal["as it is", "as it is, or whole", "any"]


def compare_structure(plan: LaunchPlan, workload: WorkloadFacts) -> tuple[Mismatch, ...]:
    """Count, nesting, shape, dtype and stride class of the plan's outputs against the reference's. Gradients may lie in
    any order: the reference's follows from that of the gradients that it is given."""
    found = dict(tree_leaves(plan.outputs, "out"))
    expected = dict(workload.outputs)
    if list(found) != list(expected):
        detail = f"the plan returns {_names(found)}, the reference returns {_names(expected)}"
        return (Mismatch("out", "count", detail),)
    mismatches = [Mismatch(*wrong) for wrong in _other_containers(plan.outputs, workload.output_tree, "out")]
    order: _Order = "any" if is_backward(workload.name) else "as it is, or whole" if workload.unordered else "as it is"
    for path, want in expected.items():
        mismatch = _compare_leaf(path, found[path], want, plan, order)
        if mismatch is not None:
            mismatches.append(mismatch)
    return (*mismatches, *_overlapping(found, workload.shared))


def _overlapping(found: dict[str, Any], shared: Sequence[str]) -> Iterator[Mismatch]:
    """Who changes one of two answers in place must not change the other."""
    for (first, one), (path, other) in itertools.combinations(found.items(), 2):
        if isinstance(one, View) and isinstance(other, View) and path not in shared and overlap(one, other):
            yield Mismatch(path, "structure", OVERLAPS.format(first))


def _other_containers(got: Any, want: Any, path: str) -> Iterator[tuple[str, Literal["structure"], str]]:
    """Where one is a list and the other a tuple, or a dict: who unpacks an answer may not care, who adds to it does."""
    kind = next((kind for kind in ("list", "tuple", "dict") if kind in want), None)
    if kind is None:
        return
    if type(got).__name__ != kind:
        yield path, "structure", f"is a {type(got).__name__}, the reference returns a {kind}"
        return
    named = want[kind] if kind == "dict" else list(enumerate(want[kind]))
    if kind == "dict" and list(got) != [key for key, _ in named]:
        yield path, "structure", f"has the keys {list(got)}, the reference's are {[key for key, _ in named]}"
        return
    for key, node in named:
        yield from _other_containers(got[key], node, f"{path}.{key}")


def _names(leaves: dict[str, Any]) -> str:
    return ", ".join(leaves) or "nothing"


def _compare_leaf(path: str, got: Any, want: Any, plan: LaunchPlan, order: _Order) -> Mismatch | None:
    if not isinstance(want, TensorSpec):
        same = type(got) is type(want) and (got == want or (got != got and want != want))
        return None if same else Mismatch(path, "structure", f"is {got!r}, the reference returns {want!r}")
    if not isinstance(got, View):
        return Mismatch(path, "structure", f"is {got!r}, the reference returns a tensor")
    if got.shape != want.shape:
        return Mismatch(path, "shape", f"shape {got.shape}, expected {want.shape}")
    dtype = plan.buffers[got.buffer].spec.dtype
    if dtype != want.dtype:
        return Mismatch(path, "dtype", f"dtype {dtype}, expected {want.dtype}")
    whole = order != "as it is" and _stride_class(got.shape, got.strides) == _whole(got.shape)
    if order != "any" and not whole and not _lies_alike(got, want):
        detail = f"strides {got.strides}, expected {want.strides}: {_recipe(want)}"
        return Mismatch(path, "structure", detail)
    return None


def _lies_alike(got: View, want: TensorSpec) -> bool:
    """Of one stride class; where the reference returns a part of a larger buffer, one without gaps in the same order of
    dimensions is as good to whoever reads it."""
    found, expected = (_stride_class(one.shape, one.strides) for one in (got, want))
    if found == expected or found[:1] == (-1,) or expected[:1] != (-1,):
        return found == expected
    spread = [d for d, size in enumerate(want.shape) if size > 1]
    whole = all(want.strides[d] > 0 for d in spread)
    return whole and list(found) == sorted(spread, key=lambda d: -want.strides[d])


def _whole(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stride class of a contiguous tensor."""
    return tuple(d for d, size in enumerate(shape) if size > 1)


def _recipe(want: TensorSpec) -> str:
    """How a plan gets an output of these strides."""
    dims = [d for d, size in enumerate(want.shape) if size > 1]
    if any(want.strides[d] == 0 for d in dims):
        base = tuple(1 if want.strides[d] == 0 else size for d, size in enumerate(want.shape))
        return f"return empty({base}, ...).expand{want.shape}"
    kind = _stride_class(want.shape, want.strides)
    if -1 in kind:
        return "allocate the larger buffer that this is a part of, and return that part as a slice"
    if list(kind) == sorted(kind):
        return f"return a contiguous tensor, empty({want.shape}, ...)"
    order = sorted(range(len(want.shape)), key=lambda d: (-want.strides[d], d))
    base = tuple(want.shape[d] for d in order)
    back = tuple(order.index(d) for d in range(len(order)))
    moved = [d for d, place in enumerate(back) if d != place]
    view = f"transpose({moved[0]}, {moved[1]})" if len(moved) == 2 else f"permute{back}"
    return f"allocate in the order of memory and return a view, empty({base}, ...).{view}"


def _stride_class(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The order of dimensions in memory, and whether they are dense; sizes of one and expansion do not count."""
    dims = [d for d, size in enumerate(shape) if size > 1]
    if not dims or 0 in shape:
        return ()
    order = sorted(dims, key=lambda d: -strides[d])
    expected = 1
    for dim in reversed(order):
        if strides[dim] != expected:
            return (-1, *(strides[d] for d in dims))
        expected *= shape[dim]
    return tuple(order)


_STATUS_OF_KIND = {
    "count": Status.INCORRECT_SHAPE,
    "shape": Status.INCORRECT_SHAPE,
    "structure": Status.INCORRECT_SHAPE,
    "dtype": Status.INCORRECT_DTYPE,
    "values": Status.INCORRECT_NUMERICAL,
    "slice": Status.INCORRECT_NUMERICAL,
    "bias": Status.INCORRECT_NUMERICAL,
    "nonfinite": Status.INCORRECT_NUMERICAL,
    "integer": Status.INCORRECT_NUMERICAL,
    "unstable": Status.INCORRECT_NUMERICAL,
    "unwritten": Status.INCORRECT_NUMERICAL,
    "mutation": Status.REJECTED,
    "redzone": Status.REJECTED,
}
_SEVERITY = (Status.INCORRECT_SHAPE, Status.INCORRECT_DTYPE, Status.REJECTED, Status.INCORRECT_NUMERICAL)


def status_of(mismatches: tuple[Mismatch, ...]) -> Status:
    """The verdict's status for these mismatches; memory written out of bounds outranks the numbers it spoiled."""
    found = {_STATUS_OF_KIND[mismatch.kind] for mismatch in mismatches}
    return next((status for status in _SEVERITY if status in found), Status.PASSED)


def label_of(plan: LaunchPlan, own_share: float | None = None) -> Work:
    """What kind of work the plan does; ``own_share`` is its own kernels' measured share of the time, if known."""
    calls = plan.library_calls
    if not calls:
        return "kernel" if plan.launches else "rewrite"
    if not plan.launches:
        return "rewrite" if any(not is_library(call.op) for call in calls) else "library"
    others = [call for call in calls if not is_library(call.op)]
    if not others:
        return "library" if own_share is not None and own_share < _LIBRARY_SHARE else "kernel"
    if own_share is None:
        return "mixed"
    if own_share < _LIBRARY_SHARE:
        return "rewrite"
    return "mixed" if 1.0 - own_share > _MIXED_SHARE else "kernel"


#: Stands for operators that change a single number in place: a counter of calls, which is no work, whatever share of a
#: short call's time its launch takes.
ONE_NUMBER = "aten::one number in place"
#: ATen operators that hand out memory, look at it another way or fill it with one number: no work of anybody's.
_FREE_OPS = frozenset(
    [
        *("empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "zeros", "zeros_like", "new_zeros"),
        *("zero_", "fill_", "full", "full_like", "ones", "ones_like", "scalar_tensor", "item", "_local_scalar_dense"),
        *("view", "view_as", "_unsafe_view", "_reshape_alias", "reshape", "as_strided", "alias", "detach", "flatten"),
        *("t", "transpose", "permute", "expand", "expand_as", "squeeze", "unsqueeze", "slice", "select", "narrow"),
        *("split", "chunk", "unbind", "unfold", "movedim", "swapaxes", "numpy_T", "lift_fresh", "to", "is_nonzero"),
        *("resolve_conj", "resolve_neg", "is_contiguous", "size", "stride", "numel", "broadcast_to", "contiguous"),
        *(
            ONE_NUMBER.removeprefix("aten::"),
            "unflatten",
            "data",
            "requires_grad_",
            "is_pinned",
            "pin_memory",
            "detach_",
            "diagonal",
            "real",
        ),
        "type_as",
    ]
)


@dataclass(frozen=True)
class CallProfile:
    """What ran in some calls of a module: ns of its own functions, and (name, ns) of ATen operators by kind.

    ``host_ns`` is time in no operator and no function of its own, above what calling them takes. ``compiled``: it uses
    torch.compile. ``kernels``: (name, ns, launches) of what ran on a GPU, the longest first. ``answered_by``: the
    operator that gives the answer by itself, or "".
    """

    own_calls: int
    own_ns: int
    operators: tuple[tuple[str, int], ...]
    host_ns: int = 0
    compiled: bool = False
    kernels: tuple[tuple[str, int, int], ...] = ()
    answered_by: str = ""

    @property
    def library(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, ns) for name, ns in self.operators if is_library(name))

    @property
    def general(self) -> tuple[tuple[str, int], ...]:
        host = (("host code outside torch", self.host_ns),) if self.host_ns else ()
        others = ((n, ns) for n, ns in self.operators if _bare_name(n) not in _FREE_OPS and not is_library(n))
        return (*others, *host)

    @property
    def total_ns(self) -> int:
        return self.own_ns + sum(ns for _, ns in (*self.library, *self.general))

    @property
    def own_share(self) -> float:
        return self.own_ns / self.total_ns if self.total_ns and self.own_calls else 0.0


def label_of_call(profile: CallProfile) -> Work:
    """What kind of work a module's call does, from what ran in it."""
    general = sum(ns for _, ns in profile.general)
    if profile.compiled:
        return "rewrite"
    if not profile.own_calls:
        return "rewrite" if general or not profile.library else "library"
    if profile.answered_by and not is_library(profile.answered_by):
        return "rewrite"
    if profile.answered_by or profile.own_share < _LIBRARY_SHARE:
        return "rewrite" if general > _MIXED_SHARE * profile.total_ns else "library"
    return "mixed" if general > _MIXED_SHARE * profile.total_ns else "kernel"


def is_library(op: str) -> bool:
    """Whether an operator may well be left to a library: a product, a convolution, attention or a copy."""
    return _bare_name(op) in _LIBRARY_OPS or _namespace(op) in _LIBRARY_NAMESPACES


def is_torchs(op: str) -> bool:
    """Whether an operator, by its whole name, is one that torch brings along: ATen's, or a library's."""
    return op.startswith("aten::") or ("::" in op and _namespace(op) in _LIBRARY_NAMESPACES)


def computes(op: str) -> bool:
    """Whether it is a product, a convolution or attention."""
    return is_library(op) and _bare_name(op) not in _COPIES


def works(op: str) -> bool:
    """Whether it makes other numbers: it hands out no memory, and is no view and no copy."""
    return _bare_name(op) not in _COPIES and _bare_name(op) not in _FREE_OPS


def _namespace(op: str) -> str:
    return op.replace("::", ".").partition(".")[0]


def _bare_name(op: str) -> str:
    parts = op.replace("::", ".").split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[0]
