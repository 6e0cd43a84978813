"""Whatever a model, a server or an editor does to a text: it is read, or refused with our own error. Never a crash."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pytest_cudaforge import coder, judge, prompts
from pytest_cudaforge.chat.record import read_conversations
from pytest_cudaforge.config import load
from pytest_cudaforge.errors import ConfigError, ReplyError

PIECES = [
    "```",
    "````cpp kernel.cpp\n",
    "\n",
    "plan.py",
    "{",
    "}",
    '"',
    "\\",
    "\x00",
    "\ud7ff",
    "- ",
    ":",
    "[",
    "\t",
    "é",
]


def mangled(text: str, seed: int) -> str:
    """A few random cuts, swaps and insertions."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 6)):
        at, to = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        kind = draw.randrange(3)
        if kind == 0:
            text = text[:at] + draw.choice(PIECES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[min(to, at + 40) :]
        else:
            text = text[:at] + text[at:to][::-1] + text[to:]
    return text


def test_coder_replies() -> None:
    reply = prompts.render("example_cpp").partition("A complete reply:")[2]
    outcomes = {"read": 0, "refused": 0}
    for seed in range(400):
        try:
            files = coder.parse(mangled(reply, seed), "cpp")
            assert set(files) == {"kernel.cpp", "plan.py"}
            assert all(text.strip() for text in files.values())
            outcomes["read"] += 1
        except ReplyError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20


def test_judge_replies() -> None:
    reply = "Well:\n```json\n" + json.dumps({"issue": "a race", "why": "no barrier", "fix": "one"}) + "\n```\n"
    for seed in range(400):
        try:
            assert judge.parse(mangled(reply, seed), "correction").issue
        except ReplyError as error:
            assert error.expected


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_recordings_and_settings(tmp_path: Path, start: int) -> None:
    header = {"format": "cudaforge-conversation", "version": 1, "target": "t", "digest": "d", "language": "cpp"}
    talk = "\n".join(map(json.dumps, (header, {"role": "coder", "ordinal": 1, "text": "x"}, {"verdict": {"round": 1}})))
    settings = "rounds: 3\nchat:\n  coder: {model: m, extra: {a: [1, 2]}}\n  replay: {paths: [a, b]}\nallow: [kernel]\n"
    for seed in range(start, start + 50):
        (tmp_path / "talk.jsonl").write_text(mangled(talk, seed), encoding="utf-8")
        (tmp_path / "cudaforge.yaml").write_text(mangled(settings, seed), encoding="utf-8")
        for read in (lambda: read_conversations(tmp_path / "talk.jsonl"), lambda: load({}, root=tmp_path)):
            try:
                read()
            except ConfigError as error:
                assert str(tmp_path) in str(error)
