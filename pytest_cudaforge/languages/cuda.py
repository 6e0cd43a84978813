"""``cuda``: CUDA C++ to a cubin through NVRTC, in the process and in well under a second; no nvcc, no GPU needed.

Kernels are named by C++ expressions, which NVRTC instantiates and lowers; parameter types come from the lowered name of
a describer (:mod:`languages.symbols`); registers, shared memory and spills from ptxas's report in the same compile.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_cudaforge.errors import BuildFailure, ToolchainError
from pytest_cudaforge.facts import KernelResources
from pytest_cudaforge.languages import cubin
from pytest_cudaforge.languages.binary import Binary, KernelInfo, Unit
from pytest_cudaforge.languages.cpp import check_unit, macro_value
from pytest_cudaforge.languages.logs import reduce_log
from pytest_cudaforge.languages.renaming import Renaming, clashing
from pytest_cudaforge.languages.symbols import DESCRIBER, describer_expression, parameter_types

SOURCE_NAME = "kernel.cu"
#: ``-default-device``: a helper function without ``__device__`` is one, as a kernel's file holds nothing for the host.
FLAGS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v", "--no-display-error-number")
#: What nvcc's implicit ``cuda_runtime.h`` gives every kernel and NVRTC does not.
_PROLOGUE = (
    DESCRIBER
    + """\
template <int __forge_i, class __forge_f> __device__ char __forge_type;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
"""
)
_SHIM_DIR = Path(__file__).parent / "nvrtc_headers"
_ARCH = re.compile(r"sm_(\d{2,3})[af]?")
_INSTALL = 'install the extra: `pip install "pytest-cudaforge[cuda]"`'

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for '?([^'\s]+)'?")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class CudaLanguage:
    """NVRTC from its wheel; ``arch`` is the device's, e.g. "sm_90"."""

    name = "cuda"
    source_name = SOURCE_NAME
    file_names = (SOURCE_NAME, "plan.py")

    def availability(self) -> str:
        """ "" where NVRTC and its headers are here and match torch's CUDA, else the reason with its remedy."""
        try:
            version = nvrtc_version()
            _include_dirs()
        except ToolchainError as error:
            return str(error)
        wanted = torch_cuda_major()
        if wanted is not None and wanted != version[0]:
            return str(
                ToolchainError(
                    f"NVRTC is of CUDA {version[0]}, torch was built for CUDA {wanted}",
                    expected="the same major version",
                    remedy=f'`pip install "cuda-bindings=={wanted}.*"` and the matching nvidia-cuda-* wheels',
                )
            )
        return ""

    def fingerprint(self, arch: str) -> str:
        """Digest of NVRTC, flags and headers. Raises ToolchainError where NVRTC or its headers are missing."""
        major, minor = nvrtc_version()
        parts = ["cuda", f"{major}.{minor}", _library_identity(), compile_arch(arch), _PROLOGUE, *FLAGS]
        digest = hashlib.sha256("\0".join(parts).encode())
        digest.update(_headers_digest())
        return digest.hexdigest()

    def compile(self, source: str, unit: Unit, arch: str, *, lineinfo: bool = False) -> Binary:
        """Compile ``source`` into a cubin. Raises BuildFailure with the reduced log, or ToolchainError."""
        check_unit(source, unit)
        options = _options(compile_arch(arch), lineinfo)
        renaming = Renaming()
        try:
            code, log, lowered = _compile_unit(source, unit, options, renaming)
        except BuildFailure as failure:
            renaming = clashing(failure.log, unit.kernels)
            if not renaming.names:
                raise
            try:
                code, log, lowered = _compile_unit(source, unit, options, renaming)
            except BuildFailure:
                raise failure from None
        if any("malloc" in name for name in cubin.undefined(code)):
            raise BuildFailure(
                "a kernel takes memory from the device's heap (malloc or new), of which all of a process's have 8 MiB",
                expected="buffers that plan.py asks for: empty() or zeros()",
            )
        usage = resources_in(log)
        kernels = []
        for index, expression in enumerate(unit.kernels):
            symbol, describer = lowered[2 * index], lowered[2 * index + 1]
            resources = usage.get(symbol, KernelResources(expression))
            params = parameter_types(describer, expression)
            kernels.append(KernelInfo(expression, symbol, params, _renamed(resources, expression)))
        return Binary(self.name, arch, unit.constants, code, tuple(kernels), renaming.restore(_reduced(log)))


def _compile_unit(source: str, unit: Unit, options: list[bytes], renaming: Renaming) -> tuple[bytes, str, list[str]]:
    """(cubin, log, lowered names of each kernel and its describer). Raises BuildFailure."""
    names: list[str] = []
    for index, expression in enumerate(map(renaming.apply, unit.kernels)):
        names += [expression, "&" + describer_expression(index, expression)]
    return _compile(_unit_text(source, unit, renaming), names, options)


def compile_arch(arch: str) -> str:
    """What NVRTC compiles for: from compute capability 9.0 on, the architecture's own instructions are let in
    (``sm_90a``: wgmma, setmaxnreg). Such code runs on that capability alone; a forged kernel is for it alone anyway.

    Raises ToolchainError for a name that is no architecture, or one this NVRTC does not know.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ToolchainError(f"{arch!r} is no CUDA architecture", expected="a name such as sm_80 or sm_90")
    number = int(match.group(1))
    known = _supported_archs()
    if number not in known:
        raise ToolchainError(f"this NVRTC cannot compile for {arch}", expected=f"one of {', '.join(known.values())}")
    return f"{arch}a" if number >= 90 and arch[-1] not in "af" else arch


def resources_in(log: str) -> dict[str, KernelResources]:
    """Registers, static shared, local and spill bytes by symbol, from ptxas's verbose report."""
    found: dict[str, KernelResources] = {}
    symbol, local, spill = "", 0, 0
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            symbol, local, spill = match.group(1), 0, 0
        elif (match := _SPILLS.search(line)) and symbol:
            local, spill = int(match.group(1)), int(match.group(2)) + int(match.group(3))
        elif (match := _USED.search(line)) and symbol:
            shared = _SHARED.search(line)
            shared_bytes = int(shared.group(1)) if shared else 0
            found[symbol] = KernelResources(symbol, int(match.group(1)), shared_bytes, local, spill)
            symbol = ""
    return found


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that is loaded. Raises ToolchainError where there is none."""
    nvrtc = _nvrtc()
    try:
        result, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda.bindings raises it where libnvrtc cannot be loaded
        raise _unloadable(error) from None
    _check(nvrtc, result, "its version")
    return int(major), int(minor)


@functools.lru_cache(maxsize=1)
def torch_cuda_major() -> int | None:
    """The CUDA major version torch was built for, read from its files without importing it; None for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.", text, re.MULTILINE)
    return int(match.group(1)) if match else None


def _renamed(resources: KernelResources, expression: str) -> KernelResources:
    return KernelResources(
        expression,
        resources.registers,
        resources.static_shared_bytes,
        resources.local_bytes,
        resources.spill_bytes,
        resources.max_threads,
    )


def _unit_text(source: str, unit: Unit, renaming: Renaming) -> str:
    """The candidate's file behind our prologue, under its own line numbers.

    Constants are written here instead of being ``-D`` options, which would reach into NVRTC's built-in declarations
    (``-DT=4`` breaks their templates).
    """
    macros = "".join(f"#undef {name}\n#define {name} {macro_value(value)}\n" for name, value in unit.constants)
    return f'{_PROLOGUE}{macros}{renaming.macros}#line 1 "{SOURCE_NAME}"\n{source}\n'


def _options(arch: str, lineinfo: bool) -> list[bytes]:
    options = [*FLAGS, f"--gpu-architecture={arch}"]
    if nvrtc_version() >= (13, 0):
        # Beside a driver NVRTC keeps a cache of its own in the user's home: a hit has no log, so no warnings and no
        # registers, and another process may have written it.
        options.append("--no-cache")
    options += [f"--include-path={directory}" for directory in _include_dirs()]
    if lineinfo:
        options.append("--generate-line-info")
    return [option.encode() for option in options]


def _compile(source: str, names: list[str], options: list[bytes]) -> tuple[bytes, str, list[str]]:
    """(cubin, log, lowered names). Raises BuildFailure."""
    nvrtc = _nvrtc()
    result, program = nvrtc.nvrtcCreateProgram(source.encode(), SOURCE_NAME.encode(), 0, [], [])
    _check(nvrtc, result, "a program")
    try:
        for name in names:
            _check(nvrtc, nvrtc.nvrtcAddNameExpression(program, name.encode())[0], f"the name {name}")
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc, program)
        if result == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            reduced = _reduced(log)
            raise BuildFailure(_headline(reduced), log=reduced)
        _check(nvrtc, result, f"the compilation ({log.strip()[:300]})")
        lowered = []
        for name in names:
            result, symbol = nvrtc.nvrtcGetLoweredName(program, name.encode())
            if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise BuildFailure(f'kernel "{name}" names nothing in the source', log=_reduced(log))
            lowered.append(symbol.decode())
        return _cubin(nvrtc, program), log, lowered
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: Any, program: Any) -> str:
    result, size = nvrtc.nvrtcGetProgramLogSize(program)
    _check(nvrtc, result, "the log's size")
    if size <= 1:
        # NVRTC writes into the bytes it is given, and Python has one shared object for every one-byte string: an empty
        # log's final zero would turn every b" " of this process (print's separator, say) into a zero byte.
        return ""
    log: bytes = b" " * size
    _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, log)[0], "the log")
    # ptxas's part begins after a zero byte.
    return str(log.replace(b"\0", b"\n").decode("utf-8", "replace")).strip()


def _cubin(nvrtc: Any, program: Any) -> bytes:
    result, size = nvrtc.nvrtcGetCUBINSize(program)
    _check(nvrtc, result, "the cubin's size")
    code: bytes = b" " * size
    _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, code)[0], "the cubin")
    return code


_DESCRIBER_TEXT = re.compile(r"&__forge_type<\d+, __forge_bare<decltype\((.*)\)>::__forge_args>")


def _reduced(log: str) -> str:
    """The log about kernel.cu and the kernel expressions; ptxas's own report goes (it is in the resources)."""
    lines = []
    for line in log.splitlines():
        if line.startswith(("ptxas info", "ptxas         .")):
            continue
        lines.append(line)
    text = reduce_log("\n".join(lines), {SOURCE_NAME, "__nv_name_map"}, [str(path) for path in _include_dirs()])
    return _named(text)


def _named(log: str) -> str:
    """One complaint per kernel expression, in the plan's words instead of NVRTC's name map."""
    kept: list[str] = []
    complained: set[str] = set()
    complaint, in_map = "", False
    for line in log.splitlines():
        if line.startswith("__nv_name_map("):
            complaint, in_map = line.partition("error: ")[2], True
        elif not line.startswith(" "):
            in_map = False
        if not in_map:
            kept.append(line)
        elif "#pragma nv_mangled_name" in line:
            expression = _DESCRIBER_TEXT.sub(r"\1", line.partition("#pragma nv_mangled_name ")[2]).strip()
            if expression not in complained:
                complained.add(expression)
                reason = "not a function" if "__forge_bare" in complaint else complaint
                kept.append(f"kernel {expression}: error: {reason}")
    return "\n".join(kept)


def _headline(log: str) -> str:
    for line in log.splitlines():
        if "error" in line or "fatal" in line:
            return f"NVRTC refused the source: {line.strip()}"
    return "NVRTC refused the source"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(f"NVRTC is not here: {error}", expected="cuda-bindings", remedy=_INSTALL) from None
    return nvrtc


def _unloadable(error: RuntimeError) -> ToolchainError:
    lines = str(error).splitlines() or [""]
    return ToolchainError(f"NVRTC cannot be loaded: {lines[0]}", remedy=_INSTALL)


def _check(nvrtc: Any, result: Any, what: str) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(f"NVRTC failed at {what}: {result.name}", expected="a working NVRTC", remedy=_INSTALL)


@functools.lru_cache(maxsize=1)
def _supported_archs() -> dict[int, str]:
    nvrtc = _nvrtc()
    try:
        result, archs = nvrtc.nvrtcGetSupportedArchs()
    except RuntimeError as error:
        raise _unloadable(error) from None
    _check(nvrtc, result, "its architectures")
    return {int(number): f"sm_{number}" for number in archs}


@functools.lru_cache(maxsize=1)
def _include_dirs() -> tuple[Path, ...]:
    """Our stand-ins for the C library, CUDA's headers, CCCL. Raises ToolchainError without CUDA's.

    ``crt/`` comes from a wheel of its own: a place that has it (``mma.h`` needs it) is preferred to one that does not.
    """
    places = _header_places("cudart")
    runtime = _first_with(places, "cuda_fp16.h", "crt/mma.h") or _first_with(places, "cuda_fp16.h")
    if runtime is None:
        raise ToolchainError(
            "CUDA's headers (cuda_fp16.h) are not here",
            expected="the wheels nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl, or a CUDA toolkit",
            remedy=f"{_INSTALL}, or set CUDA_HOME",
        )
    beside = [runtime / "cccl", *_header_places("cccl")]
    cccl = _first_with(beside, "cuda/std/type_traits")
    return (_SHIM_DIR, runtime, *((cccl,) if cccl is not None else ()))


def _header_places(name: str) -> list[Path]:
    """From wheels, conda or CUDA_HOME by NVIDIA's own finder, then from a toolkit at its usual places."""
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory(name)
    places = [Path(found)] if found else []
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            places += [Path(home) / "include", Path(home) / "include" / "cccl"]
    return places


def _first_with(places: Sequence[Path], *probes: str) -> Path | None:
    return next((place for place in places if all((place / probe).is_file() for probe in probes)), None)


@functools.lru_cache(maxsize=1)
def _headers_digest() -> bytes:
    """Of the files that carry the headers' versions, and of our stand-ins."""
    digest = hashlib.sha256()
    shim, *others = _include_dirs()
    files = sorted(path for path in shim.iterdir() if path.is_file())
    for directory in others:
        files += [directory / "cuda_runtime_api.h", directory / "cuda_fp16.h"]
        files += [directory / "cuda" / "std" / "__cccl" / "version.h"]
    for path in files:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


@functools.lru_cache(maxsize=1)
def _library_identity() -> str:
    """Which NVRTC build this is, beyond its two version numbers: the library's file name and size."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    path = load_nvidia_dynamic_lib("nvrtc").abs_path
    return f"{Path(path).name}:{os.path.getsize(path)}" if path else ""
