"""A Triton kernel's *instance*, as a launch plan names it: the function, what it is specialised on, and its options.

``relu<*fp32:16, i32:16, num_warps=4, num_stages=3>`` is to Triton what ``relu<float, 4>`` is to C++: tracing writes the
name from a launch's arguments, the builder reads it and compiles for exactly that. Standard library only.

A plan is made for one signature, so its numbers are constants of the plan and are specialised as Triton's own launcher
does (1 becomes a constant, a multiple of 16 is known to be one). A pointer is taken to be 16-byte aligned where its
offset in its buffer keeps that: buffers are aligned, and the guard of a Triton kernel always asks inputs and weights
to be (see ``evaluation.verification``); what ``prepare`` returned is where the view that it returned keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pytest_cudaforge.errors import PlanError
from pytest_cudaforge.plan import Argument, TensorSpec, View

__all__ = ["ALIGN_BYTES", "OPTIONS", "TRITON_DTYPES", "Instance", "argument_word", "keeps_alignment", "parse_instance"]

ALIGN_BYTES = 16
#: torch's dtypes by Triton's names; Triton has no complex numbers.
TRITON_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
#: What ``launch`` takes beside grid, args and constants, with Triton's defaults. 0 registers: no limit.
OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": 0}
_MAX_CHARS = 1000
_FORM = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)<(.*)>")
_WORD = re.compile(r"\*[a-z0-9]+(:16)?|[iu]\d+(:16)?|fp32|1|none")
_OPTION = re.compile(r"([a-z_]+)=(\d{1,9})")


@dataclass(frozen=True)
class Instance:
    """``arguments`` are words: ``*fp32:16`` (a pointer, aligned), ``i32``, ``i64:16``, ``u1``, ``fp32``, ``1``,
    ``none``.

    ``options`` are (name, value) of :data:`OPTIONS`, in its order; those at their default are in it, too.
    """

    kernel: str
    arguments: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def expression(self) -> str:
        """The name in the plan. Raises PlanError where it would be too long."""
        shown = [f"{name}={value}" for name, value in self.options if name in _SHOWN or value != OPTIONS[name]]
        text = f"{self.kernel}<{', '.join([*self.arguments, *shown])}>"
        if len(text) > _MAX_CHARS:
            raise PlanError(
                f'launch() kernel "{self.kernel}" has {len(self.arguments)} args',
                expected=f"so few that the instance's name stays under {_MAX_CHARS} characters",
            )
        return text


_SHOWN = ("num_warps", "num_stages")


def argument_word(argument: Argument, buffers: Sequence[TensorSpec], place: int, shifted: Collection[int] = ()) -> str:
    """What Triton specialises on for one argument of a launch; ``shifted`` are buffers that begin anywhere.

    Raises PlanError for a dtype that Triton has not.
    """
    if isinstance(argument, View):
        return _pointer_word(argument, buffers[argument.buffer], place, argument.buffer in shifted)
    if argument is None:
        return "none"
    if isinstance(argument, bool):
        return "u1"
    if isinstance(argument, float):
        return "fp32"
    if argument == 1:
        return "1"
    kind = "i32" if -(1 << 31) <= argument < 1 << 31 else "i64" if argument < 1 << 63 else "u64"
    return kind if argument % 16 else f"{kind}:16"


def _pointer_word(view: View, buffer: TensorSpec, place: int, shifted: bool) -> str:
    name = TRITON_DTYPES.get(buffer.dtype)
    if name is None:
        raise PlanError(
            f"launch() args[{place}] is a {buffer.dtype} tensor",
            expected=f"a dtype that Triton has: {', '.join(TRITON_DTYPES)}",
        )
    return f"*{name}:16" if not shifted and keeps_alignment(view, buffer) else f"*{name}"


def keeps_alignment(view: View, buffer: TensorSpec) -> bool:
    """Does a view of an aligned buffer begin at an aligned address?"""
    return view.offset * buffer.itemsize_bytes % ALIGN_BYTES == 0


def parse_instance(expression: str) -> Instance:
    """The inverse of :attr:`Instance.expression`. Raises ``ValueError`` for anything else."""
    found = _FORM.fullmatch(expression)
    if found is None or len(expression) > _MAX_CHARS:
        raise ValueError(f"{expression[:80]!r} names no instance of a Triton kernel")
    arguments: list[str] = []
    options = dict(OPTIONS)
    for word in found.group(2).split(", "):
        option = _OPTION.fullmatch(word)
        if option and option.group(1) in OPTIONS:
            options[option.group(1)] = int(option.group(2))
        elif _WORD.fullmatch(word):
            arguments.append(word)
        else:
            raise ValueError(f"{expression[:80]!r} has the part {word[:40]!r}, which is neither a type nor an option")
    return Instance(found.group(1), tuple(arguments), tuple(options.items()))
