"""What importing a target runs of the repo, as far as its syntax tells: whole files, package by package. Nothing is
imported.

Two checkouts in which these files are the same have the same module, and need no race. A target's source (closure.py)
is the text that it needs, by name; here a changed line anywhere in a file that is imported counts, because it runs. In
doubt something differs: an import that cannot be followed, a file that is opened, code that is made at run time.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_cudaforge.records import Target
from pytest_cudaforge.sources import FOREIGN_FOLDERS, ParsedFile, SourceProblem, SourceTree, dotted_name

__all__ = ["difference"]

#: Who imports these may run what no import statement names.
_DYNAMIC_MODULES = frozenset(
    ["cffi", "ctypes", "imp", "importlib", "pkgutil", "runpy", "subprocess", "torch.utils.cpp_extension"]
)
_HARMLESS = frozenset(["importlib.metadata"])
_DYNAMIC_NAMES = frozenset(["__import__", "eval", "exec", "open"])
#: Methods and functions of modules that read files or load code.
_READING = frozenset(
    [
        *("fromfile", "genfromtxt", "glob", "import_module", "iterdir", "listdir", "load", "load_file", "load_inline"),
        *("load_library", "loadtxt", "memmap", "open", "read_bytes", "read_text", "rglob", "safe_load", "scandir"),
        *("from_file", "from_pretrained", "load_state_dict_from_url", "read_csv"),
    ]
)


def difference(head: Target, base: Target, python_paths: Sequence[str] = ()) -> str:
    """Why two versions of a target may not be the same code, in words; "" where they surely are.

    ``python_paths``: as the head's oracle has them; those inside its root are taken from the other root as well.
    """
    files = {}
    for target, root in ((head, Path(head.root)), (base, Path(base.root))):
        paths = [_moved(Path(path), Path(head.root), root) for path in python_paths]
        walk = _Walk(root, Path(head.root), [*paths, root, root / "src"])
        walk.visit_target(target)
        if walk.doubt:
            return f"what it runs cannot be told: {walk.doubt}"
        files[target.root] = walk.digests
    now, before = files[head.root], files[base.root]
    changed = sorted(path for path in now.keys() | before.keys() if now.get(path) != before.get(path))
    return f"{', '.join(changed[:3])}{' and more' if len(changed) > 3 else ''} changed" if changed else ""


def _moved(path: Path, root: Path, other: Path) -> Path:
    return other / path.relative_to(root) if path.is_relative_to(root) else path


@dataclass
class _Walk:
    """Follows imports; ``digests`` of the files by their path below ``root``, ``doubt`` the first thing unclear."""

    root: Path
    head_root: Path
    folders: Sequence[Path]
    tree: SourceTree = field(default_factory=SourceTree)
    digests: dict[str, str] = field(default_factory=dict)
    doubt: str = ""
    _pending: list[Path] = field(default_factory=list)

    def visit_target(self, target: Target) -> None:
        path = Path(target.root) / target.path
        self.folders = [path.parent, Path(target.import_root), *self.folders]
        self._want(path)
        folder = path.parent
        while (folder / "__init__.py").is_file() and folder != Path(target.import_root):
            self._want(folder / "__init__.py")
            folder = folder.parent
        while self._pending and not self.doubt:
            self._visit(self._pending.pop())

    def _want(self, path: Path) -> None:
        shown = path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        if shown not in self.digests:
            self.digests[shown] = ""
            self._pending.append(path)

    def _visit(self, path: Path) -> None:
        shown = path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        try:
            file = self.tree.parsed(path)
        except SourceProblem as problem:
            self.doubt = f"{shown}: {problem.text}"
            return
        self.digests[shown] = hashlib.sha256(path.read_bytes()).hexdigest()
        found = next(_dynamic(file.tree), None)
        if found is not None:
            self.doubt = f"{shown}:{found.lineno}: {ast.unparse(found)[:60]}"
            return
        for node in file.imports:
            if not self._follow(file, node):
                self.doubt = f"{shown}:{node.lineno}: {ast.unparse(node)[:60]}"
                return

    def _follow(self, file: ParsedFile, node: ast.Import | ast.ImportFrom) -> bool:
        """Want the files that an import runs; False where they cannot be told."""
        if isinstance(node, ast.Import):
            return all(self._module(alias.name) for alias in node.names)
        if node.level:
            folder = file.path.parent
            for _ in range(node.level - 1):
                folder = folder.parent
            return self._members([folder], node.module or "", node)
        if self._is_foreign(str(node.module)):
            return True
        return self._members(self.folders, str(node.module), node)

    def _members(self, homes: Sequence[Path], module: str, node: ast.ImportFrom) -> bool:
        """``from module import names``: the module, its packages, and those names that are modules themselves."""
        # Which of several comes first is the import system's business: all of them count.
        found = [self._names(home, module, node) for home in homes if self._chain(home, module)]
        return any(found)

    def _names(self, home: Path, module: str, node: ast.ImportFrom) -> bool:
        place = home.joinpath(*module.split(".")) if module else home
        path = next((p for p in (place.with_name(place.name + ".py"), place / "__init__.py") if p.is_file()), None)
        own = self.tree.readable(path)
        for alias in node.names:
            inner = next(
                (p for p in (place / f"{alias.name}.py", place / alias.name / "__init__.py") if p.is_file()), None
            )
            if inner is not None:
                self._want(inner)
            elif path is None or (own is not None and not _binds(own, alias.name)):
                return False
        return True  # a file that cannot be parsed says so when it is visited

    def _module(self, name: str) -> bool:
        return self._is_foreign(name) or any([self._chain(home, name) for home in self.folders])

    def _chain(self, home: Path, module: str) -> bool:
        """Want ``a``, ``a.b`` and ``a.b.c`` below ``home``; False where ``a.b.c`` is not there."""
        place, wanted = home, []
        parts = module.split(".") if module else []
        for number, part in enumerate(parts):
            place = place / part
            plain = place.with_name(part + ".py")
            if (place / "__init__.py").is_file():
                wanted.append(place / "__init__.py")
            elif plain.is_file() and number == len(parts) - 1:
                wanted.append(plain)
            elif not place.is_dir():
                return False
        if not parts and (home / "__init__.py").is_file():
            wanted.append(home / "__init__.py")
        for path in wanted:
            self._want(path)
        return bool(wanted) or not parts

    def _is_foreign(self, module: str) -> bool:
        """Is it Python's own or an installed one, or nowhere to be had: the same for both versions?"""
        top = module.partition(".")[0]
        # This package is the running one, whichever version of the target it runs.
        if top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
            return True
        if any((folder / top).is_dir() or (folder / f"{top}.py").is_file() for folder in self.folders):
            return False
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            return False
        places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec is not None else []
        # An editable install leads back into the repo.
        inside = [Path(place) for place in places if Path(place).is_relative_to(self.head_root)]
        inside = [place for place in inside if not FOREIGN_FOLDERS & set(place.parts)]
        self.folders = [*self.folders, *(_moved(place.parent, self.head_root, self.root) for place in inside)]
        return not inside


def _binds(file: ParsedFile, name: str) -> bool:
    """Does the file have that name, or may it have it from a star import?"""
    if name == "*" or name in file.bindings:
        return True
    return any(alias.name == "*" for node in file.imports for alias in node.names)


def _dynamic(tree: ast.Module) -> Iterator[ast.stmt | ast.expr]:
    """Statements and expressions that may read files, or run what no import names."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if any(_is_dynamic(name) for name in _imported_names(node)):
                yield node
        elif isinstance(node, ast.Call):
            called = node.func
            named = isinstance(called, ast.Name) and called.id in _DYNAMIC_NAMES
            if named or (isinstance(called, ast.Attribute) and called.attr in _READING):
                yield node
        elif isinstance(node, ast.Attribute) and dotted_name(node) in ("sys.path", "sys.meta_path"):
            yield node


def _imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]


def _is_dynamic(name: str) -> bool:
    if any(name == known or name.startswith(known + ".") for known in _HARMLESS):
        return False
    return any(name == known or name.startswith(known + ".") for known in _DYNAMIC_MODULES)
