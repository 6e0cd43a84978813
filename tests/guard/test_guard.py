"""The guard's decision on blocks made up of what real ones are: placement by process, drift, noise that only adds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from pytest_cudaforge import guard
from pytest_cudaforge.guard import Circumstances, Finding, Promises, Thresholds, assess, confirm, describe, unsettled
from pytest_cudaforge.records import Race, TimedBlock

GPU, CPU = guard.usual("cuda"), guard.usual("cpu")
TOLD = Circumstances(
    kernel="forged/norm/sm_90::guard[default]",
    machine="NVIDIA H200 (sm_90)",
    command="pytest --forge-guard --forge-base abc1234 forged/norm",
    base="main at abc1234",
    runner="fit; false alarms 0 of 60",
)


def race(
    seed: int,
    slower: float = 1.0,
    *,
    us: float = 100.0,
    processes: int = 3,
    place_ns: float = 120.0,
    drift: float = 0.0,
    two_speeds: float = 0.0,
    off: float = 0.0,
    **references: float,
) -> Race:
    """Eight blocks of each process by device events. ``two_speeds``: half of all processes are so much slower, all
    their lives; ``off``: the first process's candidate is. ``references``: times of the base's."""
    chance = random.Random(seed)
    blocks = []
    for process in range(processes):
        factor = {party: 1.0 + two_speeds * (chance.random() < 0.5) for party in ("candidate", "base")}
        place = {party: chance.gauss(0.0, place_ns) for party in ("candidate", "base")}
        for number in range(8):
            drifted = us * 1e3 * (1.0 + drift * (process * 8 + number))
            ns = {party: drifted * factor[party] + place[party] + chance.gauss(0.0, 150.0) for party in factor}
            ns["candidate"] *= slower * (1.0 + off * (process == 0))
            ns |= {name: drifted * times + chance.gauss(0.0, 150.0) for name, times in references.items()}
            blocks.append(TimedBlock(process, tuple(ns.items())))
    return Race("default", "events", tuple(blocks))


def crowded_race(seed: int, slower: float = 1.0, *, processes: int = 8) -> Race:
    """By the supervisor's clock on crowded cores: four blocks of each process, half of them up to a hundredfold."""
    chance = random.Random(seed)
    blocks = []
    for process in range(processes):
        for _ in range(4):
            times = {"candidate": slower, "base": 1.0}
            ns = {
                party: 1e5
                * share
                * (1.0 + abs(chance.gauss(0.0, 0.01)))
                * (1.0 if chance.random() < 0.5 else 10 ** (2 * chance.random()))
                for party, share in times.items()
            }
            blocks.append(TimedBlock(process, tuple(ns.items())))
    return Race("default", "supervisor", tuple(blocks))


def outcome(make: Callable[[int], Race], seed: int, thresholds: Thresholds = GPU) -> str:
    """One decision, as the guard makes it: further sittings where the first one is suspicious."""
    said = [assess(make(3 * seed), Promises(), thresholds)]
    while unsettled(said):
        said.append(assess(make(3 * seed + len(said)), Promises(), thresholds))
    return confirm(*said)[0].outcome


def outcomes(make: Callable[[int], Race], count: int, thresholds: Thresholds = GPU) -> list[str]:
    return [outcome(make, seed, thresholds) for seed in range(count)]


def finding(found: tuple[Finding, ...], question: str) -> Finding:
    return next(one for one in found if one.question == question)


# -- against the base


@pytest.mark.parametrize("us", [5.0, 30.0, 1000.0])
def test_what_did_not_change_is_no_regression(us: float) -> None:
    found = outcomes(lambda seed: race(seed, us=us), 150)
    assert "regression" not in found
    assert found.count("pass") > 145


@pytest.mark.parametrize("us", [30.0, 1000.0])
def test_five_percent_are_seen(us: float) -> None:
    assert set(outcomes(lambda seed: race(seed, 1.05, us=us), 40)) == {"regression"}


def test_a_slowdown_below_a_threshold_is_none() -> None:
    assert set(outcomes(lambda seed: race(seed, 1.02), 20)) == {"pass"}
    # 5 % of 5 us: nobody would notice, and nobody could tell.
    assert "regression" not in outcomes(lambda seed: race(seed, 1.05, us=5.0), 20)
    stricter = Thresholds(relative=0.01, absolute_ns=100.0)
    assert set(outcomes(lambda seed: race(seed, 1.02, us=1000.0), 20, stricter)) == {"regression"}


def test_a_drift_of_the_machine_is_none_of_the_kernels() -> None:
    assert set(outcomes(lambda seed: race(seed, drift=0.01), 40)) == {"pass"}
    assert set(outcomes(lambda seed: race(seed, 1.05, drift=0.01), 20)) == {"regression"}


def test_one_process_out_of_step_accuses_nobody() -> None:
    found = [assess(race(seed, off=0.3), Promises(), GPU)[0] for seed in range(20)]
    assert {one.outcome for one in found} == {"inconclusive"}
    assert all("room for a slowdown" in one.text for one in found)


def test_processes_of_two_speeds_accuse_nobody() -> None:
    found = outcomes(lambda seed: race(seed, two_speeds=0.1), 200)
    assert found.count("regression") == 0


def test_one_process_cannot_tell() -> None:
    (found,) = assess(race(0, 2.0, processes=1), Promises(), GPU)
    assert found.outcome == "inconclusive"
    assert "one process cannot tell" in found.text


def test_a_noisier_runner_asks_for_more() -> None:
    assert assess(race(0, 1.05), Promises(), GPU)[0].outcome == "regression"
    noisy = replace(GPU, noise=0.06)
    assert assess(race(0, 1.05), Promises(), noisy)[0].outcome != "regression"
    placed = replace(GPU, placement=0.05)
    assert assess(race(0, 1.05), Promises(), placed)[0].outcome == "inconclusive"


def test_crowded_cores() -> None:
    assert "regression" not in outcomes(crowded_race, 30, CPU)
    found = outcomes(lambda seed: crowded_race(seed, 1.2), 20, CPU)
    assert found.count("regression") >= 19


def test_a_disturbed_race_decides_nothing() -> None:
    (found,) = assess(replace(race(0, 1.5), disturbed="the device was used by others"), Promises(), GPU)
    assert found.outcome == "inconclusive"
    assert found.text.startswith("nothing was decided: the device was used by others")
    # By the supervisor's clock the interval tells by itself how little was seen.
    (found,) = assess(replace(crowded_race(0, 1.5), disturbed="the cores were busy"), Promises(), CPU)
    assert found.outcome == "regression" and "the cores were busy" in found.text


def test_among_busy_processes_no_promise_is_broken() -> None:
    """An unchanged kernel, promised 9.4x torch.compile, measured 6.6x beside two busy processes, and passed alone."""
    busy = "other processes kept the cores busy nearly all the time"
    seen = replace(race(0, eager=6.6, us=5.0), clock="supervisor")
    assert finding(assess(seen, Promises(eager=9.4), CPU), "eager").outcome == "regression"
    found = finding(assess(replace(seen, disturbed=busy), Promises(eager=9.4), CPU), "eager")
    assert (found.outcome, found.beyond) == ("inconclusive", True)
    assert found.text.startswith(f"nothing was decided: {busy}")
    # What is slower than its reference now is so in this race.
    slow = replace(race(0, eager=0.6), clock="supervisor", disturbed=busy)
    found = finding(assess(slow, Promises(eager=9.4), CPU), "eager")
    assert (found.outcome, found.below_reference) == ("regression", True)


def test_host_code_at_the_power_limit_differs_by_a_few_per_cent() -> None:
    """One product in two processes was called 5 % apart on a GPU at its power limit; 30 % are seen all the same."""
    for slower, calm, capped in ((1.05, "regression", "inconclusive"), (1.3, "regression", "regression")):
        seen = replace(race(0, slower, us=1500.0), clock="supervisor")
        assert finding(assess(seen, Promises(), GPU), "base").outcome == calm
        assert finding(assess(replace(seen, capped=True), Promises(), GPU), "base").outcome == capped


def test_no_blocks_no_findings() -> None:
    assert assess(Race("default", "events", ()), Promises(), GPU) == ()


# -- confirmation


def test_a_second_sitting_has_to_agree() -> None:
    slow, calm = (assess(race(seed, times), Promises(), GPU) for seed, times in ((0, 1.05), (1, 1.0)))
    (agreed,) = confirm(slow, assess(race(2, 1.05), Promises(), GPU))
    assert (agreed.outcome, agreed.confirmed) == ("regression", True)
    # The second one's figures: the first was looked at because it was high.
    assert agreed.slowdown == assess(race(2, 1.05), Promises(), GPU)[0].slowdown
    (apart,) = confirm(slow, calm)
    assert (apart.outcome, apart.confirmed) == ("inconclusive", False)
    assert "not confirmed" in apart.text and "another sitting says" in apart.text
    (silent,) = confirm(slow, ())
    assert silent.outcome == "inconclusive"
    assert confirm(calm, slow) == calm


def test_a_third_sitting_is_asked_where_one_could_not_tell() -> None:
    slow, calm, unsure = (
        assess(made, Promises(), GPU) for made in (race(0, 1.05), race(1, 1.0), race(2, 1.05, off=0.3))
    )
    assert [one[0].outcome for one in (slow, calm, unsure)] == ["regression", "pass", "inconclusive"]
    assert unsure[0].beyond
    assert unsettled([slow]) and unsettled([unsure]) and not unsettled([calm])
    assert unsettled([slow, unsure]) and unsettled([unsure, slow])
    # Two agree; one excludes it; one of three is all there could be; nobody is asked a fourth time.
    for said in ([slow, slow], [slow, calm], [unsure, unsure], [slow, unsure, unsure]):
        assert not unsettled(said)
    assert confirm(slow, unsure, slow)[0].outcome == "regression"
    assert confirm(unsure, slow, slow)[0].confirmed
    assert confirm(slow, unsure, unsure)[0].outcome == "inconclusive"
    assert confirm(unsure, slow)[0].outcome == "inconclusive"


# -- against the reference


def test_a_promise_kept_within_the_margin() -> None:
    for times, expected in ((1.4, "pass"), (1.3, "pass"), (1.15, "regression")):
        found = finding(assess(race(0, eager=times), Promises(eager=1.4), GPU), "eager")
        assert found.outcome == expected, times
        assert found.promised == 1.4
        assert not found.below_reference


def test_a_promise_kept_against_another_reference_clears_the_kernel() -> None:
    """Promised 12.9x eager while others kept the cores busy, measured 7.5x, beside 6.95x torch.compile as promised."""
    promised = Promises(eager=12.9, compile=6.95)
    found = finding(assess(race(0, eager=7.5, compile=6.95), promises=promised, thresholds=GPU), "eager")
    assert (found.outcome, found.beyond, found.advice) == ("inconclusive", True, "")
    assert "as fast as promised against torch.compile" in found.text
    other = finding(assess(race(0, eager=12.9, compile=4.0), promises=promised, thresholds=GPU), "compile")
    assert other.outcome == "inconclusive" and "against its eager reference" in other.text
    # Both are missed: the kernel is slower.
    both = assess(race(0, eager=7.5, compile=4.0), promises=promised, thresholds=GPU)
    assert [one.outcome for one in both] == ["pass", "regression", "regression"]
    # By less than what two promises may be wrong by: 15 % slower, and one of them was made with room to spare.
    spare = assess(race(0, eager=12.9 / 1.15, compile=7.8 / 1.15), promises=promised, thresholds=GPU)
    assert [one.outcome for one in spare] == ["pass", "regression", "pass"]
    # What its reference outruns is told whatever else holds.
    below = finding(assess(race(0, eager=0.9, compile=6.95), promises=promised, thresholds=GPU), "eager")
    assert (below.outcome, below.below_reference) == ("regression", True)


def test_slower_than_its_reference_is_said_with_advice() -> None:
    found = finding(assess(race(0, eager=2.0, compile=0.9), Promises(eager=2.0, compile=1.2), GPU), "compile")
    assert (found.outcome, found.below_reference) == ("regression", True)
    assert "slower than what it replaces" in found.text
    assert "re-forge" in found.advice and "fall back" in found.advice
    # The base is as slow: it is not this change's making.
    assert "look at the toolchain" in found.text
    confirmed = confirm((found,), (found,))[0]
    assert confirmed.below_reference and confirmed.advice == found.advice


def test_promises_of_another_machine_are_not_asked_for() -> None:
    elsewhere = Promises.of(3.0, 2.0, measured_on=("NVIDIA H100", "2.10.0"), here=("NVIDIA H200", "2.11.0+cu130"))
    assert "NVIDIA H100" in elsewhere.incomparable and "torch 2.10.0" in elsewhere.incomparable
    faster = assess(race(0, eager=1.3, compile=1.2), elsewhere, GPU)
    assert [one.outcome for one in faster] == ["pass", "pass", "pass"]
    assert faster[1].promised is None
    assert "asked is that it still wins" in faster[1].text and "NVIDIA H100" in faster[1].text
    slower = assess(race(0, eager=0.8), elsewhere, GPU)[1]
    assert slower.outcome == "regression" and slower.below_reference


def test_a_patch_release_is_the_same_torch() -> None:
    same = Promises.of(3.0, None, measured_on=("x", "2.11.0+cu130"), here=("x", "2.11.1"))
    assert same.incomparable == ""


def test_what_never_beat_its_reference_need_not_now() -> None:
    found = finding(assess(race(0, eager=1.5, compile=0.9), Promises(eager=1.5, compile=0.9), GPU), "compile")
    assert (found.outcome, found.below_reference) == ("pass", False)
    found = finding(assess(race(0, compile=0.9), Promises(compile=0.9, incomparable="elsewhere"), GPU), "compile")
    assert found.outcome == "pass"


# -- in words


def test_the_failures_text_says_how_much_how_sure_since_when_where_and_how_again() -> None:
    slow = assess(race(0, 1.05), Promises(), GPU)
    (found,) = confirm(slow, assess(race(1, 1.05), Promises(), GPU))
    text = describe(found, TOLD)
    assert "regression" in text.splitlines()[0] and TOLD.kernel in text
    for part in (
        "slower (99 % interval",
        "us a call",
        "independent sittings, two that agree, of 3 processes",
        "main at abc1234",
    ):
        assert part in text
    for part in (TOLD.machine, TOLD.command, TOLD.runner):
        assert part in text
    assert 4.5e3 < found.lost_ns < 5.5e3
