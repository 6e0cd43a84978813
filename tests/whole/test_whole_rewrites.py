"""Honest rewrites of modules, with weights under any name or none: each takes a worker with torch for every probe."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from known_ceilings import cache_with_ceilings
from module_targets import find, model, write_repo

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    """Any kind of work is allowed."""
    cache = cache_with_ceilings(tmp_path_factory.mktemp("cache"))
    allow = ("kernel", "mixed", "library", "rewrite")
    with Evaluator(EvaluatorSettings(cache_dir=cache, hang_limit_s=5.0, lock_dir=cache, allow=allow)) as opened:
        yield opened


_AFFINE_OWN_NAMES = """
def __init__(self, sizes, dtype=None):
    super().__init__()
    inner = nn.Linear(*sizes, dtype=dtype)
    self.w, self.b = inner.weight, inner.bias
    self.s = nn.Parameter(torch.randn(sizes[1]))
"""
_AFFINE_SOME_NAMES = """
def __init__(self, sizes, dtype=None):
    super().__init__()
    self.first = nn.Linear(*sizes, dtype=dtype)
    self.s = nn.Parameter(torch.randn(sizes[1]))
"""
_NORM_SHARED = """
def __init__(self, dim, eps=1e-6):
    super().__init__()
    self.eps, self.inner = eps, nn.Module()
    self.weight = self.inner.weight = nn.Parameter(torch.ones(dim))
"""
_BATCH_NORM = """
def __init__(self, channels):
    super().__init__()
    self.{name} = nn.BatchNorm1d(channels)
"""


@pytest.mark.parametrize(
    ("candidate", "target"),
    [
        (model("return F.linear(x, self.w, self.b) * self.s", _AFFINE_OWN_NAMES), "::Affine"),
        (model("return self.first(x) * self.s", _AFFINE_SOME_NAMES), "::Affine"),
        (model("return F.rms_norm(x, x.shape[-1:], self.inner.weight, self.eps)", _NORM_SHARED), "::RMSNorm"),
        (model("return self.norm(x)", _BATCH_NORM.format(name="norm")), "::Norm"),
        (model("return self.other(x)", _BATCH_NORM.format(name="other")), "::Norm"),
        (model("return {'count': torch.count_nonzero(x > kwargs['low'], -1), 'parts': [2 * x[:, :8], 3], "
               "'top': x.max(-1).values}"), "::pair"),
        (model("return x + x"), "::twice"),
        (model("return x.reshape(-1)"), "::flat"),
        (model("return x.mul_(args[1])"), "::scale_"),
        (model("return F.relu(self.linear(x)) + self.shift",
               "def __init__(self, n):\n    super().__init__()\n    self.linear = nn.Linear(n, n)\n"
               "    self.shift = nn.Parameter(torch.randn(n))"), "bench_task.py::Model"),
        (model("print('PASSED'); return x * 2"), "::twice"),
    ],
    ids=["own names", "some names", "tied", "running statistics", "own statistics", "dict", "function", "view",
         "in place", "kernelbench", "prints"],
)  # fmt: skip
def test_honest_rewrites_pass(lenient: Evaluator, repo: Path, candidate: Candidate, target: str) -> None:
    evaluation = lenient.evaluate(candidate, find(repo, target), timing=False)
    assert evaluation.status is Status.PASSED, evaluation.reason
