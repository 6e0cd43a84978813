"""A content-addressed build cache that remembers failures as well.

Only the supervisor writes it, so a hit is as good as a build. One file per key, written beside its place and renamed
into it: processes that build the same thing at once agree, and a damaged or foreign file is a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages.binary import (
    MAX_CODE_BYTES,
    MAX_HEADER_BYTES,
    Binary,
    Unit,
    binary_from_bytes,
    binary_to_bytes,
)

_BINARY = b"CFCACHE1B"
_FAILURE = b"CFCACHE1F"
_KIND_BYTES = len(_BINARY)
_DIGEST_BYTES = 32
_MAX_ENTRY_BYTES = MAX_CODE_BYTES + MAX_HEADER_BYTES + 1024


def build_key(source: str, unit: Unit, fingerprint: str, arch: str, *, lineinfo: bool = False) -> str:
    """What a build depends on, as a digest: source, constants, kernels, compiler (``Language.fingerprint``), arch."""
    constants = [[name, type(value).__name__, repr(value)] for name, value in unit.constants]
    parts = [source, constants, list(unit.kernels), fingerprint, arch, lineinfo]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class FileCache:
    """Bytes by key in ``directory``, which is made on the first :meth:`write`. ``kind`` says what they are."""

    def __init__(self, directory: Path, most_bytes: int = _MAX_ENTRY_BYTES) -> None:
        self._directory, self._most_bytes = Path(directory), most_bytes

    def read(self, key: str, kinds: Sequence[bytes]) -> tuple[bytes, bytes] | None:
        """(kind, payload) as it was written under ``key``; None where there is none, or none that is whole."""
        try:
            path = self._path(key)
            if path.stat().st_size > self._most_bytes:
                return None
            data = path.read_bytes()
        except OSError:
            return None
        kind, digest = data[:_KIND_BYTES], data[_KIND_BYTES : _KIND_BYTES + _DIGEST_BYTES]
        payload = data[_KIND_BYTES + _DIGEST_BYTES :]
        return (kind, payload) if kind in kinds and digest == _digest(kind, key, payload) else None

    def write(self, key: str, kind: bytes, payload: bytes) -> None:
        """Store it. A disk that is full or read-only costs the entry and one warning, no more."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(kind + _digest(kind, key, payload) + payload)
                os.replace(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            warnings.warn(f"the build cache {self._directory} cannot be written: {error}", stacklevel=3)

    def _path(self, key: str) -> Path:
        if not (len(key) == 64 and all(char in "0123456789abcdef" for char in key)):
            raise ValueError(f"{key!r} is no key of build_key()")
        return self._directory / key[:2] / key[2:]


class BuildCache:
    """Builds by key in ``directory``, which is made on the first :meth:`put`."""

    def __init__(self, directory: Path) -> None:
        self._files = FileCache(directory)

    def get(self, key: str) -> Binary | BuildFailure | None:
        """What was stored under ``key``, or None. A failure comes back as the exception, not raised."""
        found = self._files.read(key, (_BINARY, _FAILURE))
        try:
            return _decode(*found) if found is not None else None
        except ValueError:
            return None

    def put(self, key: str, value: Binary | BuildFailure) -> None:
        """Store a build or its failure. A disk that is full or read-only costs the entry and one warning, no more."""
        self._files.write(key, *_encode(value))


def _encode(value: Binary | BuildFailure) -> tuple[bytes, bytes]:
    if isinstance(value, Binary):
        return _BINARY, binary_to_bytes(value)
    texts = {"what": value.what, "log": value.log, "expected": value.expected, "remedy": value.remedy}
    return _FAILURE, json.dumps(texts).encode()


def _decode(kind: bytes, payload: bytes) -> Binary | BuildFailure:
    if kind == _BINARY:
        return binary_from_bytes(payload)
    texts = json.loads(payload)
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("the entry holds no failure")
    return BuildFailure(
        texts.get("what", ""),
        log=texts.get("log", ""),
        expected=texts.get("expected", ""),
        remedy=texts.get("remedy", ""),
    )


def _digest(kind: bytes, key: str, payload: bytes) -> bytes:
    """Over the key too: an entry copied to another key's place is a miss."""
    return hashlib.sha256(kind + key.encode() + payload).digest()
