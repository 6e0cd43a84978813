"""Numbers that a candidate names: where it becomes another program. Pure: standard library only.

A kernel that samples long rows, or has no room for so many, says somewhere how long they are; a size next to each such
number is worth more than any that is drawn blindly (fuzzers take a program's own constants as their dictionary: AFL,
libFuzzer). Who writes them in another way is tried as before.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Mapping

__all__ = ["landmarks"]

_POWER = re.compile(r"\b(\d+)[uUlL]*\s*(<<|\*\*)\s*(\d+)\b")
_NUMBER = re.compile(r"(?<![\w.])(0[xX][0-9a-fA-F][0-9a-fA-F']*|\d[\d'_]*(?:\.0*)?(?:[eE]\+?\d+)?)[uUlLfF]*(?![\w.])")
#: A name for a number, or for what others come to: ``constexpr int kTile = kLanes * kVectors;``, ``BLOCK = 4 * WARP``.
_NAMED = re.compile(r"\b([A-Za-z_]\w{0,63})\s*(?::[^=\n]{0,40})?=\s*([\w '()*+/<-]{1,120}?)\s*(?=[,;}\n]|//|#|$)")
_SUFFIX = re.compile(r"(?<=\d)[uUlLzZ]+\b")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.LShift: operator.lshift,
}
#: Below these there are sizes of blocks and vectors, beyond them no sizes.
_LEAST, _MOST = 96, 1 << 31
#: Of so few numbers below them products are sizes as well.
_MOST_FACTORS = 4
#: No candidate names more; of one that does they are drawn elsewhere.
_MOST_LANDMARKS = 64


def landmarks(sources: Iterable[str]) -> tuple[int, ...]:
    """The whole numbers in these sources that may be sizes, in order; none where there are too many to tell."""
    found: set[int] = set()
    texts = tuple(sources)
    for text in texts:
        found.update(_power(*found_ones) for found_ones in _POWER.findall(text))
        found.update(_value(number) for number in _NUMBER.findall(text))
    sizes = {number for number in found if _LEAST <= number <= _MOST}
    if len(sizes) > _MOST_LANDMARKS:
        return ()
    named = {number for text in texts for number in _named(text) if _LEAST <= number <= _MOST}
    if named - sizes and len(named) <= _MOST_LANDMARKS:
        return tuple(sorted(sizes | named))
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


def _named(text: str) -> set[int]:
    """What the names of a source come to that are made of numbers and of names before them."""
    known: dict[str, int] = {}
    for name, expression in _NAMED.findall(text):
        value = _made(_SUFFIX.sub("", expression.replace("'", "")), known)
        if value is not None:
            known[name] = value
    return set(known.values())


def _made(expression: str, known: Mapping[str, int]) -> int | None:
    """None for what is no sum, difference, product, quotient or shift of whole numbers, or comes to far too much."""

    def value_of(node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant):
            return node.value if type(node.value) is int else None
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
            return None
        left, right = value_of(node.left), value_of(node.right)
        if left is None or right is None or max(abs(left), abs(right)) > _MOST:
            return None
        if isinstance(node.op, ast.Div | ast.FloorDiv) and right == 0:
            return None
        if isinstance(node.op, ast.LShift) and not 0 <= right < 32:
            return None
        return _OPERATORS[type(node.op)](left, right)

    try:
        return value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
