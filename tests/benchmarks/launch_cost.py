"""Host cost of one launch, back to back: our bound program beside cuda.core, cuda.bindings and torch.

Run by hand on a machine with an NVIDIA GPU: ``python tests/benchmarks/launch_cost.py``. Prints microseconds a call,
the median of several repeats, and one NVRTC build.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable

import torch

from pytest_cudaforge.languages import Unit, load
from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, TensorSpec, View
from pytest_cudaforge.runtime.replay import load_program

SOURCE = 'extern "C" __global__ void f(const float* x, const float* w, float* y, int n, float e) { if (n < 0) *y = e; }'


def microseconds(call: Callable[[], object], calls: int = 500, repeats: int = 15) -> float:
    """Median cost of one call; the queue is emptied between repeats."""
    figures = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        figures.append((time.perf_counter() - begin) / calls * 1e6)
    return statistics.median(figures)


def main() -> None:
    major, minor = torch.cuda.get_device_capability()
    spec = TensorSpec((256,), "float32", (1,))
    views = tuple(View(i, (256,), (1,)) for i in range(3))
    launch = Launch("f", (*views, 256, 1e-5), grid=(1, 1, 1), block=(256, 1, 1))
    plan = LaunchPlan(
        (Buffer("input", spec, "0"), Buffer("state", spec, "w"), Buffer("scratch", spec)), (launch,), views[2]
    )
    language, unit = load("cuda"), Unit((), ("f",))
    language.compile(SOURCE, unit, f"sm_{major}{minor}")
    begin = time.perf_counter()
    binary = language.compile(SOURCE, unit, f"sm_{major}{minor}")
    print(f"NVRTC build             {(time.perf_counter() - begin) * 1e3:8.1f} ms")
    tensors = [torch.zeros(256, device="cuda") for _ in range(3)]
    addresses = [t.data_ptr() for t in tensors]
    begin = time.perf_counter()
    program = load_program(plan, [binary], "cuda:0")
    print(f"load_program            {(time.perf_counter() - begin) * 1e3:8.2f} ms")
    bound = program.bind(addresses)
    print(f"program.bind            {microseconds(lambda: program.bind(addresses)):8.2f} us")
    print(f"bound.rebind            {microseconds(lambda: bound.rebind(addresses)):8.2f} us")
    print(f"bound.run               {microseconds(bound.run):8.2f} us")
    print(f"  in bursts of 50       {microseconds(bound.run, 50, 100):8.2f} us")
    print(f"cuLaunchKernel (ctypes) {_raw(binary.code, addresses):8.2f} us")
    print(f"torch.add(out=)         {microseconds(lambda: torch.add(tensors[0], tensors[1], out=tensors[2])):8.2f} us")
    print(f"cuda.core.launch        {_cuda_core(binary.code, addresses):8.2f} us")
    program.close()


def _raw(code: bytes, addresses: list[int]) -> float:
    """The older entry point with its arguments prepared the same way: what a launch costs at least from Python."""
    from cuda.bindings import driver

    _, module = driver.cuModuleLoadData(code)
    _, function = driver.cuModuleGetFunction(module, b"f")
    cells = (ctypes.c_uint64 * 5)(*addresses, 256, 0)
    base = ctypes.addressof(cells)
    params = (ctypes.c_void_p * 5)(*(base + 8 * i for i in range(5)))
    entry = ctypes.CDLL("libcuda.so.1")["cuLaunchKernel"]
    entry.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    entry.restype = ctypes.c_int
    return microseconds(functools.partial(entry, int(function), 1, 1, 1, 256, 1, 1, 0, None, params, None))


def _cuda_core(code: bytes, addresses: list[int]) -> float:
    import numpy
    from cuda.core import Device, LaunchConfig, ObjectCode
    from cuda.core import launch as core_launch

    device = Device(0)
    device.set_current()
    kernel = ObjectCode.from_cubin(code).get_kernel("f")
    stream, config = device.default_stream, LaunchConfig(grid=1, block=256)
    n, e = numpy.int32(256), numpy.float32(1e-5)
    return microseconds(lambda: core_launch(stream, config, kernel, *addresses, n, e))


if __name__ == "__main__":
    main()
