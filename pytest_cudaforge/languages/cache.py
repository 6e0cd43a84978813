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
_DIGEST_BYTES = 32
_MAX_ENTRY_BYTES = MAX_CODE_BYTES + MAX_HEADER_BYTES + 1024


def build_key(source: str, unit: Unit, fingerprint: str, arch: str, *, lineinfo: bool = False) -> str:
    """What a build depends on, as a digest: source, constants, kernels, compiler (``Language.fingerprint``), arch."""
    constants = [[name, type(value).__name__, repr(value)] for name, value in unit.constants]
    parts = [source, constants, list(unit.kernels), fingerprint, arch, lineinfo]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class BuildCache:
    """Builds by key in ``directory``, which is made on the first :meth:`put`."""

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)

    def get(self, key: str) -> Binary | BuildFailure | None:
        """What was stored under ``key``, or None. A failure comes back as the exception, not raised."""
        try:
            path = self._path(key)
            if path.stat().st_size > _MAX_ENTRY_BYTES:
                return None
            data = path.read_bytes()
        except OSError:
            return None
        try:
            return _decode(data, key)
        except ValueError:
            return None

    def put(self, key: str, value: Binary | BuildFailure) -> None:
        """Store a build or its failure. A disk that is full or read-only costs the entry and one warning, no more."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_encode(value, key))
                os.replace(temporary, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            warnings.warn(f"the build cache {self._directory} cannot be written: {error}", stacklevel=2)

    def _path(self, key: str) -> Path:
        if not (len(key) == 64 and all(char in "0123456789abcdef" for char in key)):
            raise ValueError(f"{key!r} is no key of build_key()")
        return self._directory / key[:2] / key[2:]


def _encode(value: Binary | BuildFailure, key: str) -> bytes:
    if isinstance(value, Binary):
        kind, payload = _BINARY, binary_to_bytes(value)
    else:
        texts = {"what": value.what, "log": value.log, "expected": value.expected, "remedy": value.remedy}
        kind, payload = _FAILURE, json.dumps(texts).encode()
    return kind + _digest(kind, key, payload) + payload


def _decode(data: bytes, key: str) -> Binary | BuildFailure:
    kind, digest = data[: len(_BINARY)], data[len(_BINARY) : len(_BINARY) + _DIGEST_BYTES]
    payload = data[len(_BINARY) + _DIGEST_BYTES :]
    if kind not in (_BINARY, _FAILURE) or digest != _digest(kind, key, payload):
        raise ValueError("the entry is damaged")
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
