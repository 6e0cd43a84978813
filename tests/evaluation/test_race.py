"""What the guard measures, on the CPU: real kernels, real processes; nothing here depends on a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from judged_targets import find, norm, write_repo

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.race import block_order
from pytest_cudaforge.records import Candidate, Race, RaceFailure, Status, from_json, to_json


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    with Evaluator(EvaluatorSettings(cache_dir=cache, hang_limit_s=3.0, lock_dir=cache)) as opened:
        yield opened


def test_candidate_and_base_change_places() -> None:
    straight = block_order(("eager", "compile"), True, False)
    turned = block_order(("eager", "compile"), True, True)
    assert straight == ("candidate", "base", "eager", "compile", "compile", "eager", "base", "candidate")
    assert turned == tuple({"candidate": "base", "base": "candidate"}.get(name, name) for name in straight)
    assert block_order(("eager",), False, True) == ("candidate", "eager", "eager", "candidate")


def test_a_race_keeps_every_block_of_every_process(evaluator: Evaluator, repo: Path) -> None:
    found = evaluator.race(
        norm(), find(repo, "::RMSNorm"), base=norm(), processes=2, budget_s=0.1, references=("eager",)
    )
    assert isinstance(found, tuple)
    (race,) = found
    assert (race.workload, race.clock, race.what) == ("default", "supervisor", "forward")
    assert {block.process for block in race.blocks} == {0, 1}
    assert all([name for name, _ in block.ns] == ["candidate", "base", "eager"] for block in race.blocks)
    assert all(ns > 0 for block in race.blocks for _, ns in block.ns)
    assert from_json(Race, to_json(race)) == race


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (norm(after="nonsense"), "cannot be built any more"),
        (norm(after="*(volatile int*)8 = 1;"), "does not run any more"),
    ],
)
def test_a_base_that_fails_is_left_out(evaluator: Evaluator, repo: Path, base: Candidate, words: str) -> None:
    found = evaluator.race(norm(), find(repo, "::RMSNorm"), base=base, processes=1, budget_s=0.1, references=("eager",))
    assert isinstance(found, tuple)
    (race,) = found
    assert words in " ".join(race.notes)
    assert all([name for name, _ in block.ns] == ["candidate", "eager"] for block in race.blocks)


def test_a_candidate_that_is_wrong_under_the_clock_is_a_failure(evaluator: Evaluator, repo: Path) -> None:
    # Right in its first calls, and in none of those that are timed.
    late = norm(after="static long long n; if (++n > 4) y[3] = 0;")
    found = evaluator.race(late, find(repo, "::RMSNorm"), base=norm(), processes=1, budget_s=0.1, references=("eager",))
    assert isinstance(found, RaceFailure)
    assert found.status in (Status.INCORRECT_NUMERICAL, Status.REJECTED)
    assert found.workload == "default"


def test_an_unknown_workload_is_an_error(evaluator: Evaluator, repo: Path) -> None:
    with pytest.raises(ConfigError, match="no workload 'wide'"):
        evaluator.race(norm(), find(repo, "::RMSNorm"), workloads=["wide"])
