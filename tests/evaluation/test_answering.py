"""Which operator gives an answer by itself, from what was given."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from pytest_cudaforge.evaluation.answering import answering  # noqa: E402
from pytest_cudaforge.evaluation.contract import is_library, is_torchs  # noqa: E402

Made = Callable[[Tensor, Tensor], Tensor]


def written(y: Tensor, by: float) -> Tensor:
    """As a kernel leaves ``y``: of no operator."""
    values = y.detach().numpy()
    values *= by
    return y


def own(x: Tensor, by: float) -> Tensor:
    return torch.from_numpy(x.contiguous().numpy() * by)


def _found(make: Made, **outputs: Tensor) -> str:
    generator = torch.Generator().manual_seed(1)
    x, w = (torch.randn(16, 16, generator=generator) for _ in range(2))
    found = answering(lambda: {"out": make(x, w), **outputs}, [x, w])
    return found[0] if found else ""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x, w: x @ w, "aten::mm"),
        (lambda x, w: (x @ w).mul_(1.0), "aten::mm"),  # in place
        (lambda x, w: (x.clone() @ w.t()) * (1 + 1e-7), "aten::mm"),
        (lambda x, w: (x[None] @ w[None])[0], "aten::bmm"),
        (lambda x, w: torch.nn.functional.conv2d(x[None, None], w[None, None, :3, :3]), "aten::convolution"),
        (lambda x, w: (x @ w).relu(), "aten::relu"),  # several
        (lambda x, w: (x @ w).relu_(), "aten::relu_"),
        (lambda x, w: own((x @ w).relu(), 1.0), "aten::relu"),
        (lambda x, w: x + torch.empty_like(x).copy_(x) @ w[:, :8].repeat(1, 2), "aten::add"),
        (lambda x, w: x @ own(w, 2.0), ""),  # prepared
        (lambda x, w: own((x @ w).relu(), 1.001), ""),
        (lambda x, w: own(x @ w, 2.0).relu(), ""),
        (lambda x, w: x + written(x @ w, 2.0), ""),  # in place
        (lambda x, w: x + written(torch.empty_like(x), 2.0), ""),
        (lambda x, w: x.clone(), ""),  # a copy is no computation
        (lambda x, w: own(x.t().contiguous(), 1.0), ""),
        (lambda x, w: (x @ w).sum(), ""),
        (lambda x, w: x / 0.0 * 0.0 @ w, ""),
    ],
)
def test_an_operator_on_what_was_given_is_found_and_nothing_else(make: Made, name: str) -> None:
    assert _found(make) == name


def test_all_answers_have_to_be_an_operators() -> None:
    other = torch.randn(16)
    assert _found(lambda x, w: x @ w, other=other) == ""
    assert _found(lambda x, w: x @ w, other=torch.arange(4)) == "aten::mm"


def test_an_operator_of_another_library_gives_it_as_well() -> None:
    fused = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if fused is None or not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without MKL-DNN")
    assert _found(lambda x, w: fused(x, w, None, "gelu", [], "none") * 1.0) == "mkldnn::_linear_pointwise"
    assert is_torchs("mkldnn::_linear_pointwise") and is_library("mkldnn::_linear_pointwise")
    assert not is_torchs("my_library::product") and not is_library("my_library::product")
