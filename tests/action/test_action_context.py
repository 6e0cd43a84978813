"""Where a run stands, from events as they come; and which ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cudaforge_action.context import github_context, gitlab_context, refuse_unsafe
from cudaforge_action.inputs import Inputs
from cudaforge_action.records import Context

from pytest_cudaforge.errors import UsageError

SHA, HEAD = "1" * 40, "2" * 40
OURS = {"full_name": "octo/kernels", "default_branch": "trunk"}
FORK = {"full_name": "mallory/kernels"}


def context(tmp_path: Path, name: str, event: Any, **environ: str) -> Context:
    file = tmp_path / "event.json"
    file.write_text(json.dumps(event))
    given = {"GITHUB_EVENT_NAME": name, "GITHUB_EVENT_PATH": str(file), "GITHUB_SHA": SHA}
    given |= {"GITHUB_REPOSITORY": "octo/kernels", "GITHUB_WORKSPACE": str(tmp_path)}
    return github_context(given | environ)


def pull(head_repository: Any = OURS, **extra: Any) -> dict[str, Any]:
    ends = {"head": {"sha": HEAD, "ref": "x", "repo": head_repository}, "base": {"ref": "release", "repo": OURS}}
    return {"action": "synchronize", "repository": OURS, "pull_request": {"number": 7, **ends}, **extra}


def test_a_pull_request_is_about_its_head_not_about_what_is_checked_out(tmp_path: Path) -> None:
    seen = context(tmp_path, "pull_request", pull(), GITHUB_RUN_ID="9", GITHUB_SERVER_URL="https://ghe.corp/")
    assert (seen.sha, seen.head_sha, seen.number, seen.base_ref, seen.fork) == (SHA, HEAD, 7, "release", False)
    assert seen.default_branch == "trunk" and seen.label == ""
    assert seen.run_url == "https://ghe.corp/octo/kernels/actions/runs/9"
    assert seen.api_url == "https://api.github.com"


@pytest.mark.parametrize("head", [FORK, None, {}, {"full_name": None}])
def test_a_head_elsewhere_or_nowhere_is_a_forks(tmp_path: Path, head: Any) -> None:
    assert context(tmp_path, "pull_request", pull(head)).fork


def test_names_of_repositories_have_no_case(tmp_path: Path) -> None:
    assert not context(tmp_path, "pull_request", pull({"full_name": "Octo/Kernels"})).fork


def test_a_label_counts_only_when_it_was_just_added(tmp_path: Path) -> None:
    assert context(tmp_path, "pull_request", pull(action="labeled", label={"name": "forge"})).label == "forge"
    assert context(tmp_path, "pull_request", pull(action="unlabeled", label={"name": "forge"})).label == ""


def test_a_finished_workflow_tells_of_its_head(tmp_path: Path) -> None:
    run = {"head_sha": HEAD, "head_repository": OURS, "pull_requests": [{"number": 3, "base": {"ref": "main"}}]}
    seen = context(tmp_path, "workflow_run", {"workflow_run": run})
    assert (seen.number, seen.head_sha, seen.base_ref, seen.fork) == (3, HEAD, "main", False)
    seen = context(tmp_path, "workflow_run", {"workflow_run": run | {"head_repository": FORK, "pull_requests": []}})
    assert (seen.number, seen.fork) == (None, True)


def test_a_merge_queue_a_comment_a_push_and_a_schedule(tmp_path: Path) -> None:
    group = {"merge_group": {"head_sha": HEAD, "base_ref": "refs/heads/main"}}
    seen = context(tmp_path, "merge_group", group)
    assert (seen.head_sha, seen.base_ref, seen.number) == (HEAD, "main", None)
    comment = {"issue": {"number": 4, "pull_request": {}}, "repository": OURS}
    seen = context(tmp_path, "issue_comment", comment)
    assert (seen.number, seen.fork) == (4, True)
    seen = context(tmp_path, "push", {"repository": OURS}, GITHUB_REF="refs/heads/x")
    assert (seen.head_sha, seen.ref, seen.number, seen.fork) == (SHA, "refs/heads/x", None, False)
    assert context(tmp_path, "schedule", {}, GITHUB_REF_NAME="trunk").default_branch == "trunk"


@pytest.mark.parametrize(
    "event",
    [
        {"pull_request": {"number": "7; rm -rf /", "head": {"sha": "$(id)"}, "base": []}},
        {"pull_request": {"number": True, "head": "x"}},
        {"pull_request": {"number": -1}},
        {"pull_request": [1]},
        {},
    ],
)
def test_what_has_another_shape_is_nothing(tmp_path: Path, event: Any) -> None:
    seen = context(tmp_path, "pull_request", event)
    assert (seen.number, seen.head_sha) == (None, SHA)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a":\udcff}'])
def test_an_event_that_is_none_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "event.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match="names no event"):
        github_context({"GITHUB_EVENT_PATH": str(file)})
    with pytest.raises(UsageError, match="names no event"):
        github_context({"GITHUB_EVENT_PATH": str(tmp_path / "missing")})


def test_a_merge_request_from_a_fork_on_gitlab() -> None:
    environ = {
        "CI_MERGE_REQUEST_IID": "5",
        "CI_MERGE_REQUEST_PROJECT_ID": "1",
        "CI_MERGE_REQUEST_PROJECT_PATH": "octo/kernels",
        "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "2",
        "CI_MERGE_REQUEST_SOURCE_BRANCH_SHA": "0" * 40,
        "CI_PROJECT_PATH": "mallory/kernels",
        "CI_COMMIT_SHA": SHA,
    }
    seen = gitlab_context(environ)
    assert (seen.repository, seen.number, seen.fork, seen.head_sha) == ("octo/kernels", 5, True, SHA)
    assert not gitlab_context(environ | {"CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "1"}).fork
    assert not gitlab_context({"CI_COMMIT_SHA": SHA}).fork


# -- refusing ----------------------------------------------------------------------------------------------------------


def here(event: str = "pull_request", fork: bool = False) -> Context:
    return Context(host="github", workspace=Path("."), event=event, fork=fork)


@pytest.mark.parametrize("mode", ["guard", "forge", "verify", "all"])
def test_code_of_a_fork_is_not_run_unless_told(mode: str) -> None:
    with pytest.raises(UsageError, match="stranger's code"):
        refuse_unsafe(here(fork=True), Inputs(mode=mode))
    assert "fork" in refuse_unsafe(here(fork=True), Inputs(mode=mode, fork_heads="skip"))
    assert refuse_unsafe(here(fork=True), Inputs(mode=mode, fork_heads="run")) == ""
    assert refuse_unsafe(here(), Inputs(mode=mode)) == ""
    with pytest.raises(UsageError, match="a comment does not say"):
        refuse_unsafe(here("issue_comment", fork=True), Inputs(mode=mode))


@pytest.mark.parametrize("mode", ["report", "plan", "publish"])
def test_modes_that_run_no_code_may_tell_of_a_fork(mode: str) -> None:
    assert refuse_unsafe(here("workflow_run", fork=True), Inputs(mode=mode)) == ""


@pytest.mark.parametrize("mode", ["guard", "report", "plan", "forge", "verify", "publish", "all"])
def test_pull_request_target_is_refused_in_every_mode_unless_told(mode: str) -> None:
    with pytest.raises(UsageError, match="pull_request_target"):
        refuse_unsafe(here("pull_request_target"), Inputs(mode=mode, fork_heads="run"))
    assert refuse_unsafe(here("pull_request_target"), Inputs(mode=mode, allow_pull_request_target=True)) == ""
    if mode in ("guard", "forge"):
        with pytest.raises(UsageError, match="stranger's code"):
            refuse_unsafe(here("pull_request_target", fork=True), Inputs(mode=mode, allow_pull_request_target=True))
