"""plan_backward on stand-ins: what it is called with, the names of what it returns, JSON and back."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from pytest_cudaforge.errors import PlanError
from pytest_cudaforge.plan import TensorSpec, TracedPlan, contiguous_strides, decode, encode, encode_spec
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime.gradients import FUNCTION, backward_workload, forward_workload, is_backward
from pytest_cudaforge.runtime.signature import Signature
from pytest_cudaforge.runtime.trace import trace

_CPU = DeviceFacts("cpu", "a CPU", "cpu", memory_bytes=1 << 30)


def _spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "float32", contiguous_strides(shape))


def _module(**paths: TensorSpec) -> dict[str, Any]:
    attributes = {name: {"tensor": encode_spec(spec), "path": name} for name, spec in paths.items()}
    return {"class": "M", "attributes": attributes}


def _traced(text: str, *args: Any, module: Any = None, **kwargs: Any) -> TracedPlan:
    head = "from pytest_cudaforge.plan import empty, launch\n\ndef plan(*args, **kwargs):\n    return None\n\n"
    signature = Signature.of(args, kwargs, module, _CPU, "cpp")
    return trace(head + textwrap.dedent(text), signature, function=FUNCTION)


def _keys(traced: TracedPlan) -> list[str]:
    return list(traced.main.outputs)


_LINEAR = """
def plan_backward(module, x, out, grad_out):
    dx, dw = empty(x.shape, x.dtype), empty(module.weight.shape, x.dtype)
    launch("backward", args=(x, out, grad_out, dx, dw))
    return {NAMES}
"""


def _linear(names: str) -> TracedPlan:
    x, grad = _spec(4, 8), _spec(4, 8)
    return _traced(_LINEAR.replace("NAMES", names), x, module=_module(weight=_spec(8)), out=grad, grad_out=grad)


@pytest.mark.parametrize("names", ['"x": dx, "weight": dw', '"module.weight": dw, "x": dx'])
def test_gradients_come_by_canonical_names_in_order(names: str) -> None:
    traced = _linear(names)
    assert _keys(traced) == ["0", "module.weight"] and traced.prepare is None
    assert {buffer.source for buffer in traced.main.buffers if buffer.role == "input"} == {"0", "kw.out", "kw.grad_out"}
    assert decode(encode(traced)) == traced


def test_none_stands_for_no_gradient() -> None:
    assert _keys(_linear('"x": dx, "weight": None')) == ["0"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ('"y": dx', "a gradient of 'y'"),
        ('"weight": dw, "module.weight": dw', "a second gradient of 'module.weight'"),
        ("0: dx", "a gradient of 0"),
        ('"x": 1.5, "weight": dw, "out": dx', "a gradient of 'out'"),
    ],
)
def test_other_names_are_refused_with_those_there_are(names: str, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        _linear(names)
    assert "module.weight, weight, x" in caught.value.expected and caught.value.line


def test_inputs_by_name_by_place_and_nested() -> None:
    text = """
    def plan_backward(a, *rest, grad_out, scale):
        same = empty(a.shape, a.dtype)
        return {"a.0": same, "a.1.k": same, "rest.0": same, "rest.1.q": same, "scale": same}
    """.replace("a.shape, a.dtype", "a[0].shape, a[0].dtype")
    x = _spec(3)
    traced = _traced(text, [x, {"k": x}], x, {"q": x}, scale=x, out=x, grad_out=x)
    assert _keys(traced) == ["0.0", "0.1.k", "1", "2.q", "kw.scale"]


def test_an_input_keeps_its_name_before_a_parameter() -> None:
    text = """
    def plan_backward(module, weight, grad_out):
        return {"weight": empty(weight.shape, weight.dtype), "module.weight": empty((8,), weight.dtype)}
    """
    traced = _traced(text, _spec(4), module=_module(weight=_spec(8)), out=_spec(4), grad_out=_spec(4))
    shapes = {key: view.shape for key, view in traced.main.outputs.items()}
    assert shapes == {"0": (4,), "module.weight": (8,)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def other(x):\n    return x\n", "defines no function plan_backward"),
        ("def plan_backward(x, out):\n    return {}\n", "has no parameter grad_out"),
        ("def plan_backward(x, grad_out):\n    return x\n", "returns"),
        ("def plan_backward(x, y, grad_out):\n    return {}\n", "misses the argument 'y'"),
    ],
)
def test_what_is_wrong_with_the_function_is_said(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        _traced(text, _spec(4), out=_spec(4), grad_out=_spec(4))


def test_names_of_backward_workloads() -> None:
    name = backward_workload("default")
    assert is_backward(name) and not is_backward("default") and forward_workload(name) == "default"
