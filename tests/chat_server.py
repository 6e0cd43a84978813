"""A small OpenAI-compatible server for tests: real sockets, one scripted answer per request, the last for ever."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """``body`` is sent as JSON unless it is bytes; ``hang`` waits for the server's end and sends nothing."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    hang: bool = False


@dataclass(frozen=True)
class Seen:
    path: str
    headers: Mapping[str, str]
    body: Any


Script = Sequence[Answer] | Callable[[Seen], Answer]


@dataclass
class ChatServer:
    script: Script
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def answer(self, seen: Seen) -> Answer:
        self.seen.append(seen)
        if callable(self.script):
            return self.script(seen)
        return self.script[min(len(self.seen), len(self.script)) - 1]


def completion(
    text: Any = "hello", *, finish: str = "stop", usage: Any = None, model: str = "gpt-5-2025-08-07", **message: Any
) -> Answer:
    """A well-formed Chat Completions answer."""
    counted = usage if usage is not None else {
        "prompt_tokens": 1000,
        "completion_tokens": 200,
        "prompt_tokens_details": {"cached_tokens": 600},
    }  # fmt: skip
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **message}}
    return Answer(200, {"id": "c1", "object": "chat.completion", "model": model, "choices": [choice], "usage": counted})


def error(status: int, message: str, **headers: str) -> Answer:
    return Answer(status, {"error": {"message": message, "type": "some_error"}}, headers)


@contextmanager
def serving(*script: Answer, by: Callable[[Seen], Answer] | None = None) -> Iterator[ChatServer]:
    chat = ChatServer(by or script)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            seen = Seen(self.path, {k.lower(): v for k, v in self.headers.items()}, json.loads(self.rfile.read(length)))
            answer = chat.answer(seen)
            if answer.hang:
                chat.closing.wait(20)
                self.close_connection = True
                return
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in answer.headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Tests read the server's notes, not stderr."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    chat.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield chat
    finally:
        chat.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
