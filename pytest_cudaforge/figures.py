"""Figures in text: read, written, and held against each other. Pure; no word of it knows what a figure is about.

A figure is a number with the unit that follows it, in the base unit of its dimension: seconds, bytes, operations,
hertz; a share is 1.0 for 100 %. Numbers inside names (``float4``, ``sm_90``, ``kernel.cu:12``) are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Figure", "found", "read", "show"]

Dimension = Literal["", "time", "bytes", "byte rate", "share", "ratio", "flop", "flop rate", "frequency"]

_PREFIX = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_PREFIX |= {"T": 1e12, "P": 1e15, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_BINARY = {"k": 2.0**10, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}
_LONG = {"nano": "n", "micro": "u", "milli": "m", "kilo": "k", "mega": "M", "giga": "G", "tera": "T"}
_LONG_PREFIX = "|".join(_LONG)

#: Unit words, the longest first where one begins with another. ``prefix`` is what the factor is read from.
_UNITS = rf"""
    (?P<rate>(?P<rate_prefix>[kKMGT]?)(?P<rate_binary>i?)(?:[Bb]ytes?|B)(?:/s(?:ec(?:ond)?)?|ps|\ per\ second))
  | (?P<bytes>(?P<bytes_prefix>[kKMGT]?)(?P<bytes_binary>i?)(?:[Bb]ytes?|B)(?:/[a-z]+)?)
  | (?P<flops>(?P<flops_prefix>[kMGTP]?)(?:(?:FLOP|flop)s?/s(?:ec(?:ond)?)?|FLOPS))
  | (?P<flop>(?P<flop_prefix>[kMGTP]?)(?:FLOP|flop)s?)
  | (?P<time>(?P<time_prefix>(?:[nuµμm]|{_LONG_PREFIX})?)(?:seconds?|secs?|s))
  | (?P<frequency>(?P<frequency_prefix>[kMG]?)Hz)
  | (?P<share>%|percent|per\ cent|pct)
  | (?P<ratio>[x×](?!\s*\d)|times(?=\ (?:as|faster|slower|the)\b))
  | (?P<multiple>[kMGT]|thousand|million|billion|trillion)
"""
#: What may stand between groups of three digits.
_APART = "[,_'\u2019\u2009\u202f]"
_NUMERAL = rf"\d{{1,3}}(?:{_APART}\d{{3}})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?"
_FIGURE = re.compile(
    rf"(?<![\w.])(?:(?P<base>\d+)\s?(?:\^|\*\*)\s?(?P<power>\d+)|(?P<numeral>{_NUMERAL}))"
    rf"(?:[ \u00a0\u202f]?(?:{_UNITS})(?![A-Za-z0-9_]))?(?![A-Za-z0-9_]|\.\d)",
    re.VERBOSE,
)
#: Numbers in words count only where a unit follows: "ninety-two percent", but not "two passes".
_SPOKEN = """one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety"""
_WORDS = dict(zip(_SPOKEN.split(), [*range(1, 20), *range(20, 100, 10)], strict=True))
_LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9}
_WORD = "|".join([*_WORDS, *_LARGE])
_SPELLED = re.compile(
    rf"(?<![\w-])(?P<words>(?i:{_WORD})(?:[\ -](?:and\ )?(?i:{_WORD})){{0,7}})"
    rf"[\ -](?![A-Za-z]\b)(?:{_UNITS})(?![A-Za-z0-9_])",
    re.VERBOSE,
)
#: ``kernel.cu:12`` and ``kernel.cu, line 12``: a place, not a figure.
_PLACE = re.compile(
    r"(?<![\w/-])[\w/-]{1,80}\.[A-Za-z]{1,4}(?::\d+(?:[-–]\d+)?|,? lines? \d+(?:(?:[-–]| to | and )\d+)?)"
)
_DIMENSIONS: dict[str, Dimension] = {
    "rate": "byte rate",
    "bytes": "bytes",
    "flops": "flop rate",
    "flop": "flop",
    "time": "time",
    "frequency": "frequency",
    "share": "share",
    "ratio": "ratio",
    "multiple": "",
}


@dataclass(frozen=True)
class Figure:
    """``shown`` is the numeral as it stands, ``value`` in the dimension's base unit. ``slack`` is half a unit of the
    last digit shown, as a share of the value; ``loose`` takes zeros at the end of a whole number for rounding, too, as
    a speaker does. ``binary``: the value where kB means 1024 bytes."""

    text: str
    shown: float
    value: float
    dimension: Dimension
    slack: float
    loose: float
    start: int
    binary: float | None = None


def read(text: str) -> tuple[Figure, ...]:
    """Every figure in ``text``, in order."""
    return tuple(_figures(text))


def found(claim: Figure, known: Iterable[Figure]) -> bool:
    """Whether ``claim`` is one of ``known``, give or take rounding, unit, and the way from a percentage to a factor."""
    return any(_same(claim, figure) for figure in known)


def show(value: float, unit: str) -> str:
    """Three significant digits in the prefix that suits, for a unit as profilers write it: ``ns``, ``Gbyte/s``."""
    match = _FIGURE.fullmatch(f"1 {unit}".rstrip())
    kind = _kind_of(match) if match is not None else ""
    if match is None or not kind:
        return f"{_shown(value)} {unit}".rstrip()
    size = value * _factor(match, kind)[0]
    suffix = "/" + unit.partition("/")[2] if kind == "bytes" and "/" in unit else ""
    if kind == "share":
        return f"{_digits(100 * size)} %"
    names = {"rate": "B/s", "bytes": "B", "flops": "FLOP/s", "flop": "FLOP", "time": "s", "frequency": "Hz"}
    return _prefixed(size, names[kind], small=kind == "time") + suffix if kind in names else f"{_digits(value)} {unit}"


# -- reading -----------------------------------------------------------------------------------------------------


def _figures(text: str) -> Iterator[Figure]:
    places = [match.span() for match in _PLACE.finditer(text)]
    found = [*_FIGURE.finditer(text), *_SPELLED.finditer(text)]
    for match in sorted(found, key=lambda match: match.start()):
        if not any(start <= match.start() < end for start, end in places):
            yield _figure(match)


def _figure(match: re.Match[str]) -> Figure:
    shown, slack, loose = _number(match)
    kind = _kind_of(match)
    factor, binary = _factor(match, kind)
    dimension = _DIMENSIONS.get(kind, "")
    return Figure(
        match.group(), shown, shown * factor, dimension, slack, loose, match.start(), binary and shown * binary
    )


def _number(match: re.Match[str]) -> tuple[float, float, float]:
    """The number as it stands, and its two kinds of slack."""
    groups = match.groupdict()
    numeral = str(_spelled(groups["words"])) if groups.get("words") else groups["numeral"]
    if numeral:
        numeral = re.sub(_APART, "", numeral)
        return (float(numeral), *_slack(numeral))
    return float(groups["base"]) ** min(int(groups["power"]), 64), 0.0, 0.0


def _spelled(words: str) -> int:
    """Ninety-two is 92, "two hundred and five thousand" 205000."""
    total = part = 0
    for word in re.findall("[a-z]+", words.lower()):
        size = _LARGE.get(word, 0)
        if size > 100:
            total, part = total + max(part, 1) * size, 0
        else:
            part = max(part, 1) * 100 if size else part + _WORDS.get(word, 0)
    return total + part


def _kind_of(match: re.Match[str]) -> str:
    return next((kind for kind in _DIMENSIONS if match[kind]), "")


def _factor(match: re.Match[str], kind: str) -> tuple[float, float | None]:
    """What turns the numeral into the base unit; for bytes also with prefixes as powers of 1024."""
    if kind == "share":
        return 0.01, None
    if kind == "multiple":
        return _PREFIX[match["multiple"]], None
    if kind in ("", "ratio"):
        return 1.0, None
    prefix = match[f"{kind}_prefix"]
    prefix = _LONG.get(prefix, prefix)
    if kind not in ("bytes", "rate"):
        return _PREFIX[prefix], None
    binary = _BINARY.get(prefix)
    return (binary or 1.0, None) if match[f"{kind}_binary"] else (_PREFIX[prefix], binary)


def _slack(numeral: str) -> tuple[float, float]:
    """Half a unit of the last digit, as a share; and what a speaker may have meant."""
    mantissa = re.split("[eE]", numeral)[0]
    size = float(mantissa)
    if not size:
        return 0.0, 0.0
    _, point, decimals = mantissa.partition(".")
    slack = min(0.5 * 10.0 ** -len(decimals) / size, _WIDEST)
    # 4200 may stand for 4150 to 4250, but 100 hardly for 50 to 150.
    zeros = 0 if point else len(mantissa) - len(mantissa.rstrip("0"))
    return slack, max(slack, min(0.5 * 10.0**zeros / size, _ROUND)) if zeros else slack


# -- comparing ---------------------------------------------------------------------------------------------------

#: Differences that nobody calls wrong, beside those of rounding.
_RELATIVE = 0.01
#: What zeros at the end, and what a single digit, may hide at most.
_ROUND, _WIDEST = 0.035, 0.2


def _same(claim: Figure, known: Figure) -> bool:
    # What is known was written with three digits, but for percentages.
    slack = claim.loose + (known.slack if known.dimension == "share" else min(known.slack, 0.006))
    if not claim.dimension:
        # A bare number is looked up as it stands, beside whatever unit.
        as_shown = claim.value == claim.shown and _close(claim.shown, known.shown, slack)  # "65k" is not 65
        return as_shown or _close(claim.value, known.value, slack)
    if not known.dimension:
        # 0.87 is 87 %; a count is no share.
        fraction = known.value != int(known.value)
        return fraction and claim.dimension in ("share", "ratio") and _close(claim.value, known.value, slack)
    if claim.dimension == known.dimension:
        values = {claim.value, claim.binary or claim.value}
        others = {known.value, known.binary or known.value}
        if any(_close(a, b, slack) for a in values for b in others):
            return True
        # 13 % short of it, where it is reached to 87 %.
        return claim.dimension == "share" and _close(1.0 - claim.value, known.value, _of_rest(claim, slack))
    if {claim.dimension, known.dimension} == {"share", "ratio"}:
        share, ratio = (claim, known) if claim.dimension == "share" else (known, claim)
        if share.value and any(_close(ratio.value, reading, slack) for reading in (share.value, 1.0 / share.value)):
            return True
        return any(_close(ratio.value, 1.0 + way * share.value, _of_rest(share, slack)) for way in (1, -1))
    return False


def _of_rest(share: Figure, slack: float) -> float:
    """Rounding 8 % says little of the 8, and much of the 92 that are left."""
    return slack * min(1.0, share.value)


def _close(a: float, b: float, slack: float) -> bool:
    return abs(a - b) <= max(slack, _RELATIVE) * max(abs(a), abs(b))


# -- writing -----------------------------------------------------------------------------------------------------


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def _shown(value: float) -> str:
    """Whole numbers below a million as they are: a grid of 16384 blocks is not 1.64e+04."""
    if abs(value) < 1e6 and value == int(value):
        return str(int(value))
    return _prefixed(value, "").rstrip() if 1e5 <= abs(value) < float("inf") else _digits(value)


def _prefixed(size: float, unit: str, *, small: bool = False) -> str:
    steps = [("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)] if not small else [("", 1.0), ("m", 1e-3), ("u", 1e-6)]
    for prefix, step in steps:
        if abs(size) >= step:
            return f"{_digits(size / step)} {prefix}{unit}"
    return f"{_digits(size / 1e-9)} n{unit}" if small else f"{_digits(size)} {unit}"
