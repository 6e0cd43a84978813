"""Which host a run finds itself on, and what GitLab and a plain machine make of what they are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cudaforge_action.github import GitHubHost
from cudaforge_action.gitlab import CODE_QUALITY, DOTENV, GitLabHost
from cudaforge_action.host import GOES_ON, Host, host_of
from cudaforge_action.plain import PlainHost
from cudaforge_action.records import Annotation


@pytest.mark.parametrize(
    ("environ", "kind", "name"),
    [
        ({"GITHUB_ACTIONS": "true"}, GitHubHost, "github"),
        ({"GITLAB_CI": "true"}, GitLabHost, "gitlab"),
        ({"CI": "true"}, PlainHost, "plain"),
        ({"GITHUB_ACTIONS": "false"}, PlainHost, "plain"),
    ],
)
def test_the_host_is_known_by_its_environment(environ: dict[str, str], kind: type, name: str, tmp_path: Path) -> None:
    host: Host = host_of(environ, tmp_path)
    assert type(host) is kind and host.context.host == name


def test_a_plain_machine_gets_files_and_lines_like_a_compilers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = PlainHost(tmp_path / "out")
    host.summary("# one\n")
    host.summary("two")
    host.output("regressions", "2")
    host.output("branch", "a\nb")
    host.annotate([Annotation("error", "slower", "by 2x\x1b[2J", "a/b.py", 7), Annotation("notice", "t", "m")])
    with host.group("forge"), host.quoting():
        host.mask("key")
    out, err = capfd.readouterr()
    assert err.splitlines() == ["a/b.py:7: error: slower: by 2x[2J", "notice: t: m", "== forge"] and out == ""
    assert (tmp_path / "out/summary.md").read_text() == "# one\n\ntwo\n"
    assert json.loads((tmp_path / "out/outputs.json").read_text()) == {"regressions": "2", "branch": "a\nb"}


@pytest.mark.parametrize("environ", [{}, {"GITLAB_CI": "true"}])
def test_a_stage_adds_to_what_earlier_ones_said(tmp_path: Path, environ: dict[str, str]) -> None:
    plan = host_of(environ, tmp_path)
    plan.summary("# Plan")
    plan.output("targets", "3")
    forge = host_of(environ | {GOES_ON: "1"}, tmp_path)
    forge.summary("# Forged")
    forge.output("forged", "2")
    assert (tmp_path / "summary.md").read_text() == "# Plan\n\n# Forged\n"
    assert json.loads((tmp_path / "outputs.json").read_text()) == {"targets": "3", "forged": "2"}
    if environ:
        assert (tmp_path / DOTENV).read_text() == "FORGE_TARGETS=3\nFORGE_FORGED=2\n"


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1}', "\udcff"])
def test_what_earlier_stages_left_may_be_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / "outputs.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    host = host_of({GOES_ON: "1"}, tmp_path)
    host.output("forged", "2")
    assert json.loads((tmp_path / "outputs.json").read_text()) == {"forged": "2"}


def remarks(folder: Path, *annotations: Annotation) -> list[dict[str, Any]]:
    GitLabHost({}, folder).annotate(annotations)
    found: list[dict[str, Any]] = json.loads((folder / CODE_QUALITY).read_text())
    return found


def test_gitlab_gets_remarks_as_a_code_quality_report(tmp_path: Path) -> None:
    slow, note = Annotation("error", "slower", "by 2x", "a/b.py", 7), Annotation("notice", "t", "m")
    first, second, other = remarks(tmp_path, slow, note, slow, Annotation("warning", "t", "m", "c.py"))
    assert [one["severity"] for one in (first, second, other)] == ["critical", "critical", "major"]
    assert first["location"] == {"path": "a/b.py", "lines": {"begin": 7}}
    assert other["location"]["lines"] == {"begin": 1}
    assert first["description"] == "slower: by 2x" and first["check_name"] == "cudaforge"
    assert len({one["fingerprint"] for one in (first, second, other)}) == 3


def test_a_remark_is_known_again_by_gitlab_when_only_its_figures_differ(tmp_path: Path) -> None:
    [before] = remarks(tmp_path, Annotation("error", "slower", "by 2x", "a/b.py", 7))
    [after] = remarks(tmp_path, Annotation("error", "slower", "by 3x", "a/b.py", 9))
    assert before["fingerprint"] == after["fingerprint"]


def test_gitlab_hands_on_what_a_dotenv_report_may_hold(tmp_path: Path) -> None:
    host = GitLabHost({}, tmp_path)
    host.output("pull-request-url", "https://x.org/1")
    host.output("matrix", "x" * 1000)
    host.output("sneaky", "a\nPATH=/tmp/evil")
    for number in range(40):
        host.output(f"n{number}", "1")
    lines = (tmp_path / DOTENV).read_text().splitlines()
    assert lines[0] == "FORGE_PULL_REQUEST_URL=https://x.org/1"
    assert len(lines) == 20 and not any("evil" in line or "MATRIX" in line for line in lines)
    assert json.loads((tmp_path / "outputs.json").read_text())["sneaky"] == "a\nPATH=/tmp/evil"


def test_gitlabs_sections_take_their_names_from_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with GitLabHost({}, tmp_path).group("a\r\x1b[0Ksection_end:1:b"):
        print("inside")
    first, inside, last = capsys.readouterr().out.split("\n")[:3]
    assert first.startswith("\x1b[0Ksection_start:") and first.endswith(":cudaforge_1\r\x1b[0Ka[0Ksection_end:1:b")
    assert inside == "inside" and last.endswith(":cudaforge_1\r\x1b[0K")
