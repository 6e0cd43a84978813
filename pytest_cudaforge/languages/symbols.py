"""Parameter types from symbol names.

Both compilers instantiate a harmless variable template ``__forge_type<I, void(Args...)>`` with the type that
``decltype`` gives for kernel expression number ``I``. Its mangled name then spells the exact parameter types, through
typedefs and macros, and is read from the compiler's output as text: nothing of the candidate's is executed.
"""

from __future__ import annotations

import ctypes
import functools
import re

from pytest_cudaforge.errors import BuildFailure, ToolchainError
from pytest_cudaforge.languages.parameters import canonical

#: Prepended to a source. ``__forge_bare`` accepts a function or a pointer to one and drops return type and noexcept.
#: Its names have lower-case letters, so that no constant (``-DA=1``) can replace them.
DESCRIBER = """\
template <class __forge_f> struct __forge_bare;
template <class __forge_r, class... __forge_a> struct __forge_bare<__forge_r(__forge_a...)> {
  using __forge_args = void(__forge_a...);
};
template <class __forge_r, class... __forge_a> struct __forge_bare<__forge_r(__forge_a...) noexcept> {
  using __forge_args = void(__forge_a...);
};
template <class __forge_r, class... __forge_a> struct __forge_bare<__forge_r (*)(__forge_a...)> {
  using __forge_args = void(__forge_a...);
};
template <class __forge_r, class... __forge_a> struct __forge_bare<__forge_r (*)(__forge_a...) noexcept> {
  using __forge_args = void(__forge_a...);
};
"""

_OLD_HALF = re.compile(r"^half\b")
MAX_SYMBOL_BYTES = 8192
_SYMBOL = re.compile(rb"_ZL?12__forge_typeILi(\d{1,5})EF[A-Za-z0-9_.$]{1,%d}(?=\x00)" % MAX_SYMBOL_BYTES)


def describer_expression(index: int, expression: str) -> str:
    """The template-id whose name tells the parameter types of ``expression``."""
    return f"__forge_type<{index}, __forge_bare<decltype({expression})>::__forge_args>"


def describers_in(code: bytes) -> dict[int, str]:
    """Describer symbols by kernel number, found in an ELF's string tables. Raises BuildFailure where two disagree."""
    found: dict[int, str] = {}
    for match in _SYMBOL.finditer(code):
        index, symbol = int(match.group(1)), match.group(0).decode("ascii")
        if found.setdefault(index, symbol) != symbol:
            raise BuildFailure("the source defines names that begin with __forge_", expected="other names")
    return found


def parameter_types(symbol: str, expression: str) -> tuple[str, ...]:
    """The canonical parameter types a describer's mangled name spells. Raises BuildFailure where it spells none."""
    # libstdc++ before 13 knows _Float16 only under its older code.
    text = demangle(symbol) or demangle(symbol.replace("DF16_", "Dh"))
    match = re.match(r"__forge_type<\d+, void ?\(", text or "")
    if text is None or match is None or not text.endswith(")>"):
        raise BuildFailure(
            f'the parameter types of kernel "{expression}" cannot be read',
            expected="a kernel whose parameters are pointers and numbers",
        )
    return tuple(canonical(_OLD_HALF.sub("_Float16", part)) for part in _split(text[match.end() : -2]))


def _split(text: str) -> list[str]:
    """Split at commas outside any bracket."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        if char in "<([{":
            depth += 1
        elif char in ">)]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last and last != "void" else parts


def demangle(symbol: str) -> str | None:
    """An Itanium-ABI mangled name in clear, by libstdc++'s own demangler; None where it is no such name."""
    function, free = _demangler()
    status = ctypes.c_int(0)
    address = function(symbol.encode(), None, None, ctypes.byref(status))
    if not address:
        return None
    try:
        return ctypes.string_at(address).decode("utf-8", "replace") if status.value == 0 else None
    finally:
        free(address)


@functools.lru_cache(maxsize=1)
def _demangler() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer]:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        libc = ctypes.CDLL(None)
        function, free = library["__cxa_demangle"], libc["free"]
    except (OSError, AttributeError) as error:
        raise ToolchainError(
            f"libstdc++.so.6 cannot be loaded: {error}",
            expected="GNU's C++ runtime, which torch and g++ need as well",
            remedy="install it, e.g. `apt-get install libstdc++6`",
        ) from None
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_void_p
    free.argtypes, free.restype = [ctypes.c_void_p], None
    return function, free
