"""Numbers that a candidate names: where it becomes another program. Pure: standard library only.

A kernel that samples long rows, or has no room for so many, says somewhere how long they are; a size next to each such
number is worth more than any that is drawn blindly (fuzzers take a program's own constants as their dictionary: AFL,
libFuzzer). Who writes them in another way is tried as before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

__all__ = ["landmarks"]

_POWER = re.compile(r"\b(\d+)[uUlL]*\s*(<<|\*\*)\s*(\d+)\b")
_NUMBER = re.compile(r"(?<![\w.])(0[xX][0-9a-fA-F][0-9a-fA-F']*|\d[\d'_]*(?:\.0*)?(?:[eE]\+?\d+)?)[uUlLfF]*(?![\w.])")
#: Below these there are sizes of blocks and vectors, beyond them no sizes.
_LEAST, _MOST = 96, 1 << 31
#: Of so few numbers below them products are sizes as well.
_MOST_FACTORS = 4
#: No candidate names more; of one that does they are drawn elsewhere.
_MOST_LANDMARKS = 64


def landmarks(texts: Iterable[str]) -> tuple[int, ...]:
    """The whole numbers in these sources that may be sizes, in order; none where there are too many to tell."""
    found: set[int] = set()
    for text in texts:
        found.update(_power(*found_ones) for found_ones in _POWER.findall(text))
        found.update(_value(number) for number in _NUMBER.findall(text))
    sizes = {number for number in found if _LEAST <= number <= _MOST}
    if len(sizes) > _MOST_LANDMARKS:
        return ()
    # A tile is as long as a vector times how many of them there are, and nobody writes down what that comes to.
    factors = [number for number in found if 2 < number < _LEAST]
    products = {one * other for one, other in itertools.combinations(factors, 2)}
    beside = {product for product in products if product >= _LEAST}
    return tuple(sorted(sizes | beside if len(factors) <= _MOST_FACTORS else sizes))


def _power(base: str, operator: str, power: str) -> int:
    """0 for what is far too large."""
    if len(base) > 9 or len(power) > 2 or int(power) > 31:
        return 0
    return int(base) << int(power) if operator == "<<" else int(base) ** int(power)


def _value(text: str) -> int:
    """0 for what is no whole number."""
    plain = text.replace("'", "").replace("_", "")
    if plain[:2] in ("0x", "0X"):
        return int(plain, 16)
    try:
        value = float(plain)
    except (ValueError, OverflowError):
        return 0
    return int(value) if value.is_integer() and value <= _MOST else 0
