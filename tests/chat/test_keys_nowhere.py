"""A whole session over HTTP, with a server that echoes what it was sent: the key ends up nowhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from chat_server import Seen, completion, error, serving
from flow_evaluator import CORRECTION, OPTIMIZATION, TableEvaluator, reply
from flow_records import make_target

from pytest_cudaforge.config import load
from pytest_cudaforge.session import SessionOptions, SessionResult, forge_all

KEY = "sk-verysecretkey-0123456789abcdef"


def forged(root: Path, url: str) -> SessionResult:
    options: dict[str, object] = {
        "rounds": 3,
        "chat.coder.model": "gpt-5",
        "chat.coder.base_url": url,
        "chat.coder.max_retries": 0,
        "chat.coder.api_key_env": "FORGE_TEST_KEY",
    }
    config = load(options, root=root, environ={})
    recording = SessionOptions(record=root / "talk.jsonl")
    return forge_all([make_target(root, "one")], config, TableEvaluator(), options=recording)


def assert_nowhere(root: Path, result: SessionResult, log: str) -> None:
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) > 2
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in repr(result)
    assert KEY not in log


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FORGE_TEST_KEY", KEY)
    caplog.set_level(logging.DEBUG)


def test_a_session_that_goes_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    coder = [reply("BUILD_ERROR"), reply("PASSED 1.5"), reply("PASSED 2.5")]
    judge = [CORRECTION, OPTIMIZATION]

    def by(seen: Seen) -> object:
        echo = f"You sent {seen.headers['authorization']}\n\n"
        return completion(echo + (judge if "response_format" in seen.body else coder).pop(0))

    with serving(by=by) as server:
        result = forged(tmp_path, server.url)
        assert all(seen.headers["authorization"] == f"Bearer {KEY}" for seen in server.seen)
        assert not any(KEY in str(seen.body) for seen in server.seen)
    (trace,) = result.traces
    assert trace.outcome == "forged"
    assert result.spent_usd == pytest.approx(5 * (400 * 1.25 + 600 * 0.125 + 200 * 10) / 1e6)
    assert "You sent Bearer [key]" in (tmp_path / "talk.jsonl").read_text()
    assert_nowhere(tmp_path, result, caplog.text)


def test_a_session_that_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(error(401, f"Incorrect API key provided: {KEY}")) as server:
        result = forged(tmp_path, server.url)
    (trace,) = result.traces
    assert trace.outcome == "error"
    assert "FORGE_TEST_KEY" in trace.reason
    assert_nowhere(tmp_path, result, caplog.text)
