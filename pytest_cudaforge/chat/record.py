"""Recorded conversations as JSON lines: the format, reading it, and the :class:`Recorder` that writes it.

A file holds any number of conversations, one after the other. Each starts with a header line and goes on with the
replies and, where known, the verdicts of its rounds::

    {"format": "cudaforge-conversation", "version": 1, "target": "layers.py::RMSNorm", "digest": "…", "language": "cpp"}
    {"role": "coder", "ordinal": 1, "text": "…", "prompt_digest": "…", "model": "gpt-5", "usage": {…}}
    {"verdict": {"round": 1, "kind": "first", "parent": null, "status": "PASSED", "speedup": 1.31}}

A reply is keyed by (target, digest, language, role, ordinal). Only ``role``, ``ordinal`` and ``text`` are required, so
that a conversation can be written by hand. Blank lines and lines that start with ``#`` are skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_cudaforge.chat import ChatReply, ChatRequest
from pytest_cudaforge.errors import ConfigError, StoreError
from pytest_cudaforge.records import Round, Usage, from_json, to_json

FORMAT, VERSION = "cudaforge-conversation", 1


@dataclass(frozen=True)
class RecordedReply:
    """``call``: which of a round's calls it answered ("judge", "judge-repair", ...), "" where that was not recorded."""

    role: str
    ordinal: int
    text: str
    prompt_digest: str = ""
    model: str = ""
    usage: Usage = field(default_factory=Usage)
    call: str = ""


@dataclass(frozen=True)
class RecordedVerdict:
    """What became of a round when it was recorded; ``speedup`` is against eager, None where nothing was timed."""

    round: int
    kind: str = ""
    parent: int | None = None
    status: str = ""
    speedup: float | None = None
    speedup_compile: float | None = None
    device: str = ""

    @classmethod
    def of(cls, turn: Round) -> RecordedVerdict:
        evaluation = turn.evaluation
        timing = evaluation.timing if evaluation else None
        return cls(
            round=turn.number,
            kind=turn.kind,
            parent=turn.parent,
            status=evaluation.status.value if evaluation else "",
            speedup=timing.speedup_eager if timing else None,
            speedup_compile=timing.speedup_compile if timing else None,
            device=evaluation.device if evaluation else "",
        )


@dataclass(frozen=True)
class Conversation:
    """All that was said about one target in one language; ``path`` is the file it came from, for messages."""

    target: str
    digest: str
    language: str
    replies: tuple[RecordedReply, ...] = ()
    verdicts: tuple[RecordedVerdict, ...] = ()
    path: str = field(default="", compare=False)

    def reply(self, role: str, ordinal: int) -> RecordedReply | None:
        return next((reply for reply in self.replies if (reply.role, reply.ordinal) == (role, ordinal)), None)

    def with_reply(self, reply: RecordedReply) -> Conversation:
        kept = [old for old in self.replies if (old.role, old.ordinal) != (reply.role, reply.ordinal)]
        return replace(self, replies=(*kept, reply))

    def with_verdict(self, verdict: RecordedVerdict) -> Conversation:
        kept = [old for old in self.verdicts if old.round != verdict.round]
        return replace(self, verdicts=(*kept, verdict))


# -- reading -----------------------------------------------------------------------------------------------------


def read_conversations(path: Path) -> tuple[Conversation, ...]:
    """All conversations of one file. Raises ``ConfigError`` with file and line for anything that is not the format."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the recorded conversation {path} cannot be read: {error}", expected="UTF-8 JSON lines"
        ) from error
    found: list[Conversation] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                _read_line(json.loads(line), found, path)
            except ValueError as error:
                raise _malformed(path, number, str(error)) from None
    return tuple(found)


def _malformed(path: Path, line: int, why: str) -> ConfigError:
    return ConfigError(
        f"{path}:{line}: not a line of a recorded conversation: {why}",
        expected=f'{{"format": "{FORMAT}", …}}, {{"role": …, "ordinal": …, "text": …}} or {{"verdict": {{…}}}}',
        remedy="mend or delete the line, or record again with --forge-record",
    )


def _read_line(data: Any, found: list[Conversation], path: Path) -> None:
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    if "format" in data:
        found.append(_read_header(data, path))
    elif not found:
        raise ValueError("a reply or verdict comes before any header")
    elif "verdict" in data:
        found[-1] = found[-1].with_verdict(from_json(RecordedVerdict, data["verdict"]))
    else:
        reply = from_json(RecordedReply, data)
        if reply.role not in ("coder", "judge") or reply.ordinal < 1:
            raise ValueError("role must be coder or judge, ordinal at least 1")
        if found[-1].reply(reply.role, reply.ordinal):
            raise ValueError(f"{reply.role} reply {reply.ordinal} is there twice")
        found[-1] = found[-1].with_reply(reply)


def _read_header(data: dict[str, Any], path: Path) -> Conversation:
    if data["format"] != FORMAT or data.get("version") != VERSION:
        raise ValueError(
            f"format {data['format']!r} version {data.get('version')!r}; readable here: {FORMAT!r} version {VERSION}"
        )
    names = ("target", "digest", "language")
    missing = [name for name in names if not isinstance(data.get(name), str)]
    if missing:
        raise ValueError("the header lacks " + ", ".join(missing))
    return Conversation(data["target"], data["digest"], data["language"], path=str(path))


# -- writing -----------------------------------------------------------------------------------------------------


def render_conversations(conversations: Iterable[Conversation]) -> str:
    """The text of a file; reading it gives the same conversations."""
    lines: list[str] = []
    for talk in conversations:
        header = {
            "format": FORMAT,
            "version": VERSION,
            "target": talk.target,
            "digest": talk.digest,
            "language": talk.language,
        }
        lines.append(json.dumps(header, ensure_ascii=False))
        lines += [json.dumps(to_json(reply), ensure_ascii=False) for reply in talk.replies]
        lines += [json.dumps({"verdict": to_json(verdict)}) for verdict in talk.verdicts]
    return "".join(line + "\n" for line in lines)


@dataclass(frozen=True)
class Recorder:
    """Writes what is said into ``path``, whole and atomically after every reply, so that conversations of targets that
    are forged at the same time (or by two runs) do not interleave and a killed run leaves a readable file.

    A recording is of the target as it is now: one of the same target and language with an older digest is replaced.
    Raises ``StoreError`` where the file cannot be written.
    """

    path: Path

    def record(self, request: ChatRequest, reply: ChatReply, call: str = "") -> None:
        key = request.key
        said = RecordedReply(key.role, key.ordinal, reply.text, reply.prompt_digest, reply.model, reply.usage, call)
        self._update(Conversation(key.target, key.digest, key.language).with_reply(said))

    def verdict(self, target: str, digest: str, language: str, turn: Round) -> None:
        """Adds what became of a finished round; replaying follows the recorded parents and shows these verdicts."""
        self._update(Conversation(target, digest, language).with_verdict(RecordedVerdict.of(turn)))

    @property
    def _lock(self) -> Path:
        """Two runs may record into one file. Its lock lies elsewhere: recordings stand in repositories."""
        name = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir(), f"cudaforge-{os.getuid()}-{name}.lock")

    def _update(self, news: Conversation) -> None:
        from filelock import FileLock

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._lock):
                old = read_conversations(self.path) if self.path.exists() else ()
                _write(self.path, render_conversations(_merge(old, news)))
        except OSError as error:
            raise StoreError(
                f"the recording {self.path} cannot be written: {error}",
                expected="a writable file with room on its disk",
                remedy="choose another place with --forge-record",
            ) from error


def _merge(old: Sequence[Conversation], news: Conversation) -> list[Conversation]:
    merged: list[Conversation] = []
    place: int | None = None
    for talk in old:
        if (talk.target, talk.language) == (news.target, news.language):
            if talk.digest != news.digest:
                continue
            for reply in news.replies:
                talk = talk.with_reply(reply)
            for verdict in news.verdicts:
                talk = talk.with_verdict(verdict)
            place = len(merged)
        merged.append(talk)
    return merged if place is not None else [*merged, news]


def _write(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
