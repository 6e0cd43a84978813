"""Nsight Compute's command line: where it is, how it is asked, and what its answers say.

Its answers are read from CSV (``--csv`` with ``--print-units base``), one page for each thing: ``raw`` (every metric of
every kernel), ``details`` (rules with their estimated speedup), ``source`` (stall samples, instructions and excess
sectors by source line). The readers are pure; what they do not know they leave out, so that another version's columns
cost a figure and not the profile.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "RawKernel",
    "RawRule",
    "Reading",
    "SourceLine",
    "command",
    "find_ncu",
    "lasting_refusal",
    "line_column",
    "number",
    "page_command",
    "parse_raw",
    "parse_rules",
    "parse_source",
    "passes_in",
    "plain",
    "read_pages",
    "refusal_in",
    "unknown_metrics_in",
]

#: Launches of one call that are looked at one by one, each of them several times over (up to a second a launch); of a
#: longer call one launch of each kernel and shape.
MOST_LAUNCHES = {"quick": 12, "full": 6}
#: A call's library kernels come on top of its own, and nobody knows how many they are.
_MOST_IN_ALL = 64


def find_ncu(environ: Mapping[str, str]) -> Path | None:
    """ncu on the PATH, in a CUDA toolkit, an installation of its own or NVIDIA's wheel; None where there is none."""
    found = shutil.which("ncu", path=environ.get("PATH"))
    if found is not None:
        return Path(found)
    homes = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home) / "bin" / "ncu" for home in homes if home]
    # Newest last in the alphabet, as versions begin with the year.
    places += sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"), reverse=True)
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        places += sorted(Path(folder).glob("**/nsight-compute*/ncu"), reverse=True)
    return next((place for place in places if os.access(place, os.X_OK)), None)


def command(
    program: Path,
    report: Path,
    application: Sequence[str],
    *,
    depth: str,
    metrics: Sequence[str],
    log: Path,
    sections: Sequence[str] = (),
    once: bool = False,
    keep_caches: bool = False,
) -> list[str]:
    """The command line that profiles ``application`` between its profiler's start and stop: the full set and its rules,
    or ``metrics`` and ``sections`` alone. ``once``: one launch of each kernel and shape.

    Clocks are left as they are: locking them needs privileges, and it is others' GPU, too. Caches are emptied before
    each pass (ncu's own default), so that every pass over a kernel finds the same; with ``keep_caches`` a kernel finds
    what the one before it left, which holds where one pass is enough.
    """
    argv = [str(program), "--profile-from-start", "off", "--clock-control", "none", "--target-processes", "all"]
    argv += ["--filter-mode", "per-launch-config"] if once else []
    argv += ["--cache-control", "none"] if keep_caches else []
    argv += ["--launch-count", "1" if once else str(_MOST_IN_ALL), "--check-exit-code", "no", "--force-overwrite"]
    argv += ["--export", str(report), "--metrics", ",".join(metrics)]
    argv += ["--set", "full"] if depth == "full" else []
    argv += [word for name in sections for word in ("--section", name)]
    argv += ["--import-source", "yes", "--source-folders", str(report.parent), "--log-file", str(log)]
    return [*argv, *application]


def page_command(program: Path, report: Path, page: str) -> list[str]:
    """The command line that prints one page of a report as CSV: "raw", "details" or "source"."""
    argv = [str(program), "--import", str(report), "--csv", "--page", page, "--print-units", "base", "--print-fp"]
    if page == "raw":
        argv += ["--print-kernel-base", "mangled"]
    if page == "source":
        argv += ["--print-source", "cuda,sass", "--print-kernel-base", "mangled"]
    return argv


# -- what went wrong ---------------------------------------------------------------------------------------------

_COMPLAINT = re.compile(r"^==ERROR== (?P<text>.*\S)", re.MULTILINE)
_KNOWN = (
    (re.compile(r"ERR_NVGPUCTRPERM"), "ERR_NVGPUCTRPERM: this user may not read the GPU's performance counters"),
    (
        re.compile(r"driver resource was unavailable", re.IGNORECASE),
        "another tool (such as DCGM) holds the GPU's performance counters",
    ),
    (re.compile(r"LibraryNotLoaded"), "ncu could not load the driver's profiling library (LibraryNotLoaded)"),
    (re.compile(r"InsufficientDriver|driver.*not supported", re.IGNORECASE), "the driver is too old for this ncu"),
)
_METRIC = re.compile(r"\b[a-z0-9]+__[A-Za-z0-9_.]+")


def refusal_in(text: str) -> str:
    """Why nothing was profiled, in one line, from all that ncu printed; "" where it says nothing."""
    for pattern, words in _KNOWN:
        if pattern.search(text):
            return words
    found = _COMPLAINT.search(text)
    return plain(found["text"])[:200] if found is not None else ""


def lasting_refusal(text: str) -> bool:
    """Does what ncu printed say that it will refuse any other kernel, too?"""
    return any(pattern.search(text) for pattern, _ in _KNOWN)


_PASSES = re.compile(r"^==PROF== Profiling .* (\d{1,4}) pass(?:es)?\s*$", re.MULTILINE)


def passes_in(text: str) -> int:
    """How many passes a kernel took at most; 0 where what ncu printed does not say it."""
    return max(map(int, _PASSES.findall(text)), default=0)


def unknown_metrics_in(text: str) -> frozenset[str]:
    """Names of metrics that ncu says it does not know."""
    lines = (line for line in text.splitlines() if line.startswith("==") and "metric" in line.lower())
    return frozenset(name.rstrip(".") for line in lines for name in _METRIC.findall(line))


# -- pages -------------------------------------------------------------------------------------------------------

Figures = Mapping[str, tuple[float, str]]


@dataclass(frozen=True)
class RawKernel:
    """One profiled launch: its number in the report, the symbol, and (value, base unit) by metric."""

    number: int
    symbol: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    figures: Figures


@dataclass(frozen=True)
class RawRule:
    """A rule that fired for launch ``number``; ``speedup_percent``: its estimate of what the kernel may gain, where it
    gives one (an estimate for one unit only, ncu's "local", is none)."""

    number: int
    rule: str
    text: str
    speedup_percent: float | None


@dataclass(frozen=True)
class SourceLine:
    """A line of the source by (file name, number), summed over its instructions; figures by ncu's column names."""

    symbol: str
    file: str
    line: int
    text: str
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Reading:
    """What a report holds, however it was read; rules of the greatest estimated gain first."""

    kernels: tuple[RawKernel, ...]
    rules: tuple[RawRule, ...] = ()
    lines: tuple[SourceLine, ...] = ()


def read_pages(pages: Mapping[str, str]) -> Reading:
    """A report from its printed pages "raw", "details" and "source"; what is missing is empty."""
    return Reading(
        parse_raw(pages.get("raw", "")), parse_rules(pages.get("details", "")), parse_source(pages.get("source", ""))
    )


def number(text: str) -> float | None:
    """A cell's number, thousands separated or not; None for "n/a", "nan", "-" and words."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_metric(name: str) -> bool:
    """The page's other columns are words: "Kernel Name", "CC"."""
    return "__" in name or name.startswith(("memory_", "inst_"))


def parse_raw(text: str) -> tuple[RawKernel, ...]:
    """The raw page: a row of names, a row of units, a row for each launch."""
    rows = _rows(text)
    names = next((row for row in rows if "ID" in row and "Kernel Name" in row), None)
    units = next(rows, None)
    if names is None or units is None:
        return ()
    kernels = []
    for row in rows:
        if len(row) != len(names):
            continue
        cells = dict(zip(names, row, strict=True))
        figures = {}
        for name, unit, cell in zip(names, units, row, strict=False):
            value = number(cell)
            if value is not None and _is_metric(name):
                figures[name] = (value, unit)
        index = number(cells["ID"])
        sizes = (_sizes(cells.get("Grid Size", "")), _sizes(cells.get("Block Size", "")))
        kernels.append(RawKernel(int(index or 0), plain(cells["Kernel Name"]), *sizes, figures))
    return tuple(kernels)


def parse_rules(text: str) -> tuple[RawRule, ...]:
    """The details page's rules that say something to be mended, those of the greatest estimated speedup first."""
    rows = _rows(text)
    names = next((row for row in rows if "Rule Name" in row), None)
    if names is None:
        return ()
    found: dict[tuple[int, str, str], RawRule] = {}
    for row in rows:
        cells = dict(zip(names, row, strict=False))
        if not cells.get("Rule Name") or cells.get("Rule Type") not in ("OPT", "WRN"):
            continue
        index, rule = int(number(cells.get("ID", "")) or 0), plain(cells["Rule Name"])
        words = plain(cells.get("Rule Description", ""))
        whole = cells.get("Estimated Speedup Type") == "global"
        speedup = number(cells.get("Estimated Speedup", "")) if whole else None
        found.setdefault((index, rule, words), RawRule(index, rule, words, speedup))
    return tuple(sorted(found.values(), key=lambda rule: -(rule.speedup_percent or 0.0)))


#: Columns of metrics that were asked for by name, outside of their section, as the section calls them.
_COLUMNS = {
    "group:smsp__pcsamp_warp_stall_reasons": "# Samples",
    "inst_executed": "Instructions Executed",
    "memory_l2_theoretical_sectors_global": "L2 Theoretical Sectors Global",
    "memory_l2_theoretical_sectors_global_ideal": "L2 Theoretical Sectors Global Ideal",
    "memory_l2_theoretical_sectors_local": "L2 Theoretical Sectors Local",
    "memory_l1_wavefronts_shared": "L1 Wavefronts Shared",
    "memory_l1_wavefronts_shared_ideal": "L1 Wavefronts Shared Ideal",
}


def line_column(metric: str) -> str:
    """What the source page calls a metric."""
    return _COLUMNS.get(metric, metric)


def parse_source(text: str) -> tuple[SourceLine, ...]:
    """The source page (``cuda,sass``): for each file and function a row for each line, with its instructions' sums."""
    found: list[SourceLine] = []
    file = symbol = ""
    names: list[str] = []
    for row in _rows(text):
        if len(row) < 2:
            continue
        if row[0] == "File Path":
            file, names = plain(Path(row[1]).name), []
        elif row[0] in ("Function Name", "Kernel Name"):
            symbol, names = plain(row[1]), []
        elif row[0] == "Line No":
            names = [line_column(name) for name in row]
        elif names and row[0].isdecimal() and len(row[0]) < 10:
            pairs = zip(names[2:], row[2:], strict=False)
            figures = {name: value for name, cell in pairs if (value := number(cell)) is not None}
            found.append(SourceLine(symbol, file, int(row[0]), plain(row[1]).rstrip(), figures))
    return tuple(found)


def _rows(text: str) -> Iterator[list[str]]:
    """CSV rows as far as they are any; ncu's own remarks (``==PROF==``) stand between them."""
    reader = csv.reader(line.replace("\0", " ") for line in io.StringIO(text) if not line.startswith("=="))
    while True:
        try:
            row = next(reader)
        except (StopIteration, csv.Error):
            return
        if row:
            yield row


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,10}", text)[:3])


def plain(text: str) -> str:
    """Names and lines are the candidate's: printable, and of some length."""
    return "".join(char if char.isprintable() else " " for char in text)[:1000]
