"""The memory of what was tried: expected against measured, and failed ideas that come back in other words."""

from __future__ import annotations

import dataclasses

import prompt_records as made
import pytest

from pytest_cudaforge import attempts
from pytest_cudaforge.records import Feedback, Ratio, Round


def tried(number: int, candidate_ns: float, method: str = "fuse", parent: int = 1, **changes: object) -> Round:
    feedback = Feedback("optimization", "traffic", method, "do it", place="f", expected=1.3)
    turn = dataclasses.replace(made.passed(number, candidate_ns, parent=parent), feedback=feedback)
    return dataclasses.replace(turn, **changes)  # type: ignore[arg-type]


FIRST = made.passed(1, 200_000)


def test_an_attempt_holds_method_place_expected_and_measured() -> None:
    (found,) = attempts.remember([FIRST, tried(2, 160_000)])
    assert (found.number, found.parent, found.method, found.place, found.expected) == (2, 1, "fuse", "f", 1.3)
    assert found.measured == pytest.approx(1.25)
    assert not found.failed
    assert attempts.render([found]) == ["- round 2, from round 1 in f, expected 1.3x: measured 1.25x, 160 us <- fuse"]


def test_one_sitting_decides_over_two() -> None:
    turn = tried(2, 160_000, incumbent=1)
    assert turn.evaluation is not None and turn.evaluation.timing is not None
    timing = dataclasses.replace(turn.evaluation.timing, vs_incumbent=Ratio(0.98, 0.97, 0.99))
    raced = dataclasses.replace(turn, evaluation=dataclasses.replace(turn.evaluation, timing=timing))
    (found,) = attempts.remember([FIRST, raced])
    assert (found.measured, found.failed) == (0.98, True)
    assert attempts.render([found])[0].endswith("measured 0.98x, 160 us, it brought nothing <- fuse")


def test_a_disturbed_sitting_is_held_against_no_idea() -> None:
    turn = tried(2, 210_000)
    assert turn.evaluation is not None and turn.evaluation.timing is not None
    timing = dataclasses.replace(turn.evaluation.timing, decision="disturbed")
    (found,) = attempts.remember(
        [FIRST, dataclasses.replace(turn, evaluation=dataclasses.replace(turn.evaluation, timing=timing))]
    )
    assert not found.failed
    assert found.outcome == "measured 0.952x, 210 us (disturbed)"


def test_what_broke_and_was_mended_counts_as_what_was_mended() -> None:
    broken = dataclasses.replace(made.wrong_numbers(2, parent=1), kind="optimization")
    broken = dataclasses.replace(broken, feedback=tried(2, 1).feedback)
    mended = dataclasses.replace(made.passed(3, 150_000, parent=2), kind="correction")
    (found,) = attempts.remember([FIRST, broken, mended])
    assert found.measured == pytest.approx(4 / 3)
    assert "INCORRECT_NUMERICAL: out is wrong; corrected in round 3: measured 1.33x, 150 us" in found.outcome


def test_an_idea_that_was_never_carried_out_is_remembered_and_may_return() -> None:
    broken = dataclasses.replace(made.wrong_numbers(2, parent=1), kind="optimization", feedback=tried(2, 1).feedback)
    lost = dataclasses.replace(tried(3, 1), candidate=None, evaluation=None, failure="no code")
    found = attempts.remember([FIRST, broken, lost])
    assert [attempt.failed for attempt in found] == [False, False]
    assert "no candidate (no code)" in attempts.render(found)[0]
    assert attempts.repeated(tried(4, 1).feedback, found) is None


METHOD = "Keep each row in registers between the two passes, so that x is read once from memory."


def again(method: str, place: str = "f", plan: str = "do it") -> attempts.Attempt | None:
    memory = attempts.remember([FIRST, tried(2, 206_000, METHOD)])
    return attempts.repeated(Feedback("optimization", "traffic", method, plan, place=place), memory)


@pytest.mark.parametrize(
    "method",
    [
        METHOD,
        METHOD.upper(),
        "Keeping every row in registers between both passes, x is read from memory only once",
        "registers keep rows between passes: reading x once from memory",
    ],
)
def test_a_failed_idea_is_known_again_in_other_words(method: str) -> None:
    found = again(method)
    assert found is not None and found.number == 2


@pytest.mark.parametrize(
    ("method", "place", "plan"),
    [
        ("Stage rows in shared memory with asynchronous copies.", "f", ""),
        ("Vectorised stores of four elements", "f", ""),
        (METHOD, "other_kernel", ""),
        (METHOD + " Round 2 spilled; fewer rows at a time do not.", "f", ""),
        (METHOD, "f", "as in round 2, but with launch bounds"),
    ],
)
def test_another_idea_another_place_or_a_reason_is_heard(method: str, place: str, plan: str) -> None:
    assert again(method, place, plan) is None


def test_another_number_is_another_idea() -> None:
    memory = attempts.remember([FIRST, tried(2, 206_000, "blocks of 512 threads")])
    proposed = Feedback("optimization", "b", "blocks of 256 threads", "p", place="f")
    assert attempts.repeated(proposed, memory) is None
    assert attempts.repeated(dataclasses.replace(proposed, why="512 threads a block"), memory) is not None


def test_a_chain_of_corrections_says_what_was_done_and_what_came_of_it() -> None:
    rounds = [FIRST, tried(2, 100_000), made.wrong_numbers(3, parent=2)]
    rounds.append(dataclasses.replace(rounds[1], number=4, duplicate_of=2))
    rounds.append(dataclasses.replace(FIRST, number=5, candidate=None, evaluation=None, failure="no code"))
    assert attempts.render_chain(rounds, 3) == [
        "- round 1 (first candidate) -> correct, 200 us",
        "- round 2 (from round 1): fuse -> measured 2x, 100 us",
        "- round 3 (from round 2): add a barrier -> INCORRECT_NUMERICAL: out is wrong [the candidate above]",
        "- round 4 (from round 1): fuse -> the same code as round 2",
        "- round 5 (first candidate) -> no candidate (no code)",
    ]


def test_long_methods_are_cut() -> None:
    (line,) = attempts.render(attempts.remember([FIRST, tried(2, 1e5, "very " * 1000 + "\n```")]))
    assert len(line) < 320
    assert "measured 2x, 100 us <- very" in line and line.endswith("very...")
    assert "\n" not in line
