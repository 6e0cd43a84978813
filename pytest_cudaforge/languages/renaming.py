"""Kernels whose names the toolchain uses too.

``__global__ void norm(...)`` is a fair name for a kernel, but CUDA declares a ``norm`` of its own, and the C library a
``gamma`` and an ``index``: the kernel's expression then names an overloaded function, or its declaration clashes. A
source that fails so is compiled once more with those kernels under other names; whatever else is wrong stays an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Renaming", "clashing"]

_PREFIX = "__forge_kernel_"
_BASE = re.compile(r"&?\s*([A-Za-z_]\w*)\s*(?:<|$)")
#: How NVRTC and g++ complain of a name that was taken.
_CLASH = re.compile(
    r"overloaded function|cannot overload|more than one instance|already been declared|linkage specification"
    r"|conflicting declaration|ambiguat|is ambiguous|different exception specif|incompatible with|redeclared"
)


@dataclass(frozen=True)
class Renaming:
    """Names of kernels that get another name for one compile."""

    names: tuple[str, ...] = ()

    @property
    def macros(self) -> str:
        """Stands before the candidate's file, behind the declarations it clashes with."""
        return "".join(f"#define {name} {_PREFIX}{name}\n" for name in self.names)

    def apply(self, expression: str) -> str:
        """The expression that names the same kernel under its new name."""
        match = _BASE.match(expression)
        if match is None or match.group(1) not in self.names:
            return expression
        return expression[: match.start(1)] + _PREFIX + expression[match.start(1) :]

    def restore(self, log: str) -> str:
        """A compiler's text in the candidate's own names."""
        return log.replace(_PREFIX, "")


def clashing(log: str, expressions: Sequence[str]) -> Renaming:
    """The kernels that ``log`` complains of as taken names; none: the source has another fault."""
    found = []
    for expression in expressions:
        match = _BASE.match(expression)
        name = match.group(1) if match else ""
        told = [line for line in log.splitlines() if _CLASH.search(line)]
        if name and name not in found and any(re.search(rf"\b{name}\b", line) for line in told):
            found.append(name)
    return Renaming(tuple(found))
