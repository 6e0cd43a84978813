"""Does this expression mean ``forge_target``? Answered from syntax, through aliases and local re-exports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pytest_cudaforge.sources import ParsedFile, SourceProblem, SourceTree, Statement, dotted_name, imported_path

__all__ = ["MarkResolver", "exported_aliases"]

PACKAGE = "pytest_cudaforge"
DECORATOR = "forge_target"
#: The modules of this package that have the decorator, and its names in them.
HOMES = {PACKAGE: (DECORATOR, f"target.{DECORATOR}"), f"{PACKAGE}.target": (DECORATOR,)}


class MarkResolver:
    """Resolves dotted names of a file on demand; only imports that bind the name asked for are opened."""

    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._asking: set[tuple[Path, str]] = set()

    def is_mark(self, file: ParsedFile, expression: ast.expr) -> bool:
        """True for ``forge_target``, ``forge_target(...)``, ``partial(forge_target, ...)`` under any local name."""
        while isinstance(expression, ast.Call):
            partial = dotted_name(expression.func).rpartition(".")[2] == "partial"
            expression = expression.args[0] if partial and expression.args else expression.func
        name = dotted_name(expression)
        return bool(name) and self.means_mark(file, name)

    def means_mark(self, file: ParsedFile, name: str) -> bool:
        """``name`` may be dotted: ``cf.forge_target``, ``marks.ft``."""
        question = (file.path, name)
        if question in self._asking:
            return False  # a circle of imports or assignments
        self._asking.add(question)
        try:
            head, _, rest = name.partition(".")
            return any(self._binds_mark(file, statement, head, rest) for statement in _binding(file, head))
        finally:
            self._asking.discard(question)

    def _binds_mark(self, file: ParsedFile, statement: Statement, head: str, rest: str) -> bool:
        if isinstance(statement, ast.ImportFrom):
            return self._from_means(file, statement, head, rest)
        if isinstance(statement, ast.Import):
            return self._import_means(file, statement, head, rest)
        value = getattr(statement, "value", None)
        return isinstance(value, ast.expr) and not rest and self._assigned_mark(file, value)

    def _assigned_mark(self, file: ParsedFile, value: ast.expr) -> bool:
        if isinstance(value, ast.Call) and dotted_name(value.func).rpartition(".")[2] != "partial" and value.args:
            return False  # `Norm = forge_target(Norm)`: the result is a target, not a decorator
        return self.is_mark(file, value) and not _applied(value)

    def _from_means(self, file: ParsedFile, node: ast.ImportFrom, head: str, rest: str) -> bool:
        for alias in node.names:
            if alias.name == "*":
                target = head
            elif (alias.asname or alias.name) == head:
                target = alias.name
            else:
                continue
            full = f"{target}.{rest}" if rest else target
            if not node.level and node.module in HOMES:
                return full in HOMES[node.module]
            if self._local_means(file, node.module or "", node.level, full):
                return True
        return False

    def _local_means(self, file: ParsedFile, module: str, level: int, name: str) -> bool:
        home = self._tree.readable(imported_path(file, module, level))
        if home is not None and self.means_mark(home, name):
            return True
        first, _, rest = name.partition(".")  # `from . import marks`: the name may be a submodule
        dotted = f"{module}.{first}" if module else first
        submodule = self._tree.readable(imported_path(file, dotted, level)) if rest else None
        return submodule is not None and self.means_mark(submodule, rest)

    def _import_means(self, file: ParsedFile, node: ast.Import, head: str, rest: str) -> bool:
        for alias in node.names:
            if alias.asname:
                module, name = alias.name, rest
                if alias.asname != head:
                    continue
            else:
                # `import a.b` binds `a`; a use `a.b.mark` reaches into a.b.
                module, full = alias.name, f"{head}.{rest}"
                if not full.startswith(module + "."):
                    if head == PACKAGE == module.partition(".")[0] and rest in HOMES[PACKAGE]:
                        return True
                    continue
                name = full[len(module) + 1 :]
            if module in HOMES:
                return name in HOMES[module]
            home = self._tree.readable(imported_path(file, module, 0))
            if home is not None and name and self.means_mark(home, name):
                return True
        return False


def exported_aliases(tree: SourceTree, path: Path, data: bytes) -> set[str]:
    """Names other than ``forge_target`` that a file binds to the decorator at its top level."""
    try:
        file = tree.parsed(path, data)
    except SourceProblem:
        return set()
    resolver = MarkResolver(tree)
    return {name for name in file.bindings if name != DECORATOR and resolver.means_mark(file, name)}


def _binding(file: ParsedFile, name: str) -> Iterator[Statement]:
    for statement in file.bindings.get(name, ()):
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield statement
    for node in file.imports:
        names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        if name in names or "*" in names:
            yield node


def _applied(value: ast.expr) -> bool:
    """``forge_target(...)(Norm)``: a target, not a decorator."""
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Call) and bool(value.args)
