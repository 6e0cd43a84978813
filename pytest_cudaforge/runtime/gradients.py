"""What ``plan_backward`` is called with and what it returns. Pure: no torch.

``def plan_backward(module, x, ..., out, grad_out)`` mirrors ``plan``: the same inputs by the same names; ``out``, what
forward returned (leave the parameter away where it is not needed); and ``grad_out``, nested as ``out``, with a gradient
of the same shape and dtype for each floating tensor and None for anything else. Both are contiguous. It returns a dict:
the gradient of each floating input and parameter by name, an input by its name in ``plan_backward`` (``"x"``,
``"states.0"``), a parameter by its path (``"weight"``, ``"layers.0.bias"``; ``"module.weight"`` where an input has that
name); each fresh and contiguous, of its tensor's shape and dtype. What has no gradient is left out, or None.

In a traced plan the dict's keys are canonical and sorted: an input's path in the call (``"0"``, ``"kw.mask"``), a
parameter's path behind ``module.``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.errors import PlanError
from pytest_cudaforge.runtime.signature import Signature

if TYPE_CHECKING:
    # Production reads this module's names in a first call that need not interpret anything.
    from pytest_cudaforge.runtime.interpreter import Program

__all__ = [
    "FUNCTION",
    "GRADIENT",
    "MODULE",
    "OUTPUT",
    "BackwardCall",
    "backward_workload",
    "forward_workload",
    "is_backward",
]

#: The function of plan.py, and the arguments it gets beside forward's.
FUNCTION, OUTPUT, GRADIENT = "plan_backward", "out", "grad_out"
#: Before a parameter's path in the canonical keys.
MODULE = "module."
#: Behind the name of a workload; no target's workload may have "::" in its name.
_SUFFIX = "::backward"


def backward_workload(workload: str) -> str:
    """The name of the workload that is the backward of ``workload``."""
    return workload + _SUFFIX


def forward_workload(workload: str) -> str:
    """The inverse of :func:`backward_workload`."""
    return workload.removesuffix(_SUFFIX)


def is_backward(workload: str) -> bool:
    """Whether the name is one of :func:`backward_workload`."""
    return workload.endswith(_SUFFIX)


class BackwardCall:
    """One tracing of ``plan_backward``: which of the arguments it takes, and its keys in canonical form.

    Raises PlanError where the function is not there or does not take ``grad_out``.
    """

    def __init__(self, program: Program, signature: Signature) -> None:
        node = program.functions.get(FUNCTION)
        if node is None:
            expected = "def plan_backward(module, x, grad_out)"
            raise PlanError(f"plan.py defines no function {FUNCTION}", expected=expected)
        self._line = node.lineno
        self._parameters = _names(node)
        self._takes_any = node.args.kwarg is not None
        if GRADIENT not in self._parameters and not self._takes_any:
            raise PlanError(
                f"{FUNCTION}() has no parameter {GRADIENT}",
                line=node.lineno,
                expected="the inputs of plan(), then out (where it is needed) and grad_out",
            )
        self._keys = self._canonical_keys(node, signature)

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments without ``out`` where the function has no such parameter."""
        wanted = self._takes_any or OUTPUT in self._parameters
        return {name: value for name, value in kwargs.items() if name != OUTPUT or wanted}

    def returned(self, result: Any) -> dict[str, Any]:
        """What the function returned, under canonical keys and sorted. Raises PlanError naming the key that is off."""
        if not isinstance(result, dict):
            raise PlanError(
                f"{FUNCTION}() returns {_described(result)}",
                line=self._line,
                expected='a dict of gradients by name, such as {"x": dx, "weight": dw}',
            )
        found: dict[str, Any] = {}
        for name, value in result.items():
            key = self._keys.get(name) if isinstance(name, str) else None
            if key is None or key in found:
                problem = "a second gradient" if key is not None else "a gradient"
                raise PlanError(
                    f"{FUNCTION}() returns {problem} of {_described(name)}",
                    line=self._line,
                    expected=f"one each, by these names: {', '.join(list(self._keys)[:40])}",
                )
            if value is not None:
                found[key] = value
        return {key: found[key] for key in sorted(found)}

    def _canonical_keys(self, node: ast.FunctionDef, signature: Signature) -> dict[str, str]:
        parameters = [] if signature.module is None else sorted(set(_tensor_paths(signature.module)))
        keys = {MODULE + path: MODULE + path for path in parameters}
        keys |= {path: MODULE + path for path in parameters}
        lead = 0 if signature.module is None else 1
        positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)][lead:]
        rest = node.args.vararg.arg if node.args.vararg is not None else ""
        for path, _ in signature.inputs:
            if path.split(".")[:2] not in (["kw", OUTPUT], ["kw", GRADIENT]):
                keys[_input_name(path, positional, rest)] = path
        return keys


def _described(value: Any) -> str:
    from pytest_cudaforge.runtime.values import describe

    return describe(value)


def _names(node: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))


def _input_name(path: str, positional: list[str], rest: str) -> str:
    """An input's path in the call as plan_backward's author knows it."""
    head, dot, inner = path.partition(".")
    if head == "kw":
        return inner
    place = int(head)
    if place < len(positional):
        return positional[place] + dot + inner
    return f"{rest}.{place - len(positional)}{dot}{inner}"


def _tensor_paths(value: Any) -> Iterator[str]:
    """Paths of the tensors in a module's description (see runtime.signature.describe_module)."""
    if isinstance(value, list):
        for item in value:
            yield from _tensor_paths(item)
    elif isinstance(value, dict):
        if isinstance(value.get("path"), str) and "tensor" in value:
            yield value["path"]
        else:
            for item in value.values():
                yield from _tensor_paths(item)
