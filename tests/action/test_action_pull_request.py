"""A pull request is asked about before it is written to, and what people did to it stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cudaforge_action.api import ApiError, GitHub
from cudaforge_action.pull_request import Wanted, close, compare_url, open_pull, opened
from cudaforge_action.status import posted
from fake_github import NOT_ACCESSIBLE, TOKEN, FakeGitHub, fake_github, invalid, message, primary_limit

WANTED = Wanted("topic", "main", "A title", "A body", labels=("Forge", "gpu"), team_reviewers=("octo/kernels",))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeGitHub]:
    with fake_github(tmp_path) as made:
        made.commit("main", {"a": "a"})
        made.commit("topic", {"a": "b"})
        yield made


@pytest.fixture
def api(hub: FakeGitHub) -> GitHub:
    return GitHub(hub.api_url, TOKEN, hub.repository, sleep=lambda seconds: None)


def test_only_what_differs_is_written(hub: FakeGitHub, api: GitHub) -> None:
    head = hub.branches["topic"]
    assert opened(api, WANTED, head, pushed=True).operation == "created"
    (pull,) = hub.open_pulls
    pull.labels = ["forge", "GPU", "by hand"]
    pull.body += "\nA remark of somebody."
    hub.forget()
    assert opened(api, WANTED, head, pushed=False).operation == "none"
    assert hub.writes == []
    pull.title = "Renamed by somebody"
    assert opened(api, replace(WANTED, assignees=("ada",)), head, pushed=False).operation == "updated"
    assert hub.writes == ["PATCH /repos/octo/kernels/pulls/1", "POST /repos/octo/kernels/issues/1/assignees"]
    assert hub.requests[-2].body == {"title": "A title"}
    assert "A remark of somebody." in pull.body and "by hand" in pull.labels
    hub.commit("next", {"a": "c"}, base="main")
    opened(api, replace(WANTED, base="next", body="Another"), head, pushed=False)
    assert (pull.base, pull.body.startswith("Another")) == ("next", True)
    assert len(hub.pulls) == 1


def test_the_branch_of_a_fork_is_another(hub: FakeGitHub, api: GitHub) -> None:
    hub.open_pull("topic", fork="mallory/kernels", sha=hub.branches["topic"])
    assert open_pull(api, "topic") is None
    assert opened(api, WANTED, hub.branches["topic"], pushed=True).operation == "created"


def test_where_there_are_no_drafts_it_is_none(hub: FakeGitHub, api: GitHub) -> None:
    no = invalid("PullRequest", "", "custom", "Draft pull requests are not supported in this repository.")
    hub.fail("POST", r"/pulls$", no, times=5)
    made = opened(api, replace(WANTED, draft=True), hub.branches["topic"], pushed=True)
    assert made.operation == "created" and "is no draft" in made.warnings[0]
    assert not hub.open_pulls[0].draft


def test_who_may_not_open_one_is_told_what_to_do_and_who_has_no_patience_left_may_try_again(
    hub: FakeGitHub, api: GitHub
) -> None:
    hub.fail("POST", r"/pulls$", message(403, NOT_ACCESSIBLE))
    made = opened(api, WANTED, hub.branches["topic"], pushed=True)
    assert made.operation == "pushed" and "pull-requests: write" in made.warnings[0]
    hub.fail("POST", r"/pulls$", primary_limit(2**33))
    with pytest.raises(ApiError, match="rate limit"):
        opened(api, WANTED, hub.branches["topic"], pushed=True)


def test_two_at_once_make_one(hub: FakeGitHub, api: GitHub) -> None:
    already = invalid("PullRequest", "", "custom", "A pull request already exists for octo:topic.")
    hub.fail("POST", r"/pulls$", already, late=True)
    assert opened(api, WANTED, hub.branches["topic"], pushed=True).operation == "updated"
    assert len(hub.pulls) == 1


def test_an_update_that_is_refused_is_a_warning(hub: FakeGitHub, api: GitHub) -> None:
    opened(api, WANTED, hub.branches["topic"], pushed=True)
    hub.fail("PATCH", r"/pulls/1$", message(403, NOT_ACCESSIBLE))
    made = opened(api, replace(WANTED, title="Another"), hub.branches["topic"], pushed=True)
    assert "could not be updated: Resource not accessible" in made.warnings[0]


def test_closing_says_why_or_that_it_could_not(hub: FakeGitHub, api: GitHub) -> None:
    for number in (1, 2):
        opened(api, WANTED, hub.branches["topic"], pushed=True)
        pull = open_pull(api, "topic")
        assert pull is not None
        if number == 2:
            hub.fail("POST", r"/comments$", message(403, NOT_ACCESSIBLE))
        told = close(api, pull, "because")
        assert (told == "") is (number == 1)
    assert [one.body for one in hub.comments.values()] == ["because"]
    assert hub.open_pulls == []


def test_a_status_is_posted_where_it_is_news(hub: FakeGitHub, api: GitHub) -> None:
    sha = hub.branches["topic"]
    assert posted(api, sha, "success", "cudaforge/guard", "2 kernels", "https://x/1")
    assert not posted(api, sha, "success", "Cudaforge/Guard", "2 kernels", "https://x/2")
    assert posted(api, sha, "success", "cudaforge/other", "2 kernels")
    assert posted(api, sha, "success", "cudaforge/guard", "x" * 500)
    assert [len(one.description) for one in hub.statuses] == [9, 9, 140]


def test_the_page_that_opens_it_by_hand() -> None:
    wanted = "https://g/o/r/compare/main...a/b%23c?expand=1"
    assert compare_url("https://g", "o/r", "main", "a/b#c") == wanted
