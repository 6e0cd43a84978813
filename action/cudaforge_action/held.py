"""Which forged kernels there are already: in the working tree, and on the branch of the open pull request."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cudaforge_action.matrix import Known
from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.publishing import MANIFEST
from pytest_cudaforge.records import Candidate
from pytest_cudaforge.runtime.manifest import Entry, Manifest

if TYPE_CHECKING:
    from git import Repo

__all__ = ["Proposed", "checked_out", "here", "proposed"]

_REMOTE = "refs/remotes/origin/"


@dataclass(frozen=True)
class Proposed:
    """What a branch of the clone holds. ``note``: why it could not be looked at, "" where it was."""

    kernels: tuple[Known, ...] = ()
    note: str = ""


def here(manifest: Path) -> tuple[Known, ...]:
    """The kernels that a manifest in the working tree lists, none where there is none.

    Raises :class:`ConfigError` for a manifest that cannot be read.
    """
    if not manifest.is_file():
        return ()
    return tuple(_known(entry, manifest.name, manifest, None) for entry in Manifest.load(manifest).entries)


def proposed(forge_dir: Path, branch: str) -> Proposed:
    """The kernels on ``origin/<branch>``, as this clone has it; nothing is fetched."""
    try:
        from git import GitCommandError, InvalidGitRepositoryError, NoSuchPathError, Repo
    except ImportError as error:  # GitPython raises it as well where there is no git program.
        return Proposed(note=f"git cannot be used: {(str(error).splitlines() or [''])[0]}")
    ref = _REMOTE + branch
    try:
        with Repo(forge_dir.parent, search_parent_directories=True) as repo:
            if not repo.git.for_each_ref("--format=%(refname)", ref):
                return Proposed(note=f"this clone has no origin/{branch}")
            place = forge_dir.resolve().relative_to(Path(str(repo.working_tree_dir)).resolve()).as_posix()
            return _proposed(repo, f"{ref}:{place}", f"origin/{branch}")
    except (InvalidGitRepositoryError, NoSuchPathError, ValueError):
        return Proposed(note=f"{forge_dir} is not in a git repo")
    except GitCommandError as error:
        return Proposed(note=f"origin/{branch} cannot be read: {' '.join(str(error.stderr).split())[:300]}")


def _proposed(repo: Repo, place: str, shown: str) -> Proposed:
    blob = _blobs(repo, place)
    text = blob(MANIFEST)
    if text is None:
        return Proposed()
    try:
        entries = Manifest.parse(text.decode("utf-8", "replace"), f"{shown}:{MANIFEST}").entries
    except ConfigError as error:
        return Proposed(note=error.what)
    return Proposed(tuple(_known(entry, shown, Path(shown) / MANIFEST, blob) for entry in entries))


def _blobs(repo: Repo, place: str) -> Callable[[str], bytes | None]:
    """Reads a file below ``place`` as it was committed; None where there is none."""
    from git import GitCommandError

    def read(name: str) -> bytes | None:
        try:
            found: bytes = repo.git.cat_file(
                "blob", f"{place}/{name}", stdout_as_string=False, strip_newline_in_stdout=False
            )
        except GitCommandError:
            return None
        return found

    return read


def _known(entry: Entry, where: str, manifest: Path, blob: Callable[[str], bytes | None] | None) -> Known:
    """``blob`` None: its files lie beside the manifest."""
    try:
        sources = entry.sources(manifest) if blob is None else _sources(entry, blob)
    except (ConfigError, UnicodeDecodeError) as error:
        damage = "the files of its kernel are not those that were verified"
        return Known(entry, where, f"{damage}: {str(error).splitlines()[0][:200]}", proposed=blob is not None)
    return Known(entry, where, digest=Candidate.of(entry.language, sources).digest, proposed=blob is not None)


def _sources(entry: Entry, blob: Callable[[str], bytes | None]) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in entry.files:
        data = blob(f"{entry.directory}/{file.name}")
        if data is None or hashlib.sha256(data).hexdigest() != file.sha256:
            raise ConfigError(f"{file.name} is gone or differs")
        found[file.name] = data.decode()
    return found


def checked_out(root: Path) -> str:
    """The commit that is checked out, "" where git does not say."""
    try:
        from git import GitCommandError, InvalidGitRepositoryError, NoSuchPathError, Repo
    except ImportError:
        return ""
    try:
        with Repo(root, search_parent_directories=True) as repo:
            return str(repo.git.rev_parse("--verify", "--quiet", "HEAD^{commit}"))
    except (GitCommandError, InvalidGitRepositoryError, NoSuchPathError):
        return ""
