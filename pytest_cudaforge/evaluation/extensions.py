"""``load_inline`` and ``load`` without a compiler: what a candidate asks for, as data, and where the built ones lie.

In a module's worker torch's two functions build nothing. They turn the call into an :class:`ExtensionRequest` and look
for the finished library among those that the supervisor gave at the start; where it is missing, the worker answers
with the request, the builder compiles it in its own sandbox and a fresh worker starts with it. What is built depends
on sources and flags alone, so a candidate can poison no cache.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaforge.errors import LaunchFailure, WorkerProtocol

__all__ = ["MAX_EXTENSIONS", "NEVER", "ExtensionRequest", "NeedsBuild", "decode_request", "install", "missing"]

MAX_EXTENSIONS = 8
MAX_SOURCE_BYTES = 4 << 20
_MAX_FLAGS = 64
_MAX_FLAG_CHARS = 1000


@dataclass(frozen=True)
class ExtensionRequest:
    """One extension: ``sources`` are (file name, text), complete with the headers and bindings torch would add."""

    name: str
    sources: tuple[tuple[str, str], ...]
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    with_cuda: bool = False
    python_module: bool = True

    @property
    def key(self) -> str:
        """sha256 over everything it depends on but the compiler."""
        return hashlib.sha256(encode_request(self).encode()).hexdigest()


class NeedsBuild(Exception):
    """An extension was asked for that the worker does not have."""

    def __init__(self, request: ExtensionRequest) -> None:
        self.request = request
        super().__init__(f"extension {request.name} is not built yet")


def encode_request(request: ExtensionRequest) -> str:
    return json.dumps({name: getattr(request, name) for name in sorted(request.__dataclass_fields__)})


def decode_request(text: str) -> ExtensionRequest:
    """The inverse of :func:`encode_request`; ``text`` is untrusted. Raises WorkerProtocol."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or set(data) != set(ExtensionRequest.__dataclass_fields__):
            raise ValueError("the fields are not those of a request")
        sources = tuple((_text(name, 200), _text(source, MAX_SOURCE_BYTES)) for name, source in data["sources"])
        if not 0 < len(sources) <= 32 or len({name for name, _ in sources}) != len(sources):
            raise ValueError("no sources, too many, or two of one name")
        if any("/" in name or name.startswith(".") for name, _ in sources):
            raise ValueError("a source's name is a path")
        name = _text(data["name"], 100)
        if not name.isidentifier():
            raise ValueError(f"{name!r} is no module name")
        flags = (_flags(data["cflags"]), _flags(data["cuda_cflags"]), _flags(data["ldflags"]))
        return ExtensionRequest(name, sources, *flags, bool(data["with_cuda"]), bool(data["python_module"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WorkerProtocol(f"a request for an extension is malformed: {error}", phase="start") from None


def _text(value: Any, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise ValueError(f"a text is missing or longer than {limit} characters")
    return value


def _flags(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MAX_FLAGS:
        raise ValueError("flags are no list, or too many")
    return tuple(_text(flag, _MAX_FLAG_CHARS) for flag in value)


# -- in the child ----------------------------------------------------------------------------------------------


class _Never(BaseException):
    """Raised where an extension is missing, so that nobody's ``except Exception`` goes on without it."""


NEVER = _Never


class _Registry:
    """What this process was given and what it lacks."""

    def __init__(self) -> None:
        self.folder = Path("/tmp")
        self.libraries: Mapping[str, bytes] = {}
        self.sabotage = ""
        self.loaded: dict[str, Any] = {}
        self.missing: str | None = None
        #: Names under which own functions appear in a profile, and how often each was called.
        self.calls: dict[str, int] = {}


_registry = _Registry()


def missing() -> str | None:
    """The request that was not met since the last question, as text."""
    found, _registry.missing = _registry.missing, None
    return found


def install(folder: Path, libraries: Mapping[str, bytes], sabotage: str) -> None:
    """Put the finished libraries where this process looks for them and replace torch's two functions."""
    import torch.utils.cpp_extension as torch_extension

    _registry.folder, _registry.libraries, _registry.sabotage = folder, libraries, sabotage
    torch_extension.load_inline = load_inline
    torch_extension.load = load


def load_inline(
    name: str,
    cpp_sources: str | Sequence[str],
    cuda_sources: str | Sequence[str] | None = None,
    sycl_sources: Any = None,
    functions: str | Sequence[str] | Mapping[str, str] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Any = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Any = None,
    build_directory: Any = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: Any = None,
    is_python_module: bool = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: bool = True,
    use_pch: bool = False,
    no_implicit_headers: bool = False,
) -> Any:
    """As ``torch.utils.cpp_extension.load_inline``; directories, verbosity and precompiled headers are the
    evaluator's own matter."""
    cpp, cuda = _listed(cpp_sources), _listed(cuda_sources)
    if not no_implicit_headers:
        cpp.insert(0, "#include <torch/extension.h>")
    if functions is not None:
        cpp += _bindings(functions, with_pytorch_error_handling)
    sources = [("main.cpp", "\n".join(cpp))]
    if cuda:
        if not no_implicit_headers:
            cuda[:0] = ["#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>"]
        sources.append(("cuda.cu", "\n".join(cuda)))
    cuda_wanted = bool(cuda) if with_cuda is None else bool(with_cuda)
    flags = (_words(extra_cflags), _words(extra_cuda_cflags), _words(extra_ldflags))
    return _found(ExtensionRequest(name, tuple(sources), *flags, cuda_wanted, bool(is_python_module)))


def load(
    name: str,
    sources: str | Sequence[str],
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_sycl_cflags: Any = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Any = None,
    build_directory: Any = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: Any = None,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,
) -> Any:
    """As ``torch.utils.cpp_extension.load``: the files are read here, in the candidate's own process."""
    files = [Path(path) for path in _listed(sources)]
    texts = tuple((file.name, file.read_text(encoding="utf-8")) for file in files)
    cuda = any(file.suffix in (".cu", ".cuh") for file in files) if with_cuda is None else bool(with_cuda)
    flags = (_words(extra_cflags), _words(extra_cuda_cflags), _words(extra_ldflags))
    return _found(ExtensionRequest(name, texts, *flags, cuda, bool(is_python_module)))


def _listed(value: Any) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, (str, Path)) else list(value)  # type: ignore[list-item]


def _words(flags: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(flag.strip() for flag in flags or () if flag.strip())


def _bindings(functions: str | Sequence[str] | Mapping[str, str], safe: bool) -> list[str]:
    """What torch appends for ``functions``."""
    if isinstance(functions, str):
        functions = [functions]
    named = dict(functions) if isinstance(functions, Mapping) else {name: name for name in functions}
    lines = ["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {"]
    for name, text in named.items():
        function = f"torch::wrap_pybind_function({name})" if safe else name
        lines.append(f'm.def("{name}", {function}, "{text}");')
    return [*lines, "}"]


def _found(request: ExtensionRequest) -> Any:
    key = request.key
    if key in _registry.loaded:
        return _registry.loaded[key]
    library = _registry.libraries.get(key)
    if library is None:
        _registry.missing = _registry.missing or encode_request(request)
        raise _Never
    path = _registry.folder / f"{key[:16]}-{request.name}.so"
    path.write_bytes(library)
    _registry.loaded[key] = _loaded(request, path)
    return _registry.loaded[key]


def _loaded(request: ExtensionRequest, path: Path) -> Any:
    if not request.python_module:
        import torch

        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        return str(path)
    loader = importlib.machinery.ExtensionFileLoader(request.name, str(path))
    spec = importlib.util.spec_from_file_location(request.name, path, loader=loader)
    if spec is None:
        raise LaunchFailure(f"extension {request.name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def profiled(call: Callable[[], Any], calls: int, device: Any) -> Any:
    raise NotImplementedError
