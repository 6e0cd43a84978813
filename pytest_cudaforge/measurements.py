"""What the guard measured of one workload, as it is kept: one line of JSON each. Pure: no clock, no file, no process.

A line names everything that it was measured with (commit, kernel, machine, toolchain), so that lines of different runs,
branches and runners can lie in one file in any order. Its format is a contract: within a version fields are added,
never renamed or removed, and unknown ones are read over.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_cudaforge.evaluation import timing
from pytest_cudaforge.guard import Finding, GuardOutcome
from pytest_cudaforge.machine import Machine, Toolchain
from pytest_cudaforge.records import Race, Ratio, Sample

__all__ = ["FORMAT", "REFERENCES", "VERSION", "GuardRun", "Judgement", "Measurement", "line_of", "measured", "parse"]

FORMAT, VERSION = "cudaforge-history", 1
#: Parties of a race that a change of the repository's kernels does not touch.
REFERENCES = ("eager", "compile")
_WHAT = ("forward", "backward")
_OUTCOMES: tuple[GuardOutcome, ...] = ("regression", "inconclusive", "pass")


@dataclass(frozen=True)
class GuardRun:
    """One run of the guard: what all its measurements share. ``time``: when it began, UTC, ``2026-11-21T22:50:30Z``.
    ``id`` tells runs of one second apart; commits are hex digests, "" outside of a repository."""

    id: str
    time: str
    commit: str
    base_commit: str
    machine: Machine


@dataclass(frozen=True)
class Judgement:
    """The guard's answer to one question, without its text; ``ratio`` as :class:`~pytest_cudaforge.guard.Finding`'s
    ``slowdown``: candidate / base, or reference / candidate."""

    question: str
    outcome: str
    ratio: Ratio
    lost_ns: float
    promised: float | None = None
    confirmed: bool = False


@dataclass(frozen=True)
class Measurement:
    """One workload in one run. ``kernel``: digest of the candidate, or of a plain module's source; ``target_digest``:
    of the target's source, since another reference has another time. ``parties``: per-call times by party, spread over
    ``processes`` fresh processes. ``disturbed``: why nothing may be read from it."""

    run: GuardRun
    target: str
    target_digest: str
    kernel: str
    language: str
    workload: str
    what: str
    clock: str
    parties: tuple[tuple[str, Sample], ...]
    processes: int
    outcome: str
    judgements: tuple[Judgement, ...] = ()
    disturbed: str = ""

    @property
    def series(self) -> tuple[str, str, str, str]:
        """What is followed over time, machine by machine: target, language, workload, forward or backward."""
        return (self.target, self.language, self.workload, self.what)

    @property
    def name(self) -> str:
        """``layers.py::RMSNorm [w0]``, followed by ``backward`` where it is that."""
        return f"{self.target} [{self.workload}]" + (" backward" if self.what == "backward" else "")

    @property
    def references(self) -> tuple[str, ...]:
        return tuple(party for party, _ in self.parties if party in REFERENCES)

    def median_ns(self, party: str) -> float | None:
        sample = self.sample(party)
        return None if sample is None else sample.median_ns

    def sample(self, party: str) -> Sample | None:
        return next((sample for name, sample in self.parties if name == party), None)

    def speedup(self, reference: str) -> Ratio | None:
        """Reference / candidate with its 99 % interval, as the guard found it."""
        return next((each.ratio for each in self.judgements if each.question == reference), None)


def measured(
    race: Race,
    findings: Sequence[Finding],
    *,
    run: GuardRun,
    target: str,
    target_digest: str,
    kernel: str,
    language: str,
) -> Measurement | None:
    """What is kept of a race; None where it has no block to keep. ``findings`` may be those of all workloads."""
    blocks = timing.quiet_blocks([timing.Block(block.process, block.ns, block.foreign) for block in race.blocks])
    if not blocks:
        return None
    own = [finding for finding in findings if (finding.workload, finding.what) == (race.workload, race.what)]
    parties = blocks[0].parties
    outcomes = {finding.outcome for finding in own} or {"pass"}
    return Measurement(
        run=run,
        target=target,
        target_digest=target_digest,
        kernel=kernel,
        language=language,
        workload=race.workload,
        what=race.what,
        clock=race.clock,
        parties=tuple((party, _sample(blocks, party)) for party in parties),
        processes=len({block.process for block in blocks}),
        outcome=next(outcome for outcome in _OUTCOMES if outcome in outcomes),
        judgements=tuple(_judgement(finding) for finding in own),
        disturbed=race.disturbed,
    )


def _sample(blocks: Sequence[timing.Block], party: str) -> Sample:
    found = timing.sample_of([block.of(party) for block in blocks], len(blocks))
    return dataclasses.replace(
        found, **{name: round(getattr(found, name), 2) for name in ("median_ns", "low_ns", "high_ns")}
    )


def _judgement(finding: Finding) -> Judgement:
    return Judgement(
        finding.question,
        finding.outcome,
        _rounded(finding.slowdown),
        round(finding.lost_ns, 2),
        finding.promised,
        finding.confirmed,
    )


def _rounded(ratio: Ratio) -> Ratio:
    return Ratio(round(ratio.speedup, 5), round(ratio.low, 5), round(ratio.high, 5), ratio.confidence)


# -- one line ---------------------------------------------------------------------------------------------------------


def line_of(measurement: Measurement) -> str:
    """The line, without its end."""
    run = measurement.run
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "time": run.time,
        "run": run.id,
        "commit": run.commit,
        "base_commit": run.base_commit,
        "target": measurement.target,
        "target_digest": measurement.target_digest,
        "kernel": measurement.kernel,
        "language": measurement.language,
        "workload": measurement.workload,
        "what": measurement.what,
        "clock": measurement.clock,
        "outcome": measurement.outcome,
        "disturbed": measurement.disturbed,
        "processes": measurement.processes,
        "parties": {party: dataclasses.asdict(sample) for party, sample in measurement.parties},
        "findings": [_finding_data(judgement) for judgement in measurement.judgements],
        "machine": {**dataclasses.asdict(run.machine), "key": run.machine.key},
    }
    return json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def _interval(ratio: Ratio) -> list[float | None]:
    """[value, low, high]; null where there is no bound."""
    return [value if math.isfinite(value) else None for value in (ratio.speedup, ratio.low, ratio.high)]


def _finding_data(judgement: Judgement) -> dict[str, Any]:
    data: dict[str, Any] = {
        "question": judgement.question,
        "outcome": judgement.outcome,
        "ratio": _interval(judgement.ratio),
        "lost_ns": judgement.lost_ns if math.isfinite(judgement.lost_ns) else None,
    }
    data |= {"promised": judgement.promised} if judgement.promised is not None else {}
    return data | ({"confirmed": True} if judgement.confirmed else {})


def parse(data: Any) -> Measurement:
    """The measurement that a line's JSON ``data`` holds. Raises ``ValueError`` that says what is wrong with it."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise ValueError("not a measurement of the guard")
    if data.get("version") != VERSION:
        raise ValueError(f"version {data.get('version')!r} of the format")
    parties = tuple((_text(name), _parse_sample(value)) for name, value in _items(data, "parties"))
    if "candidate" not in dict(parties):
        raise ValueError("no time of the candidate")
    return Measurement(
        run=_parse_run(data),
        target=_field(data, "target", str),
        target_digest=_field(data, "target_digest", str),
        kernel=_field(data, "kernel", str),
        language=_field(data, "language", str),
        workload=_field(data, "workload", str),
        what=_one_of(data, "what", _WHAT),
        clock=_field(data, "clock", str),
        parties=parties,
        processes=_field(data, "processes", int),
        outcome=_one_of(data, "outcome", _OUTCOMES),
        judgements=tuple(_parse_judgement(item) for item in _field(data, "findings", list)),
        disturbed=_field(data, "disturbed", str),
    )


def _parse_run(data: Mapping[str, Any]) -> GuardRun:
    machine = _field(data, "machine", dict)
    chain = _field(machine, "toolchain", dict)
    known = _machine(
        tuple(_field(machine, name, str) for name in ("device", "arch", "cpu", "device_id", "kernel", "python")),
        _field(machine, "cores", int),
        tuple(_field(chain, field.name, str, "") for field in dataclasses.fields(Toolchain)),
    )
    identity, time, commit, base = (_field(data, name, str) for name in ("run", "time", "commit", "base_commit"))
    return GuardRun(identity, time, commit, base, known)


@functools.lru_cache(maxsize=256)
def _machine(names: tuple[str, ...], cores: int, versions: tuple[str, ...]) -> Machine:
    # One object for all its lines: a file has many lines and few machines.
    device, arch, cpu, device_id, kernel, python = names
    return Machine(device, arch, cpu, cores, device_id, kernel, python, Toolchain(*versions))


def _parse_sample(data: Any) -> Sample:
    if not isinstance(data, dict):
        raise ValueError("a party without its times")
    get = data.get
    median, low = _number(get("median_ns"), "median_ns"), _number(get("low_ns"), "low_ns")
    high = _number(get("high_ns"), "high_ns")
    if median <= 0 or low <= 0 or high <= 0:
        raise ValueError("a time that is not positive")
    return Sample(median, low, high, _field(data, "samples", int), _field(data, "blocks", int))


def _parse_judgement(data: Any) -> Judgement:
    if not isinstance(data, dict):
        raise ValueError("a finding that is no object")
    promised, lost = data.get("promised"), data.get("lost_ns")
    return Judgement(
        _field(data, "question", str),
        _one_of(data, "outcome", _OUTCOMES),
        _parse_ratio(data.get("ratio")),
        math.nan if lost is None else _number(lost, "lost_ns"),
        None if promised is None else _number(promised, "promised"),
        data.get("confirmed") is True,
    )


def _parse_ratio(data: Any) -> Ratio:
    if not isinstance(data, list) or len(data) != 3:
        raise ValueError("an interval that is not [value, low, high]")
    value, low, high = data
    return Ratio(
        math.nan if value is None else _number(value, "a ratio"),
        0.0 if low is None else _number(low, "a bound"),
        math.inf if high is None else _number(high, "a bound"),
    )


def _field(data: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = data.get(name, default)
    if type(value) is not kind:
        raise ValueError(f"{name} is {'missing' if value is None else f'no {kind.__name__}'}")
    return value


def _one_of(data: Mapping[str, Any], name: str, known: Sequence[str]) -> Any:
    value = data.get(name)
    if value not in known:
        raise ValueError(f"{name} is none of {', '.join(known)}")
    return value


def _items(data: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    return list(_field(data, name, dict).items())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name that is no text")
    return value


def _number(value: Any, name: str) -> float:
    if (type(value) is not float and type(value) is not int) or not math.isfinite(value):
        raise ValueError(f"{name} is no finite number")
    return float(value)
