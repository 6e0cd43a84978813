"""Does the guard cry wolf, and does it wake? Decisions on kernels that are the same, and on ones made slower.

To run: `python tests/benchmarks/guard_null.py [--device cpu|cuda:N] [--seconds 300] [--out FILE] [--only aa|planted]`;
`--report` prints the table of what is stored, `--merge FILE...` takes over what other sittings, or other GPUs, stored.

Every decision is the guard's own: race, assess, and where it suspects something a second race and confirm
(`calibration.trial_of`). Its raw blocks are appended to data/guard_null.jsonl, a row each, so that counts grow over
sittings; the next one begins with what has the fewest rows. The report decides anew by today's rule, and draws
`--resamples` more A/A decisions of whole processes. Planted: 5 % more work (CPU: 20 %); anything but a confirmed
regression is a miss. Kernels: `pytest_cudaforge/yardsticks.py` (computing, 5 us to 5 ms on an H200), and the norm of
`null_test.py` (memory-bound), whose planted work adds rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from judged_targets import find
from null_test import TARGET, kernel

from pytest_cudaforge import calibration, guard
from pytest_cudaforge.calibration import PLANTED, Trial
from pytest_cudaforge.distributions import binomial_interval
from pytest_cudaforge.errors import ForgeError
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.guard import Promises, Thresholds
from pytest_cudaforge.records import Candidate, Race, Target, from_json, to_json
from pytest_cudaforge.yardsticks import YARDSTICKS, Yardstick, target_in

DATA = Path(__file__).parent / "data" / "guard_null.jsonl"
#: rows x 4096 fp32 of the norm: about 6, 70 and 270 us on an H200.
NORM_ROWS = (16, 8192, 32768)
FALSE_ALARMS_AT_MOST = {"cuda": 0.001, "cpu": 0.01}


@dataclass(frozen=True)
class Norm(Yardstick):
    """The memory-bound norm of ``repeats`` rows."""

    def candidate(self, extra: float = 0.0) -> Candidate:
        return kernel(self.kind, extra)


def yardsticks(kind: str) -> tuple[Yardstick, ...]:
    norms = [Norm(f"norm{rows}", kind, rows, rows > 1000) for rows in NORM_ROWS] if kind == "cuda" else []
    return (*YARDSTICKS[kind], *norms)


def target_of(yardstick: Yardstick, folder: Path) -> Target:
    if not isinstance(yardstick, Norm):
        return target_in(folder, yardstick.kind)
    path = folder / f"norm_{yardstick.repeats}.py"
    path.write_text(TARGET.format(rows=yardstick.repeats))
    return find(folder, f"::Norm{yardstick.repeats}")


# -- measuring -------------------------------------------------------------------------------------------------


def plan(kind: str, stored: Sequence[Trial], only: str) -> Iterator[tuple[Yardstick, float]]:
    """What has the fewest rows comes next, for ever; of what did not change three for two that did."""
    cases = [(one, 0.0) for one in yardsticks(kind)] if only != "planted" else []
    cases += [(one, PLANTED[kind]) for one in yardsticks(kind) if one.sensitive and only != "aa"]
    counts = {(one.name, planted): 0 for one, planted in cases}
    for trial in stored:
        if (trial.yardstick, trial.planted) in counts:
            counts[trial.yardstick, trial.planted] += 1
    while True:
        case = min(cases, key=lambda case: counts[case[0].name, case[1]] * (3 if case[1] else 2))
        counts[case[0].name, case[1]] += 1
        yield case


def measure(arguments: argparse.Namespace) -> None:
    kind = arguments.device.partition(":")[0]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as name, arguments.out.open("a", encoding="utf-8") as stream:
        folder = Path(name)
        cache = arguments.cache or folder / "cache"
        with Evaluator(EvaluatorSettings(device=arguments.device, cache_dir=cache)) as evaluator:
            device = evaluator.device.name
            stored = [trial for _, trial in rows_of([DATA, arguments.out], device)]
            for yardstick in yardsticks(kind):
                # The oracle's start and the targets' import are no part of a decision.
                evaluator.facts(target_of(yardstick, folder))
            longest_s = 0.0
            for yardstick, planted in plan(kind, stored, arguments.only):
                if time.monotonic() + longest_s > until:
                    break
                try:
                    trial = calibration.trial_of(
                        evaluator, target_of(yardstick, folder), yardstick, planted, guard.usual(kind)
                    )
                except ForgeError as error:
                    print(f"{yardstick.name} {planted:.0%}: {error}", flush=True)
                    continue
                longest_s = max(longest_s, trial.seconds)
                row = {"id": uuid.uuid4().hex[:12], "device": device, **rounded(to_json(trial))}
                stream.write(json.dumps(row) + "\n")
                stream.flush()
                print(line(trial, kind), flush=True)


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Whole ns: the clocks' own grain is coarser."""
    for blocks in row["sittings"]:
        for block in blocks:
            block["ns"] = [[party, round(ns)] for party, ns in block["ns"]]
            block["foreign"] = round(block["foreign"], 3)
    return row


def line(trial: Trial, kind: str) -> str:
    race = race_of(trial, 0)
    (finding,) = guard.assess(race, Promises(), guard.usual(kind))
    return (
        f"{trial.yardstick:10s} {trial.call_ns / 1e3:8.1f} us, {trial.planted:.0%} more: {trial.outcome:12s} "
        f"{finding.slowdown.speedup - 1:+.2%} ({finding.slowdown.low - 1:+.2%} .. {finding.slowdown.high - 1:+.2%}) "
        f"{finding.processes} processes, {len(trial.sittings)} sittings, {trial.seconds:.1f} s {trial.disturbed}"
    )


# -- what is stored --------------------------------------------------------------------------------------------


def rows_of(files: Sequence[Path], device: str = "") -> list[tuple[str, Trial]]:
    """(device, trial), each row once however many files hold it."""
    found = {}
    for file in files:
        for text in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(text)
            if device in ("", row["device"]):
                found[row["id"]] = (row["device"], from_json(Trial, {k: row[k] for k in row if k not in _OWN}))
    return list(found.values())


_OWN = ("id", "device")


def merge(files: Sequence[Path]) -> None:
    """Take over the rows that are not here yet."""
    known = {json.loads(text)["id"] for text in DATA.read_text().splitlines()} if DATA.exists() else set()
    with DATA.open("a", encoding="utf-8") as stream:
        for file in files:
            for text in file.read_text().splitlines():
                if json.loads(text)["id"] not in known:
                    known.add(json.loads(text)["id"])
                    stream.write(text + "\n")


def race_of(trial: Trial, sitting: int) -> Race:
    clock = "events" if trial.clock == "events" else "supervisor"
    return Race("", clock, trial.sittings[sitting], disturbed=trial.disturbed if sitting == 0 else "")


def decided(trial: Trial, thresholds: Thresholds) -> str:
    """The outcome by today's rule. A further sitting that was never asked for cannot confirm."""
    said = [guard.assess(race_of(trial, 0), Promises(), thresholds)]
    while guard.unsettled(said) and len(said) < len(trial.sittings):
        said.append(guard.assess(race_of(trial, len(said)), Promises(), thresholds))
    return guard.confirm(*said)[0].outcome


# -- the table -------------------------------------------------------------------------------------------------


def report(files: Sequence[Path], resamples: int) -> None:
    for device in sorted({device for device, _ in rows_of(files)}):
        trials = [trial for _, trial in rows_of(files, device)]
        kind = "cuda" if trials[0].clock == "events" else "cpu"
        thresholds = guard.usual(kind)
        print(f"{device}: {len(trials)} decisions on {', '.join(sorted({trial.day for trial in trials}))}")
        for planted in (0.0, PLANTED[kind]):
            group = [trial for trial in trials if trial.planted == planted]
            for name in sorted({t.yardstick for t in group}, key=lambda n: _typical_us(group, n)):
                _print_yardstick([t for t in group if t.yardstick == name], thresholds)
            outcomes = [decided(trial, thresholds) for trial in group]
            print(f"  {'planted ' + format(planted, '.0%') if planted else 'no change'}: {_counted(outcomes)}")
        drawn = calibration.resample(trials, thresholds, resamples) if resamples else (0, 0)
        print(f"  resampled by whole processes: {drawn[0]} false alarms of {drawn[1]}")


def _typical_us(trials: Sequence[Trial], name: str) -> float:
    return statistics.median(trial.call_ns for trial in trials if trial.yardstick == name) / 1e3


def _print_yardstick(trials: Sequence[Trial], thresholds: Thresholds) -> None:
    found = [guard.assess(replace(race_of(t, 0), disturbed=""), Promises(), thresholds)[0] for t in trials]
    ratios = sorted(finding.slowdown.speedup for finding in found)
    outcomes = [decided(trial, thresholds) for trial in trials]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes))
    name, planted = trials[0].yardstick, trials[0].planted
    print(
        f"  {name:10s} {_typical_us(trials, name):8.1f} us, {planted:.0%} more: "
        f"{len(trials)} decisions ({counts}), measured {ratios[0] - 1:+.2%} to {ratios[-1] - 1:+.2%}, "
        f"{statistics.median(trial.seconds for trial in trials):.1f} s each"
    )


def _counted(outcomes: Sequence[str]) -> str:
    count = outcomes.count("regression")
    low, high = binomial_interval(count, len(outcomes))
    return f"{count} of {len(outcomes)} called a regression ({low:.1%} to {high:.1%} with 95 % confidence)"


def main() -> None:
    """Measure and store, merge, or print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--only", choices=("aa", "planted"), default="")
    parser.add_argument("--resamples", type=int, default=10000)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--merge", nargs="+", type=Path, default=[])
    arguments = parser.parse_args()
    if arguments.merge:
        merge(arguments.merge)
    elif not arguments.report:
        measure(arguments)
    if arguments.report or arguments.merge:
        report([DATA], arguments.resamples)


if __name__ == "__main__":
    main()
