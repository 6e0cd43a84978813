"""A target with what it needs: the statements of its own file and of local files it imports, as readable text.

This text is what the Coder sees, and a sha256 over it says whether a recorded round still belongs to the target: a
change in another class of the same file leaves it valid, a change in a function that it calls two files away does not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from pytest_cudaforge.sources import ParsedFile, SourceTree, Statement, imported_path

__all__ = ["source_closure"]

#: Functions of a target's file that the oracle calls where the decorator gives no inputs.
INPUT_FUNCTIONS = ("get_inputs", "get_init_inputs")


def source_closure(tree: SourceTree, file: ParsedFile, name: str, root: Path) -> str:
    """The text of top-level ``name`` of ``file`` and of everything local that it needs, transitively.

    The target's own file comes first, each further file under a comment with its path below ``root``.
    """
    walk = _Walk(tree)
    for wanted in (name, *INPUT_FUNCTIONS):
        walk.need(file, wanted)
    walk.run()
    parts = [_section(file, walk.chosen.get(file.path, set()))]
    for path in sorted(walk.chosen.keys() - {file.path}):
        header = f"# --- {_relative(path, root)}"
        parts.append(f"{header}\n\n{_section(tree.parsed(path), walk.chosen[path])}")
    return "\n\n\n".join(part for part in parts if part.strip()) + "\n"


class _Walk:
    """A worklist over (file, name); ``chosen`` are the line ranges to show, by file."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.chosen: dict[Path, set[tuple[int, int]]] = {}
        self._seen: set[tuple[Path, str, tuple[str, ...]]] = set()
        self._pending: list[tuple[ParsedFile, str, tuple[str, ...]]] = []

    def need(self, file: ParsedFile, name: str, attributes: Iterable[str] = ()) -> None:
        """Ask for a name; ``attributes`` are what is used of it (matters where the name is a module)."""
        entry = (file, name, tuple(sorted(attributes)))
        key = (file.path, name, entry[2])
        if key not in self._seen:
            self._seen.add(key)
            self._pending.append(entry)

    def run(self) -> None:
        while self._pending:
            file, name, attributes = self._pending.pop()
            statements = file.bindings.get(name, ())
            if not statements:
                self._from_star(file, name)
            for statement in (*statements, *_later_changes(file, name)):
                self._choose(file, statement)
                self._follow_imports(file, statement, name, attributes)

    def _choose(self, file: ParsedFile, statement: Statement) -> None:
        lines = _line_range(statement)
        ranges = self.chosen.setdefault(file.path, set())
        if lines in ranges:
            return
        ranges.add(lines)
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            for name, attributes in _used_names(statement).items():
                self.need(file, name, attributes)

    def _follow_imports(self, file: ParsedFile, statement: Statement, name: str, attributes: Iterable[str]) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        self._follow_from(file, node, alias.name, attributes)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name:
                        self._whole(self.tree.readable(imported_path(file, alias.name, 0)), attributes)

    def _follow_from(self, file: ParsedFile, node: ast.ImportFrom, name: str, attributes: Iterable[str]) -> None:
        module = self.tree.readable(imported_path(file, node.module or "", node.level))
        if module is not None and name in module.bindings:
            self.need(module, name, attributes)
            return
        dotted = f"{node.module}.{name}" if node.module else name
        submodule = self.tree.readable(imported_path(file, dotted, node.level))
        if submodule is not None:
            self._whole(submodule, attributes)
        elif module is not None:
            self._from_star(module, name)

    def _whole(self, module: ParsedFile | None, attributes: Iterable[str]) -> None:
        # A module used as a value (no attribute seen) may be used in any way: all of it counts.
        if module is not None:
            used = [name for name in attributes if name in module.bindings]
            for name in used or module.bindings:
                self.need(module, name)

    def _from_star(self, file: ParsedFile, name: str) -> None:
        for node in file.imports:
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                module = self.tree.readable(imported_path(file, node.module or "", node.level))
                if module is not None and module.path != file.path:
                    if name in module.bindings:
                        self._choose(file, node)
                    self.need(module, name)


def _used_names(statement: Statement) -> dict[str, set[str]]:
    """Names read anywhere in a statement, each with the attributes taken from it directly."""
    used: dict[str, set[str]] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            used.setdefault(node.id, set())
        elif isinstance(node, ast.Attribute):
            chain: ast.expr = node
            while isinstance(chain, ast.Attribute):
                if isinstance(chain.value, ast.Name):
                    used.setdefault(chain.value.id, set()).add(chain.attr)
                chain = chain.value
    return used


def _later_changes(file: ParsedFile, name: str) -> Iterable[Statement]:
    """Top-level statements that change ``name`` in place: ``TABLE["x"] = 1``, ``Norm.eps = 2``."""
    for statement in file.tree.body:
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if any(_changed_name(target) == name for target in targets):
                yield statement


def _changed_name(target: ast.expr) -> str:
    if not isinstance(target, (ast.Attribute, ast.Subscript)):
        return ""
    node: ast.expr = target
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _line_range(statement: Statement) -> tuple[int, int]:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    return first, statement.end_lineno or statement.lineno


def _section(file: ParsedFile, ranges: set[tuple[int, int]]) -> str:
    pieces: list[str] = []
    shown = 0
    for first, last in sorted(ranges):
        start = max(first, shown + 1)  # two statements on one line are shown once
        if start > last:
            continue
        text = "\n".join(file.lines[start - 1 : last])
        gap = "\n" if pieces and start == shown + 1 else "\n\n"
        pieces.append(text if not pieces else gap + text)
        shown = last
    return "".join(pieces)


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
