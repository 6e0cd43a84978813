"""What a Judge claims, held against what it was shown: its figures, and a place in the code. Pure.

Only observations are checked: a plan may name any number, and an expected gain is a prediction. A figure counts as
found where the evidence has it, give or take rounding and unit; one that was worked out counts where its working stands
beside it (``262 MB / 71.8 us = 3.65 TB/s``) and holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pytest_cudaforge.figures import Figure, found, read
from pytest_cudaforge.records import Candidate

__all__ = ["functions", "names_a_place", "unfounded"]

#: Whole numbers up to this count things that anybody sees in the code: two passes, four loads.
_COUNTED = 10
#: What every programmer of the device knows: lanes of a warp, widths of an access, sectors, cache lines, a page.
_COMMON = read("32, 1 B, 2 B, 4 B, 8 B, 16 B, 32 B, 64 B, 128 B, 4 kB, 4096 B, 0 %, 100 %")
#: ``16-byte loads``, ``32-way``: a kind of thing; ``92-percent`` and ``45-us`` are amounts.
_KIND = re.compile(r"-(?!(?:per-?cent|pct|[nuµμm]s|(?:nano|micro|milli)?sec\w*|cycles?|fold|times|of)\b)[A-Za-z]")
#: So near to something is what a Judge may hope for; further away is an observation.
_NEAR = 0.1
_LABEL = re.compile(r"\b(?:rounds?|lines?|steps?)\s+(?:\d+\s*(?:,|and|to|-|–)\s*)*$", re.IGNORECASE)
_DIVIDED = frozenset(["/", "÷", "over", "against", "of", "in", "at", "vs", "vs.", "versus", "by", "for"])
_MULTIPLIED = frozenset(["*", "x", "×", "times"])
_EQUALS = re.compile(
    r"[^.;:\d]{0,24}?(?:=|≈|~|→|,|\(|\b(?:is|are|makes|gives|takes|or))\s*(?:about |around |only |or |~|≈|=)?\s*"
)
_WORKING_SLACK = 0.03


# -- figures -----------------------------------------------------------------------------------------------------


def unfounded(texts: Iterable[str], evidence: str, code: str) -> tuple[str, ...]:
    """The figures of ``texts`` that stand neither in ``evidence`` nor, without a unit, in ``code``; each once."""
    known, bare = read(evidence), read(code)
    missing: dict[str, None] = {}
    for text in texts:
        stated = read(text)
        fine = [_exempt(figure, text) or _stands(figure, known, bare) for figure in stated]
        _accept_workings(text, stated, fine)
        missing.update({figure.text: None for figure, ok in zip(stated, fine, strict=True) if not ok})
    return tuple(missing)


def _stands(figure: Figure, known: Sequence[Figure], bare: Sequence[Figure]) -> bool:
    return found(figure, known) or (not figure.dimension and found(figure, bare))


def _exempt(figure: Figure, text: str) -> bool:
    """Counting words, ``round 12``, ``within 5 %``, kinds of things (``16-byte loads``), and what everybody knows."""
    after = text[figure.start + len(figure.text) :]
    if not figure.dimension and figure.value <= _COUNTED and figure.value == int(figure.value):
        return True
    before = text[max(0, figure.start - 60) : figure.start]
    if figure.dimension == "share" and figure.value <= _NEAR and before.endswith("within "):
        return True
    if figure.dimension in ("", "bytes") and _KIND.match(after):
        return True
    if not figure.dimension and _LABEL.search(before):
        return True
    return any(
        figure.dimension == common.dimension and figure.value in (common.value, common.binary) for common in _COMMON
    )


def _accept_workings(text: str, stated: Sequence[Figure], fine: list[bool]) -> None:
    """Mark results whose working stands before them: two figures that are fine, one operation, the right result."""
    for index in range(len(stated) - 2):
        left, right, result = stated[index : index + 3]
        if fine[index] and fine[index + 1] and _EQUALS.fullmatch(_between(text, right, result)):
            results = _results(left.value, _between(text, left, right).strip(), right.value)
            slack = max(_WORKING_SLACK, result.loose)
            fine[index + 2] |= any(abs(value - result.value) <= slack * abs(value) for value in results)


def _between(text: str, one: Figure, other: Figure) -> str:
    return text[one.start + len(one.text) : other.start]


def _results(left: float, operation: str, right: float) -> tuple[float, ...]:
    """What the working may give; a quotient is read either way round: 71.8 us against 62.4 us are 1.15x, and 87 %."""
    words = operation.split()
    # "against a bound of", "of the device's"
    if len(words) <= 5 and not _DIVIDED.isdisjoint(words):
        return tuple(a / b for a, b in ((left, right), (right, left)) if b)
    if operation in _MULTIPLIED:
        return (left * right,)
    return {"+": (left + right,), "-": (left - right,), "–": (left - right,)}.get(operation, ())


# -- places ------------------------------------------------------------------------------------------------------

_DEFINED = re.compile(
    r"^[ \t]*(?:def|class)[ \t]+(?P<python>\w+)"
    r"|\b(?P<cxx>[A-Za-z_]\w*)\s*\((?:[^(){};]|\([^()]*\))*\)\s*(?:const\s*)?\{"
    r"|\blaunch\(\s*[\"'](?P<launch>[A-Za-z_]\w*)",
    re.MULTILINE,
)
_KEYWORDS = frozenset(
    {"if", "for", "while", "switch", "catch", "return", "sizeof", "defined", "constexpr", "__launch_bounds__"}
)
#: What stands before a name that may be a word of English, too: "in split", "the kernel merge".
_POINTING = r"(?:\b(?:in|of|to|from|kernel|function|launch|launches)\s+|`)"
_LINE = re.compile(r"([\w-]+\.(?:cu|cuh|cpp|h|hpp|py)),?(?::| lines? )(\d+)")


def functions(candidate: Candidate) -> frozenset[str]:
    """The names of kernels and functions that the candidate's files define or launch."""
    found = (match for _, text in candidate.files for match in _DEFINED.finditer(text))
    return frozenset(match["python"] or match["cxx"] or match["launch"] for match in found) - _KEYWORDS


def names_a_place(place: str, plan: str, candidate: Candidate) -> bool:
    """Whether ``place`` or, failing that, ``plan`` names a function, a launch or a line that the candidate has."""
    names, lines = functions(candidate), {name: text.count("\n") + 1 for name, text in candidate.files}
    if not names.isdisjoint(re.findall(r"\w+", place)) or any(_is_named(name, plan) for name in names):
        return True
    if any(1 <= int(line) <= lines.get(name, 0) for name, line in _LINE.findall(f"{place}\n{plan}") if len(line) < 7):
        return True
    # A plan with one launch needs no name for it.
    return "plan.py" in lines and ("plan.py" in place or ("plan.py" in plan and "launch" in plan))


def _is_named(name: str, text: str) -> bool:
    """Whether a sentence means the function: its name is no word, or something points at it."""
    if re.search(r"[_\dA-Z]", name):
        return re.search(rf"\b{name}\b", text) is not None
    return re.search(rf"\b{name}\(|(?i:{_POINTING}){name}\b", text) is not None
