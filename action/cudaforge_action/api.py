"""GitHub's REST API: https://docs.github.com/rest. Enterprise servers differ in their address only.

How limits are waited for is https://docs.github.com/rest/using-the-rest-api/rate-limits-for-the-rest-api#exceeding-the-rate-limit:
``retry-after`` where it is given, else until ``x-ratelimit-reset`` where nothing remains, else a minute and then twice
as long each time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cudaforge_action.rest import PATIENCE_S, Answer, ApiError, Client, Credential, seconds
from pytest_cudaforge.errors import UsageError

__all__ = ["API_VERSION", "ApiError", "GitHub"]

API_VERSION = "2022-11-28"
PAGE = 100

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+")
_LIMITED = re.compile(r"rate limit|abuse detection", re.IGNORECASE)
#: A branch is pushed before the API knows of it: so long at most, in steps of 1, 2, 4, 8 s.
_LAG_ATTEMPTS = 5


class GitHub:
    """The API for one repository. Paths are below ``/repos/OWNER/NAME/``; with a leading slash, from the API's top.

    Every call raises :class:`~cudaforge_action.rest.ApiError` for an answer that is not 2xx, once waiting is of no use;
    all waiting of one object takes at most ``patience_s``, and after ``ends`` (of ``time.monotonic``) nothing is asked
    any more. Without a token only public things can be read.
    """

    def __init__(
        self,
        api_url: str,
        token: str,
        repository: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
        ends: float = math.inf,
    ) -> None:
        if not _REPOSITORY.fullmatch(repository) or repository.endswith(("/.", "/..")):
            raise UsageError(f"{repository!r} is no repository", expected="owner/name (GITHUB_REPOSITORY)")
        self.repository = repository
        headers = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": API_VERSION}
        self._client = Client(
            api_url, Credential(token), headers, _limit_s, sleep=sleep, clock=clock, patience_s=patience_s, ends=ends
        )

    @property
    def owner(self) -> str:
        return self.repository.partition("/")[0]

    def __repr__(self) -> str:
        return f"GitHub({self._client.api_url!r}, {self.repository!r})"

    def get(self, path: str, **params: str | int) -> Any:
        return self._client.call("GET", self._path(path), params=params).body

    def paginate(self, path: str, **params: str | int) -> Iterator[Any]:
        """The entries of a list, page by page (100 a page, at most 100 pages)."""
        for body in self._client.pages(self._path(path), {"per_page": PAGE, **params}):
            if not isinstance(body, list):
                raise ApiError("GET", path, 200, "its page is no list")
            yield from body

    def post(self, path: str, body: Mapping[str, Any], *, once: bool = False, lag: bool = False) -> Any:
        """``once``: for what must not be there twice (a comment); where the answer is lost it is not asked for again
        but raised as ``ApiError`` with ``unsure``, so that the caller can look. ``lag``: what it is about was pushed a
        moment ago, and a 422 that says so is waited for (never "already exists")."""
        pause = _lag_s if lag else None
        return self._client.call("POST", self._path(path), body=body, once=once, pause=pause).body

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._client.call("PATCH", self._path(path), body=body).body

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._client.call("PUT", self._path(path), body=body).body

    def delete(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        self._client.call("DELETE", self._path(path), body=body)

    def _path(self, path: str) -> str:
        # A part that came from an event or an artifact must not lead out of the repository.
        if any(part in (".", "..") for part in path.split("/")) or not path.isprintable() or set(path) & set("?#\\"):
            raise UsageError(f"{path!r} is no path of the API")
        return path if path.startswith("/") else f"/repos/{self.repository}/{path}".rstrip("/")


def _limit_s(answer: Answer, attempt: int, now: float) -> float | None:
    """Seconds until a limit may be over; None where the refusal is none of a limit."""
    if answer.status not in (403, 429):
        return None
    after_s: float | None = seconds(answer.headers.get("retry-after", ""))
    if after_s is not None:
        return after_s
    reset = seconds(answer.headers.get("x-ratelimit-reset", ""))
    if answer.headers.get("x-ratelimit-remaining") == "0" and reset is not None:
        # Its clock and ours differ a little.
        return max(0.0, reset - now) + 1.0
    if answer.status == 429 or _LIMITED.search(answer.reason):
        return 60.0 * float(2 ** (attempt - 1))
    return None


def _lag_s(answer: Answer, attempt: int, now: float) -> float | None:
    if answer.status != 422 or attempt >= _LAG_ATTEMPTS:
        return None
    # An answer that names what is wrong for good will be the same in a second.
    final = re.search(r"already exists|no commits between|too long", answer.reason, re.IGNORECASE)
    return None if final else float(2 ** (attempt - 1))
