"""The CPU's rung of profiling on real kernels with one planted fault each. No figure of time decides a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from host_faults import FAULTS, HONEST, POLYNOMIAL, Fault, candidate, write_repo
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.hardware import perf
from pytest_cudaforge.hardware.diagnosis import diagnose
from pytest_cudaforge.records import Profile, Target, from_json, to_json

PROBE = perf.probe()
needs_samples = pytest.mark.skipif(not PROBE.sampling, reason=f"no sampling here: {PROBE.reason}")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return write_repo(tmp_path_factory.mktemp("repo"))


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = tmp_path_factory.mktemp("cache")
    # More than any machine's, so that no kernel of these is thought too fast for its bytes.
    settings = EvaluatorSettings(cache_dir=cache_with_ceilings(cache, 1e13), lock_dir=cache)
    with Evaluator(settings) as opened:
        yield opened


@pytest.fixture(scope="module")
def honest(evaluator: Evaluator, target: Target) -> Profile:
    return evaluator.profile(HONEST, target)


def figures(profile: Profile) -> dict[str, float]:
    return {name: value for name, value, _ in (*profile.facts, *profile.kernels[-1].metrics)}


def rules(profile: Profile) -> set[str]:
    return {rule.rule for rule in profile.rules}


@needs_samples
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_with_its_line(evaluator: Evaluator, target: Target, fault: Fault) -> None:
    profile = evaluator.profile(fault.candidate, target)
    known = figures(profile)
    if fault.bound == "one thread" and known["threads"] < 2:
        pytest.skip("there is one core: every kernel has one thread")
    assert fault.bound in rules(profile), profile
    assert all(found.explanation for found in diagnose(profile))
    if fault.line:
        hottest = max(profile.lines, key=lambda line: line.share or 0.0)
        # The loop's statement, or what the compiler inlined into it: samples fall on either.
        assert hottest.source and (fault.line in hottest.source or hottest.source in POLYNOMIAL), profile.lines


def test_a_profile_says_on_which_rung_it_stands_and_why(honest: Profile) -> None:
    profile = honest
    assert profile.candidate == HONEST.digest and profile.workload == "default"
    assert from_json(Profile, to_json(profile)) == profile
    if PROBE.counters:
        assert profile.rung == "counters"
        assert figures(profile)["instructions_per_cycle"] > 0
    else:
        assert profile.rung == "static"
        assert any("no hardware counters" in note and "to do:" in note for note in profile.notes)


def test_a_kernel_in_order_is_vectorized_and_shared_out(honest: Profile) -> None:
    profile = honest
    assert any(remark.startswith("kernel.cpp:") and "loop vectorized" in remark for remark in profile.remarks)
    assert not rules(profile) & {"one thread", "library calls", "scalar code", "strided access"}
    known = figures(profile)
    assert known["bytes_of_its_buffers"] == known["minimal_bytes"] == 2 * 4 * 1024 * 1024
    assert known["time_per_call"] > 0


def test_a_loop_that_is_not_vectorized_is_named_by_its_line(evaluator: Evaluator, target: Target) -> None:
    source = (
        POLYNOMIAL
        + """
void scaled(const float* x, float* y, long long rows, long long cols) {
  for (long long i = 0; i < rows * cols; ++i) {
    if (i > 0 && y[i - 1] == 12345.0f) y[i] = 0;
    else y[i] = exponential(x[i] * 0.5f) * 2.0f;
  }
}
"""
    )
    line = source[: source.index("for (")].count("\n") + 1
    profile = evaluator.profile(candidate(source), target)
    assert any(remark.startswith(f"kernel.cpp:{line}: loop not vectorized") for remark in profile.remarks)
    if PROBE.sampling:
        assert "scalar code" in rules(profile)


def test_a_candidate_that_fails_keeps_the_lowest_rung(evaluator: Evaluator, target: Target) -> None:
    source = "void scaled(const float* x, float* y, long long r, long long c) { *(volatile int*)8 = 1; }"
    profile = evaluator.profile(candidate(source), target)
    assert profile.rung == "static"
    assert any("failed under the profile" in note and "SIGSEGV" in note for note in profile.notes)


def test_what_a_kernel_does_not_touch_is_no_traffic(
    evaluator: Evaluator, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataclasses.replace(evaluator.device, bandwidth_bytes_per_s=1e9)
    monkeypatch.setitem(evaluator.__dict__, "device", slow)
    source = "void scaled(const float* x, float* y, long long rows, long long cols) { y[0] = x[0]; }"
    profile = evaluator.profile(candidate(source), target)
    (kernel,) = profile.kernels
    assert {"bandwidth_share", "bandwidth_reached"}.isdisjoint(name for name, _, _ in kernel.metrics)
    assert any("too fast to touch all of their buffers" in note for note in profile.notes)


def test_a_candidate_that_cannot_be_built_says_so(evaluator: Evaluator, target: Target) -> None:
    profile = evaluator.profile(candidate("nonsense"), target)
    assert any("could not be built" in note for note in profile.notes)


def test_vectors_that_were_written_by_hand_are_no_scalar_code(evaluator: Evaluator, target: Target) -> None:
    source = """
typedef float vector __attribute__((vector_size(32), aligned(4)));
void scaled(const float* x, float* y, long long rows, long long cols) {
  #pragma omp parallel for
  for (long long i = 0; i < rows * cols; i += 8) {
    vector v = *(const vector*)(x + i);
    vector sum = v;
    for (int k = 0; k < 64; ++k)
      sum = sum * v + 0.5f;
    *(vector*)(y + i) = sum;
  }
}
"""
    profile = evaluator.profile(candidate(source), target)
    assert "scalar code" not in rules(profile), profile
