"""The run directory: every prompt, reply, candidate and verdict is on disk before the next step begins.

::

    .cudaforge/runs/<slug>/<language>/
        target.json                     id, source digest, configuration digest, device
        torch-compile.txt               the kernels torch.compile wrote for the target, where they were caught
        round-03/
            proposal.json               what the strategy asked for
            judge-prompt.md judge-reply.md feedback.json
            prompt.md reply.md          repair-prompt.md repair-reply.md where a reply did not parse
            kernel.cpp plan.py          the candidate
            evaluation.json round.json  round.json is written last: with it the round is finished
            profile.json profile.ncu-rep  what a profiler saw of it, where a later round asked; round.json has none
        trace.json                      the outcome

Files are written by rename, so a run killed at any moment leaves whole files. ``round.json`` holds the whole round:
it is the truth on resume, the other files are there to be read (and, in an unfinished round, to be continued from).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from filelock import FileLock, Timeout

from pytest_cudaforge import durable
from pytest_cudaforge.errors import StoreError
from pytest_cudaforge.records import (
    Baseline,
    Candidate,
    Evaluation,
    Feedback,
    Profile,
    Proposal,
    Round,
    Target,
    Trace,
    Usage,
    from_json,
    to_json,
)

__all__ = ["CALLS", "Call", "Holder", "RoundFolder", "RunStore", "StoredReply", "TargetStore", "total_usage"]

FORMAT = 1

#: The calls a round may make, and the names of their files.
Call = Literal["judge", "judge-repair", "coder", "coder-repair"]
CALLS: tuple[Call, ...] = ("judge", "judge-repair", "coder", "coder-repair")
_CALL_FILES: dict[Call, tuple[str, str]] = {
    "judge": ("judge-prompt.md", "judge-reply.md"),
    "judge-repair": ("judge-repair-prompt.md", "judge-repair-reply.md"),
    "coder": ("prompt.md", "reply.md"),
    "coder-repair": ("repair-prompt.md", "repair-reply.md"),
}
_HEADER = "<!-- cudaforge "
_FRESH = "start anew with --forge-fresh (the old run is moved aside, not deleted)"

Record = TypeVar("Record")


@dataclass(frozen=True)
class StoredReply:
    """A model's reply with what it cost. ``text`` is what was stored: unpaired surrogates are already replaced."""

    text: str
    model: str
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0
    prompt_digest: str = ""
    note: str = ""


@dataclass(frozen=True)
class Holder:
    """The run that holds a target's lock."""

    pid: int | None
    host: str
    since: str

    def __str__(self) -> str:
        if self.pid is None:
            return "another run (it did not leave its name)"
        return f"another run: process {self.pid} on {self.host}, since {self.since}"


class RunStore:
    """All runs of one repo, under ``run_dir`` (default ``.cudaforge``). Creating it touches nothing."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def target(self, target: Target, language: str) -> TargetStore:
        """The store of one target in one language. Touches nothing."""
        return TargetStore(self.run_dir, target, language)


class TargetStore:
    """One target's rounds in one language. :meth:`acquire`, then :meth:`open`, then read and write, then release."""

    def __init__(self, run_dir: Path, target: Target, language: str) -> None:
        self.target = target
        self.language = language
        self._run_dir = run_dir
        self._slug_dir = run_dir / "runs" / target.slug
        self.directory = self._slug_dir / language
        self._holder_path = self._slug_dir / f"{language}.holder.json"
        self._lock: FileLock | None = None

    # -- the lock ----------------------------------------------------------------------------------------------

    def acquire(self) -> Holder | None:
        """Try to take the target's lock without waiting; returns who holds it, or None when it is ours now."""
        with _situation(self._slug_dir):
            self._slug_dir.mkdir(parents=True, exist_ok=True)
            _hide_from_git(self._run_dir)
            lock = FileLock(self._slug_dir / f"{self.language}.lock", thread_local=False)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return self._read_holder()
            self._lock = lock
            now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            holder = Holder(os.getpid(), socket.gethostname(), now)
            _write_json(self._holder_path, to_json(holder))
        return None

    def release(self) -> None:
        """Give the lock back. Harmless when it is not held."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):
            self._holder_path.unlink()
        self._lock.release()
        self._lock = None

    def _read_holder(self) -> Holder:
        try:
            return from_json(Holder, json.loads(self._holder_path.read_text()))  # type: ignore[no-any-return]
        except (OSError, ValueError):
            # Between taking the lock and writing the name there is a moment without one.
            return Holder(None, "", "")

    # -- the run -----------------------------------------------------------------------------------------------

    def open(self, *, config_digest: str, device: str, fresh: bool = False) -> tuple[str, ...]:
        """Begin or resume; the lock must be held. Returns notes for the user.

        Rounds of a reference that has changed since, or measured on another device, are moved aside: their verdicts
        say nothing about what is here now. A changed configuration keeps them.
        """
        with _situation(self.directory):
            notes = self._set_aside_if(fresh, device)
            self.directory.mkdir(parents=True, exist_ok=True)
            header = self._read_header()
            if header and header.get("config_digest") != config_digest:
                notes.append("the configuration changed since the last run; its rounds are kept")
            _write_json(self.directory / "target.json", self._header(config_digest, device))
            for folder in self._round_folders():
                _remove_torn_files(folder)
        return tuple(notes)

    def _set_aside_if(self, fresh: bool, device: str) -> list[str]:
        if not self.directory.exists():
            return []
        reason = "--forge-fresh was given" if fresh else self._why_invalid(self._read_header(), device)
        if not reason:
            return []
        number = 1
        while (aside := self._slug_dir / f"{self.language}.old-{number}").exists():
            number += 1
        os.rename(self.directory, aside)
        durable.flush_directory(self._slug_dir)
        return [f"{reason}: the earlier rounds were moved to {aside}"]

    def _why_invalid(self, header: Mapping[str, Any], device: str) -> str:
        if not header:
            return ""
        if header.get("id") != self.target.id:
            raise StoreError(
                f"{self.directory} belongs to {header.get('id')!r}",
                expected=f"rounds of {self.target.id!r}",
                remedy="give one of the two targets another name= or move the folder away",
            )
        if header.get("source_digest") != self.target.digest:
            return "the reference changed"
        if header.get("device") != device:
            return f"the rounds were measured on {header.get('device')!r}, not on {device!r}"
        return ""

    def _header(self, config_digest: str, device: str) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "id": self.target.id,
            "name": self.target.name,
            "language": self.language,
            "source_digest": self.target.digest,
            "config_digest": config_digest,
            "device": device,
        }

    def _read_header(self) -> dict[str, Any]:
        path = self.directory / "target.json"
        if not path.exists():
            return {}
        data = _read_json(path)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise StoreError(f"{path}: written by another version", expected=f"format {FORMAT}", remedy=_FRESH)
        return data

    # -- rounds ------------------------------------------------------------------------------------------------

    def rounds(self) -> tuple[Round, ...]:
        """The finished rounds, in order, up to the first unfinished one."""
        finished: list[Round] = []
        with _situation(self.directory):
            while (entry := self.round(len(finished) + 1).finished()) is not None:
                finished.append(entry)
        return tuple(finished)

    def round(self, number: int) -> RoundFolder:
        """The folder of round ``number`` (from 1); it need not exist yet."""
        return RoundFolder(self.directory / f"round-{number:02d}", number)

    def write_generated(self, baselines: Sequence[Baseline]) -> None:
        """torch.compile's own kernels by workload, where they were caught."""
        parts = [f"# workload {line.workload}\n\n{line.generated}\n" for line in baselines if line.generated]
        if parts:
            with _situation(self.directory):
                durable.write_file(self.directory / "torch-compile.txt", _storable("\n".join(parts)))

    def write_trace(self, trace: Trace) -> None:
        """The outcome, rewritten whenever the run ends. Candidates stay in their round's folder."""
        with _situation(self.directory):
            _write_json(self.directory / "trace.json", to_json(trace))

    def trace(self) -> Trace | None:
        """The last outcome written, or None."""
        return _read_record(Trace, self.directory / "trace.json")

    def _round_folders(self) -> Sequence[Path]:
        return sorted(path for path in self.directory.glob("round-*") if path.is_dir())


class RoundFolder:
    """One round on disk. Every write is durable when it returns; every read answers None where nothing was written."""

    def __init__(self, directory: Path, number: int) -> None:
        self.directory = directory
        self.number = number

    def begin(self, propose: Callable[[], Proposal]) -> Proposal:
        """The proposal of this round: the stored one where the round was begun before, else what ``propose`` says."""
        stored = _read_record(Proposal, self.directory / "proposal.json")
        if stored is not None:
            return stored
        proposal = propose()
        with _situation(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            durable.flush_directory(self.directory.parent)
        self._write("proposal.json", _dump(to_json(proposal)))
        return proposal

    @property
    def begun(self) -> bool:
        return (self.directory / "proposal.json").exists()

    def write_prompt(self, call: Call, text: str) -> None:
        """The prompt as a person (or a command on its stdin) reads it."""
        self._write(_CALL_FILES[call][0], _storable(text))

    def write_reply(self, call: Call, reply: StoredReply) -> StoredReply:
        """Store a reply with its usage in one file, so that neither can be there without the other."""
        clean = StoredReply(_storable(reply.text), *_rest(reply))
        header = {key: value for key, value in to_json(clean).items() if key != "text"}
        # A comment ends at "-->"; the escape keeps the header on one line whatever a provider calls its model.
        line = json.dumps(header).replace("-->", "--\\u003e")
        self._write(_CALL_FILES[call][1], f"{_HEADER}{line} -->\n{clean.text}")
        return clean

    def reply(self, call: Call) -> StoredReply | None:
        """The stored reply of a call. Raises :class:`StoreError` where its first line was edited away."""
        path = self.directory / _CALL_FILES[call][1]
        text = _read_text(path)
        if text is None:
            return None
        first, newline, body = text.partition("\n")
        try:
            if not newline or not first.startswith(_HEADER):
                raise ValueError("its first line is not the header that was written")
            data = json.loads(first[len(_HEADER) : -len(" -->")])
            return from_json(StoredReply, {**data, "text": body})  # type: ignore[no-any-return]
        except ValueError as error:
            raise StoreError(f"{path}: {error}", expected="the file as it was written", remedy=_FRESH) from error

    def replies(self) -> dict[Call, StoredReply]:
        """All stored replies of this round, in the order of the calls."""
        found = ((call, self.reply(call)) for call in CALLS)
        return {call: reply for call, reply in found if reply is not None}

    def usage(self) -> Usage:
        """What this round's replies cost so far."""
        return total_usage([reply.usage for reply in self.replies().values()])

    def write_candidate(self, candidate: Candidate) -> None:
        for name, text in candidate.files:
            self._write(Path(name).name, text)

    def write_feedback(self, feedback: Feedback) -> None:
        self._write("feedback.json", _dump(to_json(feedback)))

    def write_evaluation(self, evaluation: Evaluation) -> None:
        self._write("evaluation.json", _dump(to_json(evaluation)))

    def evaluation(self) -> Evaluation | None:
        return _read_record(Evaluation, self.directory / "evaluation.json")

    def write_profile(self, profile: Profile) -> Profile:
        """Keep a profile of this round's candidate, and the profiler's own file beside it: ``report`` names that.

        Returned is what can be read from now on.
        """
        source = Path(profile.report) if profile.report else None
        name = f"profile{source.suffix}" if source is not None and source.is_file() else ""
        if source is not None and name and source != self.directory / name:
            self._write(name, source.read_bytes())
        self._write("profile.json", _dump(to_json(dataclasses.replace(profile, report=name))))
        kept = self.profile()
        assert kept is not None  # it was written just now
        return kept

    def profile(self) -> Profile | None:
        """The latest profile of this round's candidate."""
        found = _read_record(Profile, self.directory / "profile.json")
        if found is None or not found.report:
            return found
        place = self.directory / Path(found.report).name
        return dataclasses.replace(found, report=str(place) if place.is_file() else "")

    def finish(self, entry: Round) -> None:
        """Write the whole round; from now on it is finished and never played again."""
        self._write("round.json", _dump(to_json(_with_profile(entry, None))))

    def finished(self) -> Round | None:
        """The round as it was finished, with what was profiled of its candidate since."""
        entry = _read_record(Round, self.directory / "round.json")
        return _with_profile(entry, self.profile()) if entry is not None else None

    def _write(self, name: str, data: str | bytes) -> None:
        with _situation(self.directory / name):
            durable.write_file(self.directory / name, data)


def _with_profile(entry: Round, profile: Profile | None) -> Round:
    """A profile has one home, profile.json; one of other code than the round's says nothing about it."""
    if entry.evaluation is None or (profile is not None and profile.candidate != entry.evaluation.candidate):
        return entry
    return dataclasses.replace(entry, evaluation=dataclasses.replace(entry.evaluation, profile=profile))


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The sum. ``usd`` is None as soon as one price is unknown: a sum of the known ones would look like the whole."""
    prices = [usage.usd for usage in usages if usage != Usage()]
    known = [price for price in prices if price is not None]
    return Usage(
        sum(usage.input_tokens for usage in usages),
        sum(usage.output_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(known) if len(known) == len(prices) and prices else None,
    )


# -- files ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _situation(path: Path) -> Iterator[None]:
    """Turn what the file system says into one clear :class:`StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{error.filename or path}: {error.strerror or error}",
            expected="a run directory that can be written, with space left",
            remedy=f"free space or set run_dir to another folder{_room_left(path)}",
        ) from error


def _room_left(path: Path) -> str:
    for parent in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f" ({shutil.disk_usage(parent).free / 1e6:.1f} MB are free there)"
    return ""


def _hide_from_git(run_dir: Path) -> None:
    # Prompts and replies are nobody's commit; a user who wants them committed may edit this file.
    path = run_dir / ".gitignore"
    if not path.exists():
        durable.write_file(path, "*\n")


def _remove_torn_files(folder: Path) -> None:
    for leftover in folder.glob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def _dump(data: Any) -> str:
    # Text of tools and workers may hold half a character, which no file can.
    return _storable(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def _write_json(path: Path, data: Any) -> None:
    durable.write_file(path, _dump(data))


def _read_text(path: Path) -> str | None:
    with _situation(path):
        try:
            # Bytes, not text mode: a reply's line ends must come back as they were stored.
            return path.read_bytes().decode("utf-8", "replace")
        except FileNotFoundError:
            return None


def _read_json(path: Path) -> Any:
    text = _read_text(path)
    try:
        return None if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        raise StoreError(f"{path}:{error.lineno}: not JSON: {error.msg}", remedy=_FRESH) from error


def _read_record(kind: type[Record], path: Path) -> Record | None:
    data = _read_json(path)
    if data is None:
        return None
    try:
        return from_json(kind, data)  # type: ignore[no-any-return]
    except ValueError as error:
        raise StoreError(f"{path}: {error}", expected="the file as it was written", remedy=_FRESH) from error


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _rest(reply: StoredReply) -> tuple[Any, ...]:
    return (reply.model, reply.usage, reply.seconds, reply.prompt_digest, reply.note)
