"""Fork servers, as the supervisor sees them: started on first use, kept, and asked for children."""

from __future__ import annotations

import array
import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from pytest_cudaforge.errors import SandboxError
from pytest_cudaforge.evaluation import sandbox
from pytest_cudaforge.evaluation.builder import Builder
from pytest_cudaforge.evaluation.channel import pair, wait_readable
from pytest_cudaforge.evaluation.child import Child
from pytest_cudaforge.evaluation.fork_server import COMPILERS, MAX_MESSAGE_BYTES, PRELOADS
from pytest_cudaforge.evaluation.module_worker import ModuleWorker
from pytest_cudaforge.evaluation.sandbox import OWN_PACKAGE, Abilities, ChildSpec, Isolation, Limits, SandboxSettings
from pytest_cudaforge.evaluation.seccomp import Role
from pytest_cudaforge.evaluation.view import package_paths, readable_paths
from pytest_cudaforge.evaluation.worker import Worker
from pytest_cudaforge.languages import DEVICE_LANGUAGES

__all__ = ["ForkServers"]

_START_LIMIT_S = 120.0
_COMPILER_MEMORY_BYTES = 6 << 30
_PROGRAM = OWN_PACKAGE + (
    "from pytest_cudaforge.evaluation import fork_server; fork_server.main(int(sys.argv[2]), sys.argv[3])"
)


class _ForkServer:
    """One fork server process. Thread-safe."""

    def __init__(self, kind: str, settings: SandboxSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._children = 0
        self._stderr = os.memfd_create("cudaforge-stderr", os.MFD_CLOEXEC)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = _start_process(kind, theirs, self._stderr, settings)
        except OSError as error:
            self._control.close()
            os.close(self._stderr)
            raise SandboxError(
                f"the {kind} fork server cannot be started: {error}", expected="Python to run"
            ) from error
        self.abilities = self._hello(kind)

    def _hello(self, kind: str) -> Abilities:
        if wait_readable(self._control, _START_LIMIT_S):
            data = self._control.recv(MAX_MESSAGE_BYTES)
            if data:
                return sandbox.abilities_from_json(json.loads(data))
        text = os.pread(self._stderr, 1 << 16, 0).decode("utf-8", "replace")
        self.close()
        raise SandboxError(
            f"the {kind} fork server did not start: {text.strip()[-800:] or 'no answer'}",
            remedy="run `cudaforge doctor`",
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def spawn(self, spec: ChildSpec) -> Child:
        """A confined child that serves. Raises SandboxError."""
        channel, theirs = pair()
        status, their_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._lock:
            self._children += 1
            child_id = self._children
            message = json.dumps({"id": child_id, "spec": sandbox.spec_to_json(spec)}).encode()
            rights = array.array("i", [theirs.fileno(), their_status.fileno()])
            try:
                self._control.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            except OSError as error:
                raise SandboxError(f"the fork server is gone: {error}", remedy="try again") from error
            finally:
                theirs.close()
                their_status.close()
        child = Child(channel, status, lambda: self._end(child_id), self._settings.terminate_grace_s)
        child.wait_until_ready()
        return child

    def _end(self, child_id: int) -> None:
        with self._lock:
            try:
                self._control.send(json.dumps({"kill": child_id}).encode())
            except OSError:
                return

    def close(self) -> None:
        """End the server and with it every child."""
        self._control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._stderr >= 0:
            os.close(self._stderr)
            self._stderr = -1


def _start_process(kind: str, theirs: socket.socket, stderr: int, settings: SandboxSettings) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _PROGRAM, root, str(theirs.fileno()), kind],
            env={
                **sandbox.child_environment(os.environ, settings.defences),
                **dict(settings.environment),
                # Everything is bound at once where native code runs: see ``images``.
                **({"LD_BIND_NOW": "1"} if kind == "plain" else {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            cwd="/",
            # Its own session: Ctrl-C in the terminal is the supervisor's to handle.
            start_new_session=True,
        )


class ForkServers:
    """Starts and keeps one fork server per kind ("plain", "cuda", "torch", "shapes", "triton"), each on first use.

    Thread-safe.

    A context manager; ``close`` ends every child and server. Should the supervisor die, all of them end with it.
    """

    def __init__(
        self, settings: SandboxSettings | None = None, *, compiler_environment: Sequence[tuple[str, str]] = ()
    ) -> None:
        """``compiler_environment``: what trusted workers, which compile, get beside the allow-list."""
        self.settings = settings or SandboxSettings()
        self._compiler_environment = tuple(compiler_environment)
        self._servers: dict[str, _ForkServer] = {}
        self._locks = {kind: threading.Lock() for kind in PRELOADS}
        self._readable = readable_paths(self.settings.extra_readable)
        self._packages = package_paths(self._readable)
        self._closed = False

    def warm(self, kind: str) -> None:
        """Start the server of ``kind`` now. Raises SandboxError."""
        self._server(kind)

    def isolation(self, language: str) -> Isolation:
        """Grade, reasons and remedy of what a worker for ``language`` gets on this machine."""
        abilities = self._server("plain").abilities
        return sandbox.grade(abilities, self.settings, host_code=language not in DEVICE_LANGUAGES)

    def builder(self) -> Builder:
        """The handle to builders; each of its calls runs in a fresh process."""
        return Builder(self._spawn_builder)

    def worker(self, language: str, *, library_calls: bool = False, limits: Limits | None = None) -> Worker:
        """A fresh worker process in milliseconds (once its fork server is warm). ``library_calls``: the plan has any.

        Raises SandboxError where none can be started, or where native candidate code would run below grade B without
        ``isolation="none"``.
        """
        self._require_isolation(language)
        cuda = language in DEVICE_LANGUAGES
        kind = "torch" if library_calls else ("cuda" if cuda else "plain")
        return Worker(self._spawn(kind, "worker", cuda, limits or self.settings.limits))

    def module_worker(
        self,
        *,
        cuda: bool,
        compilers: bool = False,
        limits: Limits | None = None,
        trusted: bool = False,
    ) -> ModuleWorker:
        """A fresh process for a ModelNew, with torch loaded; ``compilers``: it may start programs (Triton's).
        ``trusted``: it runs no code of a candidate's and is denied no more than the oracle is.

        Raises SandboxError, as :meth:`worker` does.
        """
        if not trusted:
            self._require_isolation("module")
        kind = "torch" if not trusted else "compiler" if cuda else "compiler_cpu"
        limits = limits or self.settings.limits
        return ModuleWorker(self._spawn(kind, "module_service", cuda, limits, compilers, trusted))

    def _require_isolation(self, language: str) -> None:
        found = self.isolation(language)
        if found.grade == "C" and self.settings.isolation != "none" and language not in DEVICE_LANGUAGES:
            raise SandboxError(
                "native candidate code needs isolation of grade B: " + "; ".join(found.reasons),
                expected="namespaces or an own user id, seccomp, and Landlock or mounts",
                remedy=f"{found.remedy}; or --isolation none (such results cannot be published)",
            )

    def _spawn_builder(self, kind: str) -> Child:
        limits = self.settings.limits
        # torch alone maps many gigabytes, and a kernel.py may import it; a compiler that wants more than this is being
        # bombed.
        most = limits.memory_bytes if kind in ("shapes", "triton") else min(limits.memory_bytes, _COMPILER_MEMORY_BYTES)
        return self._spawn(kind, "builder", False, dataclasses.replace(limits, memory_bytes=most))

    def _spawn(
        self,
        kind: str,
        role: Role,
        cuda: bool,
        limits: Limits,
        compilers: bool = False,
        trusted: bool = False,
    ) -> Child:
        settings = self.settings
        readable, hidden = self._readable, tuple[str, ...]()
        if (kind, role) == ("plain", "worker"):
            # Native code could call into torch by any number of ways; here there is none to call.
            readable, hidden = tuple(p for p in readable if p not in self._packages), self._packages
        isolation, defences = "none" if trusted else settings.isolation, settings.defences
        spec = ChildSpec(role, cuda, isolation, limits, defences, readable, hidden=hidden, compilers=compilers)
        return self._server(kind).spawn(spec)

    def _server(self, kind: str) -> _ForkServer:
        with self._locks[kind]:
            if self._closed:
                raise SandboxError("the fork servers are closed", expected="an open ForkServers")
            server = self._servers.get(kind)
            if server is not None and not server.alive:
                server.close()
                server = None
            if server is None:
                settings = self.settings
                if kind in COMPILERS:
                    environment = (*settings.environment, *self._compiler_environment)
                    settings = dataclasses.replace(settings, environment=environment)
                server = self._servers[kind] = _ForkServer(kind, settings)
            return server

    def close(self) -> None:
        """End every child and fork server; a second call does nothing."""
        self._closed = True
        for kind, lock in self._locks.items():
            with lock:
                server = self._servers.pop(kind, None)
                if server is not None:
                    server.close()

    def __enter__(self) -> ForkServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
