"""What one evaluation of a small example costs on the CPU, warm.

To run: `python tests/benchmarks/evaluation.py [runs]`. Fork servers, the oracle and the target's baselines are warm;
every candidate is new (no build is cached). Printed are medians and ranges over so many runs (default 10).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judged_targets import find, norm, write_repo

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Status


def _line(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{name:28s} median {statistics.median(ordered):6.3f} s   range {ordered[0]:.3f} .. {ordered[-1]:.3f} s"


def main(runs: int) -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_repo(root)
        target = find(root, "::RMSNorm")
        with Evaluator(EvaluatorSettings(cache_dir=root / "cache")) as evaluator:
            began = time.perf_counter()
            evaluator.baselines(target)
            print(f"baselines, once per target: {time.perf_counter() - began:.1f} s; load {os.getloadavg()[0]:.1f}")
            whole, correct, build, decisions = [], [], [], []
            for run in range(runs + 1):
                evaluation = evaluator.evaluate(norm(after=f"/* run {run} */"), target)
                untimed = evaluator.evaluate(norm(after=f"/* untimed {run} */"), target, timing=False)
                assert evaluation.status is Status.PASSED, evaluation.reason
                if run and evaluation.build and evaluation.timing:  # the first run warms up
                    whole.append(evaluation.seconds)
                    correct.append(untimed.seconds)
                    build.append(evaluation.build.seconds)
                    decisions.append(evaluation.timing.speedup_eager)
        print(_line("build, verify, time", whole))
        print(_line("build, verify", correct))
        print(_line("build", build))
        low, high = min(decisions), max(decisions)
        print(f"speedup over eager: median {statistics.median(decisions):.2f}, {low:.2f} .. {high:.2f}")
        print(f"{runs} runs on {len(os.sched_getaffinity(0))} cores; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
