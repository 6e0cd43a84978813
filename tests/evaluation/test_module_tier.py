"""The module tier end to end on the CPU: ModelNew files in real workers beside real references.
(Extensions take 20 s of g++: tests/whole/test_whole_modules.py.)"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from known_ceilings import cache_with_ceilings
from module_targets import HEAD, NORM_INIT, find, model, write_repo

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.teams import openmp_threads
from pytest_cudaforge.records import Candidate, Evaluation, Status


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    """Any kind of work is allowed."""
    cache = tmp_path_factory.mktemp("cache")
    settings = EvaluatorSettings(
        cache_dir=cache_with_ceilings(cache),
        hang_limit_s=5.0,
        lock_dir=cache,
        allow=("kernel", "mixed", "library", "rewrite"),
    )
    with Evaluator(settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def strict(lenient: Evaluator) -> Iterator[Evaluator]:
    """Own kernels only; on the same build cache."""
    settings = EvaluatorSettings(
        cache_dir=lenient.settings.cache_dir,
        hang_limit_s=5.0,
        lock_dir=lenient.settings.cache_dir,
        allow=("kernel",),
    )
    with Evaluator(settings) as opened:
        yield opened


def _evaluate(evaluator: Evaluator, repo: Path, candidate: Candidate, name: str = "::RMSNorm") -> Evaluation:
    return evaluator.evaluate(candidate, find(repo, name), timing=False)


# -- honest candidates -------------------------------------------------------------------------------------------

_NORM = "return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight"


def test_a_rewrite_in_torch_passes_where_it_is_allowed(lenient: Evaluator, repo: Path) -> None:
    evaluation = _evaluate(lenient, repo, model(_NORM, NORM_INIT))
    assert evaluation.status is Status.PASSED, evaluation.reason
    assert (evaluation.work, evaluation.language, evaluation.isolation.grade) == ("rewrite", "module", "B")


def test_as_many_threads_as_the_environment_says_are_no_change(
    lenient: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is put back after a call with other numbers of threads is what there was."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(1 + 2 * (len(os.sched_getaffinity(0)) == 1)))
    with Evaluator(replace(lenient.settings, device="cpu")) as opened:
        evaluation = _evaluate(opened, repo, model(_NORM, NORM_INIT))
        assert opened.oracle.threads == openmp_threads() != len(os.sched_getaffinity(0))
    assert evaluation.status is Status.PASSED, evaluation.reason


def test_who_has_no_weights_is_held_to_drawn_ones(lenient: Evaluator, repo: Path) -> None:
    fresh = model("return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)")
    evaluation = _evaluate(lenient, repo, fresh)
    assert evaluation.status is Status.INCORRECT_NUMERICAL, evaluation.reason
    assert "what is built in" in evaluation.reason


def test_state_without_a_place_is_state_left_alone(lenient: Evaluator, repo: Path) -> None:
    once = model("return F.batch_norm(x, None, None, torch.ones(8), torch.zeros(8), training=True)")
    evaluation = _evaluate(lenient, repo, once, "::Norm")
    assert evaluation.status is Status.INCORRECT_NUMERICAL, evaluation.reason
    assert "norm.num_batches_tracked" in str(evaluation.verification), evaluation.reason


# -- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "status", "words"),
    [
        (Candidate.of("module", {"c.py": "class ModelNew(:\n"}), Status.BUILD_ERROR, "c.py:1: class ModelNew(:"),
        (Candidate.of("module", {"c.py": HEAD + "import nowhere_found\n"}), Status.BUILD_ERROR, "nowhere_found"),
        (Candidate.of("module", {"c.py": HEAD + "class Model(nn.Module): ...\n"}), Status.BUILD_ERROR, "no ModelNew"),
        (Candidate.of("module", {"c.py": "ModelNew = 3\n"}), Status.BUILD_ERROR, "no ModelNew"),
        (Candidate.of("module", {"c.py": "x = 1\n", "d.py": ""}), Status.BUILD_ERROR, "one .py file"),
        (model("return x", "def __init__(self):\n    super().__init__()\n    self.no_such_thing"),
         Status.RUNTIME_ERROR, "self.no_such_thing"),
        (model("return helper(x)", before="def helper(x):\n    raise KeyError('lost')"),
         Status.RUNTIME_ERROR, "in helper: raise KeyError('lost')"),
        (model("import os; os._exit(0)"), Status.RUNTIME_ERROR, "exited with status 0"),
        (model("raise SystemExit(0)"), Status.RUNTIME_ERROR, "SystemExit"),
        (model("import ctypes; ctypes.string_at(8)"), Status.RUNTIME_ERROR, "SIGSEGV"),
        (model("while True: pass"), Status.TIMEOUT, "no answer within 5 s"),
        (model("return x[1:] * 2"), Status.INCORRECT_SHAPE, "shape (7, 64), expected (8, 64)"),
        (model("return (x * 2).double()"), Status.INCORRECT_DTYPE, "dtype float64, expected float32"),
        (model("return x * 2, x"), Status.INCORRECT_SHAPE, "returns out.0, out.1"),
        (model("return None"), Status.INCORRECT_SHAPE, "is None"),
        (model("return object()"), Status.INCORRECT_SHAPE, "builtins.object"),
        (model("return (x * 2).t().contiguous().t()"), Status.INCORRECT_SHAPE, "strides"),
        (model("return (x * 2).to_sparse()"), Status.INCORRECT_SHAPE, "sparse"),
        (model("return x * 2.01"), Status.INCORRECT_NUMERICAL, "error norm"),
    ],
)  # fmt: skip
def test_failures_say_what_happened(
    lenient: Evaluator, repo: Path, candidate: Candidate, status: Status, words: str
) -> None:
    evaluation = _evaluate(lenient, repo, candidate, "::twice")
    assert (evaluation.status, words in evaluation.reason) == (status, True), evaluation.reason


def test_the_frames_shown_are_the_candidates_own(lenient: Evaluator, repo: Path) -> None:
    evaluation = _evaluate(lenient, repo, model("return F.linear(x, torch.ones(3, 3))"), "::twice")
    assert evaluation.status is Status.RUNTIME_ERROR
    assert "candidate.py:" in evaluation.reason and "site-packages" not in evaluation.reason


def test_init_arguments_that_are_no_plain_data_are_the_targets_fault(lenient: Evaluator, repo: Path) -> None:
    with pytest.raises(TargetError, match="Plain"):
        _evaluate(lenient, repo, model("return x + 1"), "::Strange")


def test_aliasing_and_mutation_are_as_the_references(lenient: Evaluator, repo: Path) -> None:
    for forward, target, words in [
        ("return x.mul_(2)", "::twice", "was changed"),
        ("y = x * 2; x.add_(1); return y", "::twice", "was changed"),
        ("self.weight.add_(1); " + _NORM, "::RMSNorm", "was changed"),
    ]:
        evaluation = _evaluate(lenient, repo, model(forward, NORM_INIT if "weight" in forward else ""), target)
        assert evaluation.status in (Status.REJECTED, Status.INCORRECT_SHAPE), (forward, evaluation.reason)
        assert words in evaluation.reason or "shares memory" in evaluation.reason


def test_two_answers_in_one_place_are_not_the_references(lenient: Evaluator, repo: Path) -> None:
    forward = "y = torch.cat([x, x * 2])\nreturn y[:8], y[FROM:FROM + 8]"
    apart, overlapping = (model(forward.replace("FROM", place)) for place in ("8", "0"))
    assert _evaluate(lenient, repo, apart, "::single_and_double").status is Status.PASSED
    evaluation = _evaluate(lenient, repo, overlapping, "::single_and_double")
    assert evaluation.status is Status.INCORRECT_SHAPE, evaluation.reason
    assert "shares memory with out.0" in evaluation.reason


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("torch.manual_seed(3)", "random numbers"),
        ("import gc; gc.disable()", "garbage collector"),
        ("torch.nn.functional.linear = len", "torch's own functions"),
        ("torch.rand(3)", "torch.Generator of the kernel's own"),
        ("torch.rand(3, generator=torch.Generator())", ""),
    ],
)
def test_a_call_leaves_the_program_as_it_was(lenient: Evaluator, repo: Path, act: str, words: str) -> None:
    evaluation = _evaluate(lenient, repo, model(f"{act}\nreturn x * 2"), "::twice")
    assert evaluation.status is (Status.REJECTED if words else Status.PASSED), evaluation.reason
    assert words in evaluation.reason


def test_a_cached_output_buffer_is_found_by_the_call_after(lenient: Evaluator, repo: Path) -> None:
    init = "def __init__(self):\n    super().__init__()\n    self.y = None"
    forward = "if self.y is None: self.y = torch.empty_like(x)\nreturn torch.mul(x, 2, out=self.y)"
    evaluation = _evaluate(lenient, repo, model(forward, init), "::twice")
    assert evaluation.status is Status.INCORRECT_NUMERICAL, evaluation.reason
    assert "earlier call" in evaluation.reason


def test_constants_derived_from_weights_in_init_are_explained(lenient: Evaluator, repo: Path) -> None:
    init = NORM_INIT + "    self.once = self.weight.detach().clone()\n"
    evaluation = _evaluate(lenient, repo, model(_NORM.replace("self.weight", "self.once"), init))
    assert evaluation.status is Status.INCORRECT_NUMERICAL
    assert "as constructed only" in evaluation.reason
    live = NORM_INIT + "    self.once = self.weight.detach()\n"  # shares the parameter's memory
    evaluation = _evaluate(lenient, repo, model(_NORM.replace("self.weight", "self.once"), live))
    assert evaluation.status is Status.PASSED, evaluation.reason
