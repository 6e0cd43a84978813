"""Which manifest and which entries belong to a class or function of a running program."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.runtime.manifest import Entry, Manifest

__all__ = ["Located", "entries_for", "find_manifest", "named_manifest", "staleness"]

FOLDER = "forged"
FILE = "manifest.json"


@dataclass(frozen=True)
class Located:
    """A manifest with the file it was read from."""

    path: Path
    manifest: Manifest


def named_manifest(path: str | Path) -> Located:
    """The manifest at ``path``, a file or the folder that holds it. Raises ConfigError."""
    file = Path(path)
    if file.is_dir():
        file = file / FILE
    return Located(file.resolve(), Manifest.load(file))


def find_manifest(target: Any) -> Located | None:
    """``forged/manifest.json`` in a folder of the target's own file upwards, else of the working directory upwards.

    So a package finds the kernels it ships with, wherever the program was started. Raises ConfigError for a file
    that is there and cannot be read.
    """
    for folder in _folders(target):
        file = folder / FOLDER / FILE
        if file.is_file():
            return Located(file, Manifest.load(file))
    return None


def _folders(target: Any) -> Iterator[Path]:
    source = _source_file(target)
    if source is not None:
        # Up to the folder that is on sys.path: beyond it lies somebody else's project.
        depth = target.__module__.count(".") + 1 if target.__module__ != "__main__" else 1
        yield from list(source.parents)[: depth + 1]
    yield from _up_to_the_repository(Path.cwd())


def _up_to_the_repository(start: Path) -> Iterator[Path]:
    for folder in (start, *start.parents):
        yield folder
        if (folder / ".git").exists() or (folder / "pyproject.toml").exists():
            return


def _source_file(target: Any) -> Path | None:
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    return Path(file).resolve() if file else None


def entries_for(target: Any, located: Located) -> tuple[Entry, ...]:
    """The entries of this class or function: same qualified name, and same import name or file."""
    source = _source_file(target)
    return tuple(
        entry
        for entry in located.manifest.entries
        if entry.qualname == target.__qualname__
        and (entry.import_name == target.__module__ or (source is not None and _ends_with(source, entry.path)))
    )


def _ends_with(file: Path, path: str) -> bool:
    tail = PurePosixPath(path).parts
    return file.parts[-len(tail) :] == tail


def staleness(target: Any, entry: Entry) -> str:
    """Why the entry was forged for another text of this reference; "" where it is the same or cannot be told.

    The digest covers the target and what it needs from local files, as the scan computes it; a program without its
    sources (a frozen or zipped one) is taken at the manifest's word.
    """
    from pytest_cudaforge.closure import source_closure
    from pytest_cudaforge.sources import SourceProblem, SourceTree

    source = _source_file(target)
    if source is None or not source.is_file() or not _ends_with(source, entry.path):
        return ""
    root = source.parents[len(PurePosixPath(entry.path).parts) - 1]
    tree = SourceTree()
    try:
        text = source_closure(tree, tree.parsed(source), entry.qualname.partition(".")[0], root)
    except (SourceProblem, OSError):
        return ""
    if hashlib.sha256(text.encode()).hexdigest() == entry.source_digest:
        return ""
    return "the reference changed since this kernel was forged; forge again"


def verified_sources(entry: Entry, located: Located) -> dict[str, str]:
    """The entry's files, each checked against its digest. Raises ConfigError naming the file that differs."""
    try:
        return entry.sources(located.path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{located.path.parent / entry.directory}: not UTF-8: {error}") from None
