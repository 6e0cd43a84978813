"""The shipped schema is the records' own, and holds what is written to it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
from report_records import hostile_trace, rich_trace

from pytest_cudaforge.records import Trace, Usage
from pytest_cudaforge.report import json as report_json
from pytest_cudaforge.report import schema
from pytest_cudaforge.report.rows import totals


@functools.cache
def holds() -> Callable[[Any], Any]:
    """Raises for what the shipped schema does not allow."""
    return fastjsonschema.compile(schema.shipped())  # type: ignore[no-any-return]


def shape(data: Any) -> Any:
    """Without the words: a docstring may be mended without writing the schema anew."""
    if isinstance(data, dict):
        return {name: shape(value) for name, value in data.items() if name != "description" or isinstance(value, dict)}
    return [shape(value) for value in data] if isinstance(data, list) else data


def test_the_shipped_schema_is_up_to_date() -> None:
    assert shape(schema.shipped()) == shape(schema.schema()), (
        "a record changed: python -m pytest_cudaforge.report.schema"
    )


@pytest.mark.parametrize(
    "traces",
    [(), (rich_trace(), hostile_trace()), (Trace("a.py::S", "cpp", "skipped", "no headroom"),)],
    ids=["nothing", "everything", "skipped"],
)
def test_documents_are_valid(traces: tuple[Trace, ...], tmp_path: Path) -> None:
    data = report_json.document(traces, totals(traces, Usage(), 1.0), environment={"device": "cpu"})
    report_json.write(tmp_path / "report.json", data)
    holds()(json.loads((tmp_path / "report.json").read_text(encoding="utf-8")))


def test_an_older_document_of_this_version_is_valid_and_a_wrong_one_is_not() -> None:
    data = report_json.document([rich_trace()], totals([rich_trace()], Usage(), 1.0))
    for name in ("sol_percent", "baselines", "hardware", "standings"):  # fields that came later
        del data["targets"][0][name]
    holds()(data)
    for name, value in (("outcome", "splendid"), ("rounds", None), ("notes", [1])):
        with pytest.raises(fastjsonschema.JsonSchemaException, match=name):
            holds()({**data, "targets": [{**data["targets"][0], name: value}]})


def test_numbers_that_json_does_not_have_are_words() -> None:
    trace = rich_trace()
    assert trace.final is not None and trace.final.verification is not None
    found = replace(trace.final.verification, worst_ratio=float("inf"))
    trace = replace(trace, final=replace(trace.final, verification=found))
    data = report_json.document([trace], totals([trace], Usage(), 1.0))
    assert data["targets"][0]["final"]["verification"]["worst_ratio"] == "inf"
    holds()(data)
