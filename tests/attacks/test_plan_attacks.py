"""Hostile plan.py against the interpreter: each attack works once its defence alone is off; honest twins pass."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from pytest_cudaforge.errors import PlanError, PlanLimitError, PlanSyntaxError
from pytest_cudaforge.runtime import interpreter, natives, subset, values
from pytest_cudaforge.runtime.interpreter import Program, parse


def call(source: str, *args: Any, max_steps: int = values.MAX_STEPS) -> Any:
    return parse(source).start({}, max_steps).call("plan", args, {})


def unchecked(source: str) -> Program:
    """The program without the static check."""
    return Program(ast.parse(source))


LOOP = "def plan(n):\n    x = 0\n    for i in range(n):\n        x += 1\n    return x\n"


def test_endless_work_against_the_step_cap() -> None:
    assert call(LOOP, 1000) == 1000
    with pytest.raises(PlanLimitError, match="more than 500000 steps"):
        call(LOOP, 200_000)
    assert call(LOOP, 200_000, max_steps=1 << 60) == 200_000


def test_huge_integers_against_the_bit_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def plan(n):\n    return (7 ** n).bit_length()\n"
    assert call(source, 40) == (7**40).bit_length()
    with pytest.raises(PlanLimitError, match="too large"):
        call(source, 200_000)
    monkeypatch.setattr(values, "MAX_INT_BITS", 1 << 60)
    assert call(source, 200_000) == (7**200_000).bit_length()


def test_huge_text_against_the_length_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def plan(n):\n    return len('x' * n)\n"
    assert call(source, 1000) == 1000
    with pytest.raises(PlanLimitError, match="a string of 1000000 characters"):
        call(source, 1_000_000)
    monkeypatch.setattr(values, "MAX_TEXT", 1 << 60)
    assert call(source, 1_000_000) == 1_000_000


def test_huge_lists_against_the_item_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def plan(n):\n    return len([0] * n)\n"
    assert call(source, 1000) == 1000
    with pytest.raises(PlanLimitError, match="a sequence of 100000 items"):
        call(source, 100_000)
    monkeypatch.setattr(values, "MAX_ITEMS", 1 << 60)
    assert call(source, 100_000) == 100_000


def test_deep_recursion_against_the_call_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def f(n):\n    return 0 if n == 0 else f(n - 1)\ndef plan(n):\n    return f(n)\n"
    assert call(source, 10) == 0
    with pytest.raises(PlanLimitError, match="calls nested deeper than 16"):
        call(source, 40)
    monkeypatch.setattr(interpreter, "MAX_CALL_DEPTH", 50)
    assert call(source, 40) == 0


ESCAPE = "def plan(x):\n    return x.__class__.__bases__[0].__subclasses__()\n"


def test_python_attributes_against_the_static_check_and_the_value_tables() -> None:
    with pytest.raises(PlanSyntaxError, match=r"the attribute \.__\w+__"):
        parse(ESCAPE)
    # Even without the check no attribute of Python's is behind a name: values have tables of their own.
    for value in (3, 1.5, "x", (1,), [1], {"a": 1}, range(3), None, values.DType("float32"), values.StandIn()):
        with pytest.raises(PlanError, match="has no attribute '__class__'"):
            unchecked("def plan(x):\n    return x.__class__\n").call("plan", (value,), {}, {})


def test_a_table_with_a_python_attribute_would_be_the_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def plan(x):\n    return x.real\n"
    with pytest.raises(PlanError, match="has no attribute 'real'"):
        call(source, 3)
    monkeypatch.setattr(natives, "method", lambda value, name: getattr(value, name))
    assert call(source, 3) == 3


@pytest.mark.parametrize("name", ["os", "sys", "subprocess", "builtins", "ctypes", "pytest_cudaforge.runtime.trace"])
def test_imports_against_the_static_check(name: str) -> None:
    with pytest.raises(PlanSyntaxError, match="import of"):
        parse(f"import {name} as m\ndef plan():\n    return m\n")
    # Without it the name is bound to our table of math functions: there is no import machinery to reach.
    program = unchecked(f"import {name} as m\ndef plan():\n    return m.pi\n")
    assert program.call("plan", (), {}, {}) == pytest.approx(3.14159, rel=1e-4)


def test_builtins_of_python_are_not_there() -> None:
    for name in (
        "eval",
        "exec",
        "open",
        "compile",
        "__import__",
        "globals",
        "vars",
        "type",
        "object",
        "super",
        "input",
    ):
        with pytest.raises(PlanError):
            unchecked(f"def plan():\n    return {name}\n").call("plan", (), {}, {})
        assert name not in natives.BUILTINS


def test_kernel_names_and_constants_cannot_smuggle_source() -> None:
    from pytest_cudaforge.runtime.trace import constants, kernel_expression

    assert kernel_expression("norm<float, (4 > 2)>") == "norm<float, (4 > 2)>"
    for name in (
        'k")\n#include "/etc/passwd"',
        "k;}int x{",
        "k\\\n",
        "k /* */",
        "k // x",
        "k\n",
        "k{}",
        "",
        " k",
        "#k",
        "k'",
    ):
        with pytest.raises(PlanError, match="kernel is"):
            kernel_expression(name)
    for name in ("A B", "a", "A=1", "A\n", "-DA", ""):
        with pytest.raises(PlanError, match="constants has the name"):
            constants({name: 1})


def test_the_walk_covers_every_construct_of_the_grammar() -> None:
    """A construct that Python may add later is refused by default, not let through."""
    known = {kind for kind in vars(ast).values() if isinstance(kind, type) and issubclass(kind, (ast.stmt, ast.expr))}
    runnable = set(interpreter._STATEMENTS) | set(interpreter._EXPRESSIONS)
    allowed = {kind for kind in known if kind.__mro__[1] in (ast.stmt, ast.expr) and issubclass(kind, subset._ALLOWED)}
    handled = runnable | {ast.JoinedStr, ast.FormattedValue}
    assert allowed - handled == set()
