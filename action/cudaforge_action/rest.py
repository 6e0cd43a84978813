"""JSON over HTTP with a token, as GitHub and GitLab want it: patient with limits, and silent about the token.

On `requests`, for proxies and trusted certificates from the environment (``HTTPS_PROXY``, ``NO_PROXY``,
``REQUESTS_CA_BUNDLE``, ``SSL_CERT_FILE``).
The token is in one header of requests to one origin: in no URL, no message, no record, no exception (whose ``request``
would hold it: none of `requests`' is chained to ours), and no redirect carries it to another host.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from pytest_cudaforge.errors import SituationError, UsageError
from pytest_cudaforge.report.escaping import one_line, plain

__all__ = ["Answer", "ApiError", "Client", "Credential"]

TIMEOUT_S = (15.0, 60.0)
MAX_ATTEMPTS = 6
MAX_PAGES = 100
#: Of all waiting of one client: a job on a hosted runner is paid by the minute.
PATIENCE_S = 600.0
_MAX_REDIRECTS = 5
_MAX_REASON = 600
_REDIRECTS = frozenset({301, 302, 307, 308})


class ApiError(SituationError):
    """A call that the service refused or did not answer.

    ``status``: the answer's, 0 where there was none. ``unsure``: what was asked for may have happened all the same.
    """

    def __init__(
        self, method: str, path: str, status: int, reason: str, *, remedy: str = "", unsure: bool = False
    ) -> None:
        self.method, self.path, self.status, self.reason, self.unsure = method, path, status, reason, unsure
        answered = f"answered {status}: {reason}" if status else f"did not answer: {reason}"
        super().__init__(f"{method} {path} {answered}", remedy=remedy)


class Credential(requests.auth.AuthBase):
    """A token as a header. Given as ``auth``, so that no ``~/.netrc`` of the runner takes its place."""

    __slots__ = ("_header", "_prefix", "_token")

    def __init__(self, token: str, header: str = "Authorization", prefix: str = "Bearer ") -> None:
        # What is no header is refused by the libraries below with the value in the message.
        if token and not (token.isascii() and token.isprintable() and " " not in token):
            raise UsageError("the token is not one", expected="one line of visible ASCII characters, without spaces")
        self._token, self._header, self._prefix = token, header, prefix

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._token:
            request.headers[self._header] = self._prefix + self._token
        return request

    def hide(self, text: str) -> str:
        return text.replace(self._token, "[token]") if self._token else text

    def __repr__(self) -> str:
        return "[token]"

    def __reduce__(self) -> str:
        raise TypeError("a token is not copied or stored")


@dataclass(frozen=True)
class Answer:
    """``body`` is the JSON value, None for an empty one; ``headers``' names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: Any
    text: str = ""

    @property
    def reason(self) -> str:
        """What the service says went wrong, its text being a stranger's."""
        body = self.body if isinstance(self.body, dict) else {}
        said = [str(body.get("message") or body.get("error") or self.text or "no reason given")]
        errors = body.get("errors")
        for error in errors if isinstance(errors, list) else [errors] if errors else []:
            said.append(_told(error) if isinstance(error, dict) else str(error))
        return one_line(plain("; ".join(said)), _MAX_REASON)


def _told(error: Mapping[str, Any]) -> str:
    if error.get("message"):
        return str(error["message"])
    return " ".join(str(error[key]) for key in ("resource", "field", "code") if error.get(key))


@dataclass(frozen=True)
class _Silence:
    """No answer. ``unsure``: the request may have reached the service. ``final``: the next one would fail as well."""

    reason: str
    unsure: bool = False
    final: bool = False


#: How long to wait before asking again, given an answer, the number of attempts so far and the time; None: do not.
Pause = Callable[[Answer, int, float], "float | None"]


class Client:
    """One API at one address. ``pause``: the service's own rules of asking again. ``ends``: the moment of
    ``time.monotonic`` after which nothing is asked or waited for any more. ``sleep``/``clock``: of tests."""

    def __init__(
        self,
        api_url: str,
        credential: Credential,
        headers: Mapping[str, str],
        pause: Pause,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.time,
        patience_s: float = PATIENCE_S,
        ends: float = math.inf,
    ) -> None:
        parts = urlsplit(api_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise UsageError(
                f"the API's address is wrong: {credential.hide(api_url)!r}", expected="such as https://api.github.com"
            )
        self.api_url = api_url.rstrip("/")
        self._origin = _origin(api_url)
        self._credential = credential
        self._headers = {"User-Agent": "pytest-cudaforge", **headers}
        self._pause, self._sleep, self._clock = pause, sleep, clock
        self._patience_s, self._ends = patience_s, ends
        self._session = requests.Session()
        # As Python's own clients and curl know it; the two variables of `requests` go before.
        self._session.verify = os.environ.get("SSL_CERT_FILE") or True

    def __repr__(self) -> str:
        return f"Client({self.api_url!r})"

    def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: object = None,
        once: bool = False,
        pause: Pause | None = None,
    ) -> Answer:
        """The answer to ``method path``; ``path`` begins with a slash, below the API's address.

        A refusal by a limit is waited for, an answer 5xx and a lost connection are tried again, all within the client's
        patience and before its end. ``once``: what must not be there twice is not asked for again where it may have
        happened already. ``pause``: further reasons of this call to ask again. Raises :class:`ApiError` for whatever is
        not 2xx.
        """
        attempt = 0
        while True:
            attempt += 1
            answer = self._send(method, self.api_url + path, params, body)
            if isinstance(answer, Answer) and 200 <= answer.status < 300:
                return answer
            unsure = method != "GET" and (answer.unsure if isinstance(answer, _Silence) else answer.status >= 500)
            wait_s = None if once and unsure else self._wait_s(answer, attempt, pause)
            if wait_s is None or attempt >= MAX_ATTEMPTS or wait_s > self._left_s():
                self._refuse(method, path, answer, unsure, wait_s)
            self._patience_s -= wait_s
            self._sleep(wait_s)

    def pages(self, path: str, params: Mapping[str, Any]) -> Iterator[Any]:
        """The bodies of a list's pages, by their ``Link`` headers, at most :data:`MAX_PAGES`."""
        answer = self.call("GET", path, params=params)
        for _ in range(MAX_PAGES):
            yield answer.body
            following = _next_link(answer.headers.get("link", ""))
            if not following:
                return
            # The service's own word, yet the token goes with it: never to another origin, or out of the API.
            url = urljoin(self.api_url + "/", following)
            if _origin(url) != self._origin or not url.startswith(self.api_url + "/"):
                raise ApiError("GET", path, answer.status, f"the next page lies at {_shown(url)}")
            answer = self.call("GET", url[len(self.api_url) :])

    def _left_s(self) -> float:
        """What may still be waited."""
        return min(self._patience_s, self._ends - time.monotonic())

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def _send(self, method: str, url: str, params: Mapping[str, Any] | None, body: object) -> Answer | _Silence:
        """Redirects are followed by hand, verbatim as GitHub asks, and within the origin alone."""
        status = 0
        for _ in range(_MAX_REDIRECTS + 1):
            answer = self._exchange(method, url, params, body)
            if isinstance(answer, _Silence) or answer.status not in _REDIRECTS:
                return answer
            status, url, params = answer.status, urljoin(url, answer.headers.get("location", "")), None
            if _origin(url) != self._origin:
                return Answer(status, {}, None, f"it redirects to {_shown(url)}, where the token is not taken")
        return Answer(status, {}, None, "too many redirects")

    def _exchange(self, method: str, url: str, params: Mapping[str, Any] | None, body: object) -> Answer | _Silence:
        left_s = self._ends - time.monotonic()
        if left_s <= 0.0:
            return _Silence("there is no time left to ask", final=True)
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if data is not None else {})
        # Failures are values: raised in a handler ours would carry the library's exception, and that the token.
        try:
            response = self._session.request(
                method,
                url,
                params=params,
                data=data,
                headers=headers,
                auth=self._credential,
                timeout=(min(TIMEOUT_S[0], left_s), min(TIMEOUT_S[1], left_s)),
                allow_redirects=False,
            )
        except requests.exceptions.ConnectTimeout:
            return _Silence("no connection in time")
        except requests.exceptions.Timeout:
            return _Silence("no answer in time", unsure=True)
        except requests.exceptions.SSLError:
            text = "its certificate is not trusted (REQUESTS_CA_BUNDLE or SSL_CERT_FILE names a file of those that are)"
            return _Silence(text, final=True)
        except requests.exceptions.ProxyError:
            return _Silence("the proxy refused the connection")
        except requests.exceptions.RequestException as error:
            name = type(error).__name__
            # What is wrong with the request itself is a ValueError as well.
            final = isinstance(error, ValueError)
            return _Silence(f"the connection failed ({name})", unsure=not final and not _refused(error), final=final)
        return self._answer(response)

    def _answer(self, response: requests.Response) -> Answer:
        text = self._credential.hide(response.text)
        try:
            body = json.loads(text) if text.strip() else None
        except ValueError:
            body = None
        headers = {name.lower(): value for name, value in response.headers.items()}
        if body is None and text.strip() and 200 <= response.status_code < 300:
            # A captive portal or a proxy's page, not the API.
            return Answer(502, headers, None, f"no JSON came with {response.status_code}: {text[:200]}")
        return Answer(response.status_code, headers, body, text[:_MAX_REASON])

    # -- again, or not -------------------------------------------------------------------------------------------------

    def _wait_s(self, answer: Answer | _Silence, attempt: int, pause: Pause | None) -> float | None:
        if isinstance(answer, _Silence) and answer.final:
            return None
        if isinstance(answer, _Silence) or answer.status >= 500:
            named = None if isinstance(answer, _Silence) else seconds(answer.headers.get("retry-after", ""))
            return named if named is not None else float(2 ** (attempt - 1))
        wait_s = self._pause(answer, attempt, self._clock())
        if wait_s is None and pause is not None:
            wait_s = pause(answer, attempt, self._clock())
        return wait_s

    def _refuse(
        self, method: str, path: str, answer: Answer | _Silence, unsure: bool, wait_s: float | None
    ) -> NoReturn:
        remedy = ""
        if wait_s is not None and wait_s > self._left_s():
            remedy = f"try again in {math.ceil(wait_s)} s: this run waits no longer"
        if isinstance(answer, _Silence):
            raise ApiError(method, path, 0, answer.reason, remedy=remedy, unsure=unsure)
        raise ApiError(method, path, answer.status, answer.reason, remedy=remedy, unsure=unsure)


def _refused(error: requests.exceptions.RequestException) -> bool:
    """Was there no connection at all, so that nothing can have happened?"""
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(cause, urllib3.exceptions.NewConnectionError)


def seconds(text: str) -> float | None:
    """A header's number that cannot be below 0, None where it is none."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else None


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    return parts.scheme, parts.hostname or "", port or {"https": 443, "http": 80}.get(parts.scheme)


def _shown(url: str) -> str:
    return one_line(plain(f"{urlsplit(url).scheme}://{urlsplit(url).hostname}"), 200)


def _next_link(header: str) -> str:
    links = requests.utils.parse_header_links(header) if header else []
    return next((str(link["url"]) for link in links if link.get("rel") == "next"), "")
