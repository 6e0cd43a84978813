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
from cudaforge_action.artifact import digest_of
from cudaforge_action.inputs import Needs
from cudaforge_action.shards import write_verified
from fake_git import git
from fake_github import READER, unavailable
from publish_repo import BRANCH, Repo, published_repo
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


def test_the_log_says_what_became_of_it(repo: Repo, capfd: pytest.CaptureFixture[str]) -> None:
    repo.jobs("Scale")
    done = repo.publish()
    opened, held = capfd.readouterr().out.splitlines()[-2:]
    assert opened == f"opened a pull request: {done.outputs['pull-request-url']}"
    assert held == f"{BRANCH} at {done.outputs['pull-request-head-sha'][:9]} brings 1 kernel"


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


def test_what_was_merged_is_closed_and_its_branch_goes_where_it_may(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish()
    repo.merge()
    assert repo.publish(delete_branch=False).outputs["operation"] == "closed"
    assert repo.hub.open_pulls == []
    assert BRANCH in repo.hub.branches
    assert "merged" in next(iter(repo.hub.comments.values())).body
    repo.hub.forget()
    assert repo.publish().outputs["operation"] == "closed"
    assert (repo.hub.writes, BRANCH in repo.hub.branches) == ([], False)
    repo.hub.forget()
    assert repo.publish().outputs["operation"] == "none"
    assert (repo.hub.writes, repo.hub.pushes) == ([], 0)


def test_what_a_commit_brings_as_a_result_is_published_by_nobody(repo: Repo) -> None:
    verified(repo.results / "verified/01-cpu", repo.targets("Scale"))
    git(repo.folder, "init", "-q")
    git(repo.folder, "add", "--force", ".cudaforge/action/verified")
    with pytest.raises(UsageError, match="checked in"):
        repo.publish()
    assert repo.hub.open_pulls == [] and BRANCH not in repo.hub.branches


def test_what_was_verified_beside_the_base_is_not_published_there(repo: Repo) -> None:
    """Another branch's settings and imports: its target's own source is the base's."""
    repo.hub.commit("feature", {"cudaforge.yaml": "allow: [library]\n"})
    repo.jobs("Scale", commit=repo.hub.branches["feature"])
    repo.jobs("Shift", shard="02-cpu")
    repo.hub.commit("main", {"README.md": "main goes on"})
    done = repo.publish()
    assert repo.entries() == ["layers.py::Shift"]
    assert "layers.py::Scale (cpp) is not published: it was verified at" in done.log
    repo.jobs("Scale", commit="d" * 40)  # a commit that nobody has
    assert repo.publish().outputs["kernels"] == "1"


def test_no_text_of_a_forge_job_keeps_workflows_from_looking_at_the_branch(repo: Repo) -> None:
    repo.jobs("Scale")
    path = repo.results / "forged/01-cpu/shard.json"
    data = json.loads(path.read_text())
    data["shard"]["kernels"][0]["models"] = ["[skip ci]", "m\n\n\nskip-checks: true"]
    path.write_text(json.dumps(data))
    repo.publish()
    message = git(repo.hub.bare, "log", "-1", "--format=%B", BRANCH)
    assert "skip ci]" in message and "[skip ci]" not in message
    assert not [line for line in message.splitlines() if line.startswith("skip-checks")]
    assert "[skip ci]" not in repo.hub.pulls[1].body + repo.hub.pulls[1].title


def test_a_shard_that_was_not_planned_is_not_published(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.jobs("Shift", shard="99-other")
    (repo.results / "plan").mkdir()
    (repo.results / "plan/plan.json").write_text(json.dumps({"shards": [{"name": "01-cpu"}]}))
    done = repo.publish()
    assert repo.entries() == ["layers.py::Scale"]
    assert "shard 99-other is not in this publish: it was not planned" in done.log
    assert done.outputs["spent-usd"] == "0.0300"


def vouched(repo: Repo, *shards: str) -> Needs:
    """As the outputs of the verify jobs say it of what they left."""
    return Needs("success", {name: digest_of(repo.results / "verified" / name) for name in shards})


def test_what_another_job_puts_in_the_place_of_a_verified_kernel_is_not_published(repo: Repo) -> None:
    """A forge job that was taken over has its run's artifacts in reach, not the outputs of the verify jobs."""
    repo.jobs("Scale")
    repo.jobs("Shift", shard="02-cpu")
    needs = vouched(repo, "01-cpu", "02-cpu")
    repo.jobs("Scale", text="evil", speedup=9.0)
    done = repo.publish(needs=needs)
    assert repo.entries() == ["layers.py::Shift"]
    assert "shard 01-cpu is not in this publish" in done.log and "is not what its verify job says" in done.log
    # Without the word of its job, nothing tells it from what was verified.
    assert repo.publish().outputs["kernels"] == "2"
    assert "// evil" in repo.file(BRANCH, next(one for one in repo.files() if "scale" in one and one.endswith(".cpp")))


@pytest.mark.parametrize(
    "needs",
    [
        Needs("failure", {}),  # the job was lost, or an earlier attempt's artifact is all there is
        Needs("success", {"01-cpu": ""}),  # two jobs said different things
        Needs("success", {"02-cpu": "a" * 64}),
    ],
)
def test_what_no_verify_job_vouches_for_is_not_published(repo: Repo, needs: Needs) -> None:
    repo.jobs("Scale")
    done = repo.publish(needs=needs)
    assert done.outputs["operation"] == "none" and BRANCH not in repo.hub.branches
    assert "no verify job says that it left this" in done.log


def test_what_verify_jobs_vouch_for_is_published(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.jobs("Shift", shard="02-cpu")
    assert repo.publish(needs=vouched(repo, "01-cpu", "02-cpu")).outputs["kernels"] == "2"


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


def test_a_token_that_may_not_push_is_an_error_that_says_so(repo: Repo) -> None:
    repo.jobs("Scale")
    with pytest.raises(PublishError, match="contents: write"):
        repo.publish(token=READER)
    assert repo.hub.pulls == {}


def test_lost_and_refused_work_is_named_and_the_rest_published(repo: Repo) -> None:
    repo.jobs("Scale", shard="01-cpu")
    place = repo.results / "verified/01-cpu"
    shard = verified(place, repo.targets(), commit=repo.hub.branches["main"])
    shutil.rmtree(place / "forged" / repo.targets("Shift")[0].slug)
    kept, other = shard.kernels
    write_verified(place, replace(shard, kernels=(kept, replace(other, entry=None, reason="slower by a hair"))))
    repo.jobs("Shift", shard="02-cpu")
    (repo.results / "verified/02-cpu/forged/evil").write_text("not ours")
    (repo.results / "plan").mkdir()
    plan = {"shards": [{"name": name} for name in ("01-cpu", "02-cpu", "03-cpu")]}
    (repo.results / "plan/plan.json").write_text(json.dumps(plan))
    done = repo.publish()
    assert repo.entries() == ["layers.py::Scale"]
    assert "::warning::shard 03-cpu is not in this publish: its forge job left nothing" in done.log
    assert "shard 02-cpu is not in this publish: what its verify job left is not used" in done.log
    assert "layers.py::Shift (cpp) is not published: slower by a hair" in done.log
    assert "slower by a hair" in done.summary and "03-cpu" in done.summary
    assert "cpu, 03-cpu." in repo.hub.pulls[1].body


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


def test_publishing_loads_neither_torch_nor_a_models_client() -> None:
    code = "import sys, cudaforge_action.publish; print({'torch', 'openai', 'pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
