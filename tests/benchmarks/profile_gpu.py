"""What a profile costs on a GPU, at both depths, and its share of a whole round without the LLM's time.

To run: `python tests/benchmarks/profile_gpu.py [runs]`. The candidates are those of evaluation_gpu.py: a small RMSNorm
and one of the shape of KernelBench's level1/36 (7.5 GB in, 7.5 GB out). A round is what the loop does with a candidate
that passes: build, verify, time, profile. Every candidate is new. Raw rows are appended to data/profile_gpu.jsonl.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from evaluation_gpu import PLANS, SOURCES, TARGETS
from judged_targets import find

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.hardware.diagnosis import diagnose
from pytest_cudaforge.records import Candidate

DATA = Path(__file__).parent / "data" / "profile_gpu.jsonl"


def main(runs: int) -> None:
    """Print one line per target and depth: medians and ranges in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "layers.py").write_text(TARGETS)
        (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
        with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=root / "cache")) as evaluator:
            for name in SOURCES:
                measure(evaluator, root, name, runs)


def measure(evaluator: Evaluator, root: Path, name: str, runs: int) -> None:
    """Whole rounds of ``runs`` new candidates of one target; baselines are timed before."""
    target = find(root, f"::{name}")
    evaluator.baselines(target)
    seconds: dict[str, list[float]] = {"evaluation": [], "quick": [], "full": [], "round": []}
    for run in range(runs):
        candidate = Candidate.of("cuda", {"kernel.cu": f"{SOURCES[name]}// run {run}\n", "plan.py": PLANS[name]})
        began = time.perf_counter()
        evaluation = evaluator.evaluate(candidate, target)
        assert evaluation.passed, evaluation.reason
        quick = evaluator.profile(candidate, target)
        seconds["round"].append(time.perf_counter() - began)
        full = evaluator.profile(candidate, target, depth="full")
        seconds["evaluation"].append(evaluation.seconds)
        seconds["quick"].append(quick.seconds)
        seconds["full"].append(full.seconds)
        print(
            f"{name}: {[(found.kernel, found.bound) for found in diagnose(full)]} {quick.rung} {full.notes}", flush=True
        )
    row = {"target": name, "device": evaluator.device.name, **seconds}
    DATA.parent.mkdir(exist_ok=True)
    with DATA.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    for label, values in seconds.items():
        middle, low, high = statistics.median(values), min(values), max(values)
        print(f"{name}: {label:10s} median {middle:.2f} s   range {low:.2f} .. {high:.2f} s   n = {len(values)}")
    share = statistics.median(seconds["quick"]) / statistics.median(seconds["round"])
    print(f"{name}: the quick profile's share of a round: {share:.0%}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
