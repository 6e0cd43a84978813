"""Text that others wrote (a model, a candidate, a compiler), made harmless before a terminal or a browser reads it.

Replies, kernels and build logs are hostile until proven otherwise: they may hold markup, terminal escapes, or
characters that turn text around so that it reads as something else than it is.
"""

from __future__ import annotations

import html
import re
import unicodedata

__all__ = ["marked", "one_line", "plain", "xml"]

#: Control and format characters (escape sequences, bidirectional overrides, zero width), unpaired surrogates, and
#: what no XML document may hold.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_NOT_XML = re.compile("[\ufffe\uffff]")
#: What a terminal would act on, whole: colours, cursor movements, and window titles up to their end.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?")


class _Shown(dict[int, "int | None"]):
    """For ``str.translate``: a character as it is, None for one that is to go. Each is looked up once."""

    def __missing__(self, code: int) -> int | None:
        found = code if chr(code) in "\n\t" or unicodedata.category(chr(code)) not in _HIDDEN else None
        if len(self) < 10_000:
            self[code] = found
        return found


_SHOWN = _Shown()


def plain(text: str) -> str:
    """Without terminal escapes and the characters that turn text around: what is shown is what is there."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_SHOWN)


def marked(text: str) -> str:
    """As :func:`plain`, but a hidden character leaves its number, ``⟨U+202E⟩``: in source code it may be the point."""
    text = _SEQUENCE.sub("", text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(char) for char in text.replace("\r\n", "\n"))


def _shown(char: str) -> str:
    if char in "\n\t" or (unicodedata.category(char) not in _HIDDEN and not _NOT_XML.match(char)):
        return char
    return f"⟨U+{ord(char):04X}⟩"


def one_line(text: str, limit: int) -> str:
    """The text's words on one line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def xml(text: str) -> str:
    """``text`` as itself between the tags, and inside the quoted attributes, of HTML and SVG."""
    return html.escape(marked(text), quote=True)
