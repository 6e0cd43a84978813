"""A chat model that says what it was told to say: for tests, here and in your repo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pytest_cudaforge.chat import ChatReply, ChatRequest
from pytest_cudaforge.errors import ForgeError, ProviderError
from pytest_cudaforge.records import Usage

Line: TypeAlias = str | ForgeError
Script: TypeAlias = Mapping[str, Sequence[Line]] | Callable[[ChatRequest], str]


@dataclass
class ScriptedModel:
    """``script`` maps a role to its replies, in order of the request's ordinal (1 is the first), or is a function from
    request to reply. A reply that is an exception from ``errors.py`` is raised. ``requests`` keeps what was asked.

    Replies are chosen by ordinal, not by counting calls, so that a resumed run asks on where it stopped.
    """

    script: Script
    usage: Usage = field(default_factory=lambda: Usage(input_tokens=1000, output_tokens=500, usd=0.01))
    name: str = "scripted"
    requests: list[ChatRequest] = field(default_factory=list)

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Raises ``ProviderError`` when the script has no such line."""
        self.requests.append(request)
        line = self._line(request)
        if isinstance(line, ForgeError):
            raise line
        return ChatReply(line, self.usage, self.name, 0.0, request.digest)

    def _line(self, request: ChatRequest) -> Line:
        if callable(self.script):
            return self.script(request)
        lines, ordinal = self.script.get(request.role, ()), request.key.ordinal
        if not 1 <= ordinal <= len(lines):
            raise ProviderError(
                f"the script has {len(lines)} line(s) for the {request.role}, number {ordinal} was asked for",
                expected="a script as long as the run",
            )
        return lines[ordinal - 1]
