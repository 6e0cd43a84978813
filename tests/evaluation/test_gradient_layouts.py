"""In which layouts a module's backward is given gradients."""

from __future__ import annotations

import torch

from pytest_cudaforge.evaluation.module_gradients import _FEW_IN_MEMORY, _once, _scattered


def test_values_stay_and_each_way_has_strides_of_its_own() -> None:
    grad = torch.randn(3, 5, 4)
    found = [_scattered(grad, number) for number in range(4)]
    assert all(torch.equal(one, grad) for one in found)
    assert [one.stride() for one in found] == [(1, 3, 15), (25, 5, 1), (24, 4, 1), (4, 12, 1)]
    assert [_scattered(grad[0], number).stride() for number in range(2)] == [(1, 5), (5, 1)]
    assert _scattered(grad[0, 0], 0).stride() == (2,) and _scattered(grad[0, 0, 0], 1).shape == ()
    assert _scattered(torch.empty(3, 0, 4), 2).shape == (3, 0, 4)


def test_memory_has_few_elements_of_a_sums_gradient() -> None:
    strides = {way: _once(torch.empty(3, 5, 4), way).stride() for way in _FEW_IN_MEMORY}
    assert strides == {"all": (0, 0, 0), "rows": (0, 0, 1), "first": (0, 4, 1), "second": (4, 0, 1)}
    for shape in ((), (4,), (3, 4)):
        assert all(_once(torch.empty(shape), way).shape == shape for way in _FEW_IN_MEMORY)
