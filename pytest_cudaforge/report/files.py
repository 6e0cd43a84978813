"""Reports on disk: whole or not there at all, and a clear word where one cannot be written."""

from __future__ import annotations

from pathlib import Path

from pytest_cudaforge import durable
from pytest_cudaforge.errors import UsageError

__all__ = ["write"]


def write(path: Path, text: str, option: str) -> None:
    """Write atomically, with the folders that are missing. Raises :class:`UsageError` that names the ``option``.

    An unpaired surrogate that a tool's output held stays what it is, as an escape.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_file(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UsageError(
            f"{option}: {path} cannot be written: {error.strerror or error}", remedy="give another file"
        ) from error
