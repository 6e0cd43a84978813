"""One target's calls to the models: found on disk, or reserved, asked, stored and settled. Never paid twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_cudaforge.budget import Account
from pytest_cudaforge.chat import (
    ChatModel,
    ChatReply,
    ChatRequest,
    ConversationKey,
    Message,
    Role,
    estimate_tokens,
    render_text,
)
from pytest_cudaforge.chat.record import Recorder
from pytest_cudaforge.events import EventKind
from pytest_cudaforge.records import Round, Target, Usage
from pytest_cudaforge.store import Call, RoundFolder, StoredReply

__all__ = ["Exchange", "Price", "StopSignal", "Stopped"]

#: (role, input tokens) -> the most that such a call may cost in USD, or None where no price is known.
Price = Callable[[Role, int], "float | None"]


@dataclass
class StopSignal:
    """Set once, seen by every target before its next step; ``reason`` is what the user did."""

    reason: str = ""

    def request(self, reason: str) -> None:
        self.reason = self.reason or reason


class Stopped(Exception):
    """A stop was asked for: raised before a step that would cost something."""


@dataclass
class Exchange:
    """``tell(kind, round, text)`` reports a call. ``open_usages`` are those of the round that is not finished yet."""

    target: Target
    language: str
    models: Mapping[Role, ChatModel]
    account: Account
    price: Price
    stop: StopSignal
    recorder: Recorder | None
    tell: Callable[[EventKind, int, str], None]
    ordinals: dict[Role, int] = field(default_factory=lambda: {"coder": 0, "judge": 0})
    open_usages: list[Usage] = field(default_factory=list)

    async def ask(
        self, folder: RoundFolder, call: Call, messages: tuple[Message, ...], schema: Mapping[str, Any] | None = None
    ) -> StoredReply:
        """The stored reply of this call; asked for, paid and stored where there is none.

        Raises ``ProviderError``, ``ReplyPending``, ``BudgetExhausted``, ``StoreError``, :class:`Stopped`.
        """
        request = ChatRequest(_role(call), messages, self._key(_role(call), folder.number), schema)
        reply = folder.reply(call) or await self._pay(folder, call, request)
        self.open_usages.append(reply.usage)
        self._count(call, request, reply)
        return reply

    def goes_back(self, role: Role, doubtful: bool) -> bool:
        """Whether the last reply, which could be read, is returned for correction: where it is ``doubtful``, or in a
        recording where it was then."""
        repaired = getattr(self.models[role], "repaired", None)
        if repaired is None:
            return doubtful
        key = dataclasses.replace(self._key(role, 0), ordinal=self.ordinals[role])
        return bool(repaired(key))

    def check(self) -> None:
        """Raises :class:`Stopped` after a Ctrl-C, ``BudgetExhausted`` where the minutes are over."""
        if self.stop.reason:
            raise Stopped(self.stop.reason)
        self.account.check_time()

    def recall(self, entry: Round, replies: Mapping[Call, StoredReply]) -> None:
        """Count a round that was finished before; a recording must be whole after a resume."""
        for call, reply in replies.items():
            self._count(call, ChatRequest(_role(call), (), self._key(_role(call), entry.number)), reply)
        self.close(entry)

    def close(self, entry: Round) -> None:
        """The round is finished and stored."""
        self.open_usages.clear()
        if self.recorder is not None:
            self.recorder.verdict(self.target.id, self.target.digest, self.language, entry)

    async def _pay(self, folder: RoundFolder, call: Call, request: ChatRequest) -> StoredReply:
        model = self.models[request.role]
        self.check()
        with self.account.reserve(self.price(request.role, estimate_tokens(request.messages))) as reservation:
            folder.write_prompt(call, render_text(request.messages))
            self.tell("asked", folder.number, f"{call}: {model.name}")
            reply = await model.complete(request)
            # Settled first: where the disk is full, the money is gone all the same.
            reservation.settle(reply.usage)
            stored = folder.write_reply(call, _storable(reply))
        self.tell("replied", folder.number, f"{call}: {model.name}, {reply.seconds:.1f} s")
        return stored

    def _key(self, role: Role, number: int) -> ConversationKey:
        return ConversationKey(self.target.id, self.target.digest, self.language, role, self.ordinals[role] + 1, number)

    def _count(self, call: Call, request: ChatRequest, reply: StoredReply) -> None:
        self.ordinals[request.role] += 1
        if self.recorder is not None:
            said = ChatReply(reply.text, reply.usage, reply.model, reply.seconds, reply.prompt_digest, reply.note)
            self.recorder.record(request, said, call)


def _role(call: Call) -> Role:
    return "judge" if call.startswith("judge") else "coder"


def _storable(reply: ChatReply) -> StoredReply:
    return StoredReply(**{item.name: getattr(reply, item.name) for item in dataclasses.fields(StoredReply)})
