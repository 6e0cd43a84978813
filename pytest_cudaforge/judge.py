"""The Judge: evidence -> prompt, reply -> Feedback. Pure; it advises and never decides whether a candidate passes.

A reply goes back once: where it cannot be read, where it claims figures that the evidence does not hold, names no
place in the code, or proposes what was tried and brought nothing. What is still doubtful then is used, and noted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_cudaforge import attempts, claims, figures
from pytest_cudaforge.chat import Message
from pytest_cudaforge.coder import dialect
from pytest_cudaforge.errors import ReplyError
from pytest_cudaforge.evidence import page
from pytest_cudaforge.prompts import fence, sheets
from pytest_cudaforge.prompts import render as fill
from pytest_cudaforge.records import (
    Baseline,
    Candidate,
    Depth,
    DeviceFacts,
    Evaluation,
    Feedback,
    Round,
    Target,
    TargetFacts,
)

__all__ = ["SCHEMA", "JudgeEvidence", "Reading", "doubts", "evidence", "parse", "read", "render", "render_repair"]

Kind = Literal["correction", "optimization"]

#: The keys of a reply, in the order of Feedback's fields issue, why, action.
_KEYS: dict[str, tuple[str, str, str]] = {
    "correction": ("issue", "why", "fix"),
    "optimization": ("bottleneck", "method", "plan"),
}
MAX_VALUE_CHARACTERS = 3000
#: Beyond this a reply is no answer, and looking for objects in it would take time that grows with its square.
MAX_REPLY_CHARACTERS = 100_000


#: How an object begins; a decoder's error about anything else costs as much as the text before it.
_BEGUN = re.compile(r'\{\s*["}]')
_TEXT = {"type": "string"}


def _schema(**properties: Any) -> dict[str, Any]:
    # Strict structured output wants every property required and no others.
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


#: JSON schema of a reply, by kind of feedback: what goes into ``ChatRequest.schema``.
SCHEMA: Mapping[str, Mapping[str, Any]] = {
    "correction": _schema(issue=_TEXT, why=_TEXT, fix=_TEXT),
    "optimization": _schema(
        bottleneck=_TEXT,
        method=_TEXT,
        place=_TEXT,
        plan=_TEXT,
        expected_speedup={"type": "number"},
        cites={"type": "array", "items": _TEXT},
    ),
}


@dataclass(frozen=True)
class JudgeEvidence:
    """All the Judge is told. ``subject`` is the round under review (with candidate and evaluation, profile included),
    ``attempts`` the other rounds, of which it sees one line each. ``depth`` "full": it is asked to plan anew."""

    kind: Kind
    language: str
    target: Target
    facts: TargetFacts
    device: DeviceFacts
    baselines: tuple[Baseline, ...]
    allow: tuple[str, ...]
    subject: Round
    attempts: tuple[Round, ...] = ()
    depth: Depth = "quick"


def evidence(
    target: Target,
    facts: TargetFacts,
    device: DeviceFacts,
    baselines: Sequence[Baseline],
    *,
    language: str,
    kind: Kind,
    subject: Round,
    rounds: Sequence[Round] = (),
    allow: Sequence[str] | None = None,
    depth: Depth = "quick",
) -> JudgeEvidence:
    """Built by the loop for the round that the strategy proposed as parent.

    Raises ``ValueError`` where ``subject`` has no candidate or no evaluation: there is nothing to review.
    """
    if subject.candidate is None or subject.evaluation is None:
        raise ValueError(f"round {subject.number} has no evaluated candidate to review")
    allowed = tuple(facts.allow if allow is None else allow)
    return JudgeEvidence(
        kind, language, target, facts, device, tuple(baselines), allowed, subject, tuple(rounds), depth
    )


# -- the prompt --------------------------------------------------------------------------------------------------


def render(told: JudgeEvidence) -> tuple[Message, ...]:
    """System and user message for ``told.kind``."""
    said = dialect(told.language)
    system = fill(f"judge_{told.kind}_system", title=said.title, source_name=said.source_name)
    user = _correction(told) if told.kind == "correction" else _optimization(told)
    return (Message("system", system), Message("user", user))


def render_repair(messages: Sequence[Message], reply: str, error: ReplyError) -> tuple[Message, ...]:
    """The one repair round: the conversation so far, the reply, and what was wrong with it."""
    request = fill("judge_repair", problem=error.what, expected=error.expected or "one JSON object")
    return (*messages, Message("assistant", sheets.shorten(reply, 6000) or "(empty)"), Message("user", request))


def _correction(told: JudgeEvidence) -> str:
    evaluation = _evaluation(told)
    # What led here matters when a fix did not take; other lines of attack do not.
    number, parent = told.subject.number, told.subject.parent
    chain = [turn for turn in told.attempts if turn.number in (number, parent)] if parent is not None else []
    earlier = "\n".join(attempts.render_chain(chain, number))
    return fill(
        "judge_correction",
        **_reference(told),
        module=sheets.render_module(told.facts.module),
        evidence=sheets.render_verdict(evaluation),
        attempts=f"Earlier attempts:\n{fence(earlier, 'text')}" if earlier else "",
    )


def _optimization(told: JudgeEvidence) -> str:
    return fill(
        "judge_optimization",
        **_reference(told),
        evidence=_page(told),
        replan=_replan(told) if told.depth == "full" else "",
    )


def _replan(told: JudgeEvidence) -> str:
    profile = _evaluation(told).profile
    return fill("judge_replan", basis=", from this full profile" if profile and profile.depth == "full" else "").strip()


def _page(told: JudgeEvidence) -> str:
    return page(_evaluation(told), told.baselines, rounds=told.attempts).text


def _reference(told: JudgeEvidence) -> dict[str, str]:
    return {
        "name": told.target.qualname,
        "source": fence(told.target.source, "python"),
        "workloads": sheets.render_workloads(told.facts.workloads),
        "contract": sheets.render_contract(told.facts, told.allow),
        "device": sheets.render_device(told.device),
        "files": sheets.render_files(_candidate(told)),
    }


def _candidate(told: JudgeEvidence) -> Candidate:
    assert told.subject.candidate is not None  # evidence() saw to it
    return told.subject.candidate


def _evaluation(told: JudgeEvidence) -> Evaluation:
    assert told.subject.evaluation is not None  # evidence() saw to it
    return told.subject.evaluation


# -- the reply ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """``feedback`` None: the reply could not be read. ``problem``: why it goes back, None where nothing is wrong."""

    feedback: Feedback | None
    problem: ReplyError | None = None


def read(text: str, told: JudgeEvidence) -> Reading:
    """The feedback in a reply, with whatever is wrong with it."""
    try:
        feedback = parse(text, told.kind)
    except ReplyError as error:
        return Reading(None, error)
    found = doubts(feedback, told)
    problem = ReplyError("; ".join(found), expected=_EXPECTED) if found else None
    return Reading(dataclasses.replace(feedback, doubts=found), problem)


_EXPECTED = (
    "figures as they stand in the evidence, or with their working; a place that the code has; and an idea that did not "
    "fail yet, or the round named in which it did and what was wrong with it there"
)


def doubts(feedback: Feedback, told: JudgeEvidence) -> tuple[str, ...]:
    """What a program can say against an optimization's feedback; nothing against a correction's."""
    if feedback.kind != "optimization":
        return ()
    return tuple(_doubts(feedback, told))


def _doubts(feedback: Feedback, told: JudgeEvidence) -> Iterator[str]:
    claimed = [feedback.issue, *feedback.cites]
    missing = claims.unfounded(claimed, _told_text(told), _code(told))
    if missing:
        yield f"these figures do not stand in the evidence: {', '.join(missing[:8])}"
    if not any(figures.read(text) for text in claimed):
        yield "neither bottleneck nor cites hold a figure"
    candidate = _candidate(told)
    if not claims.names_a_place(feedback.place, feedback.action, candidate):
        known = ", ".join(sorted(claims.functions(candidate))[:12])
        yield f"no place in the code is named: it has {known or 'no function'}"
    again = attempts.repeated(feedback, attempts.remember(told.attempts))
    if again is not None and again.measured is not None:
        yield f"that was tried in round {again.number} and brought {again.measured:.3g}x"


def _told_text(told: JudgeEvidence) -> str:
    """All of the prompt that was measured, counted or predicted: no code, and no reasons of an earlier Judge's."""
    reference = _reference(told)
    measured = page(_without_code(_evaluation(told)), told.baselines).text
    tried = [f"expected {attempt.expected}x, {attempt.outcome}" for attempt in attempts.remember(told.attempts)]
    return "\n".join([measured, reference["workloads"], reference["contract"], reference["device"], *tried])


def _without_code(evaluation: Evaluation) -> Evaluation:
    """The same with hot lines that quote nothing: what a comment of the Coder's boasts of was not measured."""
    if evaluation.profile is None:
        return evaluation
    lines = tuple(dataclasses.replace(line, source="") for line in evaluation.profile.lines)
    return dataclasses.replace(evaluation, profile=dataclasses.replace(evaluation.profile, lines=lines))


def _code(told: JudgeEvidence) -> str:
    return "\n".join([told.target.source, *(text for _, text in _candidate(told).files)])


def parse(text: str, kind: Kind) -> Feedback:
    """The feedback in a reply: one JSON object, bare, fenced or amid prose; the last that has the keys counts.

    Raises ``ReplyError`` where there is none, or where a value is missing, empty or not text.
    """
    keys = _KEYS[kind]
    expected = "one JSON object with the keys " + ", ".join(f'"{key}"' for key in keys) + ", each a non-empty text"
    found = [{key.lower(): value for key, value in data.items()} for data in _objects(text)]
    if not found:
        raise ReplyError("the reply holds no JSON object", expected=expected)
    complete = [data for data in found if all(key in data for key in keys)]
    if not complete:
        missing = [key for key in keys if key not in found[-1]]
        raise ReplyError(f"the reply's JSON object lacks {', '.join(missing)}", expected=expected)
    data = complete[-1]
    issue, why, action = (_text(data, key, expected) for key in keys)
    said = Feedback(kind, issue, why, action, _cites(data.get("cites")))
    if kind == "correction":
        return said
    return dataclasses.replace(said, place=_place(data.get("place")), expected=_factor(data.get("expected_speedup")))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Every outermost JSON object in ``text``, in order. Reasoning in <think> tags is skipped."""
    text = re.sub(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", "", text, count=1, flags=re.DOTALL)
    # strict=False: models put raw line breaks into JSON strings.
    decoder = json.JSONDecoder(strict=False)
    text = text[-MAX_REPLY_CHARACTERS:]
    end = 0
    while begun := _BEGUN.search(text, end):
        try:
            data, end = decoder.raw_decode(text, begun.start())
        except RecursionError:
            return  # nobody nests feedback a thousand levels deep; what follows would cost as much again
        except ValueError:
            end = begun.start() + 1
        else:
            if isinstance(data, dict):
                yield data


def _text(data: Mapping[str, Any], key: str, expected: str) -> str:
    value = data[key]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = "\n".join(value)  # a plan given as a list of steps
    if not isinstance(value, str) or not value.strip():
        raise ReplyError(f'"{key}" is {"empty" if not value else "not a text"}', expected=expected)
    return sheets.shorten(value, MAX_VALUE_CHARACTERS)


def _cites(value: object) -> tuple[str, ...]:
    items = value if isinstance(value, list) else []
    return tuple(sheets.shorten(item, 200) for item in items if isinstance(item, str) and item.strip())[:20]


def _place(value: object) -> str:
    return sheets.shorten(" ".join(value.split()), 200) if isinstance(value, str) else ""


def _factor(value: object) -> float | None:
    """A predicted speedup: 1.25, "1.25x", "about 25 %"; None for anything else. Conversations recorded before there was
    such a key have none."""
    if isinstance(value, str):
        found = figures.read(value)
        value = (1.0 + found[0].value if found[0].dimension == "share" else found[0].value) if found else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) and 0.0 < value < 1e6 else None
