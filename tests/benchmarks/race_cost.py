"""What one race of the guard costs, and where the time goes: candidate, base, eager and torch.compile.

    python tests/benchmarks/race_cost.py [--device cuda:0] [--rows 64 16384] [--extra 0.0] [--races 3] [--save FILE]

Candidate and base are the kernel of ``null_test.py`` (a norm of so many rows of 4096), the candidate with ``--extra``
of the work done once more. The first race of each size compiles reference and kernel; correctness is checked before it,
as the guard does. ``--save`` appends every race, blocks included, as a JSON line. ``--oracles N`` times the eager
reference alone in so many fresh processes: how much its one process's place matters.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judged_targets import find
from null_test import TARGET, kernel

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Race, Target, to_json

#: About 5 us, 120 us, 0.5 ms and 5 ms on an H200; 15 us and 2 ms on two cores.
ROWS = {"cuda": (64, 16384, 65536, 655360), "cpu": (64, 1024)}


def ratios(race: Race, over: str = "candidate", under: str = "base") -> list[float]:
    """Medians of the blocks' ratios, process by process."""
    found: dict[int, list[float]] = {}
    for block in race.blocks:
        by_party = dict(block.ns)
        if over in by_party and under in by_party:
            found.setdefault(block.process, []).append(math.log(by_party[over] / by_party[under]))
    return [math.exp(statistics.median(values)) for values in found.values()]


def describe(race: Race, wall_s: float) -> str:
    """One race on two lines."""
    parties = dict.fromkeys(name for block in race.blocks for name, _ in block.ns)
    us = {p: statistics.median(dict(b.ns)[p] for b in race.blocks if p in dict(b.ns)) / 1e3 for p in parties}
    spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in race.spent)
    times = ", ".join(f"{party} {value:.1f} us" for party, value in us.items())
    apart = " ".join(f"{value:.4f}" for value in ratios(race))
    told = f"; {race.disturbed}" if race.disturbed else ""
    return f"{wall_s:6.2f} s ({spent})\n         {times}; candidate/base by process: {apart}{told} {race.notes or ''}"


def targets(folder: Path, rows: Sequence[int]) -> dict[int, Target]:
    """The references on disk, by their number of rows."""
    for count in rows:
        (folder / f"norm_{count}.py").write_text(TARGET.format(rows=count))
    return {count: find(folder, f"::Norm{count}") for count in rows}


def cost(arguments: argparse.Namespace, folder: Path) -> None:
    """Print every race's time."""
    kind = arguments.device.partition(":")[0]
    rows = arguments.rows or ROWS[kind]
    settings = EvaluatorSettings(device=arguments.device, cache_dir=folder / "cache")
    with Evaluator(settings) as evaluator:
        began = time.perf_counter()
        name = evaluator.device.name
        print(f"{name}: start {time.perf_counter() - began:.2f} s")
        for count, target in targets(folder, rows).items():
            began = time.perf_counter()
            evaluator.facts(target)
            known_s = time.perf_counter() - began
            verdict = evaluator.evaluate(kernel(kind, arguments.extra), target, timing=False)
            checked_s = time.perf_counter() - began - known_s
            print(f"{count} rows: facts {known_s:.2f} s, correctness {checked_s:.2f} s ({verdict.status.value})")
            for _ in range(arguments.races):
                began = time.perf_counter()
                found = evaluator.race(kernel(kind, arguments.extra), target, base=kernel(kind, 0.0))
                if not isinstance(found, tuple):
                    raise SystemExit(f"{found.status.value}: {found.reason}")
                print("  ", describe(found[0], time.perf_counter() - began), flush=True)
                if arguments.save:
                    row = {"device": name, "rows": count, "extra": arguments.extra, "race": to_json(found[0])}
                    with arguments.save.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(row) + "\n")


def places(arguments: argparse.Namespace, folder: Path) -> None:
    """How far the eager reference's time in one fresh process is from that in another."""
    kind = arguments.device.partition(":")[0]
    rows = arguments.rows or ROWS[kind]
    found: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(arguments.oracles):
        with Evaluator(EvaluatorSettings(device=arguments.device, cache_dir=folder / "cache")) as evaluator:
            for count, target in targets(folder, rows).items():
                race = evaluator.race(kernel(kind, 0.0), target, processes=1, references=("eager",))
                if isinstance(race, tuple):
                    found[count].append(statistics.median(dict(b.ns)["eager"] for b in race[0].blocks) / 1e3)
                    print(f"eager, {count} rows: {found[count][-1]:.3f} us", flush=True)
    for count, values in found.items():
        spread = statistics.stdev(values) / statistics.fmean(values)
        print(f"eager, {count} rows, {len(values)} oracles: standard deviation {spread:.2%}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--extra", type=float, default=0.0)
    parser.add_argument("--races", type=int, default=3)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--oracles", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.oracles:
            places(arguments, Path(folder))
        else:
            cost(arguments, Path(folder))


if __name__ == "__main__":
    main()
