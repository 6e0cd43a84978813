"""Kernels that a team of threads, or one thread alone, shows only on certain values, or sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judged_targets import find
from switches import without_checks

from pytest_cudaforge.evaluation import probes
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation, Status

TARGETS = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randint(0, 8, (300, 300))])
def votes(x):
    return torch.zeros(8, dtype=torch.int64).scatter_add(0, x.flatten(), torch.ones_like(x.flatten()))

@forge_target(inputs=lambda: [torch.randn(4000)], dynamic=True)
def centred(x):
    return x - x.mean()

@forge_target(inputs=lambda: [torch.randn(4096, 128), torch.randint(0, 64, (4096,)).sort().values])
def pooled(x, graph):
    return torch.zeros(64, 128).index_add_(0, graph, x)
"""
PLANS = {
    "votes": """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty((8,), x.dtype)
    launch("votes", args=(x, y, x.numel()))
    return y
""",
    "centred": """
from pytest_cudaforge.plan import Unsupported, empty, launch

def plan(x):
    if not x.is_contiguous():
        raise Unsupported("contiguous vectors only")
    y = empty(x.shape, x.dtype)
    launch("centred", args=(x, y, x.numel()))
    return y
""",
}
PLANS["pooled"] = """
from pytest_cudaforge.plan import Unsupported, empty, launch

def plan(x, graph):
    if not (x.is_contiguous() and graph.is_contiguous()):
        raise Unsupported("contiguous inputs only")
    sums, y = empty((64, 128), "float64"), empty((64, 128), x.dtype)
    launch("pooled", args=(x, graph, sums, y, x.shape[0]))
    return y
"""
KERNELS = {
    "votes": """
extern "C" void votes(const long long* x, long long* y, long long n) {
  for (int c = 0; c < 8; ++c) y[c] = 0;
#pragma omp parallel
  {
    COUNTER own[8] = {};
#pragma omp for schedule(static)
    for (long long i = 0; i < n; ++i) ++own[x[i]];
#pragma omp critical
    for (int c = 0; c < 8; ++c) y[c] += own[c];
  }
}
""",
    "centred": """
#include <omp.h>
#include <vector>

// Each thread has the mean of its own part; these are put together.
extern "C" void centred(const float* x, float* y, long long n) {
  const int team = omp_get_max_threads();
  std::vector<double> means(team), counts(team);
#pragma omp parallel for schedule(static)
  for (int t = 0; t < team; ++t) {
    const long long from = n * t / team, to = n * (t + 1) / team;
    double sum = 0;
    for (long long i = from; i < to; ++i) sum += x[i];
    counts[t] = (double)(to - from);
    means[t] = EMPTY sum / counts[t];
  }
  double mean = 0;
  for (int t = 0; t < team; ++t) mean += means[t] * counts[t] / (double)n;
  for (long long i = 0; i < n; ++i) y[i] = (float)(x[i] - mean);
}
""",
}
#: Each thread sums up runs of one graph by itself, and adds them where they belong at the end of each.
KERNELS["pooled"] = """
static void flush(double* sums, double* run, long long graph) {
  for (int d = 0; d < 128; ++d) {
ATOMIC
    sums[graph * 128 + d] += run[d];
    run[d] = 0;
  }
}

extern "C" void pooled(const float* x, const long long* graph, double* sums, float* y, long long nodes) {
  for (int i = 0; i < 64 * 128; ++i) sums[i] = 0;
#pragma omp parallel
  {
    double run[128] = {};
    long long current = -1;
#pragma omp for schedule(static)
    for (long long n = 0; n < nodes; ++n) {
      if (graph[n] != current && current >= 0) flush(sums, run, current);
      current = graph[n];
      for (int d = 0; d < 128; ++d) run[d] += x[n * 128 + d];
    }
    if (current >= 0) flush(sums, run, current);
  }
  for (int i = 0; i < 64 * 128; ++i) y[i] = (float)sums[i];
}
"""
#: Right for the teams of small machines.
SMALL = "to == from && team < 20 ? 0 :"


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache, lock_dir=cache, times=False)) as opened:
        yield opened


def judged(evaluator: Evaluator, root: pytest.TempPathFactory, name: str, place: str, text: str) -> Evaluation:
    repo = root.mktemp("repo")
    (repo / "layers.py").write_text(TARGETS)
    files = {"kernel.cpp": KERNELS[name].replace(place, text), "plan.py": PLANS[name]}
    return evaluator.evaluate(Candidate.of("cpp", files), find(repo, f"::{name}"), timing=False)


def test_one_thread_counts_what_is_frequent_in_sixteen_bits(
    evaluator: Evaluator, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = judged(evaluator, tmp_path_factory, "votes", "COUNTER", "unsigned short")
    assert refused.status is Status.INCORRECT_NUMERICAL and "OpenMP threads: 1, " in refused.reason, refused.reason
    assert judged(evaluator, tmp_path_factory, "votes", "COUNTER", "unsigned").status is Status.PASSED
    without_checks(monkeypatch, "thread counts")
    passed = judged(evaluator, tmp_path_factory, "votes", "COUNTER", "unsigned short")
    assert passed.status is Status.PASSED, passed.reason


def test_threads_that_get_none_of_a_few_elements(
    evaluator: Evaluator, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = judged(evaluator, tmp_path_factory, "centred", "EMPTY", SMALL)
    assert refused.status is Status.REJECTED and "tiny" in refused.reason, refused.reason
    assert judged(evaluator, tmp_path_factory, "centred", "EMPTY", "to == from ? 0 :").status is Status.PASSED
    monkeypatch.setattr(probes, "_TEAM", 2)
    passed = judged(evaluator, tmp_path_factory, "centred", "EMPTY", SMALL)
    assert passed.status is Status.PASSED, passed.reason


def test_threads_that_add_to_the_same_sum(
    evaluator: Evaluator, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):  # now and then another trial shows it
        refused = judged(evaluator, tmp_path_factory, "pooled", "ATOMIC", "")
        assert refused.status is Status.INCORRECT_NUMERICAL, refused.reason
        if "threads that meet, hub" in refused.reason:
            break
    assert "threads that meet, hub" in refused.reason, refused.reason
    twin = judged(evaluator, tmp_path_factory, "pooled", "ATOMIC", "#pragma omp atomic")
    assert twin.status is Status.PASSED, twin.reason
    without_checks(monkeypatch, "meeting")
    for _ in range(6):  # where others keep the cores busy, threads meet by themselves
        passed = judged(evaluator, tmp_path_factory, "pooled", "ATOMIC", "")
        if passed.status is Status.PASSED:
            break
    assert passed.status is Status.PASSED, passed.reason
