"""The guard's history: a file of JSON lines that runs, branches and runners append to.

::

    history.append(config.history, samples, max_bytes=...)      # after a run of the guard
    found = history.alarms(history.read(config.history).measurements, samples)
    print(*history.lines(found), sep="\\n")

Appending is safe under concurrent runs (a lock on the file's folder) and leaves nothing behind where it fails. Reading
takes what it can: a damaged last line (a run that was killed), a foreign line or one of a newer version is said and
passed over. Merging (a CI cache and a branch, say) keeps every line once.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_cudaforge import durable
from pytest_cudaforge.alarms import Alarm, AlarmKind, alarms, doubtful, lines
from pytest_cudaforge.errors import StoreError
from pytest_cudaforge.machine import Machine
from pytest_cudaforge.measurements import FORMAT, VERSION, GuardRun, Measurement, line_of, measured, parse

__all__ = [
    "Alarm",
    "AlarmKind",
    "GuardRun",
    "History",
    "Measurement",
    "alarms",
    "append",
    "doubtful",
    "lines",
    "measured",
    "merge",
    "new_run",
    "read",
]

#: A file that grew over its limit is cut to this share of it, so that not every append cuts again.
_KEPT = 0.75
#: No line of ours is longer; one that is stands for damage and is not read into memory.
MAX_LINE_BYTES = 1 << 20
#: What :func:`json.loads` and :func:`parse` raise for lines that anybody may have written.
_UNREADABLE = (ValueError, RecursionError, OverflowError)


@dataclass(frozen=True)
class History:
    """All measurements of a file, oldest first. ``notes``: what could not be read, and why, one line of text each."""

    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()


def new_run(machine: Machine, commit: str, base_commit: str = "", *, now: datetime | None = None) -> GuardRun:
    """A run that begins now; all its measurements share it. ``now`` must know its time zone."""
    moment = (now or datetime.now(timezone.utc)).astimezone(timezone.utc)
    return GuardRun(uuid.uuid4().hex[:12], moment.strftime("%Y-%m-%dT%H:%M:%SZ"), commit, base_commit, machine)


# -- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> History:
    """What the file holds; nothing where there is none yet. Raises :class:`StoreError` where it cannot be opened."""
    found: list[Measurement] = []
    skipped: dict[str, list[int]] = {}
    for number, line in enumerate(_raw_lines(path), start=1):
        if not line.strip():
            continue
        try:
            found.append(parse(_loaded(line)))
        except _UNREADABLE as error:
            skipped.setdefault(_reason(error), []).append(number)
    found.sort(key=lambda measurement: measurement.run.time)
    return History(tuple(found), tuple(_note(path, why, numbers) for why, numbers in skipped.items()))


def _raw_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(
            f"the history {path} cannot be read: {error.strerror or error}",
            expected="a file of JSON lines",
            remedy="give another with --forge-history FILE, or CUDAFORGE_HISTORY",
        ) from error


def _loaded(line: bytes) -> Any:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("damaged (a run that was killed while it wrote?)") from None
    if isinstance(data, dict) and data.get("format") == FORMAT and data.get("version") != VERSION:
        raise ValueError("of another version of pytest-cudaforge")
    return data


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else "damaged"


def _note(path: Path, why: str, numbers: Sequence[int]) -> str:
    lines_ = f"line {numbers[0]} is" if len(numbers) == 1 else f"{len(numbers)} lines (the first: {numbers[0]}) are"
    return f"{path}: {lines_} skipped: {why}"


# -- writing ----------------------------------------------------------------------------------------------------------


def append(path: Path, samples: Iterable[Measurement], *, max_bytes: int | None = None) -> None:
    """Add ``samples`` at the end, or none of them where writing fails; safe beside other runs that do the same.

    Where the file then passes ``max_bytes`` its oldest lines go. Raises :class:`StoreError`.
    """
    payload = "".join(line_of(sample) + "\n" for sample in samples).encode()
    if not payload:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _hide_from_git(path.parent)
        with durable.locked_directory(path.parent):
            _add(path, payload)
            if max_bytes is not None and path.stat().st_size > max_bytes:
                _write(path, _newest(_lines_of([path]), int(max_bytes * _KEPT)))
    except OSError as error:
        raise _unwritable(path, error) from error


def _hide_from_git(folder: Path) -> None:
    """The folder of runs is nobody's commit; one that a user chose may be meant for it."""
    if folder.name == ".cudaforge" and not (folder / ".gitignore").exists():
        durable.write_file(folder / ".gitignore", "*\n")


def _add(path: Path, payload: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        # A line that a killed run left unfinished must not swallow the next one.
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        try:
            _write_all(descriptor, b"\n" + payload if torn else payload)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, payload: bytes) -> None:
    rest = memoryview(payload)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def merge(path: Path, others: Sequence[Path], *, max_bytes: int | None = None) -> int:
    """Add the lines of ``others`` that ``path`` does not hold, in order of time; the number of lines that came.

    Lines of a newer version are kept as they are; damaged and foreign ones are left out. Nothing is written where
    nothing came. Raises :class:`StoreError`, also for one of ``others`` that is not there.
    """
    for other in others:
        if not other.is_file():
            raise StoreError(f"there is no history {other}", expected="a file of JSON lines", remedy="see its path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with durable.locked_directory(path.parent):
            before = _lines_of([path])
            after = _lines_of([path, *others])
            came = len(after) - len(before)
            if came:
                _write(path, after if max_bytes is None else _newest(after, max_bytes))
    except OSError as error:
        raise _unwritable(path, error) from error
    return came


@dataclass(frozen=True)
class _Line:
    time: str
    text: str


def _lines_of(paths: Sequence[Path]) -> list[_Line]:
    """Each line once, sorted by time; told apart by what they say, not by how it is written."""
    found: dict[str, _Line] = {}
    for path in paths:
        for line in _raw_lines(path):
            try:
                data = json.loads(line)
            except _UNREADABLE:
                continue
            if isinstance(data, dict) and data.get("format") == FORMAT and isinstance(data.get("time"), str):
                text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
                found.setdefault(text, _Line(data["time"], json.dumps(data, ensure_ascii=True, separators=(",", ":"))))
    return sorted(found.values(), key=lambda line: line.time)


def _newest(kept: Sequence[_Line], max_bytes: int) -> list[_Line]:
    room, first = max_bytes, len(kept)
    while first and room >= len(kept[first - 1].text) + 1:
        first -= 1
        room -= len(kept[first].text) + 1
    return list(kept[first:])


def _write(path: Path, kept: Sequence[_Line]) -> None:
    durable.write_file(path, "".join(line.text + "\n" for line in kept))


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"the history {path} cannot be written: {error.strerror or error}",
        expected="a file in a folder that can be written",
        remedy="give another with --forge-history FILE, CUDAFORGE_HISTORY or `history:` in cudaforge.yaml",
    )
