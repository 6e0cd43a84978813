"""Is it slower? The guard's decision, from the blocks of a race. Pure: no clock, no process, standard library only.

How much, and how sure, is reckoned in :mod:`pytest_cudaforge.evaluation.comparison`: over fresh processes.

**Many questions.** A run asks hundreds. A regression needs the whole interval beyond the noise margin, a slowdown
worth a developer's time, and the same answer from an independent sitting: the tails multiply, (0.5 %)^2 for each
question even where margin and thresholds were nothing. Two sittings have to find it, each by itself, of two, or of
three where one of them could not tell; that at most triples the product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pytest_cudaforge.evaluation import comparison
from pytest_cudaforge.evaluation.comparison import Placement
from pytest_cudaforge.evaluation.timing import Block
from pytest_cudaforge.records import Race, Ratio

__all__ = [
    "Circumstances",
    "Finding",
    "GuardOutcome",
    "Promises",
    "Question",
    "Thresholds",
    "assess",
    "confirm",
    "describe",
    "process_values",
    "suspects",
    "unsettled",
    "usual",
]

#: What a kernel is held against: its version at the merge base, its reference in eager mode or compiled.
Question = Literal["base", "eager", "compile"]
GuardOutcome = Literal["pass", "regression", "inconclusive"]

_REFERENCES: tuple[Question, ...] = ("eager", "compile")
#: A suspicion is confirmed by the second, or by the third where one of the two could not tell.
MOST_SITTINGS = 3
#: One process cannot differ from another.
FEWEST_PROCESSES = 2


@dataclass(frozen=True)
class Thresholds:
    """A regression passes all of them. ``relative``: share of the base's time. ``noise``: what two sittings of one
    kernel differ by on this runner (``cudaforge calibrate`` measures it). ``promise_margin``: how far a speedup over
    the reference may fall below the manifest's.

    ``placement_ns`` and ``placement``: how much one process's time of a call differs from another's of the same
    program (standard deviation, of any call and as a share of it), known beforehand; it counts as
    ``prior_degrees`` processes."""

    relative: float = 0.03
    absolute_ns: float = 1_000.0
    noise: float = 0.005
    promise_margin: float = 0.10
    placement_ns: float = 120.0
    placement: float = 0.0005
    prior_degrees: float = 4.0

    @property
    def known(self) -> Placement:
        return Placement(self.placement_ns, self.placement, self.prior_degrees)


def usual(kind: str) -> Thresholds:
    """On a runner of ``kind`` ("cpu", "cuda") that nobody calibrated."""
    known = Placement.usual(kind)
    return Thresholds(noise=0.005 if kind == "cuda" else 0.02, placement_ns=known.ns, placement=known.share)


@dataclass(frozen=True)
class Promises:
    """What the manifest says of one workload: speedups over its reference, None where none was measured.
    ``incomparable``: why these figures say nothing here ("" where they do); then no more is asked than that the kernel
    still beats its reference."""

    eager: float | None = None
    compile: float | None = None
    incomparable: str = ""

    @classmethod
    def of(
        cls,
        eager: float | None,
        compile: float | None,
        *,
        measured_on: tuple[str, str],
        here: tuple[str, str],
    ) -> Promises:
        """``measured_on`` and ``here``: (name of the device, version of torch). A patch release of torch is the same
        torch; another minor one compiles, and dispatches, differently."""
        apart = []
        if measured_on[0] != here[0]:
            apart.append(f"on {measured_on[0] or 'an unknown device'}, this is {here[0]}")
        if _minor(measured_on[1]) != _minor(here[1]):
            apart.append(f"with torch {measured_on[1] or 'unknown'}, this is torch {here[1]}")
        return cls(eager, compile, "it was measured " + " and ".join(apart) if apart else "")

    def of_question(self, question: Question) -> float | None:
        return {"eager": self.eager, "compile": self.compile}.get(question)


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.partition("+")[0].split(".")[:2])


@dataclass(frozen=True)
class Finding:
    """One question about one workload, answered. ``slowdown``: candidate / base (1.0 is unchanged), as a Ratio whose
    ``speedup`` is that quotient; for a reference reference / candidate against ``promised`` (None: only whether the
    kernel still beats it was asked). ``lost_ns``: per call, against the base or what was promised.

    ``candidate_ns``, ``against_ns``: medians of a call, of the kernel and of what it is held against. ``processes``:
    that the interval rests on. ``below_reference``: the kernel is now slower than the reference it was to replace.
    ``beyond``: the measured value, whatever its interval, is a slowdown that would matter.
    ``text``: the answer in a sentence; ``advice``: what to do, "" where nothing is to be done."""

    question: Question
    workload: str
    what: Literal["forward", "backward"]
    outcome: GuardOutcome
    slowdown: Ratio
    lost_ns: float
    promised: float | None = None
    confirmed: bool = False
    text: str = ""
    candidate_ns: float = 0.0
    against_ns: float = 0.0
    processes: int = 0
    below_reference: bool = False
    beyond: bool = False
    advice: str = ""


#: What to do with a kernel that its reference outruns.
REFORGE_OR_FALL_BACK = (
    "re-forge it here (pytest --forge -k NAME), or fall back: without its entry in the manifest the reference runs"
)


# -- the decision ----------------------------------------------------------------------------------------------


def assess(race: Race, promises: Promises, thresholds: Thresholds) -> tuple[Finding, ...]:
    """Every question that the race's parties allow, answered from this sitting alone; a "regression" is a suspicion
    until :func:`confirm` agrees. Empty where there are no blocks of the candidate."""
    blocks = _usable(race)
    if not blocks or "candidate" not in blocks[0].parties:
        return ()
    findings = [_against_base(race, blocks, thresholds)] if "base" in blocks[0].parties else []
    for question in _REFERENCES:
        if question in blocks[0].parties:
            findings.append(_against_reference(race, blocks, question, promises, thresholds))
    return tuple(_calm(race, finding) for finding in _placed(_contradicted(findings, thresholds)))


def suspects(findings: Sequence[Finding]) -> bool:
    """Is a second sitting needed? For what looks like a regression, and for what could not be told from one."""
    return any(finding.outcome == "regression" or _doubtful(finding) for finding in findings)


def _doubtful(finding: Finding) -> bool:
    return finding.outcome == "inconclusive" and finding.beyond


def unsettled(sittings: Sequence[Sequence[Finding]]) -> bool:
    """May one more sitting turn what these said into a regression? Where the first suspects something, none excludes
    it, and two could still agree."""
    left = MOST_SITTINGS - len(sittings)
    return left > 0 and any(
        suspects(said[:1])
        and all(finding.outcome != "pass" for finding in said)
        and 2 - left <= sum(finding.outcome == "regression" for finding in said) < 2
        for said in _by_question(sittings)
        if len(said) == len(sittings)
    )


def confirm(first: Sequence[Finding], *more: Sequence[Finding]) -> tuple[Finding, ...]:
    """What independent sittings (fresh processes in each) say together, for every question of ``first``.

    A regression stands where two of them find it, each by itself, and then has the last one's figures: the first ones
    were looked at because they were high. Otherwise it is inconclusive. What the first did not suspect stays.
    """
    return tuple(_confirmed(said) for said in _by_question((first, *more)))


def _by_question(sittings: Sequence[Sequence[Finding]]) -> list[list[Finding]]:
    """What each sitting said of each question of the first one."""
    found = []
    for asked in sittings[0]:
        key = (asked.question, asked.workload, asked.what)
        found.append([one for said in sittings for one in said if (one.question, one.workload, one.what) == key])
    return found


def _confirmed(said: Sequence[Finding]) -> Finding:
    first, others = said[0], said[1:]
    slower = [finding for finding in said if finding.outcome == "regression"]
    if len(slower) > 1:
        earlier = "; ".join(f"an earlier sitting said {_amount(finding)}" for finding in said if finding != slower[-1])
        return replace(slower[-1], confirmed=True, text=f"{slower[-1].text}; {earlier}")
    if not slower or not suspects([first]):
        return first
    told = "; ".join(f"another sitting says {_amount(finding)}" for finding in others)
    text = f"not confirmed: {first.text}; {told or 'another sitting gave no answer'}"
    return replace(first, outcome="inconclusive", text=text, advice="", below_reference=False)


def _usable(race: Race) -> tuple[Block, ...]:
    return comparison.usable([Block(block.process, block.ns, block.foreign) for block in race.blocks], race.clock)


def _known(race: Race, thresholds: Thresholds) -> Placement:
    return thresholds.known.at_power_limit(race.clock) if race.capped else thresholds.known


def _against_base(race: Race, blocks: Sequence[Block], thresholds: Thresholds) -> Finding:
    slowdown, processes = comparison.compare(blocks, "candidate", "base", race.clock, _known(race, thresholds))
    candidate_ns, base_ns = (comparison.typical_ns(blocks, party, race.clock) for party in ("candidate", "base"))
    finding = Finding(
        question="base",
        workload=race.workload,
        what=race.what,
        outcome=_outcome(slowdown, base_ns, thresholds.noise, thresholds, processes),
        beyond=slowdown.speedup >= 1.0 + _worth(base_ns, thresholds.noise, thresholds),
        slowdown=slowdown,
        lost_ns=base_ns * (slowdown.speedup - 1.0),
        candidate_ns=candidate_ns,
        against_ns=base_ns,
        processes=processes,
    )
    return replace(finding, text=f"{_amount(finding)} than at the base: {_times(finding)}{_doubt(finding)}")


def _against_reference(
    race: Race, blocks: Sequence[Block], question: Question, promises: Promises, thresholds: Thresholds
) -> Finding:
    """Slower than promised, beyond the margin? Slower than the reference itself? The worse answer is the finding."""
    speedup, processes = comparison.compare(blocks, question, "candidate", race.clock, _known(race, thresholds))
    candidate_ns, reference_ns = (comparison.typical_ns(blocks, party, race.clock) for party in ("candidate", question))
    promised = None if promises.incomparable else promises.of_question(question)
    expected_ns = reference_ns / (promised if promised is not None else 1.0)
    behind = _inverse(speedup, promised if promised is not None else 1.0)
    margin = max(thresholds.noise, 1.0 / (1.0 - thresholds.promise_margin) - 1.0 if promised is not None else 0.0)
    # What was slower than its reference when it was merged is so still; and where nothing was ever measured (a
    # reference that torch.compile could not take then), nothing is asked now.
    must_beat = (promises.of_question(question) or 0.0) >= 1.0
    against_itself = _outcome(_inverse(speedup, 1.0), reference_ns, thresholds.noise, thresholds, processes)
    against_promise = _outcome(behind, expected_ns, margin, thresholds, processes)
    below = must_beat and against_itself == "regression"
    beyond = behind.speedup >= 1.0 + _worth(expected_ns, margin, thresholds)
    if promised is None:
        outcome = against_itself if must_beat else "pass"
    else:
        outcome = "regression" if below else against_promise
    finding = Finding(
        question=question,
        workload=race.workload,
        what=race.what,
        outcome=outcome,
        slowdown=speedup,
        lost_ns=expected_ns * (behind.speedup - 1.0),
        promised=promised,
        candidate_ns=candidate_ns,
        against_ns=reference_ns,
        processes=processes,
        below_reference=below,
        beyond=beyond,
        advice=_advice(outcome, below),
    )
    asked = _asked(finding, promises, thresholds, must_beat)
    return replace(finding, text=f"{_amount(finding)}: {_times(finding)}; {asked}{_doubt(finding)}")


def _outcome(slowdown: Ratio, against_ns: float, margin: float, thresholds: Thresholds, processes: int) -> GuardOutcome:
    """ "regression": beyond the margin with all of the interval, and by more than both thresholds. "pass": the interval
    leaves no room for a slowdown beyond both."""
    if processes < FEWEST_PROCESSES:
        return "inconclusive"
    worth = _worth(against_ns, margin, thresholds)
    if slowdown.low > 1.0 + margin and slowdown.speedup >= 1.0 + worth:
        return "regression"
    return "pass" if slowdown.high < 1.0 + worth else "inconclusive"


def _worth(against_ns: float, margin: float, thresholds: Thresholds) -> float:
    """The share by which a call has to be slower for it to matter."""
    return max(thresholds.relative, margin, thresholds.absolute_ns / against_ns)


def _advice(outcome: GuardOutcome, below: bool) -> str:
    if outcome != "regression":
        return ""
    return REFORGE_OR_FALL_BACK if below else "see what changed, or forge it again and merge what it promises then"


def _contradicted(findings: Sequence[Finding], thresholds: Thresholds) -> list[Finding]:
    """A kernel that got slower breaks what it promised against every reference, and by as much. Where the same blocks
    say that it keeps another promise, by more than the margins of both, the reference's time is another than when the
    promise was made (it was slowed down then, or is faster now), and nothing is said of the kernel."""
    kept = {
        finding.question: finding.promised / finding.slowdown.low
        for finding in findings
        if finding.promised is not None and finding.outcome == "pass"
    }
    return [_doubted(finding, kept, thresholds) for finding in findings]


def _doubted(finding: Finding, kept: Mapping[Question, float], thresholds: Thresholds) -> Finding:
    if finding.promised is None or finding.outcome != "regression" or finding.below_reference:
        return finding
    least = finding.promised / finding.slowdown.high
    against = [question for question, most in kept.items() if least > most / (1.0 - thresholds.promise_margin) ** 2]
    if not against:
        return finding
    names = {"eager": "its eager reference", "compile": "torch.compile"}
    text = (
        f"nothing was decided: it is as fast as promised against {names[against[0]]}, so {names[finding.question]} is "
        f"faster here than when the promise was made, not the kernel slower; {finding.text}"
    )
    return replace(finding, outcome="inconclusive", advice="", text=text)


def _placed(findings: Sequence[Finding]) -> list[Finding]:
    """A broken promise that the base breaks as well is not of this change's making: say so."""
    base = next((finding for finding in findings if finding.question == "base"), None)
    if base is None or base.outcome != "pass":
        return list(findings)
    note = "; against its base nothing was lost: look at the toolchain or the machine, not at this change"
    return [
        replace(finding, text=finding.text + note)
        if finding.question != "base" and finding.outcome == "regression"
        else finding
        for finding in findings
    ]


def _calm(race: Race, finding: Finding) -> Finding:
    """A disturbed race decides nothing by events, whose device may have been slowed down for one party alone. By the
    supervisor's clock the interval knows: it is of what the calls take where nobody disturbs them, and is wide where
    that was hardly seen. But it knows of this race alone: busy cores slow a reference and a kernel down unequally, and
    a promise was measured at another time, among other processes."""
    if not race.disturbed:
        return finding
    of_this_race = finding.promised is None or finding.below_reference
    if race.clock == "supervisor" and (of_this_race or finding.outcome != "regression"):
        return replace(finding, text=f"{finding.text} (while it was measured {race.disturbed})")
    text = f"nothing was decided: {race.disturbed}; {finding.text}"
    # By this clock another sitting may be a calm one.
    beyond = finding.beyond and race.clock == "supervisor"
    return replace(finding, outcome="inconclusive", below_reference=False, beyond=beyond, advice="", text=text)


# -- the arithmetic of it --------------------------------------------------------------------------------------


def process_values(race: Race) -> list[float]:
    """Log of candidate / base of each process of a race by itself; empty without both."""
    blocks = _usable(race)
    if not blocks or not {"candidate", "base"} <= set(blocks[0].parties):
        return []
    return comparison.process_values(blocks, "candidate", "base", race.clock)


def _inverse(speedup: Ratio, promised: float) -> Ratio:
    """How many times longer than promised, from how many times faster than the reference."""
    return Ratio(promised / speedup.speedup, promised / speedup.high, promised / speedup.low, speedup.confidence)


# -- in words --------------------------------------------------------------------------------------------------


def _amount(finding: Finding) -> str:
    """How much and how sure, in a few words."""
    ratio = finding.slowdown
    if finding.question != "base":
        name = {"eager": "the eager reference", "compile": "torch.compile"}[finding.question]
        faster = f"{_digits(ratio.speedup)}x {name}"
        return f"{faster} (99 % interval {_digits(ratio.low)} to {_digits(ratio.high)})"
    low, high = ratio.low - 1.0, ratio.high - 1.0
    if ratio.speedup >= 1.0:
        return f"{_percent(ratio.speedup - 1.0)} slower (99 % interval {_percent(low)} to {_percent(high)})"
    return f"{_percent(1.0 - ratio.speedup)} faster (99 % interval {_percent(-high)} to {_percent(-low)})"


def _asked(finding: Finding, promises: Promises, thresholds: Thresholds, must_beat: bool) -> str:
    if finding.promised is not None:
        asked = f"promised were {_digits(finding.promised)}x, less {_percent(thresholds.promise_margin, 0)}"
    elif promises.of_question(finding.question) is None:
        asked = "the manifest promises nothing, so nothing is asked"
    elif not must_beat:
        asked = "it was no faster when it was merged"
    else:
        asked = f"what the manifest promises does not hold here ({promises.incomparable}): asked is that it still wins"
    return f"{asked}; it is now slower than what it replaces" if finding.below_reference else asked


def _times(finding: Finding) -> str:
    return f"{duration(finding.against_ns, 4)} -> {duration(finding.candidate_ns, 4)} a call"


def _doubt(finding: Finding) -> str:
    if finding.processes < FEWEST_PROCESSES:
        return "; one process cannot tell"
    return "; the interval leaves room for a slowdown that matters" if finding.outcome == "inconclusive" else ""


@dataclass(frozen=True)
class Circumstances:
    """What a failure is told with. ``kernel``: the item's id. ``base``: the ref and commit it is held against, ""
    where there is none. ``machine``: device, driver, torch, as one line. ``command``: reproduces it. ``runner``: what
    calibration says of this runner, "" where it was never asked."""

    kernel: str
    machine: str
    command: str
    base: str = ""
    runner: str = ""


def describe(finding: Finding, circumstances: Circumstances) -> str:
    """One finding as the text of a failure: how much, how sure, since when, where, how to see it again."""
    question = {
        "base": "its version at the merge base",
        "eager": "its eager reference",
        "compile": "its reference under torch.compile",
    }[finding.question]
    sittings = "independent sittings, two that agree," if finding.confirmed else "one sitting"
    lines = [
        f"{circumstances.kernel} [{finding.workload}, {finding.what}] against {question}: {finding.outcome}",
        f"  how much:  {finding.text}",
        f"  lost:      {_signed(finding.lost_ns)} a call",
        f"  how sure:  {sittings} of {finding.processes} processes each; the interval is the last one's",
        f"  since:     {circumstances.base or 'no base to hold it against'}",
        f"  machine:   {circumstances.machine}",
    ]
    lines += [f"  runner:    {circumstances.runner}"] if circumstances.runner else []
    lines += [f"  reproduce: {circumstances.command}"]
    lines += [f"  to do:     {finding.advice}"] if finding.advice else []
    return "\n".join(lines)


def duration(ns: float, digits: int = 3) -> str:
    """A time with so many digits and its unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{_digits(ns / size, digits)} {unit}"
    return f"{_digits(ns, digits)} ns"


def _signed(ns: float) -> str:
    return duration(ns) if ns >= 0 else f"nothing ({duration(-ns)} gained)"


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _digits(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"
