"""Instructions of native code that ask for what no function call has to: the time, the machine, the kernel.

Imports show what a library asks of others (:mod:`imports`); a system call or the processor's clock needs nobody. Bytes
that may be such an instruction are looked for first, and only where there are any does a disassembler say what is one.
"""

from __future__ import annotations

import platform
import re
import subprocess
import tempfile
from collections.abc import Sequence

from pytest_cudaforge.errors import BuildFailure

__all__ = ["check", "found"]

#: syscall, sysenter, int 0x80, rdtsc, rdtscp, cpuid, and what fills a register with random bits or the processor's
#: number.
_BYTES = re.compile(rb"\x0f[\x05\x31\x34\xa2]|\xcd\x80|\x0f\x01\xf9|\x0f\xc7[\xf0-\xff]", re.DOTALL)
_ASKING = re.compile(
    r"^\s*[0-9a-f]+:\s+(syscall|sysenter|int\s+\$0x80|rdtscp?|rdrand|rdseed|rdpid|cpuid)\b", re.MULTILINE
)
#: What g++ puts into a library that asks __builtin_cpu_supports, or has clones for several processors.
_COMPILERS = re.compile(r"^[0-9a-f]+ <(?:__cpu_indicator_init|get_available_features)\S*>:\n(?:.+\n)*", re.MULTILINE)
_LIMIT_S = 20.0


def found(code: bytes) -> tuple[str, ...]:
    """Those in a shared object. Where there is no objdump, or another architecture, none is. To be called where code
    that nobody trusts may be looked at. Raises BuildFailure where it cannot be read in time."""
    if platform.machine() not in ("x86_64", "AMD64") or not _BYTES.search(code):
        return ()
    return tuple(sorted({" ".join(name.split()) for name in _ASKING.findall(_COMPILERS.sub("", _disassembled(code)))}))


def check(asked: Sequence[str]) -> None:
    """Raises BuildFailure where any were found."""
    if asked:
        shown = "".join(char for char in ", ".join(asked)[:100] if char.isprintable())
        raise BuildFailure(
            f"the kernel asks the machine itself, by {shown}: it may answer otherwise where it runs than where it is "
            "verified",
            expected="a kernel whose answers follow from its arguments alone",
            remedy="take the instruction out; a launch's arguments and constants tell a kernel all that it needs",
        )


def _disassembled(code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(code)
        file.flush()
        command = ["objdump", "-d", "--no-show-raw-insn", file.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S)
        except FileNotFoundError:
            return ""
        except subprocess.TimeoutExpired:
            raise BuildFailure(
                f"the kernel cannot be disassembled within {_LIMIT_S:g} s", expected="a library of a kernel's size"
            ) from None
    return done.stdout
