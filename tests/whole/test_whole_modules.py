"""Modules under the clock, and some whose extension is a real one: 20 s of g++ each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from known_ceilings import cache_with_ceilings
from module_targets import EXTENSION, HEAD, NORM_INIT, find, model, write_repo

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Evaluation, Status


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    """Own kernels only."""
    cache = cache_with_ceilings(tmp_path_factory.mktemp("cache"))
    settings = EvaluatorSettings(cache_dir=cache, hang_limit_s=5.0, lock_dir=cache, allow=("kernel",))
    with Evaluator(settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def lenient(strict: Evaluator) -> Iterator[Evaluator]:
    """Rewrites are allowed, too."""
    settings = replace(strict.settings, allow=("kernel", "rewrite"), timing_budget_s=0.4)
    with Evaluator(settings) as opened:
        yield opened


def _evaluate(evaluator: Evaluator, repo: Path, candidate: Candidate, name: str = "::RMSNorm") -> Evaluation:
    return evaluator.evaluate(candidate, find(repo, name), timing=False)


def test_an_extension_is_built_once_and_labelled_a_kernel(strict: Evaluator, repo: Path) -> None:
    candidate = model("return ext.rms_norm(x.contiguous(), self.weight, self.eps)", NORM_INIT, extension=True)
    first = _evaluate(strict, repo, candidate)
    assert first.status is Status.PASSED, first.reason
    assert first.work == "kernel"
    assert first.build is not None and not first.build.cached and first.build.seconds > 0
    again = _evaluate(strict, repo, candidate)
    assert again.status is Status.PASSED, again.reason
    assert again.build is not None and again.build.cached and again.build.seconds < first.build.seconds


def test_functions_that_write_into_an_argument_count_as_kernels(strict: Evaluator, repo: Path) -> None:
    candidate = model("y = torch.empty_like(x); ext.twice_into(x.contiguous(), y); return y", extension=True)
    evaluation = _evaluate(strict, repo, candidate, "::twice")
    assert (evaluation.status, evaluation.work) == (Status.PASSED, "kernel"), evaluation.reason


_CLASSES = '''
classes = load_inline(name="classes", cpp_sources="""
struct Twice {
  torch::Tensor run(torch::Tensor x) const {
    auto y = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] = 2 * x.data_ptr<float>()[i];
    return y;
  }
};
torch::Tensor twice(torch::Tensor x) { return Twice().run(x); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<Twice>(m, "Twice").def(pybind11::init<>()).def("run", &Twice::run).def("__call__", &Twice::run);
  m.def_submodule("inner").def("twice", &twice);
}
""")
'''


@pytest.mark.parametrize(
    ("forward", "passed"),
    [
        ("return classes.Twice().run(x)", True),
        ("return classes.Twice()(x)", True),
        ("return classes.inner.twice(x)", True),
        ("classes.Twice().run(x)\nreturn x * 2", False),
        ("classes.inner.twice(x)\nreturn x * 2", False),
    ],
)
def test_methods_and_submodules_of_an_extension_are_its_own_work(
    strict: Evaluator, repo: Path, forward: str, passed: bool
) -> None:
    evaluation = _evaluate(strict, repo, model(forward, before=_CLASSES), "::twice")
    assert evaluation.status is (Status.PASSED if passed else Status.REJECTED), evaluation.reason
    assert evaluation.work == ("kernel" if passed else "rewrite")


_RAW = '''
raw_source = """
void twice_at(int64_t from, int64_t to, int64_t count) {
  const float* x = reinterpret_cast<const float*>(from);
  float* y = reinterpret_cast<float*>(to);
  for (int64_t i = 0; i < count; ++i) y[i] = 2 * x[i];
}
"""
raw = load_inline(name="raw", cpp_sources=raw_source, functions=["twice_at"])
'''


def test_a_function_of_addresses_does_its_own_work(strict: Evaluator, repo: Path) -> None:
    body = "y = torch.empty_like(x)\nraw.twice_at(x.data_ptr(), y.data_ptr(), x.numel())\nreturn y"
    evaluation = _evaluate(strict, repo, model(body, before=_RAW), "::twice")
    assert (evaluation.status, evaluation.work) == (Status.PASSED, "kernel"), evaluation.reason
    assert evaluation.build is not None and not evaluation.build.cached and evaluation.build.seconds > 0


def test_an_extension_may_be_built_in_the_first_call(strict: Evaluator, repo: Path) -> None:
    late = f"TEXT = {EXTENSION!r}\ncached = {{'load_inline': load_inline}}\n"
    forward = "if 'ext' not in cached:\n    exec(TEXT, cached)\nreturn cached['ext'].twice(x)"
    evaluation = _evaluate(strict, repo, model(forward, before=late), "::twice")
    assert evaluation.status is Status.PASSED, evaluation.reason


def test_a_build_error_shows_lines_of_the_candidates_source_only(strict: Evaluator, repo: Path) -> None:
    broken = HEAD + EXTENSION.replace("return y;", 'return nonsense;\n#include "/etc/hostname"', 1)
    candidate = Candidate.of("module", {"c.py": broken + "class ModelNew(nn.Module): ...\n"})
    evaluation = _evaluate(strict, repo, candidate, "::twice")
    assert evaluation.status is Status.BUILD_ERROR
    assert evaluation.build is not None and "hostname: No such file" in evaluation.build.log
    assert "main.cpp:" in evaluation.reason and "torch/" not in evaluation.build.log
    again = _evaluate(strict, repo, candidate, "::twice")
    assert again.reason == evaluation.reason and again.build is not None
    assert again.build.seconds < evaluation.build.seconds  # failures are remembered


def test_a_rewrite_in_torch_is_timed(lenient: Evaluator, repo: Path) -> None:
    rewrite = "return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight"
    evaluation = lenient.evaluate(model(rewrite, NORM_INIT), find(repo, "::RMSNorm"))
    assert (evaluation.status, evaluation.work) == (Status.PASSED, "rewrite"), evaluation.reason
    assert evaluation.timing is not None and evaluation.timing.clock == "supervisor"
    assert 0 < evaluation.timing.workloads[0].candidate.median_ns < 1e9


HIDDEN = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(9, 64)])
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))
        self.hidden = torch.zeros(9, 64)

    def forward(self, x):
        self.hidden = torch.tanh(self.hidden.to(x.device) * self.weight + x)
        return self.hidden * 2
"""
HIDDEN_INIT = """
def __init__(self):
    super().__init__()
    self.weight = nn.Parameter(torch.randn(64))
    self.hidden = torch.zeros(9, 64)
"""


@pytest.mark.parametrize(
    ("keeps", "status"),
    [
        ("self.hidden = new", Status.PASSED),
        ("self.hidden.copy_(new)", Status.PASSED),
        ("pass", Status.INCORRECT_NUMERICAL),
        ("self.hidden = new * 1.01", Status.INCORRECT_NUMERICAL),
    ],
)
def test_state_in_a_plain_attribute(lenient: Evaluator, tmp_path: Path, keeps: str, status: Status) -> None:
    """As in KernelBench's recurrent tasks: neither a parameter nor a buffer, and another tensor after each call."""
    (tmp_path / "layers.py").write_text(HIDDEN)
    forward = f"new = torch.tanh(self.hidden * self.weight + x)\n{keeps}\nreturn new * 2"
    evaluation = lenient.evaluate(model(forward, HIDDEN_INIT), find(tmp_path, "::Cell"), timing=False)
    assert evaluation.status is status, evaluation.reason
    assert status is Status.PASSED or "attribute hidden" in evaluation.reason
