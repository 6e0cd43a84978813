"""The one comment on a pull request that says how its kernels fare: made once, then changed, never piled up.

Its first line, which readers do not see, is how it is found again. Anybody can write that line, so what counts is also
who wrote it: a comment of somebody else stays theirs. Comments: https://docs.github.com/rest/issues/comments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from cudaforge_action.api import GitHub
from cudaforge_action.merge_request import MergeRequestNotes
from cudaforge_action.rest import ApiError

__all__ = ["Comments", "MergeRequestComments", "PullRequestComments", "Written", "keep_one", "marker"]

Operation = Literal["created", "updated", "unchanged", "none"]


@dataclass(frozen=True)
class Written:
    """What became of the comment. ``url``: its page, "" where there is none or nobody says."""

    operation: Operation
    url: str = ""


class Comments(Protocol):
    """Our comments on one pull or merge request. Every call raises :class:`~cudaforge_action.rest.ApiError`."""

    def text(self) -> str | None:
        """What ours says now, None where there is none."""

    def put(self, text: str) -> Written:
        """See that there is one of ours, and that it says ``text``."""


def marker(*names: str) -> str:
    """The comment's first line. ``names``: what tells this guard from others in the same repository."""
    key = hashlib.sha256("\0".join(names).encode()).hexdigest()[:16]
    return f"<!-- cudaforge-guard:{key} -->"


def keep_one(comments: Comments, text: str, *, news: bool) -> Written:
    """Write ``text`` where it says something else than what is there, but for its last line (which links to this very
    run). ``news``: whether it is worth a new comment; one that is there is kept true in any case. Raises ApiError."""
    known = comments.text()
    if known is None and not news:
        return Written("none")
    if known is not None and _lasting(known) == _lasting(text):
        return Written("unchanged")
    return comments.put(text)


def _lasting(text: str) -> list[str]:
    # Hosts trim what they keep, and some send other ends of lines.
    return [line.rstrip() for line in text.strip().splitlines()][:-1]


@dataclass
class MergeRequestComments:
    """On a GitLab merge request."""

    notes: MergeRequestNotes
    marker: str

    def text(self) -> str | None:
        return self.notes.body(self.marker)

    def put(self, text: str) -> Written:
        return Written(self.notes.put(self.marker, text))


@dataclass
class PullRequestComments:
    """On a GitHub pull request."""

    api: GitHub
    number: int
    marker: str
    _login: str = ""
    _own: list[Mapping[str, Any]] | None = field(default=None)

    def text(self) -> str | None:
        """Also removes what is one too many of ours: two runs may have begun one at the same moment."""
        own = self._found()
        for extra in own[1:]:
            self.api.delete(f"issues/comments/{int(extra['id'])}")
        self._own = own[:1]
        return str(own[0].get("body") or "") if own else None

    def put(self, text: str) -> Written:
        own = self._own if self._own is not None else self._found()
        if own:
            made = self.api.patch(f"issues/comments/{int(own[0]['id'])}", {"body": text})
            return Written("updated", _url(made))
        return Written("created", _url(self._created(text)))

    def _created(self, text: str) -> Any:
        try:
            return self.api.post(f"issues/{self.number}/comments", {"body": text}, once=True)
        except ApiError as error:
            # The answer was lost, perhaps not the comment.
            if not error.unsure:
                raise
            own = self._found()
            if not own:
                raise
            return own[0]

    def _found(self) -> list[Mapping[str, Any]]:
        """Ours, oldest first."""
        listed = self.api.paginate(f"issues/{self.number}/comments")
        return [one for one in listed if isinstance(one, dict) and self._is_ours(one)]

    def _is_ours(self, comment: Mapping[str, Any]) -> bool:
        if not str(comment.get("body") or "").startswith(self.marker):
            return False
        user = comment.get("user")
        author = user if isinstance(user, dict) else {}
        # A workflow's own token may not ask who it is; nobody but an app can write as a bot.
        return author.get("type") == "Bot" or (bool(author.get("login")) and author.get("login") == self._me())

    def _me(self) -> str:
        """Who the token belongs to; "" for one of an app."""
        if not self._login:
            try:
                known = self.api.get("/user")
            except ApiError as error:
                if error.status not in (401, 403, 404):
                    raise
                known = {}
            self._login = str(known.get("login") or "[bot]") if isinstance(known, dict) else "[bot]"
        return self._login


def _url(comment: object) -> str:
    url = comment.get("html_url") if isinstance(comment, dict) else ""
    return url if isinstance(url, str) and url.startswith(("https://", "http://")) and url.isprintable() else ""
