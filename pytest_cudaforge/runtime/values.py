"""What values of a plan may do: arithmetic, comparison, text, methods and built-in functions, all with caps.

The interpreter never applies a Python operator or attribute to a value itself; it comes here. Values are None, bool,
int, float, str, tuple, list, dict, range, :class:`DType`, :class:`Native`, closures and :class:`StandIn`. Every
operation whose cost grows with its operands charges the :class:`Meter`, so that hostile text can neither loop nor
allocate without limit.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytest_cudaforge.errors import PlanError, PlanLimitError
from pytest_cudaforge.plan import DTYPE_BYTES

MAX_STEPS = 500_000
MAX_INT_BITS = 128
MAX_TEXT = 16_384
MAX_ITEMS = 65_536
MAX_DEPTH = 32
CHARS_PER_STEP = 64

NUMBERS = (bool, int, float)


class Meter:
    """Counts the steps of one tracing and stops it at the cap."""

    __slots__ = ("cap", "steps")

    def __init__(self, cap: int = MAX_STEPS) -> None:
        self.cap = cap
        self.steps = 0

    def charge(self, steps: int) -> None:
        self.steps += steps
        if self.steps > self.cap:
            raise PlanLimitError(
                f"the plan runs more than {self.cap} steps",
                expected="a plan that only describes launches",
                remedy="loop over tiles inside the kernel, not in plan.py",
            )


class DType(str):
    """A dtype by torch's name. It is a string, so that it can be compared, printed and used as a key."""

    __slots__ = ()

    def attribute(self, name: str) -> Any:
        """``x.dtype.itemsize`` and its like; None where a dtype has no such attribute."""
        facts = {
            "itemsize": DTYPE_BYTES[str(self)],
            "is_floating_point": "float" in self,
            "is_complex": self.startswith("complex"),
            "is_signed": self not in ("uint8", "bool"),
        }
        return facts.get(name)


#: torch's own second names, accepted wherever a dtype is.
DTYPE_ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cdouble": "complex128",
    "cfloat": "complex64",
}


def dtype_named(value: Any, where: str) -> DType:
    """``value`` as a DType. Raises PlanError with the nearest name."""
    if type(value) is DType:
        return value
    if type(value) is str:
        name = value.removeprefix("torch.")
        name = DTYPE_ALIASES.get(name, name)
        if name in DTYPE_BYTES:
            return DType(name)
        raise PlanError(
            f"{where}: {value[:40]!r} is no dtype{did_you_mean(_common_dtype(name), DTYPE_BYTES)}",
            expected=f"x.dtype or one of {', '.join(DTYPE_BYTES)}",
        )
    raise PlanError(f"{where}: {describe(value)} is no dtype", expected='x.dtype or a name such as "float32"')


def _common_dtype(name: str) -> str:
    short = {"fp16": "float16", "fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "f32": "float32"}
    return short.get(name, name)


class StandIn:
    """A thing a plan sees only the metadata of. Subclasses say what they allow; anything else explains itself."""

    kind = "object"

    def attribute(self, name: str) -> Any:
        raise PlanError(f"{self.kind} has no attribute {name!r}")

    def item(self, key: Any) -> Any:
        raise PlanError(f"{self.kind} cannot be indexed")

    def elements(self) -> Sequence[Any]:
        raise PlanError(f"{self.kind} cannot be iterated or measured with len()")

    def length(self) -> int:
        return len(self.elements())

    def truth(self) -> bool:
        raise PlanError(f"the truth of {self.kind} is unknown in a plan", expected="`is None` or `is not None`")

    def text(self) -> str:
        return f"<{self.kind}>"

    def contains(self, value: Any) -> bool:
        raise PlanError(f"`in` does not work on {self.kind}")

    def advice(self) -> str:
        """Said when an operator is applied to it."""
        return ""


class Native:
    """A function of ours that a plan can call: ``function(meter, args, kwargs)``."""

    __slots__ = ("function", "name")

    def __init__(self, name: str, function: Callable[[Meter, list[Any], dict[str, Any]], Any]) -> None:
        self.name = name
        self.function = function


# -- words -------------------------------------------------------------------------------------------------------


def describe(value: Any) -> str:
    """What a message calls the value; never long, never its address."""
    if isinstance(value, StandIn):
        return value.kind
    if isinstance(value, Native):
        return f"the function {value.name}"
    if type(value) is DType:
        return f"the dtype {value}"
    if value is None or type(value) in (bool, int, float, str):
        shown = repr(value)
        return f"{shown if len(shown) <= 40 else shown[:37] + '...'} ({type(value).__name__})"
    if isinstance(value, (tuple, list, dict, range)):
        return f"a {type(value).__name__} of {length_of(value)}"
    if isinstance(value, slice):
        return "a slice"
    if value is Ellipsis:
        return "..."
    return f"the function {getattr(value, 'name', 'lambda')}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'rows'?)`` or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def length_of(value: Any) -> int:
    try:
        return len(value)
    except OverflowError:
        raise PlanLimitError("a range is longer than any plan can use") from None


def text_of(meter: Meter, value: Any, depth: int = 0, quote: bool = False) -> str:
    """``str(value)`` for numbers, strings, dtypes and flat sequences of them."""
    if isinstance(value, str):
        text = repr(str(value)) if quote and type(value) is not DType else str(value)
    elif value is None or type(value) in NUMBERS:
        text = repr(value)
    elif isinstance(value, StandIn):
        text = value.text()
    elif isinstance(value, (tuple, list)) and depth < 4:
        meter.charge(len(value))
        inner = ", ".join(text_of(meter, item, depth + 1, True) for item in value)
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{comma})"
    else:
        raise PlanError(f"{describe(value)} cannot be turned into text")
    return checked_text(meter, text)


def checked_text(meter: Meter, text: str) -> str:
    if len(text) > MAX_TEXT:
        raise PlanLimitError(f"a string of {len(text)} characters", expected=f"at most {MAX_TEXT}")
    meter.charge(len(text) // CHARS_PER_STEP)
    return text


_FORMAT = re.compile(r"([<>=^])?[+\- ]?#?0?\d{0,3}[,_]?(\.\d{1,2})?[bdeEfFgGosxX%]?")


def formatted(meter: Meter, value: Any, spec: str) -> str:
    """``format(value, spec)`` for the common specs (width, precision, type)."""
    if not spec:
        return text_of(meter, value)
    if not _FORMAT.fullmatch(spec):
        raise PlanError(f"the format {spec[:40]!r} is not supported", expected="a spec such as 04d, .3f, x or >8")
    if not (type(value) in NUMBERS or isinstance(value, str)):
        raise PlanError(f"{describe(value)} cannot be formatted with {spec!r}")
    try:
        return checked_text(meter, format(str(value) if isinstance(value, str) else value, spec))
    except (ValueError, OverflowError) as error:
        raise PlanError(f"{describe(value)} cannot be formatted with {spec!r}: {error}") from None


# -- operators ---------------------------------------------------------------------------------------------------


def checked_int(value: Any) -> Any:
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        raise PlanLimitError(f"an integer of {value.bit_length()} bits", expected=f"at most {MAX_INT_BITS} bits")
    return value


def _power(left: Any, right: Any) -> Any:
    if type(left) is not float and type(right) is not float:
        if right > 0 and int(left).bit_length() * right > 4 * MAX_INT_BITS and abs(left) > 1:
            raise PlanLimitError(f"{left} ** {right} is too large", expected=f"integers of at most {MAX_INT_BITS} bits")
        if right < 0 and left == 0:
            raise ZeroDivisionError("0 to a negative power")
    result = left**right
    if isinstance(result, complex):
        raise PlanError(f"{left} ** {right} is a complex number")
    return result


def _shift_left(left: Any, right: Any) -> Any:
    if right > MAX_INT_BITS:
        raise PlanLimitError(f"{left} << {right} is too large", expected=f"integers of at most {MAX_INT_BITS} bits")
    return left << right


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": _power,
    "<<": _shift_left,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}
_INTEGER_ONLY = {"<<", ">>", "&", "|", "^"}


def binary(meter: Meter, symbol: str, left: Any, right: Any) -> Any:
    """``left symbol right``. Raises PlanError naming both operands where that is no operation of a plan."""
    kinds = (type(left), type(right))
    if kinds[0] in NUMBERS and kinds[1] in NUMBERS:
        if symbol in _INTEGER_ONLY and float in kinds:
            raise PlanError(f"{left!r} {symbol} {right!r}: bit operations need integers", remedy="use // or int(...)")
        try:
            return checked_int(_BINARY[symbol](left, right))
        except (ZeroDivisionError, OverflowError, ValueError) as error:
            raise PlanError(f"{left!r} {symbol} {right!r}: {error}") from None
    if symbol == "+" and _same_sequence(left, right):
        return _concatenated(meter, left, right)
    if symbol == "*":
        if isinstance(right, (str, tuple, list)) and kinds[0] in (int, bool):
            left, right = right, left
        if isinstance(left, (str, tuple, list)) and type(right) in (int, bool):
            return _repeated(meter, left, right)
    formatting = "use an f-string" if symbol == "%" and isinstance(left, str) else ""
    remedy = _advice(left) or _advice(right) or formatting
    raise PlanError(f"cannot compute {describe(left)} {symbol} {describe(right)}", remedy=remedy)


def _advice(value: Any) -> str:
    return value.advice() if isinstance(value, StandIn) else ""


def _same_sequence(left: Any, right: Any) -> bool:
    return any(isinstance(left, kind) and isinstance(right, kind) for kind in (str, tuple, list))


def _concatenated(meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, str):
        return checked_text(meter, str(left) + str(right))
    _check_items(meter, len(left) + len(right))
    return left + right


def _repeated(meter: Meter, value: Any, times: int) -> Any:
    total = len(value) * max(times, 0)
    if isinstance(value, str):
        if total > MAX_TEXT:
            raise PlanLimitError(f"a string of {total} characters", expected=f"at most {MAX_TEXT}")
        return checked_text(meter, str(value) * times)
    _check_items(meter, total)
    return value * times


def _check_items(meter: Meter, count: int) -> None:
    if count > MAX_ITEMS:
        raise PlanLimitError(f"a sequence of {count} items", expected=f"at most {MAX_ITEMS}")
    meter.charge(count)


def unary(symbol: str, value: Any) -> Any:
    if symbol == "not":
        return not truth(value)
    if type(value) not in NUMBERS or (symbol == "~" and type(value) is float):
        raise PlanError(f"cannot compute {symbol}{describe(value)}", remedy=_advice(value))
    if symbol == "~":
        return checked_int(-int(value) - 1)
    return -value if symbol == "-" else +value


def truth(value: Any) -> bool:
    if isinstance(value, StandIn):
        return value.truth()
    return bool(value)


def equal(meter: Meter, left: Any, right: Any, depth: int = 0) -> bool:
    """``==`` on plain values; a tensor has none. Walks nested sequences itself: shared lists could cost for ever."""
    meter.charge(1)
    for value in (left, right):
        if isinstance(value, StandIn) and left is not None and right is not None:
            raise PlanError(
                f"cannot compare {describe(left)} with {describe(right)}",
                remedy=_advice(value) or "compare shapes, dtypes or numbers, or use `is None`",
            )
    if type(left) is DType or type(right) is DType:
        return _equal_dtypes(left, right)
    if isinstance(left, (tuple, list)) and type(left) is type(right):
        if depth > MAX_DEPTH:
            raise PlanLimitError(f"comparison of lists nested deeper than {MAX_DEPTH}")
        return len(left) == len(right) and all(equal(meter, a, b, depth + 1) for a, b in zip(left, right, strict=True))
    if isinstance(left, (dict, list, tuple)) or isinstance(right, (dict, list, tuple)):
        if isinstance(left, dict) and isinstance(right, dict):
            raise PlanError("dicts cannot be compared in a plan", remedy="compare their items")
        return False
    return bool(left == right)


def _equal_dtypes(left: Any, right: Any) -> bool:
    if not (isinstance(left, str) and isinstance(right, str)):
        return False
    return str(dtype_named(left, "comparison")) == str(dtype_named(right, "comparison"))


def identical(left: Any, right: Any) -> bool:
    """``is``, for None, True and False only: other identities are not part of the format."""
    for value in (left, right):
        if value is None or type(value) is bool:
            return left is right
    raise PlanError(f"cannot compute {describe(left)} is {describe(right)}", expected="`is None`; otherwise use ==")


def ordered(meter: Meter, symbol: str, left: Any, right: Any) -> bool:
    comparable = (type(left) in NUMBERS and type(right) in NUMBERS) or (type(left) is str and type(right) is str)
    if not comparable:
        remedy = _advice(left) or _advice(right)
        raise PlanError(f"cannot compute {describe(left)} {symbol} {describe(right)}", remedy=remedy)
    return bool(_ORDER[symbol](left, right))


_ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def contains(meter: Meter, container: Any, value: Any) -> bool:
    """``value in container``."""
    if isinstance(container, StandIn):
        return container.contains(value)
    if isinstance(container, str) and isinstance(value, str):
        meter.charge(len(container) // CHARS_PER_STEP)
        return str(value) in str(container)
    if isinstance(container, dict):
        return key_of(value) in container
    if isinstance(container, range):
        return type(value) is int and value in container
    if isinstance(container, (tuple, list)):
        return any(equal(meter, item, value) for item in container)
    raise PlanError(f"cannot compute {describe(value)} in {describe(container)}")


# -- containers --------------------------------------------------------------------------------------------------


def key_of(value: Any) -> Any:
    """``value`` as a dict key: a string, number, bool, None or a flat tuple of these."""
    if isinstance(value, tuple) and len(value) <= 64:
        return tuple(_scalar_key(item) for item in value)
    return _scalar_key(value)


def _scalar_key(value: Any) -> Any:
    if value is None or type(value) in NUMBERS:
        return value
    if isinstance(value, str):
        return str(value)
    raise PlanError(f"{describe(value)} cannot be a dict key", expected="a string, a number or a flat tuple of these")


def sequence(meter: Meter, value: Any) -> Sequence[Any]:
    """What a for loop, unpacking or a built-in goes over, as a list or tuple; charges its length."""
    if isinstance(value, StandIn):
        value = value.elements()
    if isinstance(value, (tuple, list, range, dict)) or type(value) is str:
        _check_items(meter, length_of(value))
        return value if isinstance(value, tuple) else list(value)
    raise PlanError(f"{describe(value)} cannot be iterated")


def item_of(meter: Meter, value: Any, key: Any) -> Any:
    """``value[key]``; slices are Python slices of integers."""
    if isinstance(value, StandIn):
        return value.item(key)
    if isinstance(value, dict):
        key = key_of(key)
        if key not in value:
            raise PlanError(f"no key {describe(key)} in a dict with {text_of(meter, list(value)[:20])}")
        return value[key]
    if not isinstance(value, (tuple, list, str, range)):
        raise PlanError(f"{describe(value)} cannot be indexed")
    if isinstance(key, slice):
        return _slice_of(meter, value, key)
    if type(key) is not int:
        raise PlanError(f"index {describe(key)} into {describe(value)}", expected="an integer")
    if not -length_of(value) <= key < length_of(value):
        raise PlanError(f"index {key} is out of range for {describe(value)}")
    return value[key]


def _slice_of(meter: Meter, value: Any, key: slice) -> Any:
    for part in (key.start, key.stop, key.step):
        if part is not None and type(part) is not int:
            raise PlanError(f"slice bound {describe(part)}", expected="an integer or nothing")
    if key.step == 0:
        raise PlanError("a slice with step 0")
    result = (str(value) if isinstance(value, str) else value)[key]
    if not isinstance(result, range):
        meter.charge(len(result))
    return result


def store_item(meter: Meter, target: Any, key: Any, value: Any) -> None:
    """``target[key] = value`` for lists and dicts."""
    if isinstance(target, dict):
        if len(target) >= MAX_ITEMS:
            raise PlanLimitError(f"a dict of more than {MAX_ITEMS} items")
        target[key_of(key)] = value
    elif isinstance(target, list):
        if type(key) is not int or not -len(target) <= key < len(target):
            raise PlanError(f"index {describe(key)} is no place in {describe(target)}")
        target[key] = value
    else:
        remedy = "launch a kernel that writes it" if isinstance(target, StandIn) else ""
        raise PlanError(f"cannot assign into {describe(target)}", expected="a list or dict", remedy=remedy)


# -- functions ---------------------------------------------------------------------------------------------------


def bind(
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    required: tuple[str, ...],
    optional: dict[str, Any] | None = None,
    positional: int | None = None,
) -> dict[str, Any]:
    """Arguments of a call by parameter name. At most ``positional`` may be given by position (default: all)."""
    optional = optional or {}
    names = (*required, *optional)
    limit = len(names) if positional is None else positional
    if len(args) > limit:
        rest = ", ".join(names[limit:])
        hint = f"name the others: {rest}" if rest else f"{name}({', '.join(names)})"
        raise PlanError(f"{name}() got {len(args)} positional arguments", expected=f"at most {limit}", remedy=hint)
    bound = dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        if key not in names:
            raise PlanError(
                f"{name}() has no argument {key!r}{did_you_mean(key, names)}", expected=", ".join(names) or "none"
            )
        if key in bound:
            raise PlanError(f"{name}() got {key!r} twice")
        bound[key] = value
    for key in required:
        if key not in bound:
            raise PlanError(f"{name}() misses the argument {key!r}", expected=f"{name}({', '.join(names)})")
    return {**optional, **bound}
