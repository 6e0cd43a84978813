"""compute-sanitizer's look at a winner: memcheck, racecheck and initcheck over one call of its smallest workload.

The tools watch a replay of the launch plan by trusted host code (:mod:`evaluation.sanitized_replay`): the very cubins
that were verified, or, for line numbers, cubins from the same source whose instructions are the same byte by byte.
Every buffer has an allocation of its own, without the red zones and neighbours that would swallow a small overrun.
Inputs and state hold drawn values; outputs and scratch are memory that nobody wrote. Library calls are not made: what
they would write is filled in (numbers near zero, indices zero), so that no finding is about a library and no torch has
to start. Prepare and main both run.

What refuses a candidate, and what is only reported:

* **memcheck** refuses for every access that is out of bounds or misaligned, also one whose value is never used:
  the next buffer in production is somebody else's, or no memory at all. Host calls that fail are not looked at.
* **racecheck** refuses for hazards of severity *error*: two threads of different warps touch one place of shared
  memory with no barrier between. It does not refuse for warnings (threads of one warp: warp intrinsics and code that
  counts on lockstep are often right), nor in a kernel that uses mbarriers (``cuda::barrier``, bulk copies, warp
  specialisation: what orders such accesses is partly invisible to the tool), nor where the tool says that it lost
  track. Whether a kernel uses them is read from its cubin, where ptxas put it. Racecheck is left out where no kernel
  has shared memory; global memory it never sees (repeated calls in the verification are there for that).
* **initcheck** refuses for reads of an *output* that nothing had written: outputs have no padding, so either the answer
  depends on what lay there, or the read is pointless. Reads of scratch are reported only: a kernel may read the padding
  of a scratch tile and mask it, and the two poisons of the verification show where that matters. Bulk stores, which
  the tool may not count as writes, take the refusal back as above.
* A tool that did not come to its end (time, memory, a launch that no longer fits beside the instrumentation) refuses
  nothing: it is noted. So is a missing compute-sanitizer, and so are workloads that are all too big.

Measured on an H200 (compute-sanitizer 2025.3): 0.8 to 2.3 s a tool on small calls, 5 to 7 s for all three on calls of
tens of MiB (five at once); no finding on twelve honest kernels, Triton's pipelined products among them.

The replay has a session, a folder and a scrubbed environment of its own, and it is killed at its limit; it is not in
the sandbox, since the tools must reach it, and nothing of the candidate's but device code runs there.

The report is text that a trusted program wrote into a file; a kernel's printf does not get there, and nothing in it
can take back a finding.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_cudaforge import languages, plan
from pytest_cudaforge.errors import BuildFailure
from pytest_cudaforge.evaluation.building import Product
from pytest_cudaforge.evaluation.cases import CallLayout, call_layout
from pytest_cudaforge.evaluation.oracle import ExportedArena
from pytest_cudaforge.evaluation.trusted_replay import buffers_of, outcome_of, replay_environment, with_lines
from pytest_cudaforge.languages import Binary
from pytest_cudaforge.languages.binary import KernelInfo, launches_of
from pytest_cudaforge.languages.cubin import uses_transaction_barriers
from pytest_cudaforge.programs import end_in_time
from pytest_cudaforge.records import SanitizerFinding, SanitizerReport

__all__ = ["Sanitizer", "call_bytes", "find_sanitizer", "fingerprint", "parse_log"]

TOOLS = ("memcheck", "racecheck", "initcheck")
#: Instrumented accesses are ten to a thousand times slower, and the values go through a file: no more than this.
MOST_BYTES = 512 << 20
#: For all tools together, and for one of them.
_BUDGET_S, _TOOL_S = 30.0, 12.0
#: Findings that a tool prints before it only counts.
_PRINTED = 200
_MOST_FINDINGS = 16
_MOST_LOG_BYTES = 4 << 20
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "memcheck": ("--report-api-errors", "no", "--padding", "256"),
    "racecheck": ("--racecheck-report", "analysis"),
    "initcheck": (),
}


def find_sanitizer(environ: Mapping[str, str]) -> Path | None:
    """compute-sanitizer on the PATH, in a CUDA toolkit or in NVIDIA's wheel; None where there is none."""
    found = shutil.which("compute-sanitizer", path=environ.get("PATH"))
    if found is not None:
        return Path(found)
    homes = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home) / folder for home in homes if home for folder in ("bin", "compute-sanitizer")]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        places += sorted(Path(folder).glob("cu*/compute-sanitizer"))
    programs = (place / "compute-sanitizer" for place in places)
    return next((program for program in programs if os.access(program, os.X_OK)), None)


def call_bytes(product: Product) -> int:
    """Bytes of all buffers of one call."""
    return int(call_layout(product.traced, frames=1).data["nbytes"])


# -- the tools ---------------------------------------------------------------------------------------------------


@dataclass
class Sanitizer:
    """``program`` is compute-sanitizer. ``lined`` compiles a product's binary once more with line numbers, or returns
    None."""

    program: Path
    device: str
    lined: Callable[[Binary], Binary | None] = lambda binary: None
    _notes: list[str] = field(default_factory=list)

    def examine(self, product: Product, layout: CallLayout, values: ExportedArena) -> SanitizerReport:
        """Run the tools over one call; ``values`` is a copy of the arena as ``layout`` lays it out."""
        began = time.monotonic()
        self._notes = []
        tools: list[str] = []
        findings: list[SanitizerFinding] = []
        with tempfile.TemporaryDirectory(prefix="cudaforge-sanitizer-") as name:
            folder = Path(name)
            self._write_call(folder, product, layout, values)
            for tool in TOOLS:
                left_s = _BUDGET_S - (time.monotonic() - began)
                if not self._wanted(tool, product, left_s):
                    continue
                found = self._run(tool, folder, product, min(_TOOL_S, left_s))
                if found is not None:
                    tools.append(tool)
                    findings += found
                if any(finding.refuses for finding in findings):
                    break
        seconds = round(time.monotonic() - began, 3)
        name = product.workload.name
        return SanitizerReport(name, tuple(tools), tuple(findings[:_MOST_FINDINGS]), tuple(self._notes), seconds)

    def _wanted(self, tool: str, product: Product, left_s: float) -> bool:
        if left_s <= 1.0:
            self._notes.append(f"{tool} was left out: the time for all tools was used up")
            return False
        if tool == "racecheck" and not _shares_memory(product):
            self._notes.append("racecheck was left out: no kernel has shared memory")
            return False
        return True

    def _write_call(self, folder: Path, product: Product, layout: CallLayout, values: ExportedArena) -> None:
        buffers = buffers_of(product, layout)
        names = []
        for index, binary in enumerate(product.binaries):
            names.append(f"binary-{index}")
            (folder / names[-1]).write_bytes(languages.binary_to_bytes(with_lines(binary, self.lined)))
        call = {
            "traced": plan.encode(product.traced),
            "binaries": names,
            "device": self.device,
            "limit_s": int(_TOOL_S) + 1,
            "memory": buffers.memory,
            "main": buffers.main,
            "prepare": buffers.prepare,
        }
        (folder / "call.json").write_text(json.dumps(call), encoding="utf-8")
        with open(values.fd, "rb", closefd=False) as source, open(folder / "values.bin", "wb") as copy:
            source.seek(0)
            shutil.copyfileobj(source, copy, 1 << 20)

    def _run(self, tool: str, folder: Path, product: Product, limit_s: float) -> list[SanitizerFinding] | None:
        """The tool's findings; None where it did not come to its end, with a note that says why."""
        log, outcome = folder / f"{tool}.log", folder / "outcome.json"
        outcome.unlink(missing_ok=True)
        argv = [str(self.program), "--tool", tool, *_OPTIONS[tool], "--show-backtrace", "no", "--demangle", "no"]
        argv += ["--print-limit", str(_PRINTED), "--log-file", str(log)]
        argv += [sys.executable, "-B", "-m", "pytest_cudaforge.evaluation.sanitized_replay", str(folder)]
        ended = end_in_time(argv, folder, replay_environment(folder), limit_s) is not None
        told = outcome_of(outcome)
        text = log.read_text(encoding="utf-8", errors="replace")[:_MOST_LOG_BYTES] if log.exists() else ""
        parsed = parse_log(tool, text)
        found = [self._judged(tool, record, product, told, parsed.lost_track) for record in parsed.records]
        if found:
            return found
        if not ended:
            self._notes.append(f"{tool} was ended after {limit_s:.0f} s without a finding")
        elif not parsed.complete or not told.get("done"):
            reason = told.get("error") or parsed.trouble or "it wrote no summary"
            self._notes.append(f"{tool} did not come to its end: {reason}"[:400])
        else:
            return []
        return None

    def _judged(
        self, tool: str, record: Record, product: Product, outcome: Mapping[str, Any], lost_track: bool
    ) -> SanitizerFinding:
        kernel = next((k for b in product.binaries for k in b.kernels if k.symbol == record.function), None)
        detail = _named_place(record.detail, outcome)
        refuses = record.grave
        if tool == "initcheck":
            refuses = refuses and detail.startswith("output ")
        if tool != "memcheck" and refuses and (lost_track or _hides_order(product, record.function)):
            refuses, detail = False, f"{detail}; not refused: mbarriers order accesses unseen".lstrip("; ")
        name = kernel.expression if kernel is not None else record.function
        return SanitizerFinding(tool, record.kind, name, record.place, record.count, refuses, detail)


def _shares_memory(product: Product) -> bool:
    """May any kernel of the plan use shared memory? Unknown counts as yes."""
    if any(launch.shared_bytes or launch.cluster for launch in launches_of(product.traced)):
        return True
    for kernel in (kernel for binary in product.binaries for kernel in binary.kernels):
        static_bytes = kernel.resources.static_shared_bytes
        # A compiler that decides about launches says there what its kernels share.
        told = static_bytes != 0 if kernel.compiled is None else kernel.compiled.shared_bytes or static_bytes
        if told:
            return True
    return False


def _code_of(binary: Binary, kernel: KernelInfo) -> bytes:
    """The kernel's cubin: a binary may hold one after the other."""
    compiled = kernel.compiled
    if compiled is None:
        return binary.code
    return binary.code[compiled.code_start : compiled.code_start + compiled.code_bytes]


def _hides_order(product: Product, symbol: str) -> bool:
    """Does the kernel use mbarriers? Where it is not found, does any of the plan's?"""
    pairs = [(_code_of(binary, kernel), kernel.symbol) for binary in product.binaries for kernel in binary.kernels]
    asked = [pair for pair in pairs if pair[1] == symbol] or pairs
    try:
        return any(uses_transaction_barriers(code, name) for code, name in asked)
    except BuildFailure:
        return False


def _named_place(detail: str, outcome: Mapping[str, Any]) -> str:
    """An address as a place in a buffer: ``output 2, 4 bytes behind its end``; the text as it is where none fits."""
    match = re.search(r"(?:Address|Access (?:at|to)) (0x[0-9a-f]+)", detail)
    if match is None:
        return detail
    address, nearest = int(match.group(1), 16), ""
    distance = 1 << 20
    for name, start, nbytes in outcome.get("buffers", ()):
        if start <= address < start + nbytes:
            return f"{name}, byte {address - start} of {nbytes}"
        behind, before = address - (start + nbytes) + 1, start - address
        for gap, word in ((behind, "behind its end"), (before, "before its start")):
            if 0 < gap < distance:
                distance, nearest = gap, f"{name}, {gap} bytes {word}"
    return nearest or detail


# -- reading a log -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One report of a tool, or several of the same place. ``grave``: what the tool itself calls an error."""

    kind: str
    function: str
    place: str
    count: int
    grave: bool
    detail: str


@dataclass(frozen=True)
class ParsedLog:
    """``complete``: the tool wrote its summary. ``lost_track``: it says that its results may be wrong. ``trouble`` is
    the first complaint about the run itself."""

    records: tuple[Record, ...]
    complete: bool
    lost_track: bool
    trouble: str


_LINE = re.compile(r"^={9}(?: (?P<head>\S.*)|\s{2,}(?P<detail>\S.*))$")
_SUMMARY = re.compile(r"^(?:ERROR|RACECHECK|SYNCCHECK|INITCHECK) SUMMARY: \d+")
#: Two forms: ``kernel(int *)+0x70 in kernel.cu:8`` and ``0x70 in kernel.cu:8:kernel(int *)``.
_AT = (
    re.compile(r"(?P<function>\S.*?)\+(?P<offset>0x[0-9a-f]+)(?: in (?P<file>\S+):(?P<line>\d+))?"),
    re.compile(r"(?P<offset>0x[0-9a-f]+) in (?:(?P<file>[^\s:]+):(?P<line>\d+):)?(?P<function>\S.*)"),
)
_RACE = re.compile(r"^(?P<severity>\w+): Race reported between (?P<access>\w+) access at (?P<place>.+)$")
_OTHER_ACCESS = re.compile(r"^and (?P<access>\w+) access at (?P<place>.+?)(?: \[(?P<count>\d+) hazards?\])?$")
_ACCESS = re.compile(r"^(Invalid|Uninitialized|Misaligned|Potential invalid) __\w+__ ")
#: Headlines about the run, not about the kernel.
_ABOUT_RUN = ("Error:", "Internal", "Target application", "Program hit", "Warning:", "Tracking", "Device not")


def parse_log(tool: str, text: str) -> ParsedLog:
    """What a log of compute-sanitizer says; equal reports of one place are one record."""
    merged: dict[tuple[str, str, str, bool], Record] = {}
    complete = lost_track = False
    trouble = ""
    for head, details in _reports(text):
        complete = complete or _SUMMARY.match(head) is not None
        lost_track = lost_track or "Results might be incorrect" in head
        record = _record(tool, head, details)
        if record is not None:
            key = (record.kind, record.function, record.place, record.grave)
            known = merged.get(key)
            merged[key] = record if known is None else replace(known, count=known.count + record.count)
        elif head.startswith(_ABOUT_RUN) and not trouble:
            trouble = head
    return ParsedLog(tuple(merged.values()), complete, lost_track, trouble)


def _reports(text: str) -> Iterator[tuple[str, list[str]]]:
    """Headlines with the lines below them."""
    head, details = "", list[str]()
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        if match["head"] is not None:
            if head:
                yield head, details
            head, details = match["head"].strip(), []
        else:
            details.append(match["detail"].strip())
    if head:
        yield head, details


def _record(tool: str, head: str, details: Sequence[str]) -> Record | None:
    race = _RACE.match(head)
    if race is not None:
        return _race(race, details)
    if _ACCESS.match(head) is None:
        return None
    function, place = _location(next((d.removeprefix("at ") for d in details if d.startswith("at ")), ""))
    told = [d for d in details if not d.startswith(("at ", "by "))]
    grave = not head.startswith("Potential")
    return Record(_plain(head), function, place, 1, grave, _plain(" ".join(told[:2])))


def _race(first: re.Match[str], details: Sequence[str]) -> Record:
    function, place = _location(first["place"])
    kinds, places, count = [first["access"].lower()], [place], 0
    for detail in details:
        other = _OTHER_ACCESS.match(detail)
        if other is not None:
            kinds.append(other["access"].lower())
            places.append(_location(other["place"])[1])
            count += int(other["count"] or 1)
    kind = f"race in shared memory: {' against '.join(dict.fromkeys(kinds))}"
    where = " and ".join(dict.fromkeys(part for part in places if part))
    return Record(kind, function, where, max(count, 1), first["severity"].lower() == "error", "")


def _location(text: str) -> tuple[str, str]:
    """(function, ``file:line`` or ``+offset``) of an access."""
    for form in _AT:
        match = form.fullmatch(text.strip())
        if match is not None:
            place = f"{match['file']}:{match['line']}" if match["file"] else f"+{match['offset']}"
            return _plain(match["function"]), _plain(place)
    return "", _plain(text)


def _plain(text: str) -> str:
    """Names in a cubin and lines of a source are the candidate's: one printable line of some length."""
    return "".join(char if char.isprintable() else "?" for char in text)[:300]


def fingerprint(product: Product) -> str:
    """Of what the tools would look at: the plan and its binaries."""
    digest = hashlib.sha256(json.dumps(plan.encode(product.traced), sort_keys=True).encode())
    for binary in product.binaries:
        digest.update(binary.code)
    return digest.hexdigest()
