"""The merge base of what is checked in now, and its files in a temporary git worktree.

The user's working tree, index, stash and HEAD are never touched: every call of git gets a repo and an index of its own
in the environment, also where pytest runs inside a git hook, whose variables would lead git elsewhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.termination import undisturbed

if TYPE_CHECKING:
    from git import Git, Repo

__all__ = ["MergeBase", "changed_files", "commits_since", "find_merge_base", "last_change", "text_at", "worktree"]

#: Where a clone's default branch is looked for when nothing says which one it is.
_USUAL_NAMES = ("origin/main", "origin/master", "main", "master")
_PREFIX = "cudaforge-base-"
_OPTION = "--forge-base"
_UNDO_SHALLOW = "fetch the whole history: `git fetch --unshallow`, or `fetch-depth: 0` in actions/checkout"


@dataclass(frozen=True)
class MergeBase:
    """A commit. ``ref`` is what HEAD was held against to find it, ``top`` the root of the user's working tree,
    ``prefix`` where rootdir lies below it. ``head``: the commit that is checked out."""

    ref: str
    sha: str
    head: str
    date: str
    subject: str
    top: Path
    prefix: Path

    @property
    def is_head(self) -> bool:
        return self.sha == self.head

    @property
    def short(self) -> str:
        """``1f2e3d4c5``"""
        return self.sha[:9]

    @property
    def told(self) -> str:
        """``1f2e3d4c5 (2026-11-20, "feat: a norm")``"""
        return f'{self.short} ({self.date}, "{self.subject}")'


def find_merge_base(root: Path, ref: str | None, environ: Mapping[str, str]) -> MergeBase:
    """The merge base of HEAD and ``ref``; without one, of HEAD and the default branch.

    That is ``GITHUB_BASE_REF`` in a pull request's workflow, else origin's HEAD, else main or master.
    Raises :class:`UsageError` where there is no git, no repo, no such ref or no common history.
    """
    with _git_errors(), _repo(root) as repo, _own_environment(repo):
        top = Path(str(repo.working_tree_dir)).resolve()
        head = _commit(repo.git, "HEAD")
        if head is None:
            raise UsageError(f"{top}: nothing is committed yet", expected="a commit to compare with")
        name = ref if ref is not None else _default_branch(repo, environ)
        other = _commit(repo.git, name)
        if other is None:
            raise _unknown_ref(repo, name)
        found = _merge_base(repo, head, other, name)
        date, subject = repo.git.log("-1", "--no-show-signature", "--format=%cs%x00%s", found).split("\0")
        return MergeBase(name, found, head, date, subject, top, root.resolve().relative_to(top))


@contextlib.contextmanager
def worktree(base: MergeBase) -> Iterator[Path]:
    """The files of the merge base in a folder of their own; it is gone afterwards, after Ctrl-C as well
    (and after SIGTERM, where that is an :func:`~pytest_cudaforge.termination.orderly_end`).

    A worktree that an earlier run left behind when it was killed is removed, too. Raises :class:`UsageError`.
    """
    with _git_errors(), _repo(base.top) as repo:
        with _own_environment(repo):
            _sweep(repo.git)
        parent = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
        # The lock says that somebody is using it; it ends with this process, however that ends.
        lock = _locked(parent)
        folder = parent / parent.name
        try:
            _check_out(repo, base.sha, folder)
            yield folder
        finally:
            with undisturbed(), _own_environment(repo):
                _remove(repo.git, folder)
                if lock is not None:
                    os.close(lock)


def last_change(base: MergeBase, path: Path) -> str:
    """The commit that last changed ``path`` (below the repo's top) as of the merge base, short; its own where git
    does not say."""
    with _git_errors(), _repo(base.top) as repo, _own_environment(repo):
        found = repo.git.log("-1", "--no-show-signature", "--format=%H", base.sha, "--", f":(top,literal){path}")
        return (str(found) or base.sha)[:9]


def commits_since(base: MergeBase, paths: Sequence[Path], most: int = 3) -> tuple[str, ...]:
    """Commits on top of the merge base that changed any of ``paths`` (below the repo's top), newest first, as
    ``1f2e3d4c5 "perf: a norm"``; what is not committed is named last."""
    places = [f":(top,literal){path}" for path in paths]
    with _git_errors(), _repo(base.top) as repo, _own_environment(repo):
        shown = ("log", "--no-show-signature", f"-{most}", '--format=%h "%s"', f"{base.sha}..HEAD", "--", *places)
        found = str(repo.git.execute(["git", *shown])).splitlines()
        dirty = repo.git.status("--porcelain", "--", *places)
    return (*found, *(["what is not committed yet"] if dirty else []))


def text_at(base: MergeBase, path: Path) -> str:
    """A file's text at the merge base, by its path below the repo's top; "" where it has no such file."""
    with _git_errors(), _repo(base.top) as repo, _own_environment(repo):
        return str(repo.git.show(f"{base.sha}:{path.as_posix()}", with_exceptions=False, strip_newline_in_stdout=False))


def changed_files(base: MergeBase) -> tuple[str, ...]:
    """Tracked files that differ between the merge base and the working tree, by their path below the repo's top."""
    with _git_errors(), _repo(base.top) as repo, _own_environment(repo):
        listed = repo.git.diff("--name-only", "--no-ext-diff", "--no-textconv", "-z", base.sha, "--", ":(top)")
        return tuple(name for name in str(listed).split("\0") if name)


# -- which commit ------------------------------------------------------------------------------------------------


def _default_branch(repo: Repo, environ: Mapping[str, str]) -> str:
    asked = environ.get("GITHUB_BASE_REF", "").strip()
    if asked:
        for name in (f"origin/{asked}", asked):
            if _commit(repo.git, name) is not None:
                return name
        raise UsageError(
            f"GITHUB_BASE_REF says {asked!r}, which this clone does not have",
            expected=f"origin/{asked}",
            remedy=f"`git fetch origin {asked}`, or `fetch-depth: 0` in actions/checkout",
        )
    told = repo.git.rev_parse("--abbrev-ref", "origin/HEAD", with_exceptions=False)
    for name in (str(told), *_USUAL_NAMES):
        if name and name != "origin/HEAD" and _commit(repo.git, name) is not None:
            return name
    raise UsageError(
        f"{repo.working_tree_dir}: the default branch cannot be told",
        expected=f"GITHUB_BASE_REF, origin/HEAD or one of {', '.join(_USUAL_NAMES)}",
        remedy=f"name what to compare with: {_OPTION} REF",
    )


def _commit(git: Git, name: str) -> str | None:
    from git import GitCommandError

    try:
        return str(git.rev_parse("--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"))
    except GitCommandError:
        return None


def _merge_base(repo: Repo, head: str, other: str, name: str) -> str:
    found = str(repo.git.merge_base(head, other, with_exceptions=False)).split()
    if found:
        return found[0]
    shallow = repo.git.rev_parse("--is-shallow-repository") == "true"
    raise UsageError(
        f"HEAD and {name} have no common commit" + (" in this shallow clone" if shallow else ""),
        expected="a merge base",
        remedy=_UNDO_SHALLOW if shallow else f"name a branch that shares HEAD's history: {_OPTION} REF",
    )


def _unknown_ref(repo: Repo, name: str) -> UsageError:
    shallow = repo.git.rev_parse("--is-shallow-repository") == "true"
    return UsageError(
        f"{_OPTION} {name}: this clone has no such commit",
        expected="a branch, a tag or a commit",
        remedy=_UNDO_SHALLOW if shallow else "`git fetch` it first, or mend its name",
    )


# -- its files ---------------------------------------------------------------------------------------------------


def _check_out(repo: Repo, sha: str, folder: Path) -> None:
    # Without a checkout of its own, git asks no hook of the user's and touches no index.
    with _own_environment(repo):
        repo.git.worktree("add", "--detach", "--no-checkout", str(folder), sha)
    admin = _admin_folder(folder)
    assert admin is not None
    own = {"GIT_DIR": str(admin), "GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": str(admin / "index")}
    # Files that live elsewhere (LFS) are not fetched: kernels and their references are text.
    with repo.git.custom_environment(**own, GIT_LFS_SKIP_SMUDGE="1"):
        repo.git.execute(["git", "-c", "core.sparseCheckout=false", "reset", "--hard", "--quiet", sha])


def _admin_folder(folder: Path) -> Path | None:
    try:
        told = (folder / ".git").read_text(encoding="utf-8")
    except OSError:
        return None
    return Path(told.partition("gitdir:")[2].strip())


def _remove(git: Git, folder: Path) -> None:
    """Nothing of it stays, whatever state it is in."""
    admin = _admin_folder(folder)
    git.worktree("remove", "--force", str(folder), with_exceptions=False)
    shutil.rmtree(folder.parent, ignore_errors=True)
    if admin is not None and admin.parent.name == "worktrees":
        shutil.rmtree(admin, ignore_errors=True)


def _sweep(git: Git) -> None:
    """Remove what runs that were killed left behind; one whose lock is held is in use."""
    for line in str(git.worktree("list", "--porcelain")).splitlines():
        folder = Path(line.removeprefix("worktree "))
        if not line.startswith("worktree ") or not folder.name.startswith(_PREFIX):
            continue
        lock = _locked(folder.parent) if folder.parent.name == folder.name else None
        if lock is not None:
            _remove(git, folder)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where somebody else does, or where there is no such folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


# -- git ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _repo(root: Path) -> Iterator[Repo]:
    from git import InvalidGitRepositoryError, NoSuchPathError, Repo

    try:
        repo = Repo(root, search_parent_directories=True)
    except (InvalidGitRepositoryError, NoSuchPathError):
        raise UsageError(
            f"{root} is not in a git repo: there is no merge base to compare with",
            expected="a git repo",
            remedy="run the guard in a clone",
        ) from None
    with repo:
        if repo.bare:
            raise UsageError(f"{root} is a bare git repo", expected="a repo with a working tree")
        yield repo


@contextlib.contextmanager
def _own_environment(repo: Repo) -> Iterator[None]:
    """Nothing that git would take from a hook's environment, and a copy of the user's index."""
    with tempfile.TemporaryDirectory(prefix="cudaforge-index-") as scratch:
        with contextlib.suppress(OSError):
            shutil.copyfile(Path(repo.git_dir) / "index", Path(scratch) / "index")
        own = {
            "GIT_DIR": str(repo.git_dir),
            "GIT_WORK_TREE": str(repo.working_tree_dir),
            "GIT_INDEX_FILE": str(Path(scratch) / "index"),
            "GIT_OPTIONAL_LOCKS": "0",
        }
        with repo.git.custom_environment(**own):
            yield


@contextlib.contextmanager
def _git_errors() -> Iterator[None]:
    try:
        import git
    except ImportError as error:  # GitPython raises it as well where there is no git program.
        raise UsageError(
            f"--forge-guard: git cannot be used: {_first_line(error)}", remedy="install git (and pip install gitpython)"
        ) from error
    try:
        yield
    except git.CommandError as error:
        detail = " ".join(str(error.stderr).split()) or _first_line(error)
        raise UsageError(f"--forge-guard: git failed: {detail}", expected="a git repo that can be read") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
