"""The process that a profiler looks at: one call of a launch plan between the profiler's start and stop.

Nsight Compute looks from outside; where it cannot, CUPTI does from inside, through torch's profiler, and leaves
``trace.json`` ("watch": "trace").

Trusted host code; torch is imported only where the plan has library calls, since its start-up is most of a profile's
time. It reads ``call.json`` and ``binary-<i>`` from the folder it is given, takes the arena with the call's values as a
descriptor from the socket there (a call may be gigabytes: they never leave the device), and writes ``outcome.json``:
``{"done": true}``, or ``{"error": "..."}`` where the device or the replay refused something.

A second argument is how many bytes are overwritten and read before the call that is looked at, so that it finds the
caches empty where the profiler leaves them as they are.

Inputs and state are copied to memory of this process and the arena is given back before anything runs: a profiler that
replays a kernel saves and restores the memory it may write, which it can do for this process's own only.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_cudaforge import languages, plan
from pytest_cudaforge.errors import ForgeError
from pytest_cudaforge.evaluation.arena import DeviceArena, checked, driver_of
from pytest_cudaforge.evaluation.event_clock import EventClock
from pytest_cudaforge.plan import LaunchPlan
from pytest_cudaforge.runtime.replay import load_program

__all__ = ["SOCKET_NAME", "main"]

SOCKET_NAME = "memory.sock"
_HANDOVER_S = 10.0
_LEAST_BYTES = 1


class _Memory:
    """An allocation for each buffer, by name."""

    def __init__(self, driver: Any, wanted: Sequence[Sequence[Any]]) -> None:
        self._driver = driver
        self._places: dict[str, int] = {}
        self._values: list[tuple[str, int, int]] = []
        for name, nbytes, value_offset, _ in wanted:
            allocated = driver.cuMemAlloc(max(nbytes, _LEAST_BYTES))
            self._places[name] = int(checked(allocated, f"allocating {nbytes} bytes"))
            if value_offset is not None and nbytes:
                self._values.append((name, nbytes, value_offset))

    def take(self, arena: DeviceArena) -> None:
        """Copy every buffer that has values from where they lie in the arena."""
        for name, nbytes, offset in self._values:
            copied = self._driver.cuMemcpyDtoD(self._places[name], arena.address + offset, nbytes)
            checked(copied, "copying values")
        checked(self._driver.cuCtxSynchronize(), "copying values")

    def addresses(self, places: Sequence[Sequence[Any]]) -> list[int]:
        return [self._places[name] + shift for name, shift in places]


def _handed_over() -> int:
    """The arena's descriptor, from the socket in the working directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_HANDOVER_S)
        connection.connect(SOCKET_NAME)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise OSError("no descriptor came through the socket")
    return descriptors[0]


def _replay(folder: Path, call: Any, driver: Any, flush_bytes: int) -> None:
    traced = plan.decode(call["traced"])
    binaries = [languages.binary_from_bytes((folder / name).read_bytes()) for name in call["binaries"]]
    memory = _Memory(driver, call["memory"])
    device = int(call["device"].partition(":")[2] or 0)
    with DeviceArena.attach(_handed_over(), int(call["arena_bytes"]), device, readonly=True) as arena:
        memory.take(arena)

    def bound(part: LaunchPlan, places: Any) -> Any:
        return load_program(part, binaries, call["device"]).bind(memory.addresses(places))

    if call["watch"] == "trace":
        import torch  # noqa: F401 - before the first kernel, as its profiler wants it
    if traced.prepare is not None:
        bound(traced.prepare, call["prepare"]).run()
    calls = bound(traced.main, call["main"])
    # Once before the profiler looks: modules load lazily, and libraries choose their kernels at the first call.
    calls.run()
    checked(driver.cuCtxSynchronize(), "running the kernels")
    if call["watch"] == "trace":
        _trace(folder, driver, calls, int(call["calls"]))
        return
    if flush_bytes:
        EventClock(int(call["device"].partition(":")[2] or 0)).empty_caches(flush_bytes)
    checked(driver.cuProfilerStart(), "starting the profiler")
    calls.run()
    checked(driver.cuCtxSynchronize(), "running the kernels under the profiler")
    checked(driver.cuProfilerStop(), "stopping the profiler")


def _trace(folder: Path, driver: Any, calls: Any, count: int) -> None:
    """Names, times and shapes of the kernels of ``count`` calls, by torch's profiler."""
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    # Not torch.profiler.profile: that loads torch._dynamo, which takes seconds.
    profiler: Any = torch.autograd.profiler.profile
    with profiler(use_device="cuda", use_kineto=True) as seen:
        for _ in range(count):
            calls.run()
        checked(driver.cuCtxSynchronize(), "running the kernels under torch's profiler")
    seen.export_chrome_trace(str(folder / "trace.json"))


def main() -> None:
    """``argv``: the folder, bytes to flush. The exit status says nothing; the outcome is in the file."""
    folder, flush_bytes = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    call = json.loads((folder / "call.json").read_text(encoding="utf-8"))
    # Nothing else ends this process where the one that started it is gone.
    signal.alarm(int(call["limit_s"]))
    outcome: dict[str, Any] = {"done": False}
    try:
        _replay(folder, call, driver_of(int(call["device"].partition(":")[2] or 0)), flush_bytes)
        outcome["done"] = True
    except (ForgeError, ImportError, OSError, RuntimeError, ValueError, KeyError, MemoryError) as error:
        outcome["error"] = f"{type(error).__name__}: {error}"[:2000]
    (folder / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main()
