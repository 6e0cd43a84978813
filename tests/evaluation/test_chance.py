"""Where chances come from: from nowhere that anybody knows, or from a seed, in the supervisor and in the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from judged_targets import find
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.evaluation.chance import CHANCE, Chance
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Candidate, Status

TARGETS = """
import torch
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randint(0, 1000, (64, 40))])
def plus(x):
    return x + 1
"""

#: Wrong for one number at some places.
KERNEL = """
extern "C" void kernel(const long long* x, long long* y, long long n) {
  for (long long i = 0; i < n; ++i) y[i] = x[i] + 1 + (x[i] == 7 && i % 3 == 0);
}
"""
PLAN = """
from pytest_cudaforge.plan import empty, launch

def plan(x):
    y = empty(x.shape, x.dtype)
    launch("kernel", args=(x, y, x.numel()))
    return y
"""


def _drawn(chance: Chance) -> list[object]:
    few = list("abcdef")
    chance.shuffle(few)
    return [
        chance.fresh_seed(),
        chance.randint(1, 9),
        chance.choice("xyz"),
        chance.sample(few, 3),
        chance.random(),
        few,
    ]


def test_a_seed_says_all_that_follows() -> None:
    chance = Chance()
    chance.follow("one")
    first = _drawn(chance)
    chance.follow("one")
    assert _drawn(chance) == first
    chance.follow("another")
    assert _drawn(chance) != first


def test_without_one_nobody_knows() -> None:
    chances = [Chance(), Chance()]
    chances[1].follow("one")
    chances[1].follow(None)
    for chance in chances:
        chance.seed(3)
        first = chance.fresh_seed()
        chance.seed(3)
        assert chance.fresh_seed() != first
    assert all(chance.fresh_seed() < 1 << 62 for chance in chances)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "layers.py").write_text(TARGETS)
    return tmp_path


def test_a_verdict_follows_a_seed_in_both_processes(repo: Path, tmp_path: Path) -> None:
    candidate = Candidate.of("cpp", {"kernel.cpp": KERNEL, "plan.py": PLAN})

    def reason(evaluator: Evaluator, seed: int | None) -> str:
        evaluator.oracle.close()  # it finds once what draws have rarely
        CHANCE.follow(seed)
        evaluation = evaluator.evaluate(candidate, find(repo, "::plus"), timing=False)
        assert evaluation.status is Status.INCORRECT_NUMERICAL, evaluation.reason
        return evaluation.reason

    settings = EvaluatorSettings(cache_dir=cache_with_ceilings(tmp_path / "cache"), lock_dir=tmp_path)
    with Evaluator(settings) as evaluator:
        reason(evaluator, None)  # it asks for the target's facts once
        seeded = [reason(evaluator, 5) for _ in range(2)]
        another = reason(evaluator, None)
    assert len(set(seeded)) == 1
    assert another != seeded[0]
