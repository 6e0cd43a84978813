"""What a run's measurements mean beside the earlier ones: a sick runner, a toolchain that slows a kernel, a slow drift.
Pure: no clock, no file, no process.

An alarm is shown and fails nothing. False ones are what people hate most, so each rule says how much it must have seen,
and is silent before:

=============  =====================================================================================================
sick_runner    :data:`FEWEST_PAST` earlier runs of the same reference (eager or compiled) of the same target source on
               the same hardware with the same toolchain; the last :data:`MOST_PAST` count. It is slower than their
               median by :data:`SICK`, all of this sitting is (its 5th percentile too), and so far out of their own
               spread that chance does it once in a thousand runs, however many references the run has. One of many
               that is slow all by itself, its sitting's other reference not, says nothing of the runner.
toolchain      :data:`FEWEST_FAST` earlier runs of the same kernel, byte by byte, in which it was surely faster than its
               reference (one, where it was so by the guard's relative threshold), on the same hardware, the last of
               them with another toolchain; now the whole 99 % interval says slower, by more than the guard's
               thresholds, relative and absolute.
drift          :data:`FEWEST_DRIFT` runs on the same hardware with the same toolchain, without a regression since; the
               last :data:`MOST_DRIFT` count. The median of the last third is above that of the first by :data:`DRIFT`
               and by the guard's absolute threshold, the middle third lies between, a trend test agrees, and the same
               holds against every reference of the sitting: when kernel and reference get slower together, it is the
               runner. Where there is no reference (plain modules), twice as much.
=============  =====================================================================================================

Disturbed measurements count nowhere. A sick runner that stays so becomes its own history after half of
:data:`MOST_PAST` runs, and is silent then.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from pytest_cudaforge import trend
from pytest_cudaforge.figures import show
from pytest_cudaforge.guard import Thresholds
from pytest_cudaforge.machine import Machine
from pytest_cudaforge.measurements import GuardRun, Measurement
from pytest_cudaforge.records import Ratio

__all__ = ["Alarm", "AlarmKind", "alarms", "doubtful", "lines"]

AlarmKind = Literal["sick_runner", "toolchain", "drift"]

FEWEST_PAST, MOST_PAST, SICK = 6, 20, 0.10
FEWEST_FAST = 2
FEWEST_DRIFT, MOST_DRIFT, DRIFT = 15, 60, 0.05
#: Of a false alarm of one rule in one run, over all that it looks at.
CHANCE = 0.001
#: Nothing is measured better than that (share of a time).
_LEAST_SPREAD = 0.005
#: How many slow references an alarm names, and from how many judged on one that is slow alone says nothing.
_NAMED, _MANY = 3, 4

_T = TypeVar("_T")


@dataclass(frozen=True)
class Alarm:
    """``targets``: whom it is about; of a sick runner those whose promises cannot be judged in this run, empty where
    that is everybody. ``text``: what was seen, with counts and figures; ``advice``: what to do."""

    kind: AlarmKind
    targets: tuple[str, ...]
    text: str
    advice: str
    machine: str


@dataclass(frozen=True)
class _Past:
    """Earlier measurements by what is followed, oldest first, one of each run (its last: a confirmation)."""

    by_series: Mapping[tuple[str, str, str, str], Sequence[Measurement]] = field(default_factory=dict)

    @classmethod
    def of(cls, history: Iterable[Measurement], now: Sequence[Measurement]) -> _Past:
        running = {measurement.run.id for measurement in now}
        wanted = {measurement.series for measurement in now}
        found: dict[tuple[str, str, str, str], dict[str, Measurement]] = defaultdict(dict)
        earlier = [one for one in history if one.series in wanted and one.run.id not in running and not one.disturbed]
        for measurement in sorted(earlier, key=lambda each: each.run.time):
            found[measurement.series][measurement.run.id] = measurement
        return cls({series: tuple(by_run.values()) for series, by_run in found.items()})

    def like(self, now: Measurement, *alike: Callable[[Measurement], object]) -> list[Measurement]:
        """Those on the same hardware by the same clock that are ``alike`` in the properties given."""
        wanted = [(same, same(now)) for same in (_hardware, _clock, *alike)]
        return [one for one in self.by_series.get(now.series, ()) if all(same(one) == value for same, value in wanted)]


def _hardware(measurement: Measurement) -> object:
    return measurement.run.machine.key


def _clock(measurement: Measurement) -> object:
    return measurement.clock


def _toolchain(measurement: Measurement) -> object:
    return measurement.run.machine.toolchain


def _target_source(measurement: Measurement) -> object:
    return measurement.target_digest


def _kernel(measurement: Measurement) -> object:
    return measurement.kernel


def alarms(
    history: Iterable[Measurement], now: Sequence[Measurement], thresholds: Thresholds | None = None
) -> tuple[Alarm, ...]:
    """What ``now``, the measurements of one run, says beside ``history`` (which may hold them already). ``thresholds``:
    the guard's, with its relative and absolute one. Sorted: the runner first, then the toolchain, then drift."""
    limits = thresholds or Thresholds()
    calm = [measurement for measurement in now if not measurement.disturbed]
    past = _Past.of(history, calm)
    return (*_sick_runner(past, calm), *_slow_since(past, calm, limits), *_drifts(past, calm, limits))


def doubtful(found: Sequence[Alarm], target: str) -> str:
    """Why a broken promise of ``target`` may be the runner's fault in this run; "" where nothing says so. A comparison
    with the merge base stands all the same: both were timed side by side."""
    for alarm in found:
        if alarm.kind == "sick_runner" and (not alarm.targets or target in alarm.targets):
            return alarm.text
    return ""


_HEADINGS: Mapping[AlarmKind, str] = {"sick_runner": "sick runner?", "toolchain": "toolchain", "drift": "slow drift"}


def lines(found: Sequence[Alarm]) -> tuple[str, ...]:
    """For a terminal: each alarm in two lines, what was seen and what to do. The text is as it is: targets' names come
    from files, so show it through :func:`pytest_cudaforge.report.escaping.plain`."""
    told: list[str] = []
    for alarm in found:
        told += [f"{_HEADINGS[alarm.kind]}: {alarm.text}", f"  to do: {alarm.advice}"]
    return tuple(told)


# -- a sick runner ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reference:
    """One reference of this run beside its own past."""

    measurement: Measurement
    party: str
    past: tuple[Measurement, ...]

    @property
    def now_ns(self) -> float:
        return self.measurement.median_ns(self.party) or math.nan

    @property
    def median_ns(self) -> float:
        return statistics.median(self.past_ns)

    @property
    def past_ns(self) -> list[float]:
        return [one.median_ns(self.party) or math.nan for one in self.past]

    @property
    def slower(self) -> float:
        return self.now_ns / self.median_ns - 1.0

    def slow(self, judged: int) -> bool:
        """Beyond the share, the sitting's own spread and the past's."""
        sample = self.measurement.sample(self.party)
        if sample is None or self.slower <= SICK or sample.low_ns <= self.median_ns:
            return False
        logs = [math.log(value) for value in self.past_ns]
        return math.log(self.now_ns) > trend.limit(logs, CHANCE / judged, least_spread=_LEAST_SPREAD, far=SICK)

    @property
    def text(self) -> str:
        return (
            f"{self.party} of {self.measurement.name} by {self.slower:.0%} ({_ns(self.median_ns)} in the median of "
            f"its last {len(self.past)} runs, now {_ns(self.now_ns)})"
        )


def _sick_runner(past: _Past, now: Sequence[Measurement]) -> tuple[Alarm, ...]:
    judged = [reference for measurement in now for reference in _references(past, measurement)]
    slow = sorted((one for one in judged if one.slow(len(judged))), key=lambda one: -one.slower)
    if not slow or _alone(slow, judged):
        return ()
    machine = slow[0].measurement.run.machine
    text = (
        f"{len(slow)} of {len(judged)} references {_are(len(slow))} slower than in {_own(len(slow))} history on this "
        f"kind of machine: {'; '.join(one.text for one in slow[:_NAMED])}{_more(len(slow) - _NAMED)}"
    )
    unseen = machine.device_id and all(one.run.machine.device_id != machine.device_id for one in slow[0].past)
    text += f"; none of these runs was on this very device ({machine.device_id})" if unseen else ""
    # When most of it is slow it is all of it: what lies below the threshold by a little is no better.
    whole = 2 * len(slow) >= len(judged)
    targets = () if whole else tuple(dict.fromkeys(one.measurement.target for one in slow))
    of = "all kernels" if whole else "these targets"
    advice = (
        f"do not trust this run on promises (speedups over the reference) of {of}; comparisons with the merge base "
        f"stand. {_inspection(machine)}, and run again, on another machine if there is one"
    )
    return (Alarm("sick_runner", targets, text, advice, machine.text),)


def _alone(slow: Sequence[_Reference], judged: Sequence[_Reference]) -> bool:
    """One of many, in a sitting whose other reference was as fast as ever: that is no runner that is slow."""
    if len(slow) > 1 or len(judged) < _MANY:
        return False
    beside = [one for one in judged if one.measurement is slow[0].measurement and one is not slow[0]]
    return bool(beside) and all(one.slower < SICK / 2.0 for one in beside)


def _references(past: _Past, now: Measurement) -> list[_Reference]:
    earlier = past.like(now, _toolchain, _target_source)
    found = []
    for party in now.references:
        timed = [one for one in earlier if one.median_ns(party) is not None][-MOST_PAST:]
        found += [_Reference(now, party, tuple(timed))] if len(timed) >= FEWEST_PAST else []
    return found


def _inspection(machine: Machine) -> str:
    if machine.arch == "cpu":
        return "Look for other jobs (top), a changed quota or a throttled clock"
    return "Look for other jobs and for throttling (nvidia-smi, nvidia-smi -q -d PERFORMANCE,CLOCK)"


# -- a toolchain that slows a kernel ----------------------------------------------------------------------------------


def _slow_since(past: _Past, now: Sequence[Measurement], limits: Thresholds) -> list[Alarm]:
    found = []
    for measurement in now:
        slow = [(ratio.speedup, name, ratio) for name, ratio in _behind(measurement, limits)]
        if slow:
            _, name, ratio = min(slow)
            found += _toolchain_alarm(past, measurement, name, ratio, limits)
    return found


def _behind(now: Measurement, limits: Thresholds) -> list[tuple[str, Ratio]]:
    """The references that the kernel is slower than: surely, and by as much as the guard minds."""
    found = []
    for reference in now.references:
        ratio, candidate_ns, reference_ns = now.speedup(reference), now.median_ns("candidate"), now.median_ns(reference)
        if ratio is None or candidate_ns is None or reference_ns is None or ratio.speedup <= 0:
            continue
        worth = max(limits.relative, limits.absolute_ns / reference_ns)
        if ratio.high < 1.0 / (1.0 + limits.noise) and 1.0 / ratio.speedup - 1.0 >= worth:
            found.append((reference, ratio))
    return found


def _toolchain_alarm(past: _Past, now: Measurement, reference: str, ratio: Ratio, limits: Thresholds) -> list[Alarm]:
    earlier = past.like(now, _kernel, _target_source)
    fast = [one for one in earlier if _faster(one, reference)]
    if not fast or fast[-1].run.machine.toolchain == now.run.machine.toolchain:
        return []
    before = fast[-1].run.machine.toolchain
    same = [one for one in fast if one.run.machine.toolchain == before]
    if len(same) < FEWEST_FAST and not _faster(same[-1], reference, by=limits.relative):
        return []
    was = statistics.median([one.speedup(reference).speedup for one in same])  # type: ignore[union-attr]
    changed = ", ".join(now.run.machine.toolchain.changes(before))
    text = (
        f"{now.name}: the kernel did not change ({now.kernel[:12]}), the toolchain did ({changed}), and it is slower "
        f"than {reference} now: {was:.2f}× before ({_counted(len(same), 'run')}, the last {_when(fast[-1].run)}), "
        f"{ratio.speedup:.2f}× now (99 %: {ratio.low:.2f}–{ratio.high:.2f}); kernel {_moved(same, now, 'candidate')}, "
        f"{reference} {_moved(same, now, reference)}"
    )
    name = now.target.rpartition("::")[2]
    advice = (
        f"re-forge it with this toolchain (pytest --forge -k {name}), or fall back: without its entry in "
        f"forged/manifest.json the reference runs"
    )
    return [Alarm("toolchain", (now.target,), text, advice, now.run.machine.text)]


def _faster(measurement: Measurement, reference: str, by: float = 0.0) -> bool:
    """With the whole interval."""
    ratio = measurement.speedup(reference)
    return ratio is not None and ratio.low > 1.0 + by


def _moved(before: Sequence[Measurement], now: Measurement, party: str) -> str:
    was = [time for time in (one.median_ns(party) for one in before) if time is not None]
    return f"{_ns(statistics.median(was)) if was else '?'} → {_ns(now.median_ns(party) or math.nan)}"


# -- slow drift -------------------------------------------------------------------------------------------------------


def _drifts(past: _Past, now: Sequence[Measurement], limits: Thresholds) -> list[Alarm]:
    windows = [(measurement, _window(past, measurement)) for measurement in now]
    judged = [(measurement, window) for measurement, window in windows if len(window) >= FEWEST_DRIFT]
    found = []
    for measurement, window in judged:
        times = [one.median_ns("candidate") or math.nan for one in window]
        # torch.compile may have been raced in some of them only.
        beside = [name for name in measurement.references if all(name in one.references for one in window)]
        least = DRIFT if beside else 2 * DRIFT
        chance = CHANCE / len(judged)
        rises = _creeps(times, least, chance) and trend.thirds(times) > limits.absolute_ns
        if rises and all(_creeps(_over(window, name), least, chance) for name in beside):
            found.append(_drift_alarm(measurement, window, times, beside))
    return found


def _window(past: _Past, now: Measurement) -> list[Measurement]:
    """The last runs up to now since the guard last called it slower than its base: what was told is no drift. Of a
    kernel the reference is the same throughout; a plain module has none, and its source is what may creep."""
    same = (_toolchain, _target_source) if now.references else (_toolchain,)
    runs = [*past.like(now, *same), now]
    told = [index for index, one in enumerate(runs) if _told(one)]
    return runs[told[-1] + 1 if told else 0 :][-MOST_DRIFT:]


def _told(measurement: Measurement) -> bool:
    return any(one.question == "base" and one.outcome == "regression" for one in measurement.judgements)


def _over(window: Sequence[Measurement], reference: str) -> list[float]:
    return [(one.median_ns("candidate") or math.nan) / (one.median_ns(reference) or math.nan) for one in window]


def _creeps(values: Sequence[float], least: float, chance: float) -> bool:
    """From third to third upwards, by ``least`` in all, clear of the spread about the line, and a trend test agrees."""
    logs = [math.log(value) for value in values]
    part = len(logs) // 3
    first, middle, last = (statistics.median(piece) for piece in (logs[:part], logs[part:-part], logs[-part:]))
    if last - first < math.log1p(least) or not first < middle < last:
        return False
    step = trend.slope(logs)
    about = [value - step * index for index, value in enumerate(logs)]
    return last - first > 2.0 * statistics.stdev(about) and trend.rising(logs) < chance


def _drift_alarm(
    now: Measurement, window: Sequence[Measurement], times: Sequence[float], beside: Sequence[str]
) -> Alarm:
    part = len(times) // 3
    low, high = statistics.median(times[:part]), statistics.median(times[-part:])
    kernels = len({one.kernel for one in window})
    against = " and ".join(beside)
    text = (
        f"{now.name} crept up by {high / low - 1.0:.0%} over {len(window)} runs and {_counted(kernels, 'version')}"
        f", {_ns(low)} → {_ns(high)} (medians of the first and the last third; slope of Theil and Sen, trend test of "
        f"Mann and Kendall), and no single run was a regression; "
        + (f"{against} did not" if against else "there is no reference beside it, so that it may be the runner")
    )
    advice = f"look at what changed between {_commit(window[0].run)} and {_commit(now.run)}"
    if window[0].run.commit and now.run.commit:
        first = window[0].run.commit[:10]
        advice += (
            f" (git log {first}..{now.run.commit[:10]}); to ask the guard about the whole way at once: "
            f"pytest --forge-guard --forge-base {first}"
        )
    return Alarm("drift", (now.target,), text, advice, now.run.machine.text)


# -- words ------------------------------------------------------------------------------------------------------------


def _ns(time_ns: float) -> str:
    return show(time_ns, "ns")


def _when(run: GuardRun) -> str:
    return f"{run.time[:10]} at {run.commit[:10]}" if run.commit else run.time[:10]


def _commit(run: GuardRun) -> str:
    return f"{run.commit[:10] or 'an unknown commit'} ({run.time[:10]})"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _own(count: int) -> str:
    return "its own" if count == 1 else "their own"


def _more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""
