"""One JUnit file from many, some of which lie."""

from __future__ import annotations

import pytest
from cudaforge_action.merging import merge_junit
from junitparser import JUnitXml

SUITE = (
    '<testsuite name="pytest" tests="3" hostname="box" timestamp="2026-11-22T02:00:00" time="2">'
    '<testcase classname="layers.A" name="forge" time="1.5"><properties><property name="status" value="forged"/>'
    "</properties></testcase>"
    '<testcase classname="layers.B" name="forge" time="0.5">'
    '<failure message="no &lt;kernel&gt;">why &amp; how</failure></testcase>'
    '<testcase classname="layers.C" name="forge"><skipped message="later"/></testcase></testsuite>'
)
HONEST = f'<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests">{SUITE}</testsuites>'.encode()


def test_all_shards_in_one_file() -> None:
    merged = merge_junit({"01-cpu": HONEST, "02-sm_90": SUITE.encode()})
    assert (merged.tests, merged.failures, merged.errors, merged.skipped, merged.notes) == (6, 2, 0, 2, ())
    suites = list(JUnitXml.fromstring(merged.text))
    assert [suite.name for suite in suites] == ["01-cpu: pytest", "02-sm_90: pytest"]
    first, second, third = suites[0]
    assert (first.classname, first.name, first.time) == ("layers.A", "forge", 1.5)
    assert b'<property name="status" value="forged"' in merged.text
    assert second.result[0].message == "no <kernel>" and second.result[0].text == "why & how"
    assert third.is_skipped and suites[0].hostname == "box" and suites[0].tests == 3


BOMB = '<!DOCTYPE a [<!ENTITY b "bbbbbbbb"><!ENTITY c "&b;&b;&b;&b;">]>'
READER = '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/hostname">]>'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"<testsuites>",
        b"<html/>",
        b"<testsuites>\0</testsuites>",
        f'{BOMB}<testsuites><testsuite name="&c;"/></testsuites>'.encode(),
        f'{READER}<testsuites><testsuite name="x"><testcase name="&b;"/></testsuite></testsuites>'.encode(),
        f'<?xml version="1.0" encoding="utf-16"?>{READER}<testsuites/>'.encode("utf-16"),
        b"<?xml version='1.0' encoding='utf-7'?>+ADwAIQ-DOCTYPE a+AD4-<testsuites/>",
        b'<testsuite><testcase name="a" time="soon"/></testsuite>',
        b"<testsuite>" + b'<testcase name="a"/>' * 20_001 + b"</testsuite>",
        b"<testsuites>" + b"<a>" * 50_000,
    ],
    ids=[
        *("empty", "bytes", "open", "page", "nul", "entities", "file", "utf-16", "utf-7", "time", "many", "deep"),
    ],
)
def test_what_is_no_junit_file_is_left_out_with_a_word(data: bytes) -> None:
    merged = merge_junit({"bad\n::error::x": data, "01-cpu": HONEST})
    assert merged.tests == 3 and len(merged.notes) == 1
    assert "\n" not in merged.notes[0] and "left out" in merged.notes[0]


def test_texts_are_cut_and_cleaned() -> None:
    data = (
        f'<testsuite name="{"n" * 5000}"><testcase name="a&#x202e;b" time="nan"><failure message="{"m" * 50_000}"/>'
        "</testcase><system-out>secret</system-out></testsuite>"
    ).encode()
    merged = merge_junit({"01-cpu": data})
    assert len(merged.text) < 30_000 and b"secret" not in merged.text and "\u202e" not in merged.text.decode()
    (suite,) = JUnitXml.fromstring(merged.text)
    assert next(iter(suite)).time == 0.0


def test_deep_but_closed_is_flat_afterwards() -> None:
    data = b"<testsuite><testcase name='a'>" + b"<x>" * 5000 + b"</x>" * 5000 + b"</testcase></testsuite>"
    assert merge_junit({"01-cpu": data}).tests in (0, 1)


def test_nothing_is_a_file_too() -> None:
    merged = merge_junit({})
    assert merged.tests == 0 and list(JUnitXml.fromstring(merged.text)) == []
