"""What torch.compile writes for a target: caught while the baseline compiles, reduced to its kernels.

Catching costs nothing: Inductor hands the text of every module it writes, or finds in its cache, to a hook. Reducing
it is pure: Inductor's text is parsed, never run.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["MOST_CHARACTERS", "captured", "kernels_of"]

#: About 2 000 tokens: what a prompt may spend on a rival's code.
MOST_CHARACTERS = 6_000
_HOOK = "save_output_code"
#: Lines that do no work of the kernel's.
_BOILERPLATE = re.compile(r"^.*(?:inductor_cpu_integer_div_error|#include).*\n", re.MULTILINE)
_CAST_LITERAL = re.compile(r"static_cast<int64_t>\((-?\w+?)L?\)")
#: Assignments of ``call`` that say where a kernel's memory comes from.
_ALLOCATORS = ("empty_strided", "reinterpret_tensor", "extern_kernels", "torch.ops")


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """The texts that Inductor writes, or loads from its cache, inside; none where this torch has no such hook."""
    texts: list[str] = []
    try:
        from torch._inductor.graph import GraphLowering
    except ImportError:
        yield texts
        return
    graph: Any = GraphLowering
    if _HOOK not in vars(graph):
        yield texts
        return
    before = vars(graph)[_HOOK]
    setattr(graph, _HOOK, staticmethod(texts.append))
    try:
        yield texts
    finally:
        setattr(graph, _HOOK, before)


def kernels_of(texts: Sequence[str], most: int = MOST_CHARACTERS) -> str:
    """The kernels of Inductor's modules and the calls that run them, at most ``most`` characters; "" where there is
    no kernel (library calls alone, or a text that is not understood)."""
    kernels: list[str] = []
    calls: list[str] = []
    for text in dict.fromkeys(texts):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        found = dict(_kernels(tree))
        kernels += found.values()
        calls += _calls(tree, frozenset(found))
    if not kernels:
        return ""
    return _fitted(kernels, "\n".join(f"# {line}" for line in calls), most)


def _kernels(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, source) of ``name = async_compile.<language>(...)``: the longest text among its arguments."""
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        function, target = node.value.func, node.targets[0]
        if not isinstance(function, ast.Attribute) or ast.unparse(function.value) != "async_compile":
            continue
        sources = [a.value for a in node.value.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if sources and isinstance(target, ast.Name):
            source = max(sources, key=len)
            yield target.id, _triton(source) if function.attr == "triton" else _cxx(source, target.id)


def _triton(source: str) -> str:
    """The jitted functions alone, without imports and Inductor's own decorators."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source.strip()
    lines = source.splitlines()
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    parts = ["\n".join(["@triton.jit", *lines[node.lineno - 1 : node.end_lineno]]) for node in functions]
    return "\n\n".join(parts) or source.strip()


def _cxx(source: str, name: str) -> str:
    short = _CAST_LITERAL.sub(r"\1", _BOILERPLATE.sub("", source.strip() + "\n"))
    return re.sub(r"\bkernel\(", f"{name}(", short, count=1).strip()


def _calls(tree: ast.Module, kernels: frozenset[str]) -> list[str]:
    """The statements of ``call`` that allocate or run something, in order."""
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    statements = [node for body in bodies for node in ast.walk(body) if isinstance(node, (ast.Expr, ast.Assign))]
    statements.sort(key=lambda node: node.lineno)
    return [text for node in statements if _works(text := ast.unparse(node), kernels)]


def _works(text: str, kernels: frozenset[str]) -> bool:
    called = re.match(r"(?:\w+ = )?([\w.]+)\(", text)
    if called is None:
        return False
    name = called.group(1)
    return name.partition(".")[0] in kernels or name.startswith(_ALLOCATORS)


def _fitted(kernels: Sequence[str], calls: str, most: int) -> str:
    """Whole kernels while there is room; the first one is cut where even that is too long."""
    if len(calls) > most // 4:
        calls = calls[: most // 4].rpartition("\n")[0] + "\n# ..."
    room = most - len(calls)
    kept: list[str] = []
    for kernel in kernels:
        if len(kernel) > room:
            break
        kept.append(kernel)
        room -= len(kernel) + 2
    left = len(kernels) - len(kept)
    if not kept:
        kept = [kernels[0][:room].rpartition("\n")[0], "... (cut)"]
        left -= 1
    note = [f"# ... and {left} more kernel{'s' if left > 1 else ''}"] if left else []
    return "\n\n".join([*kept, *note, calls]).strip()
