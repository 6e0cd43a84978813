"""One call made ready for a profiler: a folder with the plan and its binaries, and its values on the device."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_cudaforge import languages, plan
from pytest_cudaforge.evaluation.cases import CallLayout, call_layout
from pytest_cudaforge.evaluation.chance import CHANCE
from pytest_cudaforge.evaluation.oracle import ExportedArena, OracleClient
from pytest_cudaforge.evaluation.profiled_call import ProfiledCall
from pytest_cudaforge.evaluation.profiled_replay import SOCKET_NAME
from pytest_cudaforge.evaluation.trusted_replay import buffers_of, outcome_of, replay_environment, with_lines
from pytest_cudaforge.programs import end_in_time

__all__ = ["Refused", "Replayed"]


class Refused(Exception):
    """This rung could not be reached; the text says why. ``lasting``: nor will it be for another candidate.
    ``stuck``: it was ended at its limit, by its own fault or because the candidate is slow."""

    def __init__(self, reason: str, *, lasting: bool = False, stuck: bool = False) -> None:
        super().__init__(reason)
        self.lasting, self.stuck = lasting, stuck


@dataclass
class Replayed:
    """Prepares calls on ``device`` and runs what looks at them."""

    device: str
    oracle: OracleClient

    @contextlib.contextmanager
    def prepared(self, call: ProfiledCall, *, watch: str, calls: int, limit_s: float) -> Iterator[Path]:
        """A folder for :mod:`.profiled_replay`. ``lined`` lies in it where the binaries have line numbers.

        Raises OracleError and TargetError where the call's inputs cannot be drawn.
        """
        layout = call_layout(call.product.traced, frames=1)
        with tempfile.TemporaryDirectory(prefix="cudaforge-profile-") as name, self._bench(call, layout) as opened:
            folder, (bench, arena) = Path(name), opened
            told = {"watch": watch, "calls": calls, "limit_s": int(limit_s) + 5, "device": self.device}
            with ThreadPoolExecutor(1) as pool:
                # Compiling with line numbers takes as long as drawing values.
                writing = pool.submit(_write, folder, call, layout, {**told, "arena_bytes": arena.nbytes})
                self.oracle.fill_all(bench, [CHANCE.fresh_seed()], 0)
                writing.result()
            handover = Handover(folder, arena.fd)
            try:
                yield folder
            finally:
                handover.close()

    @contextlib.contextmanager
    def _bench(self, call: ProfiledCall, layout: CallLayout) -> Iterator[tuple[int, ExportedArena]]:
        """Memory for the call's values, on the device."""
        bench, arena = self.oracle.open_bench(call.target, call.product.workload.name, "", layout.data)
        try:
            yield bench, arena
        finally:
            arena.close()
            self.oracle.close_bench(bench)

    def run(self, argv: Sequence[str], folder: Path, limit_s: float) -> None:
        """Run what makes the replay's calls and wait for it. Raises Refused where they were not all made."""
        outcome = folder / "outcome.json"
        outcome.unlink(missing_ok=True)
        try:
            status = end_in_time(argv, folder, replay_environment(folder), limit_s)
        except OSError as error:
            raise Refused(f"{Path(argv[0]).name} could not be started: {error}", lasting=True) from error
        if status is None:
            raise Refused(f"{Path(argv[0]).name} was ended after {limit_s:g} s", stuck=True)
        told = outcome_of(outcome)
        if not told.get("done"):
            raise Refused(str(told.get("error") or "the replay did not come to its end"))


class Handover:
    """Gives one descriptor to whoever connects to the socket in ``folder``, until it is closed."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self._descriptor = descriptor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A socket's address is short, a folder's may not be.
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        try:
            self._socket.bind(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
        finally:
            os.close(directory)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Closing the socket ends the wait; a client that is gone is waited for no longer.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    socket.send_fds(connection, [b"m"], [self._descriptor])

    def close(self) -> None:
        """No more; a second call does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=5)


def _write(folder: Path, call: ProfiledCall, layout: CallLayout, told: dict[str, Any]) -> None:
    """What the replay reads, and the source beside it, where a profiler looks for it."""
    product, buffers, names, lined = call.product, buffers_of(call.product, layout), [], True
    for index, binary in enumerate(product.binaries):
        with_table = with_lines(binary, call.lined)
        lined = lined and (with_table is not binary or binary.language != "cuda")
        names.append(f"binary-{index}")
        (folder / names[-1]).write_bytes(languages.binary_to_bytes(with_table))
    for name, text in call.candidate.files:
        if name.startswith("kernel.") and "/" not in name:
            (folder / name).write_text(text, encoding="utf-8")
    data = {
        **told,
        "traced": plan.encode(product.traced),
        "binaries": names,
        "memory": buffers.memory,
        "main": buffers.main,
        "prepare": buffers.prepare,
    }
    (folder / "call.json").write_text(json.dumps(data), encoding="utf-8")
    if lined:
        (folder / "lined").touch()
