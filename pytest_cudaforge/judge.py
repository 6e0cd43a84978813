"""The Judge: evidence -> prompt, reply -> Feedback. Pure; it advises and never decides whether a candidate passes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_cudaforge.chat import Message
from pytest_cudaforge.coder import dialect
from pytest_cudaforge.errors import ReplyError
from pytest_cudaforge.prompts import fence, sheets
from pytest_cudaforge.prompts import render as fill
from pytest_cudaforge.records import Baseline, DeviceFacts, Evaluation, Feedback, Round, Target, TargetFacts

__all__ = ["SCHEMA", "JudgeEvidence", "evidence", "parse", "render", "render_repair"]

Kind = Literal["correction", "optimization"]

#: The keys of a reply, in the order of Feedback's fields issue, why, action.
_KEYS: dict[str, tuple[str, str, str]] = {
    "correction": ("issue", "why", "fix"),
    "optimization": ("bottleneck", "method", "plan"),
}
MAX_VALUE_CHARACTERS = 3000
#: Beyond this a reply is no answer, and looking for objects in it would take time that grows with its square.
MAX_REPLY_CHARACTERS = 100_000


def _schema(keys: Sequence[str], *, cites: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {key: {"type": "string"} for key in keys}
    if cites:
        properties["cites"] = {"type": "array", "items": {"type": "string"}}
    # Strict structured output wants every property required and no others.
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


#: JSON schema of a reply, by kind of feedback: what goes into ``ChatRequest.schema``.
SCHEMA: Mapping[str, Mapping[str, Any]] = {
    "correction": _schema(_KEYS["correction"], cites=False),
    "optimization": _schema(_KEYS["optimization"], cites=True),
}


@dataclass(frozen=True)
class JudgeEvidence:
    """All the Judge is told. ``subject`` is the round under review (with candidate and evaluation), ``attempts`` the
    other rounds, of which it sees one line each."""

    kind: Kind
    language: str
    target: Target
    facts: TargetFacts
    device: DeviceFacts
    baselines: tuple[Baseline, ...]
    allow: tuple[str, ...]
    subject: Round
    attempts: tuple[Round, ...] = ()


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
) -> JudgeEvidence:
    """Built by the loop for the round that the strategy proposed as parent.

    Raises ``ValueError`` where ``subject`` has no candidate or no evaluation: there is nothing to review.
    """
    if subject.candidate is None or subject.evaluation is None:
        raise ValueError(f"round {subject.number} has no evaluated candidate to review")
    allowed = tuple(facts.allow if allow is None else allow)
    return JudgeEvidence(kind, language, target, facts, device, tuple(baselines), allowed, subject, tuple(rounds))


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
    earlier = [
        turn for turn in told.attempts if turn.number == told.subject.number or turn.number == told.subject.parent
    ]
    return fill(
        "judge_correction",
        **_reference(told),
        module=sheets.render_module(told.facts.module),
        evidence=sheets.render_verdict(evaluation),
        attempts=sheets.render_attempts(earlier, told.subject.number) if told.subject.parent is not None else "",
    )


def _optimization(told: JudgeEvidence) -> str:
    evaluation = _evaluation(told)
    timing = sheets.render_timing(evaluation.timing) if evaluation.timing else sheets.render_baselines(told.baselines)
    return fill(
        "judge_optimization",
        **_reference(told),
        timing=timing,
        resources=sheets.render_resources(evaluation.build),
        profile=sheets.render_profile(evaluation.profile),
        attempts=sheets.render_attempts(told.attempts, told.subject.number),
    )


def _reference(told: JudgeEvidence) -> dict[str, str]:
    assert told.subject.candidate is not None  # evidence() saw to it
    return {
        "name": told.target.qualname,
        "source": fence(told.target.source, "python"),
        "workloads": sheets.render_workloads(told.facts.workloads),
        "contract": sheets.render_contract(told.facts, told.allow),
        "device": sheets.render_device(told.device),
        "files": sheets.render_files(told.subject.candidate),
    }


def _evaluation(told: JudgeEvidence) -> Evaluation:
    assert told.subject.evaluation is not None  # evidence() saw to it
    return told.subject.evaluation


# -- the reply ---------------------------------------------------------------------------------------------------


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
    issue, why, action = (_text(complete[-1], key, expected) for key in keys)
    return Feedback(kind, issue, why, action, _cites(complete[-1].get("cites")))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Every outermost JSON object in ``text``, in order. Reasoning in <think> tags is skipped."""
    text = re.sub(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", "", text, count=1, flags=re.DOTALL)
    # strict=False: models put raw line breaks into JSON strings.
    decoder = json.JSONDecoder(strict=False)
    text = text[-MAX_REPLY_CHARACTERS:]
    at = text.find("{")
    while at >= 0:
        try:
            data, end = decoder.raw_decode(text, at)
        except RecursionError:
            return  # nobody nests feedback a thousand levels deep; what follows would cost as much again
        except ValueError:
            end = at + 1
        else:
            if isinstance(data, dict):
                yield data
        at = text.find("{", end)


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
