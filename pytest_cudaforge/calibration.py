"""May this runner fail a build? The guard tried on kernels whose answer is known: the same one twice, and a slower one.

Every decision goes the guard's own way (race, assess, and where it suspects something other races and confirm), so its
false alarms and misses are the guard's. They are few: a race takes seconds. What so few can show is said with them, and
the same processes drawn anew make up many more decisions, which show what a rare combination of them would do, but not
a process of a kind that never came.

One file per machine (see :mod:`pytest_cudaforge.machine`) in the cache directory keeps the blocks of every race, so
that sittings add up and counts are today's rule's.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_cudaforge import durable, guard, machine
from pytest_cudaforge.distributions import binomial_interval
from pytest_cudaforge.errors import SituationError
from pytest_cudaforge.guard import Finding, GuardOutcome, Promises, Thresholds
from pytest_cudaforge.machine import Machine
from pytest_cudaforge.records import DeviceFacts, Race, RaceFailure, Target, TimedBlock, from_json, to_json
from pytest_cudaforge.yardsticks import YARDSTICKS, Yardstick, target_in

if TYPE_CHECKING:
    from pytest_cudaforge.evaluation.evaluator import Evaluator

__all__ = [
    "PLANTED",
    "Calibration",
    "Trial",
    "calibrate",
    "document",
    "line",
    "load",
    "resample",
    "store",
    "thresholds_from",
    "told",
    "trial_of",
]

FORMAT = 1
#: The slowdown that is planted, by kind of device.
PLANTED = {"cuda": 0.05, "cpu": 0.20}
#: More false alarms than this, and a runner's regressions fail no build.
MOST_FALSE_ALARMS = 0.01
#: Decisions made up of whole processes drawn anew.
RESAMPLES = 1000
#: Trials that are kept: those of the last sittings. Older ones tell of a machine as it was.
_KEPT_TRIALS = 400
#: Races of one yardstick before they say anything of its noise.
_FEWEST_RACES = 3


@dataclass(frozen=True)
class Trial:
    """One decision whose answer is known. ``planted``: share by which the candidate does more work, 0.0 for the same
    kernel twice. ``sittings``: the blocks of the first race, and of those that were asked for then; parties
    "candidate" and "base". ``disturbed``: of the first race. ``seconds``: of the whole decision."""

    yardstick: str
    planted: float
    outcome: GuardOutcome
    clock: str
    sittings: tuple[tuple[TimedBlock, ...], ...]
    disturbed: str = ""
    sensitive: bool = True
    seconds: float = 0.0
    day: str = ""

    @property
    def call_ns(self) -> float:
        return statistics.median(dict(block.ns)["base"] for block in self.sittings[0])


@dataclass(frozen=True)
class Calibration:
    """What is known of a runner. ``resampled``: (false alarms, decisions) made up of whole processes of the A/A
    trials drawn anew."""

    machine: Machine
    kind: str
    trials: tuple[Trial, ...]
    resampled: tuple[int, int] = (0, 0)
    version: str = ""

    @property
    def false_alarms(self) -> tuple[int, int]:
        """(regressions, decisions) where nothing had changed."""
        return _count(trial for trial in self.trials if not trial.planted)

    @property
    def caught(self) -> tuple[int, int]:
        """(regressions, decisions) where a slowdown was planted."""
        return _count(trial for trial in self.trials if trial.planted)

    @property
    def days(self) -> tuple[str, ...]:
        return tuple(sorted({trial.day for trial in self.trials if trial.day}))

    @property
    def fit(self) -> bool:
        """No more than 1 % false alarms, real or resampled. One real alarm among fewer than a hundred is more: each has
        passed two sittings, and a runner that is innocent shows it by running longer."""
        return all(count <= MOST_FALSE_ALARMS * trials for count, trials in (self.false_alarms, self.resampled))

    @property
    def text(self) -> str:
        """One line for the guard's header."""
        alarms, trials = self.false_alarms
        caught, planted = self.caught
        fit = "fit" if self.fit else "UNFIT: its regressions fail no build"
        return (
            f"{fit}; false alarms {alarms} of {trials}, resampled {self.resampled[0]} of {self.resampled[1]}; "
            f"planted {PLANTED[self.kind]:.0%} caught {caught} of {planted}; calibrated {', '.join(self.days[-1:])}"
        )


def _count(trials: Iterable[Trial]) -> tuple[int, int]:
    outcomes = [trial.outcome for trial in trials]
    return outcomes.count("regression"), len(outcomes)


# -- what follows from it --------------------------------------------------------------------------------------


def thresholds_from(
    calibration: Calibration | None,
    kind: str,
    *,
    relative: float = 0.03,
    absolute_ns: float = 1_000.0,
    promise_margin: float = 0.10,
) -> Thresholds:
    """The guard's thresholds on a device of ``kind`` ("cpu", "cuda"): what is asked of a regression, and the noise of
    this runner where it was measured; it never makes the guard laxer than on a runner nobody calibrated."""
    usual = replace(guard.usual(kind), relative=relative, absolute_ns=absolute_ns, promise_margin=promise_margin)
    if calibration is None:
        return usual
    found, noise = spreads(calibration.trials), sitting_noise(calibration.trials)
    if not found:
        return replace(usual, noise=max(usual.noise, noise))
    # Two sources: one that grows with the call, seen alone where calls are longest, and one that does not.
    placement = found[-1].sd_ns / found[-1].call_ns
    rest = [max(0.0, spread.sd_ns**2 - (placement * spread.call_ns) ** 2) for spread in found]
    return replace(
        usual,
        noise=max(usual.noise, noise),
        placement=max(usual.placement, placement),
        placement_ns=max(usual.placement_ns, math.sqrt(statistics.fmean(rest))),
        promise_margin=max(promise_margin, min(0.5, 3.0 * noise)),
    )


@dataclass(frozen=True)
class Spread:
    """How much one process's call of ``call_ns`` differs from another's (standard deviation)."""

    yardstick: str
    call_ns: float
    sd_ns: float


def spreads(trials: Sequence[Trial]) -> tuple[Spread, ...]:
    """By yardstick, shortest call first; where there are races enough. Medians over races: what one odd race says is
    not the runner's."""
    found = []
    for name in dict.fromkeys(trial.yardstick for trial in trials):
        own = [trial for trial in trials if trial.yardstick == name and _counts_as_noise(trial)]
        variances = [variance for variance in map(_process_variance, own) if variance is not None]
        if len(variances) >= _FEWEST_RACES:
            call_ns = statistics.median(trial.call_ns for trial in own)
            # Of a ratio of two processes, each of which has its own place.
            found.append(Spread(name, call_ns, call_ns * math.sqrt(statistics.median(variances) / 2.0)))
    return tuple(sorted(found, key=lambda spread: spread.call_ns))


def _counts_as_noise(trial: Trial) -> bool:
    """What by events was disturbed decides nothing, so it is no noise either."""
    return trial.clock == "supervisor" or not trial.disturbed


def _process_variance(trial: Trial) -> float | None:
    """Of one process's log-ratio. By events from the processes of one race; by the supervisor's clock, which takes the
    low values of all of them together, from what a whole race of one kernel against itself is off."""
    if trial.clock == "events":
        values = guard.process_values(_race_of(trial, trial.sittings[0]))
        return statistics.variance(values) if len(values) > 1 else None
    finding = None if trial.planted else _first(trial)
    # A median of squares of a normal variable is 0.455 of its variance.
    return math.log(finding.slowdown.speedup) ** 2 * finding.processes / 0.455 if finding is not None else None


def _first(trial: Trial) -> Finding | None:
    """What the first sitting measured; its figures depend on no threshold."""
    race = replace(_race_of(trial, trial.sittings[0]), disturbed="")
    kind = "cuda" if trial.clock == "events" else "cpu"
    return next(iter(guard.assess(race, Promises(), guard.usual(kind))), None)


def sitting_noise(trials: Sequence[Trial]) -> float:
    """Twice the standard deviation of what a sitting says of a kernel against itself, as a share; by the median of the
    absolute values, which a few wild sittings do not move. Only of calls that a relative threshold is about."""
    same = [_first(trial) for trial in trials if not trial.planted and trial.sensitive and _counts_as_noise(trial)]
    apart = [abs(math.log(finding.slowdown.speedup)) for finding in same if finding is not None]
    return 2.0 * 1.4826 * statistics.median(apart) if len(apart) >= _FEWEST_RACES else 0.0


# -- what was and what was not shown ---------------------------------------------------------------------------


def told(calibration: Calibration) -> str:
    """The calibration in words."""
    (alarms, trials), (caught, planted) = calibration.false_alarms, calibration.caught
    drawn_alarms, drawn = calibration.resampled
    size = f"{PLANTED[calibration.kind]:.0%}".replace("%", " %")
    lines = [
        calibration.machine.text,
        f"nothing changed:  {alarms} of {trials} decisions were false alarms ({_range(alarms, trials)});"
        f" {drawn_alarms} of {drawn} resampled by whole processes",
        f"planted {size:>5}:    {caught} of {planted} were caught ({_range(caught, planted)})",
    ]
    for spread in spreads(calibration.trials):
        share = 100 * spread.sd_ns / spread.call_ns
        lines.append(
            f"noise:            at {guard.duration(spread.call_ns)} a call one process differs from another by "
            f"{guard.duration(spread.sd_ns)} ({share:.2g} %)"
        )
    lines.append(f"decisions on:     {', '.join(calibration.days) or 'no day'}; {_seconds(calibration.trials)}")
    lines.append(_judgement(calibration))
    return "\n".join(lines)


def line(trial: Trial) -> str:
    """One decision, as it was made."""
    finding = _first(trial)
    apart = f"{100 * (finding.slowdown.speedup - 1.0):+.1f} %" if finding is not None else "nothing"
    asked = f"{100 * trial.planted:g} % more work" if trial.planted else "nothing changed"
    sittings = f"{len(trial.sittings)} sitting{'s' if len(trial.sittings) > 1 else ''}"
    note = f"; {trial.disturbed}" if trial.disturbed else ""
    return (
        f"{guard.duration(trial.call_ns):>8} a call, {asked:>15}: {trial.outcome:12} "
        f"measured {apart}, {sittings}, {trial.seconds:.1f} s{note}"
    )


def _range(count: int, trials: int) -> str:
    if not trials:
        return "none was made"
    low, high = binomial_interval(count, trials)
    return f"{100 * low:.1f} to {100 * high:.1f} % with 95 % confidence"


def _seconds(trials: Sequence[Trial]) -> str:
    return f"{statistics.median(trial.seconds for trial in trials):.1f} s each" if trials else "none"


def _judgement(calibration: Calibration) -> str:
    """Fit or not, and how much so few decisions can tell."""
    if not calibration.fit:
        return (
            f"UNFIT: more than {100 * MOST_FALSE_ALARMS:g} % false alarms. Regressions found here are shown and fail "
            "no build. Use a quieter runner (nothing else on its cores or its GPU, fixed clocks), then calibrate again"
        )
    _, trials = calibration.false_alarms
    unseen = 1.0 - (1.0 - MOST_FALSE_ALARMS) ** trials
    needed = math.ceil(math.log(0.05) / math.log(1.0 - MOST_FALSE_ALARMS))
    lines = [
        "fit: no more false alarms than 1 %; regressions found here fail builds.",
        f"What that shows: of a runner with 1 % false alarms {trials} decisions would have seen one with a chance of "
        f"{100 * unseen:.0f} %; to rule 1 % out takes {needed} decisions without one (run again: they add up).",
    ]
    caught, planted = calibration.caught
    if planted and caught < planted / 2:
        lines.append("It sees little: most planted slowdowns went unnoticed, so a pass here says little, too.")
    return "\n".join(lines)


# -- measuring -------------------------------------------------------------------------------------------------


def calibrate(
    evaluator: Evaluator,
    *,
    minutes: float,
    earlier: Calibration | None = None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    yardsticks: Sequence[Yardstick] | None = None,
    processes: int | None = None,
    budget_s: float | None = None,
) -> Calibration:
    """Try the guard on this runner for about ``minutes`` (one decision of each sort at least); the trials add to
    ``earlier``'s. ``yardsticks`` None: those of the device. ``processes``, ``budget_s``: of each race, None as in the
    guard's own (anything else tells nothing of the guard). Raises SituationError where a yardstick fails."""
    kind = evaluator.kind
    thresholds = thresholds_from(earlier, kind)
    plan = _plan(yardsticks or YARDSTICKS[kind], PLANTED[kind])
    until = time.monotonic() + 60.0 * minutes
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="cudaforge-calibrate-") as folder:
        target = target_in(Path(folder), kind)
        # The oracle's start is no part of a decision.
        evaluator.facts(target)
        trying = functools.partial(trial_of, processes=processes, budget_s=budget_s)
        for yardstick, planted in itertools.cycle(plan):
            longest_s = max((trial.seconds for trial in trials), default=0.0)
            both = {bool(trial.planted) for trial in trials} == {False, True}
            if both and time.monotonic() + longest_s > until:
                break
            trials.append(trying(evaluator, target, yardstick, planted, thresholds))
            on_trial(trials[-1])
    kept = (*(earlier.trials if earlier is not None else ()), *trials)[-_KEPT_TRIALS:]
    found = Calibration(machine.describe(evaluator.device), kind, kept, version=_version())
    return replace(found, resampled=resample(found.trials, thresholds_from(found, kind), RESAMPLES))


def _plan(yardsticks: Sequence[Yardstick], planted: float) -> list[tuple[Yardstick, float]]:
    """In turn the same kernel twice and a slower one, so that whenever time is up there are as many of both."""
    changed = [yardstick for yardstick in yardsticks if yardstick.sensitive]
    longest = max(len(yardsticks), len(changed))
    found = []
    for number in range(longest):
        found.append((yardsticks[number % len(yardsticks)], 0.0))
        found.append((changed[number % len(changed)], planted))
    return found


def trial_of(
    evaluator: Evaluator,
    target: Target,
    yardstick: Yardstick,
    planted: float,
    thresholds: Thresholds,
    *,
    processes: int | None = None,
    budget_s: float | None = None,
) -> Trial:
    """One decision, as the guard makes it. Raises SituationError where the yardstick fails under the clock."""
    began = time.perf_counter()
    race = functools.partial(_raced, evaluator, target, yardstick, planted, processes, budget_s)
    races = [first := race()]
    said = [guard.assess(first, Promises(), thresholds)]
    while guard.unsettled(said):
        races.append(race())
        said.append(guard.assess(races[-1], Promises(), thresholds))
    findings = guard.confirm(*said)
    return Trial(
        yardstick=yardstick.name,
        planted=planted,
        outcome=findings[0].outcome if findings else "inconclusive",
        clock=first.clock,
        sittings=tuple(race.blocks for race in races),
        disturbed=first.disturbed,
        sensitive=yardstick.sensitive,
        seconds=round(time.perf_counter() - began, 2),
        day=time.strftime("%Y-%m-%d"),
    )


def _raced(
    evaluator: Evaluator,
    target: Target,
    yardstick: Yardstick,
    planted: float,
    processes: int | None,
    budget_s: float | None,
) -> Race:
    """One race of a yardstick against itself, or against its slower self; the reference's blocks are left out."""
    found = evaluator.race(
        yardstick.candidate(planted),
        target,
        base=yardstick.candidate(),
        references=("eager",),
        processes=processes,
        budget_s=budget_s,
    )
    if isinstance(found, RaceFailure):
        raise SituationError(
            f"the yardstick {yardstick.name} failed: {found.status.value}: {found.reason}",
            expected="a kernel of our own that runs wherever kernels run",
            remedy="run `cudaforge doctor`",
        )
    race = found[0]
    parties = ("candidate", "base")
    if not race.blocks or "base" not in dict(race.blocks[0].ns):
        raise SituationError(f"the yardstick {yardstick.name} could not be raced: {'; '.join(race.notes)}")
    kept = (replace(b, ns=tuple(pair for pair in b.ns if pair[0] in parties)) for b in race.blocks)
    return replace(race, blocks=tuple(kept))


# -- resampling ------------------------------------------------------------------------------------------------


def resample(trials: Sequence[Trial], thresholds: Thresholds, count: int, seed: int = 0) -> tuple[int, int]:
    """(regressions, decisions) of ``count`` decisions whose races are made up of whole processes drawn anew, each from
    all races of one yardstick; as many processes as one of its races had. Of what is given: A/A trials are drawn from
    only."""
    chance = random.Random(seed)
    pools = _pools([trial for trial in trials if not trial.planted])
    if not pools:
        return 0, 0
    alarms = 0
    for number in range(count):
        pool, sizes = pools[number % len(pools)]
        said = [guard.assess(_drawn(pool, sizes, chance), Promises(), thresholds)]
        while guard.unsettled(said):
            said.append(guard.assess(_drawn(pool, sizes, chance), Promises(), thresholds))
        alarms += any(finding.outcome == "regression" for finding in guard.confirm(*said))
    return alarms, count


_Process = tuple[str, tuple[TimedBlock, ...]]


def _pools(trials: Sequence[Trial]) -> list[tuple[list[_Process], list[int]]]:
    """By yardstick: every process that was raced, and how many a race had."""
    found = []
    for name in dict.fromkeys(trial.yardstick for trial in trials):
        processes: list[_Process] = []
        sizes = []
        for trial in (trial for trial in trials if trial.yardstick == name):
            for blocks in trial.sittings:
                own = [tuple(group) for _, group in itertools.groupby(blocks, key=lambda block: block.process)]
                processes += [(trial.clock, group) for group in own]
                sizes.append(len(own))
        found.append((processes, sizes))
    return found


def _drawn(pool: Sequence[_Process], sizes: Sequence[int], chance: random.Random) -> Race:
    drawn = chance.choices(pool, k=chance.choice(sizes))
    blocks = [replace(block, process=number) for number, (_, group) in enumerate(drawn) for block in group]
    return Race("", "events" if drawn[0][0] == "events" else "supervisor", tuple(blocks))


def _race_of(trial: Trial, blocks: tuple[TimedBlock, ...]) -> Race:
    return Race(
        trial.yardstick, "events" if trial.clock == "events" else "supervisor", blocks, disturbed=trial.disturbed
    )


# -- the file --------------------------------------------------------------------------------------------------


def load(device: DeviceFacts, cache_dir: Path) -> Calibration | None:
    """What is kept of this machine; None where nothing is, the file is broken, or another driver wrote it."""
    here = machine.describe(device)
    try:
        data = json.loads(_file(here, cache_dir).read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            return None
        found: Calibration = from_json(Calibration, data["calibration"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.machine.toolchain.driver == here.toolchain.driver and found.trials else None


def store(calibration: Calibration, cache_dir: Path) -> Path:
    """Write it, whole or not at all. Raises SituationError where the directory cannot be written."""
    file = _file(calibration.machine, cache_dir)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        data = {"format": FORMAT, "calibration": to_json(calibration)}
        durable.write_file(file, json.dumps(data, allow_nan=False) + "\n")
    except OSError as error:
        raise SituationError(
            f"the calibration cannot be kept: {file}: {error.strerror or error}",
            expected="a cache directory that can be written",
            remedy="set XDG_CACHE_HOME to one; without it every runner counts as one that nobody calibrated",
        ) from error
    return file


def _file(here: Machine, cache_dir: Path) -> Path:
    return cache_dir / f"calibration-{here.arch}-{here.key}.json"


def document(calibration: Calibration) -> dict[str, Any]:
    """The calibration as the stable JSON contract: within a version fields are added, never renamed or removed.
    Without the blocks, which are in the file of the cache directory."""
    (alarms, trials), (caught, planted) = calibration.false_alarms, calibration.caught
    return {
        "format": "cudaforge-calibration",
        "version": 1,
        "fit": calibration.fit,
        "machine": to_json(calibration.machine),
        "false_alarms": _counts(alarms, trials),
        "resampled_false_alarms": _counts(*calibration.resampled),
        "planted": PLANTED[calibration.kind],
        "caught": _counts(caught, planted),
        "noise": [to_json(spread) for spread in spreads(calibration.trials)],
        "thresholds": dataclasses.asdict(thresholds_from(calibration, calibration.kind)),
        "days": list(calibration.days),
        "pytest_cudaforge": calibration.version,
    }


def _counts(count: int, trials: int) -> dict[str, Any]:
    low, high = binomial_interval(count, trials)
    return {"count": count, "decisions": trials, "low": low, "high": high, "confidence": 0.95}


def _version() -> str:
    try:
        return importlib.metadata.version("pytest-cudaforge")
    except importlib.metadata.PackageNotFoundError:
        return ""
