"""A GitLab for tests: the notes of one merge request over real HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from fake_github import serving

TOKEN = "glpat-fake0000notes1111"
BOT = {"id": 7, "username": "project_1_bot"}
_NOTES = "/api/v4/projects/octo%2Fkernels/merge_requests/5/notes"


@dataclass
class FakeGitLab:
    url: str = ""
    notes: list[dict[str, Any]] = field(default_factory=list)
    #: Answers (status, headers) that the next requests get instead of theirs.
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    @property
    def writes(self) -> list[str]:
        return [f"{method} {path}" for method, path, _ in self.requests if method != "GET"]

    @property
    def environ(self) -> dict[str, str]:
        return {
            "GITLAB_CI": "true",
            "CI_API_V4_URL": f"{self.url}/api/v4",
            "CI_SERVER_URL": self.url,
            "CI_PROJECT_PATH": "octo/kernels",
            "CI_PROJECT_DIR": "/builds/octo/kernels",
            "CI_DEFAULT_BRANCH": "main",
            "CI_PIPELINE_SOURCE": "merge_request_event",
            "CI_PIPELINE_ID": "99",
            "CI_JOB_URL": f"{self.url}/octo/kernels/-/jobs/4",
            "CI_COMMIT_SHA": "a" * 40,
            "CI_COMMIT_REF_NAME": "faster",
            "CI_MERGE_REQUEST_IID": "5",
            "CI_MERGE_REQUEST_PROJECT_ID": "1",
            "CI_MERGE_REQUEST_PROJECT_PATH": "octo/kernels",
            "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "1",
            "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": "main",
            "CI_MERGE_REQUEST_SOURCE_BRANCH_SHA": "b" * 40,
        }

    def write(self, body: str, author: dict[str, Any]) -> dict[str, Any]:
        note = {"id": 100 + len(self.notes), "body": body.strip(), "author": author, "system": False}
        self.notes.append(note)
        return note

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any, dict[str, str]]:
        if path == "/api/v4/user":
            return 200, BOT, {}
        one = re.fullmatch(re.escape(_NOTES) + r"/(\d+)", path)
        note = next((note for note in self.notes if one and note["id"] == int(one[1])), None)
        if path == _NOTES and method == "GET":
            return self._page(query)
        if path == _NOTES and method == "POST":
            return 201, self.write(body["body"], BOT), {}
        if note is None:
            return 404, {"message": "404 Not found"}, {}
        if note["author"] != BOT:
            return 403, {"message": "403 Forbidden"}, {}
        if method == "DELETE":
            self.notes.remove(note)
            return 204, None, {}
        note["body"] = body["body"].strip()
        return 200, note, {}

    def _page(self, query: dict[str, str]) -> tuple[int, Any, dict[str, str]]:
        page, size = int(query.get("page", "1")), int(query.get("per_page", "20"))
        rest = self.notes[page * size :]
        following = urlencode(query | {"page": str(page + 1)})
        link = {"Link": f'<{self.url}{_NOTES}?{following}>; rel="next"'} if rest else {}
        return 200, self.notes[(page - 1) * size : page * size], link


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    lab: FakeGitLab

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        self.lab.requests.append((self.command, parts.path, dict(self.headers)))
        if self.lab.refusals:
            status, headers = self.lab.refusals.pop(0)
            answer: tuple[int, Any, dict[str, str]] = status, {"message": "Retry later"}, headers
        elif self.headers.get("PRIVATE-TOKEN") != TOKEN:
            answer = 401, {"message": "401 Unauthorized"}, {}
        else:
            answer = self.lab.answer(
                self.command, parts.path, dict(parse_qsl(parts.query)), json.loads(raw) if raw else None
            )
        status, body, headers = answer
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def log_message(self, *arguments: Any) -> None:
        """Tests read the log of requests, not stderr."""


@contextmanager
def fake_gitlab() -> Iterator[FakeGitLab]:
    lab = FakeGitLab()
    with serving(type("Connection", (_Connection,), {"lab": lab})) as lab.url:
        yield lab
