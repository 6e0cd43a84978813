"""The fake GitHub against what the real one documents: the other tests stand on it."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import requests
from cudaforge_action.api import ApiError, GitHub
from cudaforge_action.context import github_context
from fake_git import git
from fake_github import NOT_ACCESSIBLE, NOT_PERMITTED, READER, TOKEN, FakeGitHub, fake_github
from runner_log import variables


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeGitHub]:
    with fake_github(tmp_path) as hub:
        hub.commit("main", {"a.py": "1", "b/c.bin": b"\x00\xff"})
        hub.commit("topic", {"a.py": "2", "b/c.bin": None})
        yield hub


def client(hub: FakeGitHub, token: str = TOKEN) -> GitHub:
    return GitHub(hub.api_url, token, hub.repository, sleep=lambda wait_s: None, patience_s=0)


def refused(hub: FakeGitHub, path: str, body: Mapping[str, object], token: str = TOKEN) -> str:
    with pytest.raises(ApiError) as caught:
        client(hub, token).post(path, body)
    return f"{caught.value.status} {caught.value.reason}"


PULL = {"title": "t", "head": "topic", "base": "main", "body": "b"}


def test_a_pull_request_lives_follows_its_branch_and_dies_with_it(hub: FakeGitHub) -> None:
    api = client(hub)
    made = api.post("pulls", PULL | {"draft": True})
    assert (made["number"], made["state"], made["draft"]) == (1, "open", True)
    assert made["html_url"] == f"{hub.url}/octo/kernels/pull/1"
    assert "422 Validation Failed; A pull request already exists for octo:topic." in refused(hub, "pulls", PULL)
    tip = hub.commit("topic", {"a.py": "3"})
    assert api.get("pulls/1")["head"]["sha"] == tip
    assert api.patch("pulls/1", {"title": "new"})["title"] == "new"
    assert [one["number"] for one in api.paginate("pulls", head="octo:topic", base="main")] == [1]
    assert list(api.paginate("pulls", head="octo:other")) == []
    api.delete("git/refs/heads/topic")
    assert api.get("pulls/1")["state"] == "closed" and "topic" not in hub.branches
    assert [one["number"] for one in api.paginate("pulls", state="closed")] == [1]
    with pytest.raises(ApiError, match="Reference does not exist"):
        api.delete("git/refs/heads/topic")


def test_a_pull_request_is_refused_as_github_refuses_it(hub: FakeGitHub) -> None:
    assert "PullRequest base invalid" in refused(hub, "pulls", PULL | {"base": "gone"})
    assert "PullRequest head invalid" in refused(hub, "pulls", PULL | {"head": "gone"})
    hub.commit("same", {}, base="main")
    git(hub.bare, "update-ref", "refs/heads/same", hub.branches["main"])
    assert "No commits between main and same" in refused(hub, "pulls", PULL | {"head": "same"})
    assert "body is too long" in refused(hub, "pulls", PULL | {"body": "x" * 65_537})
    hub.allow_pull_requests = False
    assert refused(hub, "pulls", PULL) == f"403 {NOT_PERMITTED}"
    hub.grant("ghp_person", "ada", pull_requests="write")
    assert client(hub, "ghp_person").post("pulls", PULL)["user"]["login"] == "ada"


def test_attributes_of_a_pull_request(hub: FakeGitHub) -> None:
    api = client(hub)
    api.post("pulls", PULL)
    api.post("issues/1/labels", {"labels": ["fast", "gpu"]})
    api.post("issues/1/assignees", {"assignees": ["ada", "nobody"]})
    api.post("pulls/1/requested_reviewers", {"reviewers": ["grace"], "team_reviewers": ["kernels"]})
    assert "not a collaborator" in refused(hub, "pulls/1/requested_reviewers", {"reviewers": ["nobody"]})
    api.delete("issues/1/labels/gpu")
    pull = hub.pulls[1]
    assert (pull.labels, pull.assignees, pull.reviewers, pull.team_reviewers) == (
        ["fast"],
        ["ada"],
        ["grace"],
        ["kernels"],
    )


def test_statuses_of_a_commit(hub: FakeGitHub) -> None:
    api, sha = client(hub), hub.branches["topic"]
    for state in ("pending", "success"):
        api.post(f"statuses/{sha}", {"state": state, "context": "cudaforge/guard", "description": state})
    assert [one["state"] for one in api.paginate(f"commits/{sha}/statuses")] == ["success", "pending"]
    assert api.get("commits/topic/status")["state"] == "success"
    assert "No commit found for SHA" in refused(hub, f"statuses/{'0' * 40}", {"state": "success"})
    assert "Status state invalid" in refused(hub, f"statuses/{sha}", {"state": "fine"})
    assert "too long" in refused(hub, f"statuses/{sha}", {"state": "success", "description": "x" * 141})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("pulls", PULL),
        ("issues/1/comments", {"body": "x"}),
        ("issues/1/labels", {"labels": ["x"]}),
        ("issues/1/assignees", {"assignees": ["ada"]}),
        (f"statuses/{'0' * 40}", {"state": "success"}),
    ],
)
def test_a_token_that_reads_writes_nothing(hub: FakeGitHub, path: str, body: dict[str, object]) -> None:
    assert refused(hub, path, body, READER) == f"403 {NOT_ACCESSIBLE}"
    assert refused(hub, path, body, "ghs_unknown") == "401 Bad credentials"
    assert hub.writes == [f"POST /repos/octo/kernels/{path}"] * 2


def test_a_private_repository_is_not_there_for_strangers(tmp_path: Path) -> None:
    with fake_github(tmp_path, private=True, enterprise=True) as hub:
        assert requests.get(f"{hub.api_url}/repos/octo/kernels", timeout=10).status_code == 404
        assert client(hub, READER).get("")["private"] is True
        assert requests.get(f"{hub.url}/repos/octo/kernels", timeout=10).status_code == 404


def push(hub: FakeGitHub, clone: Path, token: str, *refspecs: str) -> subprocess.CompletedProcess[str]:
    basic = base64.b64encode(f"x-access-token:{token}".encode()).decode()
    header = {"KEY_0": f"http.{hub.url}/.extraheader", "VALUE_0": f"Authorization: basic {basic}", "COUNT": "1"}
    environ = {"PATH": os.environ["PATH"], "HOME": str(clone), "GIT_TERMINAL_PROMPT": "0"}
    environ |= {f"GIT_CONFIG_{name}": value for name, value in header.items() if token}
    command = ["git", "-C", str(clone), "push", "-q", "origin", *refspecs]
    return subprocess.run(command, capture_output=True, text=True, env=environ)


def test_git_is_served_and_pushes_are_counted(hub: FakeGitHub, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", hub.git_url, str(clone))
    # More than git posts at once: in chunks.
    (clone / "big").write_bytes(os.urandom(1_200_000))
    git(clone, "add", "big")
    git(clone, "commit", "-q", "-m", "big")
    for token, said in (
        ("", "could not read Username"),
        ("ghs_no", "Authentication failed|could not read"),
        (READER, "403"),
    ):
        failed = push(hub, clone, token, "HEAD:refs/heads/new")
        assert failed.returncode and any(text in failed.stderr for text in said.split("|")), failed.stderr
    assert hub.pushes == 0
    assert push(hub, clone, TOKEN, "HEAD:refs/heads/new").returncode == 0
    assert hub.branches["new"] == git(clone, "rev-parse", "HEAD") and hub.pushes == 1
    assert push(hub, clone, TOKEN, "HEAD:refs/heads/new").returncode == 0
    assert hub.pushes == 1
    assert push(hub, clone, TOKEN, ":refs/heads/new").returncode == 0
    assert "new" not in hub.branches and hub.pushes == 2


def test_a_step_finds_the_environment_of_a_runner(hub: FakeGitHub, tmp_path: Path) -> None:
    pull = hub.open_pull("topic", fork="mallory/kernels")
    environ = hub.environ(
        tmp_path / "step", "pull_request", hub.pull_event(pull, "labeled", "forge"), INPUT_MODE="guard"
    )
    seen = github_context(environ)
    assert (seen.number, seen.fork, seen.label, seen.head_sha) == (1, True, "forge", hub.branches["topic"])
    assert seen.api_url == hub.api_url and seen.default_branch == "main"
    assert variables((tmp_path / "step/github_output").read_text()) == {}
