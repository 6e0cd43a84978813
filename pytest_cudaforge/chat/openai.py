"""``provider: openai``: Chat Completions through the official SDK, at OpenAI or any compatible ``base_url``.

The SDK does retries and back-off. Structured output is asked for where a request carries a schema, and given up for
this run when the server refuses it; the same goes for ``max_completion_tokens`` against the older ``max_tokens``.

The key is read from the environment variable that ``api_key_env`` names and from nowhere else. It is in no message,
repr or record; an SDK exception (which holds the request and its headers) is never chained to ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_cudaforge.chat import ChatReply, ChatRequest, Role
from pytest_cudaforge.chat import prices as price_tables
from pytest_cudaforge.config import ForgeConfig, RoleConfig
from pytest_cudaforge.errors import ConfigError, ProviderError
from pytest_cudaforge.records import Usage

if TYPE_CHECKING:
    import openai

_KEY_LIKE = re.compile(r"\b(?:[sp]k[-_]|Bearer )[A-Za-z0-9*._-]{6,}")
_MAX_MESSAGE = 600


class _Secret:
    """A key that shows itself nowhere but in :meth:`reveal`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def hide(self, text: str) -> str:
        """``text`` without the key."""
        return text.replace(self._value, "[key]") if self._value else text

    def redact(self, text: str) -> str:
        """``text`` without the key, or anything that looks like one, cut to a message's length."""
        return _KEY_LIKE.sub("[key]", self.hide(text))[:_MAX_MESSAGE]

    def __repr__(self) -> str:
        return "[key]"

    def __reduce__(self) -> str:
        raise TypeError("a key is not copied or stored")


@dataclass(frozen=True)
class _Answer:
    """What we read out of a response's body."""

    text: str
    finish: str
    usage: Usage
    model: str


class OpenAIModel:
    """One role's model. Holds no connection between calls, so it works in any event loop."""

    def __init__(self, settings: RoleConfig, role: Role, key: str, prices: price_tables.Prices) -> None:
        self._settings = settings
        self._role = role
        self._key = _Secret(key)
        self._prices = prices
        #: Parameters this server has refused; learned once a call without them went well.
        self._refused: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self._settings.model

    def __repr__(self) -> str:
        return f"OpenAIModel({self._settings.model!r}, base_url={self._settings.base_url!r})"

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Raises ``ProviderError`` for anything but a reply with text in it."""
        start = time.monotonic()
        body = await self._ask(request)
        answer = self._read(body)
        note = ""
        if answer.finish == "length":
            note = (
                f"cut off at the token limit after {answer.usage.output_tokens} tokens; "
                f"raise chat.{self._role}.max_output_tokens"
            )
        usage = self._prices.settle(self._settings.model, answer.usage)
        return ChatReply(answer.text, usage, answer.model, time.monotonic() - start, request.digest, note)

    # -- asking --------------------------------------------------------------------------------------------------

    async def _ask(self, request: ChatRequest) -> str:
        """The body of the server's answer. A refused parameter is left out and the call made again."""
        refused = self._refused
        while True:
            parameters = self._parameters(request, refused)
            # Failures come back as values: raised inside the handler they would carry the SDK's exception with them.
            outcome = await self._send(parameters)
            if isinstance(outcome, str):
                self._refused = refused
                return outcome
            failure, culprit = outcome
            if not culprit:
                raise failure
            refused |= {culprit}

    def _parameters(self, request: ChatRequest, refused: frozenset[str]) -> dict[str, Any]:
        settings = self._settings
        parameters: dict[str, Any] = {
            "model": settings.model,
            "messages": [{"role": message.role, "content": message.content} for message in request.messages],
        }
        if settings.temperature is not None:
            parameters["temperature"] = settings.temperature
        if settings.max_output_tokens is not None:
            name = "max_tokens" if "max_completion_tokens" in refused else "max_completion_tokens"
            parameters[name] = settings.max_output_tokens
        if request.schema is not None and "response_format" not in refused:
            schema = {"name": f"cudaforge_{request.role}", "strict": True, "schema": dict(request.schema)}
            parameters["response_format"] = {"type": "json_schema", "json_schema": schema}
        if settings.extra:
            parameters["extra_body"] = dict(settings.extra)
        return parameters

    async def _send(self, parameters: dict[str, Any]) -> str | tuple[ProviderError, str]:
        """The body, or the failure and the parameter to leave out ("" where leaving one out cannot help)."""
        import openai

        settings = self._settings
        # The SDK's limit is for each read; a server that trickles bytes must not hold us for ever.
        deadline_s = (settings.timeout_s + 30) * (settings.max_retries + 1)
        try:
            async with self._client() as client:
                call = client.chat.completions.with_raw_response.create(**parameters)
                response = await asyncio.wait_for(call, deadline_s)
                # A server may echo what it was sent, and a reply ends up in records.
                return self._key.hide(response.text)
        except openai.APIStatusError as error:
            message = self._key.redact(_server_message(error))
            return self._status_failure(error.status_code, message), _culprit(error.status_code, message, parameters)
        except (openai.APITimeoutError, asyncio.TimeoutError):
            return self._timeout(), ""
        except (openai.OpenAIError, UnicodeError, OSError) as error:
            return self._connection_failure(self._key.redact(str(error.__cause__ or error))), ""

    def _client(self) -> openai.AsyncOpenAI:
        import openai

        settings = self._settings
        return openai.AsyncOpenAI(
            api_key=self._key.reveal() or "no-key",
            base_url=settings.base_url,
            timeout=settings.timeout_s,
            max_retries=settings.max_retries,
        )

    # -- what can go wrong ---------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        return self._settings.base_url or os.environ.get("OPENAI_BASE_URL") or "api.openai.com"

    def _status_failure(self, status: int, message: str) -> ProviderError:
        said = f"{self._place} answered {status}: {message or '(no message)'}"
        variable, role = self._settings.api_key_env, f"chat.{self._role}"
        if status in (401, 403):
            state = "is set, but refused" if self._key.reveal() else "is not set"
            return ProviderError(
                said,
                expected=f"a valid key for model {self.name} in the environment variable {variable} (it {state})",
                remedy=f"set {variable}, or name another variable in {role}.api_key_env",
            )
        if status == 404:
            return ProviderError(
                said,
                expected=f"a server with the model {self.name!r} at this address",
                remedy=f"mend {role}.model or {role}.base_url (it usually ends in /v1)",
            )
        if status == 429:
            return ProviderError(
                said,
                expected=f"room within the rate limit and quota, after {self._settings.max_retries} retries",
                remedy=f"wait, lower concurrency, raise {role}.max_retries, or mend the account's quota",
            )
        if status >= 500:
            return ProviderError(
                said,
                expected=f"a working server, after {self._settings.max_retries} retries",
                remedy="run again later: finished rounds are kept and the run resumes",
            )
        return ProviderError(
            said,
            expected="a request this server accepts",
            remedy=f"check {role}.model, temperature, max_output_tokens and extra",
        )

    def _timeout(self) -> ProviderError:
        settings = self._settings
        return ProviderError(
            f"{self._place} did not answer within {settings.timeout_s:g} s ({settings.max_retries} retries)",
            expected="a reply in time",
            remedy=f"raise chat.{self._role}.timeout_s, or check the server",
        )

    def _connection_failure(self, message: str) -> ProviderError:
        return ProviderError(
            f"{self._place} cannot be reached: {message or 'connection error'}",
            expected="an OpenAI-compatible server at this address",
            remedy=f"check the network, a proxy, and chat.{self._role}.base_url",
        )

    def _garbage(self, why: str, body: str) -> ProviderError:
        return ProviderError(
            f"{self._place} answered with something that is no chat completion ({why}): "
            f"{self._key.redact(' '.join(body[:200].split())) or '(empty)'}",
            expected="a Chat Completions response",
            remedy=f"check chat.{self._role}.base_url (it usually ends in /v1)",
        )

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, body: str) -> _Answer:
        try:
            data = json.loads(body)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise self._garbage("not a JSON object", body)
        choices = data.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self._garbage("no choices", body)
        choice = choices[0]
        message = choice.get("message")
        if not isinstance(message, dict):
            raise self._garbage("no message", body)
        usage = _usage(data.get("usage"))
        text, finish = _content(message.get("content")), str(choice.get("finish_reason") or "")
        if not text.strip():
            raise self._silence(finish, usage, _content(message.get("refusal")))
        return _Answer(text, finish, usage, str(data.get("model") or self.name))

    def _silence(self, finish: str, usage: Usage, refusal: str) -> ProviderError:
        if finish == "length":
            return ProviderError(
                f"{self.name} reached its token limit ({usage.output_tokens} tokens) before it wrote anything",
                expected="room for the model's reasoning and its reply",
                remedy=f"raise chat.{self._role}.max_output_tokens, or lower the reasoning effort (extra)",
            )
        if refusal or finish == "content_filter":
            return ProviderError(
                f"{self.name} refused to reply: {self._key.redact(refusal) or 'stopped by the content filter'}",
                expected="a reply",
                remedy=f"try another chat.{self._role}.model",
            )
        return ProviderError(
            f"{self.name} sent an empty reply (finish reason {finish or 'not given'})",
            expected="text",
            remedy=f"run again, or try another chat.{self._role}.model",
        )


def _server_message(error: openai.APIStatusError) -> str:
    body: object = error.body
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, Mapping) else inner
        if message:
            return " ".join(str(message).split())
    return " ".join(error.response.text.split()) if not isinstance(body, Mapping) else json.dumps(dict(body))


def _culprit(status: int, message: str, parameters: Mapping[str, Any]) -> str:
    """The optional parameter behind a refusal. Servers word it in many ways, and a refused call costs nothing: where
    the message does not name the token limit, structured output is what most servers lack."""
    if status not in (400, 404, 422, 501):
        return ""
    if "max_completion_tokens" in parameters and "max_completion_tokens" in message:
        return "max_completion_tokens"
    return "response_format" if "response_format" in parameters and status != 404 else ""


def _content(content: object) -> str:
    """Text, also where a server sends it in parts."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _usage(data: object) -> Usage:
    if not isinstance(data, dict):
        return Usage()
    details = data.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return Usage(_count(data.get("prompt_tokens")), _count(data.get("completion_tokens")), _count(cached))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def load(config: ForgeConfig, role: Role) -> OpenAIModel:
    """Raises ``ConfigError`` where no model is named, or no key is there for a server that certainly wants one."""
    settings: RoleConfig = getattr(config.chat, role)
    if not settings.model:
        raise ConfigError(
            f"no model is set for the {role}",
            expected="the name of a model that the server offers",
            remedy="set chat.coder.model in cudaforge.yaml, or CUDAFORGE_CHAT_CODER_MODEL",
        )
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key and not (settings.base_url or os.environ.get("OPENAI_BASE_URL")):
        raise ConfigError(
            f"no key for the {role}: the environment variable {settings.api_key_env} is not set",
            expected="an API key in it (keys are read from nowhere else)",
            remedy=f"export {settings.api_key_env}=..., or set chat.{role}.base_url to a server that needs none, "
            "or use provider: command, replay or compiler",
        )
    return OpenAIModel(settings, role, key, price_tables.load(config.prices))
