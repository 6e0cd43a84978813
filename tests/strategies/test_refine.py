"""CudaForge's sequence, its way back and its stops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_records import make_round, make_timing
from hypothesis import given
from hypothesis import strategies as st

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.records import Proposal, Ratio, Round, Status, Stop
from pytest_cudaforge.strategies import Limits, best_round, load, speed_of_light, speedup_of
from pytest_cudaforge.strategies.recorded import Recorded, RecordedRound
from pytest_cudaforge.strategies.refine import Refine

BROKEN = Status.BUILD_ERROR
refine = Refine()


def test_the_first_round_is_a_first_candidate() -> None:
    assert refine.propose([], Limits()) == Proposal("first", None)


def test_a_failed_candidate_is_corrected() -> None:
    assert refine.propose([make_round(1, status=BROKEN)], Limits()) == Proposal("correction", 1)


def test_a_passing_candidate_is_optimized() -> None:
    assert refine.propose([make_round(1)], Limits()) == Proposal("optimization", 1)


def test_a_slower_optimization_goes_back_to_the_best() -> None:
    rounds = [make_round(1, speedup=2.0), make_round(2, "optimization", 1, speedup=1.5)]
    assert refine.propose(rounds, Limits()) == Proposal("optimization", 1)


def test_a_faster_optimization_becomes_the_parent() -> None:
    rounds = [make_round(1, speedup=2.0), make_round(2, "optimization", 1, speedup=2.5)]
    assert refine.propose(rounds, Limits()) == Proposal("optimization", 2)


def _raced(number: int, speedup: float, incumbent: int, ratio: float) -> Round:
    """A round that was timed beside another."""
    entry = make_round(number, "optimization", 1, speedup=speedup)
    assert entry.evaluation is not None and entry.evaluation.timing is not None
    timing = replace(entry.evaluation.timing, vs_incumbent=Ratio(ratio, ratio * 0.99, ratio * 1.01))
    return replace(entry, evaluation=replace(entry.evaluation, timing=timing), incumbent=incumbent)


def test_the_sitting_that_held_both_decides_who_is_best() -> None:
    rounds = [make_round(1, speedup=2.0), _raced(2, 2.5, 1, 0.9)]  # lucky with its baselines
    assert best_round(rounds) is rounds[0]
    rounds.append(_raced(3, 1.9, 1, 1.2))  # unlucky with them
    assert best_round(rounds) is rounds[2]
    rounds.append(_raced(4, 2.0, 3, 1.005))  # not clearly faster
    assert best_round(rounds) is rounds[2]
    rounds.append(_raced(5, 2.2, 1, 0.5))  # met another than the best: the ratios to baselines decide
    assert best_round(rounds) is rounds[4]


def test_a_broken_optimization_is_corrected_twice_then_left() -> None:
    rounds = [make_round(1), make_round(2, "optimization", 1, BROKEN)]
    assert refine.propose(rounds, Limits()) == Proposal("correction", 2)
    rounds.append(make_round(3, "correction", 2, BROKEN))
    assert refine.propose(rounds, Limits()) == Proposal("correction", 3)
    rounds.append(make_round(4, "correction", 3, BROKEN))
    assert refine.propose(rounds, Limits(patience=0)) == Proposal("optimization", 1)


def test_nothing_correct_yet_starts_again_from_an_empty_page() -> None:
    rounds = [make_round(1, status=BROKEN)]
    for number in range(2, 7):
        assert refine.propose(rounds, Limits()).kind == "correction"  # type: ignore[union-attr]
        rounds.append(make_round(number, "correction", number - 1, BROKEN))
    assert refine.propose(rounds, Limits()) == Proposal("first", None)


def test_two_idle_optimizations_ask_for_a_full_profile() -> None:
    rounds = [make_round(1, speedup=2.0), make_round(2, "optimization", 1, speedup=1.5)]
    assert refine.propose(rounds, Limits()) == Proposal("optimization", 1, "quick")
    broken = [make_round(3, "optimization", 1, BROKEN), make_round(4, "correction", 3, BROKEN)]
    stuck = [*rounds, *broken, make_round(5, "correction", 4, BROKEN)]
    assert refine.propose(stuck, Limits(patience=9)) == Proposal("optimization", 1, "full")
    slower = [*rounds, make_round(3, "optimization", 1, speedup=1.9)]
    assert refine.propose(slower, Limits()) == Proposal("optimization", 1, "full")
    again = [*slower, make_round(4, "optimization", 1, None)]
    assert refine.propose(again, Limits(patience=9)) == Proposal("optimization", 1, "full"), "no idea was lost"
    faster = [*slower, make_round(4, "optimization", 1, speedup=3.0)]
    assert refine.propose(faster, Limits()) == Proposal("optimization", 4, "quick")


def test_replies_that_cannot_be_used_are_no_idle_optimizations() -> None:
    rounds = [make_round(1)] + [make_round(n, "optimization", 1, None) for n in (2, 3)]
    assert refine.propose(rounds, Limits()) == Proposal("optimization", 1, "quick")


def test_a_round_without_a_candidate_is_asked_again() -> None:
    assert refine.propose([make_round(1, status=None)], Limits()) == Proposal("first", None)
    rounds = [make_round(1), make_round(2, "optimization", 1, None)]
    assert refine.propose(rounds, Limits()) == Proposal("optimization", 1)


def test_patience_ends_it_with_the_reason() -> None:
    rounds = [make_round(1, speedup=3.0)] + [make_round(n, "optimization", 1, speedup=1.0) for n in (2, 3, 4, 5)]
    stop = refine.propose(rounds, Limits(patience=4))
    assert stop == Stop("4 rounds brought nothing better than round 1")


def test_near_the_roofline_it_stops() -> None:
    stop = refine.propose([make_round(1, speedup=2.0, roofline_ns=480.0)], Limits())
    assert isinstance(stop, Stop)
    assert "96% of the roofline" in stop.reason


def test_far_above_the_roofline_there_is_no_bound_to_stop_at() -> None:
    assert isinstance(refine.propose([make_round(1, speedup=2.0, roofline_ns=570.0)], Limits()), Proposal)


def test_the_last_round_ends_it() -> None:
    assert refine.propose([make_round(1)], Limits(rounds=1)) == Stop("all 1 rounds are played")


def test_a_duplicate_never_becomes_the_best() -> None:
    rounds = [make_round(1, speedup=2.0), make_round(2, "optimization", 1, speedup=2.0, duplicate_of=1)]
    best = best_round(rounds)
    assert best is not None
    assert best.number == 1


@given(st.lists(st.sampled_from([*Status, None, "slower", "faster"]), max_size=30))
def test_it_always_proposes_a_round_that_can_be_played(outcomes: list[object]) -> None:
    limits = Limits(rounds=25, patience=0, roofline_stop=9.0)
    rounds = []
    for number, outcome in enumerate(outcomes, 1):
        proposal = refine.propose(rounds, limits)
        if isinstance(proposal, Stop):
            assert len(rounds) == limits.rounds
            return
        parent = rounds[proposal.parent - 1] if proposal.parent is not None else None
        assert (parent is None) == (proposal.kind == "first")
        if parent is not None:
            assert parent.candidate is not None
            assert parent.evaluation.passed == (proposal.kind == "optimization")
        status = outcome if isinstance(outcome, Status) or outcome is None else Status.PASSED
        speedup = {"slower": 0.5, "faster": 1.0 + number}.get(str(outcome), 1.5)
        rounds.append(make_round(number, proposal.kind, proposal.parent, status, speedup))


def test_speedup_is_against_the_faster_baseline() -> None:
    assert speedup_of(make_timing(2.0, compiled=1.2)) == 1.2
    assert speedup_of(make_timing(2.0)) == 2.0
    assert speedup_of(None) == 0.0
    assert speed_of_light(make_timing(2.0)) is None


def test_recorded_parents_are_followed_whatever_is_measured() -> None:
    script = Recorded([RecordedRound(1, None), RecordedRound(2, 1), RecordedRound(3, 1)])
    assert script.propose([], Limits()) == Proposal("first", None)
    passed = [make_round(1, speedup=1.0), make_round(2, "optimization", 1, speedup=5.0)]
    assert script.propose(passed, Limits()) == Proposal("optimization", 1)
    failed_here = [make_round(1, status=BROKEN), make_round(2, "correction", 1)]
    assert script.propose(failed_here, Limits()) == Proposal("correction", 1)
    kept = Recorded([RecordedRound(1, None), RecordedRound(2, 1, "optimization")])
    assert kept.propose(failed_here[:1], Limits()) == Proposal("optimization", 1)
    end = script.propose([*passed, make_round(3)], Limits())
    assert end == Stop("the recorded conversation ends after round 3")


def test_a_recorded_parent_without_candidate_here_is_replaced() -> None:
    script = Recorded([RecordedRound(1, None), RecordedRound(2, 1), RecordedRound(3, 2)])
    rounds = [make_round(1), make_round(2, "optimization", 1, None)]
    assert script.propose(rounds, Limits()) == Proposal("optimization", 1)


@pytest.mark.parametrize("name", ["refin", "no.such.module:Thing", "math:nothing", "math:pi"])
def test_an_unknown_strategy_is_a_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match="strategy"):
        load(name)


def test_strategies_load_by_name_and_by_path() -> None:
    assert isinstance(load("refine"), Refine)
    assert isinstance(load("pytest_cudaforge.strategies.refine:Refine"), Refine)
