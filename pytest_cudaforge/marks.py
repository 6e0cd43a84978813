"""Does this expression mean ``forge_target``? Answered from syntax, through aliases and local re-exports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pytest_cudaforge.sources import ParsedFile, SourceProblem, SourceTree, Statement, dotted_name, imported_path

__all__ = ["MarkResolver", "exported_aliases", "literal_flag"]

PACKAGE = "pytest_cudaforge"
DECORATOR = "forge_target"
#: So many aliases of aliases are followed.
_DEEPEST = 16
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


def literal_flag(tree: SourceTree, file: ParsedFile, mark: ast.expr, option: str, depth: int = 0) -> bool | None:
    """What a use of the decorator says of a boolean ``option``, through the aliases that carry options of their own.

    True or False where it stands there as such, False where nothing is said; None where only importing would tell.
    """
    if depth > _DEEPEST:
        return None
    if isinstance(mark, ast.Call):
        for keyword in mark.keywords:
            if keyword.arg == option:
                told = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                return told if isinstance(told, bool) else None
        if any(keyword.arg is None for keyword in mark.keywords):
            return None  # **options
        partial = dotted_name(mark.func).rpartition(".")[2] == "partial"
        inner = mark.args[0] if partial and mark.args else mark.func
        return literal_flag(tree, file, inner, option, depth + 1)
    head, _, rest = dotted_name(mark).partition(".")
    for statement in _binding(file, head):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            found = _imported_alias(tree, file, statement, head, rest)
            if found is not None:
                return literal_flag(tree, found[0], found[1], option, depth + 1)
        else:
            value = getattr(statement, "value", None)
            return literal_flag(tree, file, value, option, depth + 1) if isinstance(value, ast.expr) else None
    # The decorator itself, from this package.
    return False


def _imported_alias(
    tree: SourceTree, file: ParsedFile, node: ast.Import | ast.ImportFrom, head: str, rest: str
) -> tuple[ParsedFile, ast.expr] | None:
    """The local file that an imported name comes from, and the name there; None where it is not local."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            dotted = f"{head}.{rest}" if rest else head
            name = rest if alias.asname == head else dotted.removeprefix(alias.name + ".")
            if (alias.asname or alias.name.partition(".")[0]) != head or not name:
                continue
            home = tree.readable(imported_path(file, alias.name, 0))
        elif alias.name == "*" or (alias.asname or alias.name) == head:
            name = head if alias.name == "*" else alias.name
            home = tree.readable(imported_path(file, node.module or "", node.level))
            if rest:  # `from . import marks`
                dotted = f"{node.module}.{name}" if node.module else name
                home, name = tree.readable(imported_path(file, dotted, node.level)), rest
        else:
            continue
        if home is not None and name.partition(".")[0] in home.bindings:
            return home, ast.parse(name, mode="eval").body
    return None


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
