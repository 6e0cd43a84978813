"""Kernels ready to load: what tracing and compiling gave for a signature, kept on disk for the next process.

A first call that finds its entry here starts no compiler, loads no NVRTC and interprets nothing. The key covers all
that the result depends on: the kernel's files, the signature, this package, the toolchain (by its stamp) and torch.
The entry itself is whole or a miss, and what it holds is checked as a build's is when it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from pytest_cudaforge.errors import PlanError
from pytest_cudaforge.languages.binary import Binary, binary_from_bytes, binary_to_bytes
from pytest_cudaforge.languages.cache import FileCache
from pytest_cudaforge.languages.stamps import files_stamp, toolchain_stamp
from pytest_cudaforge.plan import TracedPlan, decode, encode
from pytest_cudaforge.runtime.manifest import Entry
from pytest_cudaforge.runtime.signature import Signature

__all__ = ["ReadyCache", "ready_key"]

_KIND = b"CFCACHE1P"
_MOST_BYTES = 1 << 29
_LENGTHS = struct.Struct("<Q")


def ready_key(entry: Entry, signature: Signature, function: str) -> str | None:
    """The key of an entry's plan and binaries for a signature; None where the toolchain cannot be told."""
    stamp, package = _stamps(entry.language)
    if stamp is None or package is None:
        return None
    files = [[file.name, file.sha256] for file in entry.files]
    versions = [torch.__version__, torch.version.cuda, package, stamp]
    parts = [entry.language, entry.arch, files, function, signature.key(), versions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def _stamps(language: str) -> tuple[str | None, str | None]:
    """The toolchain's stamp, and this package's: an upgrade may trace or compile in another way."""
    package = Path(__file__).parent.parent
    try:
        folders = [_folder_stamp(package / name) for name in ("runtime", "languages")]
    except OSError:  # inside a zip file
        return None, None
    return toolchain_stamp(language), "\n".join((*folders, files_stamp([package / "plan.py", package / "facts.py"])))


def _folder_stamp(folder: Path) -> str:
    # As files_stamp, but in one go: sixty paths one by one are a tenth of a first call.
    with os.scandir(folder) as entries:
        facts = {entry.name: entry.stat() for entry in entries if entry.name.endswith(".py")}
    return "\n".join(f"{name} {facts[name].st_size} {facts[name].st_mtime_ns}" for name in sorted(facts))


class ReadyCache:
    """Traced plans with their binaries, by :func:`ready_key`."""

    def __init__(self, directory: Path) -> None:
        self._files = FileCache(directory, _MOST_BYTES)

    def get(self, key: str) -> tuple[TracedPlan, tuple[Binary, ...]] | None:
        """What :meth:`put` stored, or None."""
        found = self._files.read(key, (_KIND,))
        try:
            return _decode(found[1]) if found is not None else None
        except (ValueError, PlanError, struct.error, KeyError, TypeError):
            return None

    def put(self, key: str, traced: TracedPlan, binaries: Sequence[Binary]) -> None:
        """Store a kernel that was loaded; a disk that is full or read-only costs one warning."""
        parts = [json.dumps(encode(traced), allow_nan=False).encode(), *map(binary_to_bytes, binaries)]
        self._files.write(key, _KIND, b"".join(_LENGTHS.pack(len(part)) + part for part in parts))


def _decode(payload: bytes) -> tuple[TracedPlan, tuple[Binary, ...]]:
    parts = []
    while payload:
        (length,) = _LENGTHS.unpack_from(payload)
        parts.append(payload[_LENGTHS.size : _LENGTHS.size + length])
        payload = payload[_LENGTHS.size + length :]
    if not parts:
        raise ValueError("no plan")
    return decode(json.loads(parts[0])), tuple(map(binary_from_bytes, parts[1:]))
