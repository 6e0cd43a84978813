"""The built-in functions, methods and ``math`` functions of a plan; none of them reaches a Python attribute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pytest_cudaforge.errors import PlanError, PlanLimitError
from pytest_cudaforge.runtime import values
from pytest_cudaforge.runtime.values import MAX_ITEMS, NUMBERS, DType, Meter, Native, StandIn, describe

# -- built-in functions ------------------------------------------------------------------------------------------


def _numbers(name: str, items: Any) -> None:
    for item in items:
        if type(item) not in NUMBERS:
            raise PlanError(f"{name}() of {describe(item)}", expected="numbers")


def _extreme(name: str, choose: Callable[..., Any]) -> Native:
    def call(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
        default = values.bind(name, [], kwargs, (), {"default": _MISSING})["default"]
        items = values.sequence(meter, args[0]) if len(args) == 1 else args
        if not items:
            if default is _MISSING:
                raise PlanError(f"{name}() of nothing", expected="at least one number, or default=...")
            return default
        _numbers(name, items)
        return choose(items)

    return Native(name, call)


_MISSING = object()


def _sum(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
    bound = values.bind("sum", args, kwargs, ("values",), {"start": 0})
    total = bound["start"]
    for item in values.sequence(meter, bound["values"]):
        total = values.binary(meter, "+", total, item)
    return total


def _len(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> int:
    value = values.bind("len", args, kwargs, ("value",))["value"]
    if isinstance(value, StandIn):
        return value.length()
    if isinstance(value, (str, tuple, list, dict, range)):
        return values.length_of(value)
    raise PlanError(f"len() of {describe(value)}", expected="a sequence, a dict or a tensor")


def _range(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> range:
    if kwargs or not 1 <= len(args) <= 3:
        raise PlanError("range() takes 1 to 3 positional integers")
    for item in args:
        if type(item) not in (int, bool):
            hint = "use // instead of /" if type(item) is float else ""
            raise PlanError(f"range() of {describe(item)}", expected="integers", remedy=hint)
    if len(args) == 3 and args[2] == 0:
        raise PlanError("range() with step 0")
    return range(*args)


def _enumerate(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    bound = values.bind("enumerate", args, kwargs, ("values",), {"start": 0})
    if type(bound["start"]) is not int:
        raise PlanError(f"enumerate() starting at {describe(bound['start'])}", expected="an integer")
    return list(enumerate(values.sequence(meter, bound["values"]), bound["start"]))


def _zip(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    strict = values.bind("zip", [], kwargs, (), {"strict": False})["strict"]
    columns = [values.sequence(meter, arg) for arg in args]
    if strict and len({len(column) for column in columns}) > 1:
        raise PlanError(f"zip(strict=True) of lengths {', '.join(str(len(column)) for column in columns)}")
    return list(zip(*columns, strict=False))


def _int(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> int:
    return int(_converted("int", args, kwargs, int))


def _float(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> float:
    return float(_converted("float", args, kwargs, float))


def _converted(name: str, args: list[Any], kwargs: dict[str, Any], kind: Callable[[Any], Any]) -> Any:
    value = values.bind(name, args, kwargs, (), {"value": 0})["value"]
    if not (type(value) in NUMBERS or (type(value) is str and len(value) <= 40)):
        advice = value.advice() if isinstance(value, StandIn) else ""
        raise PlanError(f"{name}() of {describe(value)}", expected="a number or a short string", remedy=advice)
    try:
        return values.checked_int(kind(value))
    except (ValueError, OverflowError) as error:
        raise PlanError(f"{name}() of {describe(value)}: {error}") from None


def _bool(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> bool:
    return values.truth(values.bind("bool", args, kwargs, (), {"value": False})["value"])


def _str(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> str:
    return values.text_of(meter, values.bind("str", args, kwargs, (), {"value": ""})["value"])


def _abs(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
    value = values.bind("abs", args, kwargs, ("value",))["value"]
    _numbers("abs", [value])
    return abs(value)


def _round(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
    bound = values.bind("round", args, kwargs, ("value",), {"ndigits": None})
    _numbers("round", [bound["value"]])
    digits = bound["ndigits"]
    if digits is not None and not (type(digits) is int and abs(digits) <= 40):
        raise PlanError(f"round() to {describe(digits)} digits", expected="a small integer")
    try:
        return values.checked_int(round(bound["value"], digits))
    except (ValueError, OverflowError) as error:
        raise PlanError(f"round({bound['value']!r}): {error}") from None


def _divmod(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
    bound = values.bind("divmod", args, kwargs, ("left", "right"))
    left, right = bound["left"], bound["right"]
    return values.binary(meter, "//", left, right), values.binary(meter, "%", left, right)


def _pow(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
    bound = values.bind("pow", args, kwargs, ("base", "exponent"))
    return values.binary(meter, "**", bound["base"], bound["exponent"])


def _list(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    return list(values.sequence(meter, values.bind("list", args, kwargs, (), {"values": ()})["values"]))


def _tuple(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(values.sequence(meter, values.bind("tuple", args, kwargs, (), {"values": ()})["values"]))


def _dict(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> dict[Any, Any]:
    source = values.bind("dict", args, {}, (), {"items": ()})["items"]
    meter.charge(len(kwargs))
    if isinstance(source, dict):
        meter.charge(len(source))
        return {**source, **kwargs}
    result: dict[Any, Any] = {}
    for pair in values.sequence(meter, source):
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise PlanError(f"dict() of {describe(pair)}", expected="(key, value) pairs")
        result[values.key_of(pair[0])] = pair[1]
    return {**result, **kwargs}


def _sorted(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    bound = values.bind("sorted", args, kwargs, ("values",), {"reverse": False}, positional=1)
    items = list(values.sequence(meter, bound["values"]))
    if not all(type(item) is str for item in items):
        _numbers("sorted", items)
    meter.charge(len(items) * 16)
    return sorted(items, reverse=values.truth(bound["reverse"]))


def _reversed(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    return list(values.sequence(meter, values.bind("reversed", args, kwargs, ("values",))["values"]))[::-1]


def _any(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> bool:
    items = values.sequence(meter, values.bind("any", args, kwargs, ("values",))["values"])
    return any(values.truth(item) for item in items)


def _all(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> bool:
    items = values.sequence(meter, values.bind("all", args, kwargs, ("values",))["values"])
    return all(values.truth(item) for item in items)


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str, DType),
    "tuple": (tuple,),
    "list": (list,),
    "dict": (dict,),
}


def _isinstance(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> bool:
    bound = values.bind("isinstance", args, kwargs, ("value", "kinds"))
    kinds = bound["kinds"] if isinstance(bound["kinds"], tuple) else (bound["kinds"],)
    for kind in kinds:
        if not (isinstance(kind, Native) and kind.name in _TYPES):
            raise PlanError(f"isinstance() with {describe(kind)}", expected=", ".join(_TYPES))
        # As in Python, a bool is an int.
        if type(bound["value"]) in _TYPES[kind.name] or (kind.name == "int" and type(bound["value"]) is bool):
            return True
    return False


#: A missing attribute costs a search for the nearest name, even where the message is not wanted.
_MISS_STEPS = 500


def _getattr(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
    bound = values.bind("getattr", args, kwargs, ("value", "name"), {"default": _MISSING})
    owner, name = _stand_in_and_name("getattr", bound)
    try:
        return owner.attribute(name)
    except MissingAttribute:
        if bound["default"] is _MISSING:
            raise
        meter.charge(_MISS_STEPS)
        return bound["default"]


def _hasattr(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> bool:
    owner, name = _stand_in_and_name("hasattr", values.bind("hasattr", args, kwargs, ("value", "name")))
    try:
        owner.attribute(name)
    except MissingAttribute:
        meter.charge(_MISS_STEPS)
        return False
    return True


def _stand_in_and_name(function: str, bound: dict[str, Any]) -> tuple[StandIn, str]:
    owner, name = bound["value"], bound["name"]
    if not isinstance(owner, StandIn):
        raise PlanError(f"{function}() on {describe(owner)}", expected="the module, a tensor or device")
    if type(name) is not str or name.startswith("_"):
        raise PlanError(f"{function}() with the name {describe(name)}", expected="a string without leading underscore")
    return owner, name


class MissingAttribute(PlanError):
    """A stand-in has no attribute of that name; ``getattr`` with a default and ``hasattr`` take it as an answer."""


BUILTINS: dict[str, Native] = {
    native.name: native
    for native in (
        _extreme("min", min),
        _extreme("max", max),
        Native("sum", _sum),
        Native("len", _len),
        Native("range", _range),
        Native("enumerate", _enumerate),
        Native("zip", _zip),
        Native("int", _int),
        Native("float", _float),
        Native("bool", _bool),
        Native("abs", _abs),
        Native("str", _str),
        Native("round", _round),
        Native("divmod", _divmod),
        Native("pow", _pow),
        Native("list", _list),
        Native("tuple", _tuple),
        Native("dict", _dict),
        Native("sorted", _sorted),
        Native("reversed", _reversed),
        Native("any", _any),
        Native("all", _all),
        Native("isinstance", _isinstance),
        Native("getattr", _getattr),
        Native("hasattr", _hasattr),
    )
}


# -- methods of plain values -------------------------------------------------------------------------------------


def method(value: Any, name: str) -> Native:
    """``value.name`` for numbers, strings, sequences and dicts. Raises PlanError naming what there is."""
    for kinds, table in _METHODS:
        if isinstance(value, kinds):
            if name in table:
                return _bound_method(value, name, table[name])
            near = values.did_you_mean(name, table)
            raise PlanError(
                f"{describe(value)} has no attribute {name!r}{near} in a plan", expected=", ".join(table) or "none"
            )
    raise PlanError(f"{describe(value)} has no attribute {name!r} in a plan")


def _bound_method(value: Any, name: str, function: Callable[..., Any]) -> Native:
    def call(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs:
            raise PlanError(f"{name}() takes no keyword arguments in a plan")
        low, high = _ARITY[name]
        if not low <= len(args) <= high:
            raise PlanError(
                f"{name}() got {len(args)} arguments", expected=str(low) if low == high else f"{low} or {high}"
            )
        return function(meter, value, *args)

    return Native(name, call)


def _append(meter: Meter, items: list[Any], value: Any) -> None:
    if len(items) >= MAX_ITEMS:
        raise PlanLimitError(f"a list of more than {MAX_ITEMS} items")
    items.append(value)


def _extend(meter: Meter, items: list[Any], more: Any) -> None:
    fresh = list(values.sequence(meter, more))
    if len(items) + len(fresh) > MAX_ITEMS:
        raise PlanLimitError(f"a list of more than {MAX_ITEMS} items")
    items.extend(fresh)


def _insert(meter: Meter, items: list[Any], place: Any, value: Any) -> None:
    if type(place) is not int:
        raise PlanError(f"insert() at {describe(place)}", expected="an integer")
    meter.charge(len(items))
    _append(meter, items, None)
    items.insert(max(-(1 << 31), min(place, 1 << 31)), value)
    items.pop()


def _pop(meter: Meter, items: list[Any], place: Any = -1) -> Any:
    value = values.item_of(meter, items, place)
    meter.charge(len(items) // 16)
    del items[place]
    return value


def _index(meter: Meter, items: Any, value: Any) -> int:
    for i, item in enumerate(values.sequence(meter, items)):
        if values.equal(meter, item, value):
            return i
    raise PlanError(f"index(): {describe(value)} is not in {describe(items)}")


def _count(meter: Meter, items: Any, value: Any) -> int:
    return sum(values.equal(meter, item, value) for item in values.sequence(meter, items))


def _numel(meter: Meter, shape: tuple[Any, ...]) -> Any:
    total: Any = 1
    for size in values.sequence(meter, shape):
        total = values.binary(meter, "*", total, size)
    return total


def _dict_get(meter: Meter, items: dict[Any, Any], key: Any, default: Any = None) -> Any:
    return items.get(values.key_of(key), default)


def _dict_items(meter: Meter, items: dict[Any, Any]) -> list[Any]:
    meter.charge(len(items))
    return list(items.items())


def _dict_keys(meter: Meter, items: dict[Any, Any]) -> list[Any]:
    meter.charge(len(items))
    return list(items)


def _dict_values(meter: Meter, items: dict[Any, Any]) -> list[Any]:
    meter.charge(len(items))
    return list(items.values())


def _join(meter: Meter, text: str, parts: Any) -> str:
    pieces = list(values.sequence(meter, parts))
    total = sum(len(_text("join", piece)) for piece in pieces) + len(text) * max(len(pieces) - 1, 0)
    if total > values.MAX_TEXT:
        raise PlanLimitError(f"a string of {total} characters", expected=f"at most {values.MAX_TEXT}")
    return values.checked_text(meter, str(text).join(str(piece) for piece in pieces))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise PlanError(f"{name}() of {describe(value)}", expected="strings", remedy="convert it with str(...)")
    return str(value)


def _startswith(meter: Meter, text: str, prefix: Any) -> bool:
    return str(text).startswith(_text("startswith", prefix))


def _endswith(meter: Meter, text: str, suffix: Any) -> bool:
    return str(text).endswith(_text("endswith", suffix))


def _replace(meter: Meter, text: str, old: Any, new: Any) -> str:
    old, new = _text("replace", old), _text("replace", new)
    total = len(text) + str(text).count(old) * len(new)
    if total > values.MAX_TEXT:
        raise PlanLimitError(f"a string of {total} characters", expected=f"at most {values.MAX_TEXT}")
    return values.checked_text(meter, str(text).replace(old, new))


def _split(meter: Meter, text: str, separator: Any = None) -> list[str]:
    if separator is not None and not _text("split", separator):
        raise PlanError("split() with an empty separator")
    parts = str(text).split(None if separator is None else str(separator))
    meter.charge(len(parts))
    return parts


def _strip(meter: Meter, text: str) -> str:
    return str(text).strip()


def _removeprefix(meter: Meter, text: str, prefix: Any) -> str:
    return str(text).removeprefix(_text("removeprefix", prefix))


def _removesuffix(meter: Meter, text: str, suffix: Any) -> str:
    return str(text).removesuffix(_text("removesuffix", suffix))


def _no_format(meter: Meter, text: str, *args: Any) -> str:
    raise PlanError("str.format() in a plan", remedy="use an f-string")


def _update(meter: Meter, items: dict[Any, Any], more: Any) -> None:
    if not isinstance(more, dict):
        raise PlanError(f"update() with {describe(more)}", expected="a dict")
    meter.charge(len(more))
    items.update(more)


def _copy(meter: Meter, items: Any) -> Any:
    meter.charge(len(items))
    return items.copy()


def _upper(meter: Meter, text: str) -> str:
    return values.checked_text(meter, str(text).upper())


def _lower(meter: Meter, text: str) -> str:
    return values.checked_text(meter, str(text).lower())


def _bit_length(meter: Meter, value: int) -> int:
    return int(value).bit_length()


def _is_integer(meter: Meter, value: float) -> bool:
    return float(value).is_integer()


_ARITY = {
    "append": (1, 1),
    "extend": (1, 1),
    "insert": (2, 2),
    "pop": (0, 1),
    "index": (1, 1),
    "count": (1, 1),
    "numel": (0, 0),
    "get": (1, 2),
    "items": (0, 0),
    "keys": (0, 0),
    "values": (0, 0),
    "join": (1, 1),
    "startswith": (1, 1),
    "endswith": (1, 1),
    "replace": (2, 2),
    "split": (0, 1),
    "strip": (0, 0),
    "removeprefix": (1, 1),
    "removesuffix": (1, 1),
    "format": (0, 99),
    "upper": (0, 0),
    "lower": (0, 0),
    "update": (1, 1),
    "copy": (0, 0),
    "bit_length": (0, 0),
    "is_integer": (0, 0),
}

_METHODS: tuple[tuple[Any, dict[str, Callable[..., Any]]], ...] = (
    ((bool, int), {"bit_length": _bit_length}),
    (float, {"is_integer": _is_integer}),
    (
        list,
        {
            "append": _append,
            "extend": _extend,
            "insert": _insert,
            "pop": _pop,
            "index": _index,
            "count": _count,
            "copy": _copy,
        },
    ),
    (tuple, {"index": _index, "count": _count, "numel": _numel}),
    (
        dict,
        {
            "get": _dict_get,
            "items": _dict_items,
            "keys": _dict_keys,
            "values": _dict_values,
            "update": _update,
            "copy": _copy,
        },
    ),
    (
        str,
        {
            "join": _join,
            "startswith": _startswith,
            "endswith": _endswith,
            "replace": _replace,
            "upper": _upper,
            "lower": _lower,
            "split": _split,
            "strip": _strip,
            "removeprefix": _removeprefix,
            "removesuffix": _removesuffix,
            "format": _no_format,
        },
    ),
)


# -- math --------------------------------------------------------------------------------------------------------


def _math_function(name: str, function: Callable[..., Any], low: int, high: int) -> Native:
    def call(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs or not low <= len(args) <= high:
            raise PlanError(
                f"math.{name}() got {len(args)} arguments", expected=f"{low}" if low == high else f"{low}-{high}"
            )
        for arg in args:
            if type(arg) not in NUMBERS:
                advice = arg.advice() if isinstance(arg, StandIn) else ""
                raise PlanError(f"math.{name}() of {describe(arg)}", expected="a number", remedy=advice)
        try:
            return values.checked_int(function(*args))
        except (ValueError, OverflowError, TypeError, ZeroDivisionError) as error:
            raise PlanError(f"math.{name}({', '.join(map(repr, args))}): {error}") from None

    return Native(f"math.{name}", call)


def _prod(meter: Meter, args: list[Any], kwargs: dict[str, Any]) -> Any:
    bound = values.bind("math.prod", args, kwargs, ("values",), {"start": 1})
    total = bound["start"]
    for item in values.sequence(meter, bound["values"]):
        total = values.binary(meter, "*", total, item)
    return total


_ONE_ARGUMENT = (
    *(
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "ceil",
        "cos",
        "cosh",
        "degrees",
        "erf",
        "erfc",
        "exp",
        "expm1",
    ),
    *(
        "fabs",
        "floor",
        "isfinite",
        "isinf",
        "isnan",
        "isqrt",
        "log10",
        "log1p",
        "log2",
        "radians",
        "sin",
        "sinh",
        "sqrt",
    ),
    *("tan", "tanh", "trunc"),
)

MATH: dict[str, Any] = {
    **{name: _math_function(name, getattr(math, name), 1, 1) for name in _ONE_ARGUMENT},
    **{name: _math_function(name, getattr(math, name), 2, 2) for name in ("atan2", "copysign", "fmod", "pow")},
    "log": _math_function("log", math.log, 1, 2),
    "gcd": _math_function("gcd", math.gcd, 0, 16),
    "lcm": _math_function("lcm", math.lcm, 0, 16),
    "hypot": _math_function("hypot", math.hypot, 0, 16),
    "prod": Native("math.prod", _prod),
    "pi": math.pi,
    "e": math.e,
    "tau": math.tau,
    "inf": math.inf,
    "nan": math.nan,
}


class MathModule(StandIn):
    """``math`` in a plan."""

    kind = "the module math"

    def attribute(self, name: str) -> Any:
        if name in MATH:
            return MATH[name]
        raise PlanError(f"math has no {name!r} in a plan{values.did_you_mean(name, MATH)}", expected=", ".join(MATH))


MATH_MODULE = MathModule()
