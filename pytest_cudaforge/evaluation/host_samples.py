"""What samples of a cpp candidate's threads say: hot lines, loops that run one element at a time, time spent waiting.

Samples are addresses; in which file of the process they lie comes from /proc, which line and instruction they are from
the sandboxed builder. Everything else is counting.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_cudaforge.languages.cpp import SOURCE_NAME, Place
from pytest_cudaforge.languages.remarks import LoopRemark
from pytest_cudaforge.records import HotLine

__all__ = ["SampleSummary", "loop_of", "mapped_files", "summarise"]

_MOST_LINES = 5
#: Less than this of a kernel's samples is noise.
_LEAST_SHARE = 0.03
#: Fewer samples than this say nothing.
LEAST_SAMPLES = 40
#: How far a loop's body reaches, where no other loop begins.
_MOST_BODY_LINES = 40
#: Words of g++'s for accesses whose neighbours are distant.
_STRIDED = ("strided", "complicated access pattern", "gather")
#: Instructions that bring single elements into or out of a vector: what a loop over distant memory is vectorized to.
_ELEMENT_MOVE = re.compile(r"v?(p?(gather|scatter)|insert(ps|f)|pinsr|pextr|extractps|unpckl|movlhps|movh?lp|movhp)")
#: So much of a loop's samples among instructions on vectors: its author, not the compiler, vectorized it.
_BY_HAND = 0.5
_OPENMP, _LIBM = re.compile(r"libgomp[-.]"), re.compile(r"lib(m|mvec)[-.]")
_OWN = "forge-"

Figure = tuple[str, float, str]
#: (start, end, offset in the file, the file's name)
MappedFile = tuple[int, int, int, str]


@dataclass(frozen=True)
class SampleSummary:
    """``figures`` are shares of the samples; those of lines, loops and instructions are of the samples that do not wait
    in OpenMP's runtime. ``by_hand``: loops that run vectors although the compiler made none (intrinsics)."""

    figures: tuple[Figure, ...]
    lines: tuple[HotLine, ...]
    by_hand: frozenset[LoopRemark] = frozenset()


def mapped_files(pid: int) -> tuple[MappedFile, ...]:
    """What process ``pid`` has mapped to run; nothing where /proc does not tell."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found = []
    for line in text.splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and "x" in parts[1]:
            start, _, end = parts[0].partition("-")
            name = parts[5].removesuffix(" (deleted)").rpartition("/")[2]
            found.append((int(start, 16), int(end, 16), int(parts[2], 16), name))
    return tuple(found)


def summarise(
    kernel: str,
    source: str,
    loops: Sequence[LoopRemark],
    threads: Sequence[Sequence[int]],
    files: Sequence[MappedFile],
    places_of: Callable[[Sequence[int]], Sequence[Place]],
) -> SampleSummary:
    """What sampled addresses say of one kernel's launches; ``places_of`` resolves offsets in its binary.

    ``threads``: the addresses of each thread, of the one that calls first.
    """
    by_thread = [[_place(files, address) for address in addresses] for addresses in threads]
    found = [place for places in by_thread for place in places]
    works = [sum(_OPENMP.match(name) is None for name, _ in places) for places in by_thread]
    working = sum(works)
    waiting = len(found) - working
    figures: list[Figure] = [("samples", float(len(found)), "")]
    figures += _share("time_in_openmp_runtime", waiting, len(found))
    if working < LEAST_SAMPLES:
        return SampleSummary(tuple(figures), ())
    figures += _shared_out(works, [len(places) for places in by_thread])
    figures += _share("time_in_libm", sum(_LIBM.match(name) is not None for name, _ in found), working)
    offsets = Counter(offset for name, offset in found if name.startswith(_OWN))
    places = dict(zip(offsets, places_of(list(offsets)), strict=True))
    lines = Counter[int]()
    in_loops, packed = Counter[LoopRemark](), Counter[LoopRemark]()
    moves = 0
    for offset, count in offsets.items():
        place = places[offset]
        lines[place.line or 0] += count
        moves += count if _ELEMENT_MOVE.match(place.instruction) else 0
        loop = loop_of(loops, place.outer_line or 0)
        if loop is not None and not loop.vector_bytes:
            in_loops[loop] += count
            packed[loop] += count if place.vectors else 0
    by_hand = frozenset(loop for loop, count in in_loops.items() if packed[loop] >= _BY_HAND * count)
    scalar = {loop: count for loop, count in in_loops.items() if loop not in by_hand}
    strided = sum(count for loop, count in scalar.items() if any(word in loop.reason for word in _STRIDED))
    figures += _share("element_moves_share", moves, working)
    figures += _share("scalar_loops_share", sum(scalar.values()), working)
    figures += _share("strided_loops_share", strided, working)
    return SampleSummary(tuple(figures), tuple(_hot_lines(kernel, source, lines, working)), by_hand)


def _shared_out(works: Sequence[int], samples: Sequence[int]) -> list[Figure]:
    """How the work is shared out: what others than the calling thread did of it, and the busiest thread's over the mean
    of those that took part (a thread that only waits takes part; one that sleeps is not sampled)."""
    taking_part = [work for work, count in zip(works, samples, strict=True) if count >= 0.01 * sum(samples)]
    return [
        ("work_on_other_threads", 100.0 * sum(works[1:]) / sum(works), "%"),
        ("thread_imbalance", max(taking_part) * len(taking_part) / sum(taking_part), ""),
    ]


def _share(name: str, count: int, total: int) -> list[Figure]:
    return [(name, 100.0 * count / total, "%")] if total and count >= _LEAST_SHARE * total else []


def _place(files: Sequence[MappedFile], address: int) -> tuple[str, int]:
    """(name of the file, offset in it) of an instruction; ("", 0) for one that is nowhere."""
    for start, end, offset, name in files:
        if start <= address < end:
            return name, address - start + offset
    return "", 0


def loop_of(loops: Sequence[LoopRemark], line: int) -> LoopRemark | None:
    """The innermost loop around ``line``, as far as the places of loops' heads tell."""
    before = [loop for loop in loops if loop.line <= line <= loop.line + _MOST_BODY_LINES]
    return max(before, key=lambda loop: loop.line, default=None)


def _hot_lines(kernel: str, source: str, lines: Counter[int], samples: int) -> list[HotLine]:
    text = source.splitlines()
    found = []
    for line, count in lines.most_common(_MOST_LINES + 1):
        if 0 < line <= len(text) and count >= _LEAST_SHARE * samples:
            figures = (("samples", float(count), ""),)
            found.append(HotLine(kernel, SOURCE_NAME, line, text[line - 1].strip()[:200], count / samples, figures))
    return found[:_MOST_LINES]
