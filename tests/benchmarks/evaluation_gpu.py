"""What one evaluation costs on a GPU, with the target's baselines compiled, and what the build in it costs.

To run: `python tests/benchmarks/evaluation_gpu.py [runs]`. The small module is an RMSNorm of 2048 x 4096; the big one
has the shape of KernelBench's level1/36 (112 x 64 x 512 x 512 fp32: 7.5 GB in, 7.5 GB out). Every candidate is new, so
no build is cached. Raw rows are appended to tests/benchmarks/data/evaluation_gpu.jsonl.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judged_targets import find

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate

DATA = Path(__file__).parent / "data" / "evaluation_gpu.jsonl"
TARGETS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

class Norm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=self.dim, keepdim=True) + self.eps)

@forge_target(inputs=lambda: [torch.randn(2048, 4096)], init=lambda: [1])
class Small(Norm): ...

@forge_target(inputs=lambda: [torch.rand(112, 64, 512, 512)], init=lambda: [1])
class Big(Norm): ...
"""
SMALL = """
__global__ void __launch_bounds__(256) rows(const float4* x, float4* y, float eps) {
    __shared__ float part[8];
    const float4* in = x + (long long)blockIdx.x * 1024;
    float4 v[4]; float s = 0;
    for (int i = 0; i < 4; ++i) { v[i] = in[threadIdx.x + 256 * i]; }
    for (int i = 0; i < 4; ++i) s += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    s = 0;
    for (int i = 0; i < 8; ++i) s += part[i];
    float k = 1.0f / sqrtf(s / 4096 + eps);
    for (int i = 0; i < 4; ++i) {
        float4 o = make_float4(v[i].x * k, v[i].y * k, v[i].z * k, v[i].w * k);
        y[(long long)blockIdx.x * 1024 + threadIdx.x + 256 * i] = o;
    }
}
"""
BIG = """
__global__ void planes(const float* __restrict__ x, float* __restrict__ y, long long plane, float eps) {
    long long p = (long long)blockIdx.x * blockDim.x + threadIdx.x + (long long)blockIdx.y * 64 * plane;
    float v[64], s = 0;
#pragma unroll
    for (int c = 0; c < 64; ++c) v[c] = __ldcs(x + p + c * plane);
#pragma unroll
    for (int c = 0; c < 64; ++c) s += v[c] * v[c];
    float root = sqrtf(s / 64 + eps);
#pragma unroll
    for (int c = 0; c < 64; ++c) __stcs(y + p + c * plane, v[c] / root);
}
"""
HEAD = "from pytest_cudaforge.plan import empty, launch\n\n\ndef plan(module, x):\n    y = empty(x.shape, x.dtype)\n"
PLANS = {
    "Small": HEAD + '    launch("rows", grid=x.shape[0], block=256, args=(x, y, module.eps))\n    return y\n',
    "Big": HEAD
    + "    plane = x.shape[2] * x.shape[3]\n"
    + '    launch("planes", grid=(plane // 256, x.shape[0]), block=256, args=(x, y, plane, module.eps))\n'
    + "    return y\n",
}
SOURCES = {"Small": SMALL, "Big": BIG}


def main(runs: int) -> None:
    """Print one line per target: medians and ranges of whole evaluations and of their builds."""
    DATA.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "layers.py").write_text(TARGETS)
        (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
        with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=root / "cache")) as evaluator:
            for name in SOURCES:
                measure(evaluator, root, name, runs)


def measure(evaluator: Evaluator, root: Path, name: str, runs: int) -> None:
    """Evaluate ``runs`` new candidates of one target; the first warms up and is not counted."""
    target = find(root, f"::{name}")
    began = time.perf_counter()
    evaluator.baselines(target)
    print(f"{name}: baselines, once per target: {time.perf_counter() - began:.1f} s on {evaluator.device.name}")
    whole, build, speedups = [], [], []
    for run in range(runs + 1):
        files = {"kernel.cu": SOURCES[name] + f"// run {run}\n", "plan.py": PLANS[name]}
        evaluation = evaluator.evaluate(Candidate.of("cuda", files), target)
        assert evaluation.passed, evaluation.reason
        assert evaluation.build is not None and evaluation.timing is not None
        if run:
            whole.append(evaluation.seconds)
            build.append(evaluation.build.seconds)
            speedups.append((evaluation.timing.speedup_eager, evaluation.timing.speedup_compile))
    row = {"target": name, "device": evaluator.device.name, "seconds": whole, "build_s": build, "speedups": speedups}
    with DATA.open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    for label, values in (("evaluation", whole), ("build", build)):
        middle, low, high = statistics.median(values), min(values), max(values)
        print(f"{name}: {label:10s} median {middle:.3f} s   range {low:.3f} .. {high:.3f} s   n = {len(values)}")
    print(f"{name}: speedup eager, compile: {speedups}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
