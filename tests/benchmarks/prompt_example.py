"""The CUDA example of the Coder's prompt on a real GPU: is it right, and how fast? Run by hand.

Prints the build time, and milliseconds of the example, eager and torch.compile on a 24576 x 4096 float32 input.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pytest_cudaforge.records import DeviceFacts
from pytest_cudaforge.runtime import replay

_TEST = Path(__file__).parent.parent / "coder" / "test_worked_examples.py"


def milliseconds(call: Callable[[], object], count: int = 50) -> float:
    for _ in range(5):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def main() -> None:
    spec = importlib.util.spec_from_file_location("worked_examples", _TEST)
    assert spec is not None and spec.loader is not None
    examples = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(examples)
    examples.test_the_cuda_example_is_right_on_a_gpu()
    kind, files = examples.example("cuda")
    module, x = examples.module_and_input(kind, "cuda:0", 8192, 4096)
    facts = DeviceFacts("cuda", "GPU", "sm_{}{}".format(*torch.cuda.get_device_capability(0)))
    start = time.perf_counter()
    traced, binaries = examples.built("cuda", files, module, x, facts)
    print(f"right; traced and built in {time.perf_counter() - start:.3f} s")
    y = torch.empty_like(x)
    named = {"input": x, "state": module.weight, "scratch": y}
    with torch.no_grad(), replay.load_program(traced.main, binaries, "cuda:0") as program:
        bound = program.bind([named[buffer.role].data_ptr() for buffer in traced.main.buffers])
        compiled = torch.compile(module)
        print(f"example {milliseconds(bound.run):.4f} ms, eager {milliseconds(lambda: module(x)):.4f} ms, ", end="")
        print(f"torch.compile {milliseconds(lambda: compiled(x)):.4f} ms")


if __name__ == "__main__":
    main()
