"""Finding targets by their syntax: the decorator under any alias, and KernelBench files. Nothing is imported.

A cheap look at the bytes rules out almost every file; only what may name the decorator is parsed. Followed are: import
aliases, module aliases, assignments (``mark = forge_target``, ``half = forge_target(precision="fp16", inputs=...)``,
``functools.partial(forge_target, ...)``) and re-exports through local modules, star imports included. Not followed: a
user's own function that calls ``forge_target`` inside, and re-exports by installed packages.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from pytest_cudaforge.closure import source_closure
from pytest_cudaforge.marks import MarkResolver, exported_aliases, literal_flag
from pytest_cudaforge.records import Kind, Target
from pytest_cudaforge.sources import FOREIGN_FOLDERS, ParsedFile, SourceProblem, SourceTree
from pytest_cudaforge.target import TargetOptions, unknown_option

__all__ = ["Discovery", "Problem", "discover", "snake_case"]

#: What pytest itself does not recurse into (its `norecursedirs` default); the plugin passes the user's own list.
NO_RECURSE = ("*.egg", ".*", "_darcs", "build", "CVS", "dist", "node_modules", "venv", "{arch}")
NEVER = frozenset({"__pycache__", "node_modules", "build"}) | FOREIGN_FOLDERS

MARK_TOKEN = b"forge_target"
KERNELBENCH_NAMES = frozenset({"Model", "get_inputs", "get_init_inputs"})
#: Bases that a torch module cannot have as its only ones.
PLAIN_BASES = frozenset({"object", "ABC", "Enum", "IntEnum", "NamedTuple", "TypedDict", "Protocol", "Exception"})


@dataclass(frozen=True)
class Problem:
    """Something that looks like a target and cannot be one. ``id`` is the target's id, or the path alone."""

    id: str
    path: str
    line: int
    text: str


@dataclass(frozen=True)
class Discovery:
    """What a scan found, both in order of path and line. ``files`` counts the Python files looked at."""

    targets: tuple[Target, ...] = ()
    problems: tuple[Problem, ...] = ()
    files: int = 0


@dataclass(frozen=True)
class _Mark:
    """One use of the decorator; ``text`` is set where it cannot be a target. ``used``: the expression that marks."""

    qualname: str
    line: int
    kind: Kind
    call: ast.Call | None = None
    text: str = ""
    used: ast.expr | None = None


@dataclass
class _Scan:
    root: Path
    tree: SourceTree = field(default_factory=SourceTree)
    targets: list[Target] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def discover(paths: Sequence[str | Path], root: str | Path, *, no_recurse: Sequence[str] = NO_RECURSE) -> Discovery:
    """Scan files and folders for targets.

    Args:
        paths: files and folders; a KernelBench file given here is a target whatever its name is.
        root: ids are paths below this folder (files outside of it keep their absolute path).
        no_recurse: glob patterns of folder names to leave out (pytest's `norecursedirs`); folders given are entered.

    Raises nothing about the files found: unreadable ones become problems. A path that does not exist is ignored.
    """
    scan = _Scan(_absolute(root))
    files = dict(_python_files([_absolute(path) for path in paths], no_recurse))
    for path, data in _candidates(files, scan.tree):
        _scan_file(scan, path, data, given=files[path])
    targets = sorted(scan.targets, key=lambda target: (target.path, target.line))
    problems = sorted(scan.problems, key=lambda problem: (problem.path, problem.line))
    return Discovery(tuple(targets), tuple(problems), len(files))


def snake_case(name: str) -> str:
    """``RMSNorm`` -> ``rms_norm``, ``Outer.Inner`` -> ``outer_inner``, ``36_RMSNorm_`` -> ``36_rms_norm``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_") or "target"


# -- files -----------------------------------------------------------------------------------------------------


def _python_files(paths: Sequence[Path], no_recurse: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """(path, was it given itself); folders first, so that a file given beside its folder counts as given."""
    for path in paths:
        if path.is_dir():
            yield from ((found, False) for found in _walk(str(path), no_recurse))
    for path in paths:
        if path.is_file():
            yield str(path), True


def _absolute(path: str | Path) -> Path:
    # Not resolved: ids must agree with pytest's, which keeps a rootdir that is reached through a symbolic link.
    return Path(os.path.abspath(path))


def _walk(folder: str, no_recurse: Sequence[str]) -> Iterator[str]:
    pending = [folder]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in listed:
            # Symbolic links to folders are left out: their files have another path in the tree, or lie outside.
            if entry.is_dir(follow_symlinks=False):
                if not _left_out(entry, no_recurse):
                    pending.append(entry.path)
            elif entry.name.endswith(".py") and entry.is_file():
                yield entry.path


def _left_out(entry: os.DirEntry[str], no_recurse: Sequence[str]) -> bool:
    name = entry.name
    if name.startswith(".") or name in NEVER or any(fnmatch(name, pattern) for pattern in no_recurse):
        return True
    return os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))


def _candidates(files: dict[str, bool], tree: SourceTree) -> Iterator[tuple[str, bytes]]:
    """The files worth parsing, with their bytes; a second pass follows aliases that some file re-exports."""
    seen: set[str] = set()
    aliases: set[str] = set()
    for path, given in files.items():
        data = _bytes(path)
        if data is not None and (given or _may_hold_target(data)):
            seen.add(path)
            yield path, data
            aliases |= exported_aliases(tree, Path(path), data)
    known: set[str] = set()
    while aliases - known:
        known |= aliases
        words, pattern = [name.encode() for name in known], _alias_use(known)
        for path in files.keys() - seen:
            data = _bytes(path)
            if data is not None and any(word in data for word in words) and pattern.search(data):
                seen.add(path)
                yield path, data
                aliases |= exported_aliases(tree, Path(path), data)


def _may_hold_target(data: bytes) -> bool:
    # One short word first: two searches, not four, through each of ten thousand files.
    return (b"forge" in data and (MARK_TOKEN in data or b"cudaforge" in data)) or b"get_init_inputs" in data


def _bytes(path: str) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return None


def _alias_use(names: Iterable[str]) -> re.Pattern[bytes]:
    """A decorator, an import or a line of an import list that names one of the aliases."""
    name = rb"(?:" + rb"|".join(re.escape(name.encode()) for name in sorted(names)) + rb")\b"
    return re.compile(
        rb"^[ \t]*@[\w. ]*?\b" + name + rb"|\bimport\b[^\n]*\b" + name + rb"|^[ \t]*" + name + rb"[^\n]{0,60},?[ \t]*$",
        re.MULTILINE,
    )


# -- one file --------------------------------------------------------------------------------------------------


def _scan_file(scan: _Scan, path: str, data: bytes, *, given: bool) -> None:
    shown = _shown_path(Path(path), scan.root)
    try:
        file = scan.tree.parsed(Path(path), data)
    except SourceProblem as problem:
        if given or MARK_TOKEN in data:
            scan.problems.append(Problem(shown, shown, problem.line, problem.text))
        return
    marks = list(_marks(file, MarkResolver(scan.tree)))
    if not marks and _is_kernelbench(file) and (given or _looks_like_kernelbench(file.path)):
        statement = file.bindings["Model"][-1]
        marks.append(_Mark("Model", statement.lineno, "kernelbench"))
    repeated = {mark.qualname for mark in marks if sum(mark.qualname == other.qualname for other in marks) > 1}
    for mark in _once(marks):
        text = mark.text
        if mark.qualname in repeated:
            lines = ", ".join(str(other.line) for other in marks if other.qualname == mark.qualname)
            text = f"{mark.qualname} is marked more than once (lines {lines}); expected: one target of that name"
        if text:
            scan.problems.append(Problem(f"{shown}::{mark.qualname}", shown, mark.line, text))
        else:
            scan.targets.append(_target(scan, file, shown, mark))


def _once(marks: Iterable[_Mark]) -> Iterator[_Mark]:
    seen: set[str] = set()
    for mark in marks:
        if mark.qualname not in seen:
            seen.add(mark.qualname)
            yield mark


def _target(scan: _Scan, file: ParsedFile, shown: str, mark: _Mark) -> Target:
    source = source_closure(scan.tree, file, mark.qualname.partition(".")[0], scan.root)
    label = file.path.stem if mark.kind == "kernelbench" else _given_name(mark.call) or mark.qualname
    return Target(
        id=f"{shown}::{mark.qualname}",
        root=str(scan.root),
        path=shown,
        qualname=mark.qualname,
        kind=mark.kind,
        line=mark.line,
        module_name=file.module_name,
        import_root=str(file.import_root),
        name=snake_case(label),
        source=source,
        digest=hashlib.sha256(source.encode()).hexdigest(),
        guard=literal_flag(scan.tree, file, mark.used, "guard") if mark.used is not None else False,
    )


def _shown_path(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _given_name(call: ast.Call | None) -> str:
    for keyword in call.keywords if call is not None else ():
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            return keyword.value.value
    return ""


# -- KernelBench -----------------------------------------------------------------------------------------------


def _is_kernelbench(file: ParsedFile) -> bool:
    model = file.bindings.get("Model", ())
    return file.bindings.keys() >= KERNELBENCH_NAMES and isinstance(model[-1], ast.ClassDef)


def _looks_like_kernelbench(path: Path) -> bool:
    """Nobody marked such a file, so a scan takes it only where the file or its folder says what it is.

    Either KernelBench's own naming (``36_RMSNorm_.py``), or a folder called so, or one most of whose files have the
    format.
    """
    if re.match(r"\d+_", path.name) or re.match(r"kernel_?bench", path.parent.name, re.IGNORECASE):
        return True
    siblings = [sibling for sibling in path.parent.glob("*.py") if sibling.name != "__init__.py"]
    alike = sum(b"def get_init_inputs" in (_bytes(str(sibling)) or b"") for sibling in siblings)
    return len(siblings) > 1 and 2 * alike > len(siblings)


# -- marks in a file -------------------------------------------------------------------------------------------


def _marks(file: ParsedFile, resolver: MarkResolver) -> Iterator[_Mark]:
    yield from _marks_in(file.tree.body, (), "", file, resolver)
    for statement in file.tree.body:
        yield from _marked_by_call(statement, file, resolver)


def _marks_in(
    body: Sequence[ast.stmt], scope: tuple[str, ...], within: str, file: ParsedFile, resolver: MarkResolver
) -> Iterator[_Mark]:
    """``within`` is "" at module level, else "class" or "function"."""
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = (*scope, statement.name)
            for decorator in statement.decorator_list:
                if resolver.is_mark(file, decorator):
                    yield _judged(statement, decorator, ".".join(inner), within)
            deeper = "class" if isinstance(statement, ast.ClassDef) and within != "function" else "function"
            yield from _marks_in(statement.body, inner, deeper, file, resolver)
        else:
            for block in _blocks(statement):
                yield from _marks_in(block, scope, within, file, resolver)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def _judged(
    statement: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, decorator: ast.expr, qualname: str, within: str
) -> _Mark:
    kind: Kind = "class" if isinstance(statement, ast.ClassDef) else "function"
    call = decorator if isinstance(decorator, ast.Call) else None
    text = _misplaced(statement, qualname, within) or _bad_call(call)
    return _Mark(qualname, statement.lineno, kind, call, text, decorator)


def _misplaced(statement: ast.stmt, qualname: str, within: str) -> str:
    if within == "function":
        return f"{qualname} is defined inside a function; expected: a class or function that can be imported by name"
    if isinstance(statement, ast.AsyncFunctionDef):
        return f"{qualname} is an async function; expected: an nn.Module class or a plain function"
    if within == "class" and isinstance(statement, ast.FunctionDef):
        return f"{qualname} is a method; expected: an nn.Module class or a plain function; to do: mark the class"
    if isinstance(statement, ast.ClassDef) and not _may_be_module(statement):
        return f"{qualname} is not an nn.Module; expected: an nn.Module class or a plain function"
    return ""


def _may_be_module(statement: ast.ClassDef) -> bool:
    if not statement.bases:
        return False
    names = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in statement.bases]
    return not all(name in PLAIN_BASES for name in names)


def _bad_call(call: ast.Call | None) -> str:
    if call is None:
        return ""
    if call.args:
        return "forge_target takes its options by keyword; expected: @forge_target(inputs=lambda: [...])"
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in TargetOptions.__dataclass_fields__:
            return str(unknown_option(keyword.arg))
    return ""


def _marked_by_call(statement: ast.stmt, file: ParsedFile, resolver: MarkResolver) -> Iterator[_Mark]:
    """``RMSNorm = forge_target(inputs=...)(RMSNorm)`` and the like, at the top level of a file."""
    call = getattr(statement, "value", None) if isinstance(statement, (ast.Assign, ast.Expr)) else None
    if not isinstance(call, ast.Call) or len(call.args) != 1 or not resolver.is_mark(file, call.func):
        return
    marked = call.args[0]
    name = marked.id if isinstance(marked, ast.Name) else ""
    definition = next(iter(file.bindings.get(name, ())), None)
    options = call.func if isinstance(call.func, ast.Call) else call
    if isinstance(definition, (ast.ClassDef, ast.FunctionDef)):
        kind: Kind = "class" if isinstance(definition, ast.ClassDef) else "function"
        text = _misplaced(definition, name, "") or (_bad_call(options) if options is not call else "")
        yield _Mark(name, definition.lineno, kind, options, text, options)
        return
    shown = ast.unparse(marked)
    text = f"{shown} is marked but not defined in this file; expected: a class or function defined here"
    yield _Mark(name or f"line{statement.lineno}", statement.lineno, "function", options, text)
