"""Replay on an NVIDIA GPU: cubins through the CUDA driver.

Loading, attributes and occupancy go through cuda.bindings. A launch itself is one ctypes call of ``cuLaunchKernelEx``
with everything prepared at bind time (configuration struct, argument cells), which costs less than the launch functions
of cuda.core and cuda.bindings, as those convert their arguments on every call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pytest_cudaforge.errors import DeviceError, LaunchFailure
from pytest_cudaforge.languages import DEVICE_LANGUAGES, cubin
from pytest_cudaforge.languages.binary import Binary, KernelInfo, passed, settled
from pytest_cudaforge.languages.parameters import size_bytes
from pytest_cudaforge.plan import Constants, Launch, TensorSpec
from pytest_cudaforge.runtime.limits import PORTABLE_CLUSTER_BLOCKS, KernelLimits, LaunchLimits, check_launch
from pytest_cudaforge.runtime.replay import Call, Parameters, Pointers

_SAME_WIDTH = {
    "bfloat16": ("int16", "<i2"),
    "bool": ("uint8", "|u1"),
    "float8_e4m3fn": ("uint8", "|u1"),
    "float8_e5m2": ("uint8", "|u1"),
}
_TYPESTR = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint8": "|u1",
    "complex64": "<c8",
    "complex128": "<c16",
}


class _CudaLaunch:
    def __init__(self, function: Any, config: Any, kernel: Any, parameters: Parameters) -> None:
        self._config = config  # cuda.bindings' struct: owns the memory the call points into
        self.point, self.moves = parameters.point, parameters.moves  # which keeps the argument cells alive
        # Plain numbers: ctypes takes twice as long to convert objects of its own.
        self.call: Call = functools.partial(
            function, int(config.getPtr()), int(kernel), ctypes.addressof(parameters.addresses), None
        )

    def queue_on(self, stream: int) -> None:
        self._config.hStream = stream


class _CudaZero:
    def __init__(self, function: Any, buffer: int, nbytes: int) -> None:
        self._buffer = buffer
        self._address = ctypes.c_uint64()
        self._stream = ctypes.c_void_p()
        self.call: Call = functools.partial(function, self._address, 0, nbytes, self._stream)

    moves = True

    def point(self, buffers: Sequence[int]) -> None:
        self._address.value = buffers[self._buffer]

    def queue_on(self, stream: int) -> None:
        self._stream.value = stream


class _DeviceMemory:
    """What torch reads a raw device pointer through."""

    def __init__(self, address: int, count: int, typestr: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": typestr,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaDevice:
    """One program's modules in the device's primary context (the one torch uses)."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._driver = _driver()
        self._device = self._ask("cuDeviceGet", ordinal)
        self._context = self._ask("cuDevicePrimaryCtxRetain", self._device)
        self._ask("cuCtxSetCurrent", self._context)
        self._modules: dict[tuple[Constants, str], Any] = {}
        self._code: dict[tuple[Constants, str], bytes] = {}
        self._functions: dict[tuple[Constants, str], Any] = {}
        self._launch, self._memset = _entry_points()

    def load(self, launches: Sequence[Launch], binaries: Sequence[Binary]) -> None:
        limits = self._limits()
        by_constants = {binary.constants: binary for binary in binaries}
        for launch in launches:
            binary = by_constants[launch.constants]
            kernel = binary.kernel(launch.kernel)
            assert kernel is not None  # load_program checked it
            function = self._function(binary, kernel)
            complete, _ = settled(launch, kernel)
            check_launch(complete, limits, self._kernel_limits(function))
            self._opt_in(complete, function)
            self._check_occupancy(complete, function)

    def bind_launch(
        self, launch: Launch, kernel: KernelInfo, binary: Binary, itemsizes: Sequence[int], pointers: Pointers
    ) -> _CudaLaunch:
        complete, params = settled(launch, kernel)
        function = self._functions[binary.constants, kernel.expression]
        parameters = Parameters(complete, params, itemsizes, pointers)
        return _CudaLaunch(self._launch, self._config(complete), function, parameters)

    def bind_zero(self, buffer: int, nbytes: int) -> _CudaZero:
        return _CudaZero(self._memset, buffer, nbytes)

    def tensor(self, address: int, spec: TensorSpec) -> Any:
        import torch

        dtype, device = getattr(torch, spec.dtype), f"cuda:{self._ordinal}"
        if spec.extent == 0:
            return torch.empty(0, dtype=dtype, device=device)
        carrier, typestr = _SAME_WIDTH.get(spec.dtype, (spec.dtype, _TYPESTR.get(spec.dtype, "")))
        flat = torch.as_tensor(_DeviceMemory(address, spec.extent, typestr), device=device)
        return flat if carrier == spec.dtype else flat.view(dtype)

    @contextlib.contextmanager
    def library_scope(self, stream: int) -> Iterator[None]:
        import torch

        with torch.no_grad(), torch.cuda.device(self._ordinal):
            if not stream:
                yield
                return
            external = torch.cuda.ExternalStream(stream)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(external):
                yield

    def explain(self, code: int) -> str:
        driver = self._driver
        result = driver.CUresult(code)
        _, text = driver.cuGetErrorString(result)
        return f"{result.name} ({text.decode() if text else 'no description'})"

    def recover(self, call: Call, code: object) -> object:
        """A thread that never touched this device has another context or none: try once more in ours."""
        driver = self._driver
        result, current = driver.cuCtxGetCurrent()
        if result == driver.CUresult.CUDA_SUCCESS and int(current) == int(self._context):
            return code
        with self._current():
            return call()

    def variables(self) -> Sequence[tuple[int, int]]:
        return [
            (int(self._ask("cuModuleGetGlobal", module, name.encode())[0]), nbytes)
            for key, module in self._modules.items()
            for name, nbytes in cubin.variables(self._code[key])
        ]

    def code(self) -> Sequence[tuple[int, int]]:
        return ()

    def close(self) -> None:
        """Unload the modules; the primary context stays while anybody else holds it."""
        if self._context is None:
            return
        with self._current():
            for module in self._modules.values():
                # After a fault on the device everything answers that fault; the context's end frees the rest.
                self._driver.cuModuleUnload(module)
        self._modules.clear()
        self._code.clear()
        self._functions.clear()
        self._driver.cuDevicePrimaryCtxRelease(self._device)
        self._context = None

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        pushed = self._driver.cuCtxPushCurrent(self._context)[0] == 0
        try:
            yield
        finally:
            if pushed:
                self._driver.cuCtxPopCurrent()

    def _module(self, binary: Binary, kernel: KernelInfo) -> Any:
        """The module that holds the kernel: the binary's own, or the kernel's where each has one (Triton)."""
        key = (binary.constants, kernel.expression if kernel.compiled else "")
        if key not in self._modules:
            code, part = binary.code, kernel.compiled
            if part is not None:
                code = code[part.code_start : part.code_start + part.code_bytes]
            self._modules[key], self._code[key] = self._load_module(binary, code), code
        return self._modules[key]

    def _load_module(self, binary: Binary, code: bytes) -> Any:
        if binary.language not in DEVICE_LANGUAGES:
            raise LaunchFailure(f"a {binary.language} binary cannot be loaded on a GPU", expected="a cubin")
        result, module = self._driver.cuModuleLoadData(code)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise LaunchFailure(
                f"the kernels compiled for {binary.arch} cannot be loaded: {self.explain(int(result))}",
                expected=f"code for this device, {self._arch()}",
                remedy=f"forge with --forge-arch {self._arch()}",
            )
        return module

    def _function(self, binary: Binary, kernel: KernelInfo) -> Any:
        key = (binary.constants, kernel.expression)
        if key not in self._functions:
            result, function = self._driver.cuModuleGetFunction(self._module(binary, kernel), kernel.symbol.encode())
            if result != self._driver.CUresult.CUDA_SUCCESS:
                raise LaunchFailure(f'kernel "{kernel.expression}" is not in its binary ({kernel.symbol})')
            self._check_parameters(function, kernel)
            self._functions[key] = function
        return self._functions[key]

    def _check_parameters(self, function: Any, kernel: KernelInfo) -> None:
        """The cubin's own parameter table against the types we pack: a forged type list must not make the driver
        read past an argument's cell."""
        driver = self._driver
        params = passed(kernel)
        for index in range(len(params) + 1):
            result, _, found_bytes = driver.cuFuncGetParamInfo(function, index)
            exists = result == driver.CUresult.CUDA_SUCCESS
            expected = size_bytes(params[index]) if index < len(params) else None
            if (int(found_bytes) if exists else None) != expected:
                raise LaunchFailure(f'kernel "{kernel.expression}" has other parameters than its description says')

    def _limits(self) -> LaunchLimits:
        name = self._driver.CUdevice_attribute
        prefix = "CU_DEVICE_ATTRIBUTE_"

        def value(attribute: str) -> int:
            return int(self._ask("cuDeviceGetAttribute", getattr(name, prefix + attribute), self._device))

        def sizes(kind: str) -> tuple[int, int, int]:
            return (value(f"MAX_{kind}_DIM_X"), value(f"MAX_{kind}_DIM_Y"), value(f"MAX_{kind}_DIM_Z"))

        return LaunchLimits(
            max_grid=sizes("GRID"),
            max_block=sizes("BLOCK"),
            max_threads=value("MAX_THREADS_PER_BLOCK"),
            max_shared_bytes=value("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            clusters=bool(value("CLUSTER_LAUNCH")),
            cooperative=bool(value("COOPERATIVE_LAUNCH")),
        )

    def _kernel_limits(self, function: Any) -> KernelLimits:
        name = self._driver.CUfunction_attribute
        threads = self._ask("cuFuncGetAttribute", name.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function)
        shared = self._ask("cuFuncGetAttribute", name.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        return KernelLimits(int(threads), int(shared))

    def _opt_in(self, launch: Launch, function: Any) -> None:
        """Dynamic shared memory above 48 KB and clusters above 8 blocks must be asked for; the largest launch wins."""
        name = self._driver.CUfunction_attribute
        shared = name.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        granted = int(self._ask("cuFuncGetAttribute", shared, function))
        if launch.shared_bytes > granted:
            self._ask("cuFuncSetAttribute", function, shared, launch.shared_bytes)
        if launch.cluster and _product(launch.cluster) > PORTABLE_CLUSTER_BLOCKS:
            self._ask("cuFuncSetAttribute", function, name.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

    def _check_occupancy(self, launch: Launch, function: Any) -> None:
        """Cooperative blocks must all be resident at once, and a cluster must fit at all."""
        if launch.cluster:
            result, clusters = self._driver.cuOccupancyMaxActiveClusters(function, self._config(launch))
            if int(result) != 0 or int(clusters) < 1:
                raise LaunchFailure(
                    f'kernel "{launch.kernel}": no cluster of {launch.cluster} blocks fits on the device',
                    expected="fewer blocks in a cluster, or less shared memory a block",
                )
        if launch.cooperative:
            threads = _product(launch.block)
            resident = int(
                self._ask("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, launch.shared_bytes)
            )
            count = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            most = resident * int(self._ask("cuDeviceGetAttribute", count, self._device))
            if _product(launch.grid) > most:
                raise LaunchFailure(
                    f'kernel "{launch.kernel}" is launched cooperatively with {_product(launch.grid)} blocks',
                    expected=f"at most {most}, which is what is resident at once ({resident} a multiprocessor)",
                )

    def _config(self, launch: Launch) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_bytes
        attributes = []
        if launch.cluster:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimensions = attribute.value.clusterDim
            dimensions.x, dimensions.y, dimensions.z = launch.cluster
            attributes.append(attribute)
        if launch.cooperative:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        return config

    def _arch(self) -> str:
        name = self._driver.CUdevice_attribute
        major = self._ask("cuDeviceGetAttribute", name.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        minor = self._ask("cuDeviceGetAttribute", name.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        return f"sm_{int(major)}{int(minor)}"

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Call the driver; its one result, all of several, or None. Raises DeviceError."""
        result, *values = getattr(self._driver, function)(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{function} failed on cuda:{self._ordinal}: {self.explain(int(result))}")
        return values if len(values) > 1 else values[0] if values else None


def _product(sizes: tuple[int, int, int]) -> int:
    return sizes[0] * sizes[1] * sizes[2]


@functools.lru_cache(maxsize=1)
def _driver() -> Any:
    """cuda.bindings' driver module, initialised. Raises DeviceError where there is no driver or no GPU."""
    remedy = "use --forge-device cpu, or see `cudaforge doctor`"
    try:
        from cuda.bindings import driver

        (result,) = driver.cuInit(0)
    except (ImportError, RuntimeError) as error:  # cuda.bindings raises RuntimeError where libcuda.so.1 is missing
        raise DeviceError(
            f"CUDA cannot be used: {error}", expected="cuda-bindings and a driver", remedy=remedy
        ) from None
    if result != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"cuInit answered {result.name}", expected="an NVIDIA driver and a GPU", remedy=remedy)
    return driver


@functools.lru_cache(maxsize=1)
def _entry_points() -> tuple[Callable[..., int], Callable[..., int]]:
    """``cuLaunchKernelEx`` and ``cuMemsetD8Async`` as raw functions of the driver that cuda.bindings has loaded."""
    library = ctypes.CDLL("libcuda.so.1")
    launch, memset = library["cuLaunchKernelEx"], library["cuMemsetD8Async"]
    launch.argtypes = [ctypes.c_void_p] * 4
    memset.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p]
    launch.restype = memset.restype = ctypes.c_int
    return launch, memset
