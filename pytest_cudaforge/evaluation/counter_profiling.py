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
import hashlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_cudaforge.evaluation.counter_reading import profile_of
from pytest_cudaforge.evaluation.profiled_call import ProfiledCall
from pytest_cudaforge.evaluation.replayed import Refused, Replayed
from pytest_cudaforge.evaluation.trusted_replay import replay_environment
from pytest_cudaforge.hardware import metrics, ncu, report_reading
from pytest_cudaforge.hardware.ncu import RawKernel, Reading
from pytest_cudaforge.programs import end_in_time
from pytest_cudaforge.records import Depth, Profile

__all__ = ["CounterProfiler"]

#: Of one run of ncu, and of printing one page of its report. A call of gigabytes may take longer than a small one.
_RUN_S, _PAGE_S = {"quick": 30.0, "full": 90.0}, 30.0
_MOST_PAGE_BYTES = 64 << 20
#: How many reports stay in the cache.
_KEPT_REPORTS = 64
#: What is overwritten and read before a call that is to find its caches empty, in sizes of the L2.
_FLUSHES = 2
_PAGES: dict[str, tuple[str, ...]] = {"quick": ("raw", "source"), "full": ("raw", "details", "source")}


@dataclass
class CounterProfiler:
    """Runs ncu and reads its answers; it learns once which metrics the device has, and keeps that in the cache.

    Of a call of several kernels it takes a second look: the first empties the caches before each kernel, as it must to
    go over it several times, and so says nothing of what one leaves in the L2 for the next.
    """

    program: Path
    replayed: Replayed
    cache_dir: Path
    #: Why kernels are not looked at inside their calls any more; "" while they are.
    only_alone: str = ""
    #: What the last of those looks saw, and of which candidate's call: a deeper profile of it needs no other.
    seen_inside: tuple[tuple[str, str, str], tuple[RawKernel, ...]] = (("", "", ""), ())

    def look(self, call: ProfiledCall, static: Profile) -> Profile:
        """``static`` with what ncu saw. Raises Refused; OracleError and TargetError where inputs cannot be drawn."""
        limit_s = _RUN_S[static.depth]
        with self.replayed.prepared(call, watch="counters", calls=1, limit_s=limit_s) as folder:
            self._run(call, folder, static.depth)
            reading = self._reading(folder, static.depth)
            self._learn(call, reading)
            report = self._kept(folder / "report.ncu-rep", static)
            lined = (folder / "lined").exists()
            inside, told = self._inside(call, folder, reading, static.depth)
        notes = (*told, *(() if lined else ("the build with line numbers has other code: no source lines",)))
        found = profile_of(call, static, reading, inside, once=_is_long(call, static.depth))
        return replace(found, report=report, notes=(*found.notes, *notes))

    def _inside(
        self, call: ProfiledCall, folder: Path, reading: Reading, depth: Depth
    ) -> tuple[tuple[RawKernel, ...], tuple[str, ...]]:
        """Of a call of several kernels what each takes inside it, where it finds in the caches what the ones before it
        left there; and notes."""
        if len(reading.kernels) < 2 or _is_long(call, depth):
            return (), ()
        which = (call.candidate.digest, call.target.id, call.product.workload.name)
        if self.seen_inside[0] == which and _shapes(self.seen_inside[1]) == _shapes(reading.kernels):
            return self.seen_inside[1], ()
        why = self.only_alone
        try:
            if not why:
                self.seen_inside = (which, self._look_inside(call, folder, reading, depth))
                return self.seen_inside[1], ()
        except Refused as refusal:
            why = str(refusal)
            if refusal.stuck or refusal.lasting:
                self.only_alone = why
        return (), (f"kernels were looked at alone only, from empty caches: {why}",)

    def _look_inside(self, call: ProfiledCall, folder: Path, reading: Reading, depth: Depth) -> tuple[RawKernel, ...]:
        """The launches of ``reading`` once more, with few metrics. Raises Refused."""
        report, log = folder / "inside.ncu-rep", folder / "inside.log"
        asked = metrics.in_call(metrics.load_unknown(self._answers(call)) or ())
        replayed = [*_replay_command(folder), str(_FLUSHES * call.device.l2_bytes)]
        argv = ncu.command(self.program, report, replayed, depth="quick", metrics=asked, log=log, keep_caches=True)
        self.replayed.run(argv, folder, _RUN_S[depth])
        if ncu.passes_in(_text(log)) > 1:
            raise Refused("this device cannot count time and bytes in one pass", lasting=True)
        found = report_reading.read(report, self.program, folder, replay_environment(folder))
        if found is None:
            pages: dict[str, str] = {}
            self._page(folder, "raw", pages, report)
            found = ncu.read_pages(pages)
        if _shapes(found.kernels) != _shapes(reading.kernels):
            raise Refused("a second look saw other kernels")
        return found.kernels

    def _run(self, call: ProfiledCall, folder: Path, depth: Depth) -> None:
        """Profile once, and once more without the metrics that ncu did not know. Raises Refused."""
        unknown = metrics.load_unknown(self._answers(call))
        asked = metrics.chosen(unknown) + (metrics.by_line() if self._by_name(depth) else ())
        try:
            self._profile(call, folder, depth, asked)
        except Refused as refusal:
            words = _said(folder)
            named = ncu.unknown_metrics_in(words)
            complained = {name for name in asked if name.removeprefix("group:") in named}
            if not complained:
                raise _explained(refusal, words) from None
            # Some versions refuse the whole run for a name that they do not know, others leave it out.
            asked = tuple(name for name in asked if name not in complained)
            try:
                self._profile(call, folder, depth, asked)
            except Refused as again:
                raise _explained(again, _said(folder)) from None

    def _by_name(self, depth: Depth) -> bool:
        """Ask for what lines need by its metrics' names? That takes a second less than their section."""
        return depth == "quick" and report_reading.available(self.program)

    def _learn(self, call: ProfiledCall, reading: Reading) -> None:
        """Which metrics of the table this device does not have, where all of them were asked for."""
        file = self._answers(call)
        if metrics.load_unknown(file) is None:
            metrics.store_unknown(file, metrics.lacking({name for k in reading.kernels for name in k.figures}))

    def _answers(self, call: ProfiledCall) -> Path:
        """By device and ncu: another version of either may know others."""
        stamp = self.program.stat().st_mtime_ns if self.program.exists() else 0
        identity = [call.device.name, call.device.arch, call.device.uuid, str(self.program.resolve()), stamp]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        return self.cache_dir / f"ncu-metrics-{digest}.json"

    def _profile(self, call: ProfiledCall, folder: Path, depth: Depth, asked: Sequence[str]) -> None:
        report, log = folder / "report.ncu-rep", folder / "ncu.log"
        replayed = _replay_command(folder)
        # Printed pages have the stall reasons of a line where the section was asked for, and only there.
        sections = ("SourceCounters",) if depth == "quick" and not self._by_name(depth) else ()
        argv = ncu.command(
            self.program,
            report,
            replayed,
            depth=depth,
            metrics=asked,
            log=log,
            sections=sections,
            once=_is_long(call, depth),
        )
        self.replayed.run(argv, folder, _RUN_S[depth])
        if not report.exists():
            raise Refused("ncu left no report")

    def _reading(self, folder: Path, depth: Depth) -> Reading:
        """The report through NVIDIA's module, or its pages. Raises Refused where not even the metrics can be read."""
        report = folder / "report.ncu-rep"
        found = report_reading.read(report, self.program, folder, replay_environment(folder))
        if found is None:
            found = ncu.read_pages(self._pages(folder, depth))
        if not found.kernels:
            words = " ".join(_text(folder / "raw.csv").split())[:120]
            raise Refused(f"ncu printed no metrics that can be read: {words!r}")
        return found

    def _pages(self, folder: Path, depth: Depth) -> dict[str, str]:
        """The report's pages as CSV."""
        pages: dict[str, str] = {}
        threads = [threading.Thread(target=self._page, args=(folder, page, pages)) for page in _PAGES[depth]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return pages

    def _page(self, folder: Path, page: str, pages: dict[str, str], report: Path | None = None) -> None:
        name = f"{page}.csv"
        argv = ncu.page_command(self.program, report or folder / "report.ncu-rep", page)
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


def _replay_command(folder: Path) -> list[str]:
    return [sys.executable, "-B", "-m", "pytest_cudaforge.evaluation.profiled_replay", str(folder)]


def _shapes(launches: Sequence[RawKernel]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(launch.symbol, launch.grid, launch.block) for launch in launches]


def _is_long(call: ProfiledCall, depth: Depth) -> bool:
    """Are there too many launches in the call to look at each of them?"""
    return len(call.product.traced.main.steps) > ncu.MOST_LAUNCHES[depth]


def _explained(refusal: Refused, words: str) -> Refused:
    """The refusal in ncu's own words, where it has some."""
    lasting = refusal.lasting or ncu.lasting_refusal(words)
    return Refused(ncu.refusal_in(words) or str(refusal), lasting=lasting, stuck=refusal.stuck)


def _said(folder: Path) -> str:
    """All that ncu printed."""
    return _text(folder / "ncu.log") + _text(folder / "output.txt")


def _text(path: Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_PAGE_BYTES)
    except OSError:
        return ""


def _file_name(workload: str) -> str:
    return "".join(char if char.isalnum() or char in "-_" else "_" for char in workload)[:60]
