"""Kernel parameters: canonical type names, which plan arguments they accept, and the bytes they are passed as.

Standard library only; the supervisor checks with it, the replay engine packs with it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence

from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.languages.binary import FOLDED, Binary, KernelInfo, launches_of
from pytest_cudaforge.plan import Argument, Constants, Launch, TracedPlan, View

#: Integer types: struct format (x86-64 and AArch64 Linux and the CUDA device agree on these sizes).
_INTEGERS = {
    "char": "b",
    "signed char": "b",
    "unsigned char": "B",
    "short": "h",
    "unsigned short": "H",
    "int": "i",
    "unsigned int": "I",
    "long": "q",
    "unsigned long": "Q",
    "long long": "q",
    "unsigned long long": "Q",
}
_FLOATS = {"float": "f", "double": "d", "__half": "e", "_Float16": "e", "__nv_bfloat16": "bf16", "__bf16": "bf16"}

_BYTE_DTYPES = ("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2")
_HALF_DTYPES = ("float16", "bfloat16")
#: The dtypes a pointer to each type accepts. ``None``: any tensor (raw bytes).
_POINTEES: dict[str, tuple[str, ...] | None] = {
    "void": None,
    "char": None,
    "std::byte": None,
    "cuda::std::byte": None,
    "signed char": _BYTE_DTYPES,
    "unsigned char": _BYTE_DTYPES,
    "bool": ("bool",),
    "short": ("int16", *_HALF_DTYPES),
    "unsigned short": ("int16", *_HALF_DTYPES),
    "int": ("int32",),
    "unsigned int": ("int32",),
    "long": ("int64",),
    "unsigned long": ("int64",),
    "long long": ("int64",),
    "unsigned long long": ("int64",),
    "float": ("float32",),
    "double": ("float64",),
    "__half": ("float16",),
    "__half2": ("float16",),
    "_Float16": ("float16",),
    "__nv_bfloat16": ("bfloat16",),
    "__nv_bfloat162": ("bfloat16",),
    "__bf16": ("bfloat16",),
    "__nv_fp8_e4m3": ("float8_e4m3fn",),
    "__nv_fp8_e5m2": ("float8_e5m2",),
    "std::complex<float>": ("complex64",),
    "std::complex<double>": ("complex128",),
    "cuda::std::complex<float>": ("complex64",),
    "cuda::std::complex<double>": ("complex128",),
}
_VECTOR = re.compile(r"(u?)(char|short|int|long|longlong|float|double)[1-4]$")
_FLOAT32_MAX = 3.4028235677973366e38


def canonical(demangled: str) -> str:
    """The demangler's ``float const*`` as people write it: ``const float*``; other types keep their form."""
    match = re.fullmatch(r"([^*&()]+?) const\*", demangled)
    return f"const {match.group(1)}*" if match else demangled


def pointee(param: str) -> str | None:
    """What a pointer parameter points to, without const and volatile; None for a parameter that is no pointer."""
    if not param.endswith("*"):
        return None
    inner = param[:-1].strip()
    words = [word for word in inner.split(" ") if word not in ("const", "volatile", "")]
    return " ".join(words)


def is_scalar(param: str) -> bool:
    """Whether a number can be passed for ``param``."""
    return param == "bool" or param in _INTEGERS or param in _FLOATS


def accepted_dtypes(param: str) -> tuple[str, ...] | None:
    """The dtypes a tensor passed for pointer ``param`` may have; None: any. Raises ``ValueError`` for T** and calls."""
    inner = pointee(param)
    if inner is None or "*" in inner or "(" in inner.replace("(anonymous namespace)", ""):
        raise ValueError(param)
    if inner in _POINTEES:
        return _POINTEES[inner]
    vector = _VECTOR.match(inner)
    if vector and vector.group(2) == "float":
        return ("float32", "complex64")
    if vector and vector.group(2) == "double":
        return ("float64", "complex128")
    # Integer vectors (uint4 and its kin) move raw bytes; a user's own struct cannot be judged from here.
    return None


def size_bytes(param: str) -> int | None:
    """How many bytes a pointer or a number of this type takes; None for what a plan cannot pass."""
    if param.endswith("*"):
        return 8
    return len(pack(param, 0)) if is_scalar(param) else None


def argument_problem(param: str, argument: Argument, dtype: str | None) -> tuple[str, str]:
    """Why ``argument`` cannot be passed as ``param``, as (what it is, what was expected); ("", "") where it can.

    ``dtype`` is the tensor's dtype where the argument is a View.
    """
    if param == FOLDED:
        known = argument is None or (type(argument) is int and argument == 1)
        return ("", "") if known else (f"it is {argument!r}", "1 or None, which its kernel was compiled for")
    if param.endswith("*"):
        return _pointer_problem(param, argument, dtype)
    if not is_scalar(param):
        return (f"its parameter has type {param}", "a pointer or a number: a plan passes nothing else")
    if isinstance(argument, View):
        return (f"it is a {dtype} tensor", f"a number for {param}")
    if argument is None:
        return ("it is None", f"a number for {param}")
    return _scalar_problem(param, argument)


def _pointer_problem(param: str, argument: Argument, dtype: str | None) -> tuple[str, str]:
    try:
        dtypes = accepted_dtypes(param)
    except ValueError:
        return (f"its parameter has type {param}", "a pointer to plain elements")
    if argument is None:
        return ("", "")
    if not isinstance(argument, View):
        return (f"it is the number {argument!r}", f"a tensor for {param}")
    if dtypes is None or dtype in dtypes:
        return ("", "")
    return (f"it is a {dtype} tensor", f"{' or '.join(dtypes)} for {param}")


def _scalar_problem(param: str, value: int | float | bool) -> tuple[str, str]:
    if param == "bool":
        fits = isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
        return ("", "") if fits else (f"it is {value!r}", "True or False for bool")
    if param in _INTEGERS:
        return _integer_problem(param, value)
    if param == "float" and math.isfinite(value) and abs(value) >= _FLOAT32_MAX:
        return (f"it is {value!r}", "a number in the range of float")
    if param in ("__half", "_Float16") and math.isfinite(value) and abs(value) >= 65520.0:
        return (f"it is {value!r}", f"a number in the range of {param}")
    return ("", "")


def _integer_problem(param: str, value: int | float | bool) -> tuple[str, str]:
    if isinstance(value, float):
        return (f"it is the float {value!r}", f"an integer for {param} (int(...) in plan.py)")
    try:
        struct.pack("<" + _INTEGERS[param], value)
    except struct.error:
        return (f"it is {value}, which does not fit", f"an integer in the range of {param}")
    return ("", "")


def pack(param: str, value: int | float | bool) -> bytes:
    """The bytes a checked number is passed as. Raises ``ValueError`` where :func:`argument_problem` has a complaint."""
    if param == "bool":
        return struct.pack("<?", value)
    code = _INTEGERS.get(param) or _FLOATS.get(param)
    if code is None:
        raise ValueError(f"no number can be passed as {param}")
    if code == "bf16":
        return _bfloat16(float(value))
    try:
        return struct.pack("<" + code, value)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{value!r} cannot be passed as {param}: {error}") from None


def _bfloat16(value: float) -> bytes:
    """Round to nearest even, as torch does."""
    if math.isnan(value):
        return b"\xc0\x7f"
    try:
        bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    except OverflowError:
        bits = 0x7F800000 if value > 0 else 0xFF800000
    bits += 0x7FFF + ((bits >> 16) & 1)
    return struct.pack("<H", (bits >> 16) & 0xFFFF)


def check_arguments(traced: TracedPlan, binaries: Sequence[Binary]) -> None:
    """Check every launch's argument count and types against the compiled kernels.

    Raises BuildFailure naming kernel, argument position and parameter type (design: a count or type that does not
    match is a build error), or a launch whose kernel no binary holds.
    """
    _check_constants(launches_of(traced))
    by_constants = {binary.constants: binary for binary in binaries}
    plans = (traced.main, traced.prepare) if traced.prepare else (traced.main,)
    for plan in plans:
        for launch in plan.launches:
            binary = by_constants.get(launch.constants)
            kernel = binary.kernel(launch.kernel) if binary else None
            if kernel is None:
                raise BuildFailure(
                    f'{_where(launch)} has no compiled kernel "{launch.kernel}" with constants {dict(launch.constants)}'
                )
            _check_launch(launch, kernel, tuple(buffer.spec.dtype for buffer in plan.buffers))


def _check_constants(launches: Sequence[Launch]) -> None:
    """1 and 1.0 are equal keys but different macros."""
    seen: dict[Constants, str] = {}
    for launch in launches:
        text = repr(launch.constants)
        if seen.setdefault(launch.constants, text) != text:
            raise BuildFailure(
                f"constants {text} and {seen[launch.constants]} differ only in int and float",
                expected="one of the two in every launch",
            )


def _where(launch: Launch) -> str:
    return f"plan.py:{launch.line}: the launch" if launch.line else "a launch"


def _check_launch(launch: Launch, kernel: KernelInfo, dtypes: Sequence[str]) -> None:
    where = f"plan.py:{launch.line}: " if launch.line else ""
    if len(launch.args) != len(kernel.params):
        raise BuildFailure(
            f'{where}kernel "{launch.kernel}" is launched with {len(launch.args)} arguments',
            expected=f"{len(kernel.params)}: ({', '.join(kernel.params)})",
            remedy="make args=(...) in plan.py and the kernel's parameters agree",
        )
    for position, (param, argument) in enumerate(zip(kernel.params, launch.args, strict=True)):
        dtype = dtypes[argument.buffer] if isinstance(argument, View) else None
        what, expected = argument_problem(param, argument, dtype)
        if what:
            raise BuildFailure(
                f'{where}kernel "{launch.kernel}", argument {position + 1} of {len(kernel.params)} ({param}): {what}',
                expected=expected,
                remedy="change the argument in plan.py or the kernel's parameter",
            )


__all__ = [
    "accepted_dtypes",
    "argument_problem",
    "canonical",
    "check_arguments",
    "is_scalar",
    "launches_of",
    "pack",
    "pointee",
    "size_bytes",
]
