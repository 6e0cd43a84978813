"""Which input makes scores climb where it climbs alone, and how far they go then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_cudaforge.evaluation.slopes import ScoresMode, Slope, find_slopes, put_slope

Reference = Callable[..., Tensor]


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = (k @ q[..., None])[..., 0] * q.shape[-1] ** -0.5 + bias
    return (torch.softmax(scores, -1)[..., None, :] @ v)[..., 0, :]


def _leaves() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "q": torch.randn(3, 2, 16),
        "k": torch.randn(3, 2, 64, 16),
        "v": torch.randn(3, 2, 64, 16),
        "bias": torch.randn(2, 64),
    }


def _scores(reference: Reference) -> Callable[[Mapping[str, Any]], list[Tensor]]:
    def scores_of(leaves: Mapping[str, Any]) -> list[Tensor]:
        with ScoresMode() as watch:
            reference(**leaves)
        return watch.found

    return scores_of


def test_a_bias_by_position_and_keys_along_theirs_make_scores_climb() -> None:
    leaves = _leaves()
    found = find_slopes(leaves, list(leaves), _scores(_attention))
    assert [(slope.path, slope.dim) for slope in found] == [("bias", 1), ("k", 2)]
    assert found[0].gain == pytest.approx(1.0, rel=0.1)


def test_what_is_masked_says_nothing_against_it() -> None:
    visible = torch.ones(2, 64, dtype=torch.bool)
    visible[:, 40:] = False
    masked = lambda bias: torch.softmax(bias.masked_fill(~visible, float("-inf")), -1)  # noqa: E731
    (slope,) = find_slopes({"bias": torch.randn(2, 64)}, ["bias"], _scores(masked))
    assert (slope.path, slope.dim) == ("bias", 1) and slope.gain == pytest.approx(39 / 63, rel=0.1)


@pytest.mark.parametrize(
    "reference",
    [lambda x: torch.softmax(x, 0), lambda x: torch.logsumexp(x, 0), lambda x: torch.log_softmax(x, dim=0)],
)
def test_scores_are_told_along_the_dimension_that_is_weighed(reference: Reference) -> None:
    found = find_slopes({"x": torch.randn(32, 8)}, ["x"], _scores(reference))
    assert [(slope.path, slope.dim) for slope in found] == [("x", 0)]


def test_of_attention_in_one_operator_the_mask_is_told() -> None:
    leaves = {name: torch.randn(1, 2, 32, 16) for name in "qkv"} | {"mask": torch.randn(32, 32)}

    def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    found = find_slopes(leaves, list(leaves), _scores(reference))
    assert ("mask", 1) in [(slope.path, slope.dim) for slope in found]


@pytest.mark.parametrize("reference", [lambda x, y: x + y, lambda x, y: torch.logsumexp(x, (0, 1)) + y.sum()])
def test_where_nothing_is_weighed_along_one_dimension_there_is_none(reference: Reference) -> None:
    leaves = {"x": torch.randn(32, 32), "y": torch.randn(32, 32)}
    assert find_slopes(leaves, ["x", "y"], _scores(reference)) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_go_far_up_or_down_by_little_at_a_time(dtype: torch.dtype) -> None:
    drawn = _leaves() | {"bias": torch.zeros(40, 512, dtype=dtype)}
    leaves = dict(drawn)
    put_slope(leaves, [Slope("bias", 1, 0.5)], torch.Generator().manual_seed(1))
    assert all(torch.equal(leaves[path], drawn[path]) for path in "qkv")
    bias = leaves["bias"].float() * 0.5
    gone = bias[:, -1] - bias[:, 0]
    assert leaves["bias"].dtype == dtype and bool((gone > 0).any()) and bool((gone < 0).any())
    assert bool(((gone.abs() > 59) & (gone.abs() < 302)).all()) and bool((bias <= 0).all())
    assert float(bias.diff(dim=-1).abs().max()) < 2.1
