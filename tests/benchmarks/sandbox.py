"""What the sandbox costs: start of fork servers, of a worker, of a builder, and one empty call. Run by hand.

Usage: python tests/benchmarks/sandbox.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from native_children import BINDINGS, compile_act, started

from pytest_cudaforge.evaluation.sandbox import SandboxSettings
from pytest_cudaforge.evaluation.zygote import ForkServers


def _median_ms(action: Callable[[], object], repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def main() -> None:
    rows: list[tuple[str, float, float]] = []
    confined, plain = ForkServers(), ForkServers(SandboxSettings(isolation="none"))
    for kind in ("plain", "cuda", "torch"):
        first, second = (_median_ms(partial(servers.warm, kind), 1) for servers in (confined, plain))
        rows.append((f"fork server {kind}, once", first, second))
    binaries = compile_act(plain, "out[0] = in[0];")
    pair = (confined, plain)
    rows.append(("worker, start and end", *(_median_ms(lambda s=s: s.worker("cpp").close()) for s in pair)))
    rows.append(("compile of a small kernel", *(_median_ms(lambda s=s: compile_act(s, ""), 5) for s in pair)))
    calls = []
    for servers in pair:
        with started(servers, binaries) as act:
            calls.append(_median_ms(lambda a=act: a.worker.run("main", BINDINGS, timeout_s=5), 200))
    rows.append(("one call, question and answer", calls[0], calls[1]))
    print(f"{'':32s}{'confined ms':>14s}{'none ms':>12s}   grade {confined.isolation('cpp').grade}")
    for name, first, second in rows:
        print(f"{name:32s}{first:14.2f}{second:12.2f}")
    confined.close()
    plain.close()


if __name__ == "__main__":
    main()
