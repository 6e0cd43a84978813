"""Kernels for a GPU that read its clocks: what they answer may follow from when they are called.

The counterpart of :mod:`instructions`. NVIDIA's instructions have 16 bytes from Volta on; four of them read special
registers (S2R, CS2R, S2UR, CS2UR), whose numbers have been the same since (``nvdisasm`` of CUDA 13: sm_75 to sm_120).
Standard library only.
"""

from __future__ import annotations

import struct
from typing import Final

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages.cubin import sections

__all__ = ["check", "found"]

#: An instruction's two words. The operation is the lowest 12 bits of the first; a special register's number follows the
#: lowest byte of the second.
_INSTRUCTION = struct.Struct("<QQ")
_READS: Final = frozenset({0x919, 0x805, 0x9C3, 0x8CB})
_CLOCKS: Final = {0x50: "%clock", 0x51: "%clock_hi", 0x52: "%globaltimer", 0x53: "%globaltimer_hi"}


def found(cubin: bytes) -> tuple[str, ...]:
    """The clocks that its kernels read, as PTX calls them. Raises BuildFailure for anything that is no cubin."""
    texts = [text for name, text in sections(cubin).items() if name.startswith(".text")]
    return tuple(sorted({clock for text in texts for clock in _read(text)}))


def _read(text: bytes) -> set[str]:
    whole = len(text) // _INSTRUCTION.size * _INSTRUCTION.size
    read = {word >> 8 & 0xFF for first, word in _INSTRUCTION.iter_unpack(text[:whole]) if first & 0xFFF in _READS}
    return {_CLOCKS[number] for number in read if number in _CLOCKS}


def check(cubin: bytes) -> None:
    """Raises BuildFailure where any is read."""
    clocks = found(cubin)
    if clocks:
        raise BuildFailure(
            f"the kernel reads the GPU's clock ({', '.join(clocks)}): it may answer otherwise at another time than "
            "when it is verified",
            expected="a kernel whose answers follow from its arguments alone",
            remedy="take the clock out; __nanosleep waits without one",
        )
