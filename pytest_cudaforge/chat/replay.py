"""``provider: replay``: answers from recorded conversations (chat/record.py); a run costs nothing and plays anywhere.

A reply is found by target, source digest, language, role and ordinal. Prompts hold measured figures, so a prompt that
differs from the recorded one is noted, not refused. Only two things are errors: the target's source has changed since
the recording, and no reply is left.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge.chat import ChatReply, ChatRequest, ConversationKey, Role
from pytest_cudaforge.chat.record import Conversation, RecordedVerdict, read_conversations
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import ConfigError, ProviderError
from pytest_cudaforge.records import Usage

_RECORD_AGAIN = "record it again with a provider that answers: pytest --forge --forge-record FILE"


@dataclass(frozen=True)
class ReplayModel:
    """Immutable and shared: what comes next follows from the request's key alone, so a resumed run replays exactly."""

    conversations: tuple[Conversation, ...]

    @property
    def name(self) -> str:
        return "replay"

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Raises ``ProviderError`` where the recording does not fit the target, or has no reply left."""
        key, digest = request.key, request.digest
        talk = self._conversation(key.target, key.digest, key.language)
        reply = talk.reply(key.role, key.ordinal)
        if reply is None:
            raise _exhausted(talk, key)
        notes = [f"replayed from {Path(talk.path).name}"]
        if reply.prompt_digest and reply.prompt_digest != digest:
            notes.append("the prompt differs from the recorded one")
        if talk.target != key.target:
            notes.append(f"recorded as {talk.target}")
        # A replayed reply costs nothing: the recorded usage is history and must not count against today's budget.
        return ChatReply(
            reply.text, Usage(usd=0.0), f"replay:{reply.model or 'unknown'}", 0.0, digest, "; ".join(notes)
        )

    def verdicts(self, target: str, digest: str, language: str) -> tuple[RecordedVerdict, ...]:
        """The recorded rounds in order, for strategies that follow recorded parents and for reports; () if none."""
        try:
            return tuple(
                sorted(self._conversation(target, digest, language).verdicts, key=lambda verdict: verdict.round)
            )
        except ProviderError:
            return ()

    def repaired(self, key: ConversationKey) -> bool:
        """Whether the reply of ``key`` was returned to its author when this was recorded: the next one answers that.

        What goes back depends on figures that were measured there and then, so it cannot be decided anew here.
        """
        try:
            following = self._conversation(key.target, key.digest, key.language).reply(key.role, key.ordinal + 1)
        except ProviderError:  # the reply came from the run directory, and the recording is gone
            return False
        return following is not None and following.call.endswith("-repair")

    def only_elsewhere(self, target: str, digest: str, language: str) -> str:
        """Why there is nothing to play in ``language`` though the target is recorded in another; "" where there is."""
        others = sorted(
            {talk.language for talk in self.conversations if (talk.target, talk.digest) == (target, digest)}
        )
        if not others or language in others:
            return ""
        return f"its conversation is recorded for {', '.join(others)} only, not for {language}"

    def _conversation(self, target: str, digest: str, language: str) -> Conversation:
        fitting = [talk for talk in self.conversations if (talk.digest, talk.language) == (digest, language)]
        exact = [talk for talk in fitting if talk.target == target]
        # Ids start with a path from the rootdir; the same source below another rootdir is still the same target.
        moved = [talk for talk in fitting if talk.target.rpartition("::")[2] == target.rpartition("::")[2]]
        if exact:
            return exact[0]
        if len(moved) == 1:
            return moved[0]
        raise _absent(self.conversations, target, digest, language)


def _exhausted(talk: Conversation, key: ConversationKey) -> ProviderError:
    left = sum(1 for reply in talk.replies if reply.role == key.role)
    return ProviderError(
        f"no recorded reply is left for the {key.role} of {key.target} ({key.language}): "
        f"number {key.ordinal} was asked for, {talk.path} has {left}",
        expected="a recording as long as the run (fewer rounds, or the rounds going as they did when recorded)",
        remedy=f"lower rounds, or {_RECORD_AGAIN}",
    )


def _absent(conversations: Sequence[Conversation], target: str, digest: str, language: str) -> ProviderError:
    same = [talk for talk in conversations if talk.target == target]
    stale = [talk for talk in same if talk.language == language]
    if stale:
        known = ", ".join(f"{talk.digest[:12]} in {talk.path}" for talk in stale)
        return ProviderError(
            f"the source of {target} changed since its {language} conversation was recorded: "
            f"it is {digest[:12]} now, recorded: {known}",
            expected="a recording of the source as it is",
            remedy=f"undo the change, or {_RECORD_AGAIN}",
        )
    if same:
        known = ", ".join(sorted({talk.language for talk in same}))
        return ProviderError(
            f"no {language} conversation is recorded for {target}, only {known}",
            expected=f"a conversation for language {language}",
            remedy=f"set languages: [{known}], or {_RECORD_AGAIN}",
        )
    names = sorted({talk.target for talk in conversations})
    close = difflib.get_close_matches(target, names, n=1)
    hint = f"; did you mean the one of {close[0]}?" if close else f"; recorded: {', '.join(names[:8]) or 'nothing'}"
    return ProviderError(
        f"no conversation is recorded for {target}{hint}",
        expected="one in the files of chat.replay.paths",
        remedy=f"select recorded targets only, or {_RECORD_AGAIN}",
    )


def load(config: ForgeConfig, role: Role) -> ReplayModel:
    """Reads ``chat.replay.paths``. Raises ``ConfigError`` where they name nothing or hold something else."""
    files = _files(config.chat.replay.paths, role)
    conversations = tuple(talk for path in files for talk in read_conversations(path))
    places: dict[tuple[str, str, str], str] = {}
    for talk in conversations:
        key = (talk.target, talk.digest, talk.language)
        if key in places:
            raise ConfigError(
                f"{talk.target} ({talk.language}) is recorded twice for the same source: {places[key]} and {talk.path}",
                expected="one conversation for each target, source digest and language",
                remedy="delete one of them, or name only one in chat.replay.paths",
            )
        places[key] = talk.path
    return ReplayModel(conversations)


def _files(paths: Sequence[Path], role: Role) -> list[Path]:
    if not paths:
        raise ConfigError(
            f"chat.{role}.provider is replay, but chat.replay.paths is empty",
            expected="files or folders of .jsonl",
            remedy="add `chat: {replay: {paths: [conversations]}}` to cudaforge.yaml",
        )
    files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ConfigError(f"chat.replay.paths: {path} does not exist", expected="a .jsonl file or a folder of them")
        found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise ConfigError(f"chat.replay.paths: {path} holds no .jsonl file", expected="recorded conversations")
        files.update(dict.fromkeys(found))
    return list(files)
