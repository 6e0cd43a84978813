"""What one evaluation of a ModelNew costs on a GPU, the target's baselines and the fork servers warm.

To run: `python tests/benchmarks/evaluation_module.py [runs]`. An RMSNorm of 2048 x 4096, as a Triton kernel and as
CUDA through `load_inline`; every candidate is new, so neither's build is cached. One line per candidate. The first of
each kind also pays for a fork server of its kind; it is printed, and not in the medians.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judged_targets import find

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(2048, 4096)])
class Norm(nn.Module):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)
"""
HEAD = "import torch\nfrom torch import nn\n"
TRITON = """
import triton
import triton.language as tl

@triton.jit
def norm(x, y, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    v = tl.load(x + at)
    tl.store(y + at, v / tl.sqrt(tl.sum(v * v) / WIDTH + 1e-5))

class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        norm[(x.shape[0],)](x, y, WIDTH=x.shape[1], num_warps=8)
        return y
"""
INLINE = '''
from torch.utils.cpp_extension import load_inline

SOURCE = """
__global__ void __launch_bounds__(256) rows(const float4* x, float4* y) {
    __shared__ float part[8];
    const float4* in = x + (int64_t)blockIdx.x * 1024;
    float4 v[4]; float s = 0;
    for (int i = 0; i < 4; ++i) v[i] = in[threadIdx.x + 256 * i];
    for (int i = 0; i < 4; ++i) s += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
    __syncthreads();
    s = 0;
    for (int i = 0; i < 8; ++i) s += part[i];
    float k = 1.0f / sqrtf(s / 4096 + 1e-5f);
    for (int i = 0; i < 4; ++i)
        y[(int64_t)blockIdx.x * 1024 + threadIdx.x + 256 * i] =
            make_float4(v[i].x * k, v[i].y * k, v[i].z * k, v[i].w * k);
}
torch::Tensor norm(torch::Tensor x) {
    auto y = torch::empty_like(x);
    rows<<<x.size(0), 256>>>((const float4*)x.data_ptr<float>(), (float4*)y.data_ptr<float>());
    return y;
}
"""
built = load_inline(
    name="norm", cpp_sources="torch::Tensor norm(torch::Tensor x);", cuda_sources=SOURCE, functions=["norm"]
)

class ModelNew(nn.Module):
    def forward(self, x):
        return built.norm(x)
'''
KINDS = {"Triton": TRITON, "load_inline": INLINE}


def main(runs: int) -> None:
    """Print every evaluation's time and its build's, and the medians without the first."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "layers.py").write_text(LAYERS)
        (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
        with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=root / "cache")) as evaluator:
            target = find(root, "::Norm")
            began = time.perf_counter()
            evaluator.baselines(target, "module")
            print(f"baselines, once per target: {time.perf_counter() - began:.1f} s on {evaluator.device.name}")
            for name, source in KINDS.items():
                measure(evaluator, root, name, source, runs)


def measure(evaluator: Evaluator, root: Path, name: str, source: str, runs: int) -> None:
    """One line per evaluation of a kind of candidate. Raises SystemExit where one, which is right, does not pass."""
    whole_s: list[float] = []
    for run in range(runs + 1):
        text = source.replace("float k =", f"float unused{run} = 0; (void)unused{run}; float k =")
        candidate = Candidate.of("module", {"model.py": f"{HEAD}# run {run}\n{text}"})
        verdict = evaluator.evaluate(candidate, find(root, "::Norm"))
        if not verdict.passed or verdict.build is None:
            raise SystemExit(f"{name}: {verdict.status.value}: {verdict.reason}")
        built = f"of it building extensions {verdict.build.seconds:.1f} s"
        print(f"{name}: {verdict.seconds:.1f} s, {built}; {verdict.reason}")
        whole_s += [verdict.seconds] if run else []
    print(f"{name}: median {statistics.median(whole_s):.1f} s ({min(whole_s):.1f} .. {max(whole_s):.1f}, n = {runs})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
