"""What a verdict's measurements look like to a reader: two clocks, host times, compute-sanitizer's findings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_records import make_candidate, make_evaluation

from pytest_cudaforge.display import evaluation_text
from pytest_cudaforge.evaluation.parties import EventParty, EventTimes
from pytest_cudaforge.records import Evaluation, HostTiming, SanitizerFinding, SanitizerReport, Trace
from pytest_cudaforge.report import markdown

FOUND = SanitizerFinding("initcheck", "Uninitialized read", "a|b", "kernel.cu:7", 3, False, "scratch 2, byte 4 of 64")


def verdict(host: HostTiming | None = None, report: SanitizerReport | None = None) -> Evaluation:
    found = make_evaluation(make_candidate())
    assert found.timing is not None and found.verification is not None
    workloads = tuple(replace(entry, host=host) for entry in found.timing.workloads)
    timing = replace(found.timing, workloads=workloads)
    return replace(found, timing=timing, verification=replace(found.verification, sanitizer=report))


def written(found: Evaluation) -> str:
    return markdown.report(Trace("layers.py::scale", "cuda", "forged", "", (), None, found))


def test_launch_bound_workloads_have_device_and_host_times() -> None:
    bound = verdict(HostTiming(4100.0, 4000.0, 9200.0, 21_000.0))
    assert "device 0.50 against 1.00 us eager, host 4.10 against 9.20 us eager" in evaluation_text(bound)
    text = written(bound)
    assert "| default | 0.50 µs | 4.10 µs | 1.00 µs | 9.20 µs | 21.00 µs |" in text
    for other in (verdict(), verdict(HostTiming(4e5, 4e5))):
        assert "aunch-bound" not in evaluation_text(other) and "aunch-bound" not in written(other)


def test_findings_and_what_did_not_run_are_told() -> None:
    report = SanitizerReport("default", ("memcheck", "initcheck"), (FOUND,), ("racecheck was left out: why",), 5.25)
    text = evaluation_text(verdict(report=report))
    assert "compute-sanitizer on workload default: memcheck, initcheck (5.2 s)" in text
    assert (
        "initcheck: Uninitialized read, kernel a|b at kernel.cu:7, 3 times: scratch 2, byte 4 of 64 (reported" in text
    )
    assert "note: racecheck was left out: why" in text
    page = written(verdict(report=report))
    assert r"kernel a\|b at kernel.cu:7, 3 times" in page and "racecheck was left out" in page
    clean = SanitizerReport("default", ("memcheck",), seconds=1.0)
    assert "nothing found" in evaluation_text(verdict(report=clean))
    assert "found nothing" in written(verdict(report=clean))


def test_slopes_of_both_clocks_leave_a_requests_own_cost_out() -> None:
    asked: list[int] = []

    def both(calls: int) -> tuple[int, int]:
        asked.append(calls)
        return 80_000 + 1_000 * calls, 5_000 + 990 * calls

    party = EventParty(lambda count, warm, probed: EventTimes([1_000] * count), both)
    found = party.by_both_clocks(1e6)
    assert found == pytest.approx((1000.0, 990.0))
    assert max(asked) < 200, "as long as the slice, and twice that"
    assert EventParty(lambda count, warm, probed: EventTimes([1])).by_both_clocks(1e6) is None
