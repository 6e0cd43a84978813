"""A GitHub for tests: REST API and git over real HTTP, with memory, permissions, limits and bad days.

::

    with fake_github(tmp_path) as hub:
        hub.commit("main", {"layers.py": "..."})          # straight into the repository, no push is counted
        api = GitHub(hub.api_url, TOKEN, hub.repository)   # git: hub.git_url, password TOKEN
        ...
        assert hub.writes == [] and hub.pushes == 0

What it answers, and refuses, is what https://docs.github.com/rest says and what users quote from the real one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from fake_git import bare_repository, basic_password, git, has_commit, http_backend, refs

TOKEN = "ghs_fake0000writes1111everything2222"
READER = "ghs_fake3333reads4444only5555"
BOT = "github-actions[bot]"

WRITES = {"contents": "write", "pull_requests": "write", "issues": "write", "statuses": "write"}
READS = {name: "read" for name in WRITES}

NOT_PERMITTED = "GitHub Actions is not permitted to create or approve pull requests."
NOT_ACCESSIBLE = "Resource not accessible by integration"
MAX_BODY = 65_536

_SHA = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Reply:
    """``status`` 0: the connection is closed without an answer."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """One request of the log. ``status``: what it was answered."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    status: int = 0


@dataclass
class Grant:
    login: str
    permissions: dict[str, str]


@dataclass
class Pull:
    number: int
    title: str
    head: str
    base: str
    body: str = ""
    state: str = "open"
    draft: bool = False
    merged: bool = False
    head_repository: str = ""
    head_sha: str = ""
    author: str = BOT
    labels: list[str] = field(default_factory=list)
    assignees: list[str] = field(default_factory=list)
    reviewers: list[str] = field(default_factory=list)
    team_reviewers: list[str] = field(default_factory=list)
    #: Who has reviewed it; they are no requested reviewers any more.
    reviews: list[str] = field(default_factory=list)


@dataclass
class Comment:
    id: int
    number: int
    body: str
    author: str = BOT


@dataclass
class Status:
    id: int
    sha: str
    state: str
    context: str
    description: str
    target_url: str
    creator: str


@dataclass
class Fault:
    """``late``: what was asked for is done all the same, and only the answer is another one."""

    method: str
    path: re.Pattern[str]
    reply: Reply
    times: int
    late: bool


class _Refusal(Exception):
    def __init__(self, reply: Reply) -> None:
        self.reply = reply


def message(status: int, text: str, *errors: Any, **headers: str) -> Reply:
    body: dict[str, Any] = {"message": text, "documentation_url": "https://docs.github.com/rest", "status": str(status)}
    if errors:
        body["errors"] = list(errors)
    return Reply(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def invalid(resource: str, field_name: str, code: str = "invalid", text: str = "") -> Reply:
    error = {"resource": resource, "code": code, **({"field": field_name} if field_name else {})}
    return message(422, "Validation Failed", error | ({"message": text} if text else {}))


def primary_limit(reset: int) -> Reply:
    text = "API rate limit exceeded for installation ID 1234."
    return message(403, text, x_ratelimit_limit="1000", x_ratelimit_remaining="0", x_ratelimit_reset=str(reset))


def secondary_limit(**headers: str) -> Reply:
    text = "You have exceeded a secondary rate limit. Please wait a few minutes before you try again."
    return message(403, text, x_ratelimit_remaining="4000", **headers)


def too_many(**headers: str) -> Reply:
    return message(429, "Too many requests", **headers)


def unavailable(status: int = 502) -> Reply:
    return Reply(status, "<html><title>Unicorn!</title></html>", {"Content-Type": "text/html"})


class FakeGitHub:
    """The state, which tests may read and change, and the API's rules."""

    def __init__(self, root: Path, repository: str, prefix: str, private: bool) -> None:
        self.repository, self.prefix, self.private = repository, prefix, private
        self.root = root
        self.url = ""
        self.default_branch = "main"
        self.bare = bare_repository(root / f"{repository}.git", self.default_branch)
        self.tokens = {TOKEN: Grant(BOT, dict(WRITES)), READER: Grant(BOT, dict(READS))}
        self.collaborators = {"ada", "grace"}
        self.teams = {"kernels"}
        #: The organisation's setting "Allow GitHub Actions to create and approve pull requests".
        self.allow_pull_requests = True
        #: How many times a branch just pushed is not yet known when a pull request is asked for.
        self.lag = 0
        self.pulls: dict[int, Pull] = {}
        self.comments: dict[int, Comment] = {}
        self.statuses: list[Status] = []
        self.requests: list[Request] = []
        self.git_requests: list[Request] = []
        self.pushes = 0
        self._faults: list[Fault] = []
        self._ids = itertools.count(1001)
        self.lock = threading.RLock()

    # -- what tests ask ------------------------------------------------------------------------------------------------

    @property
    def api_url(self) -> str:
        return self.url + self.prefix

    @property
    def git_url(self) -> str:
        return f"{self.url}/{self.repository}.git"

    @property
    def owner(self) -> str:
        return self.repository.partition("/")[0]

    @property
    def writes(self) -> list[str]:
        """Every request that was to change something, granted or not: ``POST /repos/o/r/pulls``."""
        return [f"{one.method} {one.path}" for one in self.requests if one.method != "GET"]

    @property
    def open_pulls(self) -> list[Pull]:
        self._sweep()
        return [pull for pull in self.pulls.values() if pull.state == "open"]

    @property
    def branches(self) -> dict[str, str]:
        heads = "refs/heads/"
        return {name[len(heads) :]: sha for name, sha in refs(self.bare).items() if name.startswith(heads)}

    def forget(self) -> None:
        """Begin counting anew; the state stays."""
        self.requests.clear()
        self.git_requests.clear()
        self.pushes = 0

    def calm(self) -> None:
        """No more faults than there are by themselves."""
        self._faults.clear()
        self.lag = 0

    # -- what tests arrange --------------------------------------------------------------------------------------------

    def grant(self, token: str, login: str = BOT, **permissions: str) -> None:
        self.tokens[token] = Grant(login, permissions)

    def fail(self, method: str, path: str, reply: Reply, *, times: int = 1, late: bool = False) -> None:
        """Answer the next ``times`` requests whose path matches with ``reply`` instead."""
        self._faults.append(Fault(method, re.compile(path), reply, times, late))

    def commit(
        self, branch: str, files: Mapping[str, str | bytes | None], *, base: str = "", text: str = "change"
    ) -> str:
        """A commit on ``branch`` (begun at ``base``); None deletes a file. The new tip's sha."""
        tips = self.branches
        parent = tips.get(branch) or tips.get(base or self.default_branch, "")
        with _index(self.bare, parent):
            git(self.bare, "update-index", "--index-info", given="".join(self._entry(*one) for one in files.items()))
            tree = git(self.bare, "write-tree")
        sha = git(self.bare, "commit-tree", tree, "-m", text, *(("-p", parent) if parent else ()))
        git(self.bare, "update-ref", f"refs/heads/{branch}", sha)
        return sha

    def _entry(self, name: str, content: str | bytes | None) -> str:
        if content is None:
            return f"0 {'0' * 40}\t{name}\n"
        return f"100644 {git(self.bare, 'hash-object', '-w', '--stdin', given=content)}\t{name}\n"

    def open_pull(self, head: str, *, base: str = "", title: str = "A change", fork: str = "", sha: str = "") -> Pull:
        """Somebody's pull request; with ``fork`` (owner/name) its head ``sha`` lies there."""
        pull = Pull(self.new_number(), title, head, base or self.default_branch, author="mallory")
        pull.head_repository = fork or self.repository
        pull.head_sha = sha or self.branches[head]
        self.pulls[pull.number] = pull
        git(self.bare, "update-ref", f"refs/pull/{pull.number}/head", pull.head_sha)
        return pull

    def say(self, number: int, body: str, author: str = "mallory") -> Comment:
        comment = Comment(next(self._ids), number, body, author)
        self.comments[comment.id] = comment
        return comment

    def pull_event(self, pull: Pull, action: str = "synchronize", label: str = "") -> dict[str, Any]:
        event = {"action": action, "number": pull.number, "pull_request": self.pull_json(pull)}
        event |= {"repository": self.repository_json(), "sender": _user(pull.author)}
        return event | ({"label": {"name": label}} if label else {})

    def environ(
        self, folder: Path, event: str = "schedule", payload: Mapping[str, Any] | None = None, **given: str
    ) -> dict[str, str]:
        """What the runner of a step sets; ``payload`` is the event's own JSON, the files lie in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        files = {name: folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.touch()
        told = {"repository": self.repository_json(), **(payload or {})}
        (folder / "event.json").write_text(json.dumps(told))
        pull = told.get("pull_request", {})
        return {
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_API_URL": self.api_url,
            "GITHUB_SERVER_URL": self.url,
            "GITHUB_REPOSITORY": self.repository,
            "GITHUB_REPOSITORY_OWNER": self.owner,
            "GITHUB_EVENT_NAME": event,
            "GITHUB_EVENT_PATH": str(folder / "event.json"),
            "GITHUB_SHA": self.branches.get(self.default_branch, ""),
            "GITHUB_REF": f"refs/pull/{pull['number']}/merge" if pull else f"refs/heads/{self.default_branch}",
            "GITHUB_REF_NAME": f"{pull['number']}/merge" if pull else self.default_branch,
            "GITHUB_HEAD_REF": pull["head"]["ref"] if pull else "",
            "GITHUB_BASE_REF": pull["base"]["ref"] if pull else "",
            "GITHUB_RUN_ID": "77001",
            "GITHUB_RUN_NUMBER": "12",
            "GITHUB_RUN_ATTEMPT": "1",
            "GITHUB_WORKFLOW": "cudaforge",
            "GITHUB_JOB": "forge",
            "GITHUB_WORKSPACE": str(folder),
            "RUNNER_TEMP": str(folder),
            **{name: str(file) for name, file in files.items()},
            **given,
        }

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def repository_json(self, name: str = "") -> dict[str, Any]:
        name = name or self.repository
        ours = name == self.repository
        return {
            "id": 1 if ours else 2,
            "name": name.partition("/")[2],
            "full_name": name,
            "owner": _user(name.partition("/")[0]),
            "private": self.private,
            "fork": not ours,
            "html_url": f"{self.url}/{name}",
            "url": f"{self.api_url}/repos/{name}",
            "clone_url": f"{self.url}/{name}.git",
            "default_branch": self.default_branch,
        }

    def pull_json(self, pull: Pull) -> dict[str, Any]:
        at = f"{self.api_url}/repos/{self.repository}"
        return {
            "id": 5000 + pull.number,
            "number": pull.number,
            "url": f"{at}/pulls/{pull.number}",
            "html_url": f"{self.url}/{self.repository}/pull/{pull.number}",
            "issue_url": f"{at}/issues/{pull.number}",
            "comments_url": f"{at}/issues/{pull.number}/comments",
            "state": pull.state,
            "locked": False,
            "title": pull.title,
            "body": pull.body or None,
            "draft": pull.draft,
            "merged": pull.merged,
            "merged_at": "2026-01-01T00:00:00Z" if pull.merged else None,
            "user": _user(pull.author),
            "labels": [{"name": name} for name in pull.labels],
            "assignees": [_user(login) for login in pull.assignees],
            "requested_reviewers": [_user(login) for login in pull.reviewers],
            "requested_teams": [{"slug": slug, "name": slug} for slug in pull.team_reviewers],
            "head": self._end(pull.head, pull.head_sha, pull.head_repository),
            "base": self._end(pull.base, self.branches.get(pull.base, ""), self.repository),
        }

    def _end(self, ref: str, sha: str, repository: str) -> dict[str, Any]:
        owner = repository.partition("/")[0]
        repo = self.repository_json(repository)
        return {"ref": ref, "sha": sha, "label": f"{owner}:{ref}", "user": _user(owner), "repo": repo}

    def comment_json(self, comment: Comment) -> dict[str, Any]:
        page = f"{self.url}/{self.repository}/pull/{comment.number}"
        return {
            "id": comment.id,
            "url": f"{self.api_url}/repos/{self.repository}/issues/comments/{comment.id}",
            "html_url": f"{page}#issuecomment-{comment.id}",
            "body": comment.body,
            "user": _user(comment.author),
        }

    # -- answering -----------------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Reply:
        with self.lock:
            fault = self._fault(request)
            if fault is not None and not fault.late:
                return fault.reply
            reply = self._ruled(request)
            return reply if fault is None else fault.reply

    def _fault(self, request: Request) -> Fault | None:
        for fault in self._faults:
            if fault.times and fault.method in (request.method, "*") and fault.path.search(request.path):
                fault.times -= 1
                return fault
        return None

    def _ruled(self, request: Request) -> Reply:
        try:
            grant = self._authenticated(request)
            self._sweep()
            for method, pattern, needed, act in _ROUTES:
                found = re.fullmatch(pattern.replace("REPO", re.escape(f"/repos/{self.repository}")), request.path)
                if found and method == request.method:
                    self._authorized(request, grant, needed)
                    return act(self, request, grant or Grant("", {}), *(unquote(part) for part in found.groups()))
        except _Refusal as refusal:
            return refusal.reply
        return message(404, "Not Found")

    def _authenticated(self, request: Request) -> Grant | None:
        if not request.headers.get("user-agent"):
            raise _Refusal(message(403, "Request forbidden by administrative rules."))
        if request.headers.get("x-github-api-version", "2022-11-28") != "2022-11-28":
            raise _Refusal(message(400, "The API version is not supported."))
        header = request.headers.get("authorization", "")
        if not header:
            return None
        kind, _, token = header.partition(" ")
        if kind.lower() not in ("bearer", "token") or token not in self.tokens:
            raise _Refusal(message(401, "Bad credentials"))
        return self.tokens[token]

    def _authorized(self, request: Request, grant: Grant | None, needed: str) -> None:
        writes = request.method != "GET"
        if grant is None:
            if writes:
                raise _Refusal(message(401, "Requires authentication"))
            if self.private:
                raise _Refusal(message(404, "Not Found"))
            return
        held = [grant.permissions.get(name, "") for name in needed.split("|")]
        if needed and (writes or self.private) and not any(have == "write" or (have and not writes) for have in held):
            raise _Refusal(message(403, NOT_ACCESSIBLE, x_accepted_github_permissions=needed.replace("|", "; ")))

    def _sweep(self) -> None:
        """Pull requests follow their branch, and close when it is gone."""
        tips = self.branches
        for pull in self.pulls.values():
            if pull.state == "open" and pull.head_repository == self.repository:
                pull.head_sha = tips.get(pull.head, pull.head_sha)
                pull.state = "open" if pull.head in tips else "closed"

    def pull(self, number: str) -> Pull:
        if int(number) not in self.pulls:
            raise _Refusal(message(404, "Not Found"))
        return self.pulls[int(number)]

    def new_id(self) -> int:
        return next(self._ids)

    def new_number(self) -> int:
        return max(self.pulls, default=0) + 1


@contextmanager
def _index(bare: Path, parent: str) -> Iterator[None]:
    git(bare, "read-tree", parent or "--empty")
    try:
        yield
    finally:
        (bare / "index").unlink(missing_ok=True)


def _user(login: str) -> dict[str, Any]:
    return {"login": login, "id": sum(map(ord, login)), "type": "Bot" if login.endswith("[bot]") else "User"}


# -- routes ------------------------------------------------------------------------------------------------------------


def _page(hub: FakeGitHub, request: Request, entries: list[Any]) -> Reply:
    size = min(100, int(request.query.get("per_page", "30")))
    page = int(request.query.get("page", "1"))
    last = max(1, -(-len(entries) // size))
    url = f"{hub.api_url}{request.path}?"
    named = {"next": page + 1, "last": last} if page < last else {}
    links = [f'<{url}{urlencode(request.query | {"page": str(at)})}>; rel="{rel}"' for rel, at in named.items()]
    headers = {"Link": ", ".join(links)} if links else {}
    return Reply(200, entries[(page - 1) * size : page * size], headers)


def _repository(hub: FakeGitHub, request: Request, grant: Grant) -> Reply:
    pushes = grant.permissions.get("contents") == "write"
    held = {"admin": False, "maintain": False, "push": pushes, "triage": pushes, "pull": True}
    return Reply(200, {**hub.repository_json(), "permissions": held})


def _list_pulls(hub: FakeGitHub, request: Request, grant: Grant) -> Reply:
    state, head, base = (request.query.get(key, "") for key in ("state", "head", "base"))
    found = [
        hub.pull_json(pull)
        for pull in sorted(hub.pulls.values(), key=lambda pull: -pull.number)
        if (state or "open") in (pull.state, "all")
        # Without an owner the real one ignores the filter.
        and (":" not in head or head == f"{pull.head_repository.partition('/')[0]}:{pull.head}")
        and (not base or base == pull.base)
    ]
    return _page(hub, request, found)


def _create_pull(hub: FakeGitHub, request: Request, grant: Grant) -> Reply:
    body = request.body
    owner, _, branch = ("", "", body["head"]) if ":" not in body["head"] else body["head"].partition(":")
    tips = hub.branches
    if grant.login == BOT and not hub.allow_pull_requests:
        return message(403, NOT_PERMITTED)
    if body["base"] not in tips:
        return invalid("PullRequest", "base")
    if branch not in tips or owner not in ("", hub.owner) or hub.lag:
        hub.lag = max(0, hub.lag - 1)
        return invalid("PullRequest", "head")
    ours = [pull for pull in hub.open_pulls if pull.head_repository == hub.repository]
    if any((pull.head, pull.base) == (branch, body["base"]) for pull in ours):
        text = f"A pull request already exists for {hub.owner}:{branch}."
        return invalid("PullRequest", "", "custom", text)
    if not git(hub.bare, "rev-list", f"{tips[body['base']]}..{tips[branch]}"):
        return invalid("PullRequest", "", "custom", f"No commits between {body['base']} and {branch}")
    _check_length(body.get("body"))
    pull = Pull(hub.new_number(), body["title"], branch, body["base"], body.get("body") or "")
    pull.draft, pull.author = bool(body.get("draft")), grant.login
    pull.head_repository, pull.head_sha = hub.repository, tips[branch]
    hub.pulls[pull.number] = pull
    return Reply(201, hub.pull_json(pull))


def _check_length(text: str | None, resource: str = "PullRequest") -> None:
    if text and len(text) > MAX_BODY:
        raise _Refusal(invalid(resource, "body", "custom", f"body is too long (maximum is {MAX_BODY} characters)"))


def _get_pull(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    return Reply(200, hub.pull_json(hub.pull(number)))


def _update_pull(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    pull, body = hub.pull(number), request.body
    _check_length(body.get("body"))
    if "base" in body and body["base"] not in hub.branches:
        return invalid("PullRequest", "base")
    if body.get("state") == "open" and pull.head not in hub.branches:
        return invalid("PullRequest", "state", "custom", "state cannot be changed. The branch has been deleted.")
    for key in ("title", "body", "state", "base"):
        setattr(pull, key, body.get(key, getattr(pull, key)))
    return Reply(200, hub.pull_json(pull))


def _ask_reviewers(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    pull, people, teams = hub.pull(number), request.body.get("reviewers", []), request.body.get("team_reviewers", [])
    if pull.author in people:
        return message(422, "Review cannot be requested from pull request author.")
    if not set(people) <= hub.collaborators or not set(teams) <= hub.teams:
        text = "Reviews may only be requested from collaborators. One or more of the users or teams you specified is "
        return message(422, f"{text}not a collaborator of the {hub.repository} repository.")
    pull.reviewers += [login for login in people if login not in pull.reviewers]
    pull.team_reviewers += [slug for slug in teams if slug not in pull.team_reviewers]
    return Reply(201, hub.pull_json(pull))


def _list_reviews(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    found = [
        {"id": at, "user": _user(login), "state": "COMMENTED"} for at, login in enumerate(hub.pull(number).reviews)
    ]
    return _page(hub, request, found)


def _get_issue(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    whole = hub.pull_json(hub.pull(number))
    kept = {key: whole[key] for key in ("id", "number", "title", "body", "state", "user", "labels", "assignees")}
    return Reply(200, {**kept, "html_url": whole["html_url"], "pull_request": {"url": whole["url"]}})


def _add_labels(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    pull = hub.pull(number)
    pull.labels += [name for name in request.body["labels"] if name not in pull.labels]
    return Reply(200, [{"name": name} for name in pull.labels])


def _list_labels(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    return _page(hub, request, [{"name": name} for name in hub.pull(number).labels])


def _remove_label(hub: FakeGitHub, request: Request, grant: Grant, number: str, name: str) -> Reply:
    pull = hub.pull(number)
    if name not in pull.labels:
        return message(404, "Label does not exist")
    pull.labels.remove(name)
    return Reply(200, [{"name": name} for name in pull.labels])


def _assign(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    pull = hub.pull(number)
    # Who cannot be assigned is left out without a word.
    wanted = [login for login in request.body["assignees"] if login in hub.collaborators]
    pull.assignees += [login for login in wanted if login not in pull.assignees]
    return Reply(201, _get_issue(hub, request, grant, number).body)


def _list_comments(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    number_ = hub.pull(number).number
    found = [hub.comment_json(one) for one in hub.comments.values() if one.number == number_]
    return _page(hub, request, found)


def _create_comment(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    _check_length(request.body["body"], "IssueComment")
    comment = hub.say(hub.pull(number).number, request.body["body"], grant.login)
    return Reply(201, hub.comment_json(comment))


def _comment(hub: FakeGitHub, request: Request, grant: Grant, number: str) -> Reply:
    comment = hub.comments.get(int(number))
    if comment is None:
        return message(404, "Not Found")
    if request.method == "PATCH":
        _check_length(request.body["body"], "IssueComment")
        comment.body = request.body["body"]
    if request.method == "DELETE":
        del hub.comments[comment.id]
        return Reply(204)
    return Reply(200, hub.comment_json(comment))


def _create_status(hub: FakeGitHub, request: Request, grant: Grant, sha: str) -> Reply:
    body = request.body
    if not _SHA.fullmatch(sha) or not has_commit(hub.bare, sha):
        return message(422, f"No commit found for SHA: {sha}")
    if body.get("state") not in ("error", "failure", "pending", "success"):
        return invalid("Status", "state", "invalid")
    if len(body.get("description") or "") > 140:
        return invalid("Status", "description", "custom", "description is too long (maximum is 140 characters)")
    given = [body.get(key) or "" for key in ("description", "target_url")]
    status = Status(hub.new_id(), sha, body["state"], body.get("context") or "default", *given, grant.login)
    hub.statuses.append(status)
    return Reply(201, _status_json(status))


def _status_json(status: Status) -> dict[str, Any]:
    kept = {key: getattr(status, key) for key in ("id", "state", "context", "description", "target_url")}
    return {**{key: value or None for key, value in kept.items()}, "creator": _user(status.creator)}


def _list_statuses(hub: FakeGitHub, request: Request, grant: Grant, ref: str) -> Reply:
    sha = hub.branches.get(ref, ref)
    return _page(hub, request, [_status_json(one) for one in reversed(hub.statuses) if one.sha == sha])


def _combined_status(hub: FakeGitHub, request: Request, grant: Grant, ref: str) -> Reply:
    sha = hub.branches.get(ref, ref)
    latest = {one.context: one for one in hub.statuses if one.sha == sha}
    states = {one.state for one in latest.values()}
    state = "failure" if states & {"failure", "error"} else "success" if states == {"success"} else "pending"
    listed = [_status_json(one) for one in latest.values()]
    return Reply(200, {"state": state, "sha": sha, "total_count": len(listed), "statuses": listed})


def _commit_pulls(hub: FakeGitHub, request: Request, grant: Grant, sha: str) -> Reply:
    return _page(hub, request, [hub.pull_json(pull) for pull in hub.pulls.values() if pull.head_sha == sha])


def _get_ref(hub: FakeGitHub, request: Request, grant: Grant, name: str) -> Reply:
    sha = refs(hub.bare).get(f"refs/{name}")
    if sha is None:
        return message(404, "Not Found")
    return Reply(200, {"ref": f"refs/{name}", "object": {"sha": sha, "type": "commit"}})


def _get_branch(hub: FakeGitHub, request: Request, grant: Grant, name: str) -> Reply:
    sha = hub.branches.get(name)
    return Reply(200, {"name": name, "commit": {"sha": sha}, "protected": False}) if sha else message(404, "Not Found")


def _delete_ref(hub: FakeGitHub, request: Request, grant: Grant, name: str) -> Reply:
    if f"refs/{name}" not in refs(hub.bare):
        return message(422, "Reference does not exist")
    git(hub.bare, "update-ref", "-d", f"refs/{name}")
    hub._sweep()
    return Reply(204)


def _whoever(hub: FakeGitHub, request: Request, grant: Grant) -> Reply:
    return message(403, NOT_ACCESSIBLE) if grant.login == BOT else Reply(200, _user(grant.login))


_Act = Callable[..., Reply]
_TALK = "issues|pull_requests"
_ROUTES: list[tuple[str, str, str, _Act]] = [
    ("GET", "REPO", "", _repository),
    ("GET", "REPO/pulls", "pull_requests", _list_pulls),
    ("POST", "REPO/pulls", "pull_requests", _create_pull),
    ("GET", r"REPO/pulls/(\d+)", "pull_requests", _get_pull),
    ("PATCH", r"REPO/pulls/(\d+)", "pull_requests", _update_pull),
    ("GET", r"REPO/pulls/(\d+)/reviews", "pull_requests", _list_reviews),
    ("POST", r"REPO/pulls/(\d+)/requested_reviewers", "pull_requests", _ask_reviewers),
    ("GET", r"REPO/issues/(\d+)", _TALK, _get_issue),
    ("GET", r"REPO/issues/(\d+)/labels", _TALK, _list_labels),
    ("POST", r"REPO/issues/(\d+)/labels", _TALK, _add_labels),
    ("DELETE", r"REPO/issues/(\d+)/labels/([^/]+)", _TALK, _remove_label),
    ("POST", r"REPO/issues/(\d+)/assignees", _TALK, _assign),
    ("GET", r"REPO/issues/(\d+)/comments", _TALK, _list_comments),
    ("POST", r"REPO/issues/(\d+)/comments", _TALK, _create_comment),
    ("GET", r"REPO/issues/comments/(\d+)", _TALK, _comment),
    ("PATCH", r"REPO/issues/comments/(\d+)", _TALK, _comment),
    ("DELETE", r"REPO/issues/comments/(\d+)", _TALK, _comment),
    ("POST", r"REPO/statuses/([^/]+)", "statuses", _create_status),
    ("GET", r"REPO/commits/(.+)/statuses", "statuses", _list_statuses),
    ("GET", r"REPO/commits/(.+)/status", "statuses", _combined_status),
    ("GET", r"REPO/commits/([^/]+)/pulls", "pull_requests", _commit_pulls),
    ("GET", r"REPO/git/ref/(.+)", "contents", _get_ref),
    ("GET", r"REPO/branches/(.+)", "contents", _get_branch),
    ("DELETE", r"REPO/git/refs/(.+)", "contents", _delete_ref),
    ("GET", "/user", "", _whoever),
]


# -- HTTP --------------------------------------------------------------------------------------------------------------


def _serve_git(hub: FakeGitHub, request: Request, raw: bytes, query: str) -> Reply:
    """git's own program, behind GitHub's rules: Basic with a token as the password, contents: write to push."""
    token = basic_password(request.headers.get("authorization", ""))
    pushing = "git-receive-pack" in (request.path.rpartition("/")[2], request.query.get("service", ""))
    challenge = {"WWW-Authenticate": 'Basic realm="GitHub"', "Content-Type": "text/plain"}
    if token not in hub.tokens and (token or pushing or hub.private or "authorization" in request.headers):
        return Reply(401, b"Invalid username or token.", challenge)
    held = hub.tokens[token].permissions.get("contents", "") if token else ""
    if pushing and held != "write":
        return Reply(403, b"Write access to repository not granted.", {"Content-Type": "text/plain"})
    name, _, rest = request.path[1:].replace(".git/", "/", 1).partition(hub.repository)
    if name:
        return Reply(404, b"Repository not found.", {"Content-Type": "text/plain"})
    before = refs(hub.bare) if pushing else {}
    path = f"/{hub.repository}.git{rest}"
    done = http_backend(
        hub.root, request.method, path, query, request.headers, raw, hub.tokens[token].login if token else ""
    )
    if pushing and refs(hub.bare) != before:
        hub.pushes += 1
    return Reply(done.status, done.body, dict(done.headers))


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body would otherwise wait 40 ms for each other.
    disable_nagle_algorithm = True
    hub: FakeGitHub

    def _serve(self) -> None:
        raw = self._body()
        parts = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, parts.path, dict(parse_qsl(parts.query)), headers, None)
        hub = self.hub
        if re.search(r"/(info/refs|git-upload-pack|git-receive-pack)$", parts.path):
            hub.git_requests.append(request)
            with hub.lock:
                reply = _serve_git(hub, request, raw, parts.query)
        elif not parts.path.startswith(hub.prefix):
            reply = message(404, "Not Found")
        else:
            request.path = parts.path[len(hub.prefix) :]
            request.body = json.loads(raw) if raw else None
            hub.requests.append(request)
            reply = hub.answer(request)
            _record(request, reply)
        request.status = reply.status
        self._reply(reply)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _serve

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().strip(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _reply(self, reply: Reply) -> None:
        if reply.status == 0:
            self.close_connection = True
            return
        body = reply.body
        data = (
            body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        )
        data = b"" if body is None else data
        self.send_response(reply.status)
        given = {name.lower(): value for name, value in reply.headers.items()}
        usual = {"content-type": "application/json; charset=utf-8", "x-ratelimit-remaining": "999"}
        for name, value in {**usual, **given, "content-length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Tests read the log of requests, not stderr."""


def _record(request: Request, reply: Reply) -> None:
    """For tests/openapi, which holds requests and answers against GitHub's own description."""
    file = os.environ.get("FAKE_GITHUB_RECORD")
    if file:
        kept = {"method": request.method, "path": request.path, "query": request.query, "body": request.body}
        line = json.dumps({**kept, "status": reply.status, "answer": reply.body}, default=str) + "\n"
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(line)


def _encoded(body: Any) -> bytes:
    if body is None or isinstance(body, bytes):
        return body or b""
    return (body if isinstance(body, str) else json.dumps(body)).encode()


@contextmanager
def serving(connection: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """An address at which ``connection`` answers until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), connection)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def fake_github(
    folder: Path,
    *,
    repository: str = "octo/kernels",
    enterprise: bool = False,
    private: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Iterator[FakeGitHub]:
    """A GitHub whose repositories lie below ``folder``; an Enterprise server has its API at ``/api/v3``."""
    hub = FakeGitHub(folder / "hub", repository, "/api/v3" if enterprise else "", private)
    with serving(type("Connection", (_Connection,), {"hub": hub}), tls) as hub.url:
        yield hub
