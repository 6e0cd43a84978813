"""Init arguments as plain data, from the oracle to a module's worker.

Numbers, strings, booleans, None, lists, tuples, dicts, dtypes and devices; nothing that would have to be pickled.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from pytest_cudaforge.errors import TargetError

__all__ = ["decode_init", "encode_init", "other_settings"]


def encode_init(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``[args, kwargs]`` as JSON data. Raises TargetError naming the argument that is no plain data."""
    return [_encode(tuple(args), "init"), _encode(dict(kwargs), "init")]


def _encode(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, torch.Size):
        return {"tuple": [int(size) for size in value]}
    if type(value) is dict:
        return {"dict": [[_encode(k, where), _encode(item, f"{where}[{k!r}]")] for k, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise TargetError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent to a ModelNew",
        expected="numbers, strings, None, dtypes and devices in lists, tuples and dicts",
        remedy="make the object inside the constructor",
    )


def decode_init(data: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of :func:`encode_init`; ``data`` comes from the supervisor."""
    args, kwargs = data
    return _decode(args), _decode(kwargs)


def _decode(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind in ("list", "tuple"):
        items = [_decode(item) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in value}
    if kind == "float":
        return float(value)
    return getattr(torch, value) if kind == "dtype" else torch.device(value)


#: How many settings are changed alone, one after another.
_MOST_ALONE = 6


def other_settings(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = True, alone: bool = False
) -> list[tuple[Any, dict[str, Any]]]:
    """Arguments as another layer of a network has them: with other numbers, those that ``function`` has by default
    among them, or with other fractions alone, as whole ones may be sizes that must fit, or (not ``whole``) be too
    large, or with other choices of two alone; ``alone``: then with one fraction, or choice, and nothing else (a table
    may go by some of them). Empty where there are none. Raises TypeError where ``function`` does not take ``args`` and
    ``kwargs``, and ValueError where Python knows no signature of it.
    """
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    called = [given.args, given.kwargs]
    found = [_other(called, types) for types in ((float, int), (float,), (bool,))[not whole :]]
    if alone:
        count = _Places((float, bool))
        _other(called, (), count)
        found += [_other(called, (), _Places((float, bool), at)) for at in range(min(count.seen, _MOST_ALONE))]
    distinct = [other for at, other in enumerate(found) if other != called and other not in found[:at]]
    return [(args, kwargs) for args, kwargs in distinct]


class _Places:
    """Which of the values of these types is to change, in the order in which they are met; None: none of them."""

    def __init__(self, types: tuple[type, ...], wanted: int | None = None) -> None:
        self._types, self._wanted, self.seen = types, wanted, 0

    def meets(self, value: Any) -> bool:
        if type(value) not in self._types:
            return False
        self.seen += 1
        return self.seen - 1 == self._wanted


def _other(value: Any, types: tuple[type, ...], places: _Places | None = None) -> Any:
    """``value`` with all of ``types`` in it changed, or what ``places`` says."""
    if type(value) in (list, tuple):
        return type(value)(_other(item, types, places) for item in value)
    if type(value) is dict:
        return {key: _other(item, types, places) for key, item in value.items()}
    if not (type(value) in types or (places is not None and places.meets(value))):
        return value
    if type(value) is bool:
        return not value
    return value * 2 if type(value) is int else value / 8
