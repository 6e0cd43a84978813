"""The sandboxed child that reads plan.py and runs the compiler, and the supervisor's handle to it.

The builder runs the candidate's text through our interpreter and through compilers, so its answers are untrusted: JSON
and bytes under caps, decoded by ``plan.decode`` and ``languages.binary_from_bytes``, errors rebuilt from a short list.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pytest_cudaforge import errors, languages, plan
from pytest_cudaforge.errors import ForgeError, PlanError, SandboxError, WorkerCrash, WorkerProtocol
from pytest_cudaforge.evaluation.channel import BUILDER_CAPS, Channel, Reply, Request
from pytest_cudaforge.evaluation.child import Child
from pytest_cudaforge.languages import Binary, Unit, cpp, extension
from pytest_cudaforge.languages.cpp import Place
from pytest_cudaforge.languages.extension import ExtensionRequest, request_from_text, request_to_text
from pytest_cudaforge.plan import TracedPlan
from pytest_cudaforge.records import from_json, to_json
from pytest_cudaforge.runtime.signature import Signature

__all__ = ["Builder", "serve"]

#: The fork server with the compiler in memory.
_KINDS = {"cuda": "cuda", "triton": "triton"}
#: Languages whose compiler runs the candidate's own code: it can end its process, or answer, in our name.
_RUNS_CANDIDATES = ("triton",)
_TRACE, _COMPILE, _EXTENSION, _PLACES = 1, 2, 3, 4
_OK, _REFUSED, _BROKEN, _FAULTED = range(4)
#: Exit status of a child that ended by a traceback of our own code (see the fork server's outermost frame).
_OWN_FAULT = 70
#: What a builder may say went wrong; any other name is a broken protocol.
_ERRORS = (
    "BuildFailure",
    "ConfigError",
    "LaunchFailure",
    "PlanError",
    "PlanLimitError",
    "PlanSyntaxError",
    "ToolchainError",
    "Unsupported",
)
_MAX_TEXT_CHARS = 1 << 20


class Builder:
    """Every call runs in a fresh sandboxed process; any number of calls may be under way from several threads."""

    def __init__(self, spawn: Callable[[str], Child], *, keeps: bool = False) -> None:
        self._spawn, self._keeps = spawn, keeps
        self._idle: dict[str, list[Child]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def kept(self) -> Iterator[Builder]:
        """A builder for the calls of one candidate, whose processes serve several of them and end with the context.

        Those that run the candidate's own code (Triton's compiler) still serve one call each."""
        builder = Builder(self._spawn, keeps=True)
        try:
            yield builder
        finally:
            for child in (child for children in builder._idle.values() for child in children):
                child.close()

    def trace(self, source: str, signature: Signature, function: str = "plan", *, timeout_s: float = 30) -> TracedPlan:
        """Trace ``function`` of ``source`` (a plan.py).

        Raises the candidate's errors (PlanError and kin, Unsupported), WorkerTimeout, WorkerCrash, WorkerProtocol,
        SandboxError. What comes back was decoded and checked by ``plan.decode``."""
        # Only a plan that may call op() needs torch's shapes; the server with torch is slower to start.
        library = re.search(r"\bop\b", source) is not None
        payload = {"source": source, "signature": signature.to_json(), "library": library, "function": function}
        reply = self._ask("shapes" if library else "plain", _TRACE, payload, "tracing plan.py", timeout_s)
        try:
            return plan.decode(json.loads(reply.text))
        except (ValueError, RecursionError) as error:
            raise WorkerProtocol(f"the builder's plan is no JSON: {error}", phase="tracing plan.py") from None

    def compile(
        self, language: str, source: str, unit: Unit, arch: str, *, lineinfo: bool = False, timeout_s: float = 120
    ) -> Binary:
        """Compile one unit. Raises BuildFailure, ToolchainError, WorkerTimeout, WorkerCrash, WorkerProtocol and
        SandboxError."""
        payload = {
            "language": language,
            "source": source,
            "constants": [list(pair) for pair in unit.constants],
            "kernels": list(unit.kernels),
            "arch": arch,
            "lineinfo": lineinfo,
        }
        kind, honest = _KINDS.get(language, "plain"), language not in _RUNS_CANDIDATES
        reply = self._ask(kind, _COMPILE, payload, "compiling", timeout_s, honest=honest)
        try:
            binary = languages.binary_from_bytes(reply.blob)
        except ValueError as error:
            raise WorkerProtocol(f"the builder's binary is malformed: {error}", phase="compiling") from None
        asked = (language, arch, unit.constants, set(unit.kernels))
        if (binary.language, binary.arch, binary.constants, {k.expression for k in binary.kernels}) != asked:
            raise WorkerProtocol("the builder's binary is not the one asked for", phase="compiling")
        return binary

    def extension(self, request: ExtensionRequest, arch: str, *, timeout_s: float = 420) -> Binary:
        """Compile and link a torch extension. Raises what :meth:`compile` does."""
        payload = {"request": request_to_text(request), "arch": arch}
        reply = self._ask("plain", _EXTENSION, payload, "building an extension", timeout_s)
        try:
            binary = languages.binary_from_bytes(reply.blob)
        except ValueError as error:
            raise WorkerProtocol(f"the builder's library is malformed: {error}", phase="building") from None
        return binary

    def places(self, binary: Binary, offsets: Sequence[int], *, timeout_s: float = 30) -> tuple[Place, ...]:
        """Where instructions of a cpp ``binary`` (built with line numbers) come from, by their offsets in its file.

        Tools that read a candidate's debug information and code run in the sandbox, not in the supervisor.

        Raises WorkerTimeout, WorkerCrash, WorkerProtocol and SandboxError."""
        phase = "looking up lines"
        reply = self._ask("plain", _PLACES, {"offsets": list(offsets)}, phase, timeout_s, blob=binary.code)
        try:
            found: tuple[Place, ...] = from_json(tuple[Place, ...], json.loads(reply.text))
        except (ValueError, RecursionError):
            found = ()
        if len(found) != len(offsets):
            raise WorkerProtocol("the builder's lines are malformed", phase=phase)
        return tuple(replace(place, instruction=_printable(place.instruction[:200])) for place in found)

    def _ask(
        self,
        kind: str,
        operation: int,
        payload: Any,
        phase: str,
        timeout_s: float,
        *,
        honest: bool = True,
        blob: bytes = b"",
    ) -> Reply:
        """``honest``: no code of the candidate's runs in the child, so a fault there is ours."""
        child = self._take(kind) if honest else self._spawn(kind)
        answered = False
        try:
            reply = child.ask(operation, payload, phase=phase, caps=BUILDER_CAPS, timeout_s=timeout_s, blob=blob)
            answered = reply.status in (_OK, _REFUSED)
        except WorkerCrash as crash:
            if crash.status == _OWN_FAULT and honest:
                raise _own_fault(phase, crash.what) from crash
            raise
        finally:
            if answered and honest and self._keeps:
                self._put_back(kind, child)
            else:
                child.close()
        if reply.status != _OK:
            raise _error_of(reply, phase, honest)
        return reply

    def _take(self, kind: str) -> Child:
        with self._lock:
            idle = self._idle.get(kind)
            if idle:
                return idle.pop()
        return self._spawn(kind)

    def _put_back(self, kind: str, child: Child) -> None:
        with self._lock:
            self._idle.setdefault(kind, []).append(child)


def _error_of(reply: Reply, phase: str, honest: bool = True) -> ForgeError:
    """The error a builder reported, rebuilt field by field."""
    if reply.status == _FAULTED and honest:
        return _own_fault(phase, _printable(reply.text[-4000:]))
    try:
        data = json.loads(reply.text)
    except (ValueError, RecursionError):
        data = None
    name = data.get("error") if isinstance(data, dict) else None
    if reply.status != _REFUSED or name not in _ERRORS:
        return WorkerProtocol(f"the builder failed: {_printable(reply.text[-2000:])}", phase=phase)
    if not honest and name != "BuildFailure":
        return WorkerProtocol(f"the builder says {_printable(data.get('what'))}", phase=phase)
    text = {field: _printable(data.get(field)) for field in ("what", "expected", "remedy", "log")}
    kind = getattr(errors, name)
    fields: dict[str, Any] = {"expected": text["expected"], "remedy": text["remedy"]}
    if issubclass(kind, PlanError):
        line = data.get("line")
        fields["line"] = line if isinstance(line, int) and 0 < line < 1 << 20 else None
    if issubclass(kind, errors.BuildFailure):
        fields["log"] = text["log"]
    error = kind(text["what"], **fields)
    assert isinstance(error, ForgeError)
    return error


def _own_fault(phase: str, text: str) -> SandboxError:
    return SandboxError(
        f"the builder failed while {phase}, by no fault of the candidate: {text.strip()}",
        expected="a plan, a binary, or an error of the candidate's",
        remedy="run `cudaforge doctor`; if it finds nothing, report this traceback",
    )


def _printable(value: Any) -> str:
    """A text of the builder's without control characters, so that no log can steer a terminal."""
    text = value[:_MAX_TEXT_CHARS] if isinstance(value, str) else ""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


# -- in the child ----------------------------------------------------------------------------------------------


def serve(channel: Channel) -> None:
    """Answer requests until the supervisor is gone."""
    while True:
        request = channel.receive_request()
        try:
            text, blob = _answer(request)
        except ForgeError as error:
            channel.send_reply(request.nonce, _REFUSED, text=_describe(error))
        except (OSError, MemoryError, RecursionError) as error:
            # Any candidate can use up memory, stack or the disk of its sandbox; a trace opens no files of its own.
            own = isinstance(error, OSError) and request.operation == _TRACE
            text = traceback.format_exc(limit=-8) if own else f"{type(error).__name__}: {error}"
            channel.send_reply(request.nonce, _FAULTED if own else _BROKEN, text=text)
        except Exception:  # noqa: BLE001 - a request's outermost frame: a fault of ours, told as such
            channel.send_reply(request.nonce, _FAULTED, text=traceback.format_exc(limit=-8))
        else:
            channel.send_reply(request.nonce, _OK, text=text, blob=blob)


def _answer(request: Request) -> tuple[str, bytes]:
    if request.operation == _TRACE:
        return _trace(request)
    if request.operation == _PLACES:
        return json.dumps(to_json(cpp.places(request.blob, request.payload["offsets"]))), b""
    return "", _compile(request) if request.operation == _COMPILE else _extension(request)


def _extension(request: Request) -> bytes:
    asked = request_from_text(request.payload["request"])
    return languages.binary_to_bytes(extension.build(asked, request.payload["arch"]))


def _trace(request: Request) -> tuple[str, bytes]:
    from pytest_cudaforge.runtime import trace

    asked = request.payload
    shapes = None
    if asked["library"]:
        from pytest_cudaforge.runtime import library

        shapes = library.MetaShapes()
    traced = trace.trace(asked["source"], Signature.from_json(asked["signature"]), shapes, asked["function"])
    return json.dumps(plan.encode(traced)), b""


def _compile(request: Request) -> bytes:
    asked = request.payload
    constants = tuple((name, value) for name, value in asked["constants"])
    unit = Unit(constants, tuple(asked["kernels"]))
    language = languages.load(asked["language"])
    binary = language.compile(asked["source"], unit, asked["arch"], lineinfo=asked["lineinfo"])
    return languages.binary_to_bytes(binary)


def _describe(error: ForgeError) -> str:
    # A subclass outside the list goes by its nearest listed parent.
    names = [kind.__name__ for kind in type(error).__mro__]
    name = next((name for name in names if name in _ERRORS), names[0])
    what = error.what
    line = getattr(error, "line", None)
    return json.dumps(
        {
            "error": name,
            "what": what,
            "expected": error.expected,
            "remedy": error.remedy,
            "log": getattr(error, "log", ""),
            "line": line,
        }
    )
