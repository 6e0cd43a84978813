"""The merge base and its worktree, with real git: what is found, and that nothing of the user's is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.merge_base import changed_files, commits_since, find_merge_base, last_change, text_at, worktree


def git(folder: Path, *args: str) -> str:
    who = ("-c", "user.name=A. Tester", "-c", "user.email=tester@example.com", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *who, *args], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, **files: str) -> str:
    for name, text in files.items():
        (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "write " + " ".join(files))
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """``main`` with two commits, and a branch ``work`` that starts at the first one and is checked out."""
    folder = tmp_path / "repo"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, kernel="old", other="same")
    git(folder, "branch", "work")
    commit(folder, later="on main only")
    git(folder, "checkout", "-q", "work")
    commit(folder, kernel="new")
    return folder


def worktrees(folder: Path) -> int:
    listed = git(folder, "worktree", "list", "--porcelain")
    assert git(folder, "worktree", "prune", "--dry-run", "--verbose") == ""
    return listed.count("worktree ")


# -- which commit ------------------------------------------------------------------------------------------------


def test_the_branch_point_is_found_and_told(repo: Path) -> None:
    base = find_merge_base(repo, None, {})
    assert (base.ref, base.sha) == ("main", git(repo, "rev-parse", "main~1"))
    assert base.short in base.told and '"write kernel other"' in base.told
    assert not base.is_head and find_merge_base(repo, "HEAD", {}).is_head
    assert changed_files(base) == ("kernel",)
    assert (text_at(base, Path("kernel")), text_at(base, Path("later"))) == ("old", "")
    assert last_change(base, Path("kernel")) == base.short
    (repo / "other").write_text("dirty")
    by = commits_since(base, [Path("kernel"), Path("other")])
    assert len(by) == 2 and by[0].endswith('"write kernel"') and by[1] == "what is not committed yet"
    assert commits_since(base, [Path("nothing")]) == ()


def test_what_is_compared_with_when_nobody_says(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", str(repo), "clone")
    clone = tmp_path / "clone"
    # origin's HEAD is what was checked out there.
    assert find_merge_base(clone, None, {}).ref == "origin/work"
    assert find_merge_base(clone, None, {"GITHUB_BASE_REF": "main"}).ref == "origin/main"
    assert find_merge_base(clone, "HEAD~1", {"GITHUB_BASE_REF": "main"}).ref == "HEAD~1"
    with pytest.raises(UsageError, match="git fetch origin gone"):
        find_merge_base(clone, None, {"GITHUB_BASE_REF": "gone"})
    git(clone, "remote", "remove", "origin")
    git(clone, "branch", "-m", "work", "trunk")
    with pytest.raises(UsageError, match="--forge-base REF"):
        find_merge_base(clone, None, {})


def test_a_shallow_clone_is_told_how_to_get_its_history(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", "--no-single-branch", f"file://{repo}", "shallow")
    for ref in ("origin/main", "origin/main~1"):
        with pytest.raises(UsageError, match="fetch-depth: 0"):
            find_merge_base(tmp_path / "shallow", ref, {})


def test_what_cannot_be_compared_says_why(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not in a git repo"):
        find_merge_base(tmp_path, None, {})
    with pytest.raises(UsageError, match="no such commit"):
        find_merge_base(repo, "nowhere", {})
    with pytest.raises(UsageError, match="no such commit"):
        find_merge_base(repo, "--help", {})
    git(repo, "checkout", "-q", "--orphan", "island")
    with pytest.raises(UsageError, match="nothing is committed yet"):
        find_merge_base(repo, "main", {})
    commit(repo, island="alone")
    with pytest.raises(UsageError, match="no common commit"):
        find_merge_base(repo, "main", {})


def test_without_git_there_is_a_clear_error(repo: Path) -> None:
    script = "from pathlib import Path; from pytest_cudaforge.merge_base import *; find_merge_base(Path('.'), None, {})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=repo, env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert "UsageError: --forge-guard: git cannot be used" in done.stderr, done.stderr


# -- its files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def untouched(repo: Path) -> Iterator[Path]:
    """A repo with work in progress of every kind; afterwards all of it is as it was, to the byte."""
    commit(repo, stashed="a")
    (repo / "stashed").write_text("put away")
    git(repo, "stash")
    (repo / "kernel").write_text("staged")
    git(repo, "add", "kernel")
    (repo / "kernel").write_text("dirty")
    (repo / "untracked").write_text("mine")
    hook = repo / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {repo}/hooked\n")
    hook.chmod(0o755)

    def state() -> tuple[object, ...]:
        files = {path.name: path.read_bytes() for path in repo.iterdir() if path.is_file()}
        index = (repo / ".git" / "index").read_bytes()
        return files, index, *(git(repo, *ask) for ask in (("stash", "list"), ("for-each-ref",), ("rev-parse", "HEAD")))

    before = state()
    yield repo
    assert state() == before
    assert worktrees(repo) == 1


def test_its_files_are_there_and_gone_afterwards(untouched: Path) -> None:
    with worktree(find_merge_base(untouched, None, {})) as folder:
        assert (folder / "kernel").read_text() == "old" and not (folder / "later").exists()
        assert git(folder, "status", "--porcelain") == ""
        assert worktrees(untouched) == 2
    assert not folder.parent.exists()


def test_ctrl_c_leaves_nothing_behind(untouched: Path) -> None:
    with pytest.raises(KeyboardInterrupt), worktree(find_merge_base(untouched, None, {})) as folder:
        raise KeyboardInterrupt
    assert not folder.parent.exists()


def test_two_at_once_have_folders_of_their_own(untouched: Path) -> None:
    base = find_merge_base(untouched, None, {})
    with worktree(base) as one:
        with worktree(base) as other:
            assert one != other and (one / "kernel").is_file() and (other / "kernel").is_file()
        assert (one / "kernel").is_file()


def test_what_a_killed_run_left_is_swept(untouched: Path) -> None:
    base = find_merge_base(untouched, None, {})
    script = (
        "import os, sys; from pathlib import Path; from pytest_cudaforge.merge_base import *\n"
        "with worktree(find_merge_base(Path(sys.argv[1]), None, {})) as folder: print(folder, flush=True); os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(untouched)], capture_output=True, text=True, check=False)
    left = Path(killed.stdout.strip())
    assert killed.returncode == 9 and (left / "kernel").is_file() and worktrees(untouched) == 2
    with worktree(base):
        assert not left.exists() and worktrees(untouched) == 2


def test_inside_a_hook_git_is_not_led_astray(untouched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_INDEX_FILE", str(untouched / ".git" / "index"))
    monkeypatch.setenv("GIT_DIR", str(untouched / ".git"))
    with monkeypatch.context() as inside:
        inside.chdir(untouched)
        with worktree(find_merge_base(untouched, None, os.environ)) as folder:
            assert (folder / "kernel").read_text() == "old"
    monkeypatch.undo()


def test_a_detached_head_a_linked_worktree_and_a_folder_below_the_top(repo: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    git(repo, "worktree", "add", "-q", "--detach", str(linked), "work")
    (linked / "below").mkdir()
    base = find_merge_base(linked / "below", "main", {})
    assert (base.top, base.prefix) == (linked.resolve(), Path("below"))
    with worktree(base) as folder:
        assert (folder / "kernel").read_text() == "old"
        assert worktrees(repo) == 3
    assert worktrees(repo) == 2 and git(linked, "status", "--porcelain") == ""


def test_submodules_stay_where_they_are(repo: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    git(part, "init", "-q")
    commit(part, file="text")
    git(repo, "checkout", "-q", "main")
    git(repo, "submodule", "--quiet", "add", str(part), "part")
    commit(repo, more="with a submodule")
    with worktree(find_merge_base(repo, "HEAD", {})) as folder:
        assert (folder / "more").is_file() and not (folder / "part" / "file").exists()
    assert worktrees(repo) == 1 and (repo / "part" / "file").is_file()
