"""The process that compute-sanitizer looks at: one call of a launch plan, every buffer in memory of its own.

Trusted host code, and no torch: its start-up is paid once per tool. It reads ``call.json``, ``binary-<i>`` and
``values.bin`` from the folder it is given and writes ``outcome.json`` there:

* ``{"done": true, "buffers": [[name, address, bytes], ...]}`` where every launch was made and waited for,
* ``{"error": "...", "buffers": [...]}`` where the device or the replay refused something.

Inputs, state and what library calls would have written are copied or filled in from the host, so that initcheck takes
them as initialised; outputs and scratch are left as the allocator gives them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_cudaforge import languages, plan
from pytest_cudaforge.errors import ForgeError
from pytest_cudaforge.evaluation.arena import checked, driver_of
from pytest_cudaforge.plan import LaunchPlan, LibraryCall
from pytest_cudaforge.runtime.replay import load_program

__all__ = ["main"]

_LEAST_BYTES = 1


class _Memory:
    """One allocation by name: the tool knows the bounds of each buffer."""

    def __init__(self, driver: Any, values: bytes) -> None:
        self._driver, self._values = driver, values
        self.places: dict[str, tuple[int, int]] = {}

    def provide(self, name: str, nbytes: int, value_offset: int | None, fill: int | None) -> None:
        """Allocate ``nbytes`` once and copy values there or fill them in, where that was asked."""
        if name in self.places:
            return
        address = int(checked(self._driver.cuMemAlloc(max(nbytes, _LEAST_BYTES)), f"allocating {nbytes} bytes"))
        self.places[name] = (address, nbytes)
        if value_offset is not None and nbytes:
            part = self._values[value_offset : value_offset + nbytes]
            checked(self._driver.cuMemcpyHtoD(address, part, len(part)), "copying values")
        elif fill is not None and nbytes:
            checked(self._driver.cuMemsetD8(address, fill, nbytes), "filling")

    def address(self, name: str, shift_bytes: int) -> int:
        return self.places[name][0] + shift_bytes


def own_steps(launches: LaunchPlan) -> LaunchPlan:
    """The plan without its library calls, whose results are filled in."""
    steps = tuple(step for step in launches.steps if not isinstance(step, LibraryCall))
    return replace(launches, steps=steps)


def _replay(folder: Path, call: Any, memory: _Memory, driver: Any) -> None:
    traced = plan.decode(call["traced"])
    binaries = [languages.binary_from_bytes((folder / name).read_bytes()) for name in call["binaries"]]
    for name, nbytes, value_offset, fill in call["memory"]:
        memory.provide(name, nbytes, value_offset, fill)
    parts: Sequence[tuple[LaunchPlan | None, Any]] = ((traced.prepare, call["prepare"]), (traced.main, call["main"]))
    for part, places in parts:
        if part is None:
            continue
        program = load_program(own_steps(part), binaries, call["device"])
        program.bind([memory.address(name, shift) for name, shift in places]).run()
        checked(driver.cuCtxSynchronize(), "running the kernels")


def main() -> None:
    """``argv``: the folder. The exit status says nothing; the outcome is in the file."""
    folder = Path(sys.argv[1])
    call = json.loads((folder / "call.json").read_text(encoding="utf-8"))
    # Nothing else ends this process where the one that started it is gone.
    signal.alarm(int(call["limit_s"]))
    outcome: dict[str, Any] = {"done": False}
    memory: _Memory | None = None
    try:
        driver = driver_of(int(call["device"].partition(":")[2] or 0))
        memory = _Memory(driver, (folder / "values.bin").read_bytes())
        _replay(folder, call, memory, driver)
        outcome["done"] = True
    except (ForgeError, OSError, ValueError, KeyError, MemoryError) as error:
        outcome["error"] = f"{type(error).__name__}: {error}"[:2000]
    places = memory.places if memory is not None else {}
    outcome["buffers"] = [[name, address, nbytes] for name, (address, nbytes) in places.items()]
    (folder / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main()
