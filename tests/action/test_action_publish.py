"""Mode publish against a GitHub with memory and real git over HTTP: what becomes of branch, pull request and status."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cudaforge_action.api import ApiError
from cudaforge_action.remote import Identity, Leaf, LeaseLost, opened
from cudaforge_action.shards import write_verified
from fake_git import git
from fake_github import READER, TOKEN, secondary_limit, unavailable
from publish_repo import BRANCH, Repo, layers, published_repo
from shard_records import verified

from pytest_cudaforge.errors import PublishError, UsageError


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


def test_a_second_publish_without_news_writes_nothing_whatever_its_timings_are(repo: Repo) -> None:
    repo.jobs("Scale", "Shift")
    first = repo.publish(labels=("forge",), reviewers=("grace",))
    repo.hub.pulls[1].reviewers.clear()
    repo.hub.pulls[1].reviews.append("grace")  # who has answered is not asked again
    repo.jobs("Scale", "Shift", speedup=2.6)
    repo.hub.forget()
    second = repo.publish(labels=("forge",), reviewers=("grace",), event="workflow_dispatch")
    assert (repo.hub.writes, repo.hub.pushes) == ([], 0)
    assert second.outputs["operation"] == "none"
    assert second.outputs["pull-request-number"] == "1"
    assert second.outputs["pull-request-head-sha"] == first.outputs["pull-request-head-sha"]


def test_news_join_what_the_branch_holds_already(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish()
    shutil.rmtree(repo.results)
    repo.jobs("Shift", speedup=3.0)
    repo.hub.forget()
    done = repo.publish()
    assert done.outputs["operation"] == "updated"
    assert done.outputs["kernels"] == "2"
    assert repo.hub.pushes == 1
    assert repo.entries() == ["layers.py::Scale", "layers.py::Shift"]
    assert git(repo.hub.bare, "rev-list", "--count", f"main..{BRANCH}") == "1"
    body = repo.hub.pulls[1].body
    assert body.index("layers.py::Shift") < body.index("layers.py::Scale")  # the best one first
    assert body.count("a typo") == 2  # the story of a kernel that was there before is told as well


def test_a_base_that_moves_elsewhere_is_no_news_and_one_that_moves_a_target_is(repo: Repo) -> None:
    repo.jobs("Scale", "Shift")
    repo.publish()
    repo.hub.commit("main", {"README.md": "more"})
    repo.hub.forget()
    assert repo.publish().outputs["operation"] == "none"
    assert (repo.hub.writes, repo.hub.pushes) == ([], 0)
    repo.hub.commit(
        "main", {"layers.py": layers("Scale") + "\n\n" + layers("Shift", body="x + 1").partition("\n\n\n")[2]}
    )
    done = repo.publish()
    assert done.outputs["operation"] == "updated"
    assert repo.entries() == ["layers.py::Scale"]
    assert "has changed on main since it was verified" in done.log
    assert git(repo.hub.bare, "rev-parse", f"{BRANCH}^") == repo.hub.branches["main"]


def test_the_bases_own_kernels_stay_in_its_manifest(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish()
    repo.merge()
    shutil.rmtree(repo.results)
    repo.jobs("Shift")
    done = repo.publish()
    assert repo.entries() == ["layers.py::Scale", "layers.py::Shift"]
    assert done.outputs["kernels"] == "1"
    assert git(repo.hub.bare, "diff", "--name-only", "main", BRANCH, "--", "forged/scale*") == ""


def test_what_was_merged_is_closed_and_its_branch_is_gone(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish()
    repo.merge()
    done = repo.publish()
    assert done.outputs["operation"] == "closed"
    assert repo.hub.open_pulls == []
    assert BRANCH not in repo.hub.branches
    assert "merged" in next(iter(repo.hub.comments.values())).body
    repo.hub.forget()
    assert repo.publish().outputs["operation"] == "none"
    assert (repo.hub.writes, repo.hub.pushes) == ([], 0)


def test_a_branch_may_stay_when_nothing_is_left(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish()
    repo.merge()
    assert repo.publish(delete_branch=False).outputs["operation"] == "closed"
    assert BRANCH in repo.hub.branches
    repo.hub.forget()
    assert repo.publish(delete_branch=False).outputs["operation"] == "none"
    assert repo.hub.writes == []


def test_a_branch_is_pushed_where_no_workflow_may_open_pull_requests(repo: Repo) -> None:
    repo.hub.allow_pull_requests = False
    repo.jobs("Scale")
    done = repo.publish()
    assert (done.status, done.outputs["operation"]) == (0, "pushed")
    assert done.outputs["compare-url"] == f"{repo.hub.url}/octo/kernels/compare/main...{BRANCH}?expand=1"
    assert done.outputs["compare-url"] in done.log
    assert "Allow GitHub Actions to create and approve pull requests" in done.log
    assert len(repo.hub.statuses) == 1
    repo.hub.allow_pull_requests = True
    repo.hub.forget()
    assert repo.publish().outputs["operation"] == "created"
    assert repo.hub.pushes == 0


def test_a_publish_that_dies_between_push_and_pull_request_is_finished_by_the_next(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.hub.fail("POST", r"/pulls$", unavailable())
    with pytest.raises(ApiError):
        repo.publish()
    assert repo.hub.open_pulls == []
    # Its artifacts are gone: the branch alone says what is to be told.
    shutil.rmtree(repo.results)
    repo.hub.forget()
    done = repo.publish()
    assert (done.outputs["operation"], repo.hub.pushes) == ("created", 0)
    assert "a typo" in repo.hub.pulls[1].body
    assert len(repo.hub.pulls) == 1


def test_an_answer_that_was_lost_makes_no_second_pull_request(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.hub.fail("POST", r"/pulls$", unavailable(), late=True)
    assert repo.publish().outputs["operation"] == "updated"
    assert len(repo.hub.pulls) == 1


def test_limits_and_a_late_api_are_waited_for(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.hub.lag = 1
    repo.hub.fail("POST", r"/labels$", secondary_limit(retry_after="0"))
    done = repo.publish(labels=("forge",))
    assert done.outputs["operation"] == "created"
    assert repo.hub.pulls[1].labels == ["forge"]


def test_people_who_cannot_be_asked_cost_a_warning(repo: Repo) -> None:
    repo.jobs("Scale")
    done = repo.publish(reviewers=("stranger",))
    assert (done.status, done.outputs["operation"]) == (0, "created")
    assert "::warning::reviewers could not be set" in done.log


def test_without_statuses_the_rest_is_done(repo: Repo) -> None:
    repo.hub.grant(TOKEN, contents="write", pull_requests="write")
    repo.jobs("Scale")
    done = repo.publish()
    assert done.outputs["operation"] == "created"
    assert "It needs `statuses: write`" in done.log


def test_a_token_that_may_not_push_is_an_error_that_says_so(repo: Repo) -> None:
    repo.jobs("Scale")
    with pytest.raises(PublishError, match="contents: write"):
        repo.publish(token=READER)
    assert repo.hub.pulls == {}


def test_an_enterprise_server_differs_in_its_address_only(tmp_path: Path) -> None:
    with published_repo(tmp_path, enterprise=True, private=True) as repo:
        repo.jobs("Scale")
        assert repo.publish().outputs["operation"] == "created"


def test_commits_of_others_on_the_branch_are_kept(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish()
    theirs = repo.hub.commit(BRANCH, {"forged/README.md": "my notes"}, text="notes")
    repo.jobs("Scale", "Shift")
    repo.hub.forget()
    done = repo.publish()
    assert (done.outputs["operation"], done.outputs["pull-request-number"]) == ("none", "1")
    assert (repo.hub.writes, repo.hub.pushes) == ([], 0)
    assert f"the commit {theirs[:9]} on it is not this action's" in done.log
    assert "Not published: 2 newly verified kernels." in done.log
    assert "delete the branch, then run publish again" in done.log


@pytest.mark.parametrize("extra", [False, True], ids=["only updated", "and changed"])
def test_a_branch_that_was_updated_from_its_base_is_still_ours(repo: Repo, extra: bool) -> None:
    repo.jobs("Scale")
    repo.publish()
    repo.hub.commit("main", {"README.md": "more"})
    # The button "Update branch", and a merge in which somebody mended something.
    with_base = {"README.md": "more", **({"forged/NOTES": "by hand"} if extra else {})}
    tree = git(repo.hub.bare, "rev-parse", f"{repo.hub.commit('scratch', with_base, base=BRANCH)}^{{tree}}")
    merge = git(repo.hub.bare, "commit-tree", tree, "-p", BRANCH, "-p", "main", "-m", "Merge branch 'main'")
    git(repo.hub.bare, "update-ref", f"refs/heads/{BRANCH}", merge)
    repo.jobs("Shift")
    done = repo.publish()
    assert done.outputs["operation"] == ("none" if extra else "updated")
    assert ("changes more than to update it" in done.log) is extra
    assert (repo.hub.branches[BRANCH] == merge) is extra


def test_a_pull_request_that_somebody_closed_is_not_opened_again(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish()
    repo.hub.pulls[1].state = "closed"
    repo.hub.forget()
    done = repo.publish()
    assert done.outputs["operation"] == "none"
    assert "was closed by somebody" in done.log
    assert [one for one in repo.hub.writes if one.endswith("/pulls")] == []
    repo.jobs("Shift")
    assert repo.publish().outputs["operation"] == "created"


def test_two_publishes_at_once_do_not_overwrite_each_other(repo: Repo) -> None:
    repo.jobs("Scale")
    with opened(repo.hub.git_url, TOKEN) as late:
        sha = late.fetch("main", 1)
        tree = late.changed_tree(sha, {"forged/late": Leaf("100644", late.blobs([b"late"])[0])})
        commit = late.commit(tree, sha, "late", Identity("late", "late@example.org"))
        repo.publish()
        with pytest.raises(LeaseLost, match="nothing was overwritten"):
            late.push(commit, BRANCH, None)
    repo.hub.forget()
    assert repo.publish().outputs["operation"] == "none"
    assert repo.entries() == ["layers.py::Scale"]


def test_lost_shards_are_named_and_the_others_published(repo: Repo) -> None:
    repo.jobs("Scale", shard="01-cpu")
    repo.jobs("Shift", shard="02-cpu")
    (repo.results / "verified/02-cpu/forged/evil").write_text("not ours")
    plan = {"shards": [{"name": name} for name in ("01-cpu", "02-cpu", "03-cpu")]}
    (repo.results / "plan").mkdir()
    (repo.results / "plan/plan.json").write_text(json.dumps(plan))
    done = repo.publish()
    assert repo.entries() == ["layers.py::Scale"]
    assert "::warning::shard 03-cpu is not in this publish: its forge job left nothing" in done.log
    assert "shard 02-cpu is not in this publish: what its verify job left is not used" in done.log
    assert "cpu, 03-cpu." in repo.hub.pulls[1].body


def test_what_verifying_refused_is_not_published(repo: Repo) -> None:
    targets = repo.targets("Scale", "Shift")
    place = repo.results / "verified/01-cpu"
    shard = verified(place, targets)
    shutil.rmtree(place / "forged" / targets[1].slug)
    first, second = shard.kernels
    write_verified(place, replace(shard, kernels=(first, replace(second, entry=None, reason="slower by a hair"))))
    done = repo.publish()
    assert repo.entries() == ["layers.py::Scale"]
    assert "layers.py::Shift (cpp) is not published: slower by a hair" in done.log
    assert "slower by a hair" in done.summary


def test_a_slower_kernel_does_not_take_the_place_of_a_good_one(repo: Repo) -> None:
    repo.jobs("Scale", speedup=3.0)
    repo.publish()
    repo.jobs("Scale", text="another", speedup=2.0)
    repo.hub.forget()
    done = repo.publish()
    assert (done.outputs["operation"], repo.hub.pushes) == ("none", 0)
    assert "the kernel that is there promises 3.00×, this one 2.00×" in done.log
    repo.jobs("Scale", text="another", speedup=4.0)
    assert repo.publish().outputs["operation"] == "updated"


def test_nothing_to_publish_is_nothing(repo: Repo) -> None:
    done = repo.publish()
    assert (done.status, done.outputs["operation"], done.outputs["kernels"]) == (0, "none", "0")
    assert (repo.hub.writes, repo.hub.pushes) == ([], 0)
    assert done.summary.startswith("# Forged kernels: nothing was to be done")


def test_the_base_is_never_what_is_pushed(repo: Repo) -> None:
    repo.jobs("Scale")
    with pytest.raises(UsageError, match="branch of its own"):
        repo.publish(branch="main")
    with pytest.raises(PublishError, match="'gone' is not on"):
        repo.publish(base="gone")
    with pytest.raises(UsageError, match="no token"):
        repo.publish(token="")
    assert repo.hub.pushes == 0


def test_one_branch_for_each_set_of_targets(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish(branch_suffix="-one", base="origin/main")
    shutil.rmtree(repo.results)
    repo.jobs("Shift")
    repo.publish(branch_suffix="-two")
    assert {pull.head for pull in repo.hub.open_pulls} == {f"{BRANCH}-one", f"{BRANCH}-two"}
    assert repo.entries(f"{BRANCH}-two") == ["layers.py::Shift"]


def test_publishing_loads_neither_torch_nor_a_models_client() -> None:
    code = "import sys, cudaforge_action.publish; print({'torch', 'openai', 'pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
