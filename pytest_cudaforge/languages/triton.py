"""``triton``: ``@triton.jit`` functions of kernel.py to cubins, for a launch plan to launch; no GPU needed.

kernel.py is Python, so compiling imports it: that happens in the sandboxed builder alone, and what leaves it is device
code and a description of it, checked like every answer of a builder. A launch plan names an instance of a function
(:mod:`languages.instances`); its ``tl.constexpr`` parameters come from the launch's constants by name.

Triton's calling convention (its ``nvidia/driver.py``): constexpr parameters are gone, the others come in order, then
pointers to scratch memory. Those stay null: kernels that need such memory, or a tensor map made by the host, are
refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaforge.errors import BuildFailure, ToolchainError
from pytest_cudaforge.facts import KernelResources
from pytest_cudaforge.languages.binary import FOLDED, Binary, CompiledLaunch, KernelInfo, Unit
from pytest_cudaforge.languages.cuda import resources_in
from pytest_cudaforge.languages.instances import ALIGN_BYTES, OPTIONS, Instance, parse_instance
from pytest_cudaforge.languages.logs import MAX_LINE_CHARS, MAX_LOG_LINES, reduce_log

SOURCE_NAME = "kernel.py"
#: The first release whose compiler and calling convention this was written for.
MIN_VERSION = (3, 4)
_INSTALL = 'install the extra: `pip install "pytest-cudaforge[triton]"`'
#: Of what this file makes of a source: another number, and builds in caches are not used any more.
_CONVENTION = "1"
_MAX_SOURCE_CHARS = 1 << 20
_MAX_PRINTED_CHARS = 1 << 20
_ARCH = re.compile(r"sm_(\d{2,3})[af]?")
_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\((.*?)\)", re.DOTALL)
#: Triton's names of types as parameters.py has them. A pointer adds "*", one to const a "const ".
_TYPES = {
    "i1": "bool",
    "u1": "bool",
    "i8": "signed char",
    "u8": "unsigned char",
    "i16": "short",
    "u16": "unsigned short",
    "i32": "int",
    "u32": "unsigned int",
    "i64": "long long",
    "u64": "unsigned long long",
    "fp16": "__half",
    "bf16": "__nv_bfloat16",
    "fp32": "float",
    "f32": "float",
    "fp64": "double",
    "fp8e4nv": "__nv_fp8_e4m3",
    "fp8e5": "__nv_fp8_e5m2",
}
#: What a parameter may be called and get its value from the launch's options, as in Triton's own launches.
_OPTION_PARAMETERS = ("num_warps", "num_stages", "num_ctas")


class TritonLanguage:
    """Triton from its wheel, which brings ptxas; ``arch`` is the device's, e.g. "sm_90"."""

    name = "triton"
    source_name = SOURCE_NAME
    file_names = (SOURCE_NAME, "plan.py")

    def availability(self) -> str:
        """ "" where Triton is installed, else the reason with its remedy. Triton is not imported for it."""
        try:
            version = triton_version()
        except ToolchainError as error:
            return str(error)
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers < MIN_VERSION:
            least = ".".join(map(str, MIN_VERSION))
            return str(ToolchainError(f"Triton is {version}", expected=f"{least} or newer", remedy=_INSTALL))
        return ""

    def fingerprint(self, arch: str) -> str:
        """Digest of Triton's version and files, and the target. Raises ToolchainError where there is none."""
        folder = _folder()
        parts = ["triton", _CONVENTION, triton_version(), str(compute_capability(arch))]
        for pattern in ("_C/libtriton*", "backends/nvidia/bin/ptxas*", "backends/nvidia/lib/*.bc"):
            parts += [f"{path.name}:{path.stat().st_size}" for path in sorted(folder.glob(pattern))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def compile(self, source: str, unit: Unit, arch: str, *, lineinfo: bool = False) -> Binary:
        """Compile every instance in ``unit`` into a cubin of its own. Raises BuildFailure, ToolchainError.

        Imports ``source``: for the builder's sandbox only. Cubins always carry line information.
        """
        _check_text(source)
        capability = compute_capability(arch)
        instances = [_instance(expression) for expression in unit.kernels]
        codes: list[bytes] = []
        kernels: list[KernelInfo] = []
        logs: list[str] = []
        with _own_folder() as folder, _imported(source, folder) as module:
            for expression, instance in zip(unit.kernels, instances, strict=True):
                made = _compile(module, instance, dict(unit.constants), capability, folder)
                start = sum(map(len, codes))
                codes.append(made.code)
                kernels.append(made.info(expression, start))
                logs.append(made.log)
        log = "\n".join(dict.fromkeys(filter(None, logs)))
        return Binary(self.name, arch, unit.constants, b"".join(codes), tuple(kernels), log)


def triton_version() -> str:
    """The version that is installed, read without importing it. Raises ToolchainError where there is none."""
    text = (_folder() / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    if match is None:
        raise ToolchainError("Triton's version cannot be read", remedy=_INSTALL)
    return match.group(1)


def compute_capability(arch: str) -> int:
    """ "sm_90" as 90. Raises ToolchainError for a name that is no architecture."""
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ToolchainError(
            f"Triton cannot compile for {arch!r}",
            expected="a CUDA architecture such as sm_80 or sm_90",
            remedy="run on a CUDA device (--device cuda), or forge in cpp on a CPU",
        )
    return int(match.group(1))


def warm_up() -> None:
    """Let the process that forks builders, or workers, know what every compile asks first: a digest of Triton's files,
    and ptxas. Nothing of a Triton that has no such names (3.4 to 3.6 have), or finds no file of its own: each child
    asks for itself then, and is told what is wrong."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        from triton.runtime import cache

        cache.triton_key()
    with contextlib.suppress(ImportError, AttributeError, OSError, RuntimeError, subprocess.SubprocessError):
        from triton import knobs

        _ = knobs.nvidia.ptxas


def _folder() -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise ToolchainError("Triton is not here", expected="the package triton", remedy=_INSTALL)
    folder = Path(spec.origin).parent
    if folder.parent.name not in ("site-packages", "dist-packages"):
        raise ToolchainError(
            f"Triton lies in {folder.parent}, where the sandbox does not look",
            expected="an installed package (PYTHONPATH does not reach the builder)",
            remedy=_INSTALL,
        )
    return folder


# -- kernel.py -------------------------------------------------------------------------------------------------


def _check_text(source: str) -> None:
    try:
        source.encode()
    except UnicodeEncodeError:
        source = "\0"
    if "\0" in source or len(source) > _MAX_SOURCE_CHARS:
        raise BuildFailure(
            f"{SOURCE_NAME} is no Python text",
            expected=f"valid Unicode without zero bytes, under {_MAX_SOURCE_CHARS} characters",
        )


def _instance(expression: str) -> Instance:
    try:
        return parse_instance(expression)
    except ValueError as error:
        raise BuildFailure(str(error), expected='a launch such as launch("relu", ...) in plan.py') from None


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A folder for kernel.py and Triton's cache; its path, which cubins hold, is the same in every builder."""
    folder = Path(tempfile.gettempdir(), "cudaforge-triton")
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        folder = Path(tempfile.mkdtemp(prefix="cudaforge-triton-"))
    before = {name: os.environ.get(name) for name in _settings(folder)}
    os.environ.update(_settings(folder))
    try:
        yield folder
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _settings(folder: Path) -> dict[str, str]:
    # The log of ptxas has the registers.
    return {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_HOME": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"}


@contextlib.contextmanager
def _imported(source: str, folder: Path) -> Iterator[types.ModuleType]:
    """kernel.py as a module. Whatever it raises becomes a BuildFailure, SystemExit and its kin included."""
    _require_triton()
    path = folder / SOURCE_NAME
    path.write_text(source, encoding="utf-8")
    os.utime(path, (0, 0))  # ptxas writes the file's time into the cubin
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get("kernel")
    sys.modules["kernel"] = module
    try:
        _execute(spec.loader, module, path)
        yield module
    finally:
        sys.modules.pop("kernel", None)
        if before is not None:
            sys.modules["kernel"] = before


def _execute(loader: importlib.abc.Loader, module: types.ModuleType, path: Path) -> None:
    try:
        with _quiet():
            loader.exec_module(module)
    except BaseException as error:  # noqa: BLE001 - a candidate's own code, in a process that is thrown away
        raise BuildFailure(f"{SOURCE_NAME} cannot be imported: {_said(error)}", log=_told(error, path)) from None


def _require_triton() -> None:
    try:
        import triton.compiler  # noqa: F401
    except ImportError as error:
        raise ToolchainError(f"Triton cannot be imported: {error}", expected="triton", remedy=_INSTALL) from None


class _Beginning(io.StringIO):
    """Keeps the beginning of what is printed: endless output takes time, which has its limit, but no memory."""

    def write(self, text: str) -> int:
        room = _MAX_PRINTED_CHARS - self.tell()
        if room > 0:
            super().write(text[:room])
        return len(text)


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """What is printed goes nowhere but into the text this gives."""
    text = _Beginning()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:MAX_LINE_CHARS].rstrip(": ")


def _told(error: BaseException, path: Path) -> str:
    """The error with the lines of kernel.py that led to it; no line of another file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    lines = [f"{SOURCE_NAME}:{frame.lineno}: {frame.line or ''}" for frame in frames]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(f"{SOURCE_NAME}:{error.lineno}: {(error.text or '').strip()}")
    text = f"{type(error).__name__}: {error}".replace(str(path), SOURCE_NAME)
    return _cut([*lines, *text.splitlines()])


def _cut(lines: Sequence[str]) -> str:
    kept = [line.rstrip()[:MAX_LINE_CHARS] for line in lines if line.strip()]
    if len(kept) > MAX_LOG_LINES:
        kept = [*kept[:MAX_LOG_LINES], f"... {len(kept) - MAX_LOG_LINES} more lines"]
    return "\n".join(kept)


# -- one instance ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compiled:
    """A cubin and what a launch of it needs."""

    symbol: str
    params: tuple[str, ...]
    code: bytes
    threads: int
    shared_bytes: int
    cluster_blocks: int
    scratch_pointers: int
    usage: KernelResources
    log: str

    def info(self, expression: str, start: int) -> KernelInfo:
        resources = KernelResources(
            expression,
            self.usage.registers,
            # All of it is dynamic; what a block takes is what its author wants to see.
            self.shared_bytes,
            self.usage.local_bytes,
            self.usage.spill_bytes,
        )
        launch = CompiledLaunch(
            self.threads, self.shared_bytes, self.cluster_blocks, self.scratch_pointers, start, len(self.code)
        )
        return KernelInfo(expression, self.symbol, self.params, resources, launch)


@dataclass
class _Binding:
    """Triton's view of an instance: types by parameter, values of the constexpr ones, what is known of the others."""

    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    params: tuple[str, ...]


def _compile(
    module: types.ModuleType, instance: Instance, constants: Mapping[str, int | float], capability: int, folder: Path
) -> _Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    function = _function(module, instance.kernel)
    bound = _bind(function, instance, constants)
    source = ASTSource(function, bound.signature, bound.constants, bound.attributes)
    options = {name: value for name, value in instance.options if value}
    with _complaints(folder) as complaints:
        try:
            with _quiet() as printed:
                made = triton_compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        except (OSError, MemoryError):
            raise  # the machine's state as likely as the candidate's fault: nothing to remember
        except BaseException as error:  # noqa: BLE001 - the candidate's functions run while Triton compiles them
            log = _cut([_told(error, folder / SOURCE_NAME), *complaints()])
            raise BuildFailure(f'Triton refused kernel "{instance.kernel}": {_cause(error)}', log=log) from None
    _check_memory(instance.kernel, made.metadata)
    return _described(made, bound, printed.getvalue())


def _function(module: types.ModuleType, name: str) -> Any:
    from triton.runtime.jit import JITFunction, KernelInterface

    found = vars(module).get(name)
    if isinstance(found, JITFunction):
        return found
    known = sorted(key for key, value in vars(module).items() if isinstance(value, JITFunction))
    expected = f"a @triton.jit function of {SOURCE_NAME}: {', '.join(known) or 'there is none'}"
    if isinstance(found, KernelInterface):
        raise BuildFailure(
            f'kernel "{name}" is wrapped by {type(found).__name__.lower()}',
            expected="a bare @triton.jit function",
            remedy="choose its constants, num_warps and num_stages in plan.py; nothing is tuned while it runs",
        )
    raise BuildFailure(f'kernel "{name}" names nothing to launch in {SOURCE_NAME}', expected=expected)


def _bind(function: Any, instance: Instance, constants: Mapping[str, int | float]) -> _Binding:
    """Match the launch's arguments and constants with the function's parameters. Raises BuildFailure."""
    names = [param.name for param in function.params if not param.is_constexpr]
    _check_count(instance, names)
    _check_constants(instance.kernel, function, constants)
    words = iter(instance.arguments)
    bound = _Binding({}, {}, {}, ())
    params: list[str] = []
    for place, param in enumerate(function.params):
        if param.is_constexpr:
            bound.signature[param.name] = "constexpr"
            bound.constants[param.name] = _constant(instance, param, constants)
            continue
        kind, value, aligned = _specialised(next(words), param)
        bound.signature[param.name] = kind
        if kind == "constexpr":
            bound.constants[param.name] = value
        elif aligned:
            bound.attributes[(place,)] = [["tt.divisibility", ALIGN_BYTES]]
        params.append(_type_name(instance.kernel, param.name, kind))
    bound.params = tuple(params)
    return bound


def _check_count(instance: Instance, names: Sequence[str]) -> None:
    given = len(instance.arguments)
    if given == len(names):
        return
    missing = names[given:]
    what = f"{', '.join(missing)} missing" if missing else f"{given - len(names)} too many"
    raise BuildFailure(
        f'kernel "{instance.kernel}" is launched with {given} arguments: {what}',
        expected=f"{len(names)}: ({', '.join(names)}); tl.constexpr parameters come from constants",
        remedy=f"make args=(...) in plan.py and the kernel's parameters in {SOURCE_NAME} agree",
    )


def _check_constants(kernel: str, function: Any, constants: Mapping[str, int | float]) -> None:
    folded = [param.name for param in function.params if param.is_constexpr]
    for name in constants:
        if name not in folded:
            known = name in function.arg_names
            what = "is a parameter, but no tl.constexpr" if known else "is no parameter of it"
            beside = f"say launch(..., {name}={constants[name]}), beside constants" if name in OPTIONS else ""
            raise BuildFailure(
                f'kernel "{kernel}": constant {name} {what}',
                expected=f"constants for {', '.join(folded) or 'nothing: it has no tl.constexpr parameter'}",
                remedy=f"pass {name} in args" if known else beside,
            )


def _constant(instance: Instance, param: Any, constants: Mapping[str, int | float]) -> Any:
    if param.name in constants:
        return constants[param.name]
    if param.name in _OPTION_PARAMETERS:
        return dict(instance.options)[param.name]
    if param.has_default:
        return param.default
    raise BuildFailure(
        f'kernel "{instance.kernel}": its tl.constexpr parameter {param.name} has no value',
        expected=f'launch("{instance.kernel}", ..., constants={{"{param.name}": ...}}) in plan.py',
    )


def _specialised(word: str, param: Any) -> tuple[str, Any, bool]:
    """(type, value where it is folded, known to be a multiple of 16), by the rules of Triton's own launcher."""
    kind, _, multiple = word.partition(":")
    aligned = bool(multiple) and not param.do_not_specialize and not param.do_not_specialize_on_alignment
    if kind.startswith("*"):
        return param.annotation_type or (f"*k{kind[1:]}" if param.is_const else kind), None, aligned
    if kind == "none":
        return "constexpr", None, False
    if param.annotation_type:
        return param.annotation_type, None, aligned and kind[0] in "iu"
    if kind == "1":
        return ("i32", None, False) if param.do_not_specialize else ("constexpr", 1, False)
    return kind, None, aligned


def _type_name(kernel: str, param: str, kind: str) -> str:
    if kind == "constexpr":
        return FOLDED
    pointer, const = kind.startswith("*"), kind.startswith("*k")
    name = _TYPES.get(kind[2:] if const else kind[1:] if pointer else kind)
    if name is None:
        raise BuildFailure(
            f'kernel "{kernel}": parameter {param} has the type {kind}',
            expected="a tensor or a number; tensor descriptors cannot be passed",
            remedy="pass the tensor, its sizes and its strides",
        )
    return f"{'const ' if const else ''}{name}{'*' if pointer else ''}"


def _check_memory(kernel: str, metadata: Any) -> None:
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        raise BuildFailure(
            f'kernel "{kernel}" needs scratch memory in global memory',
            expected="a kernel that works on its arguments alone",
            remedy="use pointers or tl.make_block_ptr instead of tl.make_tensor_descriptor",
        )
    if getattr(metadata, "tensordesc_meta", None):
        raise BuildFailure(
            f'kernel "{kernel}" takes a tensor descriptor',
            expected="pointers",
            remedy="pass the tensor and its strides",
        )


def _described(made: Any, bound: _Binding, printed: str) -> _Compiled:
    metadata = made.metadata
    symbol = str(metadata.name)
    passed = sum(param != FOLDED for param in bound.params)
    return _Compiled(
        symbol,
        bound.params,
        bytes(made.asm["cubin"]),
        threads=32 * int(metadata.num_warps),
        shared_bytes=int(metadata.shared or 0),
        cluster_blocks=int(metadata.num_ctas),
        scratch_pointers=_parameter_count(str(made.asm["ptx"])) - passed,
        usage=resources_in(printed).get(symbol, KernelResources(symbol)),
        log=reduce_log(printed, {SOURCE_NAME}),
    )


def _parameter_count(ptx: str) -> int:
    """How many parameters the kernel's entry has: one or two pointers to scratch memory follow the arguments."""
    match = _ENTRY.search(ptx)
    if match is None:
        raise ToolchainError("Triton's PTX has no entry", expected="one kernel", remedy=_INSTALL)
    return match.group(2).count(".param")


def _cause(error: BaseException) -> str:
    """The innermost reason: a CompilationError wraps the error of the function that was called."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    # A CompilationError shows the source first and says what is wrong with it last.
    last = lines[-1] if lines and type(error).__name__.startswith("Compilation") else (lines or [""])[0]
    return f"{type(error).__name__}: {last.strip()}"[:MAX_LINE_CHARS].rstrip(": ")


@contextlib.contextmanager
def _complaints(folder: Path) -> Iterator[Any]:
    """Lines that Triton's own compiler writes to standard error about kernel.py, as a function that reads them."""
    path = folder / "stderr"
    kept = os.dup(2)
    target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(target, 2)

    def read() -> list[str]:
        text = os.pread(target, 1 << 16, 0).decode("utf-8", "replace")
        return reduce_log(text.replace(f"{folder}/", ""), {SOURCE_NAME}).splitlines()

    try:
        yield read
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(target)


__all__ = ["MIN_VERSION", "SOURCE_NAME", "TritonLanguage", "compute_capability", "triton_version", "warm_up"]
