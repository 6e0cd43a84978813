"""Rows of profiles and of the roofline: who is shown, in which order, with which figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_records import make_round
from report_records import DEVICE, make_profile, rich_trace

from pytest_cudaforge.records import Baseline, Profile, ProfiledKernel, RuleFinding, Sample, Trace
from pytest_cudaforge.report.profile_rows import Profiles, bounds, further_rules, kernel_rows, metric_rows, profiles
from pytest_cudaforge.report.rows import row
from pytest_cudaforge.report.standings import standings
from pytest_cudaforge.report.trail import advice


def test_the_first_that_passed_is_held_against_the_winner() -> None:
    found = profiles(rich_trace())
    assert found is not None
    assert (found.before_name, found.after_name) == ("round 2", "round 3")
    alone = profiles(replace(rich_trace(), rounds=rich_trace().rounds[2:3]))
    assert alone is not None and alone.before is None and alone.after_name == "round 3"
    assert profiles(replace(rich_trace(), rounds=(), final=None)) is None


def test_a_rule_that_is_the_bound_is_told_once_with_its_gain() -> None:
    profile = make_profile()
    ((found, unknown),) = bounds(profile)
    assert unknown is None and further_rules(profile) == profile.rules
    same = RuleFinding(found.kernel, found.bound, "the same in other words", 12.0)
    told = replace(profile, rules=(same, *profile.rules))
    assert bounds(told) == ((found, 12.0),) and further_rules(told) == profile.rules


def test_kernels_are_ordered_by_time_and_their_shares_make_a_whole() -> None:
    library, own = kernel_rows(make_profile(factor=0.1))
    assert (library.own, own.own, library.launches) == (False, True, 2)
    assert (library.share, own.share) == (pytest.approx(0.769, abs=0.001), pytest.approx(0.231, abs=0.001))
    assert (own.shape, library.shape) == ("grid 128, block 256", "grid 4×2, block 128")
    (bare,) = kernel_rows(make_profile(kernels=(ProfiledKernel("k", True, 1, None),)))
    assert (bare.share, bare.duration_ns, bare.shape) == (None, None, "")


def test_metrics_that_show_the_bound_come_first_then_those_that_changed() -> None:
    def seen(**values: float) -> Profile:
        metrics = tuple((name, value, "") for name, value in values.items())
        return make_profile(kernels=(ProfiledKernel("scale", True, 1, 9e3, metrics=metrics),), facts=())

    dram, after = "dram__throughput.avg.pct_of_peak_sustained_elapsed", {"a": 1.0, "b": 8.0, "c": 3.0}
    rows = metric_rows(Profiles(seen(**after, **{dram: 80.0}), "round 3", seen(a=1.0, b=2.0, d=5.0), "round 1"))
    assert [line.name for line in rows] == [dram, "b", "a", "c", "d"]
    assert [(line.before, line.after) for line in rows[1:]] == [(2.0, 8.0), (1.0, 1.0), (None, 3.0), (5.0, None)]


def test_standings_are_those_of_the_last_verdict_beside_the_first_candidate() -> None:
    found = {entry.party: entry for entry in standings(rich_trace())}
    assert found.keys() == {"eager", "round 2", "round 3"}
    assert found["eager"].sol_percent == pytest.approx(20.0) and found["round 3"].sol_percent == pytest.approx(40.0)
    assert (found["round 3"].min_bytes, found["round 3"].flops) == (10_000, 4_000)
    line = row(rich_trace())
    assert (line.sol_percent, line.sol_percent_eager, line.sol_percent_compile) == (
        pytest.approx(40.0), pytest.approx(20.0), None,
    )  # fmt: skip


def test_without_a_candidate_the_baselines_stand_alone() -> None:
    sample = Sample(400.0, 390.0, 410.0, 30, 5)
    baseline = Baseline("default", sample, sample, "", 100.0, 64, 0)
    trace = Trace("a.py::S", "cpp", "skipped", "no headroom", baselines=(baseline,), hardware=DEVICE)
    assert [(entry.party, entry.sol_percent) for entry in standings(trace)] == [("eager", 25.0), ("compile", 25.0)]
    assert standings(replace(trace, baselines=(replace(baseline, roofline_ns=None),))) == ()
    assert row(trace).sol_percent is None


def test_who_was_judged_last_stands_there_even_where_it_did_not_win() -> None:
    entry = make_round(1, speedup=0.5, roofline_ns=500.0)
    kept = Trace("a.py::K", "cpp", "kept_reference", "slower", (entry,), None, entry.evaluation)
    assert [line.party for line in standings(kept)] == ["eager", "round 1"]
    assert row(kept).sol_percent == pytest.approx(25.0)
    assert row(kept).sol_percent_now == pytest.approx(50.0), "the user has eager"


def test_advice_says_what_came_of_it() -> None:
    (one,) = advice(rich_trace().rounds)
    assert (one.number, one.about, one.expected) == (3, 2, 1.5)
    assert one.gain == pytest.approx(2.5) and one.evidence[0].startswith("ncu, scale: memory bandwidth (dram__")
    assert dict(one.said).keys() == {"Bottleneck", "Method", "Plan", "Place"}
