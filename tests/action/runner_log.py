"""What GitHub's runner makes of a step: its log read line by line, its files parsed, as actions/runner does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Of actions/runner; unknown ones are text.
KNOWN = frozenset(
    {"add-mask", "add-matcher", "add-path", "debug", "echo", "endgroup", "error", "group", "notice", "remove-matcher"}
    | {"save-state", "set-env", "set-output", "stop-commands", "warning"}
)
_V2 = re.compile(r"\s*::([^\s:]+)(?: ((?:(?!::).)*))?::(.*)", re.DOTALL)
_V1 = re.compile(r"##\[([^\s\]]+)(?: ([^\]]*))?\](.*)", re.DOTALL)


@dataclass(frozen=True)
class Command:
    name: str
    data: str
    properties: dict[str, str] = field(default_factory=dict)


def commands(log: str) -> list[Command]:
    """The commands that a runner would obey, in order; those between stop and its token are none."""
    found: list[Command] = []
    stopped = ""
    for line in re.split(r"\r\n|\n|\r", log):
        one = _command(line, KNOWN | {stopped.lower()} if stopped else KNOWN)
        if one is None:
            continue
        if stopped:
            stopped = "" if one.name == stopped.lower() else stopped
        elif one.name == "stop-commands":
            stopped = one.data
        else:
            found.append(one)
    return found


def _command(line: str, known: Iterable[str]) -> Command | None:
    for pattern, separator, search in ((_V2, ",", False), (_V1, ";", True)):
        parsed = pattern.search(line) if search else pattern.match(line)
        if parsed is not None and parsed[1].lower() in known:
            pairs = [part.partition("=") for part in (parsed[2] or "").split(separator)]
            properties = {key.strip(): _unescape(value) for key, _, value in pairs if value}
            return Command(parsed[1].lower(), _unescape(parsed[3]), properties)
    return None


def _unescape(text: str) -> str:
    for token, letter in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(token, letter)
    return text


def variables(text: str) -> dict[str, str]:
    """A file of ``NAME=VALUE`` lines and ``NAME<<DELIMITER`` blocks. Raises ValueError where the runner would fail."""
    found: dict[str, str] = {}
    lines = text.split("\n")
    while lines:
        line = lines.pop(0)
        if not line:
            continue
        name, sign, rest = re.match(r"(.*?)(=|<<)(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        if sign == "=":
            found[name] = rest
            continue
        if rest not in lines:
            raise ValueError(f"no end of {name}")
        end = lines.index(rest)
        found[name], lines = "\n".join(lines[:end]), lines[end + 1 :]
    return found
