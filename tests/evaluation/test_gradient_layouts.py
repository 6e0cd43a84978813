"""In which layouts a module's backward is given gradients, and who else holds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_cudaforge.evaluation import module_gradients
from pytest_cudaforge.evaluation.module_gradients import _FEW_IN_MEMORY, Gradients, _once, _scattered


def test_values_stay_and_each_way_has_strides_of_its_own() -> None:
    grad = torch.randn(3, 5, 4)
    found = [_scattered(grad, number) for number in range(5)]
    assert all(torch.equal(one, grad) for one in found)
    assert [one.stride() for one in found] == [(1, 3, 15), (25, 5, 1), (24, 4, 1), (4, 12, 1), (20, 1, 5)]
    assert [_scattered(grad[0], number).stride() for number in range(2)] == [(1, 5), (5, 1)]
    heads = torch.randn(2, 3, 5, 4)
    found = [_scattered(heads, number) for number in range(9)]
    assert all(torch.equal(one, heads) for one in found) and len({one.stride() for one in found}) == 9
    assert (60, 4, 12, 1) in {one.stride() for one in found}  # heads that are merged again
    assert _scattered(grad[0, 0], 0).stride() == (2,) and _scattered(grad[0, 0, 0], 1).shape == ()
    assert _scattered(torch.empty(3, 0, 4), 2).shape == (3, 0, 4)


def test_memory_has_few_elements_of_a_sums_gradient() -> None:
    strides = {way: _once(torch.empty(3, 5, 4), way).stride() for way in _FEW_IN_MEMORY}
    assert strides == {"all": (0, 0, 0), "rows": (0, 0, 1), "first": (0, 4, 1), "second": (4, 0, 1)}
    for shape in ((), (4,), (3, 4)):
        assert all(_once(torch.empty(shape), way).shape == shape for way in _FEW_IN_MEMORY)


class _Doubled(torch.autograd.Function):
    """Its backward works in the gradient that comes in, where ``in_place``."""

    in_place = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.mul_(2) if _Doubled.in_place else grad * 2


def test_what_comes_in_goes_past_the_module_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Doubled.apply(x)  # type: ignore[no-untyped-call]
        return found

    model, x, grad = torch.nn.Module(), torch.randn(3, 4), torch.randn(3, 4)
    model.forward = forward  # type: ignore[method-assign]
    monkeypatch.setattr(module_gradients, "_RESIDUAL", 1)
    with pytest.raises(RuntimeError, match="others need"):
        Gradients(["out.0"]).of(model, x, out=model(x), grad_out=grad.clone())
    monkeypatch.setattr(_Doubled, "in_place", False)
    assert torch.equal(Gradients(["out.0"]).of(model, x, out=model(x), grad_out=grad)["0"], 2 * grad)
    monkeypatch.setattr(_Doubled, "in_place", True)
    monkeypatch.setattr(module_gradients, "_RESIDUAL", 100)  # who passes a gradient in holds it
    assert torch.equal(Gradients(["out.0"]).of(model, x, out=model(x), grad_out=grad.clone())["0"], 2 * grad)
