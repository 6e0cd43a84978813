"""The examples are played by the README's first command; here is what makes sure that they can be."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_cudaforge.chat.record import Conversation, read_conversations
from pytest_cudaforge.discovery import discover
from pytest_cudaforge.records import Target

ROOT = Path(__file__).parents[2]
CONVERSATIONS = {
    (talk.target, talk.language): talk
    for path in sorted((ROOT / "examples" / "conversations").glob("*.jsonl"))
    for talk in read_conversations(path)
}
TARGETS = {target.id: target for target in discover([ROOT / "examples"], ROOT).targets}


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.id)
def test_every_example_has_a_conversation_about_its_present_source(target: Target) -> None:
    talk = CONVERSATIONS[target.id, "cpp"]
    assert talk.digest == target.digest, "the example changed: play it anew with --forge-record"
    assert 3 <= len(talk.verdicts) <= 6


def test_the_cuda_conversations_fit_too() -> None:
    talks = [talk for (_, language), talk in CONVERSATIONS.items() if language == "cuda"]
    # One ended in its second round, when the strategy saw its roofline reached.
    assert sum(4 <= len(talk.verdicts) <= 6 for talk in talks) >= 3
    for talk in talks:
        assert talk.digest == TARGETS[talk.target].digest


def test_the_failures_were_kept() -> None:
    def failed(talk: Conversation) -> bool:
        statuses = [verdict.status for verdict in talk.verdicts]
        speeds = [verdict.speedup or 0.0 for verdict in talk.verdicts]
        slower = any(b < a for a, b in itertools.pairwise(speeds))
        return slower or any(status != "PASSED" for status in statuses)

    assert sum(failed(talk) for talk in CONVERSATIONS.values()) >= len(CONVERSATIONS) // 2


def test_the_readme_has_exactly_its_two_commands() -> None:
    program = ROOT / ".ci" / "readme_commands.py"
    found = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout
    commands = found.split("\0")[:-1]
    assert len(commands) == 2
    assert "pytest --forge examples" in commands[0]
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Quick start")[2].partition("\n## ")[0]
    assert len(re.findall(r"^```", section, re.MULTILINE)) == 4
