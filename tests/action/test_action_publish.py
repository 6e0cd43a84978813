"""Mode publish against a GitHub with memory and real git over HTTP: what becomes of branch, pull request and status."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from publish_repo import BRANCH, Repo, published_repo


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repo]:
    with published_repo(tmp_path) as made:
        yield made


def test_what_was_verified_becomes_a_branch_a_pull_request_and_a_status(repo: Repo) -> None:
    repo.jobs("Scale", "Shift")
    done = repo.publish(labels=("forge",), assignees=("ada",), reviewers=("grace",))
    (pull,) = repo.hub.open_pulls
    assert (pull.head, pull.base, pull.labels, pull.assignees) == (BRANCH, "main", ["forge"], ["ada"])
    assert pull.reviewers == ["grace"]
    assert repo.entries() == ["layers.py::Scale", "layers.py::Shift"]
    head = repo.hub.branches[BRANCH]
    assert [(one.sha, one.state, one.description) for one in repo.hub.statuses] == [
        (head, "success", "2 kernels verified, best 2.0x")
    ]
    expected = {"operation": "created", "pull-request-number": "1", "branch": BRANCH, "best-speedup": "2.00"}
    assert expected.items() <= done.outputs.items()
    assert done.outputs["pull-request-head-sha"] == head
    assert done.outputs["spent-usd"] == "0.0600"
