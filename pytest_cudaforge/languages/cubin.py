"""What a cubin says of itself: its sections, whether two hold the same code, which barriers its kernels use.

Standard library only. A cubin is a 64-bit ELF file; kernel ``k`` has its instructions in ``.text.k`` and ptxas's
attributes in ``.nv.info.k``, which no source text can forge.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from pytest_cudaforge.errors import BuildFailure

__all__ = ["same_code", "sections", "undefined", "uses_transaction_barriers", "variables"]

_MAGIC = b"\x7fELF\x02\x01"
#: Names, type, flags, address, offset, size, link, info, alignment, entry size of a section.
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NO_BITS = 8
#: Name, info, visibility, section, value, size of a symbol; section 0 is nowhere in the file.
_SYMBOL = struct.Struct("<IBBHQQ")
_OBJECT, _WORD_BYTES = 1, 4
#: An attribute is a format byte, a code byte and two bytes: a value, or the length of what follows.
_SIZED_FORMAT = 4
#: EIATTR_NUM_MBARRIERS and EIATTR_MBARRIER_INSTR_OFFSETS of ptxas.
_BARRIER_ATTRIBUTES = frozenset({0x38, 0x39})


def sections(code: bytes) -> dict[str, bytes]:
    """Contents by section name; empty where a section has none in the file. Raises BuildFailure for anything that is
    not such a file."""
    try:
        return dict(_sections(code))
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise BuildFailure(f"the cubin cannot be read: {error}", expected="a 64-bit ELF file") from None


def _sections(code: bytes) -> Iterator[tuple[str, bytes]]:
    """Names, with what the file has of them, in the order of their numbers."""
    if code[:6] != _MAGIC:
        raise ValueError("it does not begin as an ELF file does")
    (table,) = struct.unpack_from("<Q", code, 0x28)
    step, count, names_at = struct.unpack_from("<HHH", code, 0x3A)
    headers = [_SECTION.unpack_from(code, table + index * step) for index in range(count)]
    names = headers[names_at][4] if headers else 0
    for name, kind, _, _, offset, size, *_ in headers:
        start = names + name
        content = b"" if kind == _NO_BITS else code[offset : offset + size]
        yield code[start : code.index(b"\0", start)].decode("utf-8", "replace"), content


def undefined(code: bytes) -> frozenset[str]:
    """Names of functions that the kernels call and the driver brings, ``malloc`` among them. Raises BuildFailure."""
    found = sections(code)
    symbols, names = found.get(".symtab", b""), found.get(".strtab", b"")
    nowhere = [name for name, _, _, section, *_ in _SYMBOL.iter_unpack(symbols) if name and not section]
    return frozenset(names[at : names.find(b"\0", at)].decode("utf-8", "replace") for at in nowhere)


def variables(code: bytes) -> tuple[tuple[str, int], ...]:
    """Name and bytes of every variable in global memory that holds a word at least, however it is linked.
    Raises BuildFailure."""
    try:
        found = list(_sections(code))
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise BuildFailure(f"the cubin cannot be read: {error}", expected="a 64-bit ELF file") from None
    contents = dict(found)
    symbols, names = contents.get(".symtab", b""), contents.get(".strtab", b"")
    within = [name.startswith(".nv.global") for name, _ in found]
    return tuple(
        (names[at : names.find(b"\0", at)].decode("utf-8", "replace"), nbytes)
        for at, info, _, section, _, nbytes in _SYMBOL.iter_unpack(symbols)
        if info & 15 == _OBJECT and nbytes >= _WORD_BYTES and section < len(found) and within[section]
    )


def same_code(one: bytes, other: bytes) -> bool:
    """Do both cubins hold the same kernels with the same instructions and constants, byte by byte? Line tables and
    other notes may differ. Raises BuildFailure."""
    return _code(one) == _code(other)


def _code(cubin: bytes) -> dict[str, bytes]:
    prefixes = (".text.", ".nv.constant", ".nv.global.init")
    return {name: data for name, data in sections(cubin).items() if name.startswith(prefixes)}


def uses_transaction_barriers(cubin: bytes, symbol: str) -> bool:
    """Does kernel ``symbol`` use mbarriers: ``cuda::barrier``, bulk copies, pipelines of producers and consumers?

    Raises BuildFailure.
    """
    return any(code in _BARRIER_ATTRIBUTES for code in _attributes(sections(cubin).get(f".nv.info.{symbol}", b"")))


def _attributes(info: bytes) -> Iterator[int]:
    position = 0
    while position + 4 <= len(info):
        form, code, value = struct.unpack_from("<BBH", info, position)
        yield code
        position += 4 + (value if form == _SIZED_FORMAT else 0)
