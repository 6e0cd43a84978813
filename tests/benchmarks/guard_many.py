"""What the guard costs a pull request that touched every kernel, and whether it tells them apart.

To run: `python tests/benchmarks/guard_many.py [kernels] [--device cpu|cuda] [--slower 5] [--save FILE]`. A repo of so
many (50) targets is written, a kernel each, calls of about 3 us to 0.8 ms on an H200; each promises to be faster than
eager torch and not much slower than torch.compile. On the branch every kernel's text has changed, and so many of those
over 20 us (40 us on a CPU) do part of their work twice. Then `pytest --forge-guard` runs there as a process of its own,
nothing cached. Printed are its seconds, those of each decision, and the outcomes against what was planted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from guard_repo import Repo, layer, repo

from pytest_cudaforge.hardware import detect_in_child
from pytest_cudaforge.records import Guard
from pytest_cudaforge.runtime.manifest import Manifest

#: Elements of a call, smallest to largest.
SHAPES = {
    "cuda": ((16, 1024), (256, 1024), (2048, 4096), (8192, 4096), (16384, 4096), (65536, 2048)),
    "cpu": ((64, 1024), (256, 1024), (512, 2048)),
}
#: From which of the shapes on a slowdown is planted: of less nobody asks.
SENSITIVE = {"cuda": 2, "cpu": 1}
PROMISE = {"speedup_eager": 1.3, "speedup_compile": 0.6, "least_eager": 1.2, "least_compile": 0.5}
CUDA_PLAN = """\
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    y = empty(x.shape, x.dtype)
    n = x.numel()
    launch("scale", grid=((n // 4 + 255) // 256,), block=(256,), args=(x, y, n // 4, {again}))
    return y
"""
#: The first ``again`` groups of four are computed once more.
CUDA_KERNEL = """
__device__ float one(float v) {{ return sqrtf(fabsf(v * {factor}f) + 1.0f) - 0.5f; }}

extern "C" __global__ void scale(const float4* x, float4* y, long long n, long long again) {{
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float4 v = x[i];
  y[i] = make_float4(one(v.x), one(v.y), one(v.z), one(v.w));
  if (i >= again) return;
  const volatile float* in = reinterpret_cast<const volatile float*>(x + n - 1 - i);
  volatile float* out = reinterpret_cast<volatile float*>(y + n - 1 - i);
  for (int c = 0; c < 4; ++c) out[c] = one(in[c]);
}}
"""
CPP_PLAN = CUDA_PLAN.replace("grid=((n // 4 + 255) // 256,), block=(256,), ", "").replace("n // 4", "n")
CPP_KERNEL = """
#include <cmath>

extern "C" void scale(const float* x, float* y, long long n, long long again) {{
  #pragma omp parallel
  {{
    #pragma omp for
    for (long long i = 0; i < n; ++i) y[i] = std::sqrt(std::fabs(x[i] * {factor}f) + 1.0f) - 0.5f;
    const volatile float* in = x;
    volatile float* out = y;
    #pragma omp for
    for (long long i = 0; i < again; ++i) out[i] = std::sqrt(std::fabs(in[i] * {factor}f) + 1.0f) - 0.5f;
  }}
}}
"""


@dataclass(frozen=True)
class Layer:
    """One target: ``kind`` is "cuda" or "cpu"."""

    number: int
    kind: str

    @property
    def name(self) -> str:
        return f"Layer{self.number:02d}"

    @property
    def factor(self) -> float:
        return 1.0 + 0.125 * self.number

    @property
    def shape(self) -> tuple[int, int]:
        return SHAPES[self.kind][self.number % len(SHAPES[self.kind])]

    @property
    def sensitive(self) -> bool:
        return self.number % len(SHAPES[self.kind]) >= SENSITIVE[self.kind]

    def files(self, comment: str, slower: bool) -> dict[str, str]:
        """Its kernel. ``slower``: a third of the work is done twice."""
        again = "n // 3" if slower else "0"
        if self.kind == "cpu":
            return {
                "kernel.cpp": comment + CPP_KERNEL.format(factor=self.factor),
                "plan.py": CPP_PLAN.format(again=again),
            }
        again = again.replace("n", "(n // 4)")
        return {"kernel.cu": comment + CUDA_KERNEL.format(factor=self.factor), "plan.py": CUDA_PLAN.format(again=again)}


def write(root: Path, kind: str, kernels: int, slower: int) -> tuple[Repo, set[str]]:
    """The repo with ``main`` and a branch; and the names of the slower ones."""
    arch, device = "cpu", "cpu"
    if kind == "cuda":
        found = detect_in_child("cuda:0")
        arch, device = found.arch, found.name
    made = repo(root, arch=arch, device=device)
    layers = [Layer(number, kind) for number in range(kernels)]
    made.layers(layer(one.name, one.factor, shape=one.shape) for one in layers)
    planted = {one.name for one in [one for one in layers if one.sensitive][:: max(1, kernels // 10)][:slower]}
    commit(made, layers, "// as it was\n", set())
    made.git("checkout", "-q", "-b", "change")
    commit(made, layers, "// touched\n", planted)
    return made, planted


def commit(made: Repo, layers: list[Layer], comment: str, planted: set[str]) -> None:
    for one in layers:
        made.shape = one.shape
        made.publish(
            one.name, one.files(comment, one.name in planted), 1.0, Guard(contiguous_only=True, align_bytes=16)
        )
    path = made.root / "forged" / "manifest.json"
    promised = [
        replace(entry, workloads=tuple(replace(load, **PROMISE) for load in entry.workloads))
        for entry in Manifest.load(path).entries
    ]
    Manifest(tuple(promised)).write(path)
    made.commit(comment.strip("/ \n"))


def guarded(root: Path, device: str, out: Path) -> tuple[float, dict[str, Any]]:
    """Seconds of `pytest --forge-guard`, and what it found."""
    known = importlib.metadata.entry_points(group="pytest11", name="cudaforge")
    plugin = [] if known else ["-p", "pytest_cudaforge.plugin"]
    options = ["--forge-guard", "--forge-base=main", f"--forge-device={device}", f"--forge-json={out}"]
    argv = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *plugin, *options]
    began = time.perf_counter()
    with subprocess.Popen(argv, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if "::guard[" in text:
                print(f"{time.perf_counter() - began:6.1f} s {text.strip()}", flush=True)
    seconds = time.perf_counter() - began
    if not out.exists() or process.returncode not in (0, 1):
        raise SystemExit(f"pytest ended with {process.returncode}")
    return seconds, json.loads(out.read_text())["guard"]


def tell(seconds: float, report: dict[str, Any], planted: set[str]) -> None:
    # A kernel's time is shared among its items: is it right, and is it fast?
    shared = len(report["records"]) // max(1, len({record["target"] for record in report["records"]}))
    records = [record | {"seconds": shared * record["seconds"]} for record in report["records"] if record["raced"]]
    for record in records:
        name = record["target"].partition("::")[2]
        what = "planted" if name in planted else ""
        print(f"{name} {record['outcome']:12s} {record['seconds']:6.1f} s {what:8s}{record['reason']}")
    spent = [record["seconds"] for record in records]
    print(f"{len(records)} decisions: {seconds:.0f} s from start to end")
    print(f"a decision: median {statistics.median(spent):.1f} s, {min(spent):.1f} to {max(spent):.1f} s")
    caught = [r for r in records if r["outcome"] == "regression" and r["target"].partition("::")[2] in planted]
    other = [r for r in records if r["target"].partition("::")[2] not in planted]
    counts = {outcome: sum(r["outcome"] == outcome for r in other) for outcome in {r["outcome"] for r in other}}
    print(f"planted slowdowns called regressions: {len(caught)} of {len(planted)}; the others: {counts}", flush=True)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kernels", nargs="?", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--slower", type=int, default=5)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        made, planted = write(
            Path(name) / "repo", arguments.device.partition(":")[0], arguments.kernels, arguments.slower
        )
        seconds, report = guarded(made.root, arguments.device, Path(name) / "guard.json")
    tell(seconds, report, planted)
    if arguments.save:
        arguments.save.write_text(json.dumps({"seconds": seconds, "planted": sorted(planted), "guard": report}))


if __name__ == "__main__":
    main()
