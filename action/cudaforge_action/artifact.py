"""A folder that another machine filled: listed and read with limits, and nothing in it is followed or believed.

What is asked for is a name below the folder; what comes back are bytes, or JSON of plain values. Whatever a machine of
ours would not have written there (a link, a device, a name that leads elsewhere, too much of anything) is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pytest_cudaforge.errors import UsageError

__all__ = [
    "ArtifactError",
    "cleared",
    "digest_of",
    "files_below",
    "read_bytes",
    "read_json",
    "read_text",
    "refuse",
    "refuse_links",
]

#: One part of a path: no dot in front, so neither ``..`` nor a file that ``ls`` hides; nothing a shell would read.
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_MOST_FILES, _DEEPEST = 5_000, 6
_DO = "look at the job that uploaded it; nothing of it was used"


class ArtifactError(UsageError):
    """What lies in a folder is not what a job of ours leaves there."""


def refuse(place: Path | str, why: str, expected: str = "") -> ArtifactError:
    """The error, with every name cut and made visible: the folder's author chose them."""
    shown = "".join(letter if letter.isprintable() else "�" for letter in str(place)[-300:])
    return ArtifactError(f"{shown}: {why[:600]}", expected=expected, remedy=_DO)


def refuse_links(folder: Path) -> None:
    """Raises :class:`UsageError` where ``folder``, or one above it, is a link: what is checked out must not lead
    elsewhere. What lies above an absolute path's checkout is the machine's own affair."""
    for part in (folder, *folder.parents):
        if part.is_symlink() and not part.is_absolute():
            raise UsageError(f"{part} is a link", expected="a folder of the checkout", remedy="change output-dir")


def cleared(folder: Path) -> None:
    """Remove ``folder``: what was checked in, or what an earlier run left there, is no result of this one.

    Raises :class:`UsageError` where a part of it is a link or it cannot be removed.
    """
    refuse_links(folder)
    try:
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be used: {error.strerror}", remedy="change output-dir") from None


def files_below(folder: Path) -> Mapping[str, int]:
    """Every file below ``folder`` by its posix path from there, with its size in bytes; in order.

    Raises :class:`ArtifactError` for links, devices, names of other than ``[A-Za-z0-9._+-]``, more than 5 000 files or
    folders, and folders more than six deep.
    """
    if folder.is_symlink() or not folder.is_dir():
        raise refuse(folder, "is no folder", "the folder of an artifact")
    found: dict[str, int] = {}
    for count, (name, size) in enumerate(_walk(folder, "", 1)):
        if count >= _MOST_FILES:
            raise refuse(folder, f"holds more than {_MOST_FILES} files")
        if size is not None:
            found[name] = size
    return dict(sorted(found.items()))


def _walk(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, int | None]]:
    if depth > _DEEPEST:
        raise refuse(folder, f"lies more than {_DEEPEST} folders deep")
    with os.scandir(folder) as listed:
        for entry in listed:
            name = prefix + entry.name
            if not _PART.fullmatch(entry.name):
                raise refuse(folder / entry.name, "has a name that no job of ours gives")
            mode = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(mode.st_mode):
                yield name, None
                yield from _walk(folder / entry.name, name + "/", depth + 1)
            elif stat.S_ISREG(mode.st_mode):
                yield name, mode.st_size
            else:
                raise refuse(folder / entry.name, "is a link or a device", "plain files and folders")


def digest_of(folder: Path, names: Iterable[str] | None = None) -> str:
    """SHA-256 of the files below ``folder``, of their names and what is in them; of ``names`` alone where given.

    A job says it of what it leaves, as an output of its own: whoever reads the folder can tell whether it is that.
    Raises :class:`ArtifactError`, as :func:`files_below` does.
    """
    found = hashlib.sha256()
    for name in sorted(files_below(folder) if names is None else names):
        with _opened(folder / name) as stream:
            inside = hashlib.sha256()
            while data := stream.read(1 << 20):
                inside.update(data)
        # No name of a file holds an end of a line.
        found.update(f"{inside.hexdigest()} {name}\n".encode())
    return found.hexdigest()


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The file's bytes. Raises :class:`ArtifactError` for what is no plain file, or larger than ``most_bytes``."""
    with _opened(path) as stream:
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise refuse(path, f"is larger than {most_bytes} bytes")
    return data


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise refuse(path, f"cannot be read: {error.strerror}", "a plain file") from None
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise refuse(path, "is no plain file")
        yield stream


def read_text(path: Path, most_bytes: int) -> str:
    """The file's text, which must be UTF-8 without NUL. Raises :class:`ArtifactError`."""
    try:
        text = read_bytes(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise refuse(path, "is not UTF-8 text") from None
    if "\0" in text:
        raise refuse(path, "holds a NUL")
    return text


def read_json(path: Path, most_bytes: int) -> Any:
    """JSON whose numbers are finite, whose keys are unique and whose texts are whole characters.

    Raises :class:`ArtifactError`.
    """
    text = read_text(path, most_bytes)
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        # Half a character, and a number so large that it became infinite, show only when they are written.
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError, OverflowError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise refuse(path, f"cannot be read: {why}", "JSON as a job of ours writes it") from None
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")
