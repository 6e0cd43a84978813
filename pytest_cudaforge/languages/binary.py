"""What a compiler leaves behind: :class:`Binary`, its kernels, and their bytes on disk or on a pipe.

Standard library only. ``binary_from_bytes`` reads what an untrusted builder or a damaged cache wrote, so every field
is checked and sizes are capped; no pickle.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_cudaforge.facts import KernelResources, from_json, to_json
from pytest_cudaforge.plan import Constants, Launch, LaunchPlan, TracedPlan

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


#: The type of a parameter that became part of the code (Triton: 1 and None): its argument is not passed.
FOLDED = "constexpr"


@dataclass(frozen=True)
class CompiledLaunch:
    """What the compiler, not the plan, decides about a kernel's launches (Triton).

    ``threads`` of a block, ``shared_bytes`` of dynamic shared memory, ``cluster_blocks`` for each block of the plan's
    grid, ``scratch_pointers`` after the arguments, which stay null. The kernel's own cubin is ``code_bytes`` of the
    binary's code from ``code_start``.
    """

    threads: int
    shared_bytes: int
    cluster_blocks: int
    scratch_pointers: int
    code_start: int
    code_bytes: int


@dataclass(frozen=True)
class KernelInfo:
    """One kernel of a binary: the plan's ``expression``, the ``symbol`` to load, and its parameters' exact types.

    ``params`` are canonical type names, no top-level const: ``"const float*"``, ``"long long"``, ``"__half*"``; or
    :data:`FOLDED`.
    """

    expression: str
    symbol: str
    params: tuple[str, ...]
    resources: KernelResources
    compiled: CompiledLaunch | None = None


@dataclass(frozen=True)
class Binary:
    """A compiled unit: ``code`` is a shared object (cpp), a cubin (cuda) or one cubin after the other (triton).

    ``log`` holds warnings about the source; ``asks`` the instructions by which a shared object asks the machine itself
    (see :mod:`.instructions`).
    """

    language: str
    arch: str
    constants: Constants
    code: bytes
    kernels: tuple[KernelInfo, ...]
    log: str = ""
    asks: tuple[str, ...] = ()

    def kernel(self, expression: str) -> KernelInfo | None:
        """The kernel named by ``expression``, or None where this binary has no such kernel."""
        for kernel in self.kernels:
            if kernel.expression == expression:
                return kernel
        return None


def launches_of(traced: TracedPlan) -> tuple[Launch, ...]:
    """Every launch of the main plan, then of ``prepare``."""
    return traced.main.launches + (traced.prepare.launches if traced.prepare else ())


def passed(kernel: KernelInfo) -> tuple[str, ...]:
    """The types of everything a launch of this kernel passes."""
    hidden = kernel.compiled.scratch_pointers if kernel.compiled else 0
    return (*(param for param in kernel.params if param != FOLDED), *["void*"] * hidden)


def settled(launch: Launch, kernel: KernelInfo) -> tuple[Launch, tuple[str, ...]]:
    """The launch as the device gets it, and the types of its arguments, once the kernel is known.

    For a kernel that is launched as the plan says (cuda, cpp) they are the plan's own.
    """
    compiled = kernel.compiled
    if compiled is None:
        return launch, kernel.params
    pairs = zip(launch.args, kernel.params, strict=True)
    kept = [argument for argument, param in pairs if param != FOLDED]
    x, y, z = launch.grid
    blocks = compiled.cluster_blocks
    changed = replace(
        launch,
        args=(*kept, *[None] * compiled.scratch_pointers),
        grid=(x * blocks, y, z),
        block=(compiled.threads, 1, 1),
        shared_bytes=compiled.shared_bytes,
        cluster=(blocks, 1, 1) if blocks > 1 else None,
    )
    return changed, passed(kernel)


def block_sizes(plan: LaunchPlan, binaries: Sequence[Binary]) -> frozenset[int]:
    """The threads of a block, for every size that the plan launches (GPUs)."""
    sizes = set()
    for launch in plan.launches:
        for binary in binaries:
            kernel = binary.kernel(launch.kernel) if binary.constants == launch.constants else None
            if kernel is not None:
                sizes.add(math.prod(settled(launch, kernel)[0].block))
    return frozenset(sizes)


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
        "asks": list(binary.asks),
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
    fields = {"language", "arch", "constants", "kernels", "log"}
    if not isinstance(header, dict) or set(header) - {"asks"} != fields:
        raise ValueError("a binary's header has the wrong fields")
    kernels = header["kernels"]
    if not isinstance(kernels, list) or len(kernels) > MAX_KERNELS:
        raise ValueError("a binary's header lists no kernels or too many")
    language, arch, log = (_text(header[name], MAX_LOG_CHARS) for name in ("language", "arch", "log"))
    asks = header.get("asks", [])
    if not isinstance(asks, list) or len(asks) > MAX_KERNELS:
        raise ValueError("a binary's header lists too many instructions")
    return Binary(
        language=language,
        arch=arch,
        constants=constants_from_json(header["constants"]),
        code=code,
        kernels=tuple(_kernel_from_json(kernel, len(code)) for kernel in kernels),
        log=log,
        asks=tuple(_text(name, MAX_TEXT_CHARS) for name in asks),
    )


def _kernel_from_json(data: Any, code_bytes: int) -> KernelInfo:
    kernel: KernelInfo = from_json(KernelInfo, data)
    if len(kernel.params) > MAX_PARAMS:
        raise ValueError(f"a kernel with {len(kernel.params)} parameters is over the limit of {MAX_PARAMS}")
    for text in (kernel.expression, kernel.symbol, *kernel.params):
        _text(text, MAX_TEXT_CHARS)
    if kernel.compiled is not None:
        _check_compiled(kernel.compiled, code_bytes)
    return kernel


def _check_compiled(compiled: CompiledLaunch, code_bytes: int) -> None:
    """Small numbers only, and a part of the code; whether a device takes them is asked where they are launched."""
    sane = 1 <= compiled.threads <= 1024 and 1 <= compiled.cluster_blocks <= 16
    sane = sane and 0 <= compiled.scratch_pointers <= 2 and 0 <= compiled.shared_bytes <= 1 << 31
    inside = compiled.code_start >= 0 and 0 <= compiled.code_bytes <= code_bytes - compiled.code_start
    if not sane or not inside:
        raise ValueError(f"a kernel's launch is out of bounds: {compiled}")


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
