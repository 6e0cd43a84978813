"""The highest rung on a GPU: Nsight Compute looks at the trusted replay of one call of a launch plan.

The replay (:mod:`.profiled_replay`) runs the very cubins that were verified or, for line numbers, cubins of the same
source whose instructions are the same byte by byte; ncu starts it in a session, a folder and a scrubbed environment of
its own and all of it ends at a time limit. Inputs hold values as the target draws them, which never leave the device:
the oracle draws them into an arena, whose descriptor the replay takes from a socket.

What ncu refuses, does not know or does not get done in time is a :class:`Refused` with a reason for the profile's
notes; the ladder (:mod:`.profiling`) goes on below.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_cudaforge import languages, plan
from pytest_cudaforge.evaluation.cases import CallLayout, call_layout
from pytest_cudaforge.evaluation.counter_reading import profile_of
from pytest_cudaforge.evaluation.oracle import ExportedArena, OracleClient
from pytest_cudaforge.evaluation.profiled_call import ProfiledCall
from pytest_cudaforge.evaluation.profiled_replay import SOCKET_NAME
from pytest_cudaforge.evaluation.trusted_replay import buffers_of, outcome_of, replay_environment, with_lines
from pytest_cudaforge.hardware import metrics, ncu
from pytest_cudaforge.programs import end_in_time
from pytest_cudaforge.records import Depth, Profile

__all__ = ["CounterProfiler", "Refused"]

#: Of one run of ncu, and of printing one page of its report. A call of gigabytes may take longer than a small one.
_RUN_S, _PAGE_S = {"quick": 30.0, "full": 90.0}, 30.0
_MOST_PAGE_BYTES = 64 << 20
#: How many reports stay in the cache.
_KEPT_REPORTS = 64


class Refused(Exception):
    """This rung could not be reached; the text says why. ``lasting``: nor will it be for another candidate."""

    def __init__(self, reason: str, *, lasting: bool = False) -> None:
        super().__init__(reason)
        self.lasting = lasting


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
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=5)


@dataclass
class CounterProfiler:
    """Runs ncu and reads its answers. ``unknown``: metrics that this device does not have, as far as was learnt."""

    program: Path
    device: str
    oracle: OracleClient
    cache_dir: Path
    unknown: set[str] = field(default_factory=set)

    def look(self, call: ProfiledCall, static: Profile) -> Profile:
        """``static`` with what ncu saw. Raises Refused; OracleError and TargetError where inputs cannot be drawn."""
        layout = call_layout(call.product.traced, frames=1)
        with tempfile.TemporaryDirectory(prefix="cudaforge-profile-") as name:
            folder = Path(name)
            with self._values(call, layout) as arena:
                lined = write_call(folder, call, layout, self.device, arena.nbytes, int(_RUN_S[static.depth]))
                handover = Handover(folder, arena.fd)
                try:
                    self._run(folder, static.depth)
                finally:
                    handover.close()
            pages = self._pages(folder, static.depth)
            report = self._kept(folder / "report.ncu-rep", static)
        notes = () if lined else ("the build with line numbers has other code: no source lines",)
        found = profile_of(call, static, pages)
        return replace(found, report=report, notes=(*found.notes, *notes))

    @contextlib.contextmanager
    def _values(self, call: ProfiledCall, layout: CallLayout) -> Iterator[ExportedArena]:
        """An arena with drawn values, on the device."""
        bench, arena = self.oracle.open_bench(call.target, call.product.workload.name, "", layout.data)
        try:
            self.oracle.fill_all(bench, [random.SystemRandom().getrandbits(62)], 0)
            yield arena
        finally:
            arena.close()
            self.oracle.close_bench(bench)

    def _run(self, folder: Path, depth: Depth) -> None:
        """Profile once, and once more without the metrics that ncu did not know. Raises Refused."""
        for _ in range(2):
            asked = metrics.chosen(self.unknown)
            reason, words = self._attempt(folder, depth, asked)
            if not reason:
                return
            unknown = ncu.unknown_metrics_in(words) & set(asked)
            if not unknown:
                break
            self.unknown |= unknown
        raise Refused(reason, lasting=ncu.lasting_refusal(words))

    def _attempt(self, folder: Path, depth: Depth, asked: Sequence[str]) -> tuple[str, str]:
        """Why there is no report ("" where there is one), and all that ncu said."""
        report, log = folder / "report.ncu-rep", folder / "ncu.log"
        (folder / "outcome.json").unlink(missing_ok=True)
        replayed = [sys.executable, "-B", "-m", "pytest_cudaforge.evaluation.profiled_replay", str(folder)]
        argv = ncu.command(self.program, report, replayed, depth=depth, metrics=asked, log=log)
        try:
            status = end_in_time(argv, folder, replay_environment(folder), _RUN_S[depth])
        except OSError as error:
            return f"ncu could not be started: {error}", ""
        words = _text(log) + _text(folder / "output.txt")
        told = outcome_of(folder / "outcome.json")
        if status is None:
            return f"ncu was ended after {_RUN_S[depth]:.0f} s", words
        if not told.get("done"):
            return ncu.refusal_in(words) or str(told.get("error") or "the replay under ncu did not finish"), words
        if not report.exists():
            return ncu.refusal_in(words) or f"ncu left no report (status {status})", words
        return "", words

    def _pages(self, folder: Path, depth: Depth) -> dict[str, str]:
        """The report's pages as CSV. Raises Refused where not even the metrics can be read."""
        wanted = ("raw", "source") if depth == "quick" else ("raw", "details", "source")
        pages: dict[str, str] = {}
        threads = [threading.Thread(target=self._page, args=(folder, page, pages)) for page in wanted]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not ncu.parse_raw(pages.get("raw", "")):
            words = " ".join(pages.get("raw", "").split())[:120]
            raise Refused(f"ncu printed no metrics that can be read: {words!r}")
        return pages

    def _page(self, folder: Path, page: str, pages: dict[str, str]) -> None:
        name = f"{page}.csv"
        argv = ncu.page_command(self.program, folder / "report.ncu-rep", page)
        with contextlib.suppress(OSError):
            end_in_time(argv, folder, replay_environment(folder), _PAGE_S, output=name)
            pages[page] = _text(folder / name)

    def _kept(self, report: Path, static: Profile) -> str:
        """Move the report into the cache; its place there, "" where it cannot be kept."""
        kept = self.cache_dir / "profiles"
        place = kept / f"{static.candidate[:16]}-{_file_name(static.workload)}-{static.depth}.ncu-rep"
        try:
            kept.mkdir(parents=True, exist_ok=True)
            temporary = place.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_bytes(report.read_bytes())
            os.replace(temporary, place)
            reports = sorted(kept.glob("*.ncu-rep"), key=lambda path: path.stat().st_mtime)
            for old in reports[:-_KEPT_REPORTS]:
                old.unlink(missing_ok=True)
        except OSError:
            return ""
        return str(place)


def write_call(
    folder: Path, call: ProfiledCall, layout: CallLayout, device: str, arena_bytes: int, limit_s: int
) -> bool:
    """What the replay reads, and the source beside it, where ncu looks for it. True where the binaries have lines."""
    product, buffers, names, lined = call.product, buffers_of(call.product, layout), [], True
    for index, binary in enumerate(product.binaries):
        with_table = with_lines(binary, call.lined)
        lined = lined and (with_table is not binary or binary.language != "cuda")
        names.append(f"binary-{index}")
        (folder / names[-1]).write_bytes(languages.binary_to_bytes(with_table))
    for name, text in call.candidate.files:
        if name.startswith("kernel.") and "/" not in name:
            (folder / name).write_text(text, encoding="utf-8")
    data: dict[str, Any] = {
        "traced": plan.encode(product.traced),
        "binaries": names,
        "device": device,
        "limit_s": limit_s,
        "arena_bytes": arena_bytes,
        "memory": buffers.memory,
        "main": buffers.main,
        "prepare": buffers.prepare,
    }
    (folder / "call.json").write_text(json.dumps(data), encoding="utf-8")
    return lined


def _text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_PAGE_BYTES)
    except OSError:
        return ""


def _file_name(workload: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "_" for char in workload)[:60]
