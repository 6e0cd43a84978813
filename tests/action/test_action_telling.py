"""What the guard's page and comment say: worst first, within the hosts' limits, and in nobody else's words."""

from __future__ import annotations

import re
from dataclasses import replace

import guard_records as made
import pytest
from cudaforge_action import guard_result, telling
from cudaforge_action.guard_result import GuardResult
from cudaforge_action.records import GuardRun, Unchecked
from guard_records import ABSENT, FASTER, ODD, SAME, SLOW, STALE, WRONG, result

from pytest_cudaforge.guarded import Change, GuardReport

MARKER = "<!-- cudaforge-guard:0123 -->"


def comment(told: GuardResult) -> str:
    url = "https://github.com/octo/kernels/actions/runs/7"
    return telling.comment(told, marker=MARKER, title="Forged kernels", sha="a" * 40, run_url=url)


def prose(text: str) -> str:
    """Without code blocks, whose text is nobody's markup."""
    return re.sub(r"(?ms)^(`{3,})\n.*?^\1$", "", text)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (result(SAME, FASTER), "2 as right and as fast as before"),
        (result(WRONG, SLOW, ODD, ABSENT, SAME, status=1), "1 wrong, 1 slower, 1 undecided, 1 not checked, 1 passed"),
        (result(), "nothing to guard"),
        (result(status=2), "the guard could not finish"),
        (GuardResult(GuardRun("error", 2, error="no device")), "the guard could not finish"),
        (result(SAME, status=1), "failed; 1 passed"),
        (result(SLOW, status=2), "the guard could not finish; 1 slower"),
    ],
)
def test_one_line_says_how_it_went(told: GuardResult, words: str) -> None:
    assert telling.headline(told) == words
    assert words in telling.summary(told).splitlines()[0] and words in comment(told).splitlines()[1]


def test_the_worst_is_told_first_and_what_was_left_out_with_its_remedy() -> None:
    told = result(SAME, ODD, SLOW, WRONG, STALE, ABSENT, status=1)
    text = telling.summary(told)
    rows = [line for line in text.splitlines() if line.startswith("| ") and "plan.py" in line]
    assert [re.search(r"forged/(\w+)-", row)[1] for row in rows] == ["wrong", "slow", "odd", "stale", "absent", "same"]  # type: ignore[index]
    for wanted in ("this kernel was made for sm_90", "on a runner with this hardware", "forge them again"):
        assert wanted in text.split("| ")[0]
    assert "25.0 % slower" in text and "Time: 11.5 s: measuring 10.0 s" in text


def test_green_is_for_what_was_looked_at() -> None:
    assert [telling.sign(one) for one in (result(SAME, ABSENT), result(ABSENT), result())] == ["✅", "⚠️", "✅"]


def test_an_error_is_told_in_its_own_words_and_cut_from_the_front() -> None:
    run = GuardRun(
        "error", 4, 4, error="x" * 20_000 + "\n```\nto do: fetch-depth: 0", unchecked=(Unchecked("all", "why"),)
    )
    text = telling.summary(GuardResult(run))
    assert "````\n[cut]" in text and "to do: fetch-depth: 0\n````" in text and len(text) < 9_000
    assert "**Not checked**" in text


def test_all_hosts_limits_hold_for_hostile_answers_of_500_targets() -> None:
    told = made.hostile()
    run = replace(told.run, error=made.HOSTILE * 999, note=made.HOSTILE * 999)
    left = tuple(Unchecked(made.HOSTILE * 9, made.HOSTILE * 9, made.HOSTILE * 9) for _ in range(500))
    worst = replace(told, run=replace(run, unchecked=left, seconds=((made.HOSTILE, 1.0),)))
    page, said = telling.summary(worst), comment(worst)
    assert 100_000 < len(page.encode()) <= telling.SUMMARY_BYTES < 1024 * 1024
    assert 30_000 < len(said.encode()) <= telling.COMMENT_BYTES < 65_536
    for text in (page, said):
        outside = prose(text)
        outside = outside.removeprefix(MARKER)
        for word in ("@everyone", "<script>", "#1", "GH-2", "#3", "!4", "https://evil", "\x1b", "\u202e", "<!--"):
            assert word not in outside, word
        assert not re.search(r"(?m)^\s*(/merge|/approve)", text), "a command, even in a block"
        assert not re.search(r"(?m)^\s*(## h|::error)", outside)
        assert not re.search(r"(?<!\\)\]\((?!https://github.com/octo)", outside)
        assert outside.count("<details>") == outside.count("</details>") > 1
    assert said.startswith(MARKER + "\n") and said.count("more, none of them worse") == 1


def test_five_hundred_honest_answers_show_what_is_bad() -> None:
    many = [replace(SAME, id=f"forged/k{number}/cpu/plan.py::guard[default]") for number in range(500)]
    told = result(*many, SLOW, WRONG, status=1)
    said, page = comment(told), telling.summary(told)
    assert said.index("forged/wrong") < said.index("forged/slow") < said.index("forged/k0")
    assert "25.0 % slower" in said and "INCORRECT" in said and "none of them worse" in said
    assert page.count("forged/k") == 500


@pytest.mark.parametrize(
    ("told", "modes"),
    [
        (result(SAME), ()),
        (result(SAME, ABSENT), ()),
        (result(SAME, replace(STALE, changes=())), ()),
        (result(FASTER), ("auto", "changes")),
        (result(SAME, STALE), ("auto", "changes")),
        (result(SAME, removed=("layers.py::Gone",)), ("auto", "changes")),
        (result(SAME, changes=(Change("cudaforge.yaml", "trials", "5", "1"),)), ("auto",)),
        (result(ODD), ("auto",)),
        (result(SLOW, status=1), ("auto", "changes", "failures")),
        (result(WRONG, status=0), ("auto", "changes", "failures")),
        (result(ODD, strict=True, status=1), ("auto", "changes", "failures")),
        (GuardResult(GuardRun("error", 2)), ("auto", "changes", "failures")),
    ],
)
def test_when_there_is_something_to_say(told: GuardResult, modes: tuple[str, ...]) -> None:
    assert tuple(when for when in ("auto", "changes", "failures") if telling.is_news(told, when)) == modes


def test_two_runs_with_one_result_differ_in_their_last_line_only() -> None:
    told = result(SAME, FASTER)
    other = telling.comment(told, marker=MARKER, title="Forged kernels", sha="a" * 40, run_url="https://github.com/x")
    assert comment(told).splitlines()[:-1] == other.splitlines()[:-1] != comment(told).splitlines()
    assert "[The run](https://github.com/x)" in other
    for url in ("", "https://x/)[a](https://evil", "javascript:evil", "https://x evil"):
        said = telling.comment(told, marker=MARKER, title="t", sha="", run_url=url)
        assert "evil" not in said and "[The run]" not in said


# -- what it comes to --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "status", "outcome", "ends"),
    [
        (made.report(SAME), 0, "pass", 0),
        (made.report(SLOW, SAME), 1, "regression", 1),
        (made.report(SLOW), 0, "regression", 1),
        (made.report(SLOW, WRONG), 1, "failed", 1),
        (made.report(ODD), 0, "inconclusive", 0),
        (made.report(ODD, strict=True), 1, "inconclusive", 1),
        (made.report(ODD, strict=True), 0, "inconclusive", 1),
        (made.report(SAME), 1, "failed", 1),
        (made.report(SAME), 2, "error", 2),
        (made.report(SAME), -9, "error", 137),
        (made.report(error="no device"), 1, "error", 1),
        (made.report(error="no device"), 0, "error", 2),
        (None, 0, "error", 2),
        (None, 4, "error", 4),
        (None, None, "error", 2),
    ],
)
def test_neither_status_nor_report_makes_bad_news_good(
    told: GuardReport | None, status: int | None, outcome: str, ends: int
) -> None:
    assert guard_result.judge(told, status) == outcome
    assert guard_result.exit_status(told, status) == ends
