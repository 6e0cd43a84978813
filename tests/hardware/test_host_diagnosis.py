"""What bounds a kernel on a CPU, from figures alone."""

from __future__ import annotations

import pytest

from pytest_cudaforge.hardware.diagnosis import diagnose
from pytest_cudaforge.hardware.host_diagnosis import HOST_BOUNDS, host_findings, host_rules
from pytest_cudaforge.records import Profile, ProfiledKernel

#: A call that is in order: 8 threads, half of the bandwidth, two instructions a cycle, nothing else to see.
FACTS = {"threads": 8.0, "minimal_bytes": 1e6, "plan_bytes": 1e6, "launches": 1.0}
ORDERLY = {
    "time": 1e5,
    "time_per_launch": 1e5,
    "bandwidth_share": 50.0,
    "instructions_per_cycle": 2.0,
    "work_on_other_threads": 87.5,
    "thread_imbalance": 1.05,
    "page_faults_per_call": 0.0,
}


def kernel(**changed: float) -> ProfiledKernel:
    metrics = tuple((name, value, "") for name, value in {**ORDERLY, **changed}.items())
    return ProfiledKernel("scaled", True, 1, 1e5, metrics=metrics)


def profiled(facts: dict[str, float], **changed: float) -> Profile:
    told = tuple((name, value, "") for name, value in facts.items())
    return Profile("counters", "quick", "abc", "default", kernels=(kernel(**changed),), facts=told)


def test_nothing_is_said_of_a_kernel_that_shows_nothing() -> None:
    assert host_findings(kernel(), FACTS) == ()
    (found,) = diagnose(profiled(FACTS))
    assert found.bound == "unknown" and found.explanation


@pytest.mark.parametrize(
    ("changed", "bound", "figure", "gain"),
    [
        ({"work_on_other_threads": 0.0}, "one thread", "work_on_other_threads", 87.5),
        ({"thread_imbalance": 2.0}, "waiting threads", "thread_imbalance", 50.0),
        ({"time_in_openmp_runtime": 60.0}, "waiting threads", "time_in_openmp_runtime", 60.0),
        ({"page_faults_per_call": 100.0}, "page faults", "page_faults_per_call", 70.0),
        ({"time_per_launch": 900.0}, "call overhead", "time_per_launch", None),
        ({"strided_loops_share": 80.0}, "strided access", "strided_loops_share", 50.0),
        ({"element_moves_share": 40.0}, "strided access", "element_moves_share", 50.0),
        ({"time_in_libm": 60.0}, "library calls", "time_in_libm", 45.0),
        ({"scalar_loops_share": 90.0}, "scalar code", "scalar_loops_share", 45.0),
        ({"branch_miss_rate": 9.0}, "branches", "branch_miss_rate", None),
        ({"bandwidth_share": 80.0}, "memory bandwidth", "bandwidth_share", 20.0),
        ({"peak_share": 75.0}, "compute", "peak_share", 25.0),
        ({"instructions_per_cycle": 0.4, "cache_miss_rate": 45.0}, "memory latency", "cache_miss_rate", None),
        (
            {"instructions_per_cycle": 0.4, "cache_miss_rate": 2.0},
            "instruction latency",
            "instructions_per_cycle",
            None,
        ),
    ],
)
def test_a_bound_is_told_from_the_figures_that_show_it(
    changed: dict[str, float], bound: str, figure: str, gain: float | None
) -> None:
    first = host_findings(kernel(**changed), FACTS)[0]
    assert first.bound == bound and figure in first.figures
    assert first.gain_percent == (None if gain is None else pytest.approx(gain))
    (diagnosis,) = diagnose(profiled(FACTS, **changed))
    assert diagnosis.bound == bound and diagnosis.explanation == HOST_BOUNDS[bound]
    assert figure in {name for name, _, _ in diagnosis.figures}
    rule = host_rules(kernel(**changed), FACTS)[0]
    assert rule.rule == bound and figure in rule.text and rule.speedup_percent == first.gain_percent


def test_without_counters_nobody_tells_what_an_idle_kernel_waits_for() -> None:
    told = tuple((name, value, "") for name, value in ORDERLY.items() if name != "instructions_per_cycle")
    (found,) = host_findings(ProfiledKernel("scaled", True, 1, 1e5, metrics=told), FACTS)
    assert found.bound == "latency" and "bandwidth_share" in found.figures


def test_round_trips_through_memory_are_told_from_the_plan() -> None:
    facts = {**FACTS, "plan_bytes": 3e6}
    (found,) = host_findings(kernel(), facts)
    assert found.bound == "redundant traffic" and found.gain_percent is None
    (busy,) = host_findings(kernel(bandwidth_share=90.0), facts)
    assert busy.bound == "redundant traffic" and busy.gain_percent == pytest.approx(100.0 * 2 / 3)


def test_steps_that_share_out_a_buffer_are_no_round_trips() -> None:
    # 400 steps over 1 MB each in 0.1 ms: no cache moves 4 TB/s where memory bears 20 GB/s.
    facts = {**FACTS, "plan_bytes": 4e8, "time_per_call": 1e5, "bandwidth_ceiling": 2e10}
    assert "redundant traffic" not in {found.bound for found in host_findings(kernel(), facts)}
    slower = {**facts, "time_per_call": 1e7}
    assert "redundant traffic" in {found.bound for found in host_findings(kernel(), slower)}


def test_one_core_is_no_fault() -> None:
    assert host_findings(kernel(work_on_other_threads=0.0), {**FACTS, "threads": 1.0}) == ()


def test_threads_that_spin_beside_others_are_not_blamed() -> None:
    """A partner that was not let run makes the best kernel wait; uneven work is told by time on cores all the same."""
    crowded = {**FACTS, "foreign_load": 70.0}
    assert host_findings(kernel(time_in_openmp_runtime=80.0), crowded) == ()
    assert host_findings(kernel(thread_imbalance=3.0), crowded)[0].bound == "waiting threads"
