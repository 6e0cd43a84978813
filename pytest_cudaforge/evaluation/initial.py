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


def other_settings(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool = True
) -> list[tuple[Any, dict[str, Any]]]:
    """Arguments as another layer of a network has them: with other numbers, those that ``function`` has by default
    among them, or with other fractions alone, as whole ones may be sizes that must fit, or (not ``whole``) be too
    large, or with other choices of two alone. Empty where there are none. Raises TypeError where ``function`` does
    not take ``args`` and ``kwargs``, and ValueError where Python knows no signature of it.
    """
    given = inspect.signature(function).bind(*args, **kwargs)
    given.apply_defaults()
    found = []
    for types in ((float, int), (float,), (bool,))[not whole :]:
        other = [_other(value, types) for value in (given.args, given.kwargs)]
        if other != [given.args, given.kwargs]:
            found.append((other[0], other[1]))
    return found


def _other(value: Any, types: tuple[type, ...]) -> Any:
    if type(value) is bool:
        return (not value) if bool in types else value
    if type(value) in types:
        return value * 2 if type(value) is int else value / 8
    if type(value) in (list, tuple):
        return type(value)(_other(item, types) for item in value)
    if type(value) is dict:
        return {key: _other(item, types) for key, item in value.items()}
    return value
