"""``provider: command``: any program, prompt on stdin, reply on stdout; for example a command-line coding agent.

Exit status 0: stdout is the reply. 75 (EX_TEMPFAIL): no reply yet, the target is left pending and a later run asks
again. Anything else, silence, or ``chat.command.timeout_s`` passing is a ``ProviderError``.

The program's environment holds PATH, HOME, LANG, what ``chat.command.env`` names, and ``CUDAFORGE_ROLE`` (coder or
judge), ``CUDAFORGE_TARGET``, ``CUDAFORGE_LANGUAGE`` and ``CUDAFORGE_ROUND``. It runs in the folder of cudaforge.yaml,
in its own process group, which is stopped while something is timed on the CPU and killed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pytest_cudaforge.chat import ChatReply, ChatRequest, ConversationKey, ProcessGate, Role, render_text
from pytest_cudaforge.config import CommandConfig, ForgeConfig
from pytest_cudaforge.errors import ConfigError, ProviderError, ReplyPending
from pytest_cudaforge.records import Usage

PENDING_STATUS = 75
MAX_REPLY_BYTES = 4_000_000
KEPT_VARIABLES = ("PATH", "HOME", "LANG")
_TAIL_CHARACTERS = 800
_GRACE_S = 2.0
_POLL_S = 0.05


@dataclass(frozen=True)
class CommandModel:
    """``environ`` is hidden from reprs: it may hold what ``env`` names, and no message of ours should."""

    settings: CommandConfig
    folder: Path
    lease: ProcessGate | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return f"command:{Path(self.settings.argv[0]).name}"

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Raises ``ReplyPending`` or ``ProviderError``."""
        start = time.monotonic()
        # Files instead of pipes: a program that leaves children behind cannot keep us waiting for the end of a pipe.
        with _scratch() as stdin, _scratch() as stdout, _scratch() as stderr:
            stdin.write(render_text(request.messages).encode())
            stdin.seek(0)
            status = await self._run(request.key, stdin, stdout, stderr)
            text = self._reply(status, request.key, stdout, stderr)
        return ChatReply(text, Usage(), self.name, time.monotonic() - start, request.digest)

    async def _run(self, key: ConversationKey, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> int:
        try:
            process = await asyncio.create_subprocess_exec(
                *self.settings.argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=self._environment(key),
                cwd=self.folder,
                start_new_session=True,
            )
        except OSError as error:
            raise ProviderError(
                f"the program {self.settings.argv[0]!r} could not be started: {error.strerror or error}",
                expected="an executable on PATH, or a path to one",
                remedy="install it or mend chat.command.argv",
            ) from error
        with self._registered(process.pid):
            try:
                return await self._wait(process, stdout)
            finally:
                await _end_group(process)

    async def _wait(self, process: asyncio.subprocess.Process, stdout: IO[bytes]) -> int:
        deadline = time.monotonic() + self.settings.timeout_s
        waiter = asyncio.ensure_future(process.wait())
        try:
            while not waiter.done():
                await asyncio.wait({waiter}, timeout=_POLL_S)
                if os.fstat(stdout.fileno()).st_size > MAX_REPLY_BYTES:
                    raise ProviderError(
                        f"{self.name} wrote more than {MAX_REPLY_BYTES} bytes to stdout",
                        expected="the reply and nothing else",
                        remedy="send logs to stderr, or ask the program for its final answer only",
                    )
                if not waiter.done() and time.monotonic() > deadline:
                    raise ProviderError(
                        f"{self.name} gave no reply within {self.settings.timeout_s:g} s and was killed",
                        expected="a reply in time, or exit status 75 for 'no reply yet'",
                        remedy="raise chat.command.timeout_s",
                    )
            return waiter.result()
        finally:
            waiter.cancel()

    def _reply(self, status: int, key: ConversationKey, stdout: IO[bytes], stderr: IO[bytes]) -> str:
        if status == PENDING_STATUS:
            raise ReplyPending(
                f"{self.name} has no reply yet for the {key.role} of {key.target} (exit status {PENDING_STATUS})",
                remedy="run pytest --forge again later; the target goes on where it stopped",
            )
        if status != 0:
            ended = f"ended with exit status {status}" if status > 0 else f"was ended by {_signal_name(-status)}"
            raise ProviderError(
                f"{self.name} {ended}; the end of its stderr: {self._tail(stderr) or '(nothing)'}",
                expected=f"exit status 0 with the reply on stdout, or {PENDING_STATUS} for 'no reply yet'",
                remedy="run the program by hand with a prompt on stdin; a variable it needs goes into chat.command.env",
            )
        stdout.seek(0)
        try:
            text = stdout.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ProviderError(
                f"{self.name} wrote something that is not UTF-8: {error.reason}", expected="text"
            ) from None
        if not text.strip():
            raise ProviderError(
                f"{self.name} wrote nothing to stdout; the end of its stderr: {self._tail(stderr) or '(nothing)'}",
                expected="the reply on stdout",
                remedy="look for an option that makes the program print its answer",
            )
        return text

    def _environment(self, key: ConversationKey) -> dict[str, str]:
        kept = {name: self.environ[name] for name in (*KEPT_VARIABLES, *self.settings.env) if name in self.environ}
        return kept | {
            "CUDAFORGE_ROLE": key.role,
            "CUDAFORGE_TARGET": key.target,
            "CUDAFORGE_LANGUAGE": key.language,
            "CUDAFORGE_ROUND": str(key.round),
        }

    @contextlib.contextmanager
    def _registered(self, pgid: int) -> Iterator[None]:
        if self.lease is None:
            yield
            return
        self.lease.register(pgid)
        try:
            yield
        finally:
            self.lease.unregister(pgid)

    def _tail(self, stderr: IO[bytes]) -> str:
        """The end of stderr without the values of named variables: programs like to print the key they choked on."""
        stderr.seek(0, os.SEEK_END)
        stderr.seek(max(0, stderr.tell() - 16_000))
        text = stderr.read().decode("utf-8", "replace").strip()
        for name in self.settings.env:
            if len(self.environ.get(name, "")) >= 6:
                text = text.replace(self.environ[name], f"[{name}]")
        return text[-_TAIL_CHARACTERS:]


def _scratch() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="cudaforge-")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """TERM, a moment's grace while the leader lives, then KILL for the whole group; children left behind go with it."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        _signal_group(process.pid, signal.SIGCONT)  # a group stopped by the lease must wake up to see the TERM
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S)
    _signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def _signal_group(pgid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def load(config: ForgeConfig, role: Role, lease: ProcessGate | None = None) -> CommandModel:
    """Raises ``ConfigError`` where no program is named."""
    settings = config.chat.command
    if not settings.argv:
        raise ConfigError(
            f"chat.{role}.provider is command, but chat.command.argv is empty",
            expected="a program and its arguments",
            remedy="add `chat: {command: {argv: [my-agent, --print]}}` to cudaforge.yaml",
        )
    folder = config.file.parent if config.file else config.root
    return CommandModel(settings, folder, lease, dict(os.environ))
