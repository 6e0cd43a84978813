"""Nsight Compute on a real GPU: planted faults are named with their lines, in time; below it CUPTI answers."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import planted_faults
import pytest
from planted_faults import FAULTS, HONEST_ONE, Fault

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.profiling import Profiler
from pytest_cudaforge.hardware import ncu, report_reading
from pytest_cudaforge.hardware.counter_probe import probe
from pytest_cudaforge.hardware.diagnosis import diagnose
from pytest_cudaforge.records import Candidate, Depth, Profile, Target

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU that torch can see"),
]

PACKAGE = Path(ncu.__file__).resolve().parents[2]

LAYERS = """
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

@forge_target(inputs=lambda: [torch.randn(512, 1024)], init=lambda: [1024, 512], allow=("kernel", "mixed", "library"))
class Project(nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x))

@forge_target(inputs=lambda: [torch.randn(64, 4096)])
def doubled(x):
    return 2 * x
"""

SMALL = """
__global__ void __launch_bounds__(256) rows(const float4* x, float4* y, float eps) {
  __shared__ float part[8];
  const float4* in = x + (long long)blockIdx.x * 1024;
  float4 v[4]; float s = 0;
  for (int i = 0; i < 4; ++i) v[i] = in[threadIdx.x + 256 * i];
  for (int i = 0; i < 4; ++i) s += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
  for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  s = 0;
  for (int i = 0; i < 8; ++i) s += part[i];
  const float k = rsqrtf(s / 4096 + eps);
  for (int i = 0; i < 4; ++i) {
    const float4 o = make_float4(v[i].x * k, v[i].y * k, v[i].z * k, v[i].w * k);
    y[(long long)blockIdx.x * 1024 + threadIdx.x + 256 * i] = o;
  }
}
"""
BIG = """
__global__ void planes(const float* __restrict__ x, float* __restrict__ y, long long plane, float eps) {
  const long long p = (long long)blockIdx.x * blockDim.x + threadIdx.x + (long long)blockIdx.y * 64 * plane;
  float v[64], s = 0;
#pragma unroll
  for (int c = 0; c < 64; ++c) v[c] = __ldcs(x + p + c * plane);
#pragma unroll
  for (int c = 0; c < 64; ++c) s += v[c] * v[c];
  const float k = rsqrtf(s / 64 + eps);
#pragma unroll
  for (int c = 0; c < 64; ++c) __stcs(y + p + c * plane, v[c] * k);
}
"""
_HEAD = "from pytest_cudaforge.plan import empty, launch, op\n\n\n"
SMALL_PLAN = (
    _HEAD
    + """def plan(module, x):
    y = empty(x.shape, x.dtype)
    launch("rows", grid=x.shape[0], block=256, args=(x, y, module.eps))
    return y
"""
)
BIG_PLAN = (
    _HEAD
    + """def plan(module, x):
    y = empty(x.shape, x.dtype)
    plane = x.shape[2] * x.shape[3]
    launch("planes", grid=(plane // 256, x.shape[0]), block=256, args=(x, y, plane, module.eps))
    return y
"""
)
PROJECT = """
__global__ void relu(const float* x, float* y) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  y[i] = fmaxf(x[i], 0.f);
}
"""
PROJECT_PLAN = (
    _HEAD
    + """def plan(module, x):
    h = op("aten.addmm", module.bias, x, module.weight.t())
    y = empty(h.shape, h.dtype)
    launch("relu", grid=h.numel() // 256, block=256, args=(h, y))
    return y
"""
)
TRITON = """
import triton
import triton.language as tl


@triton.jit
def twofold(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, 2 * value, mask=at < n)
"""
TRITON_PLAN = (
    _HEAD
    + """def plan(x):
    y = empty(x.shape, x.dtype)
    launch("twofold", grid=(x.numel() // 1024,), args=(x, y, x.numel()), constants={"BLOCK": 1024})
    return y
"""
)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    (root / "faults.py").write_text(planted_faults.LAYERS)
    (root / "layers.py").write_text(LAYERS)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    with Evaluator(EvaluatorSettings(device="cuda:0", cache_dir=tmp_path_factory.mktemp("cache"))) as opened:
        yield opened


@pytest.fixture(scope="module")
def counters() -> None:
    found = probe("cuda:0")
    if found.rung != "ncu":
        pytest.skip(f"{found.reason}; {found.remedy}")


def _target(root: Path, name: str) -> Target:
    return next(target for target in discover([root], root).targets if target.id.endswith(f"::{name}"))


def _show(profile: Profile) -> None:
    print(f"\n{profile.rung} {profile.depth} {profile.seconds:.2f} s {profile.notes} {profile.report}")
    for k in profile.kernels:
        print(f"  {k.function} own {k.own} x{k.launches} {k.duration_ns} ns {k.grid} {k.block}")
    for found in diagnose(profile):
        print(f"  {found.kernel}: {found.bound} {found.figures} lines {[line.line for line in found.lines[:4]]}")
    for rule in profile.rules[:5]:
        print(f"  {rule.kernel} {rule.rule} {rule.speedup_percent}")


#: Every fault at the depth of each round; at the other one (tested on captured pages, too) two of them.
_LOOKS: list[tuple[Fault, Depth]] = [*((fault, "quick") for fault in FAULTS), (FAULTS[0], "full"), (FAULTS[4], "full")]


@pytest.mark.parametrize(("fault", "depth"), _LOOKS, ids=[f"{fault.name}-{depth}" for fault, depth in _LOOKS])
def test_planted_faults_are_named_with_their_lines(
    counters: None, evaluator: Evaluator, repo: Path, fault: Fault, depth: Depth
) -> None:
    profile = evaluator.profile(fault.candidate, _target(repo, fault.target), depth=depth)
    _show(profile)
    assert profile.rung == "ncu", profile.notes
    assert {found.bound for found in diagnose(profile)} == {fault.bound}
    for found in diagnose(profile):
        assert found.lines[0].line in fault.lines
    assert bool(profile.rules) == (depth == "full")
    assert Path(profile.report).stat().st_size > 1000


def test_nothing_is_wrong_with_an_honest_kernel(counters: None, evaluator: Evaluator, repo: Path) -> None:
    profile = evaluator.profile(HONEST_ONE.candidate, _target(repo, HONEST_ONE.target))
    _show(profile)
    (found,) = diagnose(profile)
    assert found.bound == "memory bandwidth"
    floor = {name for name, _, _ in profile.kernels[0].metrics}
    print(len(floor), sorted(floor))


def test_a_small_candidate_at_both_depths(counters: None, evaluator: Evaluator, repo: Path) -> None:
    candidate = Candidate.of("cuda", {"kernel.cu": SMALL, "plan.py": SMALL_PLAN})
    target = _target(repo, "Small")
    evaluator.profile(candidate, target)
    quick, full = (evaluator.profile(candidate, target, depth=depth) for depth in ("quick", "full"))
    _show(quick)
    _show(full)
    assert quick.rung == full.rung == "ncu"
    assert full.rules and full.lines


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory < 100 << 30,
    reason="needs 100 GB of GPU memory",
)
def test_level1_36(counters: None, evaluator: Evaluator, repo: Path) -> None:
    candidate, target = Candidate.of("cuda", {"kernel.cu": BIG, "plan.py": BIG_PLAN}), _target(repo, "Big")
    evaluator.baselines(target)
    began = time.perf_counter()
    evaluation = evaluator.evaluate(candidate, target)
    profile = evaluator.profile(candidate, target)
    _show(profile)
    print(f"  a whole round: {time.perf_counter() - began:.1f} s, its evaluation {evaluation.seconds:.1f} s")
    assert evaluation.passed, evaluation.reason
    assert profile.rung == "ncu"
    assert [found.bound for found in diagnose(profile)] == ["memory bandwidth"]


def test_of_a_long_call_one_launch_of_each_shape_is_looked_at(counters: None, evaluator: Evaluator, repo: Path) -> None:
    travelling = FAULTS[-1]
    again = '    for i in range(20):\n        launch("twice", grid=x.numel() // 256, block=256, args=(x, a))\n'
    plan = travelling.plan.replace("    return y\n", f"{again}    return y\n")
    candidate = Candidate.of("cuda", {"kernel.cu": travelling.source, "plan.py": plan})
    profile = evaluator.profile(candidate, _target(repo, travelling.target))
    _show(profile)
    assert profile.rung == "ncu", profile.notes
    counts = {kernel.function: kernel.launches for kernel in profile.kernels}
    assert counts == {"twice": 21, "increment": 1, "positive": 1}


def test_own_kernels_and_a_librarys_are_told_apart(counters: None, evaluator: Evaluator, repo: Path) -> None:
    candidate = Candidate.of("cuda", {"kernel.cu": PROJECT, "plan.py": PROJECT_PLAN})
    profile = evaluator.profile(candidate, _target(repo, "Project"))
    _show(profile)
    assert profile.rung == "ncu", profile.notes
    assert [kernel.function for kernel in profile.kernels if kernel.own] == ["relu"]
    assert any(not kernel.own and kernel.duration_ns for kernel in profile.kernels)
    assert 0 < dict((name, value) for name, value, _ in profile.facts)["own_share"] < 100
    # The library's kernel takes most of the time, and what it leaves in the L2 is there for the next one.
    assert not diagnose(profile)[0].own
    metrics = {name: value for kernel in profile.kernels if kernel.own for name, value, _ in kernel.metrics}
    assert metrics["in_call__dram_bytes"] < metrics["dram__bytes_read.sum"] / 2
    assert metrics["in_call__duration"] > 0 and diagnose(profile)[-1].bound != "redundant global traffic"


def test_a_triton_candidates_lines_are_its_own(counters: None, evaluator: Evaluator, repo: Path) -> None:
    pytest.importorskip("triton")
    candidate = Candidate.of("triton", {"kernel.py": TRITON, "plan.py": TRITON_PLAN})
    profile = evaluator.profile(candidate, _target(repo, "doubled"), depth="full")
    _show(profile)
    assert profile.rung == "ncu", profile.notes
    assert [kernel.own for kernel in profile.kernels] == [True]
    print([(line.file, line.line, line.source) for line in profile.lines])


def test_where_counters_are_refused_cupti_answers(evaluator: Evaluator, repo: Path, tmp_path: Path) -> None:
    refusing = tmp_path / "ncu"
    refusing.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'\nexit 1\n")
    os.chmod(refusing, stat.S_IRWXU)
    seen = Profiler("cuda:0", evaluator.oracle, tmp_path / "cache", {"PATH": f"{tmp_path}:{os.defpath}"})
    before, evaluator.profiler = evaluator.profiler, seen
    try:
        began = time.perf_counter()
        candidate = Candidate.of("cuda", {"kernel.cu": PROJECT, "plan.py": PROJECT_PLAN})
        profile = evaluator.profile(candidate, _target(repo, "Project"))
    finally:
        evaluator.profiler = before
    _show(profile)
    print(f"{time.perf_counter() - began:.2f} s")
    assert profile.rung == "cupti" and "ERR_NVGPUCTRPERM" in profile.notes[0], profile.notes
    own = [kernel for kernel in profile.kernels if kernel.own]
    assert [kernel.function for kernel in own] == ["relu"] and own[0].duration_ns and own[0].grid == (1024, 1, 1)
    assert any(not kernel.own for kernel in profile.kernels)


MODULE = """
import torch
import triton
import triton.language as tl


@triton.jit
def twice(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        twice[(x.numel() // 1024,)](x, y, x.numel(), BLOCK=1024)
        return y.clone()
"""


def test_a_modules_kernels_have_names_and_times(evaluator: Evaluator, repo: Path) -> None:
    pytest.importorskip("triton")
    profile = evaluator.profile(Candidate.of("module", {"candidate.py": MODULE}), _target(repo, "doubled"))
    _show(profile)
    assert profile.rung == "cupti", profile.notes
    assert [kernel.function for kernel in profile.kernels if kernel.own] == ["twice"]
    assert any(not kernel.own for kernel in profile.kernels)
    assert all(kernel.duration_ns for kernel in profile.kernels)


def test_a_report_and_its_printed_pages_say_the_same(
    counters: None, evaluator: Evaluator, repo: Path, tmp_path: Path
) -> None:
    fault = FAULTS[1]
    profile = evaluator.profile(fault.candidate, _target(repo, fault.target), depth="full")
    program, environment = ncu.find_ncu(os.environ), {**os.environ, "PYTHONPATH": str(PACKAGE)}
    assert program is not None
    read = report_reading.read(Path(profile.report), program, tmp_path, environment)
    if read is None:
        pytest.skip(f"ncu_report is not here or does not read this: {(tmp_path / 'reading.txt').read_text()[-300:]}")
    printed = [ncu.page_command(program, Path(profile.report), page) for page in ("raw", "source")]
    raw, source = (subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in printed)
    pages = ncu.read_pages({"raw": raw, "source": source})
    (one,), (other,) = read.kernels, pages.kernels
    assert (one.symbol, one.grid, one.block) == (other.symbol, other.grid, other.block)
    both = [name for name in other.figures if name in one.figures]
    assert len(both) > 100
    for name in both:
        assert one.figures[name][0] == pytest.approx(other.figures[name][0], rel=1e-3, abs=0.006), name
    by_line = {line.line: line.figures for line in pages.lines}
    assert by_line.keys() >= {line.line for line in read.lines if any(line.figures.values())}
    for line in read.lines:
        for name, figure in line.figures.items():
            assert by_line.get(line.line, {}).get(name, 0.0) == pytest.approx(figure), (line.line, name)
