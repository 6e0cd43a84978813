"""MKL's vector functions are called once by one thread before several may call them."""

from __future__ import annotations

import pytest

from pytest_cudaforge.evaluation import first_calls

torch = pytest.importorskip("torch")


def test_each_function_is_called_in_both_precisions_on_one_element() -> None:
    called = []

    class Noting(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.__name__ != "full":  # which makes the element
                called.append((func.__name__, args[0].dtype, args[0].numel()))
            return func(*args, **(kwargs or {}))

    with Noting():
        first_calls.settle_vector_math(torch)
    names = {name for name, _, _ in called}
    assert {"sin", "exp", "log", "sqrt", "tanh", "erf"} <= names and {count for _, _, count in called} == {1}
    assert {dtype for _, dtype, _ in called} == {torch.float32, torch.float64}
