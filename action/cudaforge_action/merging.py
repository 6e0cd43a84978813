"""One JUnit file from those of many jobs. They come from machines that ran candidates: each is put together again from
its known parts, and one that is no JUnit file is left out with a word, so that a lost shard costs nobody the rest.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import ParseError

import junitparser

from pytest_cudaforge.report.escaping import one_line, plain

__all__ = ["MergedJUnit", "merge_junit"]

_MOST_BYTES, _MOST_CASES, _MOST_PROPERTIES = 32 << 20, 20_000, 60
_NAME_CHARS, _TEXT_CHARS = 1_000, 20_000
#: Half of its functions have no types.
_JUNIT: Any = junitparser
#: What would be said before the first element but for a declaration: entities that grow, files that are read.
_DOCTYPE = re.compile(r"<!\s*(?:DOCTYPE|ENTITY)", re.IGNORECASE)
_DECLARATION = re.compile(r"\A\ufeff?\s*<\?xml[^>]*\?>")
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class MergedJUnit:
    """``text``: the file's bytes. ``notes``: which files were left out, and why."""

    text: bytes
    tests: int = 0
    failures: int = 0
    errors: int = 0
    skipped: int = 0
    notes: tuple[str, ...] = ()


def merge_junit(files: Mapping[str, bytes]) -> MergedJUnit:
    """``files``: by the name of the shard that each is of, which becomes part of its suites' names. Raises nothing."""
    whole, notes = _JUNIT.JUnitXml("pytest-cudaforge"), []
    for shard, data in files.items():
        try:
            suites = list(_suites(shard, data))
        except (ValueError, ParseError, junitparser.JUnitXmlError, RecursionError) as error:
            notes.append(f"the JUnit file of {one_line(plain(shard), 80)} was left out: {one_line(str(error), 200)}")
            continue
        for suite in suites:
            # Not add_testsuite(), which holds every suite against every other.
            whole.append(suite)
    whole.update_statistics()
    written = io.BytesIO()
    whole.write(written)
    counts = {name: int(getattr(whole, name) or 0) for name in ("tests", "failures", "errors", "skipped")}
    return MergedJUnit(written.getvalue(), **counts, notes=tuple(notes))


def _suites(shard: str, data: bytes) -> Iterator[Any]:
    """Raises ValueError (UnicodeDecodeError), ParseError or JUnitXmlError for what is no JUnit file of ours."""
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    # Without its declaration no other encoding than the one that was looked at can be meant.
    text = _DECLARATION.sub("", data.decode("utf-8"))
    if _DOCTYPE.search(text):
        raise ValueError("it declares a document type")
    count = 0
    for suite in _JUNIT.JUnitXml.fromstring(text.encode()):
        made = _JUNIT.TestSuite(_told(f"{shard}: {suite.name or 'pytest'}", _NAME_CHARS))
        made.timestamp, made.hostname = _told(suite.timestamp or "", 100), _told(suite.hostname or "", 100)
        for case in suite:
            count += 1
            if count > _MOST_CASES:
                raise ValueError(f"it holds more than {_MOST_CASES} cases")
            made.append(_case(case))
        yield made


def _case(case: Any) -> Any:
    """Raises ValueError for a time that is none."""
    made = _JUNIT.TestCase(_told(case.name or "", _NAME_CHARS), _told(case.classname or "", _NAME_CHARS))
    seconds = float(case.time or 0.0)
    made.time = seconds if math.isfinite(seconds) and 0.0 <= seconds < 1e9 else 0.0
    results = []
    for kind in (_JUNIT.Failure, _JUNIT.Error, _JUNIT.Skipped):
        for found in itertools.islice(case.iterchildren(kind), 4):
            result = kind(_told(found.message or "", _TEXT_CHARS))
            result.text = _told(found.text or "", _TEXT_CHARS)
            results.append(result)
    made.result = results
    given = case.child(_JUNIT.Properties)
    if given is not None:
        kept = _JUNIT.Properties()
        for one in itertools.islice(given, _MOST_PROPERTIES):
            kept.add_property(_JUNIT.Property(_told(one.name or "", _NAME_CHARS), _told(one.value or "", _TEXT_CHARS)))
        made.append(kept)
    return made


def _told(text: str, most: int) -> str:
    text = _NOT_XML.sub("", plain(text))
    return text if len(text) <= most else text[:most] + "…"
