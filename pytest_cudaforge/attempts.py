"""What earlier rounds tried, expected and measured: a short memory, so that a failed idea does not come back. Pure.

The idea is K-Search's and KernelAgent's (a plan outlives the code that carried it out badly); an idea that was never
carried out without an error is remembered, but not held against whoever proposes it again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_cudaforge.prompts import sheets
from pytest_cudaforge.records import Feedback, Round
from pytest_cudaforge.strategies import speedup_of

__all__ = ["Attempt", "fingerprint", "gain_of", "remember", "render", "render_chain", "repeated"]

#: Less than this is nothing: two sittings on one machine differ by as much.
NOTHING_GAINED = 1.02
_METHOD_CHARACTERS = 200
#: From this share of common words on, two ideas are one in other words.
_ALIKE = 0.6


@dataclass(frozen=True)
class Attempt:
    """One optimization. ``expected`` and ``measured`` are factors over the ``parent`` round's time; ``outcome`` is what
    became of it in words. ``measured`` None: no correct code came of it, nor of the corrections that followed.
    ``failed``: correct code showed that the idea brings nothing."""

    number: int
    parent: int
    method: str
    place: str
    expected: float | None
    measured: float | None
    outcome: str
    failed: bool


def remember(rounds: Sequence[Round]) -> tuple[Attempt, ...]:
    """The optimizations among ``rounds``, in order; one that broke and was mended counts as what was mended."""
    return tuple(
        _attempt(turn, rounds)
        for turn in rounds
        if turn.kind == "optimization" and turn.parent is not None and turn.feedback is not None
    )


def gain_of(turn: Round, start: Round) -> float | None:
    """How many times as fast ``turn`` is as ``start``: by the sitting that held both, else by their speedups over the
    baselines; None where one of them was not timed."""
    timing = turn.evaluation.timing if turn.evaluation is not None else None
    before = start.evaluation.timing if start.evaluation is not None else None
    if timing is None or before is None:
        return None
    if turn.incumbent == start.number and timing.vs_incumbent is not None:
        return timing.vs_incumbent.speedup
    return speedup_of(timing) / speedup_of(before) if speedup_of(before) else None


def render(attempts: Sequence[Attempt]) -> list[str]:
    """One line an attempt, the latest first."""
    return [_line(attempt) for attempt in reversed(attempts)]


def _line(attempt: Attempt) -> str:
    """What came of it first: the end of a long method may be cut off."""
    place = f" in {attempt.place}" if attempt.place else ""
    expected = "" if attempt.expected is None else f", expected {attempt.expected:.3g}x"
    known = f"- round {attempt.number}, from round {attempt.parent}{place}{expected}: {attempt.outcome}"
    return f"{known} <- {_cut(attempt.method)}"


def _cut(method: str) -> str:
    text = " ".join(method.split())
    return text if len(text) <= _METHOD_CHARACTERS else text[:_METHOD_CHARACTERS].rpartition(" ")[0] + "..."


def render_chain(rounds: Sequence[Round], subject: int) -> list[str]:
    """One line for each round of any kind: what was tried, and what came of it. ``subject`` is the one in question."""
    return [_turn(turn, rounds) + (" [the candidate above]" if turn.number == subject else "") for turn in rounds]


def _turn(turn: Round, rounds: Sequence[Round]) -> str:
    start = f"from round {turn.parent}" if turn.parent is not None else "first candidate"
    said = turn.feedback
    what = "" if said is None else f": {_cut(said.why if said.kind == 'optimization' else said.action)}"
    before = next((entry for entry in rounds if entry.number == turn.parent), None)
    return f"- round {turn.number} ({start}){what} -> {_outcome(turn, gain_of(turn, before) if before else None)}"


def _attempt(turn: Round, rounds: Sequence[Round]) -> Attempt:
    assert turn.feedback is not None and turn.parent is not None  # remember() saw to it
    end, start = _mended(turn, rounds), next((entry for entry in rounds if entry.number == turn.parent), None)
    measured = gain_of(end, start) if start is not None else None
    said = turn.feedback
    outcome = _outcome(end, measured)
    if end is not turn:
        outcome = f"{_failure(turn)}; corrected in round {end.number}: {outcome}"
    failed = _brought_nothing(end, measured)
    return Attempt(turn.number, turn.parent, said.why, said.place, said.expected, measured, outcome, failed)


def _brought_nothing(turn: Round, measured: float | None) -> bool:
    """A sitting among busy processes shows nothing."""
    timing = turn.evaluation.timing if turn.evaluation is not None else None
    disturbed = timing is not None and timing.decision == "disturbed"
    return measured is not None and measured < NOTHING_GAINED and not disturbed


def _mended(turn: Round, rounds: Sequence[Round]) -> Round:
    """The last of the corrections that followed ``turn``, or itself."""
    end = turn
    for entry in rounds:
        if entry.number > end.number and entry.kind == "correction" and entry.parent == end.number:
            end = entry
    return end


def _outcome(turn: Round, measured: float | None) -> str:
    if turn.duplicate_of is not None:
        return f"the same code as round {turn.duplicate_of}"
    timing = turn.evaluation.timing if turn.evaluation is not None and turn.evaluation.passed else None
    if timing is None:
        return _failure(turn)
    gain = "correct" if measured is None else f"measured {measured:.3g}x"
    times = ", ".join(sheets.render_ns(entry.candidate.median_ns) for entry in timing.workloads[:3])
    doubt = f" ({timing.decision})" if timing.decision in ("inconclusive", "disturbed") else ""
    verdict = ", it brought nothing" if _brought_nothing(turn, measured) else ""
    return f"{gain}, {times}{doubt}{verdict}"


def _failure(turn: Round) -> str:
    if turn.evaluation is None:
        return f"no candidate ({sheets.shorten(turn.failure, 100) or 'the reply could not be used'})"
    if turn.evaluation.passed:
        return "correct, not timed"
    return f"{turn.evaluation.status.value}: {sheets.shorten(' '.join(turn.evaluation.reason.split()), 120)}"


# -- the same idea again -----------------------------------------------------------------------------------------

_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """a all also an and any are as at be because been before but by can could do does each every expect expected
        for from gain gives has have here if in instead into is it its just less make makes may more most much must
        new no not now of off on once one only or other our out over per reduce remove removes same should so some
        such take than that the their them then there these they this those through to two up use used using was way
        we were what when where which while will with without would""",
    )
)
#: The longest first.
_ENDINGS = re.findall(
    r"\w+", "isation ization ations ising izing ation ings ised ized ing ers ies ise ize ed es er s e y"
)


def fingerprint(method: str, place: str = "") -> frozenset[str]:
    """The significant words of an idea, cut to their stems, with its numbers: 512 threads are not 256."""
    words = re.findall(r"[a-z_][a-z0-9_]*|\d+", f"{method} {place}".lower())
    return frozenset(_stem(word) for word in words if word not in _STOP_WORDS)


def repeated(feedback: Feedback, attempts: Sequence[Attempt]) -> Attempt | None:
    """The failed attempt that ``feedback`` proposes once more, or None. Who names that round knows of it and may."""
    said = f"{feedback.why} {feedback.action}"
    for attempt in reversed(attempts):
        if not attempt.failed or re.search(rf"\brounds? (?:\d+(?:, | and ))*{attempt.number}\b", said):
            continue
        if _alike(fingerprint(feedback.why), fingerprint(attempt.method)) and _near(feedback.place, attempt.place):
            return attempt
    return None


def _alike(one: frozenset[str], other: frozenset[str]) -> bool:
    numbers, others = ({word for word in words if word.isdigit()} for words in (one, other))
    if numbers and others and numbers != others:
        return False
    union = one | other
    return bool(union) and len(one & other) / len(union) >= _ALIKE


#: What a place says beside the names of code.
_PLACE_WORDS = frozenset({"the", "of", "in", "and", "a", "its", "loop", "launch", "kernel", "function", "plan", "line"})
_PLACE_WORDS |= {"lines", "py", "cu", "cpp", "s", "to", "inner", "outer", "first", "second", "last"}


def _near(one: str, other: str) -> bool:
    """Whether two places may be the same: unknown ones may, and lines of one file move from round to round."""
    names, others = (set(re.findall(r"[A-Za-z_]\w*", place)) - _PLACE_WORDS for place in (one, other))
    return not names or not others or bool(names & others)


def _stem(word: str) -> str:
    if word.isdigit():
        return word
    ending = next((end for end in _ENDINGS if word.endswith(end) and len(word) - len(end) >= 4), "")
    return word[: len(word) - len(ending)] if ending else word
