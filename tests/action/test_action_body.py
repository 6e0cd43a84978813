"""What a pull request says: whole sections within its limit, and hostile text that stays text."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from cudaforge_action.body import Facts, best_speedup, body, headline, sections, title
from cudaforge_action.branch import Kernel
from cudaforge_action.pull_request import MAX_BODY, marked
from flow_records import make_candidate, make_evaluation
from report_records import HOSTILE, hostile_trace, rich_trace

from pytest_cudaforge.records import Guard, to_json
from pytest_cudaforge.report import markdown
from pytest_cudaforge.runtime.manifest import Entry, EntryFile, EntryWorkload

FACTS = Facts("main", "cudaforge/forge", "forged", "https://github.com", "octo/kernels")
EVIL = f"fixes #1, closes octo/kernels#2, Fixes GH-3 @octocat https://evil.example/x {HOSTILE}"


def kernel(name: str = "Scale", speedup: float = 2.0, report: str = "", **verdict: object) -> Kernel:
    target = f"layers.py::{name}"
    told = replace(make_evaluation(make_candidate(), speedup=speedup, target=target), **verdict)  # type: ignore[arg-type]
    entry = Entry(
        target, "layers", name, "class", "layers.py", "d" * 64, "cpp", "cpu", f"{name.lower()}-000000/cpu",
        (EntryFile("kernel.cpp", "e" * 64),), Guard(), (EntryWorkload("default", (), speedup),), "2.13", "cpu", "fp32",
        "eval", isolation="B",
    )  # fmt: skip
    files = {"evaluation.json": json.dumps(to_json(told)).encode(), "report.md": report.encode()}
    return Kernel(entry, files)


def length(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


def test_what_a_reviewer_asks_is_there() -> None:
    told = body([kernel(report=markdown.report(rich_trace()))], replace(FACTS, trailers={"Cudaforge-Models": "gpt-5"}))
    row = "| layers.py::Scale | cpp, cpu | 1.00 µs | 0.50 µs | 2.00× (1.96–2.04) |  | 0.9 (16, fp64) | B |  |"
    assert row in told
    for heading in ("#### Speed", "#### Accuracy", "#### Profile", "#### What the Judge said", "#### Cost"):
        assert heading in told
    assert "**memory bandwidth**" in told and "Uncoalesced" in told and "What the profiler's rules say" in told
    assert "- forged with: gpt-5" in told
    assert "## How to run it again" in told and "## How to roll back" in told
    assert told.count("<details>") == told.count("</details>") == 1


def test_in_a_few_words() -> None:
    both = [kernel(), kernel("Shift", 3.1)]
    assert (title(both), headline(both)) == ("Forge 2 kernels: up to 3.10× vs eager", "2 kernels verified, best 3.1x")
    assert (title(both[:1]), headline(both[:1])) == ("Forge Scale: 2.00× vs eager", "1 kernel verified, best 2.0x")
    assert best_speedup([]) is None


@pytest.mark.parametrize("count", [1, 12, 500])
def test_hostile_kernels_stay_within_the_limit_and_act_on_nobody(count: int) -> None:
    report = markdown.report(replace(hostile_trace(), reason=EVIL, notes=(EVIL,) * 3))
    report += f"\n## Provenance\n\n- machine: {markdown.escape(EVIL)}\n"
    kernels = [kernel(f"K{number}", 1 + number / 100, report, device=EVIL) for number in range(count)]
    facts = replace(FACTS, trailers={"Cudaforge-Lost": EVIL, "Cudaforge-Run": "javascript:alert(1)"})
    told = marked(body(kernels, facts))
    assert length(told) <= MAX_BODY
    assert told.count("<details>") == told.count("</details>") >= min(count, 5)
    assert told.rstrip().endswith("-->") and "## How to roll back" in told
    assert_inert(told)


def assert_inert(text: str) -> None:
    """Nothing outside of code blocks is a mention, a reference, a link of others, or markup of HTML."""
    prose = re.sub(r"(?ms)^(`{3,})[^\n]*\n.*?^\1$", "", text)
    for pattern in (
        r"@[\w]",
        r"(?<![&\w])#\d",
        r"(?i)gh-\d",
        r"(?<!\]\()https?://",
        r"(?<!\\)!\[",
        r"javascript:\S*\]",
    ):
        assert re.findall(pattern, prose) == [], pattern
    tags = set(re.findall(r"<[^>\n]{1,40}>?", prose))
    assert tags <= {"<details>", "<summary>", "</summary>", "</details>"} | {
        tag for tag in tags if tag.startswith("<!-- cudaforge body=")
    }
    links = set(re.findall(r"(?<!\\)\]\(([^)]*)\)", prose))
    assert all(link.startswith("https://github.com/octo/kernels/") for link in links)


def test_the_longest_text_of_a_model_is_left_out_as_a_whole() -> None:
    trace = rich_trace(said="word " * 40_000)
    told = body([kernel(report=markdown.report(trace)), kernel("Shift", report=markdown.report(rich_trace()))], FACTS)
    assert length(told) <= MAX_BODY
    assert "Too long to be shown here: what the judge said" in told
    assert told.count("#### What the Judge said") == 1
    assert_inert(told)


def test_headings_inside_code_are_none() -> None:
    text = "# t\n\n## Speed\n\nfast\n\n````\n## Cost\n```\n<b>\n## Profile\n````\n\nmore\n\n## Cost\n\n$1\n"
    assert sections(text) == {"Speed": "fast\n\n````\n## Cost\n```\n<b>\n## Profile\n````\n\nmore", "Cost": "$1"}


def test_a_kernel_without_a_readable_verdict_is_told_by_its_entry() -> None:
    bare = Kernel(kernel().entry, {"evaluation.json": b"[" * 100_000})
    assert "| layers.py::Scale | cpp, cpu |  |  | 2.00× |" in body([bare], FACTS)
