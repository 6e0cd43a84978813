"""Who answers the prompts: the :class:`ChatModel` protocol, and :func:`load` that picks a provider by name.

A provider is one file here (``openai``, ``command``, ``replay``) or anybody's ``package.module:factory``; the factory
is called as ``factory(config, role)`` with the :class:`~pytest_cudaforge.config.ForgeConfig` and returns a ChatModel.
No provider's library is imported before its provider is loaded.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pytest_cudaforge.errors import ConfigError
from pytest_cudaforge.records import Usage

if TYPE_CHECKING:
    from pytest_cudaforge.config import ForgeConfig

__all__ = [
    "ChatModel",
    "ChatReply",
    "ChatRequest",
    "ConversationKey",
    "Message",
    "ProcessGate",
    "Role",
    "estimate_tokens",
    "load",
    "prompt_digest",
    "render_text",
]

Role = Literal["coder", "judge"]


@dataclass(frozen=True)
class Message:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class ConversationKey:
    """Names one reply for ever: what a recording is looked up by (never by prompt text, which holds measured figures).

    ``digest`` is the target's source digest; ``ordinal`` counts the calls of this role for this target and language
    from 1, repairs included; ``round`` is the loop's round number, for people and programs to read, not a key.
    """

    target: str
    digest: str
    language: str
    role: Role
    ordinal: int
    round: int = 0


@dataclass(frozen=True)
class ChatRequest:
    """``schema`` is a JSON schema for the reply, a wish: a server that has no structured output ignores it."""

    role: Role
    messages: tuple[Message, ...]
    key: ConversationKey
    schema: Mapping[str, Any] | None = None

    @property
    def digest(self) -> str:
        return prompt_digest(self.messages)


@dataclass(frozen=True)
class ChatReply:
    """``seconds`` is wall time with retries; ``note`` is for readers of the trace (cut off, replayed, ...)."""

    text: str
    usage: Usage
    model: str
    seconds: float
    prompt_digest: str
    note: str = ""


class ChatModel(Protocol):
    """One method. Raises ``ProviderError`` (nothing to be had) or ``ReplyPending`` (come back later)."""

    @property
    def name(self) -> str: ...

    async def complete(self, request: ChatRequest) -> ChatReply: ...


class ProcessGate(Protocol):
    """The part of ``lease.DeviceLease`` that providers with child processes need: stop these while a block is timed."""

    def register(self, pgid: int) -> None: ...

    def unregister(self, pgid: int) -> None: ...


def prompt_digest(messages: Sequence[Message]) -> str:
    """sha256 over roles and contents."""
    data = json.dumps([[message.role, message.content] for message in messages], ensure_ascii=False)
    return hashlib.sha256(data.encode()).hexdigest()


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Tokens of a prompt, erring on the dear side: code runs at 3 to 4 characters a token."""
    return sum(len(message.content) for message in messages) // 3 + 8 * len(messages)


def render_text(messages: Sequence[Message]) -> str:
    """A conversation as one text, for programs that read a prompt on stdin and for prompt.md."""
    if len(messages) == 1:
        return messages[0].content
    titles = {"system": "Instructions", "user": "Task", "assistant": "Your earlier reply"}
    return "\n\n".join(f"===== {titles[message.role]} =====\n\n{message.content}" for message in messages) + "\n"


_PROVIDERS = {
    "openai": "pytest_cudaforge.chat.openai:load",
    "command": "pytest_cudaforge.chat.command:load",
    "replay": "pytest_cudaforge.chat.replay:load",
    "compiler": "pytest_cudaforge.compiler:load",
}


def load(config: ForgeConfig, role: Role, lease: ProcessGate | None = None) -> ChatModel:
    """The model that plays ``role``. Raises ``ConfigError`` where the settings cannot work (no model, ...)."""
    provider = getattr(config.chat, role).provider
    if provider not in _PROVIDERS:
        model: ChatModel = _find(provider, role)(config, role)
        return model
    factory = _find(_PROVIDERS[provider], role)
    return factory(config, role, lease) if provider == "command" else factory(config, role)  # type: ignore[no-any-return]


def _find(path: str, role: Role) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"chat.{role}.provider: {path} cannot be loaded: {error}",
            expected="openai, command, replay, compiler or an importable package.module:factory",
            remedy="install the package that holds it, or mend the name",
        ) from error
    if not callable(found):
        raise ConfigError(
            f"chat.{role}.provider: {path} is not callable", expected="a factory(config, role) -> ChatModel"
        )
    return found
