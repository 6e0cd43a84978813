import asyncio
import logging
import os
import pickle
import socket
import time
import traceback

import pytest
from chat_requests import config, request
from chat_server import Answer, completion, error, serving

from pytest_cudaforge import chat, judge
from pytest_cudaforge.errors import ConfigError, ProviderError

KEY = "sk-verysecretkey-0123456789abcdef"


@pytest.fixture
def key(monkeypatch):
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORGE_TEST_KEY", KEY)
    return KEY


def model(tmp_path, url, **options):
    settings = {
        "chat.coder.model": "gpt-5",
        "chat.coder.base_url": url,
        "chat.coder.api_key_env": "FORGE_TEST_KEY",
        "chat.coder.max_retries": 0,
        "chat.coder.timeout_s": 10.0,
    }
    settings |= {f"chat.coder.{name}": value for name, value in options.items()}
    return chat.load(config(tmp_path, **settings), "coder")


def ask(model, asked=None):
    return asyncio.run(model.complete(asked or request()))


def fail(model, asked=None):
    """The ProviderError of a call; its whole chain, traceback and locals must not show the key."""
    with pytest.raises(ProviderError) as caught:
        ask(model, asked)
    raised = caught.value
    assert raised.__cause__ is None
    assert raised.__context__ is None
    shown = traceback.TracebackException.from_exception(raised, capture_locals=True)
    assert KEY not in "".join(shown.format())
    assert raised.expected
    assert raised.remedy
    return str(raised)


def test_a_reply_comes_back_with_usage_price_and_model(tmp_path, key):
    with serving(completion("the reply")) as server:
        asked = request()
        reply = ask(model(tmp_path, server.url, temperature=0.5, max_output_tokens=900), asked)
    assert reply.text == "the reply"
    assert reply.model == "gpt-5-2025-08-07"
    assert reply.prompt_digest == asked.digest
    assert (reply.usage.input_tokens, reply.usage.output_tokens, reply.usage.cached_tokens) == (1000, 200, 600)
    assert reply.usage.usd == pytest.approx((400 * 1.25 + 600 * 0.125 + 200 * 10) / 1e6)
    assert reply.note == ""
    (seen,) = server.seen
    assert seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.body["messages"] == [
        {"role": "system", "content": "You write kernels."},
        {"role": "user", "content": "Write a kernel."},
    ]
    assert (seen.body["temperature"], seen.body["max_completion_tokens"]) == (0.5, 900)
    assert not seen.body.get("stream")


def test_extra_goes_into_the_body(tmp_path, key):
    with serving(completion()) as server:
        ask(model(tmp_path, server.url, extra={"reasoning_effort": "high", "seed": 7}))
    assert server.seen[0].body["reasoning_effort"] == "high"
    assert server.seen[0].body["seed"] == 7


def test_structured_output_is_asked_for_where_there_is_a_schema(tmp_path, key):
    with serving(completion("{}")) as server:
        ask(model(tmp_path, server.url), request(role="judge", schema=judge.SCHEMA["correction"]))
    wanted = server.seen[0].body["response_format"]
    assert wanted["type"] == "json_schema"
    assert wanted["json_schema"]["strict"] is True
    assert wanted["json_schema"]["schema"]["required"] == ["issue", "why", "fix"]


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model."),
        (422, "Extra inputs are not permitted"),
        (400, "grammar error"),
    ],
)
def test_a_server_without_structured_output_is_asked_again_without_and_remembered(tmp_path, key, status, message):
    def by(seen):
        return error(status, message) if "response_format" in seen.body else completion("plain")

    with serving(by=by) as server:
        answering = model(tmp_path, server.url)
        asked = request(role="judge", schema=judge.SCHEMA["correction"])
        assert ask(answering, asked).text == "plain"
        assert ask(answering, asked).text == "plain"
    assert ["response_format" in seen.body for seen in server.seen] == [True, False, False]


def test_a_server_that_knows_only_max_tokens_gets_it(tmp_path, key):
    def by(seen):
        if "max_completion_tokens" in seen.body:
            return error(400, "Unrecognized request argument supplied: max_completion_tokens")
        return completion("old server") if "response_format" not in seen.body else error(400, "no response_format here")

    with serving(by=by) as server:
        answering = model(tmp_path, server.url, max_output_tokens=77)
        assert ask(answering, request(schema=judge.SCHEMA["correction"])).text == "old server"
    assert len(server.seen) == 3
    assert server.seen[-1].body["max_tokens"] == 77


def test_a_bad_request_for_another_reason_is_reported_and_nothing_is_unlearned(tmp_path, key):
    with serving(error(400, "maximum context length is 8192 tokens")) as server:
        answering = model(tmp_path, server.url)
        text = fail(answering, request(schema=judge.SCHEMA["correction"]))
        assert "answered 400: maximum context length" in text
        assert len(server.seen) == 2
        fail(answering, request(schema=judge.SCHEMA["correction"]))
        assert "response_format" in server.seen[2].body


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_named_by_its_variable_only(tmp_path, key, status):
    with serving(error(status, f"Incorrect API key provided: {KEY}. Find yours at ...")) as server:
        text = fail(model(tmp_path, server.url))
    assert f"answered {status}: Incorrect API key provided: [key]. Find yours" in text
    assert "environment variable FORGE_TEST_KEY (it is set, but refused)" in text
    assert "chat.coder.api_key_env" in text


def test_a_key_that_a_server_shows_in_part_is_redacted_too(tmp_path, key):
    with serving(error(401, "Incorrect API key provided: sk-verys**********cdef.")) as server:
        assert "sk-verys" not in fail(model(tmp_path, server.url))


def test_without_a_key_a_local_server_is_asked_and_its_401_says_that_none_is_set(tmp_path, key, monkeypatch):
    monkeypatch.delenv("FORGE_TEST_KEY")
    with serving(completion("free"), error(401, "who are you")) as server:
        answering = model(tmp_path, server.url)
        assert ask(answering).text == "free"
        assert "FORGE_TEST_KEY (it is not set)" in fail(answering)


def test_404_says_model_and_base_url(tmp_path, key):
    with serving(error(404, "The model `gpt-5` does not exist")) as server:
        text = fail(model(tmp_path, server.url))
    assert "a server with the model 'gpt-5'" in text
    assert "chat.coder.base_url" in text


def test_429_is_retried_and_then_fine(tmp_path, key):
    with serving(error(429, "slow down", retry_after_ms="10"), completion("at last")) as server:
        assert ask(model(tmp_path, server.url, max_retries=2)).text == "at last"
    assert len(server.seen) == 2


def test_429_for_good_says_what_to_do(tmp_path, key):
    with serving(error(429, "You exceeded your current quota", retry_after_ms="10")) as server:
        text = fail(model(tmp_path, server.url, max_retries=1))
    assert len(server.seen) == 2
    assert "answered 429: You exceeded your current quota" in text
    assert "after 1 retries" in text


def test_500_is_retried_then_reported(tmp_path, key):
    with serving(error(500, "boom", retry_after_ms="10")) as server:
        text = fail(model(tmp_path, server.url, max_retries=1))
    assert len(server.seen) == 2
    assert "answered 500: boom" in text
    assert "run resumes" in text


def test_a_server_that_never_answers_is_given_up(tmp_path, key):
    with serving(Answer(hang=True)) as server:
        start = time.monotonic()
        text = fail(model(tmp_path, server.url, timeout_s=0.4))
    assert time.monotonic() - start < 5
    assert "did not answer within 0.4 s (0 retries)" in text
    assert "chat.coder.timeout_s" in text


def test_a_server_that_is_not_there(tmp_path, key):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = fail(model(tmp_path, f"http://127.0.0.1:{port}/v1"))
    assert f"127.0.0.1:{port}/v1 cannot be reached" in text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<html>Welcome to nginx</html>", "not a JSON object"),
        (b'{"choices": [', "not a JSON object"),
        (b"", "not a JSON object"),
        (b"[1, 2]", "not a JSON object"),
        (b"\xff\xfe\x00garbage", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"{}", "no choices"),
        (b'{"choices": []}', "no choices"),
        (b'{"choices": [7]}', "no choices"),
        (b'{"choices": [{"message": "hi"}]}', "no message"),
        (b'{"error": {"message": "overloaded"}}', "no choices"),
    ],
)
def test_garbage_is_no_reply(tmp_path, key, body, why):
    with serving(Answer(200, body)) as server:
        text = fail(model(tmp_path, server.url))
    assert f"no chat completion ({why})" in text
    assert "usually ends in /v1" in text
    assert len(text) < 800


def test_garbage_that_echoes_the_key_does_not_show_it(tmp_path, key):
    with serving(Answer(200, f"debug: Authorization: Bearer {KEY}".encode())) as server:
        assert "[key]" in fail(model(tmp_path, server.url))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (completion("", finish="length"), "reached its token limit (200 tokens) before it wrote anything"),
        (completion(None, finish="stop"), "sent an empty reply (finish reason stop)"),
        (completion("  \n"), "sent an empty reply"),
        (completion(None, refusal="I cannot help with kernels"), "refused to reply: I cannot help with kernels"),
        (completion("", finish="content_filter"), "stopped by the content filter"),
    ],
)
def test_silence_is_explained(tmp_path, key, answer, expected):
    with serving(answer) as server:
        assert expected in fail(model(tmp_path, server.url))


def test_a_reply_cut_off_is_passed_on_with_a_note(tmp_path, key):
    with serving(completion("half a ker", finish="length")) as server:
        reply = ask(model(tmp_path, server.url))
    assert reply.text == "half a ker"
    assert reply.note == "cut off at the token limit after 200 tokens; raise chat.coder.max_output_tokens"


def test_content_in_parts_and_odd_usage_are_read(tmp_path, key):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}, {"type": "image"}, 3]
    with serving(completion(parts, usage={"prompt_tokens": "many", "completion_tokens": -4})) as server:
        reply = ask(model(tmp_path, server.url))
    assert reply.text == "one two"
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (0, 0)


def test_an_unknown_model_has_tokens_but_no_price(tmp_path, key):
    with serving(completion()) as server:
        reply = ask(model(tmp_path, server.url, model="my-finetune"))
    assert reply.usage.usd is None
    assert reply.usage.input_tokens == 1000


def test_the_key_is_in_no_log_repr_or_pickle(tmp_path, key, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(completion(), error(500, "no")) as server:
        answering = model(tmp_path, server.url)
        reply = ask(answering)
        fail(answering)
    assert KEY not in caplog.text
    assert KEY not in repr(answering)
    assert KEY not in repr(vars(answering))
    assert KEY not in repr(reply)
    with pytest.raises(TypeError):
        pickle.dumps(answering)


def test_many_calls_at_once_and_one_after_the_other_in_new_loops(tmp_path, key):
    with serving(completion("ok")) as server:
        answering = model(tmp_path, server.url)

        async def several():
            return await asyncio.gather(*(answering.complete(request(i)) for i in range(1, 6)))

        assert len(asyncio.run(several())) == 5
        assert ask(answering).text == "ok"


def test_a_call_can_be_cancelled(tmp_path, key):
    with serving(Answer(hang=True)) as server:
        answering = model(tmp_path, server.url)

        async def cancelled():
            task = asyncio.ensure_future(answering.complete(request()))
            await asyncio.sleep(0.2)
            task.cancel()
            await task

        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled())


def test_no_key_for_openai_itself_is_a_config_error_before_any_call(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is not set") as caught:
        chat.load(config(tmp_path, chat__judge__model="gpt-5"), "judge")
    assert "replay" in caught.value.remedy


def test_no_model_is_a_config_error(tmp_path, key):
    with pytest.raises(ConfigError, match="no model is set for the coder"):
        chat.load(config(tmp_path), "coder")


def test_importing_the_chat_room_loads_no_openai(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys, pytest_cudaforge.chat.openai, pytest_cudaforge.coder, pytest_cudaforge.judge;"
        "assert not {'openai', 'torch', 'yaml', 'httpx2', 'pytest', 'jinja2'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": os.environ["PATH"]})
