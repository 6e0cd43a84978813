"""``forged/manifest.json``: which kernels there are, for which target, where they may be used.

Production reads it (``apply``), pytest collects it, publishing writes it. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaforge import durable
from pytest_cudaforge.errors import ConfigError, PublishError
from pytest_cudaforge.facts import Guard, from_json, to_json
from pytest_cudaforge.plan import TensorSpec

__all__ = ["FORMAT", "Entry", "EntryFile", "EntryWorkload", "Manifest", "merge"]

#: Raised when a field changes its meaning; a newer file is refused, not guessed at.
FORMAT = 1


@dataclass(frozen=True)
class EntryFile:
    """One source file of a kernel: its name in the entry's directory and the sha256 of its bytes, in hex."""

    name: str
    sha256: str


@dataclass(frozen=True)
class EntryWorkload:
    """One drawn input set the kernel was verified on. ``inputs``: flattened path -> spec or plain value.

    ``speedup_...`` is what was measured, ``least_...`` the low end of its 99 % interval: what is promised.
    """

    name: str
    inputs: tuple[tuple[str, TensorSpec | int | float | bool | str | None], ...]
    speedup_eager: float | None = None
    speedup_compile: float | None = None
    least_eager: float | None = None
    least_compile: float | None = None

    @property
    def promised(self) -> tuple[float | None, float | None]:
        """The speedups over eager and torch.compile that the kernel is held to; None where there is none."""
        eager = self.speedup_eager if self.least_eager is None else self.least_eager
        return eager, self.speedup_compile if self.least_compile is None else self.least_compile


@dataclass(frozen=True)
class Entry:
    """One forged kernel. ``directory`` is relative to the manifest's folder; ``path`` to the root of the repo.

    ``torch`` and ``device`` name what it was measured with; ``module`` is the ModuleSpec (runtime.signature) or None.
    """

    target: str
    import_name: str
    qualname: str
    kind: str
    path: str
    source_digest: str
    language: str
    arch: str
    directory: str
    files: tuple[EntryFile, ...]
    guard: Guard
    workloads: tuple[EntryWorkload, ...]
    torch: str
    device: str
    precision: str
    mode: str
    work: str = "kernel"
    isolation: str = ""
    prepared: bool = False
    #: Whether its gradients were verified; None where the target asked for none.
    backward: bool | None = None
    #: "" where it was forged for all workloads of its target, else what tells it from the target's other kernels.
    variant: str = ""
    #: Path and value, as a ModuleSpec has them, of attributes that forward reads and the plan does not: built in.
    attributes: tuple[tuple[str, Any], ...] = ()
    #: Path and fingerprint (runtime.fingerprints) of buffers of which the same is true.
    buffers: tuple[tuple[str, tuple[str, str, tuple[float, ...]]], ...] = ()
    #: What the outputs lie in where that is no plain container (runtime.containers).
    containers: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What makes an entry unique: a target has one kernel per language, arch and choice of workloads."""
        return (self.target, self.language, self.arch, self.variant)

    def sources(self, manifest_path: Path) -> dict[str, str]:
        """File name -> text, each checked against its digest. Raises :class:`ConfigError` naming the file."""
        folder = manifest_path.parent / self.directory
        return {entry.name: _checked_text(folder / entry.name, entry.sha256) for entry in self.files}


@dataclass(frozen=True)
class Manifest:
    """All entries of one forge directory, sorted by key."""

    entries: tuple[Entry, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Manifest:
        """Read and validate. Raises :class:`ConfigError` where the file is missing, malformed or too new."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read: {error.strerror}", remedy="forge first: pytest --forge"
            ) from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "manifest.json") -> Manifest:
        """The manifest in ``text``; ``name`` is used in messages. Raises :class:`ConfigError`."""
        remedy = "restore it from git, or forge again with pytest --forge"
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{name}:{error.lineno}: not JSON: {error.msg}", remedy=remedy) from error
        if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
            raise ConfigError(f"{name}: not a manifest", expected='{"format": 1, "entries": [...]}', remedy=remedy)
        if data.get("format") != FORMAT:
            raise ConfigError(
                f"{name}: format {data.get('format')!r}",
                expected=f"format {FORMAT}",
                remedy="use the version of pytest-cudaforge that wrote it, or forge again",
            )
        return cls(tuple(_entry(item, index, name) for index, item in enumerate(data["entries"])))

    def merged(self, entries: Iterable[Entry]) -> Manifest:
        """With ``entries`` added; one of the same key is replaced."""
        table = {entry.key: entry for entry in self.entries}
        table.update((entry.key, entry) for entry in entries)
        return Manifest(tuple(table[key] for key in sorted(table)))

    def find(self, target: str, *, language: str | None = None, arch: str | None = None) -> tuple[Entry, ...]:
        """The entries of a target, narrowed by language and arch where given."""
        return tuple(
            entry
            for entry in self.entries
            if entry.target == target and language in (None, entry.language) and arch in (None, entry.arch)
        )

    def render(self) -> str:
        """The file's text: sorted and indented, so that a diff shows what changed."""
        data = {"format": FORMAT, "entries": [_entry_json(entry) for entry in self.entries]}
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write atomically. Raises :class:`PublishError`. Use :func:`merge` where others may write as well."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_file(path, self.render())
        except OSError as error:
            raise _unwritable(path, error) from error


def merge(path: Path, entries: Iterable[Entry]) -> Manifest:
    """Merge ``entries`` into the file at ``path`` under a lock on its folder. Raises ConfigError, PublishError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable.locked_directory(path.parent):
            manifest = (Manifest.load(path) if path.exists() else Manifest()).merged(entries)
            durable.write_file(path, manifest.render())
    except OSError as error:
        raise _unwritable(path, error) from error
    return manifest


def _unwritable(path: Path, error: OSError) -> PublishError:
    return PublishError(
        f"{path}: cannot be written: {error.strerror or error}",
        expected="a writable folder with space left",
        remedy="set forge_dir to a folder that can be written",
    )


def _entry_json(entry: Entry) -> dict[str, Any]:
    """The record without what only targets with gradients have, or with several kernels, and what nobody measured."""
    data: dict[str, Any] = to_json(entry)
    for workload in data["workloads"]:
        for name in ("least_eager", "least_compile"):
            if workload[name] is None:
                del workload[name]
    if entry.backward is None:
        del data["backward"]
    if not entry.variant:
        del data["variant"]
    return data


def _entry(data: Any, index: int, name: str) -> Entry:
    try:
        entry = from_json(Entry, data)
    except ValueError as error:
        raise ConfigError(f"{name}: entry {index}: {error}", remedy="restore it from git, or forge again") from error
    for part in (entry.directory, *(file.name for file in entry.files)):
        _refuse_escape(part, index, name)
    return entry  # type: ignore[no-any-return]


def _refuse_escape(part: str, index: int, name: str) -> None:
    path = Path(part)
    if path.is_absolute() or ".." in path.parts or not part:
        raise ConfigError(f"{name}: entry {index}: path {part!r} leaves the folder", expected="a path inside it")


def _checked_text(path: Path, sha256: str) -> str:
    import hashlib

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}", remedy="restore it from git") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(
            f"{path}: differs from what was verified",
            expected=f"sha256 {sha256}",
            remedy="restore it from git, or forge again; an edited kernel has no verdict",
        )
    return data.decode()
