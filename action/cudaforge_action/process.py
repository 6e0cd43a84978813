"""A process whose output is shown as it comes, obeyed by nobody, and ended politely when the job is cancelled."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from cudaforge_action.host import Host
from pytest_cudaforge.errors import SituationError

__all__ = ["Ended", "run_quoted"]

#: A cancelled job on GitHub hears SIGINT, 7.5 s later SIGTERM, and 2.5 s after that is killed:
#: https://docs.github.com/actions/reference/workflow-cancellation-reference. What is there must be told before.
_POLITE_S, _FIRM_S = 4.0, 1.5
_POLL_S = 0.1
#: After the process, for what its children still write.
_LINGER_S = 1.0
_KEPT_LINES, _KEPT_LINE = 60, 400


@dataclass(frozen=True)
class Ended:
    """``status``: as of ``subprocess`` (negative: the signal). ``cancelled``: somebody asked for its end."""

    status: int
    last_lines: tuple[str, ...] = ()
    cancelled: bool = False

    @property
    def last_words(self) -> str:
        """From pytest's last error on, else the last lines."""
        lines = self.last_lines
        marks = [at for at, line in enumerate(lines) if line.startswith(("ERROR: ", "INTERNALERROR> Traceback"))]
        return "\n".join(lines[marks[-1] :] if marks else lines[-20:])


@dataclass
class _Asked:
    """When somebody first, and again, asked for the end."""

    at: list[float] = field(default_factory=list)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.at.append(time.monotonic())


@dataclass
class _Tail:
    """The last lines of what went by."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    _rest: str = ""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )

    def add(self, data: bytes, *, final: bool = False) -> None:
        *whole, self._rest = (self._rest + self._decoder.decode(data, final)).split("\n")
        # A line without end must not take the machine's memory.
        self._rest = self._rest[-_KEPT_LINE:]
        whole += [self._rest] if final and self._rest else []
        self.lines.extend(line[:_KEPT_LINE].rstrip() for line in whole)


def run_quoted(argv: Sequence[str], cwd: Path, environ: Mapping[str, str], host: Host, title: str) -> Ended:
    """Run ``argv`` to its end with both its outputs shown under ``title``.

    When this process is asked to end (SIGINT, SIGTERM), the other one's group is asked first, and killed where it does
    not listen; the same happens to what it leaves behind. Raises :class:`~pytest_cudaforge.errors.SituationError` where
    it cannot be started.
    """
    tail, asked = _Tail(), _Asked()
    with host.group(title), host.quoting(), _hearing(asked):
        try:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise SituationError(f"{argv[0]} cannot be started: {error.strerror}") from None
        try:
            _follow(process, tail, asked)
        finally:
            _signal_group(process, signal.SIGKILL)
            process.wait()
    return Ended(process.returncode, tuple(tail.lines), bool(asked.at))


def _follow(process: subprocess.Popen[bytes], tail: _Tail, asked: _Asked) -> None:
    assert process.stdout is not None
    sent: list[signal.Signals] = []
    ended_at: float | None = None
    with process.stdout as stream, selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if selector.select(_POLL_S):
                data = os.read(stream.fileno(), 65_536)
                if not data:
                    break
                _show(data)
                tail.add(data)
            if process.poll() is not None:
                # A child that keeps the pipe open would have us wait for ever.
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > _LINGER_S:
                    break
            _press(process, asked, sent)
    tail.add(b"", final=True)
    # Its output may end before it does.
    while process.poll() is None:
        _press(process, asked, sent)
        time.sleep(_POLL_S / 2)


def _show(data: bytes) -> None:
    # A log that nobody reads any more is no reason to stop.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _press(process: subprocess.Popen[bytes], asked: _Asked, sent: list[signal.Signals]) -> None:
    """Ask for its end, the harder the longer it takes; who asks twice means it."""
    if not asked.at:
        return
    waited_s = time.monotonic() - asked.at[0]
    wanted = signal.SIGINT
    if waited_s > _POLITE_S + _FIRM_S:
        wanted = signal.SIGKILL
    elif waited_s > _POLITE_S or len(asked.at) > 1:
        wanted = signal.SIGTERM
    if wanted not in sent:
        sent.append(wanted)
        _signal_group(process, wanted)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # Its group has its number; where nobody is left in it there is nothing to end.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _hearing(asked: _Asked) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, asked.note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
