"""Races of plain modules (guard=True): a chain of elementwise products against itself, and against a longer one.

    python tests/benchmarks/plain_race.py [--device cuda:0] [--elements 1048576] [--links 20] [--planted 21]
                                          [--decisions 3] [--grad]

Prints for each race what the guard's decision said of it: candidate / base with its 99 % interval, the outcome, seconds
for the whole decision, and how far the processes' medians lie apart (standard deviation). No change and a planted one
by turns; in a repo of its own, both versions as checkouts beside each other.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

from pytest_cudaforge import guard
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Race, Target

LAYERS = """
import torch
from torch import nn

import chain
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn({elements})], guard=True, grad={grad})
class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones({elements}))

    def forward(self, x):
        return chain.run(x, self.weight)
"""
# In a file of its own: what changes is what the target imports.
CHAIN = """
def run(x, weight):
    for _ in range({links}):
        x = x * weight
    return x
"""


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        versions = {
            name: _version(Path(folder) / name, links, arguments)
            for name, links in (("base", arguments.links), ("same", arguments.links), ("longer", arguments.planted))
        }
        with Evaluator(EvaluatorSettings(device=arguments.device)) as evaluator:
            print(f"{evaluator.device.name}; {arguments.links} links of {arguments.elements} elements")
            for name in ["same", "longer"] * arguments.decisions:
                began = time.perf_counter()
                # What another run's timed block makes this one wait is in the seconds of the whole, not in the phases.
                races = evaluator.race_modules(versions[name], versions["base"])
                _show(name, races, time.perf_counter() - began)


def _version(root: Path, links: int, arguments: argparse.Namespace) -> Target:
    root.mkdir()
    (root / "layers.py").write_text(LAYERS.format(elements=arguments.elements, grad=arguments.grad))
    (root / "chain.py").write_text(CHAIN.format(links=links))
    return discover([root], root).targets[0]


def _show(name: str, races: tuple[Race, ...], seconds: float) -> None:
    print(f"{name}: {seconds:.1f} s in all")
    for race in races:
        if not race.blocks:
            print(f"  {race.what}: {race.disturbed}")
            continue
        groups: dict[int, list[float]] = {}
        for block in race.blocks:
            ns = dict(block.ns)
            groups.setdefault(block.process, []).append(math.log(ns["candidate"] / ns["base"]))
        medians = [statistics.median(group) for group in groups.values()]
        spread = statistics.stdev(medians) if len(medians) > 1 else 0.0
        base_us = statistics.median(dict(block.ns)["base"] for block in race.blocks) / 1e3
        findings = guard.assess(race, guard.Promises(), guard.Thresholds())
        found = "; ".join(
            f"{f.slowdown.speedup:.4f} [{f.slowdown.low:.4f}, {f.slowdown.high:.4f}] {f.outcome}" for f in findings
        )
        print(
            f"  {race.what}: {base_us:.1f} us, {len(race.blocks)} blocks of {len(groups)} processes: {found}; "
            f"processes apart {100 * spread:.2f} %; {race.seconds:.1f} s; "
            f"medians {' '.join(f'{math.exp(m):.4f}' for m in medians)} {race.disturbed} {list(race.notes) or ''}; "
            + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in race.spent)
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--links", type=int, default=20)
    parser.add_argument("--planted", type=int, default=21)
    parser.add_argument("--decisions", type=int, default=3)
    parser.add_argument("--grad", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
