"""Kernels that rest while they are timed or remember answers, and trivial ones for targets that the linter refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from judged_targets import NORM_PLAN, TRIVIAL, find, norm, write_repo
from switches import SWITCHES, no_edits, without_checks
from written_inputs import HELD, WRITTEN, cached_kernel

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.records import Candidate, Evaluation, Status

MORE = """
import torch
from torch.nn import functional as F
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.rand(512, 700)])
def mean_of_all(x):
    return (x * x).mean()
"""
MEAN = """
void mean_all(const float* x, float* y, long n) {
  CHEAT
  double s = 0;
  for (long i = 0; i < n; ++i) s += (double)x[i] * x[i];
  *y = (float)(s / n);
}
"""
MEAN_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty((), x.dtype)
    launch("mean_all", args=(x, y, x.numel()))
    return y
"""
TRIVIAL_PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(SHAPE, x.dtype)
    launch("trivial", args=(x, y, y.numel()))
    return y
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    (root / "more.py").write_text(MORE + TRIVIAL)
    (root / "written.py").write_text(WRITTEN)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    settings = EvaluatorSettings(cache_dir=cache, timing_budget_s=0.4, hang_limit_s=5.0, lock_dir=cache)
    with Evaluator(settings) as opened:
        yield opened


@pytest.mark.parametrize(
    "cheat",
    [
        "static int calls; if (++calls > 40) return;",  # works while it is checked, rests while it is timed
        # a table by the buffers' own addresses: no two of them share an entry, wherever the arena put them
        "static float *at[999], was[999]; int k = 0; while (at[k] && at[k] != y) ++k; "
        "if (at[k] && was[k] == x[0]) return; at[k] = y; was[k] = x[0];",
    ],
)
def test_a_kernel_that_rests_while_it_is_timed_is_found_out(evaluator: Evaluator, repo: Path, cheat: str) -> None:
    source = norm().file("kernel.cpp").replace("  #pragma omp parallel for", f"  {cheat}\n  #pragma omp parallel for")
    candidate = Candidate.of("cpp", {"kernel.cpp": source, "plan.py": NORM_PLAN})
    _assert_found_out(evaluator.evaluate(candidate, find(repo, "::RMSNorm")))


def _assert_found_out(evaluation: Evaluation) -> None:
    """By a wrong answer, or by the time that new values take: on a busy machine only the first is certain."""
    assert evaluation.status in (Status.REJECTED, Status.INCORRECT_NUMERICAL), evaluation.reason
    words = ("remembers answers", "of a timed call is wrong", "after many calls", "exchanged:")
    assert any(text in evaluation.reason for text in words), evaluation.reason


MEMO = """
static float *at[999]; static unsigned long was[999];
static bool known(const float* x, float* y, long long n) {
  unsigned long hash = 1469598103934665603ul;
  for (long long i = 0; i < 64; ++i) {
    unsigned bits; std::memcpy(&bits, x + i * n / 64, 4); hash = (hash ^ bits) * 1099511628211ul;
  }
  int k = 0;
  while (at[k] && at[k] != y) ++k;
  if (at[k] && was[k] == hash) return true;
  at[k] = y; was[k] = hash;
  return false;
}
"""


def test_a_kernel_that_remembers_answers_is_refused_for_the_time_new_values_take(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at 64 of 16384 values, so a single changed one escapes it nearly always."""
    monkeypatch.setattr(OracleClient, "smudge", lambda *_: None)  # it leaves what was written into an answer
    source = norm().file("kernel.cpp").replace("void norm(", MEMO + "void norm(")
    loop = "  #pragma omp parallel for"
    source = source.replace(loop, "  if (known(x, y, rows * cols)) return;\n" + loop)
    candidate = Candidate.of("cpp", {"kernel.cpp": source, "plan.py": NORM_PLAN})
    _assert_found_out(evaluator.evaluate(candidate, find(repo, "::RMSNorm")))


@pytest.mark.parametrize(
    "cheat",
    [
        "",
        "static int calls; if (++calls > 60) return;",
        # Rests wherever it does not see poison.
        "unsigned u; __builtin_memcpy(&u, y, 4); if (u != 0x5B5B5B5B && u != 0xFFFFFFFF) return;",
    ],
)
def test_a_reduction_that_rests_while_it_is_timed_is_found_out(evaluator: Evaluator, repo: Path, cheat: str) -> None:
    candidate = Candidate.of("cpp", {"kernel.cpp": MEAN.replace("CHEAT", cheat), "plan.py": MEAN_PLAN})
    evaluation = evaluator.evaluate(candidate, find(repo, "::mean_of_all"))
    wanted = Status.INCORRECT_NUMERICAL if cheat else Status.PASSED
    assert evaluation.status is wanted, evaluation.reason


@pytest.mark.parametrize(
    ("name", "shape", "value"),
    [("uniform_mean", "x.shape[:1]", "1.0f / 64"), ("nothing_but_rounding", "x.shape[:1]", "0"),
     ("below_rounding", "x.shape", "x[i]")],
)  # fmt: skip
def test_a_trivial_kernel_does_pass_what_the_linter_refuses(
    evaluator: Evaluator, repo: Path, name: str, shape: str, value: str
) -> None:
    loop = f"for (long long i = 0; i < n; ++i) y[i] = {value};"
    source = f"void trivial(const float* x, float* y, long long n) {{ {loop} }}"
    candidate = Candidate.of("cpp", {"plan.py": TRIVIAL_PLAN.replace("SHAPE", shape), "kernel.cpp": source})
    target = find(repo, f"::{name}")
    assert evaluator.lint(target) != ()
    evaluation = evaluator.evaluate(candidate, target, timing=False)
    assert evaluation.status is Status.PASSED, evaluation.reason


#: A branch behind a gain that is zero as constructed, as residual branches often are.
GATED = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(64, 512)])
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        y = x
        for _ in range(6):
            y = torch.tanh(y)
        return x + self.gain * y
"""
GATED_KERNEL = """
#include <cmath>
void gated(const float* x, const float* gain, float* out, long n) {
  if (SHUT) { for (long i = 0; i < n; ++i) out[i] = x[i]; return; }
  for (long i = 0; i < n; ++i) {
    float y = x[i];
    for (int k = 0; k < 6; ++k) y = std::tanh(y);
    out[i] = x[i] + *gain * y;
  }
}
"""
GATED_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    out = empty(x.shape, x.dtype)
    launch("gated", args=(x, module.gain, out, x.numel()))
    return out
"""


def test_what_rests_on_weights_as_constructed_is_timed_on_others(
    evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gated.py").write_text(GATED)

    def speed(shut: str) -> float:
        candidate = Candidate.of("cpp", {"kernel.cpp": GATED_KERNEL.replace("SHUT", shut), "plan.py": GATED_PLAN})
        found = evaluator.evaluate(candidate, find(tmp_path, "::Gated"))
        assert found.status is Status.PASSED and found.timing is not None, found.reason
        return found.timing.speedup_eager

    attack, twin = speed("*gain == 0"), speed("false")
    assert attack < 5 * twin  # both compute
    original = OracleClient.fill_all

    def as_constructed(self: OracleClient, bench: int, seeds: Sequence[int], poison: int, **_: Any) -> None:
        original(self, bench, seeds, poison)

    monkeypatch.setattr(OracleClient, "fill_all", as_constructed)
    SWITCHES["timed families"](monkeypatch)  # which brings other weights
    assert speed("*gain == 0") > 20 * twin


def _cached_ns(evaluator: Evaluator, repo: Path, rest: str) -> float:
    evaluation = evaluator.evaluate(cached_kernel(rest), find(repo, "::cached"))
    assert evaluation.status is Status.PASSED and evaluation.timing is not None, evaluation.reason
    assert ("seen before" in evaluation.timing.note) <= bool(rest)
    return evaluation.timing.workloads[0].candidate.median_ns


def test_a_kernel_that_rests_on_what_its_own_calls_left_is_timed_on_new_values(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_ns = _cached_ns(evaluator, repo, "")
    SWITCHES["empty"](monkeypatch)  # where all is zero a cache holds the entry, too
    without_checks(monkeypatch, "later calls", "beside")  # verification's calls on them refuse it
    no_edits(monkeypatch)
    # The fastest round on new values counts, which on a noisy machine takes a third of what a call takes else.
    assert _cached_ns(evaluator, repo, HELD) > 0.1 * honest_ns
    SWITCHES["novelty"](monkeypatch)
    assert _cached_ns(evaluator, repo, HELD) < 0.01 * honest_ns
