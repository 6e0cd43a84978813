"""What the time of new values says about a kernel's memory."""

from __future__ import annotations

import pytest

from pytest_cudaforge.evaluation.novelty import (
    CHARGED_ABOVE,
    EVENT_SLACK_NS,
    MAX_ROUNDS,
    REFUSED_ABOVE,
    SINGLE_REFUSED_ABOVE,
    SINGLE_SLACK_NS,
    Round,
    doubtful_above,
    lag_of,
    pass_share_ns,
    play_rounds,
    single_of,
    undisturbed,
)


@pytest.mark.parametrize(
    ("rounds", "call_ns", "lag"),
    [
        ([], 100.0, 1.0),
        ([Round(110, 100)], 100.0, 1.0),  # noise
        ([Round(90, 100)], 100.0, 1.0),  # the other way round
        ([Round(400, 100), Round(105, 100)], 100.0, 1.0),  # disturbed once
        ([Round(160, 100), Round(190, 100)], 100.0, 1.6),
        ([Round(160, 100)], 6.0, 11.0),  # passes cost something besides their calls: only the difference counts
        ([Round(160, 100)], 0.0, 61.0),
    ],
)
def test_the_smallest_difference_counts(rounds: list[Round], call_ns: float, lag: float) -> None:
    assert lag_of(rounds, call_ns) == pytest.approx(lag)


def test_an_honest_kernel_is_asked_once() -> None:
    assert len(play_rounds(lambda: Round(101, 100), 100.0)) == 1


def test_a_disturbed_pass_is_repeated_until_one_is_quiet() -> None:
    passes = iter([Round(900, 100), Round(500, 100), Round(99, 100)])
    rounds = play_rounds(lambda: next(passes), 100.0)
    assert len(rounds) == 3
    assert lag_of(rounds, 100.0) == 1.0


def test_a_memory_shows_in_every_round() -> None:
    rounds = play_rounds(lambda: Round(900, 100), 100.0)
    assert len(rounds) == MAX_ROUNDS
    assert lag_of(rounds, 100.0) > REFUSED_ABOVE


def test_a_pass_holds_every_call_to_its_time() -> None:
    rounds = [Round(300, 305), Round(900, 290)]
    assert single_of(rounds, 300.0, 0.0) == 1.0
    assert single_of(rounds, 3.0, 0.0) == 100.0  # rests on all but the first visits
    assert single_of(rounds, 300.0, pass_share_ns(256)) < 0  # lost in what a pass costs besides
    assert pass_share_ns(2) > pass_share_ns(4)


def test_a_memory_that_is_not_used_in_some_passes_by_lot_shows_all_the_same() -> None:
    rounds = [Round(900, 900), Round(910, 100), Round(905, 900)]
    assert lag_of(rounds, 100.0) == 1.0
    assert single_of(rounds, 100.0, 0.0) == 9.0


def test_what_is_saved_below_the_limit_is_charged_where_a_pass_is_measured_well() -> None:
    assert doubtful_above(REFUSED_ABOVE, 0.0, 4e3) == CHARGED_ABOVE
    assert doubtful_above(REFUSED_ABOVE, EVENT_SLACK_NS, 100e3) == pytest.approx(1.27)
    assert doubtful_above(SINGLE_REFUSED_ABOVE, SINGLE_SLACK_NS, 200e3) == pytest.approx(1.28)
    # A call that is nothing but host time, or what a pass costs besides: only the limit is left.
    assert doubtful_above(SINGLE_REFUSED_ABOVE, SINGLE_SLACK_NS, 3e3) == SINGLE_REFUSED_ABOVE
    assert doubtful_above(SINGLE_REFUSED_ABOVE, pass_share_ns(2), 100e3) == SINGLE_REFUSED_ABOVE


def test_a_kernel_that_rests_on_three_of_five_visits_is_charged_for_it() -> None:
    call_ns, share_ns = 400e3, pass_share_ns(100)
    times = single_of([Round(1e6 + share_ns, 1e6 + share_ns)], call_ns, share_ns)
    assert doubtful_above(SINGLE_REFUSED_ABOVE, share_ns, call_ns) < times == 2.5 < SINGLE_REFUSED_ABOVE


def test_what_others_took_of_a_pass_is_no_evidence() -> None:
    call_ns, limit = 100.0, SINGLE_REFUSED_ABOVE
    stalled = [Round(500, 450, 0.6, 0.55), Round(400, 420, 0.5, 0.55)]
    assert single_of(stalled, call_ns, 0.0) > limit > single_of([r.undisturbed() for r in stalled], call_ns, 0.0)
    # One quiet round is evidence; so is a pass that is too long by more than others took.
    assert single_of([Round(500, 500).undisturbed()], call_ns, 0.0) > limit
    assert single_of([Round(900, 900, 0.5, 0.5).undisturbed()], call_ns, 0.0) > limit
    assert lag_of([Round(300, 100, 0.66).undisturbed()], call_ns) == 1.0
    assert lag_of([Round(900, 100, 0.5).undisturbed()], call_ns) > REFUSED_ABOVE


def test_a_round_that_others_took_nearly_all_of_clears_nobody_where_there_are_quiet_ones() -> None:
    call_ns, limit = 100.0, SINGLE_REFUSED_ABOVE
    quiet, taken = Round(1160, 1160, 0.05, 0.0), Round(1160, 1160, 1.0, 0.97)
    assert single_of(undisturbed([quiet, taken, quiet]), call_ns, 0.0) > limit
    # By a single one a busy machine may have been missed.
    assert single_of(undisturbed([quiet, taken]), call_ns, 0.0) < 1.0
    assert undisturbed([taken]) == [taken.undisturbed()]
