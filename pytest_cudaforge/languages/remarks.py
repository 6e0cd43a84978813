"""What g++ says became of each loop (``-fopt-info-vec-optimized -fopt-info-vec-missed``), in one line per loop.

The compiler prints an attempt per loop and vector width, reasons with a place of their own, and much about straight
code. What is kept: for each loop of the candidate's file whether it was vectorized, how wide, and if not why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["FLAGS", "LoopRemark", "loop_remarks", "remark_lines", "remark_of"]

FLAGS = ("-fopt-info-vec-optimized", "-fopt-info-vec-missed")

_LINE = re.compile(r"(?P<file>[^\s:]+):(?P<line>\d+):\d+: (?P<kind>missed|optimized):\s+(?P<text>.*)")
_WIDTH = re.compile(r"loop vectorized using (\d+) byte vectors")
_CALL = re.compile(r"statement clobbers memory: (?:.* = )?(?:__builtin_)?(\w+) \(")
_TEXT = re.compile(r"(?P<file>[^\s:]+):(?P<line>\d+): loop (?P<text>.*)")
#: Of a nest: its inner loops are the ones to look at. Of straight code: no loop.
_NO_REASON = ("multiple nested loops", "loop nest containing", "basic block", "no grouped stores")
#: The last width tried had no such vector; why the widths before it failed is not said.
_UNSAID = re.compile(r"not vectorized: (no vectype|unsupported use in stmt|unsupported data-type)")
#: The compiler's own names for values, which no source has.
_NAMES = re.compile(r":?\s*\*?_\d+ = .*")
MAX_REASON_CHARS = 160


@dataclass(frozen=True)
class LoopRemark:
    """One loop. ``vector_bytes`` 0: not vectorized, for ``reason`` ("" where the compiler names none) at
    ``reason_line``."""

    file: str
    line: int
    vector_bytes: int = 0
    reason: str = ""
    reason_line: int | None = None

    def __str__(self) -> str:
        if self.vector_bytes:
            return f"{self.file}:{self.line}: loop vectorized using {self.vector_bytes} byte vectors"
        reason = f": {self.reason}" if self.reason else ""
        where = f" (line {self.reason_line})" if self.reason_line not in (None, self.line) else ""
        return f"{self.file}:{self.line}: loop not vectorized{reason}{where}"


def loop_remarks(log: str, file: str) -> tuple[LoopRemark, ...]:
    """The loops of ``file`` in the compiler's ``log``, by line. A nest is told by its inner loops."""
    found: dict[int, LoopRemark] = {}
    for remark in _attempts(log, file):
        known = found.get(remark.line)
        if known is None or remark.vector_bytes > known.vector_bytes or (not known.vector_bytes and remark.reason):
            found[remark.line] = remark
    return tuple(_without_outer(found))


def _without_outer(found: dict[int, LoopRemark]) -> Iterator[LoopRemark]:
    """An outer loop fails for what is in its inner loop: the reason goes there, where it was not said again."""
    kept = dict(found)
    for line, remark in sorted(found.items()):
        end = remark.reason_line or 0
        inner = [other for other in kept.values() if line < other.line <= end and not other.vector_bytes]
        if remark.vector_bytes or not inner:
            continue
        innermost = max(inner, key=lambda other: other.line)
        if not innermost.reason:
            kept[innermost.line] = replace(innermost, reason=remark.reason, reason_line=end)
        del kept[line]
    for line in sorted(kept):
        yield kept[line]


def _attempts(log: str, file: str) -> Iterator[LoopRemark]:
    """Every loop that was tried, with the reason that follows it; a nest that was tried as a whole is left out."""
    open_loop: LoopRemark | None = None
    for line in log.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        own, number, text = match["file"] == file, int(match["line"]), match["text"]
        if match["kind"] == "optimized" or "couldn't vectorize loop" in text:
            if open_loop is not None:
                yield open_loop
            width = _WIDTH.search(text)
            tried = own and (width is not None or match["kind"] == "missed")
            open_loop = LoopRemark(file, number, int(width[1]) if width else 0) if tried else None
        elif open_loop is not None and not open_loop.vector_bytes:
            if any(part in text for part in _NO_REASON):
                open_loop = None
            elif _UNSAID.match(text):
                yield open_loop
                open_loop = None
            elif not open_loop.reason:
                reason = _reason(text)
                open_loop = LoopRemark(file, open_loop.line, 0, reason, number if own and reason else None)
    if open_loop is not None:
        yield open_loop


def _reason(text: str) -> str:
    call = _CALL.match(text)
    if call is not None:
        return "" if call[1].startswith("GOMP") else f"it calls {call[1]}, which has no vector form here"
    reason = _NAMES.sub("", text.removeprefix("not vectorized:")).strip().rstrip(".")
    return reason[:MAX_REASON_CHARS]


def remark_lines(log: str, file: str) -> str:
    """:func:`loop_remarks` as text, one line each."""
    return "\n".join(str(remark) for remark in loop_remarks(log, file))


def remark_of(text: str) -> LoopRemark | None:
    """The remark that such a line holds, None for any other line."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    width = re.search(r"using (\d+) byte", match["text"])
    place = re.search(r"\(line (\d+)\)$", match["text"])
    reason = match["text"].partition(": ")[2].removesuffix(place[0] if place else "").strip()
    return LoopRemark(
        match["file"], int(match["line"]), int(width[1]) if width else 0, reason, int(place[1]) if place else None
    )
