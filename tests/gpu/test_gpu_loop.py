"""The whole loop on a real GPU: a scripted Coder's CUDA kernels, the real evaluator, published for this arch."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence_numbers import foreign

from pytest_cudaforge import config as configs
from pytest_cudaforge.chat.scripted import ScriptedModel
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.runtime.manifest import Manifest
from pytest_cudaforge.session import Models, forge_all
from pytest_cudaforge.wiring import open_evaluator

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

#: Scans in both directions: torch.compile makes several passes over memory, so there is something to gain.
TARGET = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(8192, 4096)], init=lambda: [4096])
class RunningPeak(nn.Module):
    def __init__(self, cols):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(cols))

    def forward(self, x):
        ahead = torch.cummax(x, dim=-1).values
        behind = torch.cummax(x.flip(-1), dim=-1).values.flip(-1)
        return (ahead + behind) * self.weight
"""

KERNEL = """
__global__ void running_peak(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y) {
  __shared__ float ahead[1024], behind[1024], row[COLS];
  const int tid = threadIdx.x, per = COLS / blockDim.x;
  const float* in = x + (long long)blockIdx.x * COLS;
  float* out = y + (long long)blockIdx.x * COLS;
  for (int c = tid; c < COLS; c += blockDim.x) row[c] = in[c];
  __syncthreads();
  float peak = row[tid * per];
  for (int c = 1; c < per; ++c) peak = fmaxf(peak, row[tid * per + c]);
  ahead[tid] = behind[tid] = peak;
  for (int step = 1; step < blockDim.x; step *= 2) {
    __syncthreads();
    const float before = tid >= step ? ahead[tid - step] : ahead[tid];
    const float after = tid + step < blockDim.x ? behind[tid + step] : behind[tid];
    __syncthreads();
    ahead[tid] = fmaxf(ahead[tid], before);
    behind[tid] = fmaxf(behind[tid], after);
  }
  __syncthreads();
  float sums[128];
  peak = tid ? ahead[tid - 1] : row[0];
  for (int c = 0; c < per; ++c) sums[c] = peak = fmaxf(peak, row[tid * per + c]);
  peak = tid + 1 < blockDim.x ? behind[tid + 1] : row[COLS - 1];
  for (int c = per - 1; c >= 0; --c) sums[c] += peak = fmaxf(peak, row[tid * per + c]);
  __syncthreads();
  for (int c = 0; c < per; ++c) row[tid * per + c] = sums[c];
  __syncthreads();
  for (int c = tid; c < COLS; c += blockDim.x) out[c] = row[c] * SCALE;
}
"""

PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("running_peak", grid=(rows,), block=(BLOCK,), args=(x, module.weight, y), constants={"COLS": cols})
    return y
"""


def reply(scale: str, block: int) -> str:
    kernel, plan = KERNEL.replace("SCALE", scale), PLAN.replace("BLOCK", str(block))
    return f"```cuda kernel.cu\n{kernel}\n```\n\n```python plan.py\n{plan}\n```\n"


#: does not build, forgets the weight, uses few threads a row, uses many
CODER = [reply("factor[c]", 256), reply("1.f", 256), reply("w[c]", 64), reply("w[c]", 512)]
CORRECTION = '{"issue": "wrong", "why": "it is", "fix": "mend it"}'
OPTIMIZATION = (
    '{"bottleneck": "occupancy", "method": "wider blocks", "place": "plan.py", "plan": "512 threads a row", '
    '"expected_speedup": 1.1, "cites": ["1 launch"]}'
)


def test_from_a_marked_module_to_a_kernel_for_this_gpu(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(TARGET)
    (target,) = discover([tmp_path], tmp_path).targets
    config = configs.load({"device": "cuda", "rounds": 4, "roofline_stop": 99}, root=tmp_path)
    model = ScriptedModel({"coder": CODER, "judge": [CORRECTION, CORRECTION, OPTIMIZATION]})
    with open_evaluator(config) as evaluator:
        trace = forge_all([target], config, evaluator, models=Models(model, model)).traces[0]
        arch = evaluator.device.arch
    statuses = [entry.evaluation.status.value if entry.evaluation else entry.failure for entry in trace.rounds]
    assert statuses == ["BUILD_ERROR", "INCORRECT_NUMERICAL", "PASSED", "PASSED"], trace.reason
    assert trace.outcome == "forged", trace.reason
    assert trace.final is not None
    assert trace.final.timing is not None
    print(f"\n{trace.final.timing.speedup_eager:.2f}x eager; {trace.reason}")
    page = model.requests[-2].messages[-1].content.partition("# Evidence")[2]
    print(page)
    shown, won = trace.rounds[2].evaluation, trace.final.profile
    assert shown is not None and shown.profile is not None and won is not None
    assert shown.profile.candidate == shown.candidate and won.candidate == trace.final.candidate
    assert "`running_peak` (own)" in page
    assert won.depth == "full"
    # A winner's profile is a deeper one than the Judge was shown.
    if shown.profile.depth == "quick":
        assert foreign(page, shown) == [], "every number of the page stands in the stored evaluation and profile"
    if won.rung == "ncu":
        assert Path(won.report).read_bytes() and Path(won.report).parent.name == f"round-{trace.winner:02d}"
    else:
        assert won.notes, "a lower rung says why"
    (entry,) = Manifest.load(tmp_path / "forged" / "manifest.json").entries
    assert (entry.language, entry.arch) == ("cuda", arch)
    assert "running_peak" in entry.sources(tmp_path / "forged" / "manifest.json")["kernel.cu"]
