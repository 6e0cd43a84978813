"""Python files as text and syntax trees, and which local file an import means. Nothing is ever imported."""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["ParsedFile", "SourceProblem", "SourceTree", "Statement", "dotted_name", "imported_path", "location_of"]

#: Folders whose modules belong to somebody else, even where they lie below the root.
FOREIGN_FOLDERS = frozenset({"site-packages", "dist-packages"})

Statement = ast.stmt


class SourceProblem(Exception):
    """A file that cannot be read as Python; ``line`` is 1-based."""

    def __init__(self, path: Path, line: int, text: str) -> None:
        self.path, self.line, self.text = path, line, text
        super().__init__(f"{path}:{line}: {text}")


@dataclass(frozen=True)
class ParsedFile:
    """One file, parsed. ``module_name`` is importable once ``import_root`` is on ``sys.path``."""

    path: Path
    text: str
    tree: ast.Module
    module_name: str
    import_root: Path

    @cached_property
    def lines(self) -> tuple[str, ...]:
        return tuple(self.text.splitlines())

    @cached_property
    def bindings(self) -> dict[str, tuple[Statement, ...]]:
        """Top-level name -> the top-level statements that bind it, in order (a name inside `if`/`try` counts)."""
        found: dict[str, list[Statement]] = {}
        for statement in self.tree.body:
            for name in _bound_names(statement):
                found.setdefault(name, []).append(statement)
        return {name: tuple(statements) for name, statements in found.items()}

    @cached_property
    def imports(self) -> tuple[ast.Import | ast.ImportFrom, ...]:
        """Every import statement of the file, at any depth."""
        return tuple(node for node in ast.walk(self.tree) if isinstance(node, (ast.Import, ast.ImportFrom)))


class SourceTree:
    """Parses files once each and answers where a module comes from."""

    def __init__(self) -> None:
        self._parsed: dict[Path, ParsedFile | SourceProblem] = {}

    def parsed(self, path: Path, data: bytes | None = None) -> ParsedFile:
        """The parsed file; ``data`` are its bytes where the caller has them. Raises :class:`SourceProblem`."""
        known = self._parsed.get(path)
        if known is None:
            try:
                known = _parse(path, data)
            except SourceProblem as problem:
                known = problem
            self._parsed[path] = known
        if isinstance(known, SourceProblem):
            raise known
        return known

    def readable(self, path: Path | None) -> ParsedFile | None:
        """As :meth:`parsed`, but None for no path or a file that is not readable Python."""
        try:
            return None if path is None else self.parsed(path)
        except SourceProblem:
            return None


def _parse(path: Path, data: bytes | None) -> ParsedFile:
    try:
        raw = path.read_bytes() if data is None else data
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the file's own invalid escapes are not this scan's business
            tree = ast.parse(text, filename=str(path))
    except SyntaxError as error:
        raise SourceProblem(path, error.lineno or 1, f"not valid Python: {error.msg}") from None
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SourceProblem(path, line, f"cannot be decoded as {error.encoding}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise SourceProblem(path, 1, f"cannot be parsed: {error}") from None
    except OSError as error:
        raise SourceProblem(path, 1, f"cannot be read: {error.strerror}") from None
    import_root, module_name = location_of(path, _namespace_levels(tree))
    return ParsedFile(path, text, tree, module_name, import_root)


def _namespace_levels(tree: ast.Module) -> int:
    return max((node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)), default=0)


def location_of(path: Path, relative_levels: int = 0) -> tuple[Path, str]:
    """(import root, dotted module name) of a file: up through ``__init__.py`` files, so `src/` layouts need nothing.

    ``relative_levels`` is the deepest relative import of the file: without any ``__init__.py`` that many folders
    must be (namespace) packages for the file to be importable at all.
    """
    folder, parts = path.parent, [] if path.name == "__init__.py" else [path.stem]
    while (folder / "__init__.py").is_file() or len(parts) <= relative_levels - (path.name == "__init__.py"):
        if folder.parent == folder:
            break
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def imported_path(file: ParsedFile, module: str, level: int) -> Path | None:
    """The local file that ``from <level dots><module> import ...`` in ``file`` means; None where it is not local."""
    parts = module.split(".") if module else []
    if level:
        folder = file.path.parent
        for _ in range(level - 1):
            folder = folder.parent
    else:
        folder = file.import_root
        foreign = bool(FOREIGN_FOLDERS & set(folder.parts))
        if not parts or (foreign and parts[0] != file.module_name.partition(".")[0]):
            return None
    if not parts:
        return _existing(folder / "__init__.py")
    stem = folder.joinpath(*parts)
    return _existing(stem.with_name(stem.name + ".py")) or _existing(stem / "__init__.py")


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None


def dotted_name(node: ast.expr) -> str:
    """``a.b.c`` for a chain of attributes on a name, else ""."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def _bound_names(statement: Statement) -> set[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {statement.name}
    names: set[str] = set()
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)  # its body is another scope
        elif isinstance(node, ast.Lambda):
            continue
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            pending.extend(ast.iter_child_nodes(node))
    return names
