"""What the guard measures, on the CPU: real kernels, real processes; nothing here depends on a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from judged_targets import NORM_PLAN, find, norm, write_repo
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.evaluation.race import RacePace, Turn, block_order, quiet_block, settled
from pytest_cudaforge.evaluation.timing import Block
from pytest_cudaforge.records import Candidate, Race, RaceFailure, Status, from_json, to_json


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    write_repo(root)
    return root


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = cache_with_ceilings(tmp_path_factory.mktemp("cache"))
    with Evaluator(EvaluatorSettings(cache_dir=cache, hang_limit_s=10.0, lock_dir=cache)) as opened:
        yield opened


def test_candidate_and_base_change_places() -> None:
    straight = block_order(("eager", "compile"), True, False)
    turned = block_order(("eager", "compile"), True, True)
    assert straight == ("candidate", "base", "eager", "compile", "compile", "eager", "base", "candidate")
    assert turned == tuple({"candidate": "base", "base": "candidate"}.get(name, name) for name in straight)
    assert block_order(("eager",), False, True) == ("candidate", "eager", "eager", "candidate")


def _turns(*values: tuple[float, float]) -> list[Turn]:
    return [Turn(ns, foreign) for ns, foreign in values]


def test_a_block_on_a_cpu_is_made_of_quiet_turns() -> None:
    quiet = _turns(*[(100.0 + i, 0.0) for i in range(8)])
    loud = _turns(*[(9000.0, 0.7)] * 30, (1.0, 0.5))
    found = quiet_block(3, {"candidate": [*loud, *quiet], "base": quiet})
    assert found == Block(3, (("candidate", 100.7), ("base", 100.7)), 0.0)


def test_parties_give_equally_many_turns_to_a_block() -> None:
    few, many = _turns(*[(100.0 + i, 0.0) for i in range(4)]), _turns(*[(100.0 + i, 0.0) for i in range(40)])
    found = quiet_block(0, {"candidate": few, "base": many}, 1.0)
    assert found is not None and found.of("candidate") == found.of("base") == 103.0


def test_a_block_without_enough_quiet_turns_is_of_no_use() -> None:
    loud = _turns(*[(100.0, 0.5)] * 30, *[(100.0, 0.0)] * 3)
    found = quiet_block(0, {"candidate": loud, "base": loud})
    assert found is not None and found.foreign == 1.0
    assert quiet_block(0, {"candidate": loud, "base": []}) is None


@pytest.mark.parametrize(("slower", "spread", "clear"), [(1.0, 0.0, True), (1.05, 0.0, True), (1.03, 0.01, False)])
def test_measuring_stops_where_the_answer_is_clear(slower: float, spread: float, clear: bool) -> None:
    blocks = [
        Block(process, (("candidate", 1e5 * slower * (1 + spread * (process - 1))), ("base", 1e5)))
        for process in range(3)
        for _ in range(4)
    ]
    assert settled(blocks, "events", "cuda") is clear
    assert settled([Block(b.process, b.ns[:1]) for b in blocks], "events", "cuda")


def test_a_crowded_race_is_not_settled() -> None:
    blocks = [Block(p, (("candidate", 1e5), ("base", 1e5)), 1.0) for p in range(4) for _ in range(3)]
    assert not settled(blocks, "supervisor", "cpu")


def test_as_many_processes_as_asked_for() -> None:
    assert [(p.fewest, p.processes) for p in (RacePace.racing("cpu", 7, None, False),)] == [(7, 7)]
    free = RacePace.racing("cuda", None, None, False)
    assert 1 < free.fewest < free.processes


def _raced(evaluator: Evaluator, repo: Path, base: Candidate, processes: int) -> tuple[Race, ...]:
    """The races of an honest kernel. Neighbours that fill the caches may make it look otherwise: once in many runs."""
    for _ in range(3):
        found = evaluator.race(
            norm(), find(repo, "::RMSNorm"), base=base, processes=processes, budget_s=0.1, references=("eager",)
        )
        if isinstance(found, tuple):
            return found
    raise AssertionError(found.reason)


@pytest.mark.usefixtures("quiet")
def test_a_race_keeps_every_block_of_every_process(evaluator: Evaluator, repo: Path) -> None:
    (race,) = _raced(evaluator, repo, norm(), processes=2)
    assert (race.workload, race.clock, race.what) == ("default", "supervisor", "forward")
    assert {block.process for block in race.blocks} == {0, 1}
    assert all([name for name, _ in block.ns] == ["candidate", "base", "eager"] for block in race.blocks)
    assert all(ns > 0 for block in race.blocks for _, ns in block.ns)
    assert {"starting workers", "blocks", "judging"} <= set(dict(race.spent))
    assert from_json(Race, to_json(race)) == race


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("base", "words"),
    [
        (norm(after="nonsense"), "cannot be built any more"),
        (norm(after="*(volatile int*)8 = 1;"), "does not run any more"),
    ],
)
def test_a_base_that_fails_is_left_out(evaluator: Evaluator, repo: Path, base: Candidate, words: str) -> None:
    (race,) = _raced(evaluator, repo, base, processes=1)
    assert words in " ".join(race.notes)
    assert all([name for name, _ in block.ns] == ["candidate", "eager"] for block in race.blocks)


def test_a_candidate_that_is_wrong_under_the_clock_is_a_failure(evaluator: Evaluator, repo: Path) -> None:
    # Right in its first calls, and in none of those that are timed.
    late = norm(after="static long long n; if (++n > 4) y[3] = 0;")
    found = evaluator.race(late, find(repo, "::RMSNorm"), base=norm(), processes=1, budget_s=0.1, references=("eager",))
    assert isinstance(found, RaceFailure), found
    assert found.status in (Status.INCORRECT_NUMERICAL, Status.REJECTED), found.reason
    assert found.workload == "default"


#: The same answer with one more launch, into one more buffer.
LAUNCH = next(line for line in NORM_PLAN.splitlines(keepends=True) if "launch(" in line and "import" not in line)
FIRST = "    z = empty(x.shape, x.dtype)\n" + LAUNCH.replace(", y", ", z")
MORE = norm(plan=NORM_PLAN.replace(LAUNCH, FIRST + LAUNCH))


@pytest.mark.usefixtures("quiet")
def test_plans_of_other_buffers_have_arenas_of_their_own(evaluator: Evaluator, repo: Path) -> None:
    found = _raced(evaluator, repo, MORE, processes=2)
    assert {block.process for block in found[0].blocks} == {0, 1}
    assert all("base" in dict(block.ns) for block in found[0].blocks)


def test_a_base_for_which_there_is_no_memory_is_left_out(
    evaluator: Evaluator, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(evaluator.device, memory_bytes=1 << 20)
    monkeypatch.setitem(evaluator.__dict__, "device", small)
    found = _raced(evaluator, repo, MORE, processes=1)
    assert "GB that the device has" in " ".join(found[0].notes)
    assert found[0].blocks


def test_an_unknown_workload_is_an_error(evaluator: Evaluator, repo: Path) -> None:
    with pytest.raises(ConfigError, match="no workload 'wide'"):
        evaluator.race(norm(), find(repo, "::RMSNorm"), workloads=["wide"])
