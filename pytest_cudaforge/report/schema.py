"""The JSON Schema (draft 7) of the document behind ``--forge-json``, drawn from the records themselves.

It is shipped as ``forge-report.schema.json`` beside this file, for programs in any language; after a record grew,
``python -m pytest_cudaforge.report.schema`` writes it anew. Fields with a default are not required: within a version
fields are added, and a document written before that stays valid. Unknown fields are allowed for the same reason.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.resources
import json
import types
import typing
from pathlib import Path
from typing import Any, Literal

from pytest_cudaforge.guarded import GuardReport
from pytest_cudaforge.records import Round, Trace
from pytest_cudaforge.report.rows import Row, Totals
from pytest_cudaforge.report.standings import Standing

__all__ = ["FILE_NAME", "schema", "shipped"]

FILE_NAME = "forge-report.schema.json"
_SCALARS: dict[object, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    # What JSON has no number for is written as a word (records.to_json).
    float: {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]},
    Any: {},
}


def schema() -> dict[str, Any]:
    """The schema as plain data."""
    from pytest_cudaforge.report.json import FORMAT, VERSION

    drawn = _Definitions()
    properties = {
        "format": {"const": FORMAT},
        "version": {"const": VERSION},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "totals": drawn.of(Totals),
        "targets": {"type": "array", "items": _target(drawn)},
    }
    required = list(properties)
    properties["guard"] = drawn.of(GuardReport)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "What one run of pytest --forge, or of pytest --forge-guard, found",
        "type": "object",
        "required": required,
        "properties": properties,
        "definitions": dict(sorted(drawn.known.items())),
    }


def shipped() -> dict[str, Any]:
    """The schema as the package has it."""
    text = importlib.resources.files("pytest_cudaforge.report").joinpath(FILE_NAME).read_text(encoding="utf-8")
    return typing.cast(dict[str, Any], json.loads(text))


def _target(drawn: _Definitions) -> dict[str, Any]:
    """A row with what lies below it; a candidate is its digest here, its sources lie in the run directory."""
    line, entry = drawn.expanded(Row), drawn.expanded(Round)
    entry["properties"]["candidate"] = {"type": ["string", "null"], "description": "sha256 of language and sources"}
    standing = drawn.expanded(Standing)
    standing["properties"]["sol_percent"] = _SCALARS[float]
    hints = typing.get_type_hints(Trace)
    line["properties"] |= {name: drawn.of(hints[name]) for name in ("notes", "final", "baselines", "hardware")}
    line["properties"] |= {
        "standings": {"type": "array", "items": standing},
        "rounds": {"type": "array", "items": entry},
    }
    line["required"] = [*line["required"], "notes", "final"]
    return line


class _Definitions:
    """Schemas of records by name; a record that holds another one refers to it."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of an annotation, as :func:`records.to_json` writes its values."""
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if kind in _SCALARS:
            return _SCALARS[kind]
        if origin is Literal:
            return {"enum": list(args)}
        if origin in (typing.Union, types.UnionType):
            return {"anyOf": [self.of(arg) for arg in args]}
        if origin is tuple:
            return self._tuple(args)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return {"enum": [member.value for member in kind]}
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            if kind.__name__ not in self.known:
                self.known[kind.__name__] = {}  # a record may hold its own kind
                self.known[kind.__name__] = self.expanded(kind)
            return {"$ref": f"#/definitions/{kind.__name__}"}
        raise TypeError(f"no schema for {kind!r}; teach report/schema.py what records.to_json writes for it")

    def _tuple(self, args: tuple[Any, ...]) -> dict[str, Any]:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": self.of(args[0])}
        places = [self.of(arg) for arg in args]
        return {"type": "array", "items": places, "minItems": len(places), "maxItems": len(places)}

    def expanded(self, record: type) -> dict[str, Any]:
        """A record's own schema, not a reference to it."""
        hints, fields = typing.get_type_hints(record), dataclasses.fields(record)
        told = " ".join((record.__doc__ or "").split())
        return {
            "type": "object",
            "description": told,
            "required": [one.name for one in fields if _required(one)],
            "properties": {one.name: self.of(hints[one.name]) for one in fields},
        }


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _lines(data: dict[str, Any]) -> str:
    """JSON with a line for each record, so that a change is seen where it is."""
    records = ",\n".join(f'  "{name}": {json.dumps(record)}' for name, record in data["definitions"].items())
    rest = ",\n".join(f' "{name}": {json.dumps(value)}' for name, value in data.items() if name != "definitions")
    return f'{{\n{rest},\n "definitions": {{\n{records}\n }}\n}}\n'


if __name__ == "__main__":
    path = Path(__file__).with_name(FILE_NAME)
    path.write_text(_lines(schema()), encoding="utf-8")
    print(path)
