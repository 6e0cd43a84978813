"""The page of a run: whole without network or script, sane for partial runs, deaf to what a model writes into it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from flow_records import make_round
from report_records import hostile_trace, make_profile, rich_trace

from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.records import Status, Trace, Usage
from pytest_cudaforge.report import html
from pytest_cudaforge.report.rows import totals

#: Elements that are closed by nothing.
VOID = {"meta", "br", "hr", "img", "rect", "line", "circle", "path", "polyline"}


class Page(HTMLParser):
    """What a browser would make of it: elements in their order, attributes, text; nesting is checked."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(*traces: Trace) -> Page:
    return Page(html.document(traces, totals(traces, Usage(10, 20, 0, 0.5), 60.0), environment={"python": "3.10"}))


def test_everything_asked_for_is_there() -> None:
    text = page_of(rich_trace()).text
    for part in (
        "1 of 1 targets forged", "Rounds", "BUILD_ERROR", "Speed", "40 %", "Where the time goes", "memory bandwidth",
        "hardware counters of the GPU", "quick set only", "Metrics before and after:", "round 2", "round 3",
        "Uncoalesced", "31 %", "kernel.cpp:7", "61 %", "loop vectorized", "What the Judge said", "Not in the evidence", 
        "Evidence: ncu, scale: memory bandwidth (dram__throughput",
        "2.00× vs eager, round 2 had 0.80×: 2.50 times as fast (expected: 1.50)",
        "Round 3 against round 2: 1 line added, 1 removed",
        "Accuracy against the oracle", "1 of 1 cases passed", "Test CPU (cpu)", "50 GB/s", "grade B", "python", "$0.5",
    ):  # fmt: skip
        assert part in text, part


def test_it_needs_no_network_and_no_script() -> None:
    page = page_of(rich_trace(), rich_trace("b.py::B"))
    assert not page.elements.keys() & {"script", "link", "iframe", "img", "object", "embed", "form", "base"}
    assert all(value.startswith("#") for _, name, value in page.attributes if name in ("href", "src", "action"))
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_many_targets_have_a_table_of_contents_whose_links_lead_somewhere() -> None:
    page = page_of(*(rich_trace(f"a.py::T{n}") for n in range(5)))
    targets = {value for _, name, value in page.attributes if name == "id"}
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert len(links) == 10 and {link.removeprefix("#") for link in links} == targets
    assert page_of(rich_trace()).elements["nav"] == 0


def test_what_a_model_writes_stays_text() -> None:
    clean, attacked = page_of(rich_trace()), page_of(hostile_trace())
    assert attacked.elements.keys() <= clean.elements.keys() | {"summary", "details"}
    assert attacked.elements["script"] == attacked.elements["img"] == attacked.elements["a"] - 1 == 0
    assert all(not name.startswith("on") for _, name, _ in attacked.attributes)
    assert "<script>alert(1)</script>" in attacked.text and "⟨U+202E⟩" in attacked.text
    assert not re.search("[\x00-\x08\x1b\u202e\u200b\ud800-\udfff\ufffe]", attacked.text)


def test_a_hostile_page_can_be_written(tmp_path: Path) -> None:
    trace = hostile_trace()
    html.write(tmp_path / "new" / "page.html", html.document([trace], totals([trace], Usage(), 1.0)))
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("traces", "wanted"),
    [
        ((), "There is nothing to show."),
        ((Trace("a.py::S", "cpp", "skipped", "no headroom"),), "no headroom"),
        ((Trace("a.py::E", "cpp", "error", "the oracle failed"),), "the oracle failed"),
        ((Trace("a.py::C", "cpp", "cancelled", "Ctrl-C", (make_round(1),)),), "round 1"),
        ((Trace("a.py::F", "cpp", "failed", "none", (make_round(1, status=Status.TIMEOUT),)),), "TIMEOUT"),
        ((Trace("a.py::N", "cpp", "failed", "none", (make_round(1, status=None),)),), "NO CANDIDATE"),
        ((Trace("a.py::K", "cpp", "kept_reference", "slower", (make_round(1, speedup=0.5),)),), "0.50×"),
        ((replace(rich_trace(), rounds=(), winner=None, final=None),), "20 %"),
    ],
)
def test_partial_runs_give_a_sane_page(traces: tuple[Trace, ...], wanted: str) -> None:
    page = page_of(*traces)
    assert wanted in page.text and "None" not in page.text and "nan" not in page.text.split()


@pytest.mark.parametrize("rung", ["ncu", "cupti", "counters", "static"])
def test_a_profile_of_any_rung_says_what_it_stands_on(rung: str) -> None:
    trace = rich_trace()
    assert trace.final is not None
    bare = make_profile(rung=rung, kernels=(), rules=(), lines=(), facts=(), remarks=(), notes=("ncu is not here",))
    page = page_of(replace(trace, rounds=(), final=replace(trace.final, profile=bare)))
    assert "Where the time goes" in page.text and "ncu is not here" in page.text


def test_a_compiler_configuration_is_not_called_a_kernel() -> None:
    trace = rich_trace()
    assert trace.final is not None
    page = page_of(replace(trace, final=replace(trace.final, work="compiler")))
    assert "compiler configuration" in page.text and "A compiler configuration, not a kernel" in page.text


def test_a_page_of_one_target_is_small() -> None:
    page = html.document([rich_trace()], totals([rich_trace()], Usage(), 1.0))
    assert len(page) < 60_000


def test_a_page_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--forge-html"):
        html.write(tmp_path / "file" / "page.html", "")
