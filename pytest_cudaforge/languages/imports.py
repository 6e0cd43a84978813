"""What a shared object asks of the dynamic loader. Native code is verified in a process that holds libc, libm,
libstdc++ and libgomp, and runs in production beside torch: it must not find there what it did not bring.

Standard library only; read from the bytes that the compiler left, as the loader reads them, so no source text hides
a name: the relocations say which symbols are bound. A symbol that the link found in no library can only be weak.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pytest_cudaforge.errors import BuildFailure

__all__ = ["Import", "check", "check_extension", "computes", "imports"]

_MAGIC = b"\x7fELF\x02\x01"
#: Type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment of a segment.
_SEGMENT = struct.Struct("<IIQQQQQQ")
_LOADED, _DYNAMIC = 1, 2
_ENTRY = struct.Struct("<QQ")
#: The tag of how many bytes of addresses are called as a library is unloaded: the compiler has one of its own.
_UNLOADED, _COMPILERS_OWN = 28, 8
_STRINGS, _SYMBOLS = 5, 6
#: Tables of relocations: the tags of their address and size, and an entry's bytes; the symbol's number is in its info.
_RELOCATIONS = ((7, 8, 24), (17, 18, 16), (23, 2, 24))
#: Name, info, visibility, section, value, size of a symbol; section 0: it is another library's.
_SYMBOL = struct.Struct("<IBBHQQ")
_WEAK = 2

#: Functions and tables of the dynamic loader's, by which one finds any other library's functions.
_LOADER = re.compile(r"dl[a-z]\w*|dl_\w+|_+(?:libc_)?dl_?\w+|_rtld_global\w*|_r_debug\w*")
#: What tells one moment, one process and one machine from another. A kernel's answers follow from its inputs.
_CLOCKS = re.compile(
    r"clock(?:_gettime|_getres)?|gettimeofday|times?|ftime|timespec_get|getrusage|omp_get_wti(?:me|ck)"
    r"|_ZNSt6chrono\w*clock3nowEv"
)
_WHO = re.compile(
    r"get(?:p?pid|tid|pgid|pgrp|sid|e?[ug]id|login(?:_r)?|hostname|auxval)|uname|sysinfo|syscall|prctl|personality"
    r"|(?:secure_)?getenv|_*environ|program_invocation\w*|__progname\w*|f?open(?:at|dir)?(?:64)?|freopen(?:64)?|f?access(?:at)?|_*f?l?x?stat\w*|readlink(?:at)?"
    r"|_ZNSt1[34]basic_(?:filebuf|i?o?fstream)\w+|_ZNSt10filesystem\w+"
    r"|socket|connect|popen|system|v?fork|exec[lv]\w*|posix_spawnp?"
)
_ALLOCATOR = re.compile(r"(?:__libc_)?mallopt")
#: at::cpu::OPERATOR, at::native::KERNEL and the like, at::_ops::OPERATOR::redispatch and at::redispatch::OPERATOR,
#: mangled, the C interface to the first, and the dispatcher itself, which gives anything away.
_PAST_DISPATCH = re.compile(
    r"_ZN2at(?:3cpu\d|6native\d|\d+composite[a-z]+\d|4_ops\w+10redispatchE|10redispatch\d)\w*|aoti_torch_cpu_\w+"
    r"|_ZN3c1010Dispatcher(?:13realSingleton|\d+find)\w+"
)
#: What turns off, or takes away, those that look on as operators run.
_ONLOOKERS = re.compile(
    r"_ZN2at\d+(?:enableRecordFunction|set_record_function_tls_|clear\w*Callbacks|(?:remove|disable)Callback)E\w+"
    r"|_ZN5torch(?:8autograd)?8profiler\w*\d(?:disable|enable)Profiler\w*"
)
#: What ends a process before it has ended as it would: its exit status then says nothing of what it did.
_ENDING = re.compile(r"_exit|_Exit|quick_exit")
#: Libraries that compute on a CPU and lie in torch's own, or beside it: BLAS and LAPACK by their Fortran names, MKL's
#: vector functions, oneDNN, FBGEMM and the like.
_COMPUTING = re.compile(
    r"(?i:cblas|lapacke?|mkl|dnnl|openblas|xnn|nnp)_\w+|_ZNK?(?:4dnnl|6fbgemm)\w+|vm?[sdcz][A-Z]\w+"
    r"|(?i:[sdcz](?:gemm\w?|gemv|symm|hemm|symv|syr2?k|her2?k|syr|trmm|trsm|trmv|trsv|ger[uc]?|dot[uc]?|axpy|scal|copy"
    r"|nrm2|asum|getr[fsi]|potr[fsi]|geqrf|gesv|gesvd|gesdd|gels\w?|geev|syevd?|heevd?)_?)"
)
#: What g++ has in every shared object, and what libgcc and old C libraries leave open for programs without threads.
_EVERYBODYS = re.compile(
    r"__gmon_start__|_ITM_\w+|_Jv_RegisterClasses|__cxa_\w+|__(?:de)?register_frame_info|_*pthread_\w+|sched_yield"
)


@dataclass(frozen=True)
class Import:
    """A symbol of another library's. ``weak``: it is null where no library has it."""

    name: str
    weak: bool


def imports(code: bytes) -> tuple[Import, ...]:
    """Every symbol of others that the loader binds for a shared object, once. Raises BuildFailure for anything that is
    no such file."""
    try:
        return tuple(dict.fromkeys(_imports(code)))
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise BuildFailure(f"the library cannot be read: {error}", expected="a 64-bit ELF file") from None


def _loaders(code: bytes) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    """The segments, and what the dynamic loader is told, by tag."""
    if code[:6] != _MAGIC:
        raise ValueError("it does not begin as an ELF file does")
    (table,) = struct.unpack_from("<Q", code, 0x20)
    step, count = struct.unpack_from("<HH", code, 0x36)
    segments = [_SEGMENT.unpack_from(code, table + index * step) for index in range(count)]
    tags: dict[int, int] = {}
    for kind, _, offset, _, _, nbytes, *_ in segments:
        if kind == _DYNAMIC:
            tags |= _tags(_part(code, offset, nbytes))
    return segments, tags


def _check_unloading(code: bytes) -> None:
    """Raises BuildFailure for functions that run as a process ends (``__attribute__((destructor))``), when no check
    sees it. ``code``: what :func:`imports` could read."""
    if _loaders(code)[1].get(_UNLOADED, 0) > _COMPILERS_OWN:
        raise BuildFailure(
            "the library runs code of its own as it is unloaded, when its process ends (a destructor function)",
            expected="a library that does nothing unless it is called",
            remedy="take the destructor out; free in the call what a call allocates",
        )


def _imports(code: bytes) -> Iterator[Import]:
    segments, tags = _loaders(code)

    def place(address: int) -> int:
        for kind, _, offset, start, _, nbytes, *_ in segments:
            if kind == _LOADED and start <= address < start + nbytes:
                return int(offset + address - start)
        raise ValueError(f"nothing lies at {address:#x}")

    numbers: dict[int, None] = {}
    for at, nbytes, entry in _RELOCATIONS:
        if tags.get(nbytes):
            start = place(tags[at])
            infos = _part(code, start, tags[nbytes])
            numbers |= dict.fromkeys(info >> 32 for (info,) in struct.Struct(f"<8xQ{entry - 16}x").iter_unpack(infos))
    if not tags:
        raise ValueError("it has nothing for the dynamic loader")
    symbols, names = (place(tags.get(tag, 0)) if numbers else 0 for tag in (_SYMBOLS, _STRINGS))
    for number in numbers:
        name, info, _, section, *_ = _SYMBOL.unpack_from(code, symbols + number * _SYMBOL.size)
        if number and not section:
            start = names + name
            yield Import(code[start : code.index(b"\0", start)].decode("utf-8", "replace"), info >> 4 == _WEAK)


def _part(code: bytes, start: int, nbytes: int) -> bytes:
    if start + nbytes > len(code):
        raise ValueError("it ends too early")
    return code[start : start + nbytes]


def _tags(table: bytes) -> Iterator[tuple[int, int]]:
    """What the loader is told, up to the entry that ends it."""
    return itertools.takewhile(lambda entry: entry[0], _ENTRY.iter_unpack(table))


@dataclass(frozen=True)
class _Refused:
    """What no library may import. ``told``: with the names in the place of ``{}``."""

    refuses: Callable[[Import], object]
    told: str
    expected: str
    remedy: str


_ELSEWHERE = "it may answer otherwise where it runs than where it is verified"
_ARGUMENTS = "a kernel whose answers follow from its arguments alone"
_TOLD_ENOUGH = "take the call out; a launch's arguments and constants tell a kernel all that it needs"
_REFUSED = (
    _Refused(
        lambda one: _LOADER.fullmatch(one.name),
        "the kernel uses {}: with them it finds other code where it runs than where it is verified",
        "a kernel that computes with what it brings, libc, libm, libstdc++ and OpenMP",
        "take them out; plan.py calls torch's operators with op(), where the target allows it",
    ),
    _Refused(
        lambda one: one.weak and not _EVERYBODYS.fullmatch(one.name),
        "the kernel declares {} weak and defines it nowhere: it is there in some processes and null in others, so what "
        "is verified need not be what runs",
        "functions that the source defines, or that libc, libm, libstdc++ or OpenMP have",
        "define it, or take it out",
    ),
    _Refused(
        lambda one: _CLOCKS.fullmatch(one.name),
        f"the kernel asks for the time with {{}}: {_ELSEWHERE}",
        _ARGUMENTS,
        _TOLD_ENOUGH,
    ),
    _Refused(
        lambda one: _WHO.fullmatch(one.name),
        f"the kernel asks for its process, its machine or files with {{}}: {_ELSEWHERE}",
        _ARGUMENTS,
        _TOLD_ENOUGH,
    ),
    _Refused(
        lambda one: _ALLOCATOR.fullmatch(one.name),
        "the kernel calls {}, which changes the allocator of the whole process",
        "a kernel that leaves its caller's process as it is",
        "take the call out; plan.py's empty() gives scratch memory",
    ),
)


def check(code: bytes) -> None:
    """Raises BuildFailure where a kernel's library looks for code that it did not bring, asks for what tells one moment
    or process from another, or turns the allocator of the whole process to its liking."""
    found = imports(code)
    for rule in _REFUSED:
        names = [one.name for one in found if rule.refuses(one)]
        if names:
            raise BuildFailure(rule.told.format(_listed(names)), expected=rule.expected, remedy=rule.remedy)
    _check_unloading(code)


@dataclass(frozen=True)
class _Hidden:
    """What no profiler sees of an extension: which imports, in which words."""

    names: re.Pattern[str]
    told: str
    expected: str


_CALLED = "call torch's operators as everybody does; the target's allow says what may run beside own kernels"
_HIDDEN = (
    _Hidden(
        _PAST_DISPATCH,
        "the extension calls torch's operators past the dispatcher, where no profiler sees them: {}",
        "at::add(...), and not at::cpu::add(...), at::native::..., redispatch(...) or c10::Dispatcher",
    ),
    _Hidden(
        re.compile(rf"(?!dladdr)(?:{_LOADER.pattern})"),
        "the extension looks for other libraries' functions as it runs, where nobody sees which: {}",
        "functions that the linker finds: extra_ldflags=['-lcublas']",
    ),
    _Hidden(
        _ONLOOKERS,
        "the extension turns off what sees torch's operators run: {}",
        "an extension that leaves torch's profilers alone",
    ),
    _Hidden(
        _ENDING,
        "the extension can end its process at once, whose exit status is not its own: {}",
        "TORCH_CHECK(...), which raises",
    ),
    _Hidden(
        _COMPUTING,
        "the extension calls a library that lies in torch's own, where no profiler sees it: {}",
        "code of its own, or at::mm(...) and the like, which count as a library's work",
    ),
)


def check_extension(code: bytes) -> None:
    """Raises BuildFailure where an extension calls torch's operators past the dispatcher, or libraries past torch, or
    turns off who looks on: what they do would count as its own work."""
    found = imports(code)
    for hidden in _HIDDEN:
        names = [one.name for one in found if hidden.names.fullmatch(one.name)]
        if names:
            raise BuildFailure(hidden.told.format(_listed(names)), expected=hidden.expected, remedy=_CALLED)
    _check_unloading(code)


def computes(name: str) -> bool:
    """Is a function of this name a library's that computes, or an operator's past the dispatcher?"""
    return bool(_COMPUTING.fullmatch(name) or _PAST_DISPATCH.fullmatch(name))


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in sorted(names)[:4])
    return "".join(char if char.isprintable() else "?" for char in shown)
