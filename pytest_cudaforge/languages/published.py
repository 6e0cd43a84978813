"""Compiled kernels beside their source, for a production that must not compile: Triton's, whose kernel.py is Python.

``binaries.json`` holds what the verdict was made with. The manifest has its digest, and what it says is checked as an
untrusted builder's answer is: it describes device code, and is launched by the replay alone. Standard library only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.languages.binary import Binary, Unit, binary_from_bytes, binary_to_bytes

__all__ = ["FILE_NAME", "PUBLISHED_LANGUAGES", "binary_digest", "decode_binaries", "encode_binaries", "find_binary"]

FILE_NAME = "binaries.json"
#: Languages whose source production does not compile.
PUBLISHED_LANGUAGES = ("triton",)
_FORMAT = 1
_LINE_CHARS = 100


def binary_digest(binary: Binary) -> str:
    """sha256 of a binary's bytes, in hex."""
    return hashlib.sha256(binary_to_bytes(binary)).hexdigest()


def encode_binaries(binaries: Sequence[Binary]) -> str:
    """The file's text. What a reader can understand of a binary stands before its bytes."""
    entries = []
    for binary in sorted(binaries, key=lambda one: (one.constants, [kernel.expression for kernel in one.kernels])):
        text = base64.b64encode(binary_to_bytes(binary)).decode("ascii")
        entries.append(
            {
                "arch": binary.arch,
                "constants": dict(binary.constants),
                "kernels": [kernel.expression for kernel in binary.kernels],
                "data": [text[start : start + _LINE_CHARS] for start in range(0, len(text), _LINE_CHARS)],
            }
        )
    return json.dumps({"format": _FORMAT, "binaries": entries}, indent=1, allow_nan=False) + "\n"


def decode_binaries(text: str) -> tuple[Binary, ...]:
    """The inverse of :func:`encode_binaries`; only ``data`` counts. Raises ConfigError for anything else."""
    remedy = "restore it from git, or forge again with pytest --forge"
    try:
        data = json.loads(text)
        if data["format"] != _FORMAT:
            raise ConfigError(f"{FILE_NAME}: format {data['format']!r}", expected=f"{_FORMAT}", remedy=remedy)
        lines = [entry["data"] for entry in data["binaries"]]
        return tuple(binary_from_bytes(base64.b64decode("".join(line), validate=True)) for line in lines)
    except (ValueError, KeyError, TypeError, binascii.Error, RecursionError) as error:
        raise ConfigError(f"{FILE_NAME} cannot be read: {error}", expected="compiled kernels", remedy=remedy) from None


def find_binary(binaries: Sequence[Binary], unit: Unit, arch: str) -> Binary | None:
    """One that holds all of a unit's kernels, compiled with its constants for ``arch``; None where there is none."""
    for binary in binaries:
        if (binary.arch, binary.constants) == (arch, unit.constants) and all(map(binary.kernel, unit.kernels)):
            return binary
    return None
