"""compute-sanitizer on a real GPU: what it refuses, what it only reports, and what honest kernels may do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.attempt import Attempt
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.sanitizer import find_sanitizer
from pytest_cudaforge.languages import load
from pytest_cudaforge.records import Candidate, Evaluation, SanitizerReport, Status, Target

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
    pytest.mark.skipif(find_sanitizer(os.environ) is None, reason="compute-sanitizer is not installed"),
]

LAYERS = """
import torch
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.randn(16, 256)], allow=("kernel", "mixed", "library"))
def doubled(x):
    return x * 2


@forge_target(inputs=lambda: [torch.randn(16, 256)], init=lambda: [256])
class Weighted(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(dim))

    def forward(self, x):
        return x * (2 * self.weight)
"""

PREPARING = """
__global__ void twice(const float* w, float* v, int n) { if (threadIdx.x < n) v[threadIdx.x] = 2.f * w[threadIdx.x]; }
__global__ void weigh(const float* x, const float* v, float* y) {
  y[blockIdx.x * 256 + threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x] * v[threadIdx.x];
}
"""

PREPARING_PLAN = """
from pytest_cudaforge.plan import empty, launch

def prepare(module):
    v = empty(module.weight.shape, module.weight.dtype)
    launch("twice", grid=(1,), block=(256,), args=(module.weight, v, 256))
    return v

def plan(module, x, prepared):
    y = empty(x.shape, x.dtype)
    launch("weigh", grid=(16,), block=(256,), args=(x, prepared, y))
    return y
"""

PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("twice", grid=(16,), block=(256,), args=(x, y, x.numel()))
    return y
"""

#: Two kernels with a scratch buffer of 64 floats between them that is longer than what is written to it.
SCRATCH_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    half, y = empty((x.numel() + 64,), x.dtype), empty(x.shape, x.dtype)
    launch("copy", grid=(16,), block=(256,), args=(x, half, x.numel()))
    launch("twice", grid=(16,), block=(256,), args=(half, y, x.numel()))
    return y
"""

LIBRARY_PLAN = """
from pytest_cudaforge.plan import empty, launch, op

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("twice", grid=(16,), block=(256,), args=(op("aten.neg", op("aten.neg", x)), y, x.numel()))
    return y
"""

HEAD = """
__global__ void twice(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
"""
PLAIN = HEAD + "  if (i < n) y[i] = 2.f * x[i];\n}\n"

SHARED = (
    HEAD
    + """  __shared__ float part[256];
  part[threadIdx.x] = i < n ? x[i] : 0.f;
  __syncthreads();
  float v = part[255 - threadIdx.x];
  __syncthreads();
  part[255 - threadIdx.x] = 2.f * v;
  __syncthreads();
  if (i < n) y[i] = part[threadIdx.x];
}
"""
)

WARP = (
    HEAD
    + """  __shared__ float part[8][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  part[warp][lane] = i < n ? x[i] : 0.f;
  __syncwarp();
  float v = part[warp][31 - lane];
  v = __shfl_sync(~0u, v, 31 - lane);
  if (i < n) y[i] = 2.f * v;
}
"""
)

#: An arrive and wait of all threads on an mbarrier, where __syncthreads would do.
BARRIER = (
    HEAD
    + """  __shared__ unsigned long long barrier;
  __shared__ float part[256];
  unsigned place = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], 256;" ::"r"(place) : "memory");
  __syncthreads();
  part[threadIdx.x] = i < n ? x[i] : 0.f;
  asm volatile("{ .reg .b64 t; .reg .pred p; mbarrier.arrive.shared.b64 t,[%0];"
               "W: mbarrier.test_wait.shared.b64 p,[%0],t; @!p bra W; }" ::"r"(place) : "memory");
  float v = part[255 - threadIdx.x];
  __syncthreads();
  part[255 - threadIdx.x] = v;
  __syncthreads();
  if (i < n) y[i] = 2.f * part[threadIdx.x];
}
"""
)

#: Each half of a block waits for its own threads only.
NAMED = (
    HEAD
    + """  __shared__ float part[256];
  int half = threadIdx.x / 128, lane = threadIdx.x % 128;
  part[threadIdx.x] = i < n ? x[i] : 0.f;
  asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
  float v = part[half * 128 + 127 - lane];
  asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
  part[half * 128 + 127 - lane] = v;
  asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
  if (i < n) y[i] = 2.f * part[threadIdx.x];
}
"""
)

#: Asynchronous copies in two stages: the next one is under way while one is read.
STAGED = (
    HEAD
    + """  __shared__ float part[2][256];
  auto fetch = [&](int stage, int block) {
    unsigned place = (unsigned)__cvta_generic_to_shared(&part[stage][threadIdx.x]);
    const float* from = x + (block % 16) * 256 + threadIdx.x;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(place), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float v = 0.f;
  fetch(0, blockIdx.x);
  for (int k = 0; k < 16; ++k) {
    if (k + 1 < 16) fetch((k + 1) & 1, blockIdx.x + k + 1);
    if (k + 1 < 16) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    if (k == 0) v = 2.f * part[0][255 - threadIdx.x];
    __syncthreads();
  }
  if (i < n) y[i - threadIdx.x + 255 - threadIdx.x] = v;
}
"""
)

HONEST = {
    "plain": PLAIN,
    "shared memory": SHARED,
    "one warp": WARP,
    "mbarrier": BARRIER,
    "named barriers": NAMED,
    "asynchronous copies": STAGED,
}

#: All blocks wait for each other between the two steps.
GRID = """
#include <cooperative_groups.h>
__global__ void twice(const float* x, float* half, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  half[i] = 2.f * x[i];
  cooperative_groups::this_grid().sync();
  y[n - 1 - i] = half[n - 1 - i];
}
"""

GRID_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    half, y = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    launch("twice", grid=(16,), block=(256,), args=(x, half, y, x.numel()), cooperative=True)
    return y
"""

TRITON = """
import triton
import triton.language as tl

@triton.jit
def twice(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    total = tl.sum(v, axis=0)
    tl.store(y + i, 2.0 * (v + (total - total)), mask=i < n)
"""

TRITON_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("twice", grid=(8,), args=(x, y, x.numel()), constants={"BLOCK": 512})
    return y
"""

#: Reads one element behind its input: the value is of no consequence, the read is.
OVERRUN = HEAD + "  float v = *(volatile const float*)(x + i + 1);\n  if (i < n) y[i] = 2.f * x[i] + (v == 3e38f);\n}\n"

#: The same in shared memory, of which a block has more than it asks for.
SHARED_OVERRUN = (
    HEAD
    + """  __shared__ volatile float part[257];
  part[threadIdx.x] = x[i];
  if (!threadIdx.x) part[256] = 0.f;
  __syncthreads();
  float v = part[threadIdx.x + 2];
  if (i < n) y[i] = 2.f * x[i] + (v == 3e38f);
}
"""
)

#: All warps write one place of shared memory and look at it: the answer does not depend on who won.
RACE = (
    HEAD
    + """  __shared__ volatile float last;
  last = x[i];
  float v = last;
  if (i < n) y[i] = 2.f * x[i] + (v == 3e38f);
}
"""
)

#: Looks at what lay in its output before it writes there.
UNWRITTEN = HEAD + "  float v = ((volatile float*)y)[i];\n  if (i < n) y[i] = 2.f * x[i] + (v == 3e38f);\n}\n"

COPY = "__global__ void copy(const float* x, float* y, int n) { int i = blockIdx.x * 256 + threadIdx.x; y[i] = x[i]; }"
#: The last block reads the padding, which nobody has written, and masks it.
PADDING = COPY + HEAD + "  float v = ((volatile const float*)x)[i + 64];\n  y[i] = 2.f * x[i] + (v == 3e38f);\n}\n"

HOSTILE = {
    "memcheck": (SHARED_OVERRUN, "kernel.cu"),
    "racecheck": (RACE, "kernel.cu"),
    "initcheck": (UNWRITTEN, "kernel.cu:4"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    root: Path = tmp_path_factory.mktemp("sanitized")
    (root / "layers.py").write_text(LAYERS)
    return named(root, "doubled")


def named(root: Path, name: str) -> Target:
    return next(target for target in discover([root / "layers.py"], root).targets if target.qualname == name)


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    place = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=place, lock_dir=place)) as found:
        yield found


def judged(evaluator: Evaluator, target: Target, kernel: str, plan: str = PLAN) -> tuple[Evaluation, SanitizerReport]:
    """The whole verdict, as a winner gets it."""
    began = time.monotonic()
    candidate = Candidate.of("cuda", {"kernel.cu": kernel, "plan.py": plan})
    verdict = evaluator.evaluate(candidate, target, timing=False, fresh=True)
    assert verdict.verification is not None, verdict.reason
    report = verdict.verification.sanitizer
    assert report is not None, verdict.reason
    print(f"{verdict.status.value}: {verdict.reason}; {report}; {time.monotonic() - began:.1f} s in all")
    return verdict, report


def looked_at(
    evaluator: Evaluator, target: Target, kernel: str, plan: str = PLAN, language: str = "cuda"
) -> SanitizerReport:
    """What the tools say, without a verification."""
    files = {load(language).source_name: kernel, "plan.py": plan}
    attempt = Attempt(evaluator, Candidate.of(language, files), target, evaluator.facts(target), False)
    kitchen = attempt._kitchen()
    products = [kitchen.produce(workload) for workload in attempt.facts.workloads]
    report = evaluator.sanitizing.examine(target, products, kitchen.compiled_with_lines)
    print(report)
    return report


@pytest.mark.parametrize("name", HONEST)
def test_honest_kernels_pass_every_tool(evaluator: Evaluator, target: Target, name: str) -> None:
    report = looked_at(evaluator, target, HONEST[name])
    assert report.refusal is None
    assert set(report.tools) == {"memcheck", "initcheck"} | (set() if name == "plain" else {"racecheck"}), report
    assert report.seconds < 30


def test_blocks_that_wait_for_each_other_pass(evaluator: Evaluator, target: Target) -> None:
    report = looked_at(evaluator, target, GRID, GRID_PLAN)
    assert "memcheck" in report.tools and report.refusal is None, report


def test_triton_kernels_are_looked_at(evaluator: Evaluator, target: Target) -> None:
    if reason := load("triton").availability():
        pytest.skip(reason)
    report = looked_at(evaluator, target, TRITON, TRITON_PLAN, "triton")
    assert set(report.tools) >= {"memcheck", "initcheck"} and not report.findings, report


@pytest.mark.parametrize("tool", HOSTILE)
def test_what_passes_by_luck_is_refused(evaluator: Evaluator, target: Target, tool: str) -> None:
    kernel, place = HOSTILE[tool]
    verdict, report = judged(evaluator, target, kernel)
    assert verdict.status is Status.REJECTED, verdict.reason
    assert verdict.verification is not None and verdict.verification.contract_passed, "only the sanitizer sees it"
    assert report.refusal is not None and report.refusal.tool == tool, report
    assert report.refusal.kernel == "twice" and place in report.refusal.place
    assert tool in verdict.reason and place in verdict.reason


def test_a_read_behind_an_input_is_refused_by_the_contract_and_seen_by_the_tool(
    evaluator: Evaluator, target: Target
) -> None:
    candidate = Candidate.of("cuda", {"kernel.cu": OVERRUN, "plan.py": PLAN})
    verdict = evaluator.evaluate(candidate, target, timing=False, fresh=True)
    assert verdict.status is not Status.PASSED and "outside a buffer" in verdict.reason, verdict.reason
    report = looked_at(evaluator, target, OVERRUN)
    assert report.refusal is not None and report.refusal.tool == "memcheck" and "kernel.cu:4" in report.refusal.place


def test_masked_padding_is_only_reported(evaluator: Evaluator, target: Target) -> None:
    verdict, report = judged(evaluator, target, PADDING, SCRATCH_PLAN)
    assert verdict.passed, verdict.reason
    assert [finding.tool for finding in report.findings] == ["initcheck"], report
    assert report.findings[0].detail.startswith("scratch")


def test_what_prepare_wrote_is_initialised(evaluator: Evaluator, target: Target) -> None:
    report = looked_at(evaluator, named(Path(target.root), "Weighted"), PREPARING, PREPARING_PLAN)
    assert set(report.tools) == {"memcheck", "initcheck"} and not report.findings, report


def test_library_calls_are_filled_in(evaluator: Evaluator, target: Target) -> None:
    report = looked_at(evaluator, target, PLAIN, LIBRARY_PLAN)
    assert set(report.tools) == {"memcheck", "initcheck"} and not report.findings, report


def test_no_round_pays_for_it_unasked(evaluator: Evaluator, target: Target) -> None:
    candidate = Candidate.of("cuda", {"kernel.cu": PLAIN, "plan.py": PLAN})
    rounds = evaluator.evaluate(candidate, target, timing=False)
    assert rounds.verification is not None and rounds.verification.sanitizer is None
