"""GitHub's API: what is asked again and what is not, how long is waited, and where the token never is."""

from __future__ import annotations

import copy
import pickle
import shutil
import socket
import ssl
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cudaforge_action.api import ApiError, GitHub
from cudaforge_action.rest import Credential
from fake_github import (
    NOT_ACCESSIBLE,
    READER,
    TOKEN,
    FakeGitHub,
    Reply,
    fake_github,
    invalid,
    message,
    primary_limit,
    secondary_limit,
    too_many,
    unavailable,
)

from pytest_cudaforge.errors import SituationError, UsageError


@dataclass
class Clock:
    """Time that passes only by sleeping."""

    now: float = 1_000_000.0
    waits: list[float] = field(default_factory=list)

    def sleep(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        self.now += wait_s


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGitHub]:
    with fake_github(tmp_path_factory.mktemp("github"), enterprise=True) as hub:
        hub.commit("main", {"a.py": "1"})
        yield hub


@pytest.fixture
def hub(shared: FakeGitHub) -> FakeGitHub:
    """The same server for all, without pull requests: git's processes are what such a server costs."""
    shared.pulls.clear()
    shared.comments.clear()
    shared.calm()
    shared.forget()
    return shared


def client(hub: FakeGitHub, clock: Clock | None = None, token: str = TOKEN, **options: Any) -> GitHub:
    clock = clock or Clock()
    return GitHub(hub.api_url, token, hub.repository, sleep=clock.sleep, clock=lambda: clock.now, **options)


# -- asking ------------------------------------------------------------------------------------------------------------


def test_requests_carry_what_github_asks_for(hub: FakeGitHub) -> None:
    assert client(hub).get("")["full_name"] == "octo/kernels"
    [seen] = hub.requests
    assert seen.headers["accept"] == "application/vnd.github+json"
    assert seen.headers["x-github-api-version"] == "2022-11-28"
    assert seen.headers["authorization"] == f"Bearer {TOKEN}"
    assert seen.headers["user-agent"] == "pytest-cudaforge"


def test_a_list_is_read_to_its_end(hub: FakeGitHub) -> None:
    pull = hub.open_pull("main")
    for number in range(230):
        hub.say(pull.number, str(number))
    found = [one["body"] for one in client(hub).paginate(f"issues/{pull.number}/comments")]
    assert found == [str(number) for number in range(230)]
    assert len(hub.requests) == 3


def test_without_a_token_public_things_can_be_read(hub: FakeGitHub) -> None:
    assert client(hub, token="").get("")["default_branch"] == "main"
    with pytest.raises(ApiError, match="401: Requires authentication"):
        client(hub, token="").post("statuses/abc", {"state": "success"})


def test_an_error_says_what_github_says(hub: FakeGitHub) -> None:
    with pytest.raises(ApiError) as caught:
        client(hub, token=READER).post("issues/1/comments", {"body": "x"})
    assert (caught.value.status, caught.value.method, caught.value.unsure) == (403, "POST", False)
    assert str(caught.value) == f"POST /repos/octo/kernels/issues/1/comments answered 403: {NOT_ACCESSIBLE}"[:200]
    assert isinstance(caught.value, SituationError)


def test_what_an_error_says_is_one_line_of_text(hub: FakeGitHub) -> None:
    hub.fail("GET", "", message(404, "a\n::error::b\x1b[2J\u202e", {"resource": "Pull", "code": "x"}, "tail" * 500))
    with pytest.raises(ApiError) as caught:
        client(hub).get("")
    assert caught.value.reason.startswith("a ::error::b[2J; Pull x; tailtail") and len(caught.value.reason) <= 600


# -- asking again ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "waits"),
    [
        (too_many(retry_after="17"), [17.0]),
        (secondary_limit(retry_after="30"), [30.0]),
        (secondary_limit(), [60.0]),
        (primary_limit(1_000_042), [43.0]),
        (primary_limit(999_000), [1.0]),
        (too_many(), [60.0]),
        (unavailable(502), [1.0]),
        (unavailable(503), [1.0]),
        (Reply(0), [1.0]),
        (Reply(200, "<html>a captive portal</html>"), [1.0]),
    ],
)
def test_a_limit_is_waited_for_as_github_documents_it(hub: FakeGitHub, refusal: Reply, waits: list[float]) -> None:
    clock = Clock()
    hub.fail("GET", "", refusal)
    assert client(hub, clock).get("")["full_name"] == "octo/kernels"
    assert clock.waits == waits


def test_a_secondary_limit_that_stays_is_waited_for_twice_as_long_each_time(hub: FakeGitHub) -> None:
    clock = Clock()
    hub.fail("GET", "", secondary_limit(), times=99)
    with pytest.raises(ApiError, match="secondary rate limit") as caught:
        client(hub, clock).get("")
    assert clock.waits == [60.0, 120.0, 240.0]
    assert "try again in 480 s" in caught.value.remedy


def test_no_limit_is_waited_for_beyond_a_runs_patience(hub: FakeGitHub) -> None:
    clock = Clock()
    api = client(hub, clock, patience_s=100)
    hub.fail("GET", "", primary_limit(1_000_050))
    api.get("")
    hub.fail("GET", "", primary_limit(1_000_110))
    with pytest.raises(ApiError, match="API rate limit exceeded") as caught:
        api.get("")
    assert clock.waits == [51.0] and "try again in 60 s" in caught.value.remedy


@pytest.mark.parametrize("refusal", [message(403, NOT_ACCESSIBLE), message(401, "Bad credentials"), invalid("A", "b")])
def test_a_refusal_that_will_stay_is_not_asked_for_again(hub: FakeGitHub, refusal: Reply) -> None:
    clock = Clock()
    hub.fail("POST", "", refusal, times=99)
    with pytest.raises(ApiError):
        client(hub, clock).post("issues/1/labels", {"labels": ["x"]})
    assert clock.waits == [] and len(hub.requests) == 1


@pytest.mark.parametrize("reply", [unavailable(), Reply(0)])
def test_a_lost_answer_is_asked_for_again_a_few_times(hub: FakeGitHub, reply: Reply) -> None:
    clock = Clock()
    hub.fail("PATCH", "", reply, times=99)
    with pytest.raises(ApiError) as caught:
        client(hub, clock).patch("pulls/1", {"title": "x"})
    assert clock.waits == [1.0, 2.0, 4.0, 8.0, 16.0] and caught.value.unsure


@pytest.mark.parametrize("reply", [unavailable(), Reply(0)])
def test_what_must_not_be_there_twice_is_not_asked_for_twice(hub: FakeGitHub, reply: Reply) -> None:
    pull = hub.open_pull("main")
    hub.fail("POST", "comments", reply, late=True)
    with pytest.raises(ApiError) as caught:
        client(hub).post(f"issues/{pull.number}/comments", {"body": "x"}, once=True)
    assert caught.value.unsure and [one.body for one in hub.comments.values()] == ["x"]
    hub.fail("POST", "comments", too_many(retry_after="1"))
    client(hub).post(f"issues/{pull.number}/comments", {"body": "y"}, once=True)
    assert [one.body for one in hub.comments.values()] == ["x", "y"]


def test_a_branch_that_github_does_not_know_yet_is_waited_for(hub: FakeGitHub) -> None:
    clock = Clock()
    hub.commit("topic", {"a.py": "2"})
    hub.lag = 2
    wanted = {"title": "t", "head": "topic", "base": "main"}
    assert client(hub, clock).post("pulls", wanted, lag=True)["number"] == 1
    assert clock.waits == [1.0, 2.0]
    with pytest.raises(ApiError, match="already exists"):
        client(hub, clock).post("pulls", wanted, lag=True)
    hub.lag = 99
    with pytest.raises(ApiError, match="PullRequest head invalid"):
        client(hub, clock).post("pulls", wanted, lag=True)
    assert clock.waits == [1.0, 2.0, 1.0, 2.0, 4.0, 8.0]


# -- the token ---------------------------------------------------------------------------------------------------------


def test_a_redirect_within_the_host_is_followed_verbatim(hub: FakeGitHub) -> None:
    hub.open_pull("main")
    there = f"{hub.prefix}/repos/{hub.repository}/issues/1/labels"
    hub.fail("POST", "pulls/1", Reply(307, None, {"Location": there}))
    client(hub).post("pulls/1/labels", {"labels": ["fast"]})
    assert hub.pulls[1].labels == ["fast"]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_to_another_host_is_not_followed(hub: FakeGitHub, tmp_path: Path, status: int) -> None:
    with fake_github(tmp_path) as other:
        hub.fail("GET", "", Reply(status, None, {"Location": f"{other.url}/repos/octo/kernels?leak=1"}))
        with pytest.raises(ApiError, match="where the token is not taken"):
            client(hub).get("")
        assert other.requests == []


def test_a_next_page_elsewhere_is_not_asked_for(hub: FakeGitHub) -> None:
    for link in ("http://evil.example/x", f"{hub.url}/outside", "//evil.example/x"):
        hub.fail("GET", "pulls", Reply(200, [], {"Link": f'<{link}>; rel="next"'}))
        with pytest.raises(ApiError, match="the next page lies at"):
            list(client(hub).paginate("pulls"))


def test_redirects_in_a_circle_end(hub: FakeGitHub) -> None:
    hub.fail("GET", "", Reply(302, None, {"Location": f"{hub.api_url}/repos/octo/kernels"}), times=99)
    with pytest.raises(ApiError, match="too many redirects"):
        client(hub).get("")


def test_a_netrc_of_the_runner_does_not_take_the_tokens_place(
    hub: FakeGitHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login someone password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    client(hub).get("")
    assert hub.requests[0].headers["authorization"] == f"Bearer {TOKEN}"


def test_the_token_is_in_no_message_and_no_exception(hub: FakeGitHub) -> None:
    api = client(hub)
    assert TOKEN not in repr(api) + repr(Credential(TOKEN)) + repr(vars(api)["_client"])
    hub.fail("GET", "", message(400, f"you sent Bearer {TOKEN}"))
    with pytest.raises(ApiError) as caught:
        api.get("")
    error = caught.value
    assert "[token]" in error.reason
    told = "".join(traceback.TracebackException.from_exception(error, capture_locals=False).format())
    assert TOKEN not in told + repr(vars(error))
    assert error.__cause__ is None and error.__context__ is None
    with pytest.raises(TypeError):
        pickle.dumps(Credential(TOKEN))
    with pytest.raises(TypeError):
        copy.copy(Credential(TOKEN))


def test_a_connection_that_fails_leaves_no_exception_with_the_request_in_it() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        clock = Clock()
        api = GitHub(url, TOKEN, "octo/kernels", sleep=clock.sleep, clock=lambda: clock.now)
        with pytest.raises(ApiError, match="did not answer: the connection failed") as caught:
            api.post("issues/1/comments", {"body": "x"}, once=True)
    # Refused at once: nothing can have happened, and asking again is safe.
    assert len(clock.waits) == 5 and not caught.value.unsure
    assert caught.value.__context__ is None


def test_a_proxy_of_the_runner_is_asked(hub: FakeGitHub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", hub.url)
    # A host that only the proxy knows.
    api = GitHub("http://ghe.invalid/api/v3", TOKEN, "octo/kernels", sleep=lambda wait_s: None)
    assert api.get("")["full_name"] == "octo/kernels"
    assert hub.requests[0].headers["host"] == "ghe.invalid"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate and its key in one file, for this host, of nobody that is trusted."""
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=ghe"
    files = "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out crt.pem"
    subprocess.run(["openssl", "req", *kind.split(), *files.split()], cwd=folder, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text((folder / "crt.pem").read_text() + (folder / "key.pem").read_text())
    return both


@pytest.mark.parametrize("variable", ["", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_an_enterprise_servers_certificate(
    tmp_path: Path, certificate: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, str(certificate))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    clock = Clock()
    with fake_github(tmp_path, enterprise=True, tls=tls) as hub:
        if variable:
            assert client(hub, clock).get("")["full_name"] == "octo/kernels"
        else:
            with pytest.raises(ApiError, match="its certificate is not trusted"):
                client(hub, clock).get("")
            assert clock.waits == [] and hub.requests == []


@pytest.mark.parametrize("token", ["a b", "a\nb", "a\r\nX-Evil: 1", "é", "\x00"])
def test_what_is_no_token_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(UsageError) as caught:
        GitHub("https://api.github.com", token, "octo/kernels")
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["", "api.github.com", "file:///etc", "https://user:pw@ghe.corp/api/v3", "https://x/?a=b"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="the API's address is wrong"):
        GitHub(url, TOKEN, "octo/kernels")


@pytest.mark.parametrize("repository", ["", "octo", "octo/kernels/x", "../kernels", "octo/..", "octo/a b", "octo/a?b"])
def test_a_repository_that_is_none_is_refused(repository: str) -> None:
    with pytest.raises(UsageError, match="is no repository"):
        GitHub("https://api.github.com", TOKEN, repository)


@pytest.mark.parametrize("path", ["../other/pulls", "pulls?x=1", "issues/../../x", "a\nb", "a#b", "a\\b", "./x"])
def test_a_path_does_not_lead_out_of_the_repository(hub: FakeGitHub, path: str) -> None:
    with pytest.raises(UsageError, match="no path of the API"):
        client(hub).get(path)
    assert hub.requests == []


def test_neither_the_api_nor_the_hosts_load_torch_or_openai() -> None:
    code = "import sys, cudaforge_action.api, cudaforge_action.merge_request, cudaforge_action.github\n"
    code += "print(sorted({'torch', 'openai', 'pytest'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
