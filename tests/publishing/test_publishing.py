"""Winners become files; files become a commit that leaves the user's index, working tree and HEAD alone."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from flow_records import make_evaluation, make_facts, make_round, make_target

from pytest_cudaforge.errors import PublishError
from pytest_cudaforge.publishing import Published, commit_branch, publish
from pytest_cudaforge.records import Candidate, Isolation, Profile, Status, Trace
from pytest_cudaforge.runtime.manifest import Manifest


def winning_trace(name: str = "scale", text: str = "fast") -> Trace:
    entry = make_round(1, text=text)
    return Trace(f"layers.py::{name}", "cpp", "forged", "2x", (entry,), 1, entry.evaluation)


def published(root: Path, name: str = "scale", text: str = "fast") -> Published:
    target = make_target(root, name)
    return publish(winning_trace(name, text), target, make_facts(target), root / "forged")


def git(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    command = ["git", "-c", "user.name=U", "-c", "user.email=u@h", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, env=environment).stdout


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    (root / "layers.py").write_text("class Scale: ...\n")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def state(root: Path) -> tuple[str, str, bytes]:
    return (
        git(root, "rev-parse", "--symbolic-full-name", "HEAD"),
        git(root, "status", "--porcelain=v2", "--untracked-files=all"),
        (root / ".git" / "index").read_bytes(),
    )


# -- what a kernel may have built in ---------------------------------------------------------------------------------


def test_attributes_that_forward_reads_and_the_plan_does_not_are_kept(tmp_path: Path) -> None:
    plan = "def plan(module, x):\n    return x if module.norm.gain else empty(x.shape, x.dtype)\n"
    candidate = Candidate.of("cpp", {"kernel.cpp": "// fast\n", "plan.py": plan})
    verdict = make_evaluation(candidate, Status.PASSED, 2.0)
    trace = replace(winning_trace(), rounds=(replace(make_round(1), candidate=candidate, evaluation=verdict),))
    target = make_target(tmp_path, "scale")
    read = (("gain", 2), ("norm.eps", 1e-5), ("norm.shape", {"tuple": [8]}))
    facts = replace(make_facts(target), attributes=read)
    item = publish(replace(trace, final=verdict), target, facts, tmp_path / "forged")
    (entry,) = Manifest.load(tmp_path / "forged" / "manifest.json").entries
    assert item.entry.attributes == entry.attributes == read[1:]


def test_containers_with_names_are_kept(tmp_path: Path) -> None:
    target = make_target(tmp_path, "scale")
    facts = make_facts(target)
    (first,) = facts.workloads
    state = {"tuple": [{"leaf": "out.0"}, {"list": [], "type": "layers.Rows"}], "type": "layers.State"}
    other = {"tuple": [{"leaf": "out.0"}, {"list": []}], "type": "layers.State"}
    trees = [replace(first, name=name, output_tree=tree) for name, tree in (("one", state), ("other", other))]
    for workloads, kept in (
        (trees[:1], (("out", "layers.State"), ("out.1", "layers.Rows"))),
        (trees, (("out", "layers.State"), ("out.1", "container of one class or another"))),
    ):
        item = publish(winning_trace(), target, replace(facts, workloads=tuple(workloads)), tmp_path / "forged")
        assert item.entry.containers == kept
        assert Manifest.load(tmp_path / "forged" / "manifest.json").entries[0].containers == kept


def test_buffers_that_forward_reads_and_the_plan_does_not_are_kept(tmp_path: Path) -> None:
    plan = "def plan(module, x):\n    return empty(module.mask.shape[:1], x.dtype) if module.norm.table else x\n"
    candidate = Candidate.of("cpp", {"kernel.cpp": "// fast\n", "plan.py": plan})
    verdict = make_evaluation(candidate, Status.PASSED, 2.0)
    trace = replace(winning_trace(), rounds=(replace(make_round(1), candidate=candidate, evaluation=verdict),))
    target = make_target(tmp_path, "scale")
    held = ("aa", "bb", (1.5, -2.0))
    facts = replace(make_facts(target), buffers=(("mask", held), ("norm.table", held), ("window", held)))
    item = publish(replace(trace, final=verdict), target, facts, tmp_path / "forged")
    (entry,) = Manifest.load(tmp_path / "forged" / "manifest.json").entries
    assert item.entry.buffers == entry.buffers == (("mask", held), ("window", held))


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_winner_is_published_as_files_and_manifest(tmp_path: Path) -> None:
    item = published(tmp_path)
    folder = tmp_path / "forged" / make_target(tmp_path).slug / "cpu"
    assert {path.name for path in folder.iterdir()} == {
        "kernel.cpp",
        "plan.py",
        "evaluation.json",
        "report.md",
        "report.svg",
    }
    assert json.loads((folder / "evaluation.json").read_text())["status"] == "PASSED"
    entry = Manifest.load(tmp_path / "forged" / "manifest.json").entries[0]
    assert entry == item.entry
    assert entry.sources(tmp_path / "forged" / "manifest.json")["kernel.cpp"] == "// fast\n"
    assert (entry.arch, entry.workloads[0].speedup_eager, entry.torch) == ("cpu", 2.0, "2.13.0")


def test_a_kernel_for_some_workloads_is_published_beside_the_others(tmp_path: Path) -> None:
    first, target = published(tmp_path), make_target(tmp_path)
    facts = make_facts(target)
    items = [first]
    for name in ("half", "Long, half"):
        some = replace(facts, chosen=True, workloads=(replace(facts.workloads[0], name=name),))
        items += [publish(winning_trace(text=name), target, some, tmp_path / "forged") for _ in range(2)]
    entries = Manifest.load(tmp_path / "forged" / "manifest.json").entries
    assert sorted(entry.key for entry in entries) == sorted({item.entry.key for item in items})
    assert len({entry.directory for entry in entries}) == len(entries) == 3
    assert first.entry.variant == "" and items[-1].entry.variant.startswith("long_half-")
    for item in items:
        assert item.entry.sources(tmp_path / "forged" / "manifest.json")["plan.py"]


def test_a_profile_is_published_without_the_paths_of_this_machine(tmp_path: Path) -> None:
    trace = winning_trace()
    assert trace.final is not None
    profile = Profile("ncu", "full", trace.final.candidate, "default", report=str(tmp_path / "profile.ncu-rep"))
    target, trace = make_target(tmp_path), replace(trace, final=replace(trace.final, profile=profile))
    publish(trace, target, make_facts(target), tmp_path / "forged")
    folder = tmp_path / "forged" / target.slug / "cpu"
    assert json.loads((folder / "evaluation.json").read_text())["profile"]["rung"] == "ncu"
    assert not [path for path in folder.iterdir() if "profile.ncu-rep" in path.read_text()]
    assert (
        "(report.svg)" in (folder / "report.md").read_text()
        and "hardware counters" in (folder / "report.md").read_text()
    )


def test_without_a_winner_nothing_is_published(tmp_path: Path) -> None:
    target = make_target(tmp_path)
    with pytest.raises(PublishError, match="no winner"):
        publish(replace(winning_trace(), winner=None), target, make_facts(target), tmp_path / "forged")
    assert not (tmp_path / "forged").exists()


@pytest.mark.parametrize("grade", ["C", "F"])
def test_native_code_without_isolation_is_not_published(tmp_path: Path, grade: str) -> None:
    trace, target = winning_trace(), make_target(tmp_path)
    assert trace.final is not None
    final = replace(trace.final, isolation=Isolation(grade, remedy="allow user namespaces"))  # type: ignore[arg-type]
    with pytest.raises(PublishError, match="allow user namespaces"):
        publish(replace(trace, final=final), target, make_facts(target), tmp_path / "forged")


def test_a_forge_dir_that_cannot_be_written_is_a_publish_error(tmp_path: Path) -> None:
    (tmp_path / "forged").write_text("")
    with pytest.raises(PublishError, match="set forge_dir to another folder"):
        published(tmp_path)


# -- branch ----------------------------------------------------------------------------------------------------------


def test_the_branch_gets_the_files_and_the_user_keeps_everything(repo: Path) -> None:
    (repo / "layers.py").write_text("class Scale: dirty = 1\n")
    (repo / "staged.py").write_text("staged")
    git(repo, "add", "staged.py")
    (repo / "untracked.txt").write_text("mine")
    item = published(repo)
    before = state(repo)
    commit = commit_branch(repo, "forge/kernels", [item], "perf: forge scale")
    assert commit.changed
    assert state(repo) == before
    names = git(repo, "ls-tree", "-r", "--name-only", "forge/kernels").split()
    slug = make_target(repo).slug
    assert set(names) == {
        "layers.py",
        "forged/manifest.json",
        *(
            f"forged/{slug}/cpu/{name}"
            for name in ("kernel.cpp", "plan.py", "evaluation.json", "report.md", "report.svg")
        ),
    }
    assert git(repo, "show", "forge/kernels:layers.py") == "class Scale: ...\n", "dirt is not committed"
    assert git(repo, "log", "-1", "--format=%s", "forge/kernels") == "perf: forge scale\n"


def test_a_second_commit_needs_a_difference(repo: Path) -> None:
    first = commit_branch(repo, "kernels", [published(repo)], "one")
    again = commit_branch(repo, "kernels", [published(repo)], "two")
    assert (again.changed, again.sha) == (False, first.sha)
    better = commit_branch(repo, "kernels", [published(repo, text="faster")], "three")
    assert better.changed
    assert git(repo, "rev-parse", "kernels^").strip() == first.sha


def test_the_branchs_own_manifest_entries_are_kept(repo: Path) -> None:
    commit_branch(repo, "kernels", [published(repo, "one")], "one")
    (repo / "forged" / "manifest.json").unlink()
    commit_branch(repo, "kernels", [published(repo, "two")], "two")
    manifest = Manifest.parse(git(repo, "show", "kernels:forged/manifest.json"))
    assert [entry.target for entry in manifest.entries] == ["layers.py::one", "layers.py::two"]


def test_a_stale_file_of_the_kernel_leaves_the_branch(repo: Path) -> None:
    item = published(repo)
    folder = repo / "forged" / item.entry.directory
    (folder / "old.cpp").write_text("x")
    commit_branch(repo, "kernels", [replace(item, files=(*item.files, folder / "old.cpp"))], "one")
    commit_branch(repo, "kernels", [item], "two")
    assert "old.cpp" not in git(repo, "ls-tree", "-r", "--name-only", "kernels")


def test_a_detached_head_and_ignored_files_are_fine(repo: Path) -> None:
    git(repo, "checkout", "-q", "--detach")
    (repo / ".git" / "info" / "exclude").write_text("/forged/\n")
    item = published(repo)
    before = state(repo)
    assert commit_branch(repo, "kernels", [item], "one").changed
    assert state(repo) == before


def test_a_repo_without_commits_gets_a_root_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    commit = commit_branch(tmp_path, "kernels", [published(tmp_path)], "one")
    assert git(tmp_path, "rev-list", "--count", commit.sha).strip() == "1"
    assert not (tmp_path / ".git" / "index").exists()


def test_a_rootdir_below_the_repos_top_works(repo: Path) -> None:
    project = repo / "python" / "project"
    project.mkdir(parents=True)
    commit_branch(project, "kernels", [published(project)], "one")
    assert "python/project/forged/manifest.json" in git(repo, "ls-tree", "-r", "--name-only", "kernels")


def test_git_without_a_user_name_still_commits(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    git(repo, "config", "user.useConfigOnly", "true")
    commit_branch(repo, "kernels", [published(repo)], "one")
    assert git(repo, "log", "-1", "--format=%an", "kernels") == "pytest-cudaforge\n"


@pytest.mark.parametrize(
    ("branch", "message"), [("main", "is checked out"), ("a..b", "git failed"), ("", "git failed")]
)
def test_a_branch_that_cannot_be_written_is_refused(repo: Path, branch: str, message: str) -> None:
    with pytest.raises(PublishError, match=message):
        commit_branch(repo, branch, [published(repo)], "one")


def test_a_branch_in_another_working_tree_is_refused(repo: Path) -> None:
    git(repo, "worktree", "add", "-q", "-b", "kernels", str(repo.parent / "other"))
    with pytest.raises(PublishError, match="is checked out"):
        commit_branch(repo, "kernels", [published(repo)], "one")


def test_no_repo_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="git init"):
        commit_branch(tmp_path, "kernels", [published(tmp_path)], "one")


def test_a_forge_dir_outside_the_repo_is_refused(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="outside the git repo"):
        commit_branch(repo, "kernels", [published(tmp_path)], "one")
