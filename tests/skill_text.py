"""SKILL.md taken apart: its files and commands, and the JSON fields that it tells of."""

from __future__ import annotations

import re
import subprocess
import sys


def printed() -> str:
    """What `cudaforge skill` says."""
    argv = [sys.executable, "-m", "pytest_cudaforge", "skill"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def blocks(skill: str) -> dict[str, str]:
    """The code blocks by what follows the language on their first line: a file's name, or "" for the commands."""
    found = re.findall(r"^```(\w+) ?(.*)\n((?s:.*?))^```$", skill, re.MULTILINE)
    return {name: text for _, name, text in found}


def fields(skill: str) -> list[tuple[str, str]]:
    return re.findall(r"^\| `(\w+\.json)` \| `([^`]+)` \|", skill, re.MULTILINE)
