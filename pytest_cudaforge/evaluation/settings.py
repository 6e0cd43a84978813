"""What a call must leave as it found it: settings of its thread, of Python, torch and a GPU, by which others answer.

A kernel that leaves denormals flushed, or another default dtype, is right in every comparison, and whatever runs after
it in the same program is wrong. Asked of the process that made the calls, so that host code may lie about it.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import gc
import importlib.util
import itertools
import os
import platform
import random
import re
import resource
import secrets
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_cudaforge.evaluation.onlookers import ONLOOKERS, onlookers

__all__ = [
    "DRAWN",
    "OPENMP_REGIONS",
    "OPENMP_THREADS",
    "TORCH_OPERATORS",
    "Randomness",
    "allocated_bytes",
    "changed",
    "device_settings",
    "found_settings",
    "keep_freed_memory",
    "openmp_counts",
    "openmp_regions",
    "operators_at_first",
    "process_settings",
    "thread_settings",
    "torch_operators",
    "torch_settings",
]

#: Names of what is also asked for alone; the first one is no harm where the reference does it as well.
DRAWN = "the state of torch's random numbers (draw from a torch.Generator of the kernel's own)"
OPENMP_THREADS = "the number of OpenMP's threads (omp_set_num_threads)"
OPENMP_REGIONS = "how OpenMP's parallel regions run (omp_set_max_active_levels, omp_set_dynamic, omp_set_schedule)"
TORCH_OPERATORS = "what torch's own operators run (TORCH_LIBRARY_IMPL)"

_ENVIRONMENT_BYTES = 256
#: x86-64: MXCSR lies behind the x87's environment; its low six bits tell what has happened, and are nobody's setting.
_MXCSR, _MXCSR_SETTINGS = slice(28, 32), 0xFFC0
#: Before it, the x87's control word: by how many bits, and which way, long doubles are rounded.
_X87, _X87_SETTINGS = slice(0, 2), 0x0F00
#: What GOMP_parallel calls in every thread of a team.
_PARALLEL_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
#: AArch64: FPCR comes first.
_FPCR = slice(0, 4)


@functools.lru_cache(maxsize=1)
def _libm() -> ctypes.CDLL:
    return ctypes.CDLL("libm.so.6")


def _floating_point() -> int:
    """Rounding, and what becomes of denormals, as the processor keeps them for this thread."""
    environment = (ctypes.c_ubyte * _ENVIRONMENT_BYTES)()
    _libm().fegetenv(environment)
    machine = platform.machine()
    if machine == "x86_64":
        found = bytes(environment)
        x87 = int.from_bytes(found[_X87], "little") & _X87_SETTINGS
        return x87 << 16 | int.from_bytes(found[_MXCSR], "little") & _MXCSR_SETTINGS
    if machine == "aarch64":
        return int.from_bytes(bytes(environment)[_FPCR], "little")
    return int(_libm().fegetround())


def _floating_points() -> frozenset[int]:
    """What :func:`_floating_point` says in each thread that OpenMP's parallel regions run on, the calling one included.

    A kernel that puts its caller's thread right may have left the others: whatever else runs on this pool, the next
    kernel or torch's own operators, then answers otherwise.
    """
    found = {_floating_point()}
    body = _PARALLEL_BODY(lambda _: found.add(_floating_point()))
    for library in _openmp_libraries():
        library.GOMP_parallel(body, None, ctypes.c_uint(0), ctypes.c_uint(0))
    return frozenset(found)


class _Loaded(ctypes.Structure):
    """How ``struct dl_phdr_info`` begins."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


_LOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p)


def _loaded_paths() -> set[str]:
    """Of the shared objects in this process, without opening a file: a candidate may have left no descriptor."""
    found: set[str] = set()

    def look(loaded: Any, _: int, __: object) -> int:
        found.add(os.fsdecode(loaded.contents.name or b""))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(_LOOK(look), None)
    return found


def _openmp_libraries() -> Iterator[ctypes.CDLL]:
    """Each GNU OpenMP runtime in this process: what kernels brought along, and torch's own copy."""
    for path in sorted(path for path in _loaded_paths() if "/libgomp" in path):
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def openmp_counts() -> dict[str, int]:
    """How many threads the calling thread's parallel regions get, by the path of each runtime in this process."""
    return {str(library._name): int(library.omp_get_max_threads()) for library in _openmp_libraries()}


def openmp_regions() -> dict[str, tuple[int, ...]]:
    """How deep the calling thread's parallel regions are nested at most, whether they may be of fewer threads, and
    their loops' schedule, by the path of each runtime in this process."""
    found: dict[str, tuple[int, ...]] = {}
    for library in _openmp_libraries():
        kind, chunk = ctypes.c_int(), ctypes.c_int()
        library.omp_get_schedule(ctypes.byref(kind), ctypes.byref(chunk))
        levels, dynamic = library.omp_get_max_active_levels(), library.omp_get_dynamic()
        found[str(library._name)] = (int(levels), int(dynamic), kind.value, chunk.value)
    return found


#: mallopt's names, and what the oracle's environment sets them to: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX.
_TRIM_BYTES, _TOP_PAD_BYTES = (1 << 31) - 1, 64 << 20
_KEPT_MEMORY = ((-1, _TRIM_BYTES), (-2, _TOP_PAD_BYTES), (-4, 0))
#: In glibc's own table: when memory is given back, how much more is taken, from where on by mmap; tests for arenas.
_MALLOC_WORDS = 5


def keep_freed_memory() -> None:
    """Fresh pages at every call would slow a candidate down where the baselines' process does not pay for them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for name, value in _KEPT_MEMORY:
            libc.mallopt(ctypes.c_int(name), ctypes.c_int(value))


@functools.lru_cache(maxsize=1)
def _malloc_table() -> int:
    """Where glibc keeps what mallopt sets: among its variables, beginning with what :func:`keep_freed_memory` has just
    put there. 0: nowhere, or at more than one place."""
    wanted, places = struct.pack("<QQ", _TRIM_BYTES, _TOP_PAD_BYTES), list[int]()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as stream:
        lines = [line.split(maxsplit=5) for line in stream]
    for begin, end in (line[0].split("-") for line in lines if line[1] == "rw-p" and "/libc.so" in line[-1]):
        start = int(begin, 16)
        code = ctypes.string_at(start, int(end, 16) - start)
        places += [start + found.start() for found in re.finditer(re.escape(wanted), code)]
    return places[0] if len(places) == 1 else 0


def _malloc_parameters() -> tuple[int, ...]:
    place = _malloc_table()
    return struct.unpack(f"<{_MALLOC_WORDS}Q", ctypes.string_at(place, 8 * _MALLOC_WORDS)) if place else ()


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """What malloc has given out and not got back; 0 where there is no glibc >= 2.33 to tell.

    What a call leaks may for long come from memory that the process had already.
    """
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return 0
    function.restype = _MallInfo
    found = function()
    return int(found.uordblks) + int(found.hblkhd)


def thread_settings(team: bool = True) -> dict[str, object]:
    """Of the calling thread, by name: how it rounds (``team``, on a CPU: and OpenMP's others), the processors it may
    run on, the signals that reach it; and what native code may change of the process: its timers, random numbers (on a
    CPU), and what malloc hands out. Linux."""
    return {
        "rounding or the treatment of denormals": _floating_points() if team else {_floating_point()},
        "the processors that its thread may run on": frozenset(os.sched_getaffinity(0)),
        "the signals that its thread has blocked": frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "the signals that are caught, or ignored": tuple(
            _signals(which) - _LIBC_SIGNALS - _llvm_signals() for which in ("SigCgt", "SigIgn")
        ),
        "the timers that send signals": tuple(signal.getitimer(which)[0] > 0 for which in _TIMERS),
        "what malloc fills memory with (M_PERTURB)": _malloc_fills(),
        "C's random numbers (rand, random, drand48; keep a state of the kernel's own)": _c_random() if team else (),
        OPENMP_THREADS: openmp_counts(),
        OPENMP_REGIONS: openmp_regions(),
    }


#: glibc's own, for threads that are cancelled or change their user.
_LIBC_SIGNALS = frozenset({32, 33})
#: What LLVM catches from the first kernel on that Triton compiles, so that a process that is ended leaves no file
#: half written: SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE, SIGTERM, SIGXCPU, SIGXFSZ, SIGSYS.
_LLVM_SIGNALS = frozenset({1, 2, 3, 10, 12, 13, 15, 24, 25, 31})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
#: A size that no other code asks for, so that nobody else's memory comes back.
_FILLED_BYTES = 3 * 4096 + 136
#: malloc gives the same place again at once, as a rule.
_FILLED_ROUNDS = 8


@functools.lru_cache(maxsize=1)
def _llvm_signals() -> frozenset[int]:
    return _LLVM_SIGNALS if importlib.util.find_spec("triton") is not None else frozenset()


def _malloc_fills() -> bool:
    """Is memory that malloc hands out full of one byte, as it never is by itself once other bytes were left there?"""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    written = None
    for _ in range(_FILLED_ROUNDS):
        place = libc.malloc(_FILLED_BYTES)
        inner = ctypes.string_at(place + 64, _FILLED_BYTES - 128)
        ctypes.memmove(place + 64, bytes(range(256)) * 16, 4096)
        libc.free(place)
        if place == written:  # elsewhere there may be anybody's bytes
            return inner[0] != 0 and len(set(inner)) == 1
        written = place
    return False


#: How many bytes random's state has, by its kind; what is left of its first word tells how far it is.
_RANDOM_BYTES = (8, 32, 64, 128, 256)


def _c_random() -> tuple[bytes, ...]:
    """The state of glibc's random (and rand) and of drand48: one has to put another in its place to be told."""
    libc, other = ctypes.CDLL(None), ctypes.create_string_buffer(_RANDOM_BYTES[-1])
    libc.initstate.restype = libc.setstate.restype = libc.seed48.restype = ctypes.c_void_p
    place = libc.initstate(ctypes.c_uint(1), other, ctypes.c_size_t(len(other)))
    kind = int.from_bytes(ctypes.string_at(place, 4), sys.byteorder) % len(_RANDOM_BYTES)
    found = ctypes.string_at(place, _RANDOM_BYTES[kind])
    libc.setstate(ctypes.c_void_p(place))
    numbers = ctypes.string_at(libc.seed48((ctypes.c_ushort * 3)()), 6)
    libc.seed48((ctypes.c_ushort * 3).from_buffer_copy(numbers))
    return found, numbers


#: Variables that torch and Triton set for themselves as they are first used, underscores in front left out.
_LIBRARIES_OWN = (
    *("TORCH", "PYTORCH", "TRITON", "KINETO", "KMP_", "CUDA_HOME", "CUDA_MODULE_LOADING", "CUBLAS_WORKSPACE_CONFIG"),
    *("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"),
)


_RESOURCES = tuple(sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}))


def _native_environment() -> Iterator[tuple[str, str]]:
    """As native code, and every process that is started, has it: what C's setenv changes, Python does not see."""
    variables = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    for place in itertools.count() if variables else ():
        entry: bytes | None = variables[place]
        if entry is None:
            return
        name, _, value = os.fsdecode(entry).partition("=")
        yield name, value


def _umask() -> int:
    found = os.umask(0o077)  # there is no other way to ask
    os.umask(found)
    return found


def process_settings() -> dict[str, object]:
    """Of Python, by name."""
    return {
        "the environment": frozenset(
            pair
            for pair in (*os.environ.items(), *_native_environment())
            if not pair[0].lstrip("_").startswith(_LIBRARIES_OWN)
        ),
        "the garbage collector": (gc.isenabled(), gc.get_threshold()),
        "sys.getswitchinterval()": sys.getswitchinterval(),
        ONLOOKERS: onlookers(),
        "the mode of new files (umask)": _umask(),
        "what the process may use (setrlimit)": tuple(resource.getrlimit(number) for number in _RESOURCES),
        "the handlers of signals": tuple(id(signal.getsignal(number)) for number in signal.valid_signals()),
    }


class Randomness:
    """Python's random numbers, numpy's and torch's, of this process. Who draws some leaves others to the next one,
    which is nobody's harm; who seeds them, or puts an old state back, makes all that others draw the same."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._seed = 0
        self._seen: set[tuple[str, int]] = set()
        self._reseeded: set[str] = set()
        self._scattered: dict[str, int] = {}
        self._drawn: set[str] = set()

    def scatter(self) -> None:
        """Seed them with a secret: from here on no two calls begin with the same state, nor with one just seeded."""
        self._seed = seed = secrets.randbits(32)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
        self._torch.manual_seed(seed)
        for name, generator in self._generators():
            self._seen.add((name, _state_of(generator)))
            if generator.device.type == "cuda":
                generator.set_offset(4 * (1 + secrets.randbelow(1 << 20)))
            else:
                self._torch.empty(1 + secrets.randbelow(8), device="cpu").uniform_(generator=generator)
            self._scattered[name] = _state_of(generator)

    def look(self) -> None:
        """What a call has left; the same as after another call, or as after seeding, is no chance."""
        found = {"random": hash(random.getstate())}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            _, key, place, *_ = numpy.random.get_state()
            found["numpy.random"] = hash((key.tobytes(), place))
        for name, generator in self._generators():
            found[name] = _state_of(generator)
            if found[name] != self._scattered.get(name):
                self._drawn.add(name)
            if generator.initial_seed() != self._seed:
                self._reseeded.add(name)
        for pair in found.items():
            if pair in self._seen:
                self._reseeded.add(pair[0])
            self._seen.add(pair)

    @property
    def drawn(self) -> bool:
        """Has any call drawn torch's random numbers?"""
        return bool(self._drawn)

    def _generators(self) -> Iterator[tuple[str, Any]]:
        yield "torch's random numbers", self._torch.default_generator
        if self._torch.cuda.is_initialized():
            yield "torch.cuda's random numbers", self._torch.cuda.default_generators[self._torch.cuda.current_device()]

    @property
    def reseeded(self) -> tuple[str, ...]:
        return tuple(f"the seed of {name}" for name in sorted(self._reseeded))


def _state_of(generator: Any) -> int:
    return hash(bytes(generator.get_state().tolist()))


#: By the names that CUDA's driver has for them.
_LIMITS = ("STACK_SIZE", "PRINTF_FIFO_SIZE", "MALLOC_HEAP_SIZE", "MAX_L2_FETCH_GRANULARITY", "PERSISTING_L2_CACHE_SIZE")


def device_settings(driver: Any, stream: int, torch: Any) -> dict[str, object]:
    """Of the current CUDA context: what cudaDeviceSetLimit sets (0 for a limit that the device does not have), what
    everything in ``stream``, the caller's, keeps in the L2, and the memory that torch's allocator may take."""
    share = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 has it
    limits = (getattr(driver.CUlimit, f"CU_LIMIT_{name}") for name in _LIMITS)
    found = tuple(int(driver.cuCtxGetLimit(at)[1] or 0) for at in limits)
    _, held = driver.cuStreamGetAttribute(stream, driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW)
    return {
        "the limits of the device (cudaDeviceSetLimit)": found,
        "the share of the device's memory (set_per_process_memory_fraction)": share() if share is not None else None,
        "the access policy window of the caller's stream": held is not None and held.accessPolicyWindow.num_bytes > 0,
    }


#: Whether torch computes with them; older versions do not tell of all.
_CPU_LIBRARIES = ("_get_mkldnn_enabled", "_get_nnpack_enabled")
#: How products in half precision are summed.
_SUMS = (
    *("allow_fp16_accumulation", "allow_fp16_reduced_precision_reduction"),
    "allow_bf16_reduced_precision_reduction",
)


def torch_settings(torch: Any, team: bool = True) -> dict[str, object]:
    """What torch answers by, by name, and :func:`thread_settings`."""
    cuda = torch.cuda.is_initialized()
    backends = torch.backends.cuda
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_default_device()": str(torch.get_default_device()),
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_autocast_enabled()": (torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")),
        "torch.backends.cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.allow_tf32),
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.backends.mkldnn and nnpack": tuple(bool(getattr(torch._C, name, bool)()) for name in _CPU_LIBRARIES),
        "torch.backends.cuda.matmul": tuple(getattr(backends.matmul, name, None) for name in _SUMS),
        "the kernels that attention may use (torch.backends.cuda.enable_flash_sdp and the like)": (
            backends.flash_sdp_enabled(),
            backends.mem_efficient_sdp_enabled(),
            backends.math_sdp_enabled(),
            backends.cudnn_sdp_enabled(),
        ),
        "the hooks that all modules have": _hooks(torch),
        "the hooks for what autograd saves": repr(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "modes that every operator passes through": (
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
        ),
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled(),
        "torch.cuda.current_device()": torch.cuda.current_device() if cuda else 0,
        "torch.cuda.current_stream()": torch.cuda.current_stream().cuda_stream if cuda else 0,
        **process_settings(),
        **thread_settings(team),
    }


def found_settings(torch: Any) -> dict[str, object]:
    """What no file may change even as it is imported, by name: functions of torch and of Python's clocks, the hooks of
    all modules, which faults of the process have handlers, who hears of errors, and how malloc goes about it where
    :func:`keep_freed_memory` was called."""
    return {
        "torch's own functions, or Python's clocks": _functions(torch),
        "what is in torch's own functions (__code__, __defaults__)": _inside_functions(torch),
        "the handlers of faults": _fault_handlers(),
        "who hears of errors that nobody caught": tuple(
            id(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook)
        ),
        "rounding or the treatment of denormals, from its import on": _floating_point(),
        "modules of Python's that others import, or its builtins": _modules(),
        "the hooks that all modules have, from its import on": _hooks(torch),
        "where malloc takes memory from, and when it gives it back (mallopt)": _malloc_parameters(),
    }


#: Where an operator's kernels are registered for whoever calls it, on a CPU or a GPU.
_KERNEL_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "Autograd[alias]", "CompositeImplicitAutograd[alias]")


@functools.lru_cache(maxsize=1)
def operators_at_first(torch: Any) -> dict[str, frozenset[str]]:
    """What torch's operators run by their names, as this was first asked for: kernels that torch's own files brought
    left out."""
    return _registered(torch)


def _registered(torch: Any) -> dict[str, frozenset[str]]:
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return {name: frozenset(_kernels(torch._C._dispatch_dump(name))) for name in names}


def _kernels(dump: str) -> Iterator[str]:
    """The lines for whoever calls the operator; without what torch's own Python registers as it is first used."""
    for line in dump.splitlines():
        key, _, where = line.partition(": registered at ")
        if key in _KERNEL_KEYS and "/torch/" not in where and "/pytorch/" not in where:
            yield line


def torch_operators(torch: Any) -> tuple[str, ...]:
    """torch's operators that run other kernels than those that torch itself has brought, by name."""
    first = operators_at_first(torch)
    return tuple(name for name, kernels in _registered(torch).items() if not kernels <= first.get(name, frozenset()))


def _fault_handlers() -> frozenset[int]:
    """Signals of faults that are caught, by native code as by Python's. Linux."""
    return _signals("SigCgt") & frozenset(_FAULTS)


def _signals(which: str) -> frozenset[int]:
    """The set of signals that the kernel has under this name in the process's status."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as stream:
        mask = next((int(line.split()[1], 16) for line in stream if line.startswith(f"{which}:")), 0)
    return frozenset(number for number in range(1, 65) if mask >> (number - 1) & 1)


def _hooks(torch: Any) -> tuple[tuple[str, int], ...]:
    """How many of each kind ``torch.nn.modules.module.register_module_forward_hook`` and its like have left."""
    found = vars(torch.nn.modules.module).items()
    return tuple(
        sorted(
            (name, len(value)) for name, value in found if name.startswith("_global_") and isinstance(value, Mapping)
        )
    )


def _functions(torch: Any) -> dict[tuple[str, str], object]:
    """Whose function each of torch's names stands for: torch's, which torch.compile may wrap, or which other one. Names
    that come later, as modules are loaded, change nothing."""
    folder = os.path.dirname(torch.__file__) + os.sep
    return {place: _whose(value, folder) for place, value in _named_functions(torch)}


def _named_functions(torch: Any) -> Iterator[tuple[tuple[str, str], Any]]:
    layers = {name: value for name, value in vars(torch.nn).items() if isinstance(value, type)}
    spaces = {
        **layers,
        **{"torch": torch, "F": torch.nn.functional, "Tensor": torch.Tensor, "Module": torch.nn.Module},
        **{"cuda": torch.cuda, "Event": torch.cuda.Event, "Stream": torch.cuda.Stream, "time": time},
    }
    named = ((space, name, value) for space, of in spaces.items() for name, value in vars(of).items())
    yield from (((space, name), value) for space, name, value in named if callable(value))


@functools.lru_cache(maxsize=1)
def _functions_at_first(torch: Any) -> tuple[types.FunctionType, ...]:
    return tuple(value for _, value in _named_functions(torch) if isinstance(value, types.FunctionType))


def _inside_functions(torch: Any) -> tuple[tuple[int, ...], ...]:
    """Code, and what parameters are by default, of the functions that torch had when this was first asked for: who
    changes these leaves each name what it was."""
    parts = ((f.__code__, f.__defaults__, f.__kwdefaults__) for f in _functions_at_first(torch))
    return tuple((id(code), *map(id, usual or ()), *map(id, (named or {}).values())) for code, usual, named in parts)


#: Packages whose modules others import.
_EVERYBODYS = (sys.stdlib_module_names | {"torch", "numpy", "triton"}) - {"distutils"}


def _modules() -> dict[str, object]:
    """What each name of Python's own and torch's modules stands for, and each builtin; later ones change nothing.
    (setuptools takes the place of distutils, and nobody minds.)"""
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in _EVERYBODYS}
    found = {**known, **{f"builtins.{name}": value for name, value in vars(builtins).items() if name != "_"}}
    return {name: id(value) for name, value in found.items()}


def _whose(function: object, folder: str) -> object:
    """ "torch" for what was written in its ``folder``; a name can be taken over, ``functools.wraps`` does so."""
    code = getattr(function, "__code__", None)
    if isinstance(code, types.CodeType):
        return "torch" if code.co_filename.startswith(folder) else id(function)
    module = getattr(function, "__module__", None)
    native = isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType, type))
    return "torch" if not native and isinstance(module, str) and module.partition(".")[0] == "torch" else id(function)


def changed(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """The names of what is not as it was; of tables, where a row that was there is another one."""
    return tuple(name for name, value in before.items() if not _same(value, now[name]))


def _same(before: object, now: object) -> bool:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return all(now.get(key) == value for key, value in before.items())
    return before == now
