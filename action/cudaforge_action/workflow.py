"""What a job says to GitHub's runner: commands on its output, and the files that ``GITHUB_*`` name.

The grammar is the runner's own: a line that begins with ``::name key=value::data`` is a command, and so is one that
holds ``##[name]`` *anywhere* (actions/runner, ``ActionCommand.cs``). Whatever others wrote therefore never reaches the
runner's output but inside :meth:`Commands.quoting`. Escaping is that of ``@actions/core`` (``command.ts``), the files'
format that of https://docs.github.com/actions/reference/workflow-commands-for-github-actions.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import selectors
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pytest_cudaforge.errors import SituationError, UsageError

__all__ = ["MAX_OUTPUT_BYTES", "MAX_SUMMARY_BYTES", "Commands", "append_summary", "command", "set_variable"]

#: The runner refuses a step's summary above this, whole: https://docs.github.com/actions/reference/limits.
MAX_SUMMARY_BYTES = 1024 * 1024
#: The most that an output of a job may hold.
MAX_OUTPUT_BYTES = 1024 * 1024

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_CUT = "\n*(the rest does not fit into a step summary)*\n"


def command(name: str, data: str = "", **properties: str | int) -> str:
    """One command as its line, without the line's end. Properties that are empty are left out."""
    given = ",".join(f"{key}={_escape_property(str(value))}" for key, value in properties.items() if value != "")
    return f"::{name}{' ' if given else ''}{given}::{_escape_data(data)}"


def _escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


# -- the runner's output -----------------------------------------------------------------------------------------------


class Commands:
    """The runner's output. ``stream``: where commands go (default: what is standard output at each call)."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        self._given = stream
        self._quoted = False

    def issue(self, name: str, data: str = "", **properties: str | int) -> None:
        """Raises RuntimeError inside :meth:`quoting`: the runner would show the command's text, masks included."""
        if self._quoted:
            raise RuntimeError(f"the command {name!r} was issued where commands are stopped")
        self._write(command(name, data, **properties) + "\n")

    def _write(self, text: str) -> None:
        stream = self._given if self._given is not None else sys.stdout.buffer
        sys.stdout.flush()
        stream.write(text.encode("utf-8", "replace"))
        stream.flush()

    @contextlib.contextmanager
    def quoting(self) -> Iterator[None]:
        """Until its end, whatever this process and its children print is text: the runner stops reading commands until
        it sees a random token, which nobody else knows.

        Three more things a token alone does not do. The runner reads standard error beside standard output, in no
        order, so that both are one stream in here. A child that outlives the block writes into a pipe that nobody
        reads. And a last line without an end is ended before the token.
        """
        token = secrets.token_hex(32)
        self.issue("stop-commands", token)
        self._quoted = True
        try:
            with _one_stream():
                yield
        finally:
            self._quoted = False
            self._write(f"\n::{token}::\n")


@contextlib.contextmanager
def _one_stream() -> Iterator[None]:
    """Descriptors 1 and 2 as one pipe, copied to what descriptor 1 was until the block ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    reader, writer = os.pipe()
    ended = threading.Event()
    copier = threading.Thread(target=_copy, args=(reader, kept[0], ended), daemon=True)
    try:
        for descriptor in (1, 2):
            os.dup2(writer, descriptor)
        os.close(writer)
        copier.start()
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, old in zip((1, 2), kept, strict=True):
            os.dup2(old, descriptor)
        ended.set()
        copier.join()
        for descriptor in (*kept, reader):
            os.close(descriptor)


def _copy(reader: int, out: int, ended: threading.Event) -> None:
    """Copy until the end; once the block has ended only what lies in the pipe, for another may hold it open."""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            last = ended.is_set()
            if not selector.select(0 if last else 0.05):
                if last:
                    return
                continue
            data = os.read(reader, 65536)
            if not data:
                return
            _write_all(out, data)


def _write_all(out: int, data: bytes) -> None:
    """A log that nobody reads any more is no reason to let those who write wait for ever."""
    while data:
        try:
            data = data[os.write(out, data) :]
        except BlockingIOError:
            # Whoever started us shares a descriptor that does not block.
            select.select([], [out], [])
        except OSError:
            return


# -- files -------------------------------------------------------------------------------------------------------------


def set_variable(environ: Mapping[str, str], file: str, name: str, value: str) -> None:
    """Give ``name`` a value in ``GITHUB_OUTPUT``, ``GITHUB_ENV`` or ``GITHUB_STATE`` (``file``).

    The value stands between random delimiters, so that no text can end it early and add a line of its own. Raises
    :class:`UsageError` for a name that is none and for a value above 1 MiB, :class:`SituationError` where the file
    cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be an output's name", expected="letters, digits, - and _")
    size = len(value.encode("utf-8", "replace"))
    if size > MAX_OUTPUT_BYTES:
        raise UsageError(f"the output {name} has {size} bytes", expected=f"at most {MAX_OUTPUT_BYTES}, GitHub's limit")
    delimiter = f"cudaforge_{secrets.token_hex(16)}"
    _append(environ, file, f"{name}<<{delimiter}\n{value}\n{delimiter}\n".encode("utf-8", "replace"))


def append_summary(environ: Mapping[str, str], markdown: str) -> None:
    """Add to the step's summary. What would pass the runner's limit, which drops a summary whole, is cut off."""
    path = environ.get("GITHUB_STEP_SUMMARY", "")
    taken = Path(path).stat().st_size if path and Path(path).exists() else 0
    data = f"{markdown.rstrip()}\n\n".encode("utf-8", "replace")
    room = MAX_SUMMARY_BYTES - taken
    if len(data) > room:
        kept = data[: max(0, room - len(_CUT))]
        data = kept[: kept.rfind(b"\n") + 1] + _CUT.encode() if room > len(_CUT) else b""
    if data:
        _append(environ, "GITHUB_STEP_SUMMARY", data)


def _append(environ: Mapping[str, str], variable: str, data: bytes) -> None:
    path = environ.get(variable, "")
    if not path:
        raise SituationError(f"{variable} is not set", expected="the file that GitHub's runner gives each step")
    # A job's other steps may have run code of a pull request: what lies there is a file, not a way to another one.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        raise SituationError(f"{variable} cannot be written: {error.strerror}", expected="a plain file") from None
    with open(descriptor, "ab") as file:
        file.write(data)
