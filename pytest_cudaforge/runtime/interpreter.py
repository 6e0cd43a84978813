"""Runs the Python subset of plan.py on stand-ins, by walking its syntax tree.

The text comes from an LLM and counts as hostile: no Python attribute, import or operator is ever reached from it, steps
and sizes are capped (:mod:`pytest_cudaforge.runtime.values`), and every failure is a PlanError with its line.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cudaforge.errors import PlanError, PlanLimitError, PlanSyntaxError, Unsupported
from pytest_cudaforge.runtime import natives, values
from pytest_cudaforge.runtime.subset import EXCEPTIONS, PLAN_MODULE, parse_checked
from pytest_cudaforge.runtime.values import Meter, Native, StandIn, describe

MAX_CALL_DEPTH = 16
MAX_EVAL_DEPTH = 220

_SYMBOLS: dict[type[ast.AST], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"},
    **{ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"},
    **{ast.USub: "-", ast.UAdd: "+", ast.Not: "not", ast.Invert: "~"},
    **{ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="},
}


@dataclass(frozen=True)
class Program:
    """A checked plan.py. It holds no state: each :meth:`start` begins anew."""

    tree: ast.Module

    @property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def start(self, plan_names: Mapping[str, Any], max_steps: int = values.MAX_STEPS) -> Run:
        """A fresh execution; ``plan_names`` are what ``from pytest_cudaforge.plan import ...`` gives."""
        return Run(self.tree, plan_names, Meter(max_steps))

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], plan_names: Mapping[str, Any]) -> Any:
        """Start and call one top-level function. Raises PlanError, PlanLimitError, Unsupported."""
        return self.start(plan_names).call(name, args, kwargs)


@functools.lru_cache(maxsize=128)
def parse(source: str) -> Program:
    """The checked program (cached by its text). Raises PlanSyntaxError, PlanLimitError, each with its line."""
    return Program(parse_checked(source))


class Scope:
    """Names of one function call; reading falls through to the enclosing scope."""

    __slots__ = ("names", "parent")

    def __init__(self, parent: Scope | None, names: dict[str, Any] | None = None) -> None:
        self.parent = parent
        self.names: dict[str, Any] = {} if names is None else names


class Closure:
    """A function of the plan, with the scope it was defined in and the values of its defaults."""

    __slots__ = ("defaults", "name", "node", "scope")

    def __init__(self, node: ast.FunctionDef | ast.Lambda, scope: Scope, defaults: dict[str, Any]) -> None:
        self.name = node.name if isinstance(node, ast.FunctionDef) else "lambda"
        self.node = node
        self.scope = scope
        self.defaults = defaults


class _Signal:
    """How a block ended: None for its end, else one of the three below."""


_BREAK = _Signal()
_CONTINUE = _Signal()


class _Returned(_Signal):
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Run:
    """One execution: the top-level names, the steps taken, the line it is at."""

    def __init__(self, tree: ast.Module, plan_names: Mapping[str, Any], meter: Meter) -> None:
        self.meter = meter
        self.line = 0
        self._plan_names = plan_names
        self._globals = Scope(None)
        self._call_depth = 0
        self._depth = 0
        self._top_level: list[ast.stmt] | None = tree.body

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the plan's function ``name``, the top level first. Every PlanError that leaves has its line."""
        if self._top_level is not None:
            body, self._top_level = self._top_level, None
            self.located(lambda: self._block(body, self._globals))
        function = self._globals.names.get(name)
        if not isinstance(function, Closure):
            raise PlanError(f"{name} is {describe(function)}", expected=f"the function {name}()")
        self.line = function.node.lineno
        return self.located(lambda: self._call_closure(function, list(args), dict(kwargs)))

    def located(self, action: Callable[[], Any]) -> Any:
        """``action()``; a PlanError without a line gets the one this run is at."""
        try:
            return action()
        except PlanError as error:
            if error.line is not None:
                raise
            raise type(error)(error.what, line=self.line, expected=error.expected, remedy=error.remedy) from None
        except (RecursionError, MemoryError):
            raise PlanLimitError("the plan is nested too deeply", line=self.line) from None

    # -- statements ----------------------------------------------------------------------------------------------

    def _block(self, body: list[ast.stmt], scope: Scope) -> _Signal | None:
        for statement in body:
            self.meter.charge(1)
            self.line = statement.lineno
            signal = _STATEMENTS[type(statement)](self, statement, scope)
            if signal is not None:
                return signal
        return None

    def _run_function(self, node: ast.FunctionDef, scope: Scope) -> None:
        scope.names[node.name] = self._closure(node, scope)

    def _closure(self, node: ast.FunctionDef | ast.Lambda, scope: Scope) -> Closure:
        parameters = node.args
        positional = [*parameters.posonlyargs, *parameters.args]
        defaults: dict[str, Any] = {}
        for arg, default in zip(reversed(positional), reversed(parameters.defaults), strict=False):
            defaults[arg.arg] = self._value(default, scope)
        for arg, keyword_default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            if keyword_default is not None:
                defaults[arg.arg] = self._value(keyword_default, scope)
        return Closure(node, scope, defaults)

    def _run_return(self, node: ast.Return, scope: Scope) -> _Signal:
        return _Returned(None if node.value is None else self._value(node.value, scope))

    def _run_assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self._value(node.value, scope)
        for target in node.targets:
            self._assign(target, value, scope)

    def _run_annotated(self, node: ast.AnnAssign, scope: Scope) -> None:
        if node.value is not None:
            self._assign(node.target, self._value(node.value, scope), scope)

    def _run_augmented(self, node: ast.AugAssign, scope: Scope) -> None:
        symbol = _SYMBOLS[type(node.op)]
        target = node.target
        if isinstance(target, ast.Subscript):
            owner, key = self._value(target.value, scope), self._value(target.slice, scope)
            current = values.item_of(self.meter, owner, key)
            updated = self._combined(symbol, current, self._value(node.value, scope), node.lineno)
            values.store_item(self.meter, owner, key, updated)
            return
        assert isinstance(target, ast.Name)
        if target.id not in scope.names:
            raise PlanError(
                f"{target.id} is changed before it has a value in this function",
                line=node.lineno,
                remedy="assign it first; a variable of an outer function cannot be changed here",
            )
        current = scope.names[target.id]
        scope.names[target.id] = self._combined(symbol, current, self._value(node.value, scope), node.lineno)

    def _combined(self, symbol: str, left: Any, right: Any, line: int) -> Any:
        self.line = line
        return values.binary(self.meter, symbol, left, right)

    def _assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, value, scope)
        elif isinstance(target, ast.Subscript):
            owner = self._value(target.value, scope)
            values.store_item(self.meter, owner, self._value(target.slice, scope), value)
        else:
            raise PlanSyntaxError(f"an assignment to {type(target).__name__}", line=target.lineno)

    def _unpack(self, targets: list[ast.expr], value: Any, scope: Scope) -> None:
        items = list(values.sequence(self.meter, value))
        starred = [i for i, target in enumerate(targets) if isinstance(target, ast.Starred)]
        if len(items) < len(targets) - len(starred) or (not starred and len(items) > len(targets)):
            raise PlanError(
                f"cannot unpack {describe(value)} into {len(targets)} names",
                line=targets[0].lineno,
                remedy="check the number of dimensions or values first",
            )
        if starred:
            place = starred[0]
            tail = len(targets) - place - 1
            middle = items[place : len(items) - tail]
            items = [*items[:place], middle, *items[len(items) - tail :]]
        for target, item in zip(targets, items, strict=True):
            self._assign(target.value if isinstance(target, ast.Starred) else target, item, scope)

    def _run_for(self, node: ast.For, scope: Scope) -> _Signal | None:
        iterable = self._value(node.iter, scope)
        # A range stays lazy, so that a huge one meets the step cap and not the memory.
        for item in iterable if isinstance(iterable, range) else values.sequence(self.meter, iterable):
            self.meter.charge(1)
            self._assign(node.target, item, scope)
            signal = self._block(node.body, scope)
            if signal is _BREAK:
                return None
            if signal is not None and signal is not _CONTINUE:
                return signal
        return self._block(node.orelse, scope)

    def _run_if(self, node: ast.If, scope: Scope) -> _Signal | None:
        return self._block(node.body if self._truth(node.test, scope) else node.orelse, scope)

    def _run_assert(self, node: ast.Assert, scope: Scope) -> None:
        if not self._truth(node.test, scope):
            said = "" if node.msg is None else values.text_of(self.meter, self._value(node.msg, scope))
            raise Unsupported(f"plan.py:{node.lineno}: assertion failed: {said or ast.unparse(node.test)[:200]}")

    def _run_raise(self, node: ast.Raise, scope: Scope) -> None:
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        assert isinstance(error, ast.Name) and error.id in EXCEPTIONS
        said = ""
        if isinstance(node.exc, ast.Call) and node.exc.args:
            said = values.text_of(self.meter, self._value(node.exc.args[0], scope))
        prefix = "" if error.id == "Unsupported" else f"{error.id}: "
        raise Unsupported(f"plan.py:{node.lineno}: {prefix}{said or 'unsupported'}")

    def _run_expression(self, node: ast.Expr, scope: Scope) -> None:
        self._value(node.value, scope)

    def _run_import(self, node: ast.Import, scope: Scope) -> None:
        for alias in node.names:
            scope.names[alias.asname or alias.name] = natives.MATH_MODULE

    def _run_import_from(self, node: ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            if node.module == PLAN_MODULE:
                scope.names[alias.asname or alias.name] = self._plan_names.get(alias.name)
            elif node.module == "math":
                scope.names[alias.asname or alias.name] = natives.MATH[alias.name]

    def _run_pass(self, node: ast.Pass, scope: Scope) -> None:
        return None

    def _run_break(self, node: ast.Break, scope: Scope) -> _Signal:
        return _BREAK

    def _run_continue(self, node: ast.Continue, scope: Scope) -> _Signal:
        return _CONTINUE

    # -- expressions ---------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        self.meter.charge(1)
        self._depth += 1
        if self._depth > MAX_EVAL_DEPTH:
            raise PlanLimitError("expressions and calls are nested too deeply", line=node.lineno)
        try:
            return _EXPRESSIONS[type(node)](self, node, scope)
        finally:
            self._depth -= 1

    def _truth(self, node: ast.expr, scope: Scope) -> bool:
        value = self._value(node, scope)
        self.line = node.lineno
        return values.truth(value)

    def _look_up(self, name: str, scope: Scope) -> Any:
        place: Scope | None = scope
        while place is not None:
            if name in place.names:
                return place.names[name]
            place = place.parent
        if name in natives.BUILTINS:
            return natives.BUILTINS[name]
        raise PlanError(f"the name {name!r} has no value yet", remedy="assign it on every path before this line")

    def _eval_name(self, node: ast.Name, scope: Scope) -> Any:
        self.line = node.lineno
        return self._look_up(node.id, scope)

    def _eval_constant(self, node: ast.Constant, scope: Scope) -> Any:
        return node.value

    def _eval_binary(self, node: ast.BinOp, scope: Scope) -> Any:
        left, right = self._value(node.left, scope), self._value(node.right, scope)
        return self._combined(_SYMBOLS[type(node.op)], left, right, node.lineno)

    def _eval_unary(self, node: ast.UnaryOp, scope: Scope) -> Any:
        value = self._value(node.operand, scope)
        self.line = node.lineno
        return values.unary(_SYMBOLS[type(node.op)], value)

    def _eval_boolean(self, node: ast.BoolOp, scope: Scope) -> Any:
        stop_at = isinstance(node.op, ast.Or)
        value: Any = None
        for i, part in enumerate(node.values):
            value = self._value(part, scope)
            self.line = part.lineno
            # The last value is the answer as it is; only the others are asked for their truth.
            if i < len(node.values) - 1 and values.truth(value) is stop_at:
                break
        return value

    def _eval_conditional(self, node: ast.IfExp, scope: Scope) -> Any:
        return self._value(node.body if self._truth(node.test, scope) else node.orelse, scope)

    def _eval_comparison(self, node: ast.Compare, scope: Scope) -> bool:
        left = self._value(node.left, scope)
        for operator, part in zip(node.ops, node.comparators, strict=True):
            right = self._value(part, scope)
            self.line = node.lineno
            if not self._compared(operator, left, right):
                return False
            left = right
        return True

    def _compared(self, operator: ast.cmpop, left: Any, right: Any) -> bool:
        if isinstance(operator, (ast.Eq, ast.NotEq)):
            return values.equal(self.meter, left, right) is isinstance(operator, ast.Eq)
        if isinstance(operator, (ast.Is, ast.IsNot)):
            return values.identical(left, right) is isinstance(operator, ast.Is)
        if isinstance(operator, (ast.In, ast.NotIn)):
            return values.contains(self.meter, right, left) is isinstance(operator, ast.In)
        return values.ordered(self.meter, _SYMBOLS[type(operator)], left, right)

    def _elements(self, nodes: list[ast.expr], scope: Scope) -> list[Any]:
        items: list[Any] = []
        for node in nodes:
            if isinstance(node, ast.Starred):
                items.extend(values.sequence(self.meter, self._value(node.value, scope)))
            else:
                items.append(self._value(node, scope))
            if len(items) > values.MAX_ITEMS:
                raise PlanLimitError(f"a sequence of more than {values.MAX_ITEMS} items", line=node.lineno)
        return items

    def _eval_tuple(self, node: ast.Tuple, scope: Scope) -> Any:
        return tuple(self._elements(node.elts, scope))

    def _eval_list(self, node: ast.List, scope: Scope) -> Any:
        return self._elements(node.elts, scope)

    def _eval_set(self, node: ast.Set, scope: Scope) -> Any:
        return tuple(self._elements(node.elts, scope))

    def _eval_dict(self, node: ast.Dict, scope: Scope) -> Any:
        result: dict[Any, Any] = {}
        for key, part in zip(node.keys, node.values, strict=True):
            value = self._value(part, scope)
            if key is not None:
                result[values.key_of(self._value(key, scope))] = value
            elif isinstance(value, dict):
                self.meter.charge(len(value))
                result.update(value)
            else:
                raise PlanError(f"**{describe(value)} in a dict", line=part.lineno, expected="a dict")
        return result

    def _eval_text(self, node: ast.JoinedStr, scope: Scope) -> str:
        parts = [self._text_part(part, scope) for part in node.values]
        return values.checked_text(self.meter, "".join(parts))

    def _text_part(self, part: ast.expr, scope: Scope) -> str:
        if not isinstance(part, ast.FormattedValue):
            assert isinstance(part, ast.Constant)
            return str(part.value)
        value = self._value(part.value, scope)
        self.line = part.lineno
        if part.conversion != -1:
            value = values.text_of(self.meter, value, quote=part.conversion != ord("s"))
        spec = part.format_spec
        pieces = spec.values if isinstance(spec, ast.JoinedStr) else []
        return values.formatted(self.meter, value, "".join(str(p.value) for p in pieces if isinstance(p, ast.Constant)))

    def _eval_attribute(self, node: ast.Attribute, scope: Scope) -> Any:
        owner = self._value(node.value, scope)
        self.line = node.lineno
        if isinstance(owner, StandIn):
            return owner.attribute(node.attr)
        if type(owner) is values.DType and owner.attribute(node.attr) is not None:
            return owner.attribute(node.attr)
        fields: tuple[str, ...] = getattr(owner, "_fields", ()) if isinstance(owner, tuple) else ()
        if node.attr in fields:
            return owner[fields.index(node.attr)]
        return natives.method(owner, node.attr)

    def _eval_subscript(self, node: ast.Subscript, scope: Scope) -> Any:
        owner = self._value(node.value, scope)
        key = self._value(node.slice, scope)
        self.line = node.lineno
        return values.item_of(self.meter, owner, key)

    def _eval_slice(self, node: ast.Slice, scope: Scope) -> slice:
        start, stop, step = (
            None if part is None else self._value(part, scope) for part in (node.lower, node.upper, node.step)
        )
        return slice(start, stop, step)

    def _eval_lambda(self, node: ast.Lambda, scope: Scope) -> Closure:
        return self._closure(node, scope)

    def _eval_list_comprehension(self, node: ast.ListComp | ast.GeneratorExp, scope: Scope) -> list[Any]:
        result: list[Any] = []
        inner = Scope(scope)

        def collect() -> None:
            if len(result) >= values.MAX_ITEMS:
                raise PlanLimitError(f"a list of more than {values.MAX_ITEMS} items", line=node.lineno)
            result.append(self._value(node.elt, inner))

        self._comprehend(node.generators, inner, collect)
        return result

    def _eval_dict_comprehension(self, node: ast.DictComp, scope: Scope) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        inner = Scope(scope)

        def collect() -> None:
            key = values.key_of(self._value(node.key, inner))
            values.store_item(self.meter, result, key, self._value(node.value, inner))

        self._comprehend(node.generators, inner, collect)
        return result

    def _comprehend(self, generators: list[ast.comprehension], scope: Scope, collect: Callable[[], None]) -> None:
        if not generators:
            collect()
            return
        first, rest = generators[0], generators[1:]
        iterable = self._value(first.iter, scope)
        for item in iterable if isinstance(iterable, range) else values.sequence(self.meter, iterable):
            self.meter.charge(1)
            self._assign(first.target, item, scope)
            if all(self._truth(test, scope) for test in first.ifs):
                self._comprehend(rest, scope, collect)

    def _eval_starred(self, node: ast.Starred, scope: Scope) -> Any:
        raise PlanSyntaxError("a * outside a call, a tuple or a list", line=node.lineno)

    # -- calls ---------------------------------------------------------------------------------------------------

    def _eval_call(self, node: ast.Call, scope: Scope) -> Any:
        function = self._value(node.func, scope)
        args = self._elements(node.args, scope)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, scope)
            fresh = {keyword.arg: value} if keyword.arg is not None else self._keywords(value, keyword)
            for name in fresh:
                if name in kwargs:
                    raise PlanError(f"the argument {name!r} is given twice", line=node.lineno)
            kwargs.update(fresh)
        self.line = node.lineno
        if isinstance(function, Native):
            return function.function(self.meter, args, kwargs)
        if isinstance(function, Closure):
            return self._call_closure(function, args, kwargs)
        advice = function.advice() if isinstance(function, StandIn) else ""
        raise PlanError(f"{describe(function)} cannot be called", line=node.lineno, remedy=advice)

    def _keywords(self, value: Any, keyword: ast.keyword) -> dict[str, Any]:
        if not isinstance(value, dict) or not all(type(name) is str for name in value):
            raise PlanError(f"**{describe(value)} in a call", line=keyword.lineno, expected="a dict with string keys")
        self.meter.charge(len(value))
        return value

    def _call_closure(self, function: Closure, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self._call_depth >= MAX_CALL_DEPTH:
            raise PlanLimitError(f"calls nested deeper than {MAX_CALL_DEPTH}", remedy="use a loop instead of recursion")
        scope = Scope(function.scope, _bound_arguments(function, args, kwargs))
        self._call_depth += 1
        try:
            if isinstance(function.node, ast.Lambda):
                return self._value(function.node.body, scope)
            signal = self._block(function.node.body, scope)
        finally:
            self._call_depth -= 1
        return signal.value if isinstance(signal, _Returned) else None


class ArgumentMismatch(PlanError):
    """A call does not fit the parameters of a function of the plan."""


def _bound_arguments(function: Closure, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The parameters' values for a call, by Python's rules. Raises ArgumentMismatch."""
    parameters = function.node.args
    positional = [arg.arg for arg in (*parameters.posonlyargs, *parameters.args)]
    keyword = [arg.arg for arg in (*parameters.args, *parameters.kwonlyargs)]
    names = [*positional, *(arg.arg for arg in parameters.kwonlyargs)]
    bound = dict(zip(positional, args, strict=False))
    rest = tuple(args[len(positional) :])
    if parameters.vararg is not None:
        bound[parameters.vararg.arg] = rest
    elif rest:
        raise _mismatch(function, f"is called with {len(args)} positional arguments, it takes {len(positional)}", names)
    extra = {name: value for name, value in kwargs.items() if name not in keyword}
    if extra and parameters.kwarg is None:
        near = values.did_you_mean(next(iter(extra)), keyword)
        raise _mismatch(function, f"has no argument {next(iter(extra))!r}{near}", names)
    for name in keyword:
        if name in kwargs and name in bound:
            raise _mismatch(function, f"gets the argument {name!r} twice", names)
        if name in kwargs:
            bound[name] = kwargs[name]
    if parameters.kwarg is not None:
        bound[parameters.kwarg.arg] = extra
    for name in names:
        if name not in bound and name not in function.defaults:
            raise _mismatch(function, f"misses the argument {name!r}", names)
    return {**function.defaults, **bound}


def _mismatch(function: Closure, problem: str, names: list[str]) -> ArgumentMismatch:
    return ArgumentMismatch(f"{function.name}() {problem}", expected=f"{function.name}({', '.join(names)})")


_STATEMENTS: dict[type[ast.stmt], Callable[[Run, Any, Scope], _Signal | None]] = {
    ast.FunctionDef: Run._run_function,
    ast.Return: Run._run_return,
    ast.Assign: Run._run_assign,
    ast.AnnAssign: Run._run_annotated,
    ast.AugAssign: Run._run_augmented,
    ast.For: Run._run_for,
    ast.If: Run._run_if,
    ast.Assert: Run._run_assert,
    ast.Raise: Run._run_raise,
    ast.Expr: Run._run_expression,
    ast.Import: Run._run_import,
    ast.ImportFrom: Run._run_import_from,
    ast.Pass: Run._run_pass,
    ast.Break: Run._run_break,
    ast.Continue: Run._run_continue,
}

_EXPRESSIONS: dict[type[ast.expr], Callable[[Run, Any, Scope], Any]] = {
    ast.Name: Run._eval_name,
    ast.Constant: Run._eval_constant,
    ast.BinOp: Run._eval_binary,
    ast.UnaryOp: Run._eval_unary,
    ast.BoolOp: Run._eval_boolean,
    ast.IfExp: Run._eval_conditional,
    ast.Compare: Run._eval_comparison,
    ast.Tuple: Run._eval_tuple,
    ast.List: Run._eval_list,
    ast.Set: Run._eval_set,
    ast.Dict: Run._eval_dict,
    ast.JoinedStr: Run._eval_text,
    ast.Attribute: Run._eval_attribute,
    ast.Subscript: Run._eval_subscript,
    ast.Slice: Run._eval_slice,
    ast.Lambda: Run._eval_lambda,
    ast.ListComp: Run._eval_list_comprehension,
    ast.GeneratorExp: Run._eval_list_comprehension,
    ast.DictComp: Run._eval_dict_comprehension,
    ast.Starred: Run._eval_starred,
    ast.Call: Run._eval_call,
}
