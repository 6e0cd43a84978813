"""Writes that are either wholly there after a crash or not there at all. Standard library only.

They raise plain ``OSError``: each room says in its own words what could not be written.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["flush_directory", "locked_directory", "write_file"]


def write_file(path: Path, data: str | bytes) -> None:
    """Write ``path`` by temporary file, fsync, rename and fsync of the directory. Raises ``OSError``."""
    payload = data.encode() if isinstance(data, str) else data
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(payload)
            stream.flush()
            # mkstemp makes 0600; these files are meant to be read by the user's colleagues as well.
            os.fchmod(stream.fileno(), 0o666 & ~_umask())
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Make a rename inside ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``directory`` itself: no lock file is left in a folder that people commit."""
    import fcntl

    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _umask() -> int:
    # The only way to read it is to set it; /proc is read first since other threads may be creating files.
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except OSError:
        pass
    return 0o022
