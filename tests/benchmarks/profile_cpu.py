"""What a CPU profile costs and what it says: kernels with one planted fault each, and one without.

To run: `python tests/benchmarks/profile_cpu.py [quick|full]`. Builds, oracle and fork servers are warm; "first"
compiles with line numbers, "again" finds that binary in the cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from host_faults import FAULTS, HONEST, write_repo

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.hardware import perf
from pytest_cudaforge.records import Depth, Profile


def show(name: str, profile: Profile, again: Profile) -> None:
    """One profile as text."""
    print(f"\n== {name}: rung {profile.rung}, first {profile.seconds:.2f} s, again {again.seconds:.2f} s")
    for kernel in profile.kernels:
        figures = ", ".join(f"{key} {value:.4g}{' ' + unit if unit else ''}" for key, value, unit in kernel.metrics)
        print(f"  {kernel.function}: {figures}")
    print(
        "  call: " + ", ".join(f"{key} {value:.4g}{' ' + unit if unit else ''}" for key, value, unit in profile.facts)
    )
    for rule in profile.rules:
        gain = "" if rule.speedup_percent is None else f" (about {rule.speedup_percent:.0f} %)"
        print(f"  rule: {rule.kernel}: {rule.rule}: {rule.text}{gain}")
    for line in profile.lines:
        print(f"  {line.kernel}: {line.file}:{line.line} {line.share:.0%}  {line.source}")
    for text in (*profile.remarks, *profile.notes):
        print(f"  - {text}")


def main(depth: Depth) -> None:
    """Print them all."""
    print(perf.probe())
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        target = write_repo(root)
        with Evaluator(EvaluatorSettings(cache_dir=root / "cache")) as evaluator:
            named = [("in order", HONEST), *((fault.name, fault.candidate) for fault in FAULTS)]
            for name, candidate in named:
                evaluation = evaluator.evaluate(candidate, target, timing=False)
                print(f"\n{name}: {evaluation.status.value} {evaluation.reason}", end="")
                first = evaluator.profile(candidate, target, depth=depth)
                show(name, first, evaluator.profile(candidate, target, depth=depth))
    print(f"\n{len(os.sched_getaffinity(0))} cores; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main("full" if sys.argv[1:] == ["full"] else "quick")
