"""A report of Nsight Compute, read through NVIDIA's own Python module instead of printed pages.

``ncu_report`` ships with Nsight Compute (``extras/python``), and PyPI has it. It reads a report in a fifth of the time
that printing its pages takes, and values are exact where a page has two decimals. It is a native library, so it runs in
a child: ``python -m pytest_cudaforge.hardware.report_reading REPORT OUT FOLDER`` writes the launches, rules and source
lines as JSON; :func:`read` asks for it. Where the module is missing, or of a version that cannot read the report, the
pages are there (:mod:`hardware.ncu`), which say the same.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pytest_cudaforge.hardware.ncu import RawKernel, RawRule, Reading, SourceLine, line_column, plain
from pytest_cudaforge.programs import end_in_time

__all__ = ["available", "module_folder", "read"]

_LIMIT_S = 15.0
#: Rules' messages that ask for something: an optimization, a warning.
_ASKING = (2, 3)
#: An estimate for the whole kernel; the other kind is for one unit of it.
_GLOBAL = 2
_SAMPLES = "smsp__pcsamp_warps_issue_stalled_"
#: Metrics by instruction that are summed up by line.
_BY_LINE = (
    "inst_executed",
    "memory_l2_theoretical_sectors_global",
    "memory_l2_theoretical_sectors_global_ideal",
    "memory_l2_theoretical_sectors_local",
    "memory_l1_wavefronts_shared",
    "memory_l1_wavefronts_shared_ideal",
)
#: Stall reasons as the source page shortens them.
_REASONS = {
    "branch_resolving": "branch_resolving",
    "dispatch_stall": "dispatch",
    "imc_miss": "imc",
    "lg_throttle": "lg",
    "long_scoreboard": "long_sb",
    "math_pipe_throttle": "math",
    "mio_throttle": "mio",
    "no_instructions": "no_inst",
    "short_scoreboard": "short_sb",
    "sleeping": "sleep",
    "tex_throttle": "tex",
}
_MARKUP = re.compile(r"@(?:section:[^:@]*|url):([^:@]*)(?::[^@]*)?@|@section:[^:@]*:([^@]*)@")


def module_folder(program: Path) -> Path | None:
    """Where ``ncu_report`` lies beside this ncu; None where it does not (it may be installed all the same)."""
    # /usr/local/cuda/bin/ncu is a script that starts the one of the installation.
    bases = [program.resolve().parent, *program.resolve().parents[1].glob("nsight-compute*")]
    bases += sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True)
    places = (base / "extras" / "python" for base in bases)
    names = ("ncu_report.py", "ncu_report")
    return next((place for place in places if any((place / name).exists() for name in names)), None)


def available(program: Path) -> bool:
    """Is the module here at all?"""
    return module_folder(program) is not None or importlib.util.find_spec("ncu_report") is not None


def read(report: Path, program: Path, folder: Path, environment: Mapping[str, str]) -> Reading | None:
    """What the report holds, or None where the module is not here or does not read it. ``folder`` is the child's."""
    if not available(program):
        return None
    beside = module_folder(program)
    out = folder / "report.json"
    argv = [sys.executable, "-B", "-m", "pytest_cudaforge.hardware.report_reading", str(report), str(out)]
    argv.append(str(beside) if beside is not None else "")
    try:
        if end_in_time(argv, folder, environment, _LIMIT_S, output="reading.txt") != 0:
            return None
        return _reading(json.loads(out.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _reading(data: Any) -> Reading | None:
    kernels = tuple(
        RawKernel(
            int(k["number"]),
            plain(k["symbol"]),
            tuple(map(int, k["grid"])),
            tuple(map(int, k["block"])),
            {str(name): (float(value), str(unit)) for name, value, unit in k["metrics"]},
        )
        for k in data["kernels"]
    )
    rules = tuple(
        RawRule(int(r["number"]), plain(r["rule"]), plain(_without_markup(r["text"])), r["speedup_percent"])
        for r in data["rules"]
    )
    lines = tuple(
        SourceLine(plain(line["symbol"]), plain(Path(line["file"]).name), int(line["line"]), "", dict(line["figures"]))
        for line in data["lines"]
    )
    rules = tuple(sorted(rules, key=lambda rule: -(rule.speedup_percent or 0.0)))
    return Reading(kernels, rules, lines) if kernels else None


def _without_markup(text: str) -> str:
    """``@section:Id:its name@`` and ``@url:a name:https://...@`` as the names."""
    return _MARKUP.sub(lambda match: match[1] or match[2] or "", text)


# -- in the child ------------------------------------------------------------------------------------------------


def main() -> None:
    """``argv``: the report, the file to write, and where the module lies ("" where it is installed)."""
    report, out, folder = sys.argv[1:4]
    if folder:
        sys.path.insert(0, folder)
    import ncu_report  # type: ignore[import-not-found]

    context = ncu_report.load_report(report)
    found: dict[str, list[Any]] = {"kernels": [], "rules": [], "lines": []}
    number = 0
    for a_range in (context.range_by_idx(index) for index in range(context.num_ranges())):
        for action in (a_range.action_by_idx(index) for index in range(a_range.num_actions())):
            _add(found, number, action)
            number += 1
    Path(out).write_text(json.dumps(found), encoding="utf-8")


def _add(found: dict[str, list[Any]], number: int, action: Any) -> None:
    names = set(action.metric_names())
    symbol = action.name(action.NameBase_MANGLED)
    sizes = {
        kind: [int(action.metric_by_name(f"launch__{kind}_dim_{axis}").value()) for axis in "xyz"]
        for kind in ("grid", "block")
    }
    metrics = [[name, *pair] for name in sorted(names) if (pair := _number(action.metric_by_name(name))) is not None]
    found["kernels"].append({"number": number, "symbol": symbol, **sizes, "metrics": metrics})
    for result in action.rule_results_as_dicts():
        message = result.get("rule_message", {})
        if message.get("type") in _ASKING:
            estimate = result.get("speedup_estimation", {})
            gain = float(estimate["speedup"]) if estimate.get("type") == _GLOBAL else None
            rule = {"rule": result["rule_identifier"], "text": message.get("message", ""), "speedup_percent": gain}
            found["rules"].append({"number": number, **rule})
    for (file, line), figures in sorted(_lines(action, names).items()):
        found["lines"].append({"symbol": symbol, "file": file, "line": line, "figures": figures})


def _number(metric: Any) -> list[Any] | None:
    """[value, unit] of a metric that is a finite number; those of single instructions are left to the lines."""
    value = metric.value()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) == float("inf"):
        return None
    return [float(value), metric.unit()]


def _lines(action: Any, names: set[str]) -> dict[tuple[str, int], dict[str, float]]:
    """Each line's figures: the sums over the instructions that came from it."""
    places: dict[int, tuple[str, int] | None] = {}
    lines: dict[tuple[str, int], dict[str, float]] = {}
    for name, column in _line_columns(names):
        metric = action.metric_by_name(name)
        if not metric.has_correlation_ids():
            continue
        addresses = metric.correlation_ids()
        for index in range(metric.num_instances()):
            address = addresses.as_uint64(index)
            if address not in places:
                told = action.source_info(address)
                places[address] = (told.file_name(), int(told.line())) if told is not None else None
            place = places[address]
            if place is not None and place[1] > 0:
                figures = lines.setdefault(place, {})
                figures[column] = figures.get(column, 0.0) + float(metric.as_double(index))
    return lines


def _line_columns(names: set[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(names):
        if name in _BY_LINE:
            yield name, line_column(name)
        elif name.startswith(_SAMPLES) and not name.endswith("_not_issued"):
            reason = name[len(_SAMPLES) :]
            yield name, f"stall_{_REASONS.get(reason, reason)}"


if __name__ == "__main__":
    main()
