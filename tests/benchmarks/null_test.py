"""Does the clock see a difference where there is none, and one where there is? A/A and a planted slowdown.

To run: `python tests/benchmarks/null_test.py [--device cpu|cuda] [--decisions 10] [--extra 0.02] [--resamples 5000]`.

A/A: one kernel is candidate and incumbent of one sitting; a decision "faster" or "slower" is a false alarm
("disturbed" is what a busy machine gets). Planted:
the candidate does ``extra`` more of the same work (2 % by default); anything but "slower" is a miss. Every decision is
a real one of ``Evaluator.evaluate`` with fresh processes. Its blocks are appended to data/null_test.jsonl, so that the
counts grow over several sittings; `--resamples` draws so many decisions by whole processes from all that is stored
for this device, and `--report` prints the table from what is stored without measuring.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judged_targets import find

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.sitting import MOST_PROCESSES
from pytest_cudaforge.evaluation.timing import GPU_PLACEMENT_NS, Block, decide, ratio_of
from pytest_cudaforge.records import Candidate, Evaluation, Status

DATA = Path(__file__).parent / "data" / "null_test.jsonl"
#: rows x 4096 fp32: about 6, 9, 24, 70 and 270 us on an H200; about 0.1 ms and 2 ms on two cores.
ROWS = {"cuda": (64, 512, 2048, 8192, 32768), "cpu": (64, 1024)}
#: Less than a wave of blocks takes as long with one more.
PLANTED_ABOVE = {"cuda": 64, "cpu": 0}
TARGET = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn({rows}, 4096)])
class Norm{rows}(nn.Module):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
"""
#: Extra work is done again on the first rows: the same loads, sums and stores.
CPP = """
#include <cmath>
void norm(const float* x, float* y, long long rows, long long work) {
  #pragma omp parallel for
  for (long long r = 0; r < work; ++r) {
    const float* p = x + r % rows * 4096; float* q = y + r % rows * 4096; float s = 0;
    #pragma omp simd reduction(+ : s)
    for (int c = 0; c < 4096; ++c) s += p[c] * p[c];
    float k = 1.0f / std::sqrt(s / 4096 + 1e-5f);
    for (int c = 0; c < 4096; ++c) q[c] = p[c] * k;
  }
}
"""
CUDA = """
__global__ void __launch_bounds__(256) norm(const float4* x, float4* y, long long rows, long long work) {
    __shared__ float part[8];
    const long long row = (long long)blockIdx.x % rows;
    const float4* in = x + row * 1024;
    float4 v[4]; float s = 0;
    for (int i = 0; i < 4; ++i) v[i] = in[threadIdx.x + 256 * i];
    for (int i = 0; i < 4; ++i) s += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    s = 0;
    for (int i = 0; i < 8; ++i) s += part[i];
    float k = rsqrtf(s / 4096 + 1e-5f);
    for (int i = 0; i < 4; ++i)
        y[row * 1024 + threadIdx.x + 256 * i] = make_float4(v[i].x * k, v[i].y * k, v[i].z * k, v[i].w * k);
}
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch


def plan(module, x):
    y = empty(x.shape, x.dtype)
    rows = x.shape[0]
    work = rows + int(rows * EXTRA)
    launch("norm", LAUNCH args=(x, y, rows, work))
    return y
"""


def kernel(kind: str, extra: float) -> Candidate:
    """The norm with ``extra`` more work; 0.0 is the kernel itself."""
    launch = "grid=(work,), block=(256,)," if kind == "cuda" else ""
    plan = PLAN.replace("EXTRA", repr(extra)).replace("LAUNCH", launch)
    language, name, source = ("cuda", "kernel.cu", CUDA) if kind == "cuda" else ("cpp", "kernel.cpp", CPP)
    return Candidate.of(language, {name: source, "plan.py": plan})


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """One row per decision: what was asked, what was decided, and every block."""
    kind = arguments.device.partition(":")[0]
    settings = EvaluatorSettings(device=arguments.device, cache_dir=folder / "cache", keep_blocks=True)
    with Evaluator(settings) as evaluator:
        for number in range(arguments.decisions):
            for rows in arguments.rows or ROWS[kind]:
                path = folder / f"norm_{rows}.py"
                path.write_text(TARGET.format(rows=rows))
                target = find(folder, f"::Norm{rows}")
                planted = (arguments.extra,) if arguments.extra and rows > PLANTED_ABOVE[kind] else ()
                for extra in planted if arguments.planted else (0.0, *planted):
                    began = time.monotonic()
                    verdict = evaluator.evaluate(kernel(kind, extra), target, incumbent=kernel(kind, 0.0))
                    row = row_of(verdict, evaluator.device.name, rows, extra)
                    print(f"{number + 1:3d} {shown(row)} in {time.monotonic() - began:.1f} s", flush=True)
                    yield row


def shown(row: dict[str, Any]) -> str:
    """One decision in one line."""
    what = f"{row['rows']:6d} rows, {row['extra']:.0%} more: {row['decision']:12s} {row['speedup']:.4f}"
    return f"{what} ({row['low']:.4f} to {row['high']:.4f}, {len({b[0] for b in row['blocks']})} processes)"


def row_of(verdict: Evaluation, device: str, rows: int, extra: float) -> dict[str, Any]:
    """Raises SystemExit where the kernel, which is right, was not found so."""
    if verdict.status is not Status.PASSED or verdict.timing is None or verdict.timing.vs_incumbent is None:
        raise SystemExit(f"{rows} rows: {verdict.status.value}: {verdict.reason}")
    (workload,) = verdict.timing.workloads
    ratio = verdict.timing.vs_incumbent
    blocks = [[block.process, dict(block.ns)["candidate"], dict(block.ns)["incumbent"]] for block in workload.blocks]
    return {
        "device": device,
        "rows": rows,
        "extra": extra,
        "probed": True,
        "most_processes": MOST_PROCESSES,
        "decision": "disturbed" if verdict.timing.decision == "disturbed" else decide(ratio),
        "speedup": ratio.speedup,
        "low": ratio.low,
        "high": ratio.high,
        "blocks": blocks,
    }


def processes_of(rows: list[dict[str, Any]]) -> list[list[tuple[float, float]]]:
    """Blocks (candidate, incumbent) of every process of every decision."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for number, row in enumerate(rows):
        for process, candidate_ns, incumbent_ns in row["blocks"]:
            found.setdefault((number, process), []).append((candidate_ns, incumbent_ns))
    return list(found.values())


def resampled(rows: list[dict[str, Any]], count: int, placement_ns: float) -> dict[str, int]:
    """Decisions of ``count`` sittings made up of whole processes drawn from all of ``rows``."""
    pool, chance = processes_of(rows), random.Random(0)
    per_sitting = max(1, round(len(pool) / len(rows)))
    counts: dict[str, int] = {}
    for number in range(count):
        drawn = chance.choices(pool, k=per_sitting)
        blocks = [
            Block(process, (("candidate", a), ("incumbent", b)))
            for process, values in enumerate(drawn)
            for a, b in values
        ]
        decision = decide(ratio_of(blocks, "incumbent", seed=number, placement_ns=placement_ns))
        counts[decision] = counts.get(decision, 0) + 1
    return counts


def report(device: str, resamples: int) -> None:
    """The table of everything stored for ``device``; the rule is today's, also where a row was decided by an older."""
    stored = [json.loads(line) for line in DATA.read_text().splitlines()] if DATA.exists() else []
    placement_ns = GPU_PLACEMENT_NS if "NVIDIA" in device else 0.0
    # Short calls that were timed before the clock had a probe say nothing of today's.
    stored = [row for row in stored if row.get("probed") or row["rows"] > 64]
    stored = [row for row in stored if row["device"] == device]
    for rows, extra, most in sorted({_kind(row) for row in stored}):
        group = [row for row in stored if _kind(row) == (rows, extra, most)]
        decisions = [decided(row, placement_ns) for row in group]
        counts = {name: decisions.count(name) for name in ("faster", "slower", "same", "inconclusive", "disturbed")}
        # A block's time is the kernel's; the planted one runs longer by what was planted.
        us = statistics.median(block[2] for row in group for block in row["blocks"]) / 1e3
        speedups = sorted(row["speedup"] for row in group)
        print(f"{us:8.1f} us, {extra:.1%} more work, at most {most} processes, {len(group)} decisions: {counts}")
        print(f"{'':12s}median ratios {speedups[0]:.4f} .. {speedups[-1]:.4f}", end="")
        print(f"; resampled {resamples}: {resampled(group, resamples, placement_ns)}" if resamples else "")


def _kind(row: dict[str, Any]) -> tuple[int, float, int]:
    return row["rows"], row["extra"], row.get("most_processes", 2)


def decided(row: dict[str, Any], placement_ns: float) -> str:
    """The decision of one row's blocks."""
    if row["decision"] == "disturbed":
        return "disturbed"
    blocks = [Block(process, (("candidate", a), ("incumbent", b))) for process, a, b in row["blocks"]]
    return decide(ratio_of(blocks, "incumbent", placement_ns=placement_ns))


def main() -> None:
    """Measure, store, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--decisions", type=int, default=10)
    parser.add_argument("--rows", type=int, nargs="*", help="of these kernels only")
    parser.add_argument("--extra", type=float, default=0.02, help="0: A/A only")
    parser.add_argument("--planted", action="store_true", help="no A/A")
    parser.add_argument("--resamples", type=int, default=0)
    parser.add_argument("--report", metavar="DEVICE", help="print the table of this device's stored rows only")
    arguments = parser.parse_args()
    if arguments.report:
        report(arguments.report, arguments.resamples)
        return
    DATA.parent.mkdir(exist_ok=True)
    device = ""
    with tempfile.TemporaryDirectory() as folder, DATA.open("a", encoding="utf-8") as stream:
        for row in measure(arguments, Path(folder)):
            device = row["device"]
            stream.write(json.dumps(row) + "\n")
            stream.flush()
    report(device, arguments.resamples)


if __name__ == "__main__":
    main()
