"""What one sitting says and another one confirms, and what a runner's state makes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pytest_cudaforge.guard import Circumstances, Finding
from pytest_cudaforge.guard_run import _doubted
from pytest_cudaforge.guard_session import _missing_toolchain, _outcome, _text, _uncompared, two_sittings
from pytest_cudaforge.guarded import GuardRecord
from pytest_cudaforge.languages import cpp
from pytest_cudaforge.records import Race, Ratio

SLOW = Finding("base", "a", "forward", "regression", Ratio(1.2, 1.1, 1.3), 1e4, text="20 % slower")
FINE = replace(SLOW, workload="b", outcome="pass", slowdown=Ratio(1.0, 0.99, 1.01), text="0 % slower")
BROKEN = replace(SLOW, question="eager", promised=3.0, text="2x eager")


def sittings(*answers: tuple[Finding, ...]) -> tuple[tuple[Finding, ...], list[Sequence[str] | None]]:
    """What comes of sittings with these answers, and which workloads each was asked for."""
    asked: list[Sequence[str] | None] = []

    def race(workloads: Sequence[str] | None) -> tuple[Race, ...]:
        asked.append(workloads)
        return (Race(str(len(asked) - 1), "supervisor", ()),)

    _, findings = two_sittings(race, lambda one: answers[int(one.workload)], ("a", "b"))
    return findings, asked


def test_only_what_is_suspected_is_measured_again() -> None:
    assert sittings((FINE,)) == ((FINE,), [("a", "b")])
    found, asked = sittings((SLOW, FINE), (SLOW,))
    assert asked == [("a", "b"), ("a",)]
    assert [(one.workload, one.outcome, one.confirmed) for one in found] == [
        ("a", "regression", True),
        ("b", "pass", False),
    ]
    found, _ = sittings((SLOW, FINE), (replace(SLOW, outcome="pass"),))
    assert {one.workload: one.outcome for one in found} == {"a": "inconclusive", "b": "pass"}


def test_only_the_machines_own_word_excuses_a_kernel_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _missing_toolchain("cpp") == _missing_toolchain("os:environ") == ""
    cpp._compiler_version.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert "g++ is not on PATH" in _missing_toolchain("cpp")


def test_an_unfit_runner_fails_nothing() -> None:
    assert _outcome((SLOW, FINE), fit=True) == "regression" and _outcome((SLOW, FINE), fit=False) == "unfit"
    assert _outcome((FINE,), fit=False) == "pass" and _outcome((), fit=True) == "inconclusive"


def test_a_sick_runner_excuses_a_promise_and_no_slowdown_against_the_base() -> None:
    record = GuardRecord("id", "t", "a", "regression", findings=(BROKEN, replace(SLOW, outcome="pass")), text="all")
    doubted = _doubted(record, "every reference is slow today")
    assert doubted.outcome == "inconclusive" and "every reference" in doubted.reason and "all" in doubted.text
    assert _doubted(record, "") == record
    slower = replace(record, findings=(SLOW,))
    assert _doubted(slower, "every reference is slow today") == slower


def test_what_was_not_compared_did_not_pass() -> None:
    record = GuardRecord("id", "t", "a", "pass", notes=("it cannot be built any more",), text="2x eager")
    found = _uncompared(record)
    assert found.outcome == "inconclusive" and "cannot be built any more" in found.reason and "2x eager" in found.text


def test_the_worst_answer_is_told_in_full_and_first() -> None:
    told = Circumstances("id", "a machine", "pytest --forge-guard id", "main at 1f2e3d4c5", "fit")
    text = _text((replace(BROKEN, outcome="pass"), SLOW), "", told)
    assert text.index("20 % slower") < text.index("against eager: pass: 2x eager")
    for wanted in ("since:     main at 1f2e3d4c5", "machine:   a machine", "reproduce: pytest", "runner:    fit"):
        assert text.count(wanted) == 1
    assert "unchanged since 1f2e" in _text((), "1f2e", told)
