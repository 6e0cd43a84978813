"""What tracing a plan costs: parsing once per text, then every new signature (production pays that at its first call).

Run by hand: ``python tests/benchmarks/trace_cost.py``. Prints medians in milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from pytest_cudaforge import plan
from pytest_cudaforge.plan import TensorSpec, contiguous_strides
from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime import interpreter
from pytest_cudaforge.runtime.signature import Signature
from pytest_cudaforge.runtime.trace import trace

DEVICE = DeviceFacts("cuda", "any", "sm_90", sm_count=132, max_shared_bytes=227 << 10, memory_bytes=140 << 30)

ONE_LAUNCH = """
from pytest_cudaforge.plan import empty, launch

def plan(x, weight):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("rms_norm", grid=(rows,), block=(256,), args=(x, weight, y, cols, 1e-6), constants={"COLS": cols})
    return y
"""
MANY_LAUNCHES = """
from pytest_cudaforge.plan import empty, launch

def plan(x, weight):
    for i in range(1000):
        y = empty(x.shape, x.dtype)
        launch("step", grid=(x.numel() + 255) // 256, block=256, args=(x, weight, y, i))
        x = y
    return x
"""
PRODUCTS = """
from pytest_cudaforge.plan import op

def plan(x, weight):
    for i in range(10):
        x = op("aten.mul", x, weight)
    return x
"""


def median_ms(action: Callable[[], object], repeats: int) -> float:
    samples = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        action()
        samples.append(time.perf_counter_ns() - begin)
    return statistics.median(samples) / 1e6


def main() -> None:
    leaves = [TensorSpec(shape, "float32", contiguous_strides(shape)) for shape in ((64, 4096), (4096,))]
    signature = Signature.of(tuple(leaves), {}, None, DEVICE, "cuda")
    for name, text, repeats in (
        ("1 launch", ONE_LAUNCH, 200),
        ("1000 launches", MANY_LAUNCHES, 5),
        ("10 ops", PRODUCTS, 20),
    ):
        trace(text, signature)
        parse = median_ms(lambda text=text: interpreter.parse.__wrapped__(text), repeats)  # type: ignore[misc]
        traced = median_ms(lambda text=text: trace(text, signature), repeats)  # type: ignore[misc]
        data = plan.encode(trace(text, signature))
        decode = median_ms(lambda data=data: plan.decode(data), repeats)  # type: ignore[misc]
        print(f"{name:>14}: parse {parse:7.3f} ms · trace (twice) {traced:8.3f} ms · decode {decode:7.3f} ms")


if __name__ == "__main__":
    main()
