"""The repo of a publish: how the token gets to the server, where it is not, and how little else is touched."""

from __future__ import annotations

import base64
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest
from cudaforge_action.remote import Identity, Leaf, LeaseLost, opened
from fake_git import git
from fake_github import TOKEN, FakeGitHub, fake_github, serving
from publish_repo import BRANCH, published_repo

from pytest_cudaforge.errors import PublishError

ENCODED = base64.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
ME = Identity("bot", "bot@example.org")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeGitHub]:
    with fake_github(tmp_path, private=True) as made:
        made.commit("main", {"a.py": "a", "b/c.py": "c", "b/.attributes": "x"})
        yield made


def test_a_change_goes_round(hub: FakeGitHub, tmp_path: Path) -> None:
    with opened(hub.git_url, TOKEN) as remote:
        assert remote.tips("main", "none") == {"main": hub.branches["main"]}
        tip = remote.fetch("main", 1)
        assert set(remote.leaves(tip)) == {"a.py", "b/c.py", "b/.attributes"}
        assert set(remote.leaves(tip, "b")) == {"b/c.py", "b/.attributes"}
        blobs = remote.blobs([b"\0\xff\r\n", b""])
        assert remote.contents(blobs) == dict(zip(blobs, [b"\0\xff\r\n", b""], strict=True))
        tree = remote.changed_tree(tip, {"b/c.py": None, "n\new": Leaf("100644", blobs[0])})
        assert remote.changes(tip, tree) == {"b/c.py": None, "n\new": Leaf("100644", blobs[0])}
        sha = remote.commit(tree, tip, "hello\n\nworld", ME)
        assert (remote.parents(sha), remote.message(sha).strip()) == ((tip,), "hello\n\nworld")
        remote.push(sha, "new", None)
        remote.check_out(tip, ["b/c.py"], tmp_path / "out")
    assert hub.branches["new"] == sha
    assert git(hub.bare, "log", "-1", "--format=%an <%ae>", "new") == "bot <bot@example.org>"
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["c.py"]


def test_a_redirect_does_not_take_the_token_to_another_host(hub: FakeGitHub, tmp_path: Path) -> None:
    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", hub.url + self.path)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """The hub's log is what counts."""

    hub.private = False
    with serving(Elsewhere) as url:
        with opened(f"{url}/octo/kernels.git", TOKEN) as remote, pytest.raises(PublishError, match="302"):
            remote.fetch("main", 1)
        assert hub.git_requests == []
        # Without a token there is nothing to take.
        with opened(f"{url}/octo/kernels.git") as remote:
            assert remote.fetch("main", 1) == hub.branches["main"]


def test_a_branch_that_others_moved_is_not_overwritten(hub: FakeGitHub) -> None:
    with opened(hub.git_url, TOKEN) as remote:
        tip = remote.fetch("main", 1)
        theirs = hub.commit("main", {"a.py": "b"})
        sha = remote.commit(remote.tree(tip), tip, "again", ME)
        for lost in (lambda: remote.push(sha, "main", tip), lambda: remote.delete("main", tip)):
            with pytest.raises(LeaseLost, match="run publish again"):
                lost()
        assert hub.branches["main"] == theirs


def test_what_is_on_a_branch_is_asked_of_its_dates(hub: FakeGitHub) -> None:
    first = hub.branches["main"]
    other = hub.commit("other", {"a.py": "x"})
    last = hub.commit("main", {"a.py": "b"})
    with opened(hub.git_url, TOKEN) as remote:
        remote.fetch("main", 1)
        remote.fetch("other", 5)
        assert [remote.on_branch(sha, "main") for sha in (first, last, other)] == [True, True, False]


def test_headers_that_lie_about_do_not_join_ours(hub: FakeGitHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """actions/checkout, or a machine, may have left one of its own; a server refuses two."""
    for number, key in enumerate((f"http.{hub.url}/.extraheader", f"http.{hub.git_url}.extraHeader")):
        monkeypatch.setenv(f"GIT_CONFIG_KEY_{number}", key)
        monkeypatch.setenv(f"GIT_CONFIG_VALUE_{number}", "X-Old: a token of others")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "2")
    with opened(hub.git_url, TOKEN) as remote:
        remote.tips("main")
    assert all("x-old" not in request.headers for request in hub.git_requests)
    assert {request.headers["authorization"] for request in hub.git_requests} == {f"Basic {ENCODED}"}


@pytest.mark.parametrize("token", ["", "ghs_wrong"])
def test_a_wrong_token_is_said_at_once_and_never_shown(hub: FakeGitHub, token: str) -> None:
    with (
        opened(hub.git_url, token) as remote,
        pytest.raises(PublishError, match="a repository that this token") as told,
    ):
        remote.tips("main")
    assert not token or token not in str(told.value)


class _Unwell(BaseHTTPRequestHandler):
    """A server in the middle of a restart."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(503)

    def log_message(self, *arguments: object) -> None:
        """Tests read what was asked."""


def test_a_server_with_a_bad_moment_is_asked_again() -> None:
    pauses: list[float] = []
    with serving(_Unwell) as url, opened(f"{url}/o/r.git", TOKEN, sleep=pauses.append) as remote:
        with pytest.raises(PublishError, match="503"):
            remote.tips("main")
        assert (len(_Unwell.asked), len(pauses)) == (3, 2)
        with pytest.raises(PublishError):
            remote.push("HEAD", "main", None)
        assert len(pauses) == 4  # the push itself was tried once


def test_a_push_whose_answer_was_lost_has_come_through(hub: FakeGitHub) -> None:
    with opened(hub.git_url, TOKEN) as remote:
        tip = remote.fetch("main", 1)
        sha = remote.commit(remote.tree(tip), tip, "again", ME)
        remote.push(sha, "new", None)
        remote.push(sha, "new", None)
    assert hub.branches["new"] == sha


def test_a_password_in_an_address_is_not_shown() -> None:
    with opened("http://ada:s3cret@127.0.0.1:9/o/r.git", sleep=print) as remote, pytest.raises(PublishError) as told:
        remote.tips("main")
    assert "s3cret" not in str(told.value) and "http://***@127.0.0.1" in str(told.value)


def test_the_token_is_in_no_argument_file_or_line(tmp_path: Path) -> None:
    """A publish as a process, with a git that writes down how it is called and what its environment holds."""
    record, real = tmp_path / "calls", subprocess.check_output(["which", "git"], text=True).strip()
    wrapper = tmp_path / "bin/git"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {record}\nexec {real} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    with published_repo(tmp_path, "Scale", private=True) as repo:
        repo.jobs("Scale")
        checkout = repo.folder
        git(checkout, "init", "-q")
        config = (checkout / ".git/config").read_text()
        environ = {
            **{name: os.environ[name] for name in ("HOME", "LANG", "VIRTUAL_ENV") if name in os.environ},
            **repo.hub.environ(tmp_path / "step", "schedule"),
            "PATH": f"{wrapper.parent}:{os.environ['PATH']}",
            "TMPDIR": str(tmp_path),
            "INPUT_TOKEN": TOKEN,
            "GIT_CURL_VERBOSE": "1",
        }
        command = [sys.executable, "-m", "cudaforge_action", "publish"]
        done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert BRANCH in repo.hub.branches
        assert (checkout / ".git/config").read_text() == config
        assert not (checkout / ".git/index").exists()
    told = done.stderr + done.stdout.replace(f"::add-mask::{TOKEN}", "")
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert record in kept
    for secret in (TOKEN.encode(), ENCODED.encode()):
        assert secret not in told.encode()
        assert [path for path in kept if secret in path.read_bytes()] == []
    assert "push --quiet" in record.read_text()
