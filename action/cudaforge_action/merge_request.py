"""The one note on a GitLab merge request: made, changed, or left as it is. https://docs.gitlab.com/api/notes/.

A job's own token may not write notes: what is needed is a project or group access token with scope ``api`` and the role
Reporter, as a masked variable (https://docs.gitlab.com/user/project/settings/project_access_tokens/).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import quote

from cudaforge_action.records import Context
from cudaforge_action.rest import PATIENCE_S, Answer, ApiError, Client, Credential, seconds
from pytest_cudaforge.errors import UsageError

__all__ = ["MergeRequestNotes", "inert"]

MAX_BODY = 1_000_000
#: A line that begins with a slash is a command ("/merge"), from whomever its text came; "!7" is a cross-reference.
_ACTIVE = re.compile(r"^([ \t>*+-]*)(?=/[A-Za-z])|(?<![A-Za-z0-9])!(?=\d)", re.MULTILINE)
_INVISIBLE = "\u200b"


def inert(markdown: str) -> str:
    """``markdown`` without what GitLab alone would act on: quick actions and references to merge requests."""
    return _ACTIVE.sub(lambda found: f"{found.group(0)}{_INVISIBLE}", markdown)


class MergeRequestNotes:
    """The notes that the token's user wrote on one merge request.

    Raises :class:`~pytest_cudaforge.errors.UsageError` where ``context`` is no merge request's pipeline; its calls
    raise :class:`~cudaforge_action.rest.ApiError`.
    """

    def __init__(
        self,
        context: Context,
        token: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
        ends: float = math.inf,
    ) -> None:
        if context.number is None or not context.repository or not context.api_url:
            raise UsageError(
                "this pipeline is not one of a merge request, so that there is nothing to write a note on",
                expected="rules: - if: $CI_PIPELINE_SOURCE == 'merge_request_event'",
            )
        credential = Credential(token, "PRIVATE-TOKEN", "")
        self._client = Client(
            context.api_url, credential, {}, _limit_s, sleep=sleep, clock=clock, patience_s=patience_s, ends=ends
        )
        self._path = f"/projects/{quote(context.repository, safe='')}/merge_requests/{context.number}/notes"

    def put(self, marker: str, markdown: str) -> Literal["created", "updated", "unchanged"]:
        """See that the one note of ours that begins with ``marker`` says ``markdown`` (which has the marker in it)."""
        if marker not in markdown:
            raise ValueError("the note would not be found again: its marker is missing")
        body = inert(markdown)[:MAX_BODY]
        note = self._find(marker)
        if note is None:
            self._client.call("POST", self._path, body={"body": body}, once=True)
            return "created"
        # GitLab trims what it stores.
        if str(note.get("body", "")).strip() == body.strip():
            return "unchanged"
        self._client.call("PUT", f"{self._path}/{int(note['id'])}", body={"body": body})
        return "updated"

    def body(self, marker: str) -> str | None:
        """What that note says now, None where there is none."""
        note = self._find(marker)
        return str(note.get("body") or "") if note is not None else None

    def remove(self, marker: str) -> bool:
        """Delete that note; False where there is none."""
        note = self._find(marker)
        if note is not None:
            self._client.call("DELETE", f"{self._path}/{int(note['id'])}")
        return note is not None

    def _find(self, marker: str) -> Mapping[str, Any] | None:
        """Ours, for anybody can write the marker into a note, and nobody but its author may change one."""
        me = self._client.call("GET", "/user").body
        user = me.get("id") if isinstance(me, dict) else None
        params = {"per_page": 100, "sort": "asc", "order_by": "created_at"}
        for page in self._client.pages(self._path, params):
            if not isinstance(page, list):
                raise ApiError("GET", self._path, 200, "its page is no list")
            for note in page:
                own = not note.get("system") and note.get("author", {}).get("id") == user
                if own and marker in str(note.get("body", "")):
                    return dict(note)
        return None


def _limit_s(answer: Answer, attempt: int, now: float) -> float | None:
    """https://docs.gitlab.com/administration/settings/user_and_ip_rate_limits/#response-headers."""
    if answer.status != 429:
        return None
    after_s = seconds(answer.headers.get("retry-after", ""))
    if after_s is not None:
        return after_s
    reset = seconds(answer.headers.get("ratelimit-reset", ""))
    return max(0.0, reset - now) + 1.0 if reset is not None else 60.0 * float(2 ** (attempt - 1))
