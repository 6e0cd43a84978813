"""Which decisions of a reference rounding makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_cudaforge.evaluation.decisions import MarginMode, decided_by_rounding

ROWS = torch.randn(40, 200, generator=torch.Generator().manual_seed(1))


def _nucleus(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    return x.masked_fill(p.cumsum(-1) - p > 0.9, 0.0)


def _count(function: Callable[[Tensor], object], x: Tensor) -> int:
    found, wide = MarginMode(), MarginMode()
    with found:
        function(x)
    with wide:
        function(x.double())
    return decided_by_rounding(found.found, wide.found)


@pytest.mark.parametrize(
    ("function", "few"),
    [
        (_nucleus, 2),
        (lambda x: x > 0, 0),
        (lambda x: x.round().sort(-1), 0),
        (lambda x: x.softmax(-1).sum(), 0),
        (lambda x: 2 * x.sum(-1) < 1.0, 0),
    ],
)
def test_ordinary_values_are_not_near(function: Callable[[Tensor], object], few: int) -> None:
    assert _count(function, ROWS) <= few


def test_equal_shares_that_add_up_to_the_limit() -> None:
    assert _count(_nucleus, torch.zeros(40, 200)) >= 40


def test_what_nobody_rounded_may_be_equal() -> None:
    assert _count(lambda x: x >= 0, torch.zeros(40, 200)) == 0
    assert _count(lambda x: (x * 2).sort(-1), torch.ones(40, 200)) == 0


def test_neighbours_in_an_order_that_rounding_made() -> None:
    def order(x: Tensor) -> Tensor:
        return x.log_softmax(-1).add(5.0).abs().topk(3, dim=-1).indices

    assert _count(order, ROWS * 1e-7) > 20
    assert _count(lambda x: x.sort(dim=0), ROWS * 1e-7) == 0


def test_other_decisions_in_fp64_tell_nothing() -> None:
    found, wide = MarginMode(), MarginMode()
    with found:
        _ = ROWS.softmax(-1) > 0.5
    assert decided_by_rounding(found.found, wide.found) == 0
