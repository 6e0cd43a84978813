"""From what Nsight Compute printed to a profile of the candidate's kernels. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pytest_cudaforge.evaluation.profiled_call import ProfiledCall
from pytest_cudaforge.hardware import metrics
from pytest_cudaforge.hardware.ncu import Figures, RawKernel, RawRule, Reading, SourceLine
from pytest_cudaforge.records import Candidate, HotLine, Profile, ProfiledKernel, RuleFinding

__all__ = ["profile_of", "readable_name"]

_DURATION = "gpu__time_duration.sum"
_READ, _WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_ONCE = "of each kernel and shape one launch was looked at; times are its time by the plan's launches"
_UNSEEN = "kernels without a time are in the plan and not in ncu's report"
_MOST_RULES, _SAME_RULE = 16, 2
#: Lines of one kernel: the hottest, and those that show an excess.
_HOT_LINES, _EXCESS_LINES = 8, 4
_MOST_STALLS = 3
_ASM, _ASM_LINES = re.compile(r"\basm\b"), 12
#: Compressible memory is not a plan's to ask for.
_NAME = 120
_NOT_OURS = frozenset({"MemoryL2Compression"})
#: Rules that go by addresses, and what they are about.
_DOUBTED = {"UncoalescedGlobalAccess": "global", "UncoalescedSharedAccess": "shared"}
_USED = re.compile(r"\bonly (\d+(?:\.\d+)?) of the (\d+(?:\.\d+)?) bytes")
_WAVES, _GLOBAL_SECTORS = "launch__waves_per_multiprocessor", "l1tex__t_sectors_pipe_lsu_mem_global_op_{}.sum"
#: Of a kernel's sectors: a pattern of fewer is no fault of the kernel.
_FEW = 0.05
_SAMPLES = ("# Samples", "Warp Stall Sampling (All Samples)", "Warp Stall Sampling (All Cycles)")
_EXCESS = ("L2 Theoretical Sectors Global Excessive", "L1 Wavefronts Shared Excessive", "L2 Theoretical Sectors Local")
_COUNTED = ("Instructions Executed", "L2 Theoretical Sectors Global", "L1 Wavefronts Shared")
_CLOCKS = (
    "smsp__cycles_elapsed.avg.per_second",
    "sm__cycles_elapsed.avg.per_second",
    "gpc__cycles_elapsed.avg.per_second",
)
_UNITS = {"Sectors": "sector", "Wavefronts": "wavefront", "Instructions": "inst"}

Figure = tuple[str, float, str]


def profile_of(
    call: ProfiledCall, static: Profile, reading: Reading, inside: Sequence[RawKernel] = (), *, once: bool = False
) -> Profile:
    """``static`` with kernels, rules, lines and facts from a report.

    ``inside`` are the same launches, in the same order, with what was counted while the caches were left as the call
    leaves them: times and bytes of the call are theirs. ``once``: one launch of each kernel and shape was looked at,
    and stands for all that the plan has.
    """
    launches = reading.kernels
    seen = {launch.number: one.figures for launch, one in zip(launches, inside, strict=False)}
    known = {name: value for name, value, _ in static.facts}
    functions = {kernel.symbol: kernel.expression for binary in call.product.binaries for kernel in binary.kernels}
    counts = {launch.number: _count(launch, functions, static) if once else 1 for launch in launches}
    kernels = tuple(_kernels(launches, seen, functions, static, counts))
    unseen = _unseen(kernels, static)
    by_number = {launch.number: launch for launch in launches}
    doubted = {one.symbol: metrics.contradicted(one.figures) for one in launches}
    return replace(
        static,
        rung="ncu",
        kernels=(*kernels, *unseen),
        rules=tuple(_rules(reading.rules, by_number, functions)),
        lines=tuple(_lines(reading.lines, functions, doubted, call.candidate)),
        facts=(*static.facts, *_facts(launches, seen, kernels, counts, known)),
        notes=(*static.notes, *((_ONCE,) if once else ()), *((_UNSEEN,) if unseen else ())),
    )


# -- kernels -----------------------------------------------------------------------------------------------------


def _count(launch: RawKernel, functions: Mapping[str, str], static: Profile) -> int:
    """How many launches of the plan this one stands for; of a library's kernels nobody knows it."""
    function = functions.get(launch.symbol)
    alike = [k for k in static.kernels if (k.function, k.grid, k.block) == (function, launch.grid, launch.block)]
    return max(1, sum(kernel.launches for kernel in alike))


def _kernels(
    launches: Sequence[RawKernel],
    inside: Mapping[int, Figures],
    functions: Mapping[str, str],
    static: Profile,
    counts: Mapping[int, int],
) -> Iterator[ProfiledKernel]:
    """Launches of one symbol and one shape are one record; the one in which most time goes comes first."""
    groups: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[RawKernel]] = {}
    for launch in launches:
        groups.setdefault((launch.symbol, launch.grid, launch.block), []).append(launch)

    def time_ns(members: Sequence[RawKernel]) -> float:
        return sum(_duration_ns(inside.get(one.number, one.figures)) * counts[one.number] for one in members)

    ceiling = next((value for name, value, _ in static.facts if name == "bandwidth_ceiling"), None)

    for (symbol, grid, block), members in sorted(groups.items(), key=lambda item: -time_ns(item[1])):
        longest = max(members, key=lambda launch: _duration_ns(launch.figures))
        own = symbol in functions
        function = functions[symbol] if own else readable_name(symbol)
        compiled = _compiled(function, grid, static) if own else {}
        only = (figure for name, figure in compiled.items() if name.startswith("static__"))
        yield ProfiledKernel(
            function=function,
            own=own,
            launches=sum(counts[launch.number] for launch in members),
            duration_ns=time_ns(members) or None,
            grid=grid,
            block=block,
            metrics=(
                *_exact(_asked(longest), compiled),
                *metrics.derived(longest.figures),
                *_inside(inside.get(longest.number, {}), ceiling),
                *only,
            ),
        )


def _inside(figures: Figures, ceiling: float | None) -> Iterator[Figure]:
    """A launch where the caches hold what the kernels before it left there."""
    duration_ns, moved = _duration_ns(figures), _moved(figures)
    if not duration_ns:
        return
    yield "in_call__duration", duration_ns, "ns"
    if moved is not None:
        yield "in_call__dram_bytes", moved, "byte"
        if ceiling:
            yield "in_call__dram_share_of_ceiling", 100.0 * moved / duration_ns * 1e9 / ceiling, "%"


def _moved(figures: Figures) -> float | None:
    """Bytes through device memory; None where they were not counted."""
    return figures[_READ][0] + figures[_WRITTEN][0] if _READ in figures and _WRITTEN in figures else None


def _unseen(kernels: Sequence[ProfiledKernel], static: Profile) -> tuple[ProfiledKernel, ...]:
    """Kernels of the plan that are not in the report, with what their binary tells: ncu takes launches of one shape for
    each other where it was to look at one of each, if their kernels have plain names (``extern "C"``)."""
    seen = {(kernel.function, kernel.grid, kernel.block) for kernel in kernels}
    return tuple(kernel for kernel in static.kernels if (kernel.function, kernel.grid, kernel.block) not in seen)


def _duration_ns(figures: Figures) -> float:
    return figures.get(_DURATION, (0.0, ""))[0]


def _asked(launch: RawKernel) -> Iterator[Figure]:
    """Of all metrics in the report those of the table, in its order."""
    told: set[str] = set()
    for names in metrics.table():
        name = next((name for name in names if name in launch.figures), None)
        if name is not None and name not in told:
            told.add(name)
            value, unit = launch.figures[name]
            yield name, value, unit


def _exact(figures: Iterable[Figure], compiled: Mapping[str, Figure]) -> Iterator[Figure]:
    """ncu prints two decimals: what is less than that to it (the waves of a grid of a few blocks) is reckoned."""
    for figure in figures:
        known = compiled.get(figure[0])
        yield known if known is not None and not figure[1] else figure


def _compiled(function: str, grid: tuple[int, ...], static: Profile) -> dict[str, Figure]:
    """What the binary and the launch tell, by name."""
    kernels = [kernel for kernel in static.kernels if kernel.function == function]
    kernel = next((kernel for kernel in kernels if kernel.grid == grid), kernels[0] if kernels else None)
    return {figure[0]: figure for figure in (kernel.metrics if kernel is not None else ())}


def readable_name(symbol: str) -> str:
    """A library kernel's qualified name from its mangled symbol, without its template's arguments; a plain name as it
    is."""
    match = re.match(r"_ZN?K?", symbol)
    if match is None:
        return _cut(symbol)
    parts: list[str] = []
    position = match.end()
    while (found := re.compile(r"(\d+)").match(symbol, position)) is not None:
        length = int(found[1])
        start = found.end()
        part = symbol[start : start + length]
        parts += [] if part.startswith("_GLOBAL__N") else [part]
        position = start + length
    return _cut("::".join(parts) or symbol)


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else f"{name[: _NAME - 3]}..."


# -- the whole call ----------------------------------------------------------------------------------------------


def _facts(
    launches: Sequence[RawKernel],
    inside: Mapping[int, Figures],
    kernels: Sequence[ProfiledKernel],
    counts: Mapping[int, int],
    known: Mapping[str, float],
) -> Iterator[Figure]:
    total_ns = sum(kernel.duration_ns or 0.0 for kernel in kernels)
    if not total_ns:
        return
    yield "kernel_time", total_ns, "ns"
    longest = max(launches, key=lambda launch: _duration_ns(launch.figures))
    clocks = [longest.figures[name][0] for name in _CLOCKS if name in longest.figures]
    if clocks:
        yield "clock_under_profiler", clocks[0], "Hz"
    yield "own_share", 100.0 * sum(k.duration_ns or 0.0 for k in kernels if k.own) / total_ns, "%"
    parts = [(_moved(inside.get(one.number, one.figures)), counts[one.number]) for one in launches]
    if any(part is None for part, _ in parts):
        return
    moved = sum(part * count for part, count in parts if part is not None)
    yield "dram_bytes", moved, "byte"
    yield "bandwidth_reached", moved / total_ns * 1e9, "byte/s"
    if known.get("minimal_bytes"):
        yield "derived__dram_bytes_by_minimal", moved / known["minimal_bytes"], ""


# -- rules and lines ---------------------------------------------------------------------------------------------


def _rules(
    rules: Sequence[RawRule], launches: Mapping[int, RawKernel], functions: Mapping[str, str]
) -> Iterator[RuleFinding]:
    """Of the candidate's own kernels, each rule at most twice (two stall reasons, say)."""
    told: Counter[tuple[str, str]] = Counter()
    for rule in rules:
        launch = launches.get(rule.number)
        function = functions.get(launch.symbol) if launch is not None else None
        if (
            launch is None
            or function is None
            or rule.rule in _NOT_OURS
            or told[function, rule.rule] >= _SAME_RULE
            or told.total() >= _MOST_RULES
            or _empty(rule, launch.figures)
        ):
            continue
        told[function, rule.rule] += 1
        yield RuleFinding(function, rule.rule, rule.text, rule.speedup_percent)


def _empty(rule: RawRule, figures: Figures) -> bool:
    """Does the rule find fault with what did not happen, or hardly? It says so by thresholds of its own."""
    used = _USED.search(rule.text)
    if used is not None and float(used[1]) >= float(used[2]):
        return True
    if _DOUBTED.get(rule.rule, "") in metrics.contradicted(figures):
        return True
    # All blocks are on the SMs already: no resource keeps more of them away.
    if rule.rule == "TheoreticalOccupancy" and 0.0 < figures.get(_WAVES, (0.0, ""))[0] <= 1.0:
        return True
    loads, stores = (figures.get(_GLOBAL_SECTORS.format(way), (0.0, ""))[0] for way in ("ld", "st"))
    part = stores if "global stores" in rule.text else loads if "global loads" in rule.text else loads + stores
    return rule.rule == "MemoryCacheAccessPattern" and part < _FEW * (loads + stores)


def _lines(
    lines: Sequence[SourceLine],
    functions: Mapping[str, str],
    doubted: Mapping[str, frozenset[str]],
    candidate: Candidate,
) -> Iterator[HotLine]:
    """Of each own kernel the lines with most samples, and those that show an excess.

    Their text is the candidate's, which was compiled without a file where ncu could find it.
    """
    sources = {name: text.splitlines() for name, text in candidate.files}
    merged: dict[tuple[str, str, int], SourceLine] = {}
    for line in lines:
        line = _without(_with_excess(line), doubted.get(line.symbol, frozenset()))
        key = (line.symbol, line.file, line.line)
        known = merged.get(key)
        if known is not None:
            figures = {n: known.figures.get(n, 0.0) + line.figures.get(n, 0.0) for n in {*known.figures, *line.figures}}
            line = replace(line, figures=figures)
        source = sources.get(line.file, [])
        merged[key] = replace(line, text=_statement(source, line.line)) if 0 < line.line <= len(source) else line
    for symbol in dict.fromkeys(line.symbol for line in merged.values()):
        if symbol in functions:
            yield from _hot([line for line in merged.values() if line.symbol == symbol], functions[symbol])


def _hot(lines: Sequence[SourceLine], function: str) -> Iterator[HotLine]:
    total = sum(map(_samples, lines))
    hottest = sorted((line for line in lines if _samples(line)), key=lambda line: -_samples(line))
    kept = {line.line: line for line in hottest[:_HOT_LINES]}
    for name in _EXCESS:
        marked = sorted((line for line in lines if line.figures.get(name)), key=lambda line: -line.figures[name])
        kept.update({line.line: line for line in marked[:_EXCESS_LINES]})
    for line in sorted(kept.values(), key=lambda line: -_samples(line)):
        share = _samples(line) / total if total else None
        yield HotLine(function, line.file, line.line, line.text.strip()[:160], share, tuple(_figures(line)))


def _samples(line: SourceLine) -> float:
    """By ncu's column, or all of the reasons' columns together where it has none."""
    told = next((line.figures[name] for name in _SAMPLES if name in line.figures), None)
    return told if told is not None else sum(line.figures[name] for name in line.figures if _is_stall(name))


def _is_stall(name: str) -> bool:
    return name.startswith("stall_") and "(" not in name


def _with_excess(line: SourceLine) -> SourceLine:
    """With what its sectors and wavefronts are above the ideal, where only the section would say it."""
    figures = dict(line.figures)
    for name in _EXCESS[:2]:
        whole = name.removesuffix(" Excessive")
        if name not in figures and whole in figures and f"{whole} Ideal" in figures:
            figures[name] = max(0.0, figures[whole] - figures[f"{whole} Ideal"])
    return replace(line, figures=figures)


def _without(line: SourceLine, doubted: frozenset[str]) -> SourceLine:
    """Without excesses that were reckoned and not counted."""
    gone = {name for name in _EXCESS[:2] if any(kind.capitalize() in name for kind in doubted)}
    return replace(line, figures={name: value for name, value in line.figures.items() if name not in gone})


def _statement(source: Sequence[str], number: int) -> str:
    """A line's text; of an assembler statement over several lines, which the compiler knows by its last one, all of it
    up to there."""
    first = last = number - 1
    while first and last - first < _ASM_LINES and source[first].lstrip().startswith((":", '"')):
        first -= 1
    if not _ASM.search(source[first]):
        return source[last]
    return " ".join(line.strip() for line in source[first : last + 1])


def _figures(line: SourceLine) -> Iterator[Figure]:
    """Samples, the sectors and wavefronts beyond what its data needs, and what its warps waited for."""
    if _samples(line):
        yield "samples", _samples(line), "sample"
    yield from _counted(line, _EXCESS)
    stalls = {
        name: value for name, value in line.figures.items() if _is_stall(name) and value and name != "stall_selected"
    }
    for name in sorted(stalls, key=lambda name: -stalls[name])[:_MOST_STALLS]:
        yield name, stalls[name], "sample"
    yield from _counted(line, _COUNTED)


def _counted(line: SourceLine, names: Sequence[str]) -> Iterator[Figure]:
    for name in names:
        if line.figures.get(name):
            unit = next((unit for word, unit in _UNITS.items() if word in name), "")
            yield name, line.figures[name], unit
