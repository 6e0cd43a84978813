"""By how much do processes that time the same kernels on one GPU differ, and does an empty kernel differ alike?

To run: `python tests/benchmarks/placement.py [processes]`, on an idle GPU. So many processes live side by side; each in
turn times every kernel, cold, by the event clock; six rounds. Printed by kernel: the median over the processes, how far
their medians are apart (standard deviation), the same within a process, and what is left between the processes when the
time of an empty kernel in the same process is taken off.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from pytest_cudaforge.evaluation.arena import checked
from pytest_cudaforge.evaluation.event_clock import EventClock

_ROUNDS, _SAMPLES, _FRAMES = 6, 40, 4


class _Called:
    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run


def _empty(clock: EventClock) -> _Called:
    """The clock's own spinning kernel, for no time."""
    span = ctypes.c_uint64(0)
    params = (ctypes.c_void_p * 1)(ctypes.addressof(span))
    launch = clock._driver.cuLaunchKernel

    def run(_keep: object = span) -> None:
        checked(launch(clock._function, 1, 1, 1, 1, 1, 1, 0, 0, ctypes.addressof(params), 0), "an empty kernel")

    return _Called(run)


def _doubling(rows: int, columns: int) -> list[_Called]:
    pairs = [torch.randn(2, rows, columns, device="cuda") for _ in range(_FRAMES)]
    return [_Called(lambda pair=pair: torch.mul(pair[0], 2, out=pair[1])) for pair in pairs]  # type: ignore[misc]


def child() -> None:
    """One line of JSON, ns by kernel, for each line read."""
    torch.zeros(1, device="cuda")
    clock = EventClock(0)
    flush_bytes = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    kernels = {
        "empty": [_empty(clock)],
        "1 MB": _doubling(256, 512),
        "1 MB, other buffers": _doubling(256, 512),
        "16 MB": _doubling(1024, 2048),
    }
    print("ready", flush=True)
    for _ in sys.stdin:
        times: Any = {name: clock.sample(calls, _SAMPLES, flush_bytes)[:_SAMPLES] for name, calls in kernels.items()}  # type: ignore[arg-type]
        print(json.dumps({name: statistics.median(ns) for name, ns in times.items()}), flush=True)


def main(processes: int) -> None:
    """Print a line per kernel."""
    command = [sys.executable, __file__, "child"]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    found: list[dict[str, list[float]]] = [{} for _ in children]
    for one in children:
        assert one.stdout is not None and one.stdout.readline().strip() == "ready"
    for _ in range(_ROUNDS):
        for one, kept in zip(children, found, strict=True):
            assert one.stdin is not None and one.stdout is not None
            print("go", file=one.stdin, flush=True)
            for name, ns in json.loads(one.stdout.readline()).items():
                kept.setdefault(name, []).append(ns)
    for one in children:
        one.communicate()
    medians = {name: [statistics.median(kept[name]) for kept in found] for name in found[0]}
    for name, values in medians.items():
        within = statistics.median(statistics.pstdev(kept[name]) for kept in found)
        left = statistics.stdev(ns - empty for ns, empty in zip(values, medians["empty"], strict=True))
        between = f"between {processes} processes {statistics.stdev(values):5.1f} ns, within one {within:5.1f} ns"
        print(f"{name:20s} {statistics.median(values):6.0f} ns, {between}, less the empty kernel {left:5.1f} ns")


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        child()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
