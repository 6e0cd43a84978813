"""Statistics of a sitting: blocks, intervals, decisions. Pure."""

from __future__ import annotations

import math
import random

import pytest

from pytest_cudaforge.evaluation.sitting import was_disturbed
from pytest_cudaforge.evaluation.timing import (
    GPU_PLACEMENT_NS,
    Block,
    Turned,
    abba,
    block_of,
    clear_enough,
    combine,
    crowded,
    decide,
    disturbed,
    faster_baseline,
    gpu_placement_ns,
    levelled,
    narrow_enough,
    quiet_blocks,
    ratio_of,
    sample_of,
    slope_ns,
    steady_blocks,
    typical_ns,
)
from pytest_cudaforge.records import Ratio, WorkloadTiming


def _blocks(speedup: float, *, noise: float = 0.01, processes: int = 3, count: int = 8, seed: int = 0) -> list[Block]:
    generator = random.Random(seed)
    found = []
    for process in range(processes):
        layout = math.exp(generator.gauss(0, noise / 4))
        for _ in range(count):
            drift = math.exp(generator.gauss(0, 0.3))  # both parties of a block see the same machine
            base = 1e5 * drift * math.exp(generator.gauss(0, noise))
            own = 1e5 / speedup * layout * drift * math.exp(generator.gauss(0, noise))
            found.append(Block(process, (("candidate", own), ("eager", base))))
    return found


def test_order_is_there_and_back() -> None:
    assert abba(["c", "e", "k"]) == ("c", "e", "k", "k", "e", "c")


def test_slope_cancels_what_a_request_costs() -> None:
    assert slope_ns(50_000 + 100 * 7.0, 50_000 + 200 * 7.0, 100) == pytest.approx(7.0)


def test_block_averages_both_turns_and_refuses_a_clock_that_went_backwards() -> None:
    block = block_of(1, [Turned("a", 1.0), Turned("b", 2.0), Turned("b", 4.0), Turned("a", 3.0)])
    assert block == Block(1, (("a", 2.0), ("b", 3.0)))
    assert block_of(1, [Turned("a", -1.0), Turned("b", 2.0)]) is None


def test_a_block_is_levelled_by_what_a_probe_takes_in_each_process() -> None:
    turns = [Turned("a", 6_100.0, 4_100.0), Turned("b", 6_000.0, 4_000.0), Turned("slow", 80_000.0)]
    assert block_of(0, turns) == Block(0, (("a", 6_050.0), ("b", 6_050.0), ("slow", 80_000.0)))


def test_a_probe_is_believed_within_what_processes_differ_by() -> None:
    """A kernel that makes the probe of its process slow wins next to nothing."""
    shares = levelled({"candidate": [40_000.0], "eager": [4_000.0], "compile": [4_000.0]})
    assert shares == {"candidate": 250.0, "eager": -250.0, "compile": -250.0}
    assert levelled({"candidate": [4_000.0], "eager": []}) == {"candidate": 0.0, "eager": 0.0}


def test_a_turn_is_the_mean_of_its_middle() -> None:
    """Events count in steps of 32 ns: a median of short calls falls on one."""
    steps = [6_400.0] * 8 + [6_432.0] * 7
    assert 6_400.0 < typical_ns([*steps, 90_000.0, 90_000.0]) < 6_432.0
    assert typical_ns([60_000.0, 60_100.0, 91_000.0]) == 60_100.0
    assert typical_ns([5.0]) == 5.0


def test_what_is_alike_is_looked_at_longer_than_what_is_decided() -> None:
    decided, alike = Ratio(1.05, 1.042, 1.058, 0.99), Ratio(1.0, 0.995, 1.005, 0.99)
    assert clear_enough(decided) and not clear_enough(alike)
    assert clear_enough(Ratio(1.0, 0.9985, 1.0015, 0.99)) and not clear_enough(Ratio(1.02, 1.006, 1.034, 0.99))


def test_paired_ratio_survives_drift_of_the_machine() -> None:
    ratio = ratio_of(_blocks(1.5), "eager")
    assert ratio.low < 1.5 < ratio.high
    assert ratio.high / ratio.low < 1.05
    assert decide(ratio) == "faster"


@pytest.mark.parametrize(
    ("speedup", "noise", "decision"),
    [(1.5, 0.01, "faster"), (0.7, 0.01, "slower"), (1.0, 0.004, "same"), (1.02, 0.2, "inconclusive")],
)
def test_decisions(speedup: float, noise: float, decision: str) -> None:
    assert decide(ratio_of(_blocks(speedup, noise=noise), "eager")) == decision


def test_equal_kernels_are_hardly_ever_called_different() -> None:
    called = [decide(ratio_of(_blocks(1.0, noise=0.01, seed=seed), "eager")) for seed in range(60)]
    assert sum(decision in ("faster", "slower") for decision in called) <= 1


def test_two_percent_is_seen() -> None:
    called = [decide(ratio_of(_blocks(0.98, noise=0.003, count=20, seed=seed), "eager")) for seed in range(30)]
    assert called.count("slower") >= 29


def test_interval_counts_processes_not_only_blocks() -> None:
    agreeing = [Block(p, (("candidate", 100.0 + 0.1 * b), ("eager", 200.0))) for p in range(3) for b in range(9)]
    differing = [
        Block(p, (("candidate", 100.0 + 10 * p + 0.1 * b), ("eager", 200.0))) for p in range(3) for b in range(9)
    ]
    wide, narrow = ratio_of(differing, "eager"), ratio_of(agreeing, "eager")
    assert wide.high / wide.low > 10 * (narrow.high / narrow.low - 1) + 1


def test_what_two_processes_cannot_show_widens_the_interval() -> None:
    """As A/A on a GPU at 6.4 us: each pair of processes has a ratio of its own, which no further block changes."""
    chance = random.Random(7)
    called = {0.0: 0, 120.0: 0}
    for _ in range(30):
        ours, theirs = ([6400 + chance.gauss(0, 100) for _ in range(2)] for _ in range(2))
        blocks = [
            Block(p, (("candidate", ours[p] + chance.gauss(0, 20)), ("eager", theirs[p] + chance.gauss(0, 20))))
            for p in range(2)
            for _ in range(8)
        ]
        for placement_ns in called:
            called[placement_ns] += decide(ratio_of(blocks, "eager", placement_ns=placement_ns)) in ("faster", "slower")
    assert called[0.0] >= 5
    assert called[120.0] == 0


def test_at_the_power_limit_a_few_per_cent_are_no_difference() -> None:
    """As on an H200: the same product in two processes, 5 % apart in most blocks."""
    chance = random.Random(3)
    blocks = [
        Block(p, (("candidate", 1.48e6 * math.exp(chance.gauss(0, 0.02))), ("eager", 1.56e6)))
        for p in (0, 1)
        for _ in range(22)
    ]
    assert decide(ratio_of(blocks, "eager", placement_ns=gpu_placement_ns(1.48e6, "supervisor", False))) == "faster"
    assert (
        decide(ratio_of(blocks, "eager", placement_ns=gpu_placement_ns(1.48e6, "supervisor", True))) == "inconclusive"
    )
    assert gpu_placement_ns(1.48e6, "events", True) == pytest.approx(0.006 * 1.48e6)
    assert gpu_placement_ns(1e3, "events", True) == gpu_placement_ns(1e3, "events", False) == GPU_PLACEMENT_NS


def test_no_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="no blocks"):
        ratio_of([], "eager")


def test_geometric_mean_over_workloads() -> None:
    combined = combine([Ratio(2.0, 1.9, 2.1), Ratio(0.5, 0.49, 0.51)])
    assert combined.speedup == pytest.approx(1.0)
    assert combined.low < 1.0 < combined.high


def test_sample_has_percentiles() -> None:
    sample = sample_of([float(i) for i in range(1, 102)], 10, 2)
    assert (sample.median_ns, sample.low_ns, sample.high_ns, sample.samples) == (51.0, 6.0, 96.0, 202)


def test_measuring_stops_when_the_answer_cannot_change() -> None:
    assert narrow_enough(Ratio(1.0, 0.995, 1.005))
    assert narrow_enough(Ratio(2.0, 1.95, 2.05))
    assert not narrow_enough(Ratio(1.02, 0.99, 1.05))
    assert not narrow_enough(Ratio(2.0, 1.5, 2.5))


def test_disturbance_is_more_than_both_spreads() -> None:
    alone = sample_of([100.0, 101.0, 102.0], 3)
    assert not disturbed(alone, sample_of([100.0, 104.0, 108.0], 3))
    assert disturbed(alone, sample_of([110.0, 112.0, 115.0], 3))


def test_the_faster_baseline_decides() -> None:
    assert faster_baseline({"eager": 10.0, "compile": 7.0}) == "compile"


@pytest.mark.parametrize(("high", "said"), [(3.0, True), (0.6, True), (0.4, False)])
def test_a_slowed_baseline_excuses_no_candidate_that_takes_twice_its_time(high: float, said: bool) -> None:
    alone, slowed = sample_of([100.0, 101.0, 102.0], 3), sample_of([120.0, 121.0, 122.0], 3)
    ratio = Ratio(high * 0.95, high * 0.9, high)
    timing = WorkloadTiming("default", slowed, slowed, None, ratio, None, 1)
    assert was_disturbed({"eager": alone}, timing) is said


def test_blocks_that_others_disturbed_are_left_out_as_long_as_enough_remain() -> None:
    quiet = [Block(0, (("eager", 2.0), ("candidate", 1.0)), 0.1)] * 4
    loud = [Block(0, (("eager", 9.0), ("candidate", 1.0)), 0.8)] * 6
    assert quiet_blocks([*quiet, *loud]) == tuple(quiet) and not crowded([*quiet, *loud])
    assert quiet_blocks([*quiet[:3], *loud]) == (*quiet[:3], *loud) and crowded([*quiet[:3], *loud])
    assert not crowded(quiet[:2]) and not crowded([])


def test_blocks_that_an_interrupt_hit_go_whoever_it_hit_and_a_third_at_most() -> None:
    steady = [Block(0, (("eager", 2.0 + 0.01 * i), ("candidate", 1.0)), 0.0) for i in range(4)]
    hit = [Block(0, (("eager", 9.0), ("candidate", 1.0))), Block(0, (("eager", 2.0), ("candidate", 5.0)))]
    assert set(steady_blocks([*steady, *hit])) == set(steady)
    many = [Block(1, (("eager", 2.0), ("candidate", 1.0 + i)), 0.0) for i in range(6)]  # that is how it is
    assert len(steady_blocks(many)) == 4
    assert steady_blocks([]) == ()
    assert len(steady_blocks([*steady, *hit, *many])) == 8, "every process by itself"
