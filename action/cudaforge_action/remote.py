"""The server's git repository, as a job sees it that may write to it: what is there, and one way to change a branch.

Everything happens in a repo of its own in a temporary folder: the checkout's files, index, refs and configuration are
neither read nor touched, so that no hook, filter or setting that lies there meets the token. Of history only as much is
fetched as is asked for.

The token goes to git as a configuration in its environment (``GIT_CONFIG_COUNT``, https://git-scm.com/docs/git-config),
an extra header for this one URL: it is in no argument, URL or file. actions/checkout leaves a header of its own in a
checkout, and a server refuses two; an empty value in front resets the list.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_cudaforge.errors import PublishError

if TYPE_CHECKING:
    from git import GitCommandError
    from git.cmd import Git

__all__ = ["Identity", "Leaf", "LeaseLost", "Remote", "opened"]

#: An ancestor may be dated after its descendants where a clock was wrong.
_CLOCK_SLACK_SECONDS = 24 * 3600
_MODES = ("100644", "100755")
_QUIET = {
    # Never ask, never trace a header, never fetch what lives elsewhere (LFS), never run the machine's own hooks.
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "SSH_ASKPASS": "",
    "GCM_INTERACTIVE": "never",
    "GIT_TRACE": "0",
    "GIT_TRACE_CURL": "0",
    "GIT_TRACE_PACKET": "0",
    "GIT_TRACE_REDACT": "1",
    "GIT_TRACE2": "0",
    "GIT_TRACE2_EVENT": "0",
    "GIT_TRACE2_PERF": "0",
    "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "LC_ALL": "C",
}
_SETTINGS = (
    ("core.hooksPath", os.devnull),
    ("core.autocrlf", "false"),
    ("core.symlinks", "false"),
    ("gc.auto", "0"),
    ("maintenance.auto", "false"),
    ("push.gpgSign", "false"),
    ("http.lowSpeedLimit", "1000"),
    ("http.lowSpeedTime", "60"),
)
#: ``GIT_CONFIG_COUNT`` came with it.
_OLDEST_GIT = (2, 31)
_PAUSES_S = (2.0, 5.0)
_PASSING = re.compile(
    r"returned error: (5\d\d|429)|timed out|timeout|Could not resolve|Connection (reset|refused)|early EOF|Empty reply"
    r"|hung up|transfer closed|Operation too slow"
)
_LEASE = re.compile(r"\((stale info|fetch first|non-fast-forward|already exists)\)|cannot lock ref|reference already")


class LeaseLost(PublishError):
    """Somebody moved the branch between looking at it and pushing; nothing was overwritten."""


@dataclass(frozen=True)
class Identity:
    """Whose commits ours are."""

    name: str
    email: str


@dataclass(frozen=True)
class Leaf:
    """A file of a tree: git's mode and blob."""

    mode: str
    blob: str


@contextlib.contextmanager
def opened(url: str, token: str = "", *, sleep: Callable[[float], None] = time.sleep) -> Iterator[Remote]:
    """The repository at ``url`` for the block's time. ``token``: "" where git itself knows how to get in (a plain
    machine). Raises :class:`PublishError` where there is no git, or one that is too old to be given a token so."""
    try:
        from git.cmd import Git
    except ImportError as error:  # GitPython raises it as well where there is no git program.
        first = (str(error).splitlines() or [""])[0]
        raise PublishError(f"git cannot be used: {first}", remedy="install git (and pip install gitpython)") from None
    with tempfile.TemporaryDirectory(prefix="cudaforge-publish-") as scratch:
        git = Git(scratch)
        if token and git.version_info[:2] < _OLDEST_GIT:
            shown = ".".join(map(str, git.version_info))
            raise PublishError(
                f"git is {shown}", expected="git 2.31 or newer, which takes settings from its environment"
            )
        yield Remote(git, url, token, Path(scratch), sleep)


class Remote:
    """See :func:`opened`. All methods raise :class:`PublishError` where git refuses."""

    def __init__(self, git: Git, url: str, token: str, scratch: Path, sleep: Callable[[float], None]) -> None:
        self.url = url
        self.scratch = scratch
        self._git = git
        self._sleep = sleep
        self._tips: dict[str, str] = {}
        # A person's remote may have a password in its address.
        self._secrets = tuple(filter(None, (token, _basic(token) if token else "", _userinfo(url))))
        self.shown = self._hidden(url)
        self._base = {
            **_QUIET,
            "GIT_DIR": str(scratch / "git"),
            "GIT_WORK_TREE": str(scratch / "work"),
            "GIT_INDEX_FILE": str(scratch / "index"),
        }
        (scratch / "work").mkdir()
        self._local_env = {**self._base, **_configuration(_SETTINGS)}
        with_token = _SETTINGS + (_header(url, token) if token else ())
        self._server_env = {**self._base, **_configuration(with_token)}
        self.local("init", "--quiet", "--template=")

    # -- git -----------------------------------------------------------------------------------------------------------

    def local(self, *arguments: str, given: str = "", env: Mapping[str, str] | None = None) -> str:
        """The output of a git command that needs no server, without its last line end. ``given``: its input."""
        return self._run(arguments, {**self._local_env, **(env or {})}, given.encode()).decode("utf-8", "replace")

    def _server(self, *arguments: str) -> str:
        """A server may have a bad moment; what only reads is asked again."""
        for pause_s in _PAUSES_S if arguments[0] in ("fetch", "ls-remote") else ():
            try:
                return self._run(arguments, self._server_env, b"").decode("utf-8", "replace")
            except PublishError as error:
                if not _PASSING.search(str(error)):
                    raise
            self._sleep(pause_s)
        return self._run(arguments, self._server_env, b"").decode("utf-8", "replace")

    def _run(self, arguments: Sequence[str], env: Mapping[str, str], given: bytes) -> bytes:
        from git import GitCommandError

        try:
            with tempfile.TemporaryFile() as stream:
                stream.write(given)
                stream.seek(0)
                told = self._git.execute(
                    ["git", *arguments],
                    istream=stream,
                    env=dict(env),
                    stdout_as_string=False,
                    strip_newline_in_stdout=False,
                )
        except GitCommandError as error:
            raise self._failed(arguments, error) from None
        return told if isinstance(told, bytes) else str(told).encode()

    def _failed(self, arguments: Sequence[str], error: GitCommandError) -> PublishError:
        """What git said, without anything that is secret. The original is not chained: it knows the environment."""
        told = re.sub(r"^\s*stderr: '?", "", str(error.stderr or "")).strip().rstrip("'")
        shown = " ".join(self._hidden(told).split())[:600] or f"exit status {error.status}"
        if arguments[0] == "push" and _LEASE.search(told):
            return LeaseLost(
                f"the branch was changed by somebody else meanwhile, nothing was overwritten: {shown}",
                expected="one run at a time that publishes to a branch",
                remedy="run publish again, it starts from what is there now; a `concurrency:` group avoids this",
            )
        return PublishError(f"git {arguments[0]} {self.shown}: {shown}", expected=_EXPECTED.get(arguments[0], ""))

    def _hidden(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    # -- what is there -------------------------------------------------------------------------------------------------

    def tips(self, *branches: str) -> dict[str, str]:
        """The commits of those of ``branches`` that exist. The server is asked once for each."""
        if unknown := [branch for branch in branches if branch not in self._tips]:
            names = [f"refs/heads/{branch}" for branch in unknown]
            lines = self._server("ls-remote", "--quiet", "--", self.url, *names).splitlines()
            found = {ref: sha for sha, _, ref in (line.partition("\t") for line in lines)}
            self._tips.update({branch: found.get(f"refs/heads/{branch}", "") for branch in unknown})
        return {branch: self._tips[branch] for branch in branches if self._tips[branch]}

    def fetch(self, branch: str, depth: int) -> str:
        """Fetch a branch and ``depth`` commits of its history; its tip."""
        self._fetch(branch, f"--depth={depth}")
        return self.local("rev-parse", f"refs/seen/{branch}").strip()

    def _fetch(self, branch: str, how: str) -> None:
        refspec = f"+refs/heads/{branch}:refs/seen/{branch}"
        self._server("fetch", "--quiet", "--no-tags", "--no-recurse-submodules", how, "--", self.url, refspec)

    def on_branch(self, sha: str, branch: str) -> bool:
        """Is ``sha`` the fetched ``branch`` or an ancestor of it? False where the dates of commits hide it."""
        if self.local("rev-parse", f"refs/seen/{branch}").strip() == sha:
            return True
        since = int(self.local("show", "-s", "--format=%ct", sha).strip()) - _CLOCK_SLACK_SECONDS
        try:
            self._fetch(branch, f"--shallow-since={since}")
            self.local("merge-base", "--is-ancestor", sha, f"refs/seen/{branch}")
        except PublishError:
            return False
        return True

    def holds(self, branch: str, sha: str) -> bool:
        """As :meth:`on_branch`, of a commit that was not fetched yet: False where the server does not give it."""
        if self.tips(branch).get(branch) == sha:
            return True
        try:
            self._server("fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--depth=1", "--", self.url, sha)
        except PublishError:
            return False
        return self.on_branch(sha, branch)

    def parents(self, sha: str) -> tuple[str, ...]:
        """As far as they were fetched: the commit's own words, not what is here."""
        lines = self.local("cat-file", "commit", sha).partition("\n\n")[0].splitlines()
        return tuple(line.split(" ", 1)[1] for line in lines if line.startswith("parent "))

    def message(self, sha: str) -> str:
        return self.local("cat-file", "commit", sha).partition("\n\n")[2]

    def tree(self, sha: str) -> str:
        return self.local("rev-parse", f"{sha}^{{tree}}").strip()

    def leaves(self, tree: str, *folders: str) -> dict[str, Leaf]:
        """Every file of a tree (or commit) by its path, links and submodules left out; below ``folders`` if given."""
        places = [f"{folder}/" for folder in folders if folder]
        listed = self.local("ls-tree", "-r", "-z", "--full-tree", tree, "--", *places)
        found = {}
        for line in listed.split("\0"):
            facts, _, path = line.partition("\t")
            mode, _, blob = facts.partition(" ")
            if mode in _MODES:
                found[path] = Leaf(mode, blob.rpartition(" ")[2])
        return found

    def contents(self, blobs: Iterable[str]) -> dict[str, bytes]:
        """The bytes of blobs, by name."""
        wanted = sorted(set(blobs))
        told = self._run(("cat-file", "--batch"), self._local_env, "".join(f"{one}\n" for one in wanted).encode())
        found, place = {}, 0
        for blob in wanted:
            end = told.index(b"\n", place)
            size = int(told[place:end].rpartition(b" ")[2])
            found[blob] = told[end + 1 : end + 1 + size]
            place = end + size + 2
        return found

    def changes(self, before: str, after: str) -> dict[str, Leaf | None]:
        """What became of every path that differs; None where it is gone."""
        told = self.local("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", before, after).split("\0")
        return {path: _leaf_after(facts) for facts, path in zip(told[::2], told[1::2], strict=False) if facts}

    def check_out(self, tree: str, paths: Iterable[str], folder: Path) -> None:
        """Write those files of ``tree`` below ``folder``; links become files with their text."""
        self.local("read-tree", tree)
        names = "".join(f"{path}\0" for path in paths)
        self.local("checkout-index", "-f", "-z", "--stdin", f"--prefix={folder}/", given=names)

    # -- what is to be there -------------------------------------------------------------------------------------------

    def blobs(self, contents: Sequence[bytes]) -> list[str]:
        """Store bytes as they are; their names, in order."""
        if not contents:
            return []
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            paths = [Path(folder) / str(number) for number in range(len(contents))]
            for path, data in zip(paths, contents, strict=True):
                path.write_bytes(data)
            names = "".join(f"{path}\n" for path in paths)
            return self.local("hash-object", "-w", "--no-filters", "--stdin-paths", given=names).split()

    def changed_tree(self, tree: str, changes: Mapping[str, Leaf | None]) -> str:
        """``tree`` with files set, or taken away (None)."""
        zeros = "0" * len(self.tree(tree))
        lines = [
            f"{leaf.mode} {leaf.blob}\t{path}\0" if leaf is not None else f"0 {zeros}\t{path}\0"
            for path, leaf in changes.items()
        ]
        self.local("read-tree", tree)
        self.local("update-index", "-z", "--index-info", given="".join(lines))
        return self.local("write-tree").strip()

    def commit(self, tree: str, parent: str, message: str, identity: Identity) -> str:
        who = {
            f"GIT_{role}_{key}": value
            for role in ("AUTHOR", "COMMITTER")
            for key, value in (("NAME", identity.name), ("EMAIL", identity.email))
        }
        return self.local("commit-tree", tree, "-p", parent, "-F", "-", given=message, env=who).strip()

    def push(self, sha: str, branch: str, seen: str | None) -> None:
        """Move ``branch`` to ``sha`` where it still is at ``seen`` (None: where it does not exist).

        Raises :class:`LeaseLost` where it is not.
        """
        lease = f"--force-with-lease=refs/heads/{branch}:{seen or ''}"
        try:
            self._push(lease, f"{sha}:refs/heads/{branch}")
        except PublishError:
            if not self._has_come_through(branch, sha):
                raise

    def _has_come_through(self, branch: str, sha: str) -> bool:
        """Where a push failed only its answer may have been lost."""
        self._tips.pop(branch, None)
        try:
            return self.tips(branch) == {branch: sha}
        except PublishError:
            return False

    def delete(self, branch: str, seen: str) -> None:
        """Delete ``branch`` where it still is at ``seen``. Raises :class:`LeaseLost` where it is not."""
        lease = f"--force-with-lease=refs/heads/{branch}:{seen}"
        self._push(lease, f":refs/heads/{branch}")

    def _push(self, lease: str, refspec: str) -> None:
        self._server("push", "--quiet", "--no-verify", lease, "--", self.url, refspec)


_EXPECTED = {
    "push": "a token that may write: `permissions: contents: write`, and no rule that protects this branch",
    "fetch": "a repository that this token may read",
    "ls-remote": "a repository that this token may read",
}


def _leaf_after(facts: str) -> Leaf | None:
    """Of ``:100644 100644 <blob> <blob> M``, what is there afterwards."""
    _, mode, _, blob, status = facts.split(" ")
    return None if status == "D" else Leaf(mode, blob)


def _basic(token: str) -> str:
    return base64.b64encode(f"x-access-token:{token}".encode()).decode("ascii")


def _userinfo(url: str) -> str:
    found = re.match(r"[a-z+]+://([^/@]+)@", url)
    return found.group(1) if found is not None and ":" in found.group(1) else ""


def _header(url: str, token: str) -> tuple[tuple[str, str], ...]:
    # The whole URL is the narrowest key there is: no other repo, and no narrower setting of the machine wins over it.
    key = f"http.{url}.extraHeader"
    return (
        (key, ""),
        (key, f"Authorization: Basic {_basic(token)}"),
        # Where the first request is sent elsewhere, git sends the next ones there with the header, whatever the host.
        (f"http.{url}.followRedirects", "false"),
        ("credential.helper", ""),
    )


def _configuration(settings: Sequence[tuple[str, str]]) -> dict[str, str]:
    """``settings`` behind those that the environment has already (a container's ``safe.directory``)."""
    told = os.environ.get("GIT_CONFIG_COUNT", "")
    start = int(told) if told.isascii() and told.isdigit() else 0
    found = {"GIT_CONFIG_COUNT": str(start + len(settings))}
    for number, (key, value) in enumerate(settings, start):
        found[f"GIT_CONFIG_KEY_{number}"], found[f"GIT_CONFIG_VALUE_{number}"] = key, value
    return found
