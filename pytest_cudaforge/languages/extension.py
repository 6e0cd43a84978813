"""``load_inline`` and ``load`` of torch: C++ and CUDA sources with torch's headers to a Python extension, by ninja.

Two ways to compile: against a narrow stand-in for ``torch/extension.h`` (the tensor class, the operators that the
sources name, torch's own pybind11 casters), and against torch's full headers where the narrow way fails. A small C++
file takes 6 s of processor time the narrow way and 22 to 27 s with the full headers, a small CUDA file 9 s
against 94 s (g++ 13, nvcc 13, one machine). Nothing is loaded here, so a candidate's code does not run in the
compiler's process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaforge.errors import BuildFailure, ToolchainError
from pytest_cudaforge.languages.binary import Binary
from pytest_cudaforge.languages.logs import other_tools_words, reduce_log

__all__ = ["ExtensionRequest", "build", "fingerprint", "request_from_text", "request_to_text"]

MAX_SOURCE_CHARS = 4 << 20
MAX_SOURCES = 32
_MAX_FLAGS = 64
_MAX_FLAG_CHARS = 1000
_LANGUAGE = "extension"
#: Part of the cache key: raise it when what is compiled changes for the same request.
_RECIPE = 3


@dataclass(frozen=True)
class ExtensionRequest:
    """One extension: ``sources`` are (file name, text), complete with the headers and bindings that torch adds."""

    name: str
    sources: tuple[tuple[str, str], ...]
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    with_cuda: bool = False
    python_module: bool = True

    @property
    def key(self) -> str:
        """sha256 over everything it depends on but the toolchain."""
        return hashlib.sha256(request_to_text(self).encode()).hexdigest()


def request_to_text(request: ExtensionRequest) -> str:
    """As JSON."""
    return json.dumps({name: getattr(request, name) for name in sorted(request.__dataclass_fields__)})


def request_from_text(text: str) -> ExtensionRequest:
    """The inverse of :func:`request_to_text`; ``text`` is untrusted. Raises ValueError naming what is off."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or set(data) != set(ExtensionRequest.__dataclass_fields__):
            raise ValueError("the fields are not those of a request")
        sources = tuple((_text(name, 200), _text(source, MAX_SOURCE_CHARS)) for name, source in data["sources"])
        name = _text(data["name"], 100)
        flags = (_flags(data["cflags"]), _flags(data["cuda_cflags"]), _flags(data["ldflags"]))
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"a field is malformed: {error}") from None
    if not 0 < len(sources) <= MAX_SOURCES or len({file for file, _ in sources}) != len(sources):
        raise ValueError("no sources, too many, or two of one name")
    if not name.isidentifier() or not all(re.fullmatch(r"\w[\w.-]*", file) for file, _ in sources):
        raise ValueError("the name is no identifier, or a source's name is a path")
    return ExtensionRequest(name, sources, *flags, bool(data["with_cuda"]), bool(data["python_module"]))


def _text(value: Any, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError(f"a text is missing or longer than {limit} characters")
    return value


def _flags(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MAX_FLAGS:
        raise ValueError("flags are no list, or too many")
    return tuple(_text(flag, _MAX_FLAG_CHARS) for flag in value)


# -- the toolchain -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def torch_folder() -> Path:
    """Where torch is installed, found without importing it. Raises ToolchainError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ToolchainError("torch is not installed", expected="torch with its headers", remedy="pip install torch")
    return Path(spec.origin).parent


def fingerprint(arch: str, cuda: bool) -> str:
    """Digest of compilers, torch and Python: part of a build's cache key. Raises ToolchainError."""
    library = (torch_folder() / "lib" / "libtorch_cpu.so").stat()
    parts = [_LANGUAGE, str(_RECIPE), arch, importlib.metadata.version("torch"), str(library.st_size), sys.version]
    parts += [_answer("g++", "--version"), _answer("nvcc", "--version") if cuda else ""]
    parts.append(_answer("g++", "-march=native", "-Q", "--help=target"))  # what that flag means on this CPU
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def _answer(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=False)
    return done.stdout


def _tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.prefix) / "bin"))
    if found is None:
        raise ToolchainError(
            f"{name} is not on PATH",
            expected="g++, ninja and, for CUDA, nvcc",
            remedy="pip install ninja" if name == "ninja" else f"install {name}",
        )
    return found


@functools.lru_cache(maxsize=1)
def _dialect() -> str:
    """The C++ standard that this torch compiles extensions with."""
    text = (torch_folder() / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    found = re.search(r"-std=(c\+\+\d+)", text)
    return found.group(1) if found else "c++17"


@functools.lru_cache(maxsize=1)
def _abi_flags() -> tuple[str, ...]:
    config = torch_folder() / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    found = re.search(r"-D_GLIBCXX_USE_CXX11_ABI=[01]", text)
    return (found.group(0),) if found else ()


# -- building ----------------------------------------------------------------------------------------------------


def build(request: ExtensionRequest, arch: str) -> Binary:
    """Compile and link. ``arch`` "cpu" or "sm_90". Raises BuildFailure with the reduced log, or ToolchainError."""
    if request.with_cuda and arch == "cpu":
        raise BuildFailure(
            f"extension {request.name} asks for CUDA, and this evaluation runs on the CPU",
            expected="C++ sources only",
            remedy="pass --device cuda",
        )
    if request.with_cuda and not (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        raise ToolchainError("this torch has no CUDA", expected="a CUDA build of torch", remedy="install one")
    narrow = _narrow_headers(request)
    if narrow:
        try:
            return _build_with(request, arch, narrow)
        except BuildFailure:
            pass  # It may name something that only the full headers declare; they decide.
    return _build_with(request, arch, {})


def _build_with(request: ExtensionRequest, arch: str, headers: dict[str, str]) -> Binary:
    with tempfile.TemporaryDirectory(prefix="forge-extension-") as name:
        folder = Path(name)
        for path, text in headers.items():
            (folder / "narrow" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "narrow" / path).write_text(text, encoding="utf-8")
        for file, text in request.sources:
            try:
                (folder / file).write_text(text, encoding="utf-8")
            except UnicodeEncodeError:
                raise BuildFailure(f"{file} is no text", expected="valid Unicode") from None
        (folder / "build.ninja").write_text(_ninja_text(request, arch, bool(headers)), encoding="utf-8")
        log = _run_ninja(request, folder)
        library = folder / "extension.so"
        if not library.is_file():
            raise BuildFailure(f"extension {request.name}: the compiler left no library", log=log)
        return Binary(_LANGUAGE, arch, (), library.read_bytes(), (), log)


def _run_ninja(request: ExtensionRequest, folder: Path) -> str:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(folder), "LC_ALL": "C"}
    command = [_tool("ninja"), "-k", "0"]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    full = (done.stdout + done.stderr).decode("utf-8", "replace")
    own = [file for file, _ in request.sources]
    log = reduce_log(full, own, (str(torch_folder()), "/usr/include/", "/usr/lib/", sysconfig.get_paths()["include"]))
    if done.returncode == 0:
        return log
    missing = dict.fromkeys(re.findall(r"undefined reference to [`'].{1,200}?'|cannot find -l[\w.+-]{1,80}", full))
    log = "\n".join([log, *(f"link: error: {text}" for text in missing)]).strip() or other_tools_words(full, "build")
    first = next((line for line in log.splitlines() if "error" in line), "the compiler refused the source")
    raise BuildFailure(f"extension {request.name}: {first}", log=log)


def _ninja_text(request: ExtensionRequest, arch: str, narrow: bool) -> str:
    """One edge per source and one for the link; ninja runs as many as there are cores."""
    includes = [*(["-Inarrow"] if narrow else []), *(f"-isystem {path}" for path in _include_paths(request.with_cuda))]
    general = [f"-DTORCH_EXTENSION_NAME={request.name}", "-DTORCH_API_INCLUDE_EXTENSION_H", *_abi_flags()]
    # Without it headers of ATen's that are included anyway drag in every operator there is.
    general += ["-DAT_PER_OPERATOR_HEADERS"] if narrow else []
    host = [*general, *includes, "-fPIC", f"-std={_dialect()}", "-fdiagnostics-color=never", *_words(request.cflags)]
    device = [*general, *includes, *_NVCC_FLAGS, *_arch_flags(request, arch), "--compiler-options", "-fPIC"]
    device += [f"-std={_dialect()}", *_words(request.cuda_cflags)]
    if not any(_PYTHON.search(text) for file, text in request.sources if file.endswith(".cu")):
        device.insert(0, "-DFORGE_WITHOUT_PYTHON")  # nvcc is slow at pybind11, which a kernel file does not need
    lines = [f"rule cxx\n  command = {_escaped([_tool('g++'), *host])} -c $in -o $out"]
    if request.with_cuda:
        lines.append(f"rule cu\n  command = {_escaped([_tool('nvcc'), *device])} -c $in -o $out")
    lines.append(f"rule link\n  command = {_escaped([_tool('g++')])} $in -shared {_escaped(_link(request))} -o $out")
    objects = []
    for index, (file, _) in enumerate(request.sources):
        if not file.endswith((".h", ".hpp", ".cuh", ".inl")):
            objects.append(f"unit{index}.o")
            lines.append(f"build unit{index}.o: {'cu' if file.endswith('.cu') else 'cxx'} {file}")
    return "\n".join([*lines, f"build extension.so: link {' '.join(objects)}", "default extension.so", ""])


_NVCC_FLAGS = (
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
)


def _arch_flags(request: ExtensionRequest, arch: str) -> list[str]:
    """This device's own, unless the candidate names one."""
    if any("arch" in flag or "gencode" in flag for flag in request.cuda_cflags):
        return []
    number = arch.removeprefix("sm_")
    # From Hopper on a device's own instructions (bulk copies, its matrix units) need its "a" variant.
    number += "a" if number.isdigit() and int(number) >= 90 else ""
    return [f"-gencode=arch=compute_{number},code=sm_{number}"]


def _include_paths(cuda: bool) -> list[str]:
    include = torch_folder() / "include"
    found = [str(include), str(include / "torch" / "csrc" / "api" / "include"), sysconfig.get_paths()["include"]]
    return [*found, *([str(_cuda_home() / "include")] if cuda else [])]


def _cuda_home() -> Path:
    return Path(os.path.realpath(_tool("nvcc"))).parents[1]


def _link(request: ExtensionRequest) -> list[str]:
    libraries = torch_folder() / "lib"
    flags = [*_words(request.ldflags), f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    if request.with_cuda:
        flags += ["-lc10_cuda", "-ltorch_cuda", f"-L{_cuda_home() / 'lib64'}", "-lcudart"]
    return flags


def _words(flags: Sequence[str]) -> list[str]:
    """torch hands flags to a shell: one text may hold several."""
    words: list[str] = []
    for flag in flags:
        try:
            words += shlex.split(flag)
        except ValueError as error:
            raise BuildFailure(f"the flag {flag!r} cannot be read: {error}") from None
    return words


def _escaped(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in _flat(words)).replace("$", "$$").replace("\n", " ")


def _flat(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("-isystem "):
            yield from word.split(" ", 1)
        else:
            yield word


# -- narrow headers ----------------------------------------------------------------------------------------------

#: What only torch's full headers declare, or declare differently.
_ONLY_FULL = re.compile(r"\btorch::(?:nn|optim|data|autograd|jit|serialize|tensor|fft|linalg|special|from_file)\b")
_OPERATOR = re.compile(r"::\s*(\w+)")
_PYTHON = re.compile(r"\bPYBIND11|\bpybind11\b|\bpy::|wrap_pybind_function|PyObject")
_WORD = re.compile(r"\b[a-z_]\w*\b")
#: Headers by a sign of their use.
_BY_SIGN = (
    ("AT_DISPATCH", "ATen/Dispatch.h"),
    ("AT_DISPATCH_V2", "ATen/Dispatch_v2.h"),
    ("parallel_", "ATen/Parallel.h"),
    ("Vectorized", "ATen/cpu/vec/vec.h"),
    ("indexing", "ATen/TensorIndexing.h"),
    ("accessor", "ATen/core/TensorAccessor.h"),
    ("TORCH_LIBRARY", "torch/library.h"),
    ("NoGradGuard", "c10/core/GradMode.h"),
    ("toOpMathType", "ATen/OpMathType.h"),
    ("opmath", "ATen/OpMathType.h"),
)
#: Names that torch's own header adds in namespace torch.
_DTYPES = (
    *(("kUInt8", "kByte"), ("kInt8", "kChar"), ("kInt16", "kShort"), ("kInt32", "kInt"), ("kInt64", "kLong")),
    *(("kFloat16", "kHalf"), ("kFloat32", "kFloat"), ("kFloat64", "kDouble")),
    *(("kU8", "kByte"), ("kI8", "kChar"), ("kI16", "kShort"), ("kI32", "kInt"), ("kI64", "kLong")),
    *(("kF16", "kHalf"), ("kF32", "kFloat"), ("kF64", "kDouble")),
)
#: What every operator's header includes and none needs; left out where the sources do not mention it.
_UNUSED = {"ATen/Context.h": "Context", "ATen/TracerMode.h": "tracer", "ATen/DeviceGuard.h": "DeviceGuard|device_of"}
_REPLACED = ("torch/extension.h", "torch/torch.h", "torch/all.h", "torch/types.h", "ATen/ATen.h")


def _narrow_headers(request: ExtensionRequest) -> dict[str, str]:
    """Stand-ins by path for the big headers; empty where the sources ask for what only those have."""
    text = "\n".join(source for _, source in request.sources)
    if _ONLY_FULL.search(text) or not any(f"<{name}>" in text or f'"{name}"' in text for name in _REPLACED):
        return {}
    include = torch_folder() / "include"
    # A using directive lets operators go by their bare names.
    words = _WORD.findall(text) if "using namespace" in text else _OPERATOR.findall(text)
    headers = [f"ATen/ops/{word}.h" for word in dict.fromkeys(words)]
    headers += [header for sign, header in _BY_SIGN if sign in text]
    found = [header for header in dict.fromkeys(headers) if (include / header).is_file()]
    always = ("ATen/core/Tensor.h", "ATen/TensorOperators.h", "ATen/TensorUtils.h")
    tensors = "\n".join(f"#include <{header}>" for header in (*always, *found))
    dtypes = "".join(
        f"constexpr auto {name} = at::{old};\n" for name, old in _DTYPES if re.search(rf"\b{name}\b", text)
    )
    names = "using namespace at;\nusing std::nullopt;\nusing std::optional;\nusing Dtype = at::ScalarType;\n"
    types = f"#pragma once\n{tensors}\n#include <optional>\nnamespace torch {{\n{names}{dtypes}}}\n"
    python = "#include <torch/csrc/Exceptions.h>\n#include <torch/csrc/utils/pybind.h>\n"
    python = f"#ifndef FORGE_WITHOUT_PYTHON\n{python}#endif\n"
    whole = f"#pragma once\n#include <torch/types.h>\n{python}"
    plain = "#pragma once\n#include <torch/types.h>\n"
    unused = {header: "#pragma once\n" for header, sign in _UNUSED.items() if not re.search(sign, text)}
    return {
        **unused,
        "torch/types.h": types,
        "ATen/ATen.h": plain,
        "torch/all.h": plain,
        "torch/torch.h": plain,
        "torch/extension.h": whole,
    }
