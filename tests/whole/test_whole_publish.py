"""Mode publish over several runs: a base and a branch that move, people who take part, other kinds of servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cudaforge_action.remote import Identity, Leaf, LeaseLost, opened
from fake_git import git
from fake_github import TOKEN, Request, secondary_limit, unavailable
from publish_repo import BRANCH, Repo, layers, published_repo
from shard_records import verified

from pytest_cudaforge.discovery import discover


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repo]:
    with published_repo(tmp_path) as made:
        yield made


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


def test_an_answer_that_was_lost_makes_no_second_pull_request(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.hub.fail("POST", r"/pulls$", unavailable(), late=True)
    assert repo.publish().outputs["operation"] == "updated"
    assert len(repo.hub.pulls) == 1


def test_a_branch_that_was_updated_from_its_base_is_ours_until_somebody_changes_it(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.publish()
    repo.hub.commit("main", {"README.md": "more"})

    def merge(files: dict[str, str]) -> str:
        tree = git(repo.hub.bare, "rev-parse", f"{repo.hub.commit('scratch', files, base=BRANCH)}^{{tree}}")
        sha = git(repo.hub.bare, "commit-tree", tree, "-p", BRANCH, "-p", "main", "-m", "Merge branch 'main'")
        git(repo.hub.bare, "update-ref", f"refs/heads/{BRANCH}", sha)
        git(repo.hub.bare, "update-ref", "-d", "refs/heads/scratch")
        return sha

    merge({"README.md": "more"})  # the button "Update branch"
    repo.hub.forget()
    assert repo.publish().outputs["operation"] == "none"
    assert (repo.hub.pushes, [one for one in repo.hub.writes if "/statuses/" not in one]) == (0, [])
    repo.jobs("Shift")
    assert repo.publish().outputs["operation"] == "updated"
    theirs = merge({"forged/NOTES": "mended while merging"})
    done = repo.publish()
    assert done.outputs["operation"] == "none"
    assert "changes more than to update it" in done.log
    assert repo.hub.branches[BRANCH] == theirs


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


def test_one_branch_for_each_set_of_targets_on_an_enterprise_server(tmp_path: Path) -> None:
    with published_repo(tmp_path, enterprise=True, private=True) as repo:
        repo.jobs("Scale")
        repo.publish(branch_suffix="one", base="origin/main")
        shutil.rmtree(repo.results)
        repo.jobs("Shift")
        repo.publish(branch_suffix="-two", committer="Ada <ada@example.org>")
        assert {pull.head for pull in repo.hub.open_pulls} == {f"{BRANCH}-one", f"{BRANCH}-two"}
        assert repo.entries(f"{BRANCH}-two") == ["layers.py::Shift"]
        assert git(repo.hub.bare, "log", "-1", "--format=%cn <%ae>", f"{BRANCH}-two") == "Ada <ada@example.org>"


def test_limits_and_a_late_api_are_waited_for(repo: Repo) -> None:
    repo.jobs("Scale")
    repo.hub.lag = 1
    repo.hub.fail("POST", r"/labels$", secondary_limit(retry_after="0"))
    done = repo.publish(labels=("forge",))
    assert done.outputs["operation"] == "created"
    assert repo.hub.pulls[1].labels == ["forge"]


def test_people_who_cannot_be_asked_and_a_status_that_may_not_be_posted_cost_a_warning(repo: Repo) -> None:
    repo.hub.grant(TOKEN, contents="write", pull_requests="write")
    repo.jobs("Scale")
    done = repo.publish(reviewers=("stranger",))
    assert (done.status, done.outputs["operation"]) == (0, "created")
    assert "::warning::reviewers could not be set" in done.log
    assert "It needs `statuses: write`" in done.log


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


def test_a_base_that_gets_kernels_of_its_own_is_not_undone(repo: Repo) -> None:
    """While the pull request is open somebody else lands another kernel for one of its targets, and one for another."""
    repo.jobs("Scale")
    repo.publish()
    with published_repo(repo.folder / "other", "Scale", "Shift") as other:
        other.jobs("Scale", "Shift", text="by hand", speedup=1.5)
        other.publish()
        theirs = {path: other.file(BRANCH, path) + "\n" for path in other.files() if path.startswith("forged/")}
    repo.hub.commit("main", theirs)
    shutil.rmtree(repo.results)
    assert repo.publish().outputs["operation"] == "closed"
    assert "by hand" in repo.file("main", next(path for path in theirs if path.endswith("kernel.cpp")))
    # What is faster than theirs is worth a pull request, which leaves the others' alone.
    repo.jobs("Scale", text="better", speedup=4.0)
    assert repo.publish().outputs["operation"] == "created"
    changed = git(repo.hub.bare, "diff", "--name-only", "main", BRANCH).splitlines()
    assert {path.split("/")[1].partition("-")[0] for path in changed} == {"manifest.json", "scale"}
    assert repo.entries() == ["layers.py::Scale", "layers.py::Shift"]


class Tripwire(list[Request]):
    """A log of requests that ends a process before its ``last`` one is answered."""

    def __init__(self, others: list[Request], last: int) -> None:
        super().__init__()
        self.others, self.last, self.process = others, last, 0

    def append(self, request: Request) -> None:
        super().append(request)
        if self.process and len(self) + len(self.others) == self.last:
            os.kill(self.process, signal.SIGKILL)


def test_a_publish_that_is_killed_at_any_request_is_finished_by_the_next(tmp_path: Path) -> None:
    """No second pull request, no half a commit, and nothing left to write afterwards."""
    before, last = -1, 0
    while before != 0:
        last += 1
        with published_repo(tmp_path / str(last), "Scale") as repo:
            repo.jobs("Scale")
            hub = repo.hub
            hub.git_requests = Tripwire(hub.requests, last)
            hub.requests = Tripwire(hub.git_requests, last)
            command = [sys.executable, "-m", "cudaforge_action", "publish"]
            environ = {**hub.environ(tmp_path / f"step-{last}"), "INPUT_TOKEN": TOKEN, "INPUT_LABELS": "forge"}
            with subprocess.Popen(command, cwd=repo.folder, env=environ, stdout=subprocess.DEVNULL) as process:
                hub.git_requests.process = hub.requests.process = process.pid
                before = process.wait()
            hub.git_requests.process = hub.requests.process = 0
            assert before in (0, -signal.SIGKILL)
            done = repo.publish(labels=("forge",))
            assert done.outputs["operation"] in ("created", "updated", "none")
            (pull,) = hub.pulls.values()
            assert (pull.state, pull.labels, len(hub.statuses)) == ("open", ["forge"], 1)
            assert git(hub.bare, "rev-list", "--count", f"main..{BRANCH}") == "1"
            hub.requests.clear()
            hub.pushes = 0
            assert repo.publish(labels=("forge",)).outputs["operation"] == "none"
            assert (hub.writes, hub.pushes) == ([], 0)
    assert last > 9


def test_a_plain_machine_pushes_to_the_origin_of_its_checkout(repo: Repo, tmp_path: Path) -> None:
    repo.jobs("Scale")
    place = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repo.hub.bare), str(place))
    shutil.copytree(repo.results, place / ".cudaforge/action")
    state = [(path, path.read_bytes()) for path in sorted((place / ".git").rglob("*")) if path.is_file()]

    def publish() -> str:
        command = [sys.executable, "-m", "cudaforge_action", "publish"]
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((place / ".cudaforge/action/outputs.json").read_text())["operation"]

    assert publish() == "pushed"
    assert repo.entries() == ["layers.py::Scale"]
    tip = repo.hub.branches[BRANCH]
    assert publish() == "none"
    assert repo.hub.branches[BRANCH] == tip
    repo.merge()
    assert publish() == "closed"
    assert BRANCH not in repo.hub.branches
    # Nothing of the checkout was touched: no ref, no object, no index, no setting.
    assert state == [(path, path.read_bytes()) for path in sorted((place / ".git").rglob("*")) if path.is_file()]


def test_a_project_below_the_top_with_a_forge_folder_of_its_own(tmp_path: Path) -> None:
    with published_repo(tmp_path) as repo:
        files = {"sub/layers.py": layers("Scale"), "sub/cudaforge.yaml": "forge_dir: kernels\n", "layers.py": None}
        repo.hub.commit("main", {**files, "sub/pyproject.toml": "[tool.pytest.ini_options]\n"})
        source = tmp_path / "source"
        source.mkdir()
        (source / "layers.py").write_text(layers("Scale"))
        targets = discover([source], source).targets
        place = repo.folder / "sub"
        verified(place / ".cudaforge/action/verified/01-cpu", targets, commit=repo.hub.branches["main"])
        (repo.folder / ".git").mkdir()
        assert repo.publish(working_directory=place).outputs["operation"] == "created"
        (folder,) = {path.rpartition("/")[0] for path in repo.files() if path.endswith("kernel.cpp")}
        assert folder.startswith("sub/kernels/scale-") and "sub/kernels/manifest.json" in repo.files()
