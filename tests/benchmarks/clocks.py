"""Do the two clocks agree? Device events and the supervisor's clock on the very same calls, 50 us to 10 ms.

    python tests/benchmarks/clocks.py [--device cuda:0] [--json FILE]

One kernel of a given length (it waits for the device's own timer) and one that moves memory, each called through the
worker in one process after another. Printed per length: ns per call by both clocks, their ratio, and beside them the
cold device time of a single call, by which CUDA plans are judged. The aim is a ratio within 3 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from unittest.mock import patch

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.attempt import Attempt
from pytest_cudaforge.evaluation.cases import call_layout
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.parties import EventParty, worker_party
from pytest_cudaforge.languages import clocks
from pytest_cudaforge.records import Candidate

SLICE_NS = 40e6
SPANS_US = (20, 50, 100, 300, 1000, 3000, 10000)

TARGETS = """
import torch
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(4096, 4096)])
def doubled(x):
    return x * 2
"""

#: Waits for ``span_ns`` of the device's timer, then copies: its length is known whatever the clocks tell.
SPINNING = """
__global__ void work(const float* x, float* y, long long n, long long span_ns) {
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) y[i] = 2.f * x[i];
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < span_ns);
}
"""

#: Moves memory ``rounds`` times.
MOVING = """
__global__ void work(const float* x, float* y, long long n, long long rounds) {
  long long step = (long long)gridDim.x * blockDim.x;
  for (long long r = 0; r < rounds; ++r)
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
      ((volatile float*)y)[i] = 2.f * ((volatile const float*)x)[i];
}
"""

PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("work", grid=(132,), block=(1024,), args=(x, y, x.numel(), {amount}))
    return y
"""


def compared(evaluator: Evaluator, root: Path, kernel: str, amount: int) -> dict[str, float]:
    """ns per call of one candidate by both clocks, and cold by events."""
    target = discover([root / "layers.py"], root).targets[0]
    files = {"kernel.cu": kernel, "plan.py": PLAN.format(amount=amount)}
    attempt = Attempt(evaluator, Candidate.of("cuda", files), target, evaluator.facts(target), False)
    attempt.build_for_timing()
    product = attempt._products[0]
    layout = call_layout(product.traced, frames=4)
    bench, arena = evaluator.oracle.open_bench(target, product.workload.name, "", layout.data)
    try:
        evaluator.oracle.fill_all(bench, [1, 2, 3, 4], 0)
        with evaluator.lease.timing(), attempt._worker_of(product) as worker:
            worker.attach(0, arena)
            sets = [layout.bindings(frame) for frame in range(4)]
            flush_bytes = evaluator.flush_bytes
            party = worker_party(evaluator.oracle, worker, sets, clock="events", flush_bytes=flush_bytes, limit_s=60)
            assert isinstance(party, EventParty)
            both = party.by_both_clocks(SLICE_NS)
            assert both is not None
            return {"supervisor_ns": both[0], "events_ns": both[1], "cold_ns": party.turn(SLICE_NS)}
    finally:
        arena.close()
        evaluator.oracle.close_bench(bench)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "layers.py").write_text(TARGETS)
        settings = EvaluatorSettings(device=arguments.device, cache_dir=root / "cache", lock_dir=root)
        found = []
        # A kernel that spins for so long reads the GPU's clock, which no candidate may.
        with patch.object(clocks, "check", lambda _: None), Evaluator(settings) as evaluator:
            cases = [("spinning", SPINNING, span_us * 1000) for span_us in SPANS_US]
            cases += [("moving", MOVING, rounds) for rounds in (1, 4, 16, 64)]
            print(f"{'kernel':10} {'amount':>9} {'supervisor us':>14} {'events us':>11} {'apart':>8} {'cold us':>10}")
            for kind, kernel, amount in cases:
                row = compared(evaluator, root, kernel, amount)
                apart = row["supervisor_ns"] / row["events_ns"] - 1
                times = [row[name] / 1e3 for name in ("supervisor_ns", "events_ns", "cold_ns")]
                print(
                    f"{kind:10} {amount:9} {times[0]:14.2f} {times[1]:11.2f} {apart:8.2%} {times[2]:10.2f}", flush=True
                )
                found.append({"kernel": kind, "amount": amount, "apart": apart, **row})
    worst = max((abs(float(row["apart"])) for row in found if float(row["events_ns"]) >= 5e4), default=0.0)
    print(f"worst of 50 us and more: {worst:.2%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
