"""Does the evaluator do justice to KernelBench's own tasks? Every task's reference is its own candidate.

To run: `python tests/benchmarks/kernelbench_null.py FOLDER [--device cuda] [--tasks level1/1,level2] [--timed 3]
[--minutes 8]`; FOLDER is a checkout's `KernelBench/` (level1, level2, ...). A candidate is a ModelNew that is the
reference by another name, let through under its label `rewrite`: it must pass, and take as long as eager does. Every
``timed``-th task is timed as well (0: none), which needs the compiled baseline. One line a task; the counts come last.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import ForgeError
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation


def main() -> None:
    """Evaluate until the tasks or the minutes run out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", default="level1,level2,level3", help="levels, or level/number")
    parser.add_argument("--timed", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8)
    asked = parser.parse_args()
    ends = time.monotonic() + 60 * asked.minutes
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as cache:
        settings = EvaluatorSettings(device=asked.device, cache_dir=Path(cache), allow=("rewrite", "library", "mixed"))
        with Evaluator(settings) as evaluator:
            for number, path in enumerate(_files(asked.folder, asked.tasks.split(","))):
                if time.monotonic() > ends:
                    print("out of time")
                    break
                timed = bool(asked.timed) and number % asked.timed == 0
                counts[_evaluate(evaluator, path, timed)] += 1
    print(", ".join(f"{status} {count}" for status, count in sorted(counts.items())))
    sys.exit(bool(set(counts) - {"PASSED"}))


def _files(folder: Path, wanted: list[str]) -> Iterator[Path]:
    for name in wanted:
        level, _, number = name.partition("/")
        found = [p for p in (folder / level).glob("*.py") if not number or p.name.startswith(f"{number}_")]
        yield from sorted(found, key=lambda p: int(re.match(r"\d+", p.name).group()))  # type: ignore[union-attr]


def _evaluate(evaluator: Evaluator, path: Path, timed: bool) -> str:
    began = time.monotonic()
    name = f"{path.parent.name}/{path.stem}"
    try:
        target = discover([path], path.parent).targets[0]
        source = path.read_text(encoding="utf-8") + "\n\nclass ModelNew(Model): ...\n"
        evaluation = evaluator.evaluate(Candidate.of("module", {"candidate.py": source}), target, timing=timed)
    except ForgeError as error:
        print(f"{name:60.60s} {time.monotonic() - began:6.1f} s  error: {error}", flush=True)
        return type(error).__name__
    print(f"{name:60.60s} {time.monotonic() - began:6.1f} s  {_told(evaluation)}", flush=True)
    return evaluation.status.value


def _told(evaluation: Evaluation) -> str:
    told = f"{evaluation.seconds:5.1f} s  {evaluation.status.value}"
    if evaluation.timing is not None:
        timing = evaluation.timing
        told += f"  {timing.decision} {timing.speedup_eager:.3f}x eager, {timing.speedup_compile:.3f}x compile"
    if evaluation.verification is not None:
        told += f"  worst ratio {evaluation.verification.worst_ratio:.2f}"
    return told if evaluation.passed else f"{told}  {evaluation.reason[:300]}"


if __name__ == "__main__":
    main()
