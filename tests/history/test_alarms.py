"""Each alarm on a history that deserves it, and silence on its honest twin."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from history_records import H200, NEWER, NORM, days, measurement, noisy, split

from pytest_cudaforge import alarms, history
from pytest_cudaforge.history import Measurement
from pytest_cudaforge.measurements import Judgement
from pytest_cudaforge.records import Ratio

CALM = {"candidate": 80_000.0, "eager": 120_000.0, "compile": 100_000.0}


def kinds(past: list[Measurement], now: list[Measurement]) -> list[str]:
    return [alarm.kind for alarm in history.alarms(past, now)]


def like(times: dict[str, float], jitter: float, seed: int, count: int, **more: object) -> list[Measurement]:
    shake = noisy(jitter, seed)
    return days(count, lambda _: {party: shake(time) for party, time in times.items()}, **more)


# -- a sick runner ----------------------------------------------------------------------------------------------------


def slowed(factor: float, number: int = 90, **more: object) -> list[Measurement]:
    return [measurement(number, {party: factor * time for party, time in CALM.items()}, **more)]  # type: ignore[arg-type]


def test_references_slower_than_their_own_history_mark_a_sick_runner() -> None:
    (alarm,) = history.alarms(like(CALM, 0.01, 1, 12), slowed(1.14))
    assert alarm.kind == "sick_runner"
    assert "2 of 2 references are slower" in alarm.text and "by 1" in alarm.text and "last 12 runs" in alarm.text
    assert "merge base stand" in alarm.advice and "nvidia-smi" in alarm.advice
    assert alarm.machine == H200.text
    assert history.doubtful([alarm], "anything.py::Else") == alarm.text


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.05, 1.09])
def test_a_runner_that_is_as_it_was_is_not_sick(factor: float) -> None:
    assert kinds(like(CALM, 0.01, 1, 12), slowed(factor)) == []


def test_a_noisy_runner_is_not_called_sick_for_a_bad_day() -> None:
    """12 % off where the runs themselves spread by 6 %: what is beyond 10 % is not beyond chance."""
    past = like(CALM, 0.06, 3, 20)
    assert kinds(past, slowed(1.12)) == []
    assert kinds(past, slowed(1.8)) == ["sick_runner"]


def test_a_sitting_that_spreads_beyond_its_history_says_nothing() -> None:
    assert kinds(like(CALM, 0.01, 1, 12), slowed(1.15, spread=0.2)) == []


def test_a_bad_day_in_the_past_does_not_hide_the_next() -> None:
    past = like(CALM, 0.01, 1, 12)
    past[5] = measurement(5, {party: 1.6 * time for party, time in CALM.items()})
    assert kinds(past, slowed(1.2)) == ["sick_runner"]


def test_five_runs_are_too_few_to_know_a_runner() -> None:
    past = like(CALM, 0.005, 1, alarms.FEWEST_PAST)
    assert kinds(past[1:], slowed(2.0)) == []
    assert kinds(past, slowed(2.0)) == ["sick_runner"]


@pytest.mark.parametrize(
    "more",
    [
        {"machine": replace(H200, device="NVIDIA H100")},
        {"machine": replace(H200, cores=8)},
        {"machine": NEWER},
        {"target_digest": "e" * 64},
        {"workload": "w1"},
        {"disturbed": "others used the device"},
    ],
    ids=["device", "host", "toolchain", "reference", "workload", "disturbed"],
)
def test_another_history_says_nothing_of_this_one(more: dict[str, object]) -> None:
    assert kinds(like(CALM, 0.01, 1, 12), slowed(1.5, **more)) == []
    assert kinds(like(CALM, 0.01, 1, 12, **more), slowed(1.5)) == []


def test_one_slow_reference_of_many_concerns_its_own_target() -> None:
    past, now = [], []
    for index in range(10):
        target = f"layers.py::Layer{index}"
        past += like(CALM, 0.01, index, 12, target=target)
        now += [
            measurement(90, {name: time * (1.3 if index == 4 else 1.0) for name, time in CALM.items()}, target=target)
        ]
    (alarm,) = history.alarms(past, now)
    assert alarm.targets == ("layers.py::Layer4",) and "2 of 20 references are slower" in alarm.text
    assert history.doubtful([alarm], "layers.py::Layer4") and not history.doubtful([alarm], "layers.py::Layer5")


def test_one_reference_that_is_slow_beside_a_fast_one_is_no_sick_runner() -> None:
    past, now = [], []
    for index in range(10):
        target = f"layers.py::Layer{index}"
        past += like(CALM, 0.01, index, 12, target=target)
        now.append(measurement(90, CALM | ({"eager": 156_000.0} if index == 4 else {}), target=target))
    assert kinds(past, now) == []
    assert kinds(past, [now[4]]) == ["sick_runner"], "with nobody else to ask it is the runner, for all that is known"


def test_a_device_that_was_never_seen_is_told() -> None:
    twin = replace(H200, device_id="99999999")
    (alarm,) = history.alarms(like(CALM, 0.01, 1, 12), slowed(1.3, machine=twin))
    assert "none of these runs was on this very device (99999999)" in alarm.text


def test_the_run_itself_and_its_confirmation_are_not_its_past() -> None:
    past = like(CALM, 0.01, 1, 12)
    now = slowed(1.3)
    assert kinds([*past, *now, *now], now) == ["sick_runner"]


def test_many_references_on_a_noisy_runner_raise_no_alarm() -> None:
    """One run in a thousand by construction; here twenty, of twenty references each (normal noise, 5 %)."""
    generator = random.Random(7)
    raised = 0
    for _ in range(20):
        past, now = [], []
        for index in range(10):
            target = f"layers.py::L{index}"
            for number in range(9):
                times = {party: time * (1 + generator.gauss(0, 0.05)) for party, time in CALM.items()}
                (past if number < 8 else now).append(measurement(number, times, target=target, spread=0.02))
        raised += bool(history.alarms(past, now))
    assert raised == 0


# -- a toolchain that slows a kernel ----------------------------------------------------------------------------------

LOST = {"candidate": 104_000.0, "eager": 120_000.0, "compile": 96_000.0}


def test_a_toolchain_that_puts_a_kernel_behind_its_reference_is_an_alarm() -> None:
    past = like(CALM, 0.005, 1, 5)
    (alarm,) = history.alarms(past, [measurement(90, LOST, machine=NEWER)])
    assert alarm.kind == "toolchain" and alarm.targets == (NORM,)
    for said in ("torch 2.11.0+cu130 → 2.12.0+cu130", "driver 580.95.05 → 590.10", "slower than compile now", "5 runs"):
        assert said in alarm.text
    assert "re-forge" in alarm.advice and "fall back" in alarm.advice and "-k RMSNorm" in alarm.advice


@pytest.mark.parametrize(
    "times, more",
    [
        ({**LOST, "candidate": 97_000.0}, {}),
        ({**LOST, "candidate": 90_000.0}, {}),
        (LOST, {"width": 0.2}),
        (LOST, {"kernel": "b" * 64}),
        (LOST, {"target_digest": "e" * 64}),
        (LOST, {"machine": replace(NEWER, device="NVIDIA B200")}),
        (LOST, {"disturbed": "throttled"}),
        ({"candidate": 5_400.0, "eager": 9_000.0, "compile": 5_000.0}, {}),
    ],
    ids=[
        "by 1 %",
        "still faster",
        "unsure",
        "another kernel",
        "another reference",
        "another device",
        "disturbed",
        "0.4 us",
    ],
)
def test_what_the_toolchain_did_not_do_is_not_laid_at_its_door(
    times: dict[str, float], more: dict[str, object]
) -> None:
    now = measurement(90, times, **{"machine": NEWER, **more})  # type: ignore[arg-type]
    assert kinds(like(CALM, 0.005, 1, 5), [now]) == []


def test_a_kernel_that_was_fast_with_this_toolchain_is_slow_for_another_reason() -> None:
    past = [*like(CALM, 0.005, 1, 5), measurement(40, CALM, machine=NEWER)]
    assert kinds(past, [measurement(90, LOST, machine=NEWER)]) == []


def test_a_kernel_that_never_was_faster_lost_nothing() -> None:
    slow = {**CALM, "candidate": 110_000.0}
    assert kinds(like(slow, 0.005, 1, 5), [measurement(90, {**slow, "compile": 90_000.0}, machine=NEWER)]) == []


def test_one_run_that_was_barely_faster_is_luck() -> None:
    near = {**CALM, "compile": 81_600.0}
    now = [measurement(90, {**near, "candidate": 86_000.0}, machine=NEWER)]
    assert kinds(days(1, lambda _: near), now) == []
    assert kinds(days(2, lambda _: near), now) == ["toolchain"]
    assert kinds(days(1, lambda _: CALM), [measurement(90, LOST, machine=NEWER)]) == ["toolchain"]


def test_the_alarm_stays_until_something_is_done() -> None:
    past = [*like(CALM, 0.005, 1, 5), *(measurement(40 + day, LOST, machine=NEWER) for day in range(5))]
    assert kinds(past, [measurement(90, LOST, machine=NEWER)]) == ["toolchain"]
    assert kinds(past, [measurement(90, CALM, machine=NEWER, kernel="c" * 64)]) == []


# -- slow drift -------------------------------------------------------------------------------------------------------


def creeping(
    total: float, jitter: float = 0.01, count: int = 40, common: float = 0.0, seed: int = 5
) -> list[Measurement]:
    """The kernel slower by ``total`` in the end, step by step; everybody by ``common``."""
    shake = noisy(jitter, seed)

    def times(day: int) -> dict[str, float]:
        part = day / (count - 1)
        own = {"candidate": 1 + total * part}
        return {party: shake(time) * own.get(party, 1.0) * (1 + common * part) for party, time in CALM.items()}

    return [replace(one, kernel=f"{index // 8:064x}") for index, one in enumerate(days(count, times))]


def test_a_kernel_that_crept_up_without_a_regression_is_an_alarm() -> None:
    (alarm,) = history.alarms(*split(creeping(0.15)))
    assert alarm.kind == "drift" and "crept up by 1" in alarm.text and "40 runs and 5 versions" in alarm.text
    assert "Theil and Sen" in alarm.text and "eager and compile did not" in alarm.text
    assert f"--forge-base {0:010x}" in alarm.advice


def test_a_runner_that_gets_slower_as_a_whole_is_no_drift_of_the_kernel() -> None:
    assert kinds(*split(creeping(0.0, common=0.2))) == []


@pytest.mark.parametrize("seed", range(6))
def test_noise_is_no_drift(seed: int) -> None:
    assert kinds(*split(creeping(0.0, jitter=0.05, seed=seed))) == []


def test_three_percent_are_within_what_is_let_pass() -> None:
    assert kinds(*split(creeping(0.03, jitter=0.003))) == []


def test_a_regression_that_was_told_begins_anew() -> None:
    runs = creeping(0.15)
    told = Judgement("base", "regression", Ratio(1.06, 1.05, 1.07), 5_000.0, confirmed=True)
    runs[30] = replace(runs[30], judgements=(told,), outcome="regression")
    assert kinds(*split(runs)) == []
    runs[30] = replace(runs[30], judgements=(replace(told, outcome="inconclusive"),), outcome="inconclusive")
    assert kinds(*split(runs)) == ["drift"]


def test_fourteen_runs_are_too_few_for_a_trend() -> None:
    runs = creeping(0.4, jitter=0.003, count=alarms.FEWEST_DRIFT)
    assert kinds(*split(runs)) == ["drift"]
    assert kinds(*split(runs[1:])) == []


def test_another_toolchain_begins_anew() -> None:
    runs = creeping(0.15)
    moved = [
        replace(one, run=replace(one.run, machine=NEWER)) if index >= 30 else one for index, one in enumerate(runs)
    ]
    assert kinds(*split(moved)) == []


def test_a_drift_is_held_against_the_references_that_were_always_there() -> None:
    runs = creeping(0.15)
    some = [
        one if day % 2 else replace(one, parties=tuple(each for each in one.parties if each[0] != "compile"))
        for day, one in enumerate(runs)
    ]
    (alarm,) = history.alarms(*split(some))
    assert "eager did not" in alarm.text and "compile" not in alarm.text


def test_a_plain_module_drifts_with_its_own_source() -> None:
    def times(day: int) -> dict[str, float]:
        return {"candidate": 80_000.0 * (1 + 0.005 * day), "base": 80_000.0 * (1 + 0.005 * max(0, day - 1))}

    runs = [replace(one, target_digest=f"{day:064x}", judgements=()) for day, one in enumerate(days(40, times))]
    (alarm,) = history.alarms(*split(runs))
    assert alarm.kind == "drift" and "no reference beside it" in alarm.text


# -- how they are told ------------------------------------------------------------------------------------------------


def test_an_alarm_is_two_lines_of_text() -> None:
    told = history.lines(history.alarms(like(CALM, 0.01, 1, 12), slowed(1.3)))
    assert len(told) == 2 and told[0].startswith("sick runner?: ") and told[1].startswith("  to do: ")
    assert history.lines(()) == ()


def test_nothing_is_said_without_a_history() -> None:
    assert history.alarms([], slowed(1.0)) == () and history.alarms(like(CALM, 0.01, 1, 12), []) == ()
