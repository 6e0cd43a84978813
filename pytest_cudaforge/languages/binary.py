"""What a compiler leaves behind: :class:`Binary`, its kernels, and their bytes on disk or on a pipe.

Standard library only. ``binary_from_bytes`` reads what an untrusted builder or a damaged cache wrote, so every field
is checked and sizes are capped; no pickle.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from pytest_cudaforge.plan import Constants, Launch, TracedPlan
from pytest_cudaforge.records import KernelResources, from_json, to_json

MAX_KERNELS = 4096
MAX_PARAMS = 1024
MAX_TEXT_CHARS = 4096
MAX_LOG_CHARS = 200_000
MAX_CODE_BYTES = 256 * 1024 * 1024
MAX_HEADER_BYTES = 16 * 1024 * 1024

_MAGIC = b"CFBIN\x00\x00\x01"
_PREFIX = struct.Struct("<8sIQ")


@dataclass(frozen=True)
class Unit:
    """One compilation: a set of ``constants`` (``-D`` macros) and the kernel expressions launched with it."""

    constants: Constants
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of a binary: the plan's C++ ``expression``, the ``symbol`` to load, and its parameters' exact types.

    ``params`` are canonical type names, no top-level const: ``"const float*"``, ``"long long"``, ``"__half*"``.
    """

    expression: str
    symbol: str
    params: tuple[str, ...]
    resources: KernelResources


@dataclass(frozen=True)
class Binary:
    """A compiled unit: ``code`` is a shared object (cpp) or a cubin (cuda); ``log`` holds warnings about the source."""

    language: str
    arch: str
    constants: Constants
    code: bytes
    kernels: tuple[KernelInfo, ...]
    log: str = ""

    def kernel(self, expression: str) -> KernelInfo | None:
        """The kernel named by ``expression``, or None where this binary has no such kernel."""
        for kernel in self.kernels:
            if kernel.expression == expression:
                return kernel
        return None


def launches_of(traced: TracedPlan) -> tuple[Launch, ...]:
    """Every launch of the main plan, then of ``prepare``."""
    return traced.main.launches + (traced.prepare.launches if traced.prepare else ())


def units_of(traced: TracedPlan) -> tuple[Unit, ...]:
    """The distinct compilations a traced plan needs, in order of first use; kernels in order of first launch."""
    kernels: dict[Constants, dict[str, None]] = {}
    for launch in launches_of(traced):
        kernels.setdefault(launch.constants, {})[launch.kernel] = None
    return tuple(Unit(constants, tuple(names)) for constants, names in kernels.items())


def binary_to_bytes(binary: Binary) -> bytes:
    """A fixed prefix (magic, header length, code length), a JSON header and the code."""
    header = {
        "language": binary.language,
        "arch": binary.arch,
        "constants": [list(pair) for pair in binary.constants],
        "kernels": [to_json(kernel) for kernel in binary.kernels],
        "log": binary.log[:MAX_LOG_CHARS],
    }
    head = json.dumps(header).encode()
    return _PREFIX.pack(_MAGIC, len(head), len(binary.code)) + head + binary.code


def binary_from_bytes(data: bytes) -> Binary:
    """The inverse of :func:`binary_to_bytes`. Raises ``ValueError`` for anything that is not exactly such bytes."""
    if len(data) < _PREFIX.size:
        raise ValueError("a binary is too short to hold its header")
    magic, head_bytes, code_bytes = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("a binary does not begin with the expected format number")
    if head_bytes > MAX_HEADER_BYTES or code_bytes > MAX_CODE_BYTES:
        raise ValueError(f"a binary of {code_bytes} bytes with a header of {head_bytes} bytes is over the limit")
    if len(data) != _PREFIX.size + head_bytes + code_bytes:
        raise ValueError("a binary's length differs from what its header says")
    try:
        header = json.loads(data[_PREFIX.size : _PREFIX.size + head_bytes])
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"a binary's header is not JSON: {error}") from None
    return _binary_from_header(header, bytes(data[_PREFIX.size + head_bytes :]))


def _binary_from_header(header: Any, code: bytes) -> Binary:
    if not isinstance(header, dict) or set(header) != {"language", "arch", "constants", "kernels", "log"}:
        raise ValueError("a binary's header has the wrong fields")
    kernels = header["kernels"]
    if not isinstance(kernels, list) or len(kernels) > MAX_KERNELS:
        raise ValueError("a binary's header lists no kernels or too many")
    language, arch, log = (_text(header[name], MAX_LOG_CHARS) for name in ("language", "arch", "log"))
    return Binary(
        language=language,
        arch=arch,
        constants=constants_from_json(header["constants"]),
        code=code,
        kernels=tuple(_kernel_from_json(kernel) for kernel in kernels),
        log=log,
    )


def _kernel_from_json(data: Any) -> KernelInfo:
    kernel: KernelInfo = from_json(KernelInfo, data)
    if len(kernel.params) > MAX_PARAMS:
        raise ValueError(f"a kernel with {len(kernel.params)} parameters is over the limit of {MAX_PARAMS}")
    for text in (kernel.expression, kernel.symbol, *kernel.params):
        _text(text, MAX_TEXT_CHARS)
    return kernel


def constants_from_json(data: Any) -> Constants:
    """``[[name, number], ...]`` as the tuple form. Raises ``ValueError`` otherwise."""
    if not isinstance(data, list) or len(data) > MAX_PARAMS:
        raise ValueError("constants must be a list of [name, number]")
    pairs: list[tuple[str, int | float]] = []
    for pair in data:
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f"a constant must be [name, number], got {pair!r}")
        if isinstance(pair[1], bool) or not isinstance(pair[1], (int, float)):
            raise ValueError(f"constant {pair[0]} must be a number, got {pair[1]!r}")
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def _text(value: Any, limit_chars: int) -> str:
    if not isinstance(value, str) or len(value) > limit_chars:
        raise ValueError(f"a binary's header has a text that is missing or longer than {limit_chars} characters")
    return value
