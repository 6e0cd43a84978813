"""ATen calls of a plan: shapes on the meta device, what is refused, and results on real tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cudaforge.errors import LaunchFailure, PlanError
from pytest_cudaforge.plan import LibraryCall, TensorSpec, View, contiguous_strides
from pytest_cudaforge.runtime import library
from pytest_cudaforge.runtime.library import MetaShapes
from pytest_cudaforge.runtime.signature import spec_of


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, dtype, contiguous_strides(shape))


def resolve(name: str, *args: Any, **kwargs: Any) -> tuple[TensorSpec, ...]:
    return MetaShapes().resolve(name, args, kwargs)


A, B, BIAS = spec(2, 3), spec(3, 4), spec(4)
Q = spec(2, 4, 8, 16)

SHAPES: list[tuple[str, tuple[Any, ...], dict[str, Any], list[tuple[int, ...]]]] = [
    ("aten.mm", (A, B), {}, [(2, 4)]),
    ("mm", (A, B), {}, [(2, 4)]),
    ("aten::mm", (A, B), {}, [(2, 4)]),
    ("aten.mm.default", (A, B), {}, [(2, 4)]),
    ("aten.addmm", (BIAS, A, B), {"alpha": 2}, [(2, 4)]),
    ("aten.linear", (A, spec(4, 3), BIAS), {}, [(2, 4)]),
    ("aten.linear", (A, spec(4, 3)), {}, [(2, 4)]),
    ("aten.bmm", (spec(5, 2, 3), spec(5, 3, 4)), {}, [(5, 2, 4)]),
    ("aten.matmul", (spec(5, 2, 3), B), {}, [(5, 2, 4)]),
    ("aten.sum", (A,), {}, [()]),
    ("aten.sum", (A, 1), {}, [(2,)]),
    ("aten.sum", (A, [0, 1], True), {"dtype": "float64"}, [(1, 1)]),
    ("aten.mean.dim", (A, [-1], True), {}, [(2, 1)]),
    ("aten.add", (A, 2), {}, [(2, 3)]),
    ("aten.add", (A, A), {"alpha": 2}, [(2, 3)]),
    ("aten.cat", ([A, A],), {"dim": 1}, [(2, 6)]),
    ("aten.topk", (A, 2), {"largest": False}, [(2, 2), (2, 2)]),
    (
        "aten.convolution",
        (spec(1, 3, 8, 8), spec(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
        [(1, 4, 8, 8)],
    ),
    ("aten.conv2d", (spec(1, 3, 8, 8), spec(4, 3, 3, 3)), {"padding": 1, "stride": [2, 2]}, [(1, 4, 4, 4)]),
    ("aten.conv2d", (spec(1, 3, 8, 8), spec(4, 3, 3, 3)), {"padding": "same"}, [(1, 4, 8, 8)]),
    ("aten.max_pool2d", (spec(1, 3, 8, 8), 2), {}, [(1, 3, 4, 4)]),
    ("aten.scaled_dot_product_attention", (Q, Q, Q), {"is_causal": True}, [(2, 4, 8, 16)]),
    ("aten.scaled_dot_product_attention", (Q, Q, Q, spec(8, 8, dtype="bool")), {"scale": 0.5}, [(2, 4, 8, 16)]),
    ("aten.native_layer_norm", (A, [3], spec(3), None, 1e-5), {}, [(2, 3), (2, 1), (2, 1)]),
    ("aten._softmax", (A, -1, False), {}, [(2, 3)]),
    ("aten.embedding", (spec(10, 4), spec(2, 3, dtype="int64")), {}, [(2, 3, 4)]),
    ("aten._to_copy", (A,), {"dtype": "half"}, [(2, 3)]),
    ("aten.clone", (TensorSpec((2, 3), "float32", (1, 2)),), {"memory_format": "contiguous_format"}, [(2, 3)]),
    ("aten.clone", (A,), {"memory_format": "torch.contiguous_format"}, [(2, 3)]),
    ("aten.full", ([2, 3], 1.5), {"dtype": "bfloat16"}, [(2, 3)]),
    ("aten.arange", (10,), {"dtype": "int64"}, [(10,)]),
    ("aten.masked_fill", (A, spec(2, 3, dtype="bool"), -math.inf), {}, [(2, 3)]),
    ("aten.where", (spec(2, 3, dtype="bool"), A, A), {}, [(2, 3)]),
    ("aten.gelu", (A,), {"approximate": "tanh"}, [(2, 3)]),
    ("aten.batch_norm", (A, None, None, None, None, True, 0.1, 1e-5, False), {}, [(2, 3)]),
    ("aten.batch_norm", (A, None, None, spec(3), spec(3), False, 0.1, 1e-5, False), {}, [(2, 3)]),
    ("aten.mm", (A, B), {"out": spec(2, 4)}, []),
    ("aten.mm.out", (A, B), {"out": spec(2, 4)}, []),
]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "shapes"), SHAPES, ids=[f"{i}-{case[0]}" for i, case in enumerate(SHAPES)]
)
def test_shapes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    assert [found.shape for found in resolve(name, *args, **kwargs)] == shapes


def test_dtypes_and_strides_of_results() -> None:
    assert resolve("aten._to_copy", A, dtype="half")[0].dtype == "float16"
    assert resolve("aten.topk", A, 2)[1].dtype == "int64"
    assert resolve("aten.clone", TensorSpec((2, 3), "float32", (1, 2)))[0].strides == (1, 2)
    assert resolve("aten.clone", TensorSpec((2, 3), "float32", (1, 2)), memory_format="contiguous_format")[
        0
    ].strides == (3, 1)


REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("aten.mmm", (A, B), {}, "did you mean 'mm'?"),
    ("aten.mm.uot", (A, B), {}, "mm has no overload 'uot' (did you mean 'out'?)"),
    ("torch.mm", (A, B), {}, 'expected: "aten.mm"'),
    ("cudaforge.mm.out", (A, B), {}, "outside ATen"),
    ("aten", (A, B), {}, '"aten.name"'),
    ("os.system('x')", (), {}, "op() of"),
    ("aten.__class__", (A,), {}, "private to torch"),
    ("aten._foreach_add", ([A], 1), {}, "private to torch"),
    ("aten.rand", ([2],), {}, "is random"),
    ("aten.randn_like", (A,), {}, "is random"),
    ("aten.bernoulli", (A,), {}, "is random"),
    ("aten.dropout", (A, 0.5, True), {}, "is random"),
    ("aten.scaled_dot_product_attention", (Q, Q, Q, None, 0.1), {}, "is random"),
    ("aten.scaled_dot_product_attention", (Q, Q, Q), {"dropout_p": 0.1}, "is random"),
    ("aten.nonzero", (A,), {}, "shape depends on values"),
    ("aten.unique_consecutive", (A,), {}, "shape depends on values"),
    ("aten.masked_select", (A, spec(2, 3, dtype="bool")), {}, "shape depends on values"),
    ("aten.index", (A, [spec(2, dtype="int64")]), {}, "aten.gather"),
    ("aten.item", (spec(),), {}, "never sees values"),
    ("aten.equal", (A, A), {}, "never sees values"),
    ("aten.from_file", ("/etc/passwd",), {}, "it reads a file"),
    ("aten.empty", ([2],), {}, "use empty(shape, dtype)"),
    ("aten.add_", (A, 1), {}, "changes its argument 'self'"),
    ("aten.batch_norm", (A, None, None, spec(3), spec(3), True, 0.1, 1e-5, False), {}, "running statistics"),
    ("aten.transpose", (A, 0, 1), {}, "views are free"),
    ("aten.split", (A, 1), {}, "views are free"),
    ("aten.numpy_T", (A,), {}, "views are free"),
    ("aten.is_same_size", (A, A), {}, "returns bool"),
    ("aten.mm", (A,), {}, "misses 'mat2'"),
    ("aten.mm", (A, B, B), {}, "takes 2 positional arguments, got 3"),
    ("aten.mm", (A, 3), {}, "mat2 is 3, but it is a Tensor"),
    ("aten.mm", (A, None), {}, "mat2 is None"),
    ("aten.mm", (A, B), {"alhpa": 1}, "has no argument 'alhpa'"),
    ("aten.mm", (A, B), {"self": A}, "got 'self' twice"),
    ("aten.mm", (A, spec(5, 4)), {}, "must have same reduction dim"),
    ("aten.mm", (A, B), {"out": spec(2, 5)}, "out= has the shape (2, 5)"),
    ("aten.mm", (A, B), {"out": spec(2, 4, dtype="float16")}, "failed"),
    ("aten.sum", (A,), {"dtype": "fp16"}, "did you mean 'float16'?"),
    ("aten.full", ([2], 1.0), {"device": "cuda"}, "device cannot be 'cuda' in a plan"),
    ("aten.clone", (A,), {"memory_format": "rows"}, "memory_format is 'rows', expected one of contiguous_format"),
    ("aten.cat", (A,), {}, "takes a List[Tensor]"),
    ("aten.cat", ([A, spec(3, 4)],), {}, "failed"),
    ("aten.sum", (A, 7), {}, "failed"),
    ("aten.gelu", (A,), {"approximate": 3}, "approximate is 3, but it is a str"),
]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "message"),
    REFUSED,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(REFUSED)],
)
def test_refused(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve(name, *args, **kwargs)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_no_operator_of_another_name_space_or_file_is_reachable() -> None:
    for name in (
        "aten.from_file",
        "aten.from_file.out",
        "aten.__getattribute__",
        "aten._dir",
        "aten.name",
        "aten.wrapped_ns",
    ):
        with pytest.raises(PlanError):
            resolve(name, "/etc/passwd")


# -- running -----------------------------------------------------------------------------------------------------


class Buffers:
    """Tensors by buffer index, as replay gives them to a call."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)

    def resolve(self, view: View | int) -> torch.Tensor:
        if isinstance(view, int):
            return self.tensors[view]
        tensor = self.tensors[view.buffer]
        return tensor.as_strided(view.shape, view.strides, tensor.storage_offset() + view.offset)

    def view(self, index: int) -> View:
        found = spec_of(self.tensors[index])
        return View(index, found.shape, found.strides)


X, W = torch.randn(5, 6), torch.randn(4, 6)
RUNS: list[tuple[str, list[torch.Tensor], Any, dict[str, Any], Any]] = [
    ("aten.mm", [X, W.t()], None, {}, lambda: X @ W.t()),
    ("aten.linear", [X, W], None, {}, lambda: F.linear(X, W)),
    ("aten.sum", [X], (1,), {"dtype": "float64"}, lambda: X.sum(1, dtype=torch.float64)),
    ("aten.topk", [X], (3,), {}, lambda: torch.topk(X, 3)),
    ("aten._to_copy", [X], (), {"dtype": "float16"}, lambda: X.half()),
    ("aten.gelu", [X], (), {"approximate": "tanh"}, lambda: F.gelu(X, approximate="tanh")),
    ("aten.clone", [X.t()], (), {}, lambda: X.t()),
    ("aten.full", [], ([2, 3], 1.5), {"dtype": "float32"}, lambda: torch.full((2, 3), 1.5)),
    ("aten.conv1d", [torch.ones(1, 2, 9), torch.ones(3, 2, 3)], (), {}, lambda: torch.full((1, 3, 7), 6.0)),
]


@pytest.mark.parametrize(("name", "tensors", "rest", "kwargs", "expected"), RUNS, ids=[case[0] for case in RUNS])
def test_results_land_in_the_given_buffers(name: str, tensors: Any, rest: Any, kwargs: Any, expected: Any) -> None:
    specs = resolve(name, *(spec_of(tensor) for tensor in tensors), *(rest or ()), **kwargs)
    outputs = [torch.full_like(torch.empty(found.shape, dtype=getattr(torch, found.dtype)), 77) for found in specs]
    outputs = [
        torch.empty_strided(found.shape, found.strides, dtype=each.dtype).copy_(each)
        for found, each in zip(specs, outputs, strict=True)
    ]
    buffers = Buffers(*tensors, *outputs)
    args = (*(buffers.view(i) for i in range(len(tensors))), *(rest or ()))
    places = tuple(range(len(tensors), len(tensors) + len(outputs)))
    addresses = [each.data_ptr() for each in outputs]
    library.run(LibraryCall(name, args, tuple(kwargs.items()), places, 3), buffers.resolve)
    wanted = expected()
    for found, want in zip(outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        torch.testing.assert_close(found, want)
    assert addresses == [each.data_ptr() for each in outputs]


def test_out_overload_writes_through_a_view() -> None:
    target = torch.zeros(5, 8)
    buffers = Buffers(X, W.t(), target)
    out = View(2, (5, 4), (8, 1), 4)
    library.run(LibraryCall("aten.mm", (buffers.view(0), buffers.view(1)), (("out", out),), (), 3), buffers.resolve)
    torch.testing.assert_close(target[:, 4:], X @ W.t())
    assert not target[:, :4].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (LibraryCall("aten.mm", (View(0, (5, 6), (6, 1)),) * 2, (), (2,), 9), r"plan.py:9: op\(\"aten.mm\"\) failed"),
        (LibraryCall("aten.from_file", ("/etc/passwd",), (), (2,), 9), "plan.py:9: .* it reads a file"),
        (LibraryCall("aten.relu_", (View(0, (5, 6), (6, 1)),), (), (2,), 9), "changes its argument"),
        (
            LibraryCall("aten._to_copy", (View(0, (5, 6), (6, 1)),), (("dtype", "float64"),), (2,), 9),
            r"gave \(5, 6\) torch.float64",
        ),
    ],
)
def test_the_rules_hold_when_run(call: LibraryCall, message: str) -> None:
    buffers = Buffers(X.clone(), W.clone(), torch.zeros(5, 4))
    with pytest.raises(LaunchFailure, match=message):
        library.run(call, buffers.resolve)
    torch.testing.assert_close(buffers.tensors[0], X)


def test_results_need_no_gradient() -> None:
    weight = torch.nn.Parameter(W.t().contiguous())
    buffers = Buffers(X, weight, torch.zeros(5, 4))
    library.run(LibraryCall("aten.mm", (buffers.view(0), buffers.view(1)), (), (2,), 3), buffers.resolve)
    assert buffers.tensors[2].grad_fn is None


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def ran(name: str, inputs: list[torch.Tensor], args: tuple[Any, ...], expected: torch.Tensor) -> list[str]:
    """The operators that ran for one call into a poisoned buffer, whose result must be bit for bit torch's own."""
    buffers = Buffers(*inputs, torch.full_like(expected, 7.0))
    places = tuple(buffers.view(number) for number in range(len(inputs)))
    with _Seen() as seen:
        library.run(LibraryCall(name, (*places, *args), (), (len(inputs),), 3), buffers.resolve)
    assert torch.equal(buffers.tensors[-1].view(torch.int32), expected.view(torch.int32))
    names: list[str] = seen.names
    return [name for name in names if name != "aten::as_strided"]


def test_results_are_copied_only_where_torch_has_no_kernel_that_writes_them() -> None:
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0, math.nan, math.inf, -math.inf])
    assert ran("aten.relu", [x], (), torch.relu(x)) == ["aten::clamp_min.out"]
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert ran("aten.mm", [a, b], (), a @ b) == ["aten::mm.out"]
    image, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)
    expected = torch.nn.functional.conv2d(image, weight)
    names = ran("aten.convolution", [image, weight], (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), expected)
    assert names == ["aten::convolution", "aten::copy_"]


def test_a_stride_of_zero_is_the_plans_error() -> None:
    # torch's meta kernel divides by it.
    with pytest.raises(PlanError, match=r"by zero|stride"):
        resolve("aten.convolution", spec(1, 3, 8, 8), spec(4, 3, 3, 3), None, [0, 0], [0, 0], [1, 1], False, [0, 0], 1)
