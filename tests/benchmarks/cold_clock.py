"""What a cold call costs beside itself: after the L2 was overwritten, and after it was also read back.

To run, on a GPU: `python tests/benchmarks/cold_clock.py [processes]`. A row-wise norm over 64 to 32768 rows of 4096
fp32. Columns: median cold time in us when the L2 holds modified lines (only overwritten) and clean ones (overwritten,
then read: what the clock does), both interleaved in one process; one call of many back to back, over inputs that
together pass the L2; and the time its bytes take at the copy bandwidth measured here. With `processes`: the spread of
the medians of so many processes that live side by side, for the smallest of them, in both ways.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from null_test import CUDA

from pytest_cudaforge.evaluation.arena import checked, driver_of
from pytest_cudaforge.evaluation.event_clock import EventClock
from pytest_cudaforge.hardware import detect
from pytest_cudaforge.languages import load, units_of
from pytest_cudaforge.plan import Buffer, Launch, LaunchPlan, TensorSpec, TracedPlan, View
from pytest_cudaforge.runtime.replay import load_program

ROWS = (64, 1024, 4096, 8192, 32768)
FRAMES = 4
SAMPLES = 60
ROUNDS = 6


class Overwriting(EventClock):
    """The clock without the reading."""

    def _queue_read(self) -> None:
        return


def plan_of(rows: int) -> TracedPlan:
    shape, strides = (rows, 4096), (4096, 1)
    spec, views = TensorSpec(shape, "float32", strides), (View(0, shape, strides), View(1, shape, strides))
    launch = Launch("norm", (*views, rows, rows), grid=(rows, 1, 1), block=(256, 1, 1))
    return TracedPlan(LaunchPlan((Buffer("input", spec, "0"), Buffer("scratch", spec)), (launch,), views[1]))


class Bench:
    """One kernel on ``FRAMES`` pairs of buffers."""

    def __init__(self, rows: int) -> None:
        facts = detect("cuda:0")
        self.bytes = 2 * rows * 4096 * 4
        self.flush_bytes = 2 * facts.l2_bytes
        traced = plan_of(rows)
        binaries = [load("cuda").compile(CUDA, unit, facts.arch) for unit in units_of(traced)]
        self.program = load_program(traced.main, binaries, "cuda:0")
        driver = driver_of(0)
        # As many frames as pass the L2 three times, for calls back to back.
        self.frames = max(FRAMES, 3 * facts.l2_bytes // self.bytes + 1)
        memory = int(checked(driver.cuMemAlloc(self.frames * self.bytes), "buffers"))
        checked(driver.cuMemsetD32(memory, 0x3F800000, self.frames * self.bytes // 4), "ones")
        places = [memory + frame * self.bytes for frame in range(self.frames)]
        self.bounds = [self.program.bind([place, place + self.bytes // 2]) for place in places]
        self.clocks = {"modified": Overwriting(0), "clean": EventClock(0)}

    def cold_ns(self, clock: str) -> float:
        return statistics.median(self.clocks[clock].sample(self.bounds[:FRAMES], SAMPLES, self.flush_bytes)[:-2])

    def back_to_back_ns(self) -> float:
        clock, calls = self.clocks["clean"], max(self.frames, 200)
        clock.around(self.bounds, calls)
        return (clock.around(self.bounds, 2 * calls) - clock.around(self.bounds, calls)) / calls


def copy_bytes_per_s() -> float:
    driver, nbytes = driver_of(0), 1 << 30
    clock = EventClock(0)

    class Copy:
        here, there = (int(checked(driver.cuMemAlloc(nbytes), "copy")) for _ in range(2))

        def run(self) -> None:
            checked(driver.cuMemcpyDtoDAsync(self.there, self.here, nbytes, 0), "copying")

    times = clock.sample([Copy()], 20, 0)[:-2]  # type: ignore[list-item]
    for place in (Copy.here, Copy.there):
        checked(driver.cuMemFree(place), "freeing")
    return 2 * nbytes / (statistics.median(times) / 1e9)


def table() -> None:
    bandwidth = copy_bytes_per_s()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    print("rows | L2 modified us | L2 clean us | ratio | back to back us | bytes / bandwidth us")
    for rows in ROWS:
        bench = Bench(rows)
        found: dict[str, list[float]] = {"modified": [], "clean": []}
        for turn in range(ROUNDS):
            for name in list(found)[:: 1 if turn % 2 else -1]:
                found[name].append(bench.cold_ns(name))
        modified, clean = (statistics.median(values) for values in found.values())
        print(
            f"{rows} | {modified / 1e3:.2f} | {clean / 1e3:.2f} | {modified / clean:.3f} |"
            f" {bench.back_to_back_ns() / 1e3:.2f} | {bench.bytes / bandwidth * 1e6:.2f}",
            flush=True,
        )


def serve() -> None:
    bench = Bench(ROWS[0])
    print("ready", flush=True)
    for line in sys.stdin:
        print(bench.cold_ns(line.strip()), flush=True)


class Child:
    def __init__(self) -> None:
        argv = [sys.executable, __file__, "serve"]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self, clock: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{clock}\n")
        self.process.stdin.flush()
        return float(self.answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def spread(count: int) -> None:
    children = [Child() for _ in range(count)]
    for clock in ("modified", "clean"):
        turns = [[child.ask(clock) for child in children] for _ in range(6)]
        medians = [statistics.fmean(values) for values in zip(*turns, strict=True)]
        mean = statistics.fmean(medians)
        share = statistics.stdev(medians) / mean
        print(f"{count} processes, {ROWS[0]} rows, L2 {clock}: {mean / 1e3:.3f} us, sd {share:.2%}")
    for child in children:
        child.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        table()
        if len(sys.argv) > 1:
            spread(int(sys.argv[1]))
