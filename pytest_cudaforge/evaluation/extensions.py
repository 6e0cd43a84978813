"""``load_inline`` and ``load`` without a compiler: what a candidate asks for, as data, and where the built ones lie.

In a module's worker torch's two functions build nothing. They turn the call into an :class:`ExtensionRequest` and look
for the finished library among those that the supervisor gave at the start; where it is missing, the worker answers
with the request, the builder compiles it in its own sandbox and a fresh worker starts with it. What is built depends
on sources and flags alone, so a candidate can poison no cache.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_cudaforge.errors import LaunchFailure, WorkerProtocol
from pytest_cudaforge.evaluation.contract import ONE_NUMBER, is_library, is_torchs
from pytest_cudaforge.languages.extension import ExtensionRequest, request_from_text, request_to_text

__all__ = ["MAX_EXTENSIONS", "NEVER", "ExtensionRequest", "NeedsBuild", "decode_request", "install", "missing"]

MAX_EXTENSIONS = 8


class NeedsBuild(LaunchFailure):
    """An extension was asked for that the worker does not have."""

    def __init__(self, request: ExtensionRequest) -> None:
        self.request = request
        super().__init__(
            f"extension {request.name} is asked for after the first call",
            expected="load_inline at import, in the constructor or in the first call",
        )


def decode_request(text: str) -> ExtensionRequest:
    """What a worker asks for; ``text`` is untrusted. Raises WorkerProtocol."""
    try:
        return request_from_text(text)
    except ValueError as error:
        raise WorkerProtocol(f"a request for an extension is malformed: {error}", phase="start") from None


# -- in the child ----------------------------------------------------------------------------------------------


class _Never(BaseException):
    """Raised where an extension is missing, so that nobody's ``except Exception`` goes on without it."""


NEVER = _Never


class _Registry:
    """What this process was given and what it lacks."""

    def __init__(self) -> None:
        self.folder = Path("/tmp")
        self.libraries: Mapping[str, bytes] = {}
        #: "" | "watch" | "raise" | "garbage": what own functions do beside, or instead of, their work
        self.mode = ""
        self.loaded: dict[str, Any] = {}
        self.missing: str | None = None
        self.own_calls = 0
        #: In Python's functions that own functions have called.
        self.called_back_ns = 0
        self.compiled = False
        #: Whether a tensor's memory was given to others than torch.
        self.given_away = False
        #: The names of Triton's kernels that were launched.
        self.triton: set[str] = set()
        #: Operators that extensions registered with torch as they were loaded: "space::name".
        self.operators: set[str] = set()


_registry = _Registry()


def missing() -> str | None:
    """The request that was not met since the last question, as text."""
    found, _registry.missing = _registry.missing, None
    return found


def install(folder: Path, libraries: Mapping[str, bytes], mode: str) -> None:
    """Put the finished libraries where this process looks for them and replace torch's two functions."""
    import torch.utils.cpp_extension as torch_extension

    _registry.folder, _registry.libraries, _registry.mode = folder, libraries, mode
    # Inductor's pool of compile processes asks for what a confined process may not have.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch_extension.load_inline = load_inline
    torch_extension.load = load
    if mode == "watch":
        _watch_compile()
        _watch_arrays()
        _keep_watching()


def _keep_watching() -> None:
    """Nobody hides operators from the profiler: what turns it off does nothing, and those that are called past the
    dispatcher are noted as others are. Of extensions' own code the imports tell (languages.imports)."""
    import torch

    for place in (torch._C._autograd, torch.autograd):
        for name in ("_enable_record_function", "_enable_profiler_legacy", "_disable_profiler_legacy"):
            if hasattr(place, name):
                setattr(place, name, lambda *given, **options: None)
    handle: Any = getattr(torch._C, "_DispatchOperatorHandle", None)
    usual: Any = getattr(handle, "redispatch_boxed", None)

    def redispatch_boxed(operator: Any, *given: Any, **options: Any) -> Any:
        with torch.autograd.profiler.record_function(operator.schema().name):
            return usual(operator, *given, **options)

    if usual is not None:
        handle.redispatch_boxed = redispatch_boxed


def _watch_compile() -> None:
    """Note every use of torch.compile: what its kernels do is no work of the candidate's."""
    import torch

    compile_ = torch.compile

    def noted(*args: Any, **kwargs: Any) -> Any:
        _registry.compiled = True
        return compile_(*args, **kwargs)

    torch.compile = noted


def _watch_arrays() -> None:
    """Note every tensor that becomes NumPy's, or goes by DLPack: what computes with it then, no profiler sees."""
    import torch

    for name in ("numpy", "__dlpack__"):
        usual = getattr(torch.Tensor, name)

        def noted(*args: Any, _usual: Any = usual, **kwargs: Any) -> Any:
            _registry.given_away = True
            return _usual(*args, **kwargs)

        setattr(torch.Tensor, name, noted)


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
        _registry.missing = _registry.missing or request_to_text(request)
        raise _Never
    path = _registry.folder / f"{key[:16]}-{request.name}.so"
    path.write_bytes(library)
    before = _registered()
    _registry.loaded[key] = _loaded(request, path)
    _registry.operators |= _registered() - before
    return _registry.loaded[key]


def _registered() -> set[str]:
    """The operators that torch knows, without their overloads."""
    import torch

    return {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}


def _loaded(request: ExtensionRequest, path: Path) -> Any:
    if not request.python_module:
        import torch

        if _registry.mode == "raise":
            return str(path)  # its operators do not exist: calling one raises
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        return str(path)
    loader = importlib.machinery.ExtensionFileLoader(request.name, str(path))
    spec = importlib.util.spec_from_file_location(request.name, path, loader=loader)
    if spec is None:
        raise LaunchFailure(f"extension {request.name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module if not _registry.mode else _changed(module)


# -- watching and sabotage ---------------------------------------------------------------------------------------

_OWN = "forge_own::"
#: What the names of torch's own kernels contain, and what those are called that no operator launched.
_TORCHS_KERNEL, _REPLAYED = "at::native::", "aten::kernels of torch's in a CUDA graph"
#: How cuBLAS and cuDNN call their kernels, and what those are called that no operator of torch's launched.
_LIBRARYS_KERNEL = re.compile(
    r"\b(?:nvjet_|cublas|cudnn|cutlass_\d|(?:ampere|turing|volta|maxwell)_|sm\d+_xmma|gemmSN_|gemmk1_|gemv2[TN]_|gemvNSP_"
    r"|pytorch_flash::|fmha_cutlass)"
)
_LIBRARYS = "library::products and convolutions of NVIDIA's"
_CALLED_BACK = "Python that its functions call"
_GIVEN_AWAY = "what computes with tensors' memory beside torch (NumPy, DLPack)"
#: The others that neither an extension of the candidate's nor Triton brought: a library's that it calls by itself.
_FOREIGN = "kernels that it did not bring, such as {name}"
_MOST_KERNELS = 64


def _changed(module: Any) -> Any:
    """A module with the same names whose functions are watched, raise or give garbage, as the mode says.

    Its classes stay the same objects, for the sake of ``isinstance``; their methods are changed where they are.
    """
    changed = types.ModuleType(module.__name__, module.__doc__)
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        if isinstance(value, types.ModuleType):
            value = _changed(value)
        elif isinstance(value, type):
            _change_methods(value)
        elif callable(value):
            value = _function(name, value)
        setattr(changed, name, value)
    return changed


def _change_methods(kind: type) -> None:
    """What can be called of a bound C++ class, but for Python's own protocols. A class that torch knows, too, is none
    of the extension's own."""
    if kind.__module__.partition(".")[0] == "torch":
        return
    for name, value in list(vars(kind).items()):
        if name.startswith("__") and name != "__call__":
            continue
        if isinstance(value, staticmethod):
            setattr(kind, name, staticmethod(_function(name, value.__func__)))
        elif callable(value) and not isinstance(value, type):
            setattr(kind, name, _function(name, value))


def _function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def watched(*args: Any, **kwargs: Any) -> Any:
        _registry.own_calls += 1
        with torch.autograd.profiler.record_function(_OWN + name):
            return _without_callbacks(function, args, kwargs)

    def raising(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{name} was switched off")

    def garbling(*args: Any, **kwargs: Any) -> Any:
        return _garbled(function, args, kwargs)

    return {"watch": watched, "raise": raising, "garbage": garbling}[_registry.mode]


def _without_callbacks(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What ``function`` returns; what Python does meanwhile, that it calls back, is noted as no work of its own."""
    depth, began, before = 0, 0, sys.getprofile()

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, began
        if event == "call":
            began = began if depth else time.perf_counter_ns()
            depth += 1
        elif event == "return" and depth:
            depth -= 1
            _registry.called_back_ns += 0 if depth else time.perf_counter_ns() - began

    sys.setprofile(look)
    try:
        return function(*args, **kwargs)
    finally:
        sys.setprofile(before)


#: Programs, libraries and a GPU's memory lie above; sizes, strides and seeds of KernelBench's kind below.
_LOWEST_ADDRESS = 1 << 40


def _garbled(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What ``function`` returns on copies of its arguments, with other values: garbage, and nothing written."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map

    if any(isinstance(value, int) and value >= _LOWEST_ADDRESS for value in tree_leaves((args, kwargs))):
        return None  # what it writes by address goes past all copies: it does nothing at all instead
    copies: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        copy = value.clone(memory_format=torch.preserve_format)
        copies[copy.data_ptr()] = value
        return copy

    def garbage(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        original = copies.get(value.data_ptr())
        if original is not None and original.shape == value.shape:
            return original  # it writes in place and returns its argument
        if value.is_floating_point() or value.is_complex():
            return torch.randn_like(value)
        return torch.zeros_like(value) if value.dtype == torch.bool else torch.randint_like(value, 0, 2)

    return tree_map(garbage, function(*tree_map(copied, args), **tree_map(copied, kwargs)))


def change_triton() -> None:
    """Watch or switch off the launches of Triton's kernels, as the mode says; nothing where Triton is not in use."""
    jit = sys.modules.get("triton.runtime.jit")
    kind = getattr(jit, "JITFunction", None)
    if kind is None or not _registry.mode:
        return
    launch = kind.run

    def changed(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if _registry.mode == "raise":
            raise RuntimeError("a Triton kernel was switched off")
        if _registry.mode == "garbage":
            return None  # nothing is launched: what it would have written stays as it was
        _registry.own_calls += 1
        _registry.triton.add(str(getattr(kernel, "__name__", "")))
        return launch(kernel, *args, **kwargs)

    kind.run = changed


def packed_cache() -> bytes:
    """Triton's cache of this process as one text of names and bytes; it goes to workers of the same candidate."""
    folder = _cache_folder()
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()] if folder.is_dir() else []
    pairs = [[str(path.relative_to(folder)), base64.b64encode(path.read_bytes()).decode()] for path in files]
    return zlib.compress(json.dumps(pairs).encode(), 1)


def unpack_cache(packed: bytes) -> None:
    """The inverse of :func:`packed_cache`, into this process's own folder."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(_cache_folder()))
    if packed:
        for name, text in json.loads(zlib.decompress(packed)):
            path = _cache_folder() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(text))


def _cache_folder() -> Path:
    return _registry.folder / "triton"


def _base_name(kernel: str) -> str:
    """A kernel's own name, without what it returns, takes, lies in and is specialised to; "" where it has none."""
    text, depth = "", 0
    for char in kernel.replace("(anonymous namespace)", "anonymous"):
        depth += (char == "<") - (char == ">")
        text += char if depth == 0 and char != ">" else ""
    found = text.partition("(")[0].split()
    name = found[-1].rpartition("::")[2] if found and depth == 0 else ""
    return name if name.isidentifier() else ""


def _is_brought(kernel: str) -> bool:
    """Does a kernel come from an extension of the candidate's, which names it as the C++ ABI does, or from Triton?
    Where its name cannot be told, it does."""
    name = _base_name(kernel)
    if not name or name in _registry.triton:
        return True
    mangled, plain = f"{len(name)}{name}".encode(), b"\0" + name.encode() + b"\0"
    if any(mangled in library or plain in library for library in _registry.libraries.values()):
        return True
    folder = _cache_folder()
    return folder.is_dir() and any(path.stem == name for path in folder.rglob("*.cubin"))


def is_own_operator(name: str) -> bool:
    """Is an operator ("space::name") an extension's? One that Python registers runs whatever Python does."""
    return name in _registry.operators


def sabotaged_operators() -> Any:
    """A context in which operators of extensions (TORCH_LIBRARY) give garbage, where the mode says so."""
    if _registry.mode != "garbage" or not _registry.operators:
        return contextlib.nullcontext()  # torch's modes load torch._dynamo, which takes seconds
    from torch.utils._python_dispatch import TorchDispatchMode

    class Garbling(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if is_own_operator(getattr(getattr(func, "_schema", None), "name", "")):
                return _garbled(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Garbling()  # type: ignore[no-untyped-call]


#: On a CPU calls are profiled one by one, at least as many as were asked for, and more of short ones.
_MOST_PROFILED, _PROFILING_NS = 15, 300_000_000


def profiled(call: Callable[[], Any], calls: int, cuda: bool) -> dict[str, Any]:
    """What runs in ``calls`` calls: ns of own functions, of torch's operators, and of this thread in all.

    A GPU's kernels are timed by the GPU. What a CPU's threads do is timed by the wall clock, and a thread that waits
    for a core in one call would look as if it worked: there each number is that of a typical call, times ``calls``.
    """
    if cuda:
        return _profiled_together(call, calls, cuda)
    parts: list[dict[str, Any]] = []
    began = time.perf_counter_ns()
    while len(parts) < calls or (len(parts) < _MOST_PROFILED and time.perf_counter_ns() - began < _PROFILING_NS):
        parts.append(_profiled_together(call, 1, cuda))
    return _typical(parts, calls)


def sealed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as its module is now, whatever is put in the place of it, or of those that it calls there, later.

    No wall against who looks for it: what ran is told by the candidate's own process.
    """
    assert isinstance(function, types.FunctionType)
    names = dict(function.__globals__)
    for name, value in function.__globals__.items():
        if isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__:
            names[name] = _within(value, names)
    return _within(function, names)


def _within(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """The same function among other names."""
    same = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return same


def _profiled_together(call: Callable[[], Any], calls: int, cuda: bool) -> dict[str, Any]:
    import torch

    _registry.own_calls = _registry.called_back_ns = 0
    # Not torch.profiler.profile: that loads torch._dynamo, which takes seconds.
    profiler: Any = torch.autograd.profiler.profile
    with profiler(
        use_device="cuda" if cuda else None, use_kineto=True, record_shapes=True, experimental_config=_all_threads()
    ) as profile:
        # Of this thread alone: where other processes keep the cores busy, waiting for one is nobody's work.
        began = time.thread_time_ns()
        for _ in range(calls):
            call()
        thread_ns = time.thread_time_ns() - began
        if cuda:
            torch.cuda.synchronize()
    return _summary(profile, 0 if cuda else thread_ns, cuda)


def _all_threads() -> Any:
    """Operators of threads that the candidate starts count as well; None where torch cannot record them."""
    import torch

    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def _typical(parts: Sequence[dict[str, Any]], calls: int) -> dict[str, Any]:
    """One summary of ``calls`` calls from those of single calls: of each number the median of the calls in which it
    occurs, times their part of all, so that what only some calls do is not lost."""

    def typical(numbers: Sequence[int]) -> int:
        found = [number for number in numbers if number > 0]
        return int(statistics.median(found) * len(found) / len(numbers) * calls) if found else 0

    operators = [dict(part["operators"]) for part in parts]
    names = dict.fromkeys(itertools.chain.from_iterable(operators))
    own_calls = sum(part["own_calls"] for part in parts)
    return {
        "own_calls": -(-own_calls * calls // len(parts)),
        "own_ns": typical([part["own_ns"] for part in parts]),
        "operators": [[name, typical([one.get(name, 0) for one in operators])] for name in names],
        "kernels": [],
        "thread_ns": typical([part["thread_ns"] for part in parts]),
        "compiled": any(part["compiled"] for part in parts),
    }


def _waited_ns(profile: Any) -> float:
    """ns of own functions in which operators of torch's ran in another thread: they wait for them, that is no work."""
    events = [event for event in profile.function_events or () if event.cpu_parent is None and not event.is_remote]
    own = [event for event in events if event.name.startswith(_OWN)]
    threads = {event.thread for event in events}
    if not own or len(threads) < 2:
        return 0.0
    elsewhere = [event for event in events if is_torchs(event.name)]
    waited_us: float = sum(
        max(0.0, min(one.time_range.end, other.time_range.end) - max(one.time_range.start, other.time_range.start))
        for one in own
        for other in elsewhere
        if one.thread != other.thread
    )
    return 1e3 * waited_us


def _changes_one_number(event: Any) -> bool:
    """An operator in place (its first argument is a tensor, then) none of whose arguments has more than one element."""
    in_place = event.key.endswith("_") and not event.key.endswith("__")
    return in_place and bool(event.input_shapes) and all(math.prod(shape) == 1 for shape in event.input_shapes)


def _biases(profile: Any, on_gpu: bool) -> list[tuple[str, str, float]]:
    """(operator, whose part it is, ns): a convolution adds its bias by an operator of its own, as some products do."""
    found = []
    for event in profile.function_events or ():
        parent = event.cpu_parent
        if event.name not in ("aten::add_", "aten::add") or parent is None or not is_library(parent.name):
            continue
        ns = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) * 1e3
        found.append((event.name, parent.name, ns))
    return found


@dataclass
class _Kernels:
    """ns on a GPU by whose kernels they are, copies among all; ``foreign`` by name."""

    all_ns: float = 0.0
    torchs_ns: float = 0.0
    librarys_ns: float = 0.0
    copies_ns: float = 0.0
    foreign: dict[str, float] = field(default_factory=dict)
    listed: list[list[Any]] = field(default_factory=list)

    def add(self, event: Any) -> None:
        ns = event.self_device_time_total * 1e3
        self.all_ns += ns
        self.listed.append([event.key[:200], int(ns), int(event.count)])
        known = False
        if _TORCHS_KERNEL in event.key:
            self.torchs_ns, known = self.torchs_ns + ns, True
        if _LIBRARYS_KERNEL.search(event.key):
            self.librarys_ns, known = self.librarys_ns + ns, True
        if event.key.startswith(("Memcpy", "Memset")):
            self.copies_ns, known = self.copies_ns + ns, True
        if not known and not _is_brought(event.key):
            name = _base_name(event.key)
            self.foreign[name] = self.foreign.get(name, 0.0) + ns

    def add_unlaunched(self, operators: dict[str, float]) -> None:
        """What no operator of torch's launched, and nobody brought, as operators of their own."""
        # Torch's own kernels without an operator: a CUDA graph replays what was recorded.
        hidden_ns = self.torchs_ns - max(0.0, sum(operators.values()) - self.copies_ns)
        if hidden_ns > 0:
            operators[_REPLAYED] = hidden_ns
        direct_ns = self.librarys_ns - sum(ns for name, ns in operators.items() if is_library(name))
        if direct_ns > 0:
            operators[_LIBRARYS] = direct_ns
        # What is left of the operators' time went into foreign kernels as well.
        explained_ns = max(0.0, sum(operators.values()) - self.copies_ns - self.torchs_ns - self.librarys_ns)
        strange_ns = sum(self.foreign.values()) - explained_ns
        if strange_ns > 0:
            operators[_FOREIGN.format(name=max(self.foreign, key=self.foreign.__getitem__)[:60])] = strange_ns


def _summary(profile: Any, thread_ns: int, cuda: bool) -> dict[str, Any]:
    own_ns, own_calls, kernels = 0.0, _registry.own_calls, _Kernels()
    operators: dict[str, float] = {}
    averages = profile.key_averages(group_by_input_shape=True)
    # Where the driver lets nobody profile, the host's time of launching has to do.
    on_gpu = cuda and any(event.self_device_time_total > 0 for event in averages)
    for event in averages:
        if cuda and str(event.device_type).endswith("CUDA"):
            # A span is from a function's first kernel to its last, whoever's they are, and what lies between.
            if not (event.is_user_annotation or event.key.startswith(_OWN)):
                kernels.add(event)
            continue
        ns = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) * 1e3
        if event.key.startswith(_OWN) or is_own_operator(event.key):
            own_ns += ns
            own_calls += 0 if event.key.startswith(_OWN) else event.count
        elif is_torchs(event.key):
            name = ONE_NUMBER if _changes_one_number(event) else event.key
            operators[name] = operators.get(name, 0.0) + ns
    for name, parent, ns in _biases(profile, on_gpu):
        moved_ns = min(ns, operators.get(name, 0.0))
        operators[name] = operators.get(name, 0.0) - moved_ns
        operators[parent] = operators.get(parent, 0.0) + moved_ns
    if on_gpu:
        kernels.add_unlaunched(operators)
        # All other kernels are the candidate's: Triton's are, too.
        own_ns = max(0.0, kernels.all_ns - sum(operators.values()))
        own_calls = max(own_calls, int(own_ns > 0))
    else:
        own_ns = max(0.0, own_ns - _waited_ns(profile) - _registry.called_back_ns)
        if _registry.called_back_ns:
            operators[_CALLED_BACK] = float(_registry.called_back_ns)
        if _registry.given_away:
            operators[_GIVEN_AWAY] = max(0.0, thread_ns - own_ns - sum(operators.values()))
    return {
        "own_calls": own_calls,
        "own_ns": int(own_ns),
        "operators": [[name, int(ns)] for name, ns in operators.items()],
        "kernels": sorted(kernels.listed, key=lambda kernel: -kernel[1])[:_MOST_KERNELS],
        "thread_ns": thread_ns,
        "compiled": _registry.compiled,
    }
