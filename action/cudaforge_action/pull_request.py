"""The pull request of a branch: made, changed or closed, and asked about first, so that nothing is written in vain.

Endpoints: https://docs.github.com/rest/pulls/pulls, https://docs.github.com/rest/issues/labels,
https://docs.github.com/rest/issues/assignees, https://docs.github.com/rest/pulls/review-requests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from cudaforge_action.api import ApiError, GitHub

__all__ = ["MAX_BODY", "Opened", "Operation", "Wanted", "close", "compare_url", "marked", "open_pull", "opened"]

#: GitHub's limit is 65 536; the rest is room for what people add.
MAX_BODY = 60_000
Operation = Literal["created", "updated", "closed", "none", "pushed"]
_MARK = re.compile(r"<!-- cudaforge body=([0-9a-f]{16}) -->")
#: What GitHub says where an organisation or repository lets no workflow open pull requests:
#: https://docs.github.com/repositories/managing-your-repositorys-settings-and-features/enabling-features-for-your-repository/managing-github-actions-settings-for-a-repository
_NOT_PERMITTED = (
    "tick Settings > Actions > General > Allow GitHub Actions to create and approve pull requests, give the job "
    "`permissions: pull-requests: write`, or use the token of a GitHub App"
)


@dataclass(frozen=True)
class Wanted:
    """What the pull request is to be. ``draft`` counts when it is opened; later that is for people to change."""

    branch: str
    base: str
    title: str
    body: str
    labels: tuple[str, ...] = ()
    reviewers: tuple[str, ...] = ()
    team_reviewers: tuple[str, ...] = ()
    assignees: tuple[str, ...] = ()
    draft: bool = False


@dataclass(frozen=True)
class Opened:
    """What became of it. ``warnings``: what could not be done, each with what to do."""

    operation: Operation
    number: int | None = None
    url: str = ""
    warnings: tuple[str, ...] = ()


def marked(body: str) -> str:
    """``body`` with a mark by which it is known again: what people change in it stays until the kernels change."""
    return f"{body.rstrip()}\n\n<!-- cudaforge body={_digest(body)} -->\n"


def _digest(body: str) -> str:
    return hashlib.sha256(body.strip().encode("utf-8", "replace")).hexdigest()[:16]


def compare_url(server_url: str, repository: str, base: str, branch: str) -> str:
    """The page on which a person opens the pull request with one click."""
    return f"{server_url}/{repository}/compare/{quote(base)}...{quote(branch)}?expand=1"


# -- asking ------------------------------------------------------------------------------------------------------------


def open_pull(api: GitHub, branch: str, base: str = "") -> Mapping[str, Any] | None:
    """The open pull request of ``branch`` (of this repository, not of a fork's branch of that name); of several the one
    into ``base``."""
    found = sorted(_pulls(api, branch, "open"), key=lambda pull: (_at(pull, "base", "ref") != base, pull["number"]))
    return found[0] if found else None


def _pulls(api: GitHub, branch: str, state: str) -> list[Mapping[str, Any]]:
    # A head filter with an unknown owner is ignored by GitHub, so that the answer is looked at.
    listed = api.paginate("pulls", state=state, head=f"{api.owner}:{branch}")
    own = api.repository.lower()
    return [
        pull
        for pull in listed
        if _at(pull, "head", "ref") == branch and str(_at(pull, "head", "repo", "full_name")).lower() == own
    ]


def _declined(api: GitHub, branch: str, head_sha: str) -> Mapping[str, Any] | None:
    """A pull request of exactly this commit that was closed without being merged."""
    closed = _pulls(api, branch, "closed")
    return next((one for one in closed if not one.get("merged_at") and _at(one, "head", "sha") == head_sha), None)


# -- making it so ------------------------------------------------------------------------------------------------------


def opened(api: GitHub, wanted: Wanted, head_sha: str, *, pushed: bool) -> Opened:
    """See that there is one open pull request as ``wanted``. ``pushed``: was ``head_sha`` pushed just now?

    Where it may not be opened the answer is "pushed", with a warning. Raises :class:`ApiError` where the API fails
    otherwise: the branch is there, and the next run opens it.
    """
    pull = open_pull(api, wanted.branch, wanted.base)
    if pull is None and not pushed and (declined := _declined(api, wanted.branch, head_sha)) is not None:
        number = declined["number"]
        text = f"pull request {number} with these kernels was closed by somebody; it is not opened again"
        return Opened("none", warnings=(f"{text}. To do: reopen it, or delete the branch {wanted.branch}",))
    if pull is not None:
        return _updated(api, pull, wanted, pushed)
    try:
        made, warnings = _created(api, wanted)
    except ApiError as error:
        # Another run may have been faster, or the answer was lost.
        pull = open_pull(api, wanted.branch, wanted.base) if error.unsure or "already exists" in error.reason else None
        if pull is not None:
            return _updated(api, pull, wanted, pushed)
        if not _forbidden(error):
            raise
        return Opened(
            "pushed", None, "", (f"no pull request could be opened: {error.reason}. To do: {_NOT_PERMITTED}",)
        )
    return Opened(
        "created", made["number"], str(made.get("html_url", "")), (*warnings, *_attributes(api, made, wanted))
    )


def _forbidden(error: ApiError) -> bool:
    # A limit that was not lifted in time is answered 403 as well.
    return error.status in (403, 404) and "limit" not in error.reason.lower()


def _created(api: GitHub, wanted: Wanted) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    body = {"title": wanted.title, "head": wanted.branch, "base": wanted.base, "body": marked(wanted.body)}
    try:
        return api.post("pulls", {**body, "draft": wanted.draft}, once=True, lag=True), ()
    except ApiError as error:
        # Not every plan has drafts: https://docs.github.com/rest/pulls/pulls#create-a-pull-request.
        if not wanted.draft or error.status != 422 or "draft" not in error.reason.lower():
            raise
        warning = f"the pull request is no draft: {error.reason}"
    return api.post("pulls", {**body, "draft": False}, once=True, lag=True), (warning,)


def _updated(api: GitHub, pull: Mapping[str, Any], wanted: Wanted, pushed: bool) -> Opened:
    number, url = pull["number"], str(pull.get("html_url", ""))
    changes = {}
    if pull.get("title") != wanted.title:
        changes["title"] = wanted.title
    if _at(pull, "base", "ref") != wanted.base:
        changes["base"] = wanted.base
    mark = _MARK.search(str(pull.get("body") or ""))
    if mark is None or mark.group(1) != _digest(wanted.body):
        changes["body"] = marked(wanted.body)
    warnings: list[str] = []
    if changes:
        try:
            api.patch(f"pulls/{number}", changes)
        except ApiError as error:
            if error.status not in (403, 404, 422):
                raise
            warnings.append(f"pull request {number} could not be updated: {error.reason}")
    writes = _Writes(api)
    warnings += _attributes(api, pull, wanted, writes)
    return Opened("updated" if changes or pushed or writes.count else "none", number, url, tuple(warnings))


# -- labels and people -------------------------------------------------------------------------------------------------


class _Writes:
    """How many posts got through."""

    def __init__(self, api: GitHub) -> None:
        self.api = api
        self.count = 0

    def post(self, path: str, body: Mapping[str, Any], what: str) -> str:
        """Why it failed, "" where it did not. None of these is worth a failed job."""
        try:
            self.api.post(path, body)
        except ApiError as error:
            return f"{what} could not be set: {error.reason}"
        self.count += 1
        return ""


def _attributes(api: GitHub, pull: Mapping[str, Any], wanted: Wanted, writes: _Writes | None = None) -> list[str]:
    """Add what is missing; what people added, or took part in, stays. The warnings."""
    number, writes = pull["number"], writes or _Writes(api)
    warnings = []
    if labels := _missing(wanted.labels, _names(pull.get("labels"), "name")):
        warnings.append(writes.post(f"issues/{number}/labels", {"labels": labels}, "labels"))
    if assignees := _missing(wanted.assignees, _names(pull.get("assignees"), "login")):
        warnings.append(writes.post(f"issues/{number}/assignees", {"assignees": assignees}, "assignees"))
    if asked := _reviewers(api, pull, wanted):
        warnings.append(writes.post(f"pulls/{number}/requested_reviewers", asked, "reviewers"))
    return [text for text in warnings if text]


def _reviewers(api: GitHub, pull: Mapping[str, Any], wanted: Wanted) -> dict[str, list[str]]:
    """Who is still to be asked. Whoever has answered is no requested reviewer any more, and is not asked every night;
    nobody reviews what they opened."""
    there = [*_names(pull.get("requested_reviewers"), "login"), str(_at(pull, "user", "login") or "")]
    people = _missing(wanted.reviewers, there)
    if people:
        people = _missing(
            people, [str(_at(one, "user", "login")) for one in api.paginate(f"pulls/{pull['number']}/reviews")]
        )
    # `org/team` and `team` are the same to a user; the API wants the latter.
    teams = [name.rpartition("/")[2] for name in wanted.team_reviewers]
    teams = _missing(teams, _names(pull.get("requested_teams"), "slug"))
    return {key: names for key, names in (("reviewers", people), ("team_reviewers", teams)) if names}


def _missing(wanted: Iterable[str], there: Iterable[str]) -> list[str]:
    known = {name.lower() for name in there}
    return [name for name in dict.fromkeys(wanted) if name.lower() not in known]


def _names(entries: object, key: str) -> list[str]:
    return [str(entry.get(key)) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


# -- its end -----------------------------------------------------------------------------------------------------------


def close(api: GitHub, pull: Mapping[str, Any], why: str) -> str:
    """Close it and say why. A warning where the saying failed. Raises :class:`ApiError` where it stays open."""
    api.patch(f"pulls/{pull['number']}", {"state": "closed"})
    try:
        api.post(f"issues/{pull['number']}/comments", {"body": why}, once=True)
    except ApiError as error:
        return f"pull request {pull['number']} was closed without a word: {error.reason}"
    return ""
