"""Index outputs of computed values: known by the search that made them, compared by what they point at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from judged_targets import find
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.evaluation.correctness import judge_pointed
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.pointing import PointingMode, pointed_by
from pytest_cudaforge.records import Candidate, Status

SEARCHES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.softmax(-1).topk(3, -1).indices,
    lambda x: x.sort(0, descending=True).indices,
    lambda x: x.argsort(-1),
    lambda x: x.argmax(-1),
    lambda x: x.max(dim=0).indices,
    lambda x: x.min(dim=1, keepdim=True).indices,
    lambda x: x.argmin(),
    lambda x: x.kthvalue(2, dim=-1).indices,
    lambda x: x.topk(3, -1).indices.to(torch.int32),
    lambda x: (x * 2).topk(4, -1).indices[:, :2],
]


@pytest.mark.parametrize("search", SEARCHES)
def test_an_index_output_is_known_by_its_search(search: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mode = PointingMode()
    x = torch.randn(6, 9)
    with mode:
        decoy = x.exp().argmax(0)
        output = search(x)
    number = pointed_by(output, mode.found)
    assert number == 1, (decoy, mode.found)
    found = mode.found[1]
    places = output.long() if output.dim() == found.source.dim() else output.long().unsqueeze(found.dim)
    assert found.source.gather(found.dim, places).shape == places.shape


def test_what_no_search_made_is_not_known() -> None:
    mode = PointingMode()
    with mode:
        torch.randn(6, 9).argmax(0)
    assert pointed_by(torch.zeros(3, dtype=torch.int64), mode.found) is None


def test_places_within_the_rounding_of_computed_values_are_ties() -> None:
    exact = torch.tensor([[0.5, 0.5 + 1e-9, 0.1, 1e-50]], dtype=torch.float64)
    values = exact.float()
    reference = torch.tensor([[1, 0]])
    assert not judge_pointed("out", torch.tensor([[0, 1]]), reference, values, exact, 1).mismatches
    (wrong,) = judge_pointed("out", torch.tensor([[1, 2]]), reference, values, exact, 1).mismatches
    assert "other values" in wrong.detail
    (twice,) = judge_pointed("out", torch.tensor([[1, 1]]), reference, values, exact, 1).mismatches
    assert "occur twice" in twice.detail


def test_without_rounding_only_equal_values_tie() -> None:
    values = torch.tensor([[1.0, 1.0 + 2**-23, 0.0]])
    assert judge_pointed("out", torch.tensor([0]), torch.tensor([1]), values, values.double(), 1).mismatches


GATE = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(53, 24)], index_outputs=("out.1",))
def gate(x):
    return x.softmax(-1).topk(2, -1)
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    values = empty((x.shape[0], 2), x.dtype)
    places = empty((x.shape[0], 2), "int64")
    launch("gate", args=(x, values, places, x.shape[0], x.shape[1]))
    return values, places
"""
KERNEL = """
#include <cmath>
void gate(const float* x, float* values, long long* places, long long rows, long long cols) {
  for (long long r = 0; r < rows; ++r) {
    const float* p = x + r * cols;
    long long a = 0, b = -1;
    for (long long c = 1; c < cols; ++c) a = p[c] > p[a] ? c : a;
    for (long long c = 0; c < cols; ++c) if (c != a && (b < 0 || p[c] > p[b])) b = c;
    double s = 0;
    for (long long c = 0; c < cols; ++c) s += std::exp((double)p[c] - p[a]);
    values[2 * r] = 1 / s; values[2 * r + 1] = std::exp((double)p[b] - p[a]) / s;
    places[2 * r] = a; places[2 * r + 1] = SECOND;
  }
}
"""


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache_with_ceilings(cache), lock_dir=cache)) as opened:
        yield opened


@pytest.mark.parametrize(("second", "right"), [("b", True), ("(b + 1) % cols", False), ("a", False)])
def test_a_gate_may_search_the_logits(evaluator: Evaluator, tmp_path: Path, second: str, right: bool) -> None:
    """On large logits the softmax is zero all but once: the reference breaks ties that the logits do not have."""
    (tmp_path / "layers.py").write_text(GATE)
    candidate = Candidate.of("cpp", {"kernel.cpp": KERNEL.replace("SECOND", second), "plan.py": PLAN})
    evaluation = evaluator.evaluate(candidate, find(tmp_path, "::gate"), timing=False)
    assert (evaluation.status is Status.PASSED) is right, evaluation.reason
