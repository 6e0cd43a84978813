"""The door, end to end on the CPU: real compilers, real workers, real references."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judged_targets import NORM_PLAN, find, norm, write_repo

from pytest_cudaforge.errors import ConfigError, OracleError, TargetError
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.oracle import Check, OracleClient
from pytest_cudaforge.records import Candidate, Evaluation, Status, from_json, to_json


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")  # its ceilings are measured
    settings = EvaluatorSettings(cache_dir=cache, timing_budget_s=0.4, hang_limit_s=3.0, lock_dir=cache)
    with Evaluator(settings) as opened:
        yield opened


def _evaluate(evaluator: Evaluator, repo: Path, candidate: Candidate, name: str = "::RMSNorm") -> Evaluation:
    return evaluator.evaluate(candidate, find(repo, name), timing=False)


def test_honest_kernel_passes_and_is_timed(evaluator: Evaluator, repo: Path) -> None:
    evaluation = evaluator.evaluate(norm(), find(repo, "::RMSNorm"))
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert evaluation.work == "kernel"
    assert evaluation.verification is not None and evaluation.timing is not None and evaluation.build is not None
    assert evaluation.verification.contract_passed
    assert {case.case for case in evaluation.verification.cases} >= {
        "drawn",
        "shifted",
        "large",
        "misaligned",
        "sparse",
    }
    (timed,) = evaluation.timing.workloads
    assert evaluation.timing.clock == "supervisor"
    assert 0 < timed.candidate.median_ns < 1e9
    assert timed.vs_eager.low <= timed.vs_eager.speedup <= timed.vs_eager.high
    assert dict(evaluation.environment)["torch"]
    assert from_json(Evaluation, to_json(evaluation)) == evaluation


def test_an_oracle_that_another_evaluation_cost_is_asked_again(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one reference does to all others of a run that a size sends out of a GPU's bounds."""
    check, lost = OracleClient.check, []

    def losing(self: OracleClient, *args: Any, **options: Any) -> Check:
        if not lost and self.pid is not None:
            lost.append(self.pid)
            os.kill(self.pid, signal.SIGKILL)
            with pytest.raises(OracleError):
                self.request("hello")
            self.request("hello")
        return check(self, *args, **options)

    monkeypatch.setattr(OracleClient, "check", losing)
    evaluation = _evaluate(evaluator, repo, norm())
    assert evaluation.status is Status.PASSED and lost, evaluation.reason


def test_a_kernel_whose_last_bits_are_others_in_each_call_is_timed(evaluator: Evaluator, repo: Path) -> None:
    """As sums are whose terms come in no order: atomics, OpenMP's reductions."""
    moved = "static int n; if (++n % 3 == 0) for (long i = 0; i < rows * cols; ++i) y[i] = std::nextafter(y[i], 9e9f);"
    for _ in range(3):  # which answers are looked at again is drawn
        evaluation = evaluator.evaluate(norm(after=moved), find(repo, "::RMSNorm"))
        assert evaluation.status is Status.PASSED, evaluation.reason


@pytest.mark.parametrize(
    ("candidate", "status", "words"),
    [
        (norm(rows="rows - 1"), Status.INCORRECT_NUMERICAL, "only row 32 (the last)"),
        (norm(cols="cols - 5"), Status.INCORRECT_NUMERICAL, "error norm is too large"),
        (norm(width="cols - 1"), Status.INCORRECT_NUMERICAL, "only column 511 (the last)"),
        (norm(after="std::memset(y, 0, rows * cols * 4);"), Status.INCORRECT_NUMERICAL, "elements are off"),
        (norm(after="y[rows * cols] = 1;"), Status.REJECTED, "written out of bounds"),
        (norm(after="const_cast<float*>(x)[3] = 0;"), Status.REJECTED, "was changed"),
        (norm(after="const_cast<float*>(w)[3] = 0;"), Status.REJECTED, "was changed"),
        (norm(after="*(volatile int*)8 = 1;"), Status.RUNTIME_ERROR, "SIGSEGV"),
        (norm(after="for (;;) *(volatile float*)y;"), Status.TIMEOUT, "no answer within 3 s"),
        (norm(after="static float k[1 << 16]; static bool s; if (s) std::memcpy(y, k, rows * cols * 4); "
              "else std::memcpy(k, y, rows * cols * 4); s = true;"), Status.INCORRECT_NUMERICAL, "error norm"),
        (norm(after="nonsense"), Status.BUILD_ERROR, "nonsense"),
        (norm(plan=NORM_PLAN.replace("x.dtype", '"float16"')), Status.BUILD_ERROR, "float16"),
        (norm(plan=NORM_PLAN.replace("return y", "return x")), Status.INCORRECT_SHAPE, "shares memory"),
        (norm(plan=NORM_PLAN.replace("return y", "return y, y")), Status.INCORRECT_SHAPE, "returns out.0, out.1"),
        (norm(plan=NORM_PLAN.replace("return y", "return y[1:]")), Status.INCORRECT_SHAPE, "shape (32, 512)"),
        (norm(plan="import os\n" + NORM_PLAN), Status.BUILD_ERROR, "plan.py:1"),
        (norm(plan=NORM_PLAN.replace('"norm"', '"nrm"')), Status.BUILD_ERROR, "nrm"),
        (norm(plan=NORM_PLAN.replace("rows, cols = x.shape",
              'rows, cols = x.shape\n    raise Unsupported("only Tuesdays")').replace("empty, launch",
              "Unsupported, empty, launch")), Status.REJECTED, "only Tuesdays"),
        (Candidate.of("cpp", {"plan.py": NORM_PLAN}), Status.BUILD_ERROR, "no kernel.cpp"),
        (Candidate.of("module", {"kernel.py": ""}), Status.BUILD_ERROR, "no ModelNew"),
    ],
)  # fmt: skip
def test_wrong_kernels_are_refused(
    evaluator: Evaluator, repo: Path, candidate: Candidate, status: Status, words: str
) -> None:
    evaluation = _evaluate(evaluator, repo, candidate)
    assert (evaluation.status, words in evaluation.reason + str(evaluation.build)) == (status, True), evaluation.reason


def test_library_work_is_labelled_and_allowed_only_on_request(evaluator: Evaluator, repo: Path) -> None:
    plan = 'from pytest_cudaforge.plan import op\n\ndef plan(x):\n    return op("aten._softmax", x, -1, False)\n'
    candidate = Candidate.of("cpp", {"kernel.cpp": "void unused() {}", "plan.py": plan})
    evaluation = _evaluate(evaluator, repo, candidate, "::softmax")
    assert (evaluation.status, evaluation.work) == (Status.REJECTED, "rewrite"), evaluation.reason
    assert "no kernel of its own" in evaluation.reason


def test_a_plan_that_asks_for_too_much_memory_is_refused(evaluator: Evaluator, repo: Path) -> None:
    source = norm().file("kernel.cpp") + "void fill(float* z, long long n) { z[n - 1] = 0; }"
    count = evaluator.device.memory_bytes // 8  # half of the memory: one buffer may have that, all together not
    more = f'z = empty(({count},), "float32")\n    launch("fill", args=(z, z.numel()))\n    y = empty('
    candidate = Candidate.of("cpp", {"kernel.cpp": source, "plan.py": NORM_PLAN.replace("y = empty(", more)})
    evaluation = _evaluate(evaluator, repo, candidate)
    assert evaluation.status is Status.REJECTED, evaluation.reason
    assert "the plan's buffers take" in evaluation.reason


def test_allowed_labels_pass_under_their_name(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = 'from pytest_cudaforge.plan import op\n\ndef plan(x):\n    return op("aten._softmax", x, -1, False)\n'
    candidate = Candidate.of("cpp", {"kernel.cpp": "void unused() {}", "plan.py": plan})
    monkeypatch.setattr(evaluator, "settings", replace(evaluator.settings, allow=("rewrite",)))
    evaluation = _evaluate(evaluator, repo, candidate, "::softmax")
    assert (evaluation.status, evaluation.work) == (Status.PASSED, "rewrite"), evaluation.reason


def test_a_reference_without_an_fp64_form_judges_itself(evaluator: Evaluator, repo: Path) -> None:
    source = "void f(const float* x, float* y, long long n) { for (long long i = 0; i < n; ++i) y[i] = BODY; }"
    plan = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("f", args=(x, y, x.numel()))
    return y
"""
    for body, status in [("x[i] * 2 + 1", Status.PASSED), ("x[i] * 2 + 1.001f", Status.INCORRECT_NUMERICAL)]:
        files = {"kernel.cpp": source.replace("BODY", body), "plan.py": plan}
        evaluation = _evaluate(evaluator, repo, Candidate.of("cpp", files), "::only_fp32")
        assert evaluation.status is status, evaluation.reason
        assert evaluation.verification is not None and evaluation.verification.oracle == "partial"


def test_indices_of_ties_may_differ(evaluator: Evaluator, repo: Path) -> None:
    source = """
    void top2(const float* x, float* v, long long* i, long long rows, long long cols) {
      for (long long r = 0; r < rows; ++r) {
        const float* p = x + r * cols; long long a = -1, b = -1;
        for (long long c = 0; c < cols; ++c) {
          if (a < 0 || p[c] >= p[a]) { b = a; a = c; } else if (b < 0 || p[c] >= p[b]) b = c;
        }
        v[2 * r] = p[a]; v[2 * r + 1] = p[b]; i[2 * r] = a; i[2 * r + 1] = SECOND;
      }
    }"""
    plan = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    rows, cols = x.shape
    v, i = empty((rows, 2), x.dtype), empty((rows, 2), "int64")
    launch("top2", args=(x, v, i, rows, cols))
    return v, i
"""
    for second, status in [("b", Status.PASSED), ("a", Status.INCORRECT_NUMERICAL)]:
        files = {"kernel.cpp": source.replace("SECOND", second), "plan.py": plan}
        evaluation = _evaluate(evaluator, repo, Candidate.of("cpp", files), "::top2")
        assert evaluation.status is status, evaluation.reason


def test_sums_beside_a_place_need_not_be_better_where_most_values_are_equal(
    evaluator: Evaluator, tmp_path: Path
) -> None:
    """Of few different values a serial sum's rounding all goes one way; they are drawn for the place's sake."""
    (tmp_path / "layers.py").write_text("""
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(64, 4096)])
def summed_and_first(x):
    return x.sum(-1), x.argmax(-1)
""")
    kernel = """
#include <cstdint>
extern "C" void rows(const float* x, float* sums, int64_t* at, int64_t rows, int64_t columns) {
    #pragma omp parallel for
    for (int64_t row = 0; row < rows; ++row) {
        const float* in = x + row * columns;
        volatile float sum = 0.0f;  // one after another
        int64_t best = 0;
        for (int64_t i = 0; i < columns; ++i) {
            sum = sum + in[i];
            if (in[i] > in[best]) best = i;
        }
        sums[row] = sum;
        at[row] = best;
    }
}
"""
    plan = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    sums, at = empty((x.shape[0],), x.dtype), empty((x.shape[0],), "int64")
    launch("rows", args=(x, sums, at, x.shape[0], x.shape[1]))
    return sums, at
"""
    candidate = Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": plan})
    evaluation = evaluator.evaluate(candidate, find(tmp_path, "::summed_and_first"), timing=False)
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert evaluation.verification is not None
    assert "ties" in {case.case for case in evaluation.verification.cases}


def test_several_outputs_workloads_and_integers(evaluator: Evaluator, repo: Path) -> None:
    source = """
    void pair(const float* x, float* top, long long* count, long long rows, long long cols) {
      for (long long r = 0; r < rows; ++r) {
        float m = x[r * cols]; long long n = 0;
        for (long long c = 0; c < cols; ++c) { float v = x[r * cols + c]; if (v > m) m = v; n += v > 0; }
        top[r] = m; count[r] = n;
      }
    }"""
    plan = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    rows, cols = x.shape
    top, count = empty((rows,), x.dtype), empty((rows,), "int64")
    launch("pair", args=(x, top, count, rows, cols), constants={"EVEN": int(cols == 64)})
    return {"top": top, "count": count}
"""
    good = _evaluate(evaluator, repo, Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan}), "::pair")
    assert good.status is Status.PASSED, good.reason
    assert good.verification is not None
    assert {case.workload for case in good.verification.cases} == {"default", "wide"}
    # A probe of one workload has the constants of the other: both are known, whichever is verified alone.
    known = good.verification.guard
    assert not known.drawn_shapes_only
    target, candidate = find(repo, "::pair"), Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan})
    alone = evaluator.evaluate(candidate, target, timing=False, workloads=["default"], guard=known).verification
    assert alone is not None and alone.guard == known
    assert {case.workload for case in alone.cases} == {"default"}
    with pytest.raises(ConfigError, match="narrow"):
        evaluator.evaluate(candidate, target, timing=False, workloads=["narrow"])
    wrong = Candidate.of("cpp", {"kernel.cpp": source.replace("n += v > 0", "n += v >= -1"), "plan.py": plan})
    bad = _evaluate(evaluator, repo, wrong, "::pair")
    assert (bad.status, "out.count" in bad.reason) == (Status.INCORRECT_NUMERICAL, True)
    swapped = plan.replace('{"top": top, "count": count}', '{"top": count, "count": top}')
    dtype = _evaluate(evaluator, repo, Candidate.of("cpp", {"kernel.cpp": source, "plan.py": swapped}), "::pair")
    assert dtype.status is Status.INCORRECT_DTYPE, dtype.reason


def test_inputs_may_be_written_where_the_reference_writes_them(evaluator: Evaluator, repo: Path) -> None:
    source = "void scale(float* x, long long n, float f) { for (long long i = 0; i < n; ++i) x[i] *= f; }"
    plan = """
from pytest_cudaforge.plan import launch

def plan(x, factor):
    launch("scale", args=(x, x.numel(), factor))
    return x
"""
    good = _evaluate(evaluator, repo, Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan}), "::scale_")
    assert good.status is Status.PASSED, good.reason
    wrong = Candidate.of("cpp", {"kernel.cpp": source.replace("*= f", "*= f * 1.001f"), "plan.py": plan})
    assert _evaluate(evaluator, repo, wrong, "::scale_").status is Status.INCORRECT_NUMERICAL


def test_prepare_runs_again_when_weights_change(evaluator: Evaluator, repo: Path) -> None:
    candidate = norm()
    plan = """
from pytest_cudaforge.plan import empty, launch

def prepare(module):
    w = empty(module.weight.shape, module.weight.dtype)
    launch("copy", args=(module.weight, w, w.numel()))
    return w

def plan(module, x, prepared):
    rows, cols = x.shape
    y = empty(x.shape, x.dtype)
    launch("norm", args=(x, prepared, y, rows, cols, module.eps))
    return y
"""
    source = candidate.file("kernel.cpp") + (
        "void copy(const float* a, float* b, long long n) { for (long long i = 0; i < n; ++i) b[i] = a[i]; }"
    )
    evaluation = _evaluate(evaluator, repo, Candidate.of("cpp", {"kernel.cpp": source, "plan.py": plan}))
    assert evaluation.status is Status.PASSED, evaluation.reason


def test_guard_is_narrowed_by_what_the_plan_refuses(evaluator: Evaluator, repo: Path) -> None:
    evaluation = _evaluate(evaluator, repo, norm())
    assert evaluation.verification is not None
    guard = evaluation.verification.guard
    assert guard.contiguous_only
    assert not guard.drawn_shapes_only
    plan = NORM_PLAN.replace("module.eps))", 'module.eps), constants={"N": rows})')
    special = _evaluate(evaluator, repo, norm(plan=plan))
    assert special.verification is not None
    assert special.verification.guard.fixed_sizes == (33,) and not special.verification.guard.drawn_shapes_only
    assert "specialised" in " ".join(special.verification.guard.reasons)


def test_second_evaluation_finds_the_build_in_the_cache(evaluator: Evaluator, repo: Path) -> None:
    candidate = norm(after="/* cached */")
    first, second = _evaluate(evaluator, repo, candidate), _evaluate(evaluator, repo, candidate)
    fresh = evaluator.evaluate(candidate, find(repo, "::RMSNorm"), timing=False, fresh=True)
    assert first.build and second.build and fresh.build
    assert (first.build.cached, second.build.cached, fresh.build.cached) == (False, True, False)


def test_several_threads_share_one_evaluator(evaluator: Evaluator, repo: Path) -> None:
    found: dict[str, Status] = {}

    def judge(name: str, candidate: Candidate) -> None:
        found[name] = _evaluate(evaluator, repo, candidate).status

    jobs = {"good": norm(after="/* thread */"), "bad": norm(rows="rows - 2"), "broken": norm(after="?")}
    threads = [threading.Thread(target=judge, args=job) for job in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"good": Status.PASSED, "bad": Status.INCORRECT_NUMERICAL, "broken": Status.BUILD_ERROR}


def test_target_errors_are_raised_not_judged(evaluator: Evaluator, repo: Path) -> None:
    with pytest.raises(TargetError, match="no data here"):
        _evaluate(evaluator, repo, norm(), "::inputs_raise")


@pytest.mark.parametrize(("language", "source"), [("cuda", "kernel.cu"), ("triton", "kernel.py")])
def test_a_candidate_for_a_gpu_is_a_usage_error_on_the_cpu(
    evaluator: Evaluator, repo: Path, language: str, source: str
) -> None:
    with pytest.raises(ConfigError, match=f"a {language} candidate cannot run on cpu"):
        _evaluate(evaluator, repo, Candidate.of(language, {source: "", "plan.py": ""}))


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trials = 0"):
        Evaluator(EvaluatorSettings(cache_dir=tmp_path, trials=0))


RAND = """
import torch
from torch import nn
from pytest_cudaforge import forge_target


@forge_target(inputs=lambda: [torch.rand(64, 96)])
def rectified(x):
    return torch.relu(x)


@forge_target(inputs=lambda: [torch.rand(64, 96)])
def root(x):
    return torch.sqrt(x)


@forge_target(inputs=lambda: [torch.rand(512, 700)])
def mean_of_all(x):
    return (x * x).mean()


@forge_target(inputs=lambda: [torch.randn(16, 32)])
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x):
        self.mean += 0.1 * (x.mean(0) - self.mean)
        return x - self.mean


@forge_target(inputs=lambda: [torch.rand(64, 32)], mode="train")
class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(32)

    def forward(self, x):
        return self.bn(x)
"""
MEAN_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty((), x.dtype)
    launch("mean_all", args=(x, y, x.numel()))
    return y
"""
BATCH_NORM = """
#include <cmath>
void bn(const float* x, const float* w, const float* b, float* mean, float* var, long long* count, float* y, long rows,
        long cols, float momentum, float eps) {
  ++*count;
  for (long c = 0; c < cols; ++c) {
    double m = 0, v = 0;
    for (long r = 0; r < rows; ++r) m += x[r * cols + c];
    m /= rows;
    for (long r = 0; r < rows; ++r) v += (x[r * cols + c] - m) * (x[r * cols + c] - m);
    mean[c] = (1 - momentum) * mean[c] + momentum * (float)m;
    var[c] = (1 - momentum) * var[c] + momentum * (float)(v / (rows - 1));
    double k = 1 / std::sqrt(v / rows + eps);
    for (long r = 0; r < rows; ++r) y[r * cols + c] = (float)((x[r * cols + c] - m) * k) * w[c] + b[c];
  }
}
"""
BATCH_NORM_PLAN = """from pytest_cudaforge.plan import empty, launch

def plan(module, x):
    bn, y = module.bn, empty(x.shape, x.dtype)
    state = (bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked)
    launch("bn", args=(x, *state, y, *x.shape, bn.momentum, bn.eps))
    return y
"""


@pytest.fixture(scope="module")
def rand_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rand")
    (root / "layers.py").write_text(RAND)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return root


def test_inputs_of_torch_rand_are_redrawn_with_negative_and_large_values(evaluator: Evaluator, rand_repo: Path) -> None:
    kernel = "void copy(const float* x, float* y, long n) { for (long i = 0; i < n; ++i) y[i] = x[i]; }"
    plan = MEAN_PLAN.replace("empty(()", "empty(x.shape").replace("mean_all", "copy")
    candidate = Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": plan})
    evaluation = _evaluate(evaluator, rand_repo, candidate, "::rectified")
    assert evaluation.status is Status.INCORRECT_NUMERICAL, evaluation.reason


def test_where_the_reference_takes_no_others_they_stay_in_their_range(evaluator: Evaluator, rand_repo: Path) -> None:
    body = "for (long i = 0; i < n; ++i) y[i] = std::sqrt(x[i]);"
    kernel = f"#include <cmath>\nvoid root(const float* x, float* y, long n) {{ {body} }}"
    plan = MEAN_PLAN.replace("empty(()", "empty(x.shape").replace("mean_all", "root")
    candidate = Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": plan})
    evaluation = _evaluate(evaluator, rand_repo, candidate, "::root")
    assert evaluation.passed, evaluation.reason
    assert evaluation.verification is not None
    assert "large" not in {case.case for case in evaluation.verification.cases}


def test_a_target_that_writes_its_input_is_timed_too(evaluator: Evaluator, repo: Path) -> None:
    kernel = "void scale(float* x, long n, float f) { for (long i = 0; i < n; ++i) x[i] *= f; }"
    plan = MEAN_PLAN.partition("def")[0] + "def plan(x, factor):\n    launch('scale', args=(x, x.numel(), factor))\n"
    candidate = Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": plan + "    return x\n"})
    evaluation = evaluator.evaluate(candidate, find(repo, "::scale_"))
    assert evaluation.passed, evaluation.reason


@pytest.mark.parametrize("spoil", [("", ""), ("(1 - momentum) * mean[c]", "mean[c]"), ("++*count", "*count = 1")])
def test_running_statistics_are_outputs_too(evaluator: Evaluator, rand_repo: Path, spoil: tuple[str, str]) -> None:
    kernel = BATCH_NORM.replace(*spoil) if spoil[0] else BATCH_NORM
    candidate = Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": BATCH_NORM_PLAN})
    evaluation = _evaluate(evaluator, rand_repo, candidate, "::Normalised")
    assert evaluation.passed == (not spoil[0]), evaluation.reason


def test_answers_that_follow_from_state_are_timed_and_not_judged(evaluator: Evaluator, rand_repo: Path) -> None:
    kernel = """
    void centre(const float* x, float* mean, float* y, long rows, long cols) {
      for (long c = 0; c < cols; ++c) {
        float m = 0;
        for (long r = 0; r < rows; ++r) m += x[r * cols + c];
        mean[c] += 0.1f * (m / rows - mean[c]);
        for (long r = 0; r < rows; ++r) y[r * cols + c] = x[r * cols + c] - mean[c];
      }
    }"""
    plan = BATCH_NORM_PLAN.partition("    bn, y")[0] + (
        "    y = empty(x.shape, x.dtype)\n    launch('centre', args=(x, module.mean, y, *x.shape))\n    return y\n"
    )
    evaluation = evaluator.evaluate(
        Candidate.of("cpp", {"kernel.cpp": kernel, "plan.py": plan}), find(rand_repo, "::Centred")
    )
    assert evaluation.passed and evaluation.timing is not None, evaluation.reason


def test_a_profile_of_what_passed(evaluator: Evaluator, repo: Path) -> None:
    profile = evaluator.profile(norm(), find(repo, "::RMSNorm"))
    assert profile.candidate == norm().digest
    assert [(kernel.function, kernel.own, kernel.launches) for kernel in profile.kernels] == [("norm", True, 1)]
    facts = {name: value for name, value, _ in profile.facts}
    assert facts["minimal_bytes"] <= facts["plan_bytes"] and facts["scratch_bytes"] == 0
    assert facts["speed_of_light"] > 0


def test_what_cannot_be_built_has_a_profile_that_says_so(evaluator: Evaluator, repo: Path) -> None:
    profile = evaluator.profile(norm(after="nonsense"), find(repo, "::RMSNorm"))
    assert profile.kernels == () and "nonsense" in " ".join(profile.notes)


def test_torch_compiles_own_kernels_come_with_the_baseline(evaluator: Evaluator, repo: Path) -> None:
    (line,) = evaluator.baselines(find(repo, "::RMSNorm"))
    assert line.compile is not None
    assert line.generated.startswith('extern "C"')
    assert "for(int64_t" in line.generated


def test_a_device_without_an_index_is_the_first():
    with Evaluator(EvaluatorSettings(device="cuda")) as evaluator:
        assert evaluator.settings.device == "cuda:0"
