"""Compiler output cut to what concerns the candidate's own file.

An ``#include`` of any path prints that file's lines into the log, so lines about other files are dropped, with a note
of how many. What a system header complains about is kept as its one-line message, without the source excerpt.
"""

from __future__ import annotations

import re
from collections.abc import Collection

MAX_LOG_LINES = 120
MAX_LINE_CHARS = 300

#: "file:3:5: error: ..." (g++), "file(3): error: ..." (NVRTC), "file:3: undefined reference" (ld)
_LOCATED = re.compile(r"^(?P<file>[^\s:(][^:(]*?)(?::(?P<line>\d+)(?::\d+)?:|\((?P<nvline>\d+)\):)\s?(?P<text>.*)$")
_EXCERPT = re.compile(r"^\s")
_UNLOCATED_KEPT = re.compile(
    r"At end of source: (?:fatal )?error|ptxas\b.*\b(?:error|fatal|warning)\b|nvrtc: error|g\+\+: |cc1plus: "
)

_LINKER_LINE = re.compile(r"(/\S*/)?ld(\.\w+)?: (\S+\.o: )?(?P<text>.+)")
#: Of the compiler's own output; one that the candidate's assembler text includes has another name.
_ASSEMBLER_LINE = re.compile(r"/?(\S*/)?cc\w{6}\.s:\d+: Error: (?P<text>.+)")
_MOST_TOOL_CHARS, _MOST_TOOL_LINES = 200, 5


def reduce_log(log: str, own_files: Collection[str], system_dirs: Collection[str] = ()) -> str:
    """``log`` without lines about files other than ``own_files``; messages from ``system_dirs`` lose their excerpts."""
    kept: list[str] = []
    keeping, hidden = False, 0
    for line in log.splitlines():
        if not line.strip() or (_EXCERPT.match(line) and not _LOCATED.match(line.strip()) and "ptxas" not in line):
            if keeping and line.strip():
                kept.append(line[:MAX_LINE_CHARS])
            continue
        keeping, wanted = _judge(line, own_files, system_dirs)
        if wanted:
            kept.append(line.strip()[:MAX_LINE_CHARS] if not _EXCERPT.match(line) else line[:MAX_LINE_CHARS])
        elif _LOCATED.match(line) and "error" in line:
            hidden += 1
    return _capped(kept, hidden)


def other_tools_words(full: str, blamed: str) -> str:
    """What the assembler or the linker says where the compiler had no complaint: no line of another file."""
    found: dict[str, None] = {}
    for line in full.splitlines():
        for tool, pattern in (("assembler", _ASSEMBLER_LINE), ("linker", _LINKER_LINE)):
            if match := pattern.match(line):
                found[f"{blamed}: error: the {tool}: {match['text'][:_MOST_TOOL_CHARS]}"] = None
    return "\n".join(list(found)[:_MOST_TOOL_LINES])


def _judge(line: str, own_files: Collection[str], system_dirs: Collection[str]) -> tuple[bool, bool]:
    """(keep the excerpt lines that follow, keep this line)."""
    if any(line.startswith((f"{name}:", f"{name}(")) for name in own_files):
        return True, True
    match = _LOCATED.match(line.strip())
    if match is None:
        wanted = bool(_UNLOCATED_KEPT.match(line.strip()))
        return wanted, wanted
    name = match.group("file")
    in_system = ".." not in name and any(name.startswith(directory) for directory in system_dirs)
    return False, in_system and "error" in match.group("text")


def _capped(kept: list[str], hidden: int) -> str:
    if len(kept) > MAX_LOG_LINES:
        left_out = len(kept) - MAX_LOG_LINES
        kept = [*kept[:MAX_LOG_LINES], f"... {left_out} more lines"]
    if hidden:
        kept.append(f"({hidden} errors in other files are not shown)")
    return "\n".join(kept)
