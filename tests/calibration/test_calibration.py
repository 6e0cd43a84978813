"""What trials of known answer say of a runner, on blocks made up; a real calibration is among the attacks."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from pytest_cudaforge import calibration, cli, guard
from pytest_cudaforge.calibration import Calibration, Trial, load, resample, store, thresholds_from, told
from pytest_cudaforge.errors import SituationError
from pytest_cudaforge.hardware import detect
from pytest_cudaforge.machine import Machine, describe
from pytest_cudaforge.records import TimedBlock

HERE = Machine("NVIDIA H200", "sm_90", "Xeon", 16)


def trial(
    seed: int,
    planted: float = 0.0,
    *,
    us: float = 100.0,
    outcome: guard.GuardOutcome = "pass",
    place_ns: float = 120.0,
    apart: float = 0.0,
    disturbed: str = "",
    processes: int = 3,
) -> Trial:
    """Processes that differ by ``place_ns``, sittings by ``apart``."""
    chance = random.Random(seed)
    blocks = []
    sitting = 1.0 + chance.gauss(0.0, apart)
    for process in range(processes):
        place = [chance.gauss(0.0, place_ns) for _ in range(2)]
        for _ in range(6):
            ns = [
                us * 1e3 * times + at + chance.gauss(0.0, 50.0) for times, at in zip((sitting, 1.0), place, strict=True)
            ]
            blocks.append(TimedBlock(process, (("candidate", ns[0]), ("base", ns[1]))))
    return Trial(f"{us:g}us", planted, outcome, "events", (tuple(blocks),), disturbed, seconds=4.0, day="2026-11-21")


def of(*trials: Trial, resampled: tuple[int, int] = (0, 1000)) -> Calibration:
    return Calibration(HERE, "cuda", trials, resampled)


CALM = of(*(trial(seed) for seed in range(30)), *(trial(seed, 0.05, outcome="regression") for seed in range(30)))


def test_counts_and_what_they_show() -> None:
    assert (CALM.false_alarms, CALM.caught, CALM.fit) == ((0, 30), (30, 30), True)
    text = told(CALM)
    assert "0 of 30 decisions were false alarms (0.0 to 11.6 % with 95 % confidence)" in text
    assert "planted   5 %:    30 of 30 were caught (88.4 to 100.0 %" in text
    # Thirty decisions do not show less than 1 %, and it says so.
    assert "with a chance of 26 %" in text and "takes 299 decisions" in text
    assert CALM.text == (
        "fit; false alarms 0 of 30, resampled 0 of 1000; planted 5% caught 30 of 30; calibrated 2026-11-21"
    )


def test_one_false_alarm_among_few_is_unfit() -> None:
    alarmed = of(*CALM.trials, trial(99, outcome="regression"))
    assert not alarmed.fit
    assert "UNFIT" in alarmed.text and "UNFIT" in told(alarmed)
    # Among many it is less than 1 %.
    assert of(*(trial(seed) for seed in range(100)), trial(100, outcome="regression")).fit
    assert not of(*CALM.trials, resampled=(11, 1000)).fit


def test_a_runner_that_sees_nothing_says_so() -> None:
    blind = of(trial(0), trial(1, 0.05, outcome="inconclusive"))
    assert blind.fit
    assert "It sees little" in told(blind)


def test_thresholds_follow_the_measured_noise() -> None:
    usual = thresholds_from(None, "cuda", relative=0.04)
    assert usual == dataclasses.replace(guard.usual("cuda"), relative=0.04)
    # A calm runner never makes the guard laxer than an unknown one.
    calm = thresholds_from(of(*CALM.trials, *(trial(seed, us=5000.0) for seed in range(9))), "cuda")
    assert (calm.noise, calm.placement) == (usual.noise, usual.placement)
    short = [trial(seed, us=20.0, place_ns=500.0) for seed in range(20)]
    long = [trial(seed, us=5000.0, place_ns=500.0) for seed in range(20)]
    placed = thresholds_from(of(*short, *long), "cuda")
    assert 350 < placed.placement_ns < 650
    assert placed.placement < 0.001
    apart = thresholds_from(of(*(trial(seed, apart=0.03) for seed in range(60))), "cuda")
    assert 0.04 < apart.noise < 0.09
    assert apart.promise_margin > 0.1
    # What others disturbed is not the runner's own noise.
    disturbed = of(*(trial(seed, apart=0.3, disturbed="others") for seed in range(20)))
    assert thresholds_from(disturbed, "cuda") == thresholds_from(None, "cuda")


def test_resampled_decisions_are_of_whole_processes() -> None:
    assert resample(CALM.trials, guard.usual("cuda"), 200) == (0, 200)
    # Every process as it was, all of one sitting 20 % slower: a runner on which a race may say anything.
    wild = [trial(seed, apart=0.2) for seed in range(2)]
    assert resample(wild, guard.usual("cuda"), 200)[0] > 0
    assert resample([trial(0, 0.05)], guard.usual("cuda"), 200) == (0, 0)


def test_it_is_kept_for_this_machine_and_driver(tmp_path: Path) -> None:
    device = detect("cpu")
    here = dataclasses.replace(CALM, machine=describe(device), kind="cpu")
    assert load(device, tmp_path / "cache") is None
    file = store(here, tmp_path / "cache")
    assert load(device, tmp_path / "cache") == here
    kept = file.read_text()
    newer = json.loads(kept) | {"format": calibration.FORMAT + 1}
    other = json.loads(kept.replace('"driver": ""', '"driver": "999.1"'))
    for broken in ("", "{", "[]", json.dumps(newer), json.dumps(other)):
        file.write_text(broken)
        assert load(device, tmp_path / "cache") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(SituationError, match="cannot be kept"):
        store(here, tmp_path / "file")


def test_the_document() -> None:
    document = calibration.document(CALM)
    assert document["fit"] is True
    assert document["false_alarms"]["decisions"] == 30
    assert document["caught"]["count"] == 30
    assert document["noise"][0]["yardstick"] == "100us"
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "1e9"])
def test_minutes_have_to_be_some(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--device", "cpu", f"--minutes={minutes}"]) == 2
    assert "--minutes" in capsys.readouterr().err
