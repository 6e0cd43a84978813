"""What Triton's kernel.py may be made of: Python that gives the same device code on every machine, on every day.

kernel.py is imported where it is compiled, in a sandbox; what it could ask there (the date, a file, the environment)
it must not ask, for what was verified here is compiled anew elsewhere. Decided by its text alone, as for C++
(:func:`.cpp.check_unit`): nothing is imported but Triton's language and a few modules that know of no machine, and no
name leads from these to others.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Iterator

from pytest_cudaforge.errors import BuildFailure

__all__ = ["check"]

_LANGUAGE = "triton.language"
#: By module, what kernel.py may take of it: nothing that tells of a machine, or evaluates a text.
_NAMES = {
    "triton": frozenset(
        {"Config", "autotune", "cdiv", "constexpr_function", "heuristics", "jit", "language", "next_power_of_2"}
    ),
    "functools": frozenset({"cache", "lru_cache", "partial", "reduce", "wraps"}),
    "math": frozenset(name for name in vars(math) if not name.startswith("_")),
    "typing": frozenset(
        {"Annotated", "Any", "Callable", "Dict", "Final", "Iterable", "Iterator", "List", "Literal", "Mapping"}
        | {"NamedTuple", "Optional", "Sequence", "Set", "TYPE_CHECKING", "Tuple", "Type", "TypeVar", "Union"}
    ),
}
#: Of torch: names of dtypes, and what annotations say.
_TORCH = frozenset({"Tensor", "dtype", "bool", "uint8", "half", "float", "double", "long", "int"})
_TORCH_DTYPE = re.compile(r"(float|bfloat|u?int|complex)\d+(_e\dm\d\w*)?")
#: Builtins that lead elsewhere, or tell where something lies.
_BUILTINS = frozenset(
    {"breakpoint", "compile", "delattr", "dir", "eval", "exec", "getattr", "globals", "hash", "id", "input", "locals"}
    | {"open", "setattr", "vars"}
)
#: Attributes by which frames, and through them all modules, are reached.
_FRAMES = frozenset({"f_back", "f_builtins", "f_globals", "f_locals", "gi_frame", "cr_frame", "ag_frame", "tb_frame"})
#: What modules of Triton's have imported, by which a machine is asked.
_FOREIGN = frozenset(
    {"builtins", "bltns", "calendar", "contextlib", "ctypes", "datetime", "driver", "email", "gc", "getpass", "glob"}
    | {"hashlib", "importlib", "inspect", "io", "json", "knobs", "linecache", "locale", "logging", "multiprocessing"}
    | {"numpy", "os", "pathlib", "platform", "posix", "pkgutil", "resource", "runpy", "runtime", "secrets", "shutil"}
    | {"signal", "site", "socket", "subprocess", "sys", "sysconfig", "tempfile", "testing", "threading", "time"}
    | {"tools", "torch", "traceback", "types", "uuid", "warnings", "weakref"}
)
_EXPECTED = (
    "imports of triton, triton.language and what lies in it, math, functools and typing alone; no __names__, no "
    "getattr, eval, exec, open or the like"
)


@functools.lru_cache(maxsize=8)
def check(source: str) -> None:
    """Raises BuildFailure where kernel.py asks for anything but device code; what is no Python at all is left to the
    compiler, which shows where."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for line, told in sorted(_told(tree)):
        raise BuildFailure(
            f"kernel.py:{line}: {told}: what it compiles to may depend on where and when that is", expected=_EXPECTED
        )


def _told(tree: ast.Module) -> Iterator[tuple[int, str]]:
    modules = dict(_modules(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, f"imports {one.name}") for one in node.names if not _is_module(one.name))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = (one.name for one in node.names if not _may_be_taken(module, one.name))
            yield from ((node.lineno, f"imports {name} from {module}") for name in names)
        elif isinstance(node, ast.Name):
            if node.id in _BUILTINS or _is_dunder(node.id):
                yield node.lineno, f"uses {node.id}"
        elif isinstance(node, ast.Attribute):
            module = modules.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
            if not _may_be_read(module, node.attr):
                yield node.lineno, f"reads .{node.attr}"


def _modules(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, module) of the modules that the text gives names to."""
    for node in ast.walk(tree):
        for one in node.names if isinstance(node, ast.Import) else ():
            first = one.name.partition(".")[0]
            yield (one.asname, one.name) if one.asname else (first, first)


def _is_module(name: str) -> bool:
    return name in _NAMES or name == "torch" or _is_language(name)


def _is_language(name: str) -> bool:
    """Is it a part of Triton's language?"""
    parts = name.split(".")
    return f"{name}.".startswith(f"{_LANGUAGE}.") and not any(part in _FOREIGN or _is_dunder(part) for part in parts)


def _may_be_taken(module: str, name: str) -> bool:
    if module == "__future__":
        return True
    return _is_module(module) and _may_be_read(module, name)


def _may_be_read(module: str, name: str) -> bool:
    """``module``: what the name before the dot stands for; "" for anything else."""
    if module in _NAMES:
        return name in _NAMES[module]
    if module == "torch":
        return name in _TORCH or _TORCH_DTYPE.fullmatch(name) is not None
    return not (_is_dunder(name) or name in _FRAMES or name in _FOREIGN)


def _is_dunder(name: str) -> bool:
    return name.startswith("__")
