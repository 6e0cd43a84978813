"""Are the Action's requests, and the fake GitHub's answers, what GitHub's published OpenAPI description says?

Not part of any suite: it needs Node, and two packages of it that lie outside of this repository. From its top::

    npm install --prefix /tmp/prism @octokit/openapi@23 @stoplight/prism-cli@5
    FAKE_GITHUB_RECORD=/tmp/prism/seen.jsonl pytest -q tests/action
    python tests/openapi/check_requests.py /tmp/prism /tmp/prism/seen.jsonl

Prism stands as a proxy between a client that sends each recorded request and a server that gives the answer recorded
with it; what it finds wrong comes back in a header. Requests that the fake refused are what tests do on purpose, and
are told apart. The fake's answers leave out most of what the real ones hold, and the description most of the ways to be
refused: that is no finding, everything else is. The exit status is 1 where there is one.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "action"))

from fake_github import serving

DESCRIPTIONS = "node_modules/@octokit/openapi/generated"
START_S = 120


@dataclass(frozen=True)
class Exchange:
    method: str
    path: str
    query: dict[str, str]
    body: Any
    status: int
    answer: Any

    @property
    def injected(self) -> bool:
        """Is the answer a fault that a test asked for?"""
        return not 200 <= self.status < 500 or 300 <= self.status < 400 or isinstance(self.answer, str)

    @property
    def described_path(self) -> str:
        """OpenAPI has no parameters with slashes in them; a ref has."""
        found = re.fullmatch(r"(.*/git/refs?/|.*/branches/)(.+)", self.path)
        return found[1] + quote(unquote(found[2]), safe="") if found else self.path

    @property
    def endpoint(self) -> str:
        path = re.sub(r"/\d+(?=/|$)", "/N", self.path)
        return f"{self.method} {re.sub(r'[0-9a-f]{40}', 'SHA', path)}"


@dataclass
class Findings:
    endpoints: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)

    def add(self, exchange: Exchange, violation: dict[str, Any]) -> None:
        where = "/".join(map(str, violation.get("location", ())))
        text = f"{exchange.endpoint}: {where}: {violation.get('message')}"
        if where.startswith("request"):
            (self.requests if exchange.status < 400 else self.refused)[text] += 1
        elif exchange.status < 400:
            self.answers[text] += 1


def recorded(file: Path) -> list[Exchange]:
    """Each exchange once."""
    lines = dict.fromkeys(file.read_text("utf-8").splitlines())
    return [Exchange(**json.loads(line)) for line in lines]


@contextmanager
def answering(exchanges: list[Exchange]) -> Iterator[str]:
    class Connection(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            exchange = exchanges[int(self.headers["X-Exchange"])]
            data = b"" if exchange.answer is None else json.dumps(exchange.answer).encode()
            self.send_response(exchange.status)
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _serve

        def log_message(self, *arguments: Any) -> None:
            """The findings are what is printed."""

    with serving(Connection) as url:
        yield url


def changed(folder: Path, told: dict[str, Any]) -> Path:
    """A description in which no answer has to be whole, and no request may hold what is not described.

    GitHub ignores a misspelt field without a word.
    """
    told = copy.deepcopy(told)
    _relax(told["components"])
    for path in told["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict):
                _relax(operation.get("responses", {}))
                _close(operation.get("requestBody", {}))
    file = folder / "changed.json"
    file.write_text(json.dumps(told), "utf-8")
    return file


def _close(body: dict[str, Any]) -> None:
    schema = body.get("content", {}).get("application/json", {}).get("schema", {})
    for one in [schema, *schema.get("oneOf", ()), *schema.get("anyOf", ())]:
        if "properties" in one:
            one["additionalProperties"] = False


def unknown_parameters(told: dict[str, Any], exchange: Exchange) -> list[str]:
    """Names in the query that the endpoint has no parameter of, which Prism lets pass."""
    for template, path in told["paths"].items():
        pattern = re.sub(r"\\{[^}]*\\}", "[^/]+", re.escape(template))
        if exchange.method.lower() in path and re.fullmatch(pattern, exchange.described_path):
            listed = [*path.get("parameters", ()), *path[exchange.method.lower()].get("parameters", ())]
            shared = told["components"]["parameters"]
            named = {(shared[one["$ref"].rpartition("/")[2]] if "$ref" in one else one)["name"] for one in listed}
            return sorted(exchange.query.keys() - named)
    return []


def _relax(value: Any) -> None:
    if isinstance(value, dict) and isinstance(value.get("required"), list):
        del value["required"]
    if isinstance(value, dict) and "oneOf" in value:
        # What is not whole may be either.
        value["anyOf"] = value.pop("oneOf")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _relax(part)


@contextmanager
def prism(folder: Path, described: Path, upstream: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    binary = folder / "node_modules/.bin/prism"
    command = [str(binary), "proxy", "-p", str(port), "-m", "false", str(described), upstream]
    with (folder / "prism.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(START_S * 5):
        if process.poll() is not None:
            raise SystemExit("Prism ended at once: see prism.log")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit("Prism does not listen: see prism.log")


def check(exchanges: list[Exchange], url: str, told: dict[str, Any]) -> Findings:
    findings = Findings()
    session = requests.Session()
    for number, exchange in enumerate(exchanges):
        headers = {"X-Exchange": str(number), "X-GitHub-Api-Version": "2022-11-28", "User-Agent": "check"}
        headers["Accept"] = "application/vnd.github+json"
        data = None if exchange.body is None else json.dumps(exchange.body)
        if data is not None:
            headers["Content-Type"] = "application/json"
        where = url + exchange.described_path
        reply = session.request(exchange.method, where, params=exchange.query, data=data, headers=headers, timeout=60)
        findings.endpoints[exchange.endpoint] += 1
        # Of very many it says so, and then lists them all the same.
        violations = (reply.headers.get("sl-violations") or "[]").removeprefix("Too many violations! ")
        for violation in json.loads(violations):
            findings.add(exchange, violation)
        for name in unknown_parameters(told, exchange):
            findings.add(exchange, {"location": ["request", "query", name], "message": "not described"})
        if "problem+json" in reply.headers.get("content-type", ""):
            findings.add(exchange, {"location": ["request"], "message": reply.json().get("title")})
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the two npm packages are installed")
    parser.add_argument("recorded", type=Path, help="the file that FAKE_GITHUB_RECORD named")
    parser.add_argument("--server", default="api.github.com", help="or ghes-3.17 and the like")
    given = parser.parse_args()
    told = json.loads((given.folder / DESCRIPTIONS / f"{given.server}.json").read_text("utf-8"))
    exchanges = [one for one in recorded(given.recorded) if not one.injected]
    described = changed(given.folder, told)
    with answering(exchanges) as upstream, prism(given.folder, described, upstream) as url:
        findings = check(exchanges, url, told)
    print(f"{len(exchanges)} exchanges at {len(findings.endpoints)} endpoints")
    for name, found in (
        ("requests that the fake took", findings.requests),
        ("requests that the fake refused", findings.refused),
        ("answers", findings.answers),
    ):
        print(f"\n{sum(found.values())} findings in {name}")
        for text, times in found.most_common():
            print(f"  {times} x {text}")
    return 1 if findings.requests or findings.answers else 0


if __name__ == "__main__":
    sys.exit(main())
