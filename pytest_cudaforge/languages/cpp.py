"""``cpp``: C++17 on the CPU through g++ with OpenMP, no torch headers; loaded with ctypes by the replay engine.

For each kernel expression the compile adds an ``extern "C"`` entry ``__forge_launch_<i>(void** args)`` that unpacks
typed arguments, so that templates and overloads need no mangled names, and a describer that spells the parameter types.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge.errors import BuildFailure, ToolchainError
from pytest_cudaforge.facts import KernelResources
from pytest_cudaforge.languages import instructions, remarks
from pytest_cudaforge.languages.binary import Binary, KernelInfo, Unit
from pytest_cudaforge.languages.logs import other_tools_words, reduce_log
from pytest_cudaforge.languages.renaming import clashing
from pytest_cudaforge.languages.symbols import DESCRIBER, describer_expression, describers_in, parameter_types
from pytest_cudaforge.plan import Constants

NATIVE = "-march=native"
#: ``-fno-gnu-unique``: a template's static variables must not survive in the process when the binary is loaded afresh.
#: ``-Bsymbolic-functions``: an ``extern "C"`` kernel called ``step`` or ``index`` is itself, not libc's function.
#: ``--no-undefined``: a missing function is an error of the build, not of the first call.
FLAGS = (
    "-O3",
    NATIVE,
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-std=c++17",
    "-fno-gnu-unique",
    "-fdiagnostics-color=never",
    "-fmax-errors=20",
    "-Wl,-Bsymbolic-functions",
    "-Wl,--no-undefined",
    "-Wl,-z,now",
)
#: What g++ says about its loops goes into the log with these; the code stays the same.
#: addr2line of binutils 2.40 takes one file for another in what g++ 12 writes as DWARF 5.
_EXPLAINED = ("-g1", "-gdwarf-4", *remarks.FLAGS)
#: CPUs that know fewer instructions than most of today, by names of their ABI, and what it takes to run their code.
OLDER: Mapping[str, tuple[str, ...]] = {"cpu-x86-64-v3": ("-mavx2", "-mfma", "-mbmi2"), "cpu-x86-64": ()}
#: What a source asks the preprocessor to be other code on CPUs that know other instructions, or asks in a call.
_ASKS_INSTRUCTIONS = re.compile(
    r"\b__(AVX|FMA|SSE|SSSE|BMI|F16C|LZCNT|POPCNT|AES|PCLMUL|VNNI|AMX)\w*__\b"
    r"|\b(__builtin_cpu_(supports|is)|(__)?target_clones(__)?)\b"
)
#: What every CPU for x86-64 knows, and, by the beginnings of g++'s names, what one for x86-64-v3 need not know.
_OLDEST = ("cmov", "fxsr", "mmx", "sse", "sse2", "x86-64")
_NEWER = ("avx512", "avx10", "avxvnni", "avxifma", "avxneconvert", "amx", "gfni", "vaes", "vpclmul", "sha", "x86-64-v4")
#: What is asked in a call is answered as an older CPU would, and of clones of a function the plain one stays.
_ANSWERED = ("-D__builtin_cpu_is(cpu)=0", "-Dtarget_clones(...)=unused", "-D__target_clones__(...)=unused")
_SUPPORTED = {
    "cpu-x86-64-v3": "&&".join(f'__builtin_strncmp(what,"{name}",{len(name)})' for name in _NEWER),
    "cpu-x86-64": "||".join(f'!__builtin_strcmp(what,"{name}")' for name in _OLDEST),
}
SOURCE_NAME = "kernel.cpp"
#: Larger ones take objdump long.
_MOST_LISTED_BYTES = 4 << 20
_MOST_INSTRUCTION_CHARS = 120
#: An instruction on several elements: packed arithmetic (moves of single elements are called packed, too), or registers
#: that scalar code has no use for (x86, ARM).
_PACKED = re.compile(r"v?(add|sub|mul|div|max|min|sqrt|fn?m(add|sub)\d*)p[sd]\b|.*(%[yz]mm|\bv\d+\.\d+[bhsd]|\bz\d+\.)")
#: A sample lies behind the instruction that took the time.
_AROUND = 6
MAX_SOURCE_CHARS = 4 * 1024 * 1024
_UNIT_NAME = "forge_unit.cpp"
_END_NAME = "end of kernel.cpp"
_CONSTANT_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
_TOOL_LINE = re.compile(r"(/\S*/)?(ld|g\+\+|as|collect2|cc1plus)(\.\w+)?: ")
_BROKEN_TOOL = re.compile(r"cannot find -lgomp|cannot execute .*|No space left on device|error trying to exec .*")
_SYSTEM_DIRS = ("/usr/include/", "/usr/lib/", "/usr/local/include/")

#: ``__forge_modes``: a kernel that flushes denormals or rounds another way does so for itself, not for its caller.
_LAUNCHER = """\
#include <utility>
template <int __forge_i, class __forge_f> __attribute__((used)) char __forge_type = 0;
template <class __forge_t> struct __forge_value { using __forge_v = __forge_t; };
template <class __forge_t> struct __forge_value<__forge_t&> { using __forge_v = __forge_t; };
template <class __forge_t> struct __forge_value<__forge_t&&> { using __forge_v = __forge_t; };
struct __forge_modes {
#if defined(__x86_64__)
  unsigned __forge_was = __builtin_ia32_stmxcsr() & ~63u;
  ~__forge_modes() { if ((__builtin_ia32_stmxcsr() & ~63u) != __forge_was) __builtin_ia32_ldmxcsr(__forge_was); }
#elif defined(__aarch64__)
  unsigned __forge_was = __builtin_aarch64_get_fpcr();
  ~__forge_modes() { if (__builtin_aarch64_get_fpcr() != __forge_was) __builtin_aarch64_set_fpcr(__forge_was); }
#endif
};
template <class __forge_f, class... __forge_a, unsigned long... __forge_i>
static inline void __forge_call(__forge_f __forge_k, void (*)(__forge_a...), void** __forge_p,
                                std::integer_sequence<unsigned long, __forge_i...>) {
  __forge_modes __forge_m;
  __forge_k((*static_cast<typename __forge_value<__forge_a>::__forge_v*>(__forge_p[__forge_i]))...);
}
template <class... __forge_a> static inline auto __forge_pick(void (*__forge_k)(__forge_a...)) { return __forge_k; }
template <class __forge_f, class... __forge_a>
static inline void __forge_call(__forge_f __forge_k, void (*__forge_t)(__forge_a...), void** __forge_p) {
  __forge_call<__forge_f>(__forge_k, __forge_t, __forge_p,
                          std::make_integer_sequence<unsigned long, sizeof...(__forge_a)>());
}
"""


class CppLanguage:
    """g++ on this machine; ``arch`` is always "cpu"."""

    name = "cpp"
    source_name = SOURCE_NAME
    file_names = (SOURCE_NAME, "plan.py")

    def availability(self) -> str:
        """ "" where g++ is here, else the reason with its remedy."""
        try:
            _compiler_version()
        except ToolchainError as error:
            return str(error)
        return ""

    def fingerprint(self, arch: str) -> str:
        """Digest of g++'s version, the flags and what ``-march=native`` means on this CPU. Raises ToolchainError."""
        parts = [
            f"cpp {_RULES}",
            arch,
            _compiler_version(),
            _native_target(),
            *_flags(arch),
            *_EXPLAINED,
            DESCRIBER,
            _LAUNCHER,
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def compile(self, source: str, unit: Unit, arch: str, *, lineinfo: bool = False) -> Binary:
        """Compile ``source`` into a shared object. Raises BuildFailure with the reduced log, or ToolchainError.

        ``lineinfo``: the same code with line numbers, and for a log one line per loop, as ``remarks`` writes them.
        """
        if arch != "cpu" and arch not in OLDER:
            raise BuildFailure(f"the cpp language compiles for this CPU, not for {arch}", expected='arch "cpu"')
        check_unit(source, unit)
        flags = (*_flags(arch), *(_EXPLAINED if lineinfo else ()), *macro_flags(unit.constants))
        command = [_compiler(), *flags, _UNIT_NAME, "-o", "unit.so"]
        try:
            code, log = _compile_picking(command, source, unit)
        except OSError as error:
            raise ToolchainError(
                f"g++ cannot be run: {error}", expected="a temporary directory with room, and leave to start g++"
            ) from error
        except ToolchainError as error:
            if not _compiles():
                raise
            # The complaint is the candidate's doing: it filled the disk, or #line put its words into a tool's mouth.
            said = error.what.partition(": ")[2]
            raise BuildFailure(f"g++ refused the source: {said} (other sources compile here)") from error
        asks = instructions.found(code)
        return Binary(self.name, arch, unit.constants, code, _kernels(code, unit), log, asks)


def older_archs(source: str) -> tuple[str, ...]:
    """Of :data:`OLDER` those as which this CPU can run ``source``, if it is other code there: by what it asks the
    preprocessor. Raises ToolchainError."""
    if platform.machine() != "x86_64" or not _ASKS_INSTRUCTIONS.search(source):
        return ()
    known = set(re.findall(r"^\s*(-m\S+)\s+\[enabled\]", _native_target(), re.MULTILINE))
    return tuple(arch for arch, needed in OLDER.items() if known.issuperset(needed))


def _flags(arch: str) -> tuple[str, ...]:
    """``FLAGS`` for "cpu", or for one of :data:`OLDER`."""
    if arch not in OLDER:
        return FLAGS
    flags = (f"-march={arch.removeprefix('cpu-')}" if flag == NATIVE else flag for flag in FLAGS)
    known = f"(__builtin_cpu_supports(what)&&({_SUPPORTED[arch]}))"
    return (*flags, f"-D__builtin_cpu_supports(what)={known}", *_ANSWERED)


def _compiles() -> bool:
    """Does the compiler work for a source that nobody can find fault with?"""
    try:
        _compile([_compiler(), *FLAGS, _UNIT_NAME, "-o", "unit.so"], "void f() {}", Unit((), ("f",)), ())
    except (BuildFailure, ToolchainError, OSError):
        return False
    return True


#: Raise it when what is refused changes: builds of before are then looked at again.
_RULES = 3
#: When it is compiled, and which files are there.
_MACHINE = re.compile(
    r"\b(?P<word>__DATE__|__TIME__|__TIMESTAMP__)\b"
    r"|\b(?P<asked>__has_(?:include(?:_next)?|embed))\b(?:\s*\(\s*(?P<path>[<\"][^>\"\n]*)[>\"])?"
)
_WORDS = ("__DATE__", "__TIME__", "__TIMESTAMP__", "__has_include", "__has_include_next", "__has_embed")
#: What such a word may begin with where a macro pastes it together: the leftmost part stands in the text.
_BEGINNINGS = frozenset(word[:length] for word in _WORDS for length in range(1, len(word))) - frozenset(_WORDS)
#: A line that goes on in the next one, and the operator that pastes, each in all its spellings.
_SPLICE = re.compile(r"(?:\\|\?\?/)[ \t\r\f\v]*\n")
_PASTE = re.compile(r"##|%:%:|\?\?=\?\?=")
#: Before a name that a preprocessor may not know at all.
_IS_THERE = re.compile(r"(?:\bdefined\s*\(?|#\s*ifn?def)\s*\Z")


def check_unit(source: str, unit: Unit) -> None:
    """Raises BuildFailure where the text, a constant or a kernel expression cannot be given to a compiler."""
    if "\0" in source or len(source) > MAX_SOURCE_CHARS or not _is_text(source):
        raise BuildFailure(
            "the source is no C++ text",
            expected=f"valid Unicode without zero bytes, under {MAX_SOURCE_CHARS} characters",
        )
    told = _told_by_machine(source)
    if told:
        raise BuildFailure(
            f"the source asks for {told}: what it becomes depends on where and when it is compiled",
            expected="a source that is the same kernel on every machine; __has_include may name headers by their "
            "relative path in <angle brackets>",
        )
    for name, value in unit.constants:
        if not _CONSTANT_NAME.fullmatch(name):
            raise BuildFailure(f"constant {name!r} has a name that is no macro", expected="[A-Z_][A-Z0-9_]*")
        if isinstance(value, float) and not math.isfinite(value):
            raise BuildFailure(f"constant {name} is {value}", expected="a finite number")
    for expression in unit.kernels:
        if not expression.strip() or not expression.isprintable() or any(char in expression for char in '";#\\'):
            raise BuildFailure(
                f"kernel {expression!r} is no C++ expression that names a function",
                expected='a name such as "rms_norm" or "norm<float, 4>"',
            )


def _told_by_machine(source: str) -> str:
    """The first thing that a source, verified in one place and compiled in another, must not ask for, or ""."""
    text = _SPLICE.sub("", source)
    parts = _BEGINNINGS.intersection(re.findall(r"\b\w+", text)) if _PASTE.search(text) else ()
    if parts:
        return f"what it pastes together of {min(parts)}, as it seems"
    for match in _MACHINE.finditer(text):
        if match["word"]:
            return match["word"]
        path = match["path"]
        if path is None and _IS_THERE.search(text, 0, match.start()):
            continue
        if path is None:
            return f"{match['asked']} of a computed name"
        # A quoted name is looked for beside the source and where the compiler was started, too: in a project, one day.
        if path.startswith('"') or path.startswith("</") or ".." in path:
            return f"{match['asked']} of {path[1:]}"
    return ""


def _is_text(source: str) -> bool:
    try:
        source.encode()
    except UnicodeEncodeError:
        return False
    return True


def macro_flags(constants: Constants) -> tuple[str, ...]:
    """``-D`` options."""
    return tuple(f"-D{name}={macro_value(value)}" for name, value in constants)


def macro_value(value: int | float) -> str:
    """A C++ literal; negative numbers in brackets, because a macro's text meets any operator before it."""
    text = str(int(value)) if isinstance(value, bool) else repr(value)
    return f"({text})" if text.startswith("-") else text


def _with_newline(source: str) -> str:
    return source if source.endswith("\n") else source + "\n"


def _unit_text(unit: Unit, picked: Sequence[str]) -> str:
    """The translation unit: the candidate's file between the describer and one launcher per kernel.

    The ``#line`` of each launcher puts the kernel's expression where g++ would print a file name.
    """
    # The launcher's own templates precede the candidate's file, whose macros could otherwise change their meaning.
    text = [
        DESCRIBER,
        _LAUNCHER,
        f'#include "{SOURCE_NAME}"\n#line 1 "{_END_NAME}"\nnamespace forge_end_of_file {{}}\n',
    ]
    for index, expression in enumerate(unit.kernels):
        line = _line_name(expression)
        if expression in picked:
            expression = f"__forge_pick({expression})"
        describer = describer_expression(index, expression)
        text.append(f'#line 1 "{line}"\ntemplate char {describer};\n')
        text.append(
            f'#line 1 "{line}"\n'
            f'extern "C" __attribute__((visibility("default"))) void __forge_launch_{index}(void** __forge_p) '
            f"{{ __forge_call<decltype({expression})>({expression}, "
            f"static_cast<__forge_bare<decltype({expression})>::__forge_args*>(nullptr), __forge_p); }}\n"
        )
    return "".join(text)


def _line_name(expression: str) -> str:
    return f"kernel {expression}"


def _compile_picking(command: list[str], source: str, unit: Unit) -> tuple[bytes, str]:
    """:func:`_compile`, once more where a kernel shares its name with a library function (``round``, ``gamma``)."""
    try:
        return _compile(command, source, unit, ())
    except BuildFailure as failure:
        picked = [name for name in unit.kernels if clashing(failure.log, [name]).names]
        if not picked:
            raise
        try:
            return _compile(command, source, unit, picked)
        except BuildFailure:
            raise failure from None


def _compile(command: list[str], source: str, unit: Unit, picked: Sequence[str]) -> tuple[bytes, str]:
    """(shared object, log). Raises BuildFailure, ToolchainError or OSError."""
    with tempfile.TemporaryDirectory(prefix="forge-cpp-") as name:
        directory = Path(name)
        (directory / SOURCE_NAME).write_text(_with_newline(source), encoding="utf-8")
        (directory / _UNIT_NAME).write_text(_unit_text(unit, picked), encoding="utf-8")
        log = _run_compiler(command, directory, unit)
        return (directory / "unit.so").read_bytes(), log


def _run_compiler(command: list[str], directory: Path, unit: Unit) -> str:
    """The reduced log of a successful compile (its warnings). Raises BuildFailure or ToolchainError."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(directory), "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    full = done.stderr.decode("utf-8", "replace")
    own = {SOURCE_NAME, _END_NAME, *(_line_name(expression) for expression in unit.kernels)}
    log = _tidied(reduce_log(full, own, _SYSTEM_DIRS), full, unit)
    if done.returncode == 0:
        return remarks.remark_lines(full, SOURCE_NAME) if _EXPLAINED[0] in command else log
    _check_toolchain(full)
    log = log or other_tools_words(full, SOURCE_NAME)
    raise BuildFailure(_headline(log), log=log)


def _tidied(log: str, full: str, unit: Unit) -> str:
    """``log`` with one error per kernel expression (the launcher's template noise goes) and the linker's complaints."""
    kept: list[str] = []
    complained: set[str] = set()
    for line in log.splitlines():
        names = [name for name in map(_line_name, unit.kernels) if line.startswith(f"{name}:")]
        if names and (names[0] in complained or "error: " not in line):
            continue
        if names:
            complained.add(names[0])
            reason = "not a function" if "__forge_bare" in line else line.partition("error: ")[2]
            line = f"{names[0]}: error: {reason}"
        kept.append(line)
    missing = dict.fromkeys(re.findall(r"undefined reference to [`'].{1,200}?'", full))
    return "\n".join([*kept, *(f"{SOURCE_NAME}: error: {text}" for text in missing)])


def _headline(log: str) -> str:
    lines = log.splitlines()
    told = next((line for line in lines if "error: " in line.lower()), lines[0] if lines else "")
    return f"g++ refused the source: {told}" if told else "g++ refused the source"


def _check_toolchain(log: str) -> None:
    """Raises ToolchainError where the compiler is incomplete: no candidate could do better.

    Only the tools' own lines count: a candidate's ``#error`` must not pass for a broken machine.
    """
    for line in log.splitlines():
        if _TOOL_LINE.match(line) and (match := _BROKEN_TOOL.search(line)):
            raise ToolchainError(
                f"g++ cannot work here: {match.group(0)}",
                expected="a complete g++ with OpenMP and room for its temporary files",
                remedy="`apt-get install g++ libgomp1`, or free some disk space",
            )


def _kernels(code: bytes, unit: Unit) -> tuple[KernelInfo, ...]:
    symbols = describers_in(code)
    kernels = []
    for index, expression in enumerate(unit.kernels):
        if index not in symbols:
            raise BuildFailure(f'the parameter types of kernel "{expression}" are not in the binary')
        params = parameter_types(symbols[index], expression)
        kernels.append(KernelInfo(expression, f"__forge_launch_{index}", params, KernelResources(expression)))
    return tuple(kernels)


def _compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        raise ToolchainError(
            "g++ is not on PATH", expected="GNU C++ 9 or newer", remedy="install it, e.g. `apt-get install g++`"
        )
    return path


def _query(*arguments: str) -> str:
    done = subprocess.run(
        [_compiler(), *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        raise ToolchainError(f"g++ {' '.join(arguments)} failed: {done.stderr.strip()[:500]}", expected="a working g++")
    return done.stdout


@functools.lru_cache(maxsize=1)
def _compiler_version() -> str:
    return _query("--version").splitlines()[0]


@functools.lru_cache(maxsize=1)
def _native_target() -> str:
    return _query("-march=native", "-Q", "--help=target")


@dataclass(frozen=True)
class Place:
    """Where an instruction comes from. ``line`` of kernel.cpp, and ``outer_line``, where the function that holds it was
    inlined, if it was; None for one of another file. ``instruction``: its text, "" where it could not be had.
    ``vectors``: one of the few instructions around it works on several elements at a time."""

    line: int | None = None
    outer_line: int | None = None
    instruction: str = ""
    vectors: bool = False


def places(code: bytes, offsets: Sequence[int]) -> list[Place]:
    """The places of instructions of a shared object with line numbers, by their offsets in the file; empty ones where
    binutils (addr2line, objdump) are missing or fail."""
    with tempfile.TemporaryDirectory(prefix="forge-cpp-") as name:
        file = Path(name) / "unit.so"
        file.write_bytes(code)
        # The text of a shared object lies at its offset; -a prints each address before what belongs to it.
        asked = "".join(f"{offset:#x}\n" for offset in offsets)
        blocks = re.split(r"^0x[0-9a-f]+$", _binutil("addr2line", "-a", "-i", "-e", str(file), asked=asked), flags=re.M)
        listing = _binutil("objdump", "-d", "--no-show-raw-insn", str(file)) if len(code) <= _MOST_LISTED_BYTES else ""
    code_at = {int(match[1], 16): match[2] for match in re.finditer(r"^\s*([0-9a-f]+):\t(.+)$", listing, re.M)}
    packed = [_PACKED.match(text) is not None for text in code_at.values()]
    wanted = set(offsets)
    near = {
        offset: any(packed[max(0, index - _AROUND) : index + _AROUND + 1])
        for index, offset in enumerate(code_at)
        if offset in wanted
    }
    lines = [_own_lines(block) for block in blocks[1:]]
    if len(lines) != len(offsets):
        lines = [[]] * len(offsets)
    return [
        Place(
            own[0] if own else None,
            own[-1] if own else None,
            " ".join(code_at.get(offset, "").split())[:_MOST_INSTRUCTION_CHARS],
            near.get(offset, False),
        )
        for own, offset in zip(lines, offsets, strict=True)
    ]


def _binutil(name: str, *arguments: str, asked: str = "") -> str:
    """What one of the tools that come with g++ prints; nothing where it is missing or fails."""
    program = shutil.which(name)
    if program is None:
        return ""
    done = subprocess.run(
        [program, *arguments], input=asked, capture_output=True, text=True, errors="replace", check=False
    )
    return done.stdout if done.returncode == 0 else ""


def _own_lines(block: str) -> list[int]:
    """Of the places that an instruction was inlined from, innermost first, those in kernel.cpp."""
    return [int(line) for line in re.findall(rf"(?:^|/){re.escape(SOURCE_NAME)}:([1-9]\d*)", block, re.M)]
