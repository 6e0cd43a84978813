"""The compiler flags that an extension may ask for: those that tune the code, and no others.

g++ and nvcc have flags that start other programs (``-wrapper``, ``-fplugin=``, ``-B``, ``-ccbin``) or take in files of
the flag's choice (``-specs=``, ``@file``). Builds are sandboxed here, but production runs the same flags without. Both
compilers have several spellings of many flags, so what is allowed is listed, not what is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from pytest_cudaforge.errors import BuildFailure

__all__ = ["check"]

_EXPECTED = (
    "flags that tune the code: -O3, -ffast-math, -march=native, -fopenmp, -std=, -D, -I, -L, -l, -W warnings, and of "
    "nvcc -arch, -gencode, -lineinfo, --use_fast_math, --maxrregcount, --expt-*, -Xcompiler and -Xptxas with such flags"
)
#: Flags of ``-f`` that load a plugin, start a program, hand options to another compiler or read and write other files.
_NO_TUNING = r"plugin|offload(?!=(?:disable|default)$)|modules?-|compare-debug|dump-|(?:auto-)?profile|pch-"
_HOST = re.compile(
    rf"-O\w*|-g[\w-]*|--?std=[\w+]+|-[DU].+|-I.+|-L.+|-l(?!ib$|ink$|dir\b|ib-|ibdevice)[\w.+:-]+|-i(?:system|quote|dirafter).+"
    rf"|-m[\w=.,+-]+|-f(?!{_NO_TUNING}).*|-W(?![lap],)[\w=+,-]*|-w|-s|-v|-pthreads?|-pedantic(?:-errors)?|-ansi|-pipe"
    r"|-rdynamic|-shared|-static-lib(?:gcc|stdc\+\+)|-no-pie|--param=[\w-]+=\w+"
)
_HOST_VALUED = frozenset(("-D", "-U", "-I", "-L", "-l", "-isystem", "-iquote", "-idirafter", "-include", "--param"))
_LIBRARY_FILE = re.compile(r"[^@-].*\.(?:so(?:\.\d+)*|a)", re.S)
_LINKER = re.compile(
    r"--?(?:no-)?(?:as-needed|whole-archive|undefined|allow-shlib-undefined|gc-sections|export-dynamic|relax|demangle)"
    r"|--?(?:start-group|end-group|strip-all|strip-debug|enable-new-dtags|disable-new-dtags|push-state|pop-state)"
    r"|--?(?:build-id|hash-style|unresolved-symbols|exclude-libs|icf|rpath|rpath-link|soname|sort-common)(?:=[^@]*)?"
    r"|-B(?:symbolic|symbolic-functions|static|dynamic)|-O\d?|-[sSE()]|-z[\w=-]+|-l[\w.+:-]+|-L.+"
)
_LINKER_VALUED = frozenset(
    ("-rpath", "--rpath", "-rpath-link", "--rpath-link", "--exclude-libs", "-z", "-soname", "-h", "-L", "-l")
)
#: Of nvcc, without dashes; each may go with one or two, and its value with "=" or in a word of its own.
_NVCC_VALUED = frozenset(
    (
        *("arch", "gpu-architecture", "code", "gpu-code", "gencode", "generate-code", "std", "maxrregcount", "rdc"),
        *("relocatable-device-code", "t", "threads", "split-compile", "default-stream", "cudart", "ftz", "prec-div"),
        *("prec-sqrt", "fmad", "optimize", "machine", "m", "diag-suppress", "diag-warn", "diag-error", "Werror"),
        *("define-macro", "undefine-macro", "include-path", "system-include", "pre-include", "library", "library-path"),
        *("compress-mode", "split-compile-extended", "static-global-template-stub", "Ofast-compile", "Ofc"),
    )
)
_NVCC_PLAIN = re.compile(
    r"--?(?:lineinfo|generate-line-info|G|device-debug|debug|use[_-]fast[_-]math|extra-device-vectorization|expt-[\w-]+"
    r"|extended-lambda|restrict|res-usage|resource-usage|dlto|dlink-time-opt|disable-warnings|src-in-ptx|source-in-ptx"
    r"|verbose|forward-unknown-to-host-(?:compiler|linker)|forward-unknown-opts|allow-unsupported-compiler|minimal"
    r"|keep|save-temps|time|no-compress|no-exceptions|Wno-[\w-]+|Wreorder|Wdefault-stream-launch"
    r"|Wmissing-launch-bounds|Wext-lambda-captures-this|display-error-number|no-display-error-number|err-no"
    r"|(?:ftz|prec-div|prec-sqrt|fmad)=\w+)(?:=\w+)?"
)
_NVCC_NESTED = re.compile(
    r"--?(?P<tool>Xcompiler|compiler-options|Xlinker|linker-options|Xptxas|ptxas-options|Xcudafe|Xnvlink"
    r"|nvlink-options|Xfatbin|fatbin-options)(?:=(?P<value>.*))?",
    re.S,
)
#: Of ptxas and the like: switches and words, no paths and no files of options.
_DEVICE_TOOL = re.compile(r"(?!-+(?:optf|options-file|o|output-file)\b)-{0,2}[A-Za-z][\w-]*(?:=[\w.+:-]*)?|\d+")

_Refused = Iterator[str]


def check(name: str, cflags: Sequence[str], cuda_cflags: Sequence[str], ldflags: Sequence[str]) -> None:
    """Raises BuildFailure that names the first flag of extension ``name`` that does not tune its code."""
    for flags, refused in ((cflags, _host), (cuda_cflags, _nvcc), (ldflags, _link)):
        for word in refused(_words(flags)):
            raise BuildFailure(
                f"extension {name}: the compiler flag {word[:200]!r} is none that tunes the code; flags that make the "
                "compiler run other programs or read other files are refused",
                expected=_EXPECTED,
                remedy="leave it out",
            )


def _words(flags: Sequence[str]) -> list[str]:
    try:
        return [word for flag in flags for word in shlex.split(flag)]
    except ValueError as error:
        raise BuildFailure(f"the flags {' '.join(flags)[:200]!r} cannot be read: {error}") from None


def _host(words: Sequence[str], files: re.Pattern[str] | None = None) -> _Refused:
    rest = iter(words)
    linker: list[str] = []  # a flag of its own may be in one word and its value in the next
    for word in rest:
        if word in _HOST_VALUED:
            yield from _value(word, next(rest, ""))
        elif files is not None and files.fullmatch(word):
            continue
        elif word.startswith("-Wl,"):
            linker += word.split(",")[1:]
        elif word == "-Xlinker":
            linker.append(next(rest, ""))
        elif word == "-Xpreprocessor":  # an idiom of macOS
            yield from _named(word, _matching(re.compile("-fopenmp"), [next(rest, "")]))
        elif not _HOST.fullmatch(word) or "\n" in word:
            yield word
    yield from (f"-Wl,{word}" for word in _linker(linker))


def _link(words: Sequence[str]) -> _Refused:
    return _host(words, _LIBRARY_FILE)


def _linker(words: Sequence[str]) -> _Refused:
    rest = iter(words)
    for word in rest:
        if word in _LINKER_VALUED:
            yield from _value(word, next(rest, ""))
        elif not _LINKER.fullmatch(word):
            yield word


def _nvcc(words: Sequence[str]) -> _Refused:
    rest = iter(words)
    for word in rest:
        name, equals, value = word.lstrip("-").partition("=")
        nested = _NVCC_NESTED.fullmatch(word)
        if nested:
            given = nested["value"] if nested["value"] is not None else next(rest, "")
            yield from _named(word, _inner(nested["tool"])(re.split(r"[,\s]+", given.strip())))
        elif word.startswith("-") and name in _NVCC_VALUED:
            yield from _value(word, value if equals else next(rest, ""))
        elif not _NVCC_PLAIN.fullmatch(word):
            # A value may be the next word; the host compiler's own flags go by nvcc's name or are forwarded.
            following = [next(rest, "")] if word in _HOST_VALUED else []
            yield from _host([word, *following])


def _inner(tool: str) -> Callable[[Sequence[str]], _Refused]:
    if tool in ("Xcompiler", "compiler-options"):
        return _host
    if tool in ("Xlinker", "linker-options"):
        return _linker
    return lambda words: _matching(_DEVICE_TOOL, words)


def _matching(pattern: re.Pattern[str], words: Sequence[str]) -> _Refused:
    return (word for word in words if not pattern.fullmatch(word))


def _value(flag: str, value: str) -> _Refused:
    """Every tool puts a file's content in the place of a word that begins with @; where one takes no value after all,
    the next word is a flag."""
    if not value or value.startswith(("@", "-")):
        yield f"{flag} {value}".strip()


def _named(flag: str, refused: _Refused) -> _Refused:
    """Those of an inner tool, with the flag that hands them on."""
    return (flag if word in flag else f"{flag} {word}" for word in refused)
