"""Which Python a plan.py may be written in: a static check over its syntax tree, with advice for everything else.

The check runs before anything of the plan does, over all branches, so that a mistake shows even where this
signature would not reach it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

from pytest_cudaforge.errors import PlanLimitError, PlanSyntaxError
from pytest_cudaforge.runtime.natives import BUILTINS, MATH
from pytest_cudaforge.runtime.values import MAX_INT_BITS, MAX_TEXT, did_you_mean

MAX_SOURCE_CHARS = 131_072
MAX_NODES = 50_000
MAX_NESTING = 60
MAX_ALSO = 8

PLAN_NAMES = ("Unsupported", "device", "empty", "launch", "op", "zeros")
EXCEPTIONS = ("Unsupported", "AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError")
PLAN_MODULE = "pytest_cudaforge.plan"

_ALLOWED = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign),
    *(ast.For, ast.If, ast.Raise, ast.Assert, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.Import, ast.ImportFrom),
    *(ast.alias, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Lambda, ast.IfExp, ast.Dict, ast.Set, ast.ListComp),
    *(ast.DictComp, ast.GeneratorExp, ast.comprehension, ast.Compare, ast.Call, ast.keyword, ast.FormattedValue),
    *(ast.JoinedStr, ast.Constant, ast.Attribute, ast.Subscript, ast.Starred, ast.Name, ast.List, ast.Tuple, ast.Slice),
    *(ast.expr_context, ast.boolop, ast.unaryop, ast.operator, ast.cmpop),
)

#: What to say about a construct outside the subset: its name, and what to write instead.
_INSTEAD: dict[type[ast.AST], tuple[str, str]] = {
    ast.While: ("a while loop", "use `for i in range(...)` with `break`"),
    ast.Try: ("try/except", 'a plan cannot recover: use `if`, or `raise Unsupported("why")`'),
    ast.With: ("a with statement", "leave it out: a plan only describes launches"),
    ast.ClassDef: ("a class", "use plain functions, tuples and dicts"),
    ast.AsyncFunctionDef: ("an async function", "use `def`"),
    ast.AsyncFor: ("async for", "use `for`"),
    ast.AsyncWith: ("async with", "leave it out"),
    ast.Await: ("await", "leave it out: launches run in the order they are written"),
    ast.Yield: ("yield", "return a list or tuple"),
    ast.YieldFrom: ("yield from", "return a list or tuple"),
    ast.Global: ("a global statement", "pass the value as an argument and return it"),
    ast.Nonlocal: ("a nonlocal statement", "pass the value as an argument and return it"),
    ast.Delete: ("a del statement", "leave it out: buffers are freed after their last use"),
    ast.NamedExpr: ("an assignment expression `:=`", "assign on a line of its own"),
    ast.SetComp: ("a set comprehension", "use a list comprehension"),
    ast.MatMult: ("the operator @", 'use op("aten.mm", a, b) or a kernel'),
}


def parse_checked(source: str) -> ast.Module:
    """The syntax tree of plan.py. Raises PlanSyntaxError with the line, the construct and what to use instead."""
    if len(source) > MAX_SOURCE_CHARS:
        raise PlanLimitError(f"plan.py has {len(source)} characters", expected=f"at most {MAX_SOURCE_CHARS}")
    try:
        tree = ast.parse(source, filename="plan.py")
    except SyntaxError as error:
        raise PlanSyntaxError(f"not Python: {error.msg}", line=error.lineno) from None
    except (RecursionError, MemoryError):
        raise PlanLimitError("plan.py is nested too deeply to be parsed", remedy="use names for the parts") from None
    except ValueError as error:
        raise PlanSyntaxError(f"plan.py cannot be parsed: {error}") from None
    problems = [problem for node, line in _walk(tree) for problem in _problems(_check_node, node, line)]
    problems += _problems(_check_top_level, tree)
    problems += _unknown_names(tree)
    if problems:
        raise _joined(problems)
    return tree


def _problems(check: Callable[..., None], *args: object) -> list[PlanSyntaxError]:
    try:
        check(*args)
    except PlanSyntaxError as error:
        return [error]
    return []


def _joined(problems: list[PlanSyntaxError]) -> PlanSyntaxError:
    """The first problem by line, followed by the others: a repair costs a round, so it should mend all at once."""
    unique = {error.what: error for error in sorted(problems, key=lambda error: error.line or 0)}
    first, *rest = unique.values()
    also = [f"\n  also {error.what}" + (f" ({error.remedy})" if error.remedy else "") for error in rest[:MAX_ALSO]]
    if len(rest) > MAX_ALSO:
        also.append(f"\n  and {len(rest) - MAX_ALSO} more")
    remedy = (first.remedy or ("write what was expected" if also else "")) + "".join(also)
    return PlanSyntaxError(first.what, line=first.line, expected=first.expected, remedy=remedy)


def _walk(tree: ast.Module) -> Iterator[tuple[ast.AST, int]]:
    """Every node with its line, without recursion; caps their number and their nesting."""
    stack: list[tuple[ast.AST, int, int]] = [(tree, 0, 1)]
    count = 0
    while stack:
        node, depth, parent_line = stack.pop()
        line: int = getattr(node, "lineno", parent_line)  # an operator has no line of its own
        count += 1
        if count > MAX_NODES:
            raise PlanLimitError(f"plan.py has more than {MAX_NODES} syntax nodes", remedy="loop with `for`")
        if depth > MAX_NESTING:
            raise PlanLimitError(
                f"nested deeper than {MAX_NESTING} levels", line=line, remedy="use names for the parts"
            )
        yield node, line
        # A left-leaning chain (a + b + c ...) nests as deeply as it is long; that is no reason to spare it.
        stack.extend((child, depth + 1, line) for child in reversed(list(_executed_children(node))))


def _executed_children(node: ast.AST) -> Iterator[ast.AST]:
    """The children that matter: annotations are never evaluated and may say anything."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield item


def _check_node(node: ast.AST, line: int) -> None:
    for kind, (name, instead) in _INSTEAD.items():
        if isinstance(node, kind):
            raise PlanSyntaxError(f"{name} is outside the plan's Python", line=line, remedy=instead)
    if not isinstance(node, _ALLOWED):
        name = type(node).__name__
        raise PlanSyntaxError(f"{name} is outside the plan's Python", line=line, remedy="use assignments, if and for")
    check = _CHECKS.get(type(node))
    if check is not None:
        check(node)


def _check_function(node: ast.FunctionDef) -> None:
    if node.decorator_list:
        raise PlanSyntaxError(f"a decorator on {node.name}()", line=node.lineno, remedy="call the function directly")
    _check_identifier(node.name, node.lineno)


def _check_identifier(name: str, line: int) -> None:
    if name.startswith("__"):
        raise PlanSyntaxError(f"the name {name!r}", line=line, expected="names without two leading underscores")


def _check_name(node: ast.Name) -> None:
    _check_identifier(node.id, node.lineno)


def _check_argument(node: ast.arg) -> None:
    _check_identifier(node.arg, node.lineno)


def _check_attribute(node: ast.Attribute) -> None:
    if node.attr.startswith("_"):
        raise PlanSyntaxError(
            f"the attribute .{node.attr}", line=node.lineno, expected="attributes without a leading underscore"
        )
    if not isinstance(node.ctx, ast.Load):
        raise PlanSyntaxError(f"an assignment to .{node.attr}", line=node.lineno, remedy="assign to a name instead")


def _check_constant(node: ast.Constant) -> None:
    value = node.value
    if isinstance(value, (bytes, complex)):
        raise PlanSyntaxError(f"a {type(value).__name__} literal", line=node.lineno, expected="numbers and strings")
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        raise PlanLimitError(f"an integer of {value.bit_length()} bits", line=node.lineno)
    if type(value) is str and len(value) > MAX_TEXT:
        raise PlanLimitError(f"a string of {len(value)} characters", line=node.lineno, expected=f"at most {MAX_TEXT}")


def _check_import(node: ast.Import) -> None:
    for alias in node.names:
        if alias.name != "math":
            raise _bad_import(alias.name, node.lineno)


def _check_import_from(node: ast.ImportFrom) -> None:
    if node.module == "__future__" and not node.level:
        return
    known = {PLAN_MODULE: PLAN_NAMES, "math": tuple(MATH)}.get(node.module or "") if not node.level else None
    if known is None:
        raise _bad_import("." * node.level + (node.module or ""), node.lineno)
    for alias in node.names:
        if alias.name not in known:
            raise PlanSyntaxError(
                f"{node.module} has no {alias.name!r} for a plan{did_you_mean(alias.name, known)}",
                line=node.lineno,
                expected=", ".join(known) if node.module == PLAN_MODULE else "a function or constant of math",
                remedy=_IMPORT_ADVICE.get(alias.name, ""),
            )


_IMPORT_ADVICE = {
    "empty_like": "write empty(x.shape, x.dtype)",
    "zeros_like": "write zeros(x.shape, x.dtype)",
    "*": "import the names you use",
}


def _bad_import(name: str, line: int) -> PlanSyntaxError:
    remedy = "plan.py sees no values; " if name.split(".")[0] in ("torch", "numpy", "triton") else ""
    return PlanSyntaxError(
        f"import of {name!r}",
        line=line,
        expected=f"only `from {PLAN_MODULE} import ...` and `math`",
        remedy=remedy + 'name dtypes as x.dtype or "float32", call operators as op("aten.mm", a, b)',
    )


def _check_raise(node: ast.Raise) -> None:
    error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    if node.cause is not None or not isinstance(error, ast.Name) or error.id not in EXCEPTIONS:
        raise PlanSyntaxError(
            "a raise of anything but Unsupported", line=node.lineno, remedy='write `raise Unsupported("needs ...")`'
        )
    if isinstance(node.exc, ast.Call) and (len(node.exc.args) > 1 or node.exc.keywords):
        raise PlanSyntaxError(f"{error.id} with several arguments", line=node.lineno, remedy="give it one string")


def _check_comparison(node: ast.Compare) -> None:
    for operator, right in zip(node.ops, node.comparators, strict=True):
        if isinstance(right, ast.Set) and isinstance(operator, (ast.In, ast.NotIn)):
            right.plan_membership = True  # type: ignore[attr-defined]  # read by _check_set, which runs later


def _check_set(node: ast.Set) -> None:
    if not getattr(node, "plan_membership", False):
        raise PlanSyntaxError("a set", line=node.lineno, remedy="use a tuple; sets stand only to the right of `in`")


def _check_comprehension(node: ast.comprehension) -> None:
    if node.is_async:
        raise PlanSyntaxError("an async comprehension", line=node.iter.lineno, remedy="use a plain one")


def _check_format(node: ast.FormattedValue) -> None:
    spec = node.format_spec
    plain = spec is None or (
        isinstance(spec, ast.JoinedStr) and all(isinstance(part, ast.Constant) for part in spec.values)
    )
    if not plain:
        raise PlanSyntaxError(
            "a format spec with a value inside", line=node.lineno, remedy="write the width as a number"
        )


_CHECKS: dict[type[ast.AST], Callable[[Any], None]] = {
    ast.FunctionDef: _check_function,
    ast.Name: _check_name,
    ast.arg: _check_argument,
    ast.Attribute: _check_attribute,
    ast.Constant: _check_constant,
    ast.Import: _check_import,
    ast.ImportFrom: _check_import_from,
    ast.Raise: _check_raise,
    ast.Compare: _check_comparison,
    ast.Set: _check_set,
    ast.comprehension: _check_comprehension,
    ast.FormattedValue: _check_format,
}


# -- the file as a whole -----------------------------------------------------------------------------------------


def _check_top_level(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in tree.body:
            raise PlanSyntaxError(
                "an import inside a function", line=node.lineno, remedy="move it to the top of plan.py"
            )
    for node in tree.body:
        if isinstance(node, (ast.For, ast.Return, ast.Break, ast.Continue, ast.Raise)):
            name = type(node).__name__.lower()
            raise PlanSyntaxError(f"`{name}` outside a function", line=node.lineno, remedy="move it into plan()")
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "plan" not in functions:
        raise PlanSyntaxError(
            f"plan.py defines no function `plan`{did_you_mean('plan', functions)}",
            expected="def plan(module, x, ...): for a module, def plan(x, ...): for a function",
        )


_NAME_ADVICE = {
    "torch": 'a plan sees no torch: use x.dtype or "float32", empty(shape, dtype), op("aten.mm", a, b)',
    "print": "leave it out; values show in error messages",
    "set": "use a tuple or dict",
    "map": "use a comprehension",
    "filter": "use a comprehension with `if`",
    "next": "index the sequence",
    "iter": "use the sequence itself",
    "type": "use isinstance(x, int)",
    "open": "a plan reads no files",
    "eval": "a plan runs no text",
    "exec": "a plan runs no text",
    "setattr": "a plan changes nothing but launches",
    "vars": "name the attribute",
}


def _unknown_names(tree: ast.Module) -> list[PlanSyntaxError]:
    """Every name that is read must be bound somewhere in the file: a typo shows before its branch runs."""
    bound = _bound_names(tree)
    problems: list[PlanSyntaxError] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            # Names with two underscores have been refused already.
            if node.id not in bound and node.id not in BUILTINS and not node.id.startswith("__"):
                problems.append(_unknown_name(node.id, node.lineno, bound))
        elif isinstance(node, ast.Raise):
            stack.extend(node.exc.args if isinstance(node.exc, ast.Call) else [])
            problems += _problems(_check_exception_name, node, bound)
        else:
            stack.extend(_executed_children(node))
    return problems


def _bound_names(tree: ast.Module) -> set[str]:
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
    return bound


def _check_exception_name(node: ast.Raise, bound: set[str]) -> None:
    error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    if isinstance(error, ast.Name) and error.id == "Unsupported" and "Unsupported" not in bound:
        raise _unknown_name("Unsupported", node.lineno, bound)


def _unknown_name(name: str, line: int, bound: set[str]) -> PlanSyntaxError:
    if name in PLAN_NAMES:
        return PlanSyntaxError(
            f"the name {name!r} is not imported", line=line, remedy=f"add `from {PLAN_MODULE} import {name}`"
        )
    if name == "math":
        return PlanSyntaxError("the name 'math' is not imported", line=line, remedy="add `import math`")
    remedy = _NAME_ADVICE.get(name, "")
    near = "" if remedy else did_you_mean(name, {*bound, *BUILTINS})
    return PlanSyntaxError(
        f"the name {name!r} is not defined{near}",
        line=line,
        expected="a name of this file, of its imports, or one of " + ", ".join(BUILTINS),
        remedy=remedy,
    )
