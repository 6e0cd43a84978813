"""What the history costs, and how often its alarms are false: appending, reading and judging 100 000 lines, and runs of
made-up runners on which nothing happens (normal noise, noise with a memory, noise with heavy tails).

    python tests/benchmarks/history.py [--lines 100000] [--runs 2000]
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from history_records import NEWER, measurement

from pytest_cudaforge import history
from pytest_cudaforge.history import Measurement

CALM = {"candidate": 80_000.0, "base": 80_000.0, "eager": 120_000.0, "compile": 100_000.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=2_000)
    arguments = parser.parse_args()
    cost(arguments.lines)
    print()
    for name, noise in NOISES.items():
        false_alarms(name, noise, arguments.runs)
    found(arguments.runs // 10)


def cost(lines: int) -> None:
    """Fifty workloads a run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "history.jsonl"
        runs = [
            [measurement(number, CALM, target=f"layers.py::Layer{index}") for index in range(50)]
            for number in range(lines // 50)
        ]
        began = time.perf_counter()
        for samples in runs[:-1]:
            history.append(path, samples)
        every = (time.perf_counter() - began) / (len(runs) - 1)
        began = time.perf_counter()
        history.append(path, runs[-1])
        last = time.perf_counter() - began
        size = path.stat().st_size
        began = time.process_time()
        kept = history.read(path).measurements
        reading = time.process_time() - began
        began = time.process_time()
        history.alarms(kept, runs[-1])
        judging = time.process_time() - began
        print(f"{len(kept)} lines, {size / 1e6:.0f} MB ({size / len(kept):.0f} bytes each)")
        print(
            f"append of 50 lines: {1e3 * every:.1f} ms in the mean, {1e3 * last:.1f} ms the last (flushed to the disk)"
        )
        each = f"{1e6 * reading / len(kept):.0f} us a line"
        print(f"of processor time: read {reading:.2f} s ({each}), alarms of one run {judging:.2f} s")


# -- false alarms -----------------------------------------------------------------------------------------------------

Noise = Callable[[random.Random, int], list[float]]


def normal(spread: float) -> Noise:
    return lambda generator, count: [generator.gauss(0, spread) for _ in range(count)]


def heavy(spread: float) -> Noise:
    """Student's t with three degrees of freedom: now and then far off."""

    def draw(generator: random.Random, count: int) -> list[float]:
        return [
            spread * generator.gauss(0, 1) / math.sqrt(sum(generator.gauss(0, 1) ** 2 for _ in range(3)) / 3)
            for _ in range(count)
        ]

    return draw


def remembering(spread: float, memory: float) -> Noise:
    """Each value near the one before."""

    def draw(generator: random.Random, count: int) -> list[float]:
        values = [generator.gauss(0, spread)]
        while len(values) < count:
            values.append(memory * values[-1] + math.sqrt(1 - memory**2) * generator.gauss(0, spread))
        return values

    return draw


HEAVY = "heavy tails 2 %"
NOISES = {
    "normal 1 %": normal(0.01),
    "normal 5 %": normal(0.05),
    HEAVY: heavy(0.02),
    "memory 0.8, 2 %": remembering(0.02, 0.8),
    "memory 0.95, 3 %": remembering(0.03, 0.95),
}


def course(generator: random.Random, noise: Noise, days: int, *, rise: float = 0.0) -> list[Measurement]:
    """Every party with noise of its own on top of the runner's, which all share (of that, heavy tails are no noise: the
    runner is slow then)."""
    shared = (normal(0.01) if noise is NOISES[HEAVY] else noise)(generator, days)
    own = {party: noise(generator, days) for party in CALM}

    def times(day: int) -> dict[str, float]:
        crept = {"candidate": 1.0 + rise * day / (days - 1)}
        return {
            party: ns * crept.get(party, 1.0) * math.exp(0.7 * shared[day] + 0.7 * own[party][day])
            for party, ns in CALM.items()
        }

    return [measurement(day, times(day), spread=0.02) for day in range(days)]


def false_alarms(name: str, noise: Noise, runs: int) -> None:
    """Runs of ten targets, twenty references each, after histories of 8, 20 and 60 runs in turn."""
    generator = random.Random(20261121)
    kinds: Counter[str] = Counter()
    for turn in range(runs):
        past: list[Measurement] = []
        now: list[Measurement] = []
        for index in range(10):
            days = course(generator, noise, (9, 21, 61)[turn % 3])
            named = [replace(one, target=f"layers.py::L{index}") for one in days]
            past += named
            now.append(named[-1])
        kinds.update({alarm.kind for alarm in history.alarms(past, now)})
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) or "none"
    print(f"{name:18} {runs} runs in which nothing happened: runs with a false alarm: {told}")


def found(runs: int) -> None:
    """How often the alarms see what they are for, with 1 % of noise and twenty runs of history (drift: forty)."""
    generator = random.Random(7)
    seen: Counter[str] = Counter()
    for _ in range(runs):
        calm = course(generator, normal(0.01), 21)
        slow = {party: 1.15 * time for party, time in CALM.items()}
        sick = measurement(90, slow)
        seen["a runner slower by 15 %"] += bool(history.alarms(calm, [sick]))
        late = measurement(90, {**CALM, "candidate": 105_000.0 * (1 + generator.gauss(0, 0.005))}, machine=NEWER)
        seen["a toolchain that costs 5 % over torch.compile"] += bool(history.alarms(calm, [late]))
        for rise in (0.06, 0.10, 0.15):
            crept = course(generator, normal(0.01), 40, rise=rise)
            seen[f"a drift of {rise:.0%} over 40 runs"] += bool(history.alarms(crept, crept[-1:]))
    for name, count in seen.items():
        print(f"{name}: {count} of {runs} seen")


if __name__ == "__main__":
    main()
