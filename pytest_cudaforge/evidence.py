"""The evidence on one candidate as one compact page: where its time goes, what bounds it, what was tried. Pure.

For the Judge, for a person and for a coding agent alike. Every number on it stands in the evaluation (its profile
included), the baselines, the device's facts or the rounds, as it is or as a share of numbers that do. The page has a
hard size; what matters least is left out first, and the page says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_cudaforge import attempts, figures
from pytest_cudaforge.hardware.diagnosis import IN_CALL_BYTES, Diagnosis, diagnose, spared, telling_metrics
from pytest_cudaforge.prompts import fence, sheets
from pytest_cudaforge.records import (
    Baseline,
    DeviceFacts,
    Evaluation,
    HotLine,
    Profile,
    ProfiledKernel,
    Round,
    RuleFinding,
    Timing,
)

__all__ = ["MAX_TOKENS", "Page", "estimate_tokens", "page"]

Figure = tuple[str, float, str]

MAX_TOKENS = 2500
_LINE_CHARACTERS = 320
_SOURCE_CHARACTERS = 110
_SHOWN_LINES, _SHOWN_FIGURES = 8, 4
#: Of a library's kernel, where its whole name stands above.
_NAME_CHARACTERS = 64

_RUNGS = {
    "ncu": "hardware counters (Nsight Compute)",
    "cupti": "kernel times (CUPTI), no hardware counters",
    "counters": "hardware counters of the CPU (perf)",
    "static": "what binary, plan and roofline tell; nothing was counted while it ran",
}
_TIMED = "kernel times and samples; no hardware counters"


@dataclass(frozen=True)
class Page:
    """``left_out``: what did not fit, in words; empty where everything did."""

    text: str
    left_out: str = ""


@dataclass(frozen=True)
class _Line:
    """``rank`` 0 matters most; of equals the later goes first. ``what`` names it where it had to go."""

    text: str
    rank: int
    what: str


@dataclass(frozen=True)
class _Section:
    """``fenced``: lines that quote a candidate, a model or a tool."""

    title: str
    lines: tuple[_Line, ...]
    fenced: bool = False


def estimate_tokens(text: str) -> int:
    """Tokens of a text, erring on the dear side: three bytes a token."""
    return -(-len(text.encode("utf-8", "replace")) // 3)


def page(
    evaluation: Evaluation,
    baselines: Sequence[Baseline] = (),
    device: DeviceFacts | None = None,
    rounds: Sequence[Round] = (),
    *,
    limit_tokens: int = MAX_TOKENS,
) -> Page:
    """What is known about ``evaluation``'s candidate; ``rounds`` are all that were played, for what they tried.

    ``device`` None leaves its line out (a prompt that says it elsewhere). The text takes at most ``limit_tokens``.
    """
    sections = [
        _Section("", tuple(_times(evaluation, baselines, device))),
        _Section("", tuple(_bound_told(evaluation.profile, evaluation.timing))),
        *_profile(evaluation.profile, evaluation.timing.own_share if evaluation.timing is not None else None),
        _Section("Kernels as compiled:", tuple(_resources(evaluation))),
        _Section("Earlier optimizations, the latest first:", tuple(_memory(rounds)), fenced=True),
    ]
    return _fitted([section for section in sections if section.lines], limit_tokens)


# -- what stands on it -------------------------------------------------------------------------------------------


def _lines(texts: Iterable[str], what: str, rank: int, *, every: int = 1) -> Iterator[_Line]:
    """Lines whose rank falls by one every ``every`` lines."""
    for index, text in enumerate(texts):
        yield _Line(_one_line(text, _LINE_CHARACTERS), rank + index // every, what)


def _times(evaluation: Evaluation, baselines: Sequence[Baseline], device: DeviceFacts | None) -> Iterator[_Line]:
    timing = evaluation.timing
    told = sheets.render_timing(timing) if timing is not None else sheets.render_baselines(baselines)
    yield from _lines(told.splitlines(), "workload's times", 0)
    if device is not None:
        yield _Line(f"Device: {sheets.render_device(device)}", 2, "device")


def _bound_told(profile: Profile | None, timing: Timing | None) -> Iterator[_Line]:
    """What the times' bound takes for granted, and what the profile knows where a candidate passes it."""
    facts = {name: value for name, value, _ in profile.facts} if profile is not None else {}
    plain_ns = facts.get("speed_of_light_plain_fp32")
    if plain_ns is not None:
        text = "takes products of parts on tensor cores (3xTF32), which this precision allows; in plain fp32 it is"
        yield _Line(f"The bound {text} {sheets.render_ns(plain_ns)}.", 0, "bound")
    less = spared(profile, timing)
    if less is not None:
        moved, counted = (figures.show(value, unit) for _, value, unit in less)
        text = f"of the {counted} that the bound counts, {moved} went through device memory"
        yield _Line(f"Why it passes the bound: {text}; the rest was not touched, or stayed in a cache.", 0, "bound")


def _profile(profile: Profile | None, own_share: float | None) -> Iterator[_Section]:
    if profile is None:
        yield _Section("", (_Line("No profile was taken: times and compiler are all there is.", 0, "note"),))
        return
    yield _Section("", tuple(_standing(profile)))
    found = diagnose(profile)
    # On a CPU rules are called like bounds: what bounds the kernel is said once, with the rule's estimate.
    gains = {(rule.kernel, rule.rule): rule.speedup_percent for rule in profile.rules}
    said = {(one.kernel, one.bound) for one in found}
    rules = [rule for rule in profile.rules if (rule.kernel, rule.rule) not in said]
    facts = _lines(map(_figure, _facts(profile, own_share)), "figures of the call", 3, every=4)
    longest = max(profile.kernels, key=lambda k: (bool(k.metrics), k.duration_ns or 0.0), default=None)
    yield _Section(f"Where the time goes ({_circumstances(profile)}: shares count):", tuple(_kernels(profile)))
    yield _Section("What bounds it:", tuple(_bounds(found, gains)))
    yield _Section("Rules of the profiler, with its own estimate of the gain:", tuple(_rules(rules)))
    yield _Section("Hot lines of the source:", tuple(_hot(profile, found)), fenced=True)
    yield _Section("The whole call:", tuple(facts))
    if longest is not None:
        whose = _name(longest.function, _NAME_CHARACTERS)
        yield _Section(f"Other metrics of {whose}:", tuple(_metrics(profile, longest, found)))
    yield _Section("The compiler remarks:", tuple(_lines(profile.remarks, "compiler's remarks", 4, every=2)), True)


def _standing(profile: Profile) -> Iterator[_Line]:
    kind = f"{profile.depth} profile" + (f" of workload {profile.workload}" if profile.workload else "")
    timed = profile.rung == "static" and any(kernel.duration_ns is not None for kernel in profile.kernels)
    rests_on = _TIMED if timed else _RUNGS[profile.rung]
    yield _Line(f"Evidence: {rests_on}; {kind}, of this very candidate.", 0, "note")
    yield from _lines((f"Note: {note}" for note in profile.notes), "notes", 1)


def _circumstances(profile: Profile) -> str:
    """Under which times of kernels were taken, for whoever compares them with those of the clock."""
    if any(name == IN_CALL_BYTES for kernel in profile.kernels for name, _, _ in kernel.metrics):
        return "under the profiler, each kernel inside the call, one after the other"
    if profile.rung == "ncu" and len(profile.kernels) > 1:
        return "under the profiler, each kernel alone and from empty caches, which hides what the L2 would keep for it"
    return "under the profiler"


def _kernels(profile: Profile) -> Iterator[_Line]:
    total_ns = sum(kernel.duration_ns or 0.0 for kernel in profile.kernels)
    ordered = sorted(profile.kernels, key=lambda kernel: -(kernel.duration_ns or 0.0))
    yield from _lines((_kernel(kernel, total_ns) for kernel in ordered), "kernels", 0)


def _kernel(kernel: ProfiledKernel, total_ns: float) -> str:
    parts = []
    if kernel.duration_ns is not None and total_ns:
        parts.append(f"{100 * kernel.duration_ns / total_ns:.3g} %, {sheets.render_ns(kernel.duration_ns)}")
    parts.append(f"{kernel.launches} launch{'es' if kernel.launches != 1 else ''}")
    parts += [f"{name} {_shape(sizes)}" for name, sizes in (("grid", kernel.grid), ("block", kernel.block)) if sizes]
    return f"- {_name(kernel.function)} ({'own' if kernel.own else 'library'}): {', '.join(parts)}"


def _shape(sizes: tuple[int, ...]) -> str:
    trimmed = sizes
    while len(trimmed) > 1 and trimmed[-1] == 1:
        trimmed = trimmed[:-1]
    return " by ".join(map(str, trimmed))


def _bounds(found: Sequence[Diagnosis], gains: Mapping[tuple[str, str], float | None]) -> Iterator[_Line]:
    for index, one in enumerate(found):
        shown = "; ".join(map(_figure, one.figures))
        gain = _gain(gains.get((one.kernel, one.bound)))
        whose = "" if one.own else " (library: to be replaced or fused)"
        text = f"- {_name(one.kernel, _NAME_CHARACTERS)}{whose}{gain}: {one.bound}: {one.explanation}."
        where = f" At {one.lines[0].file}:{one.lines[0].line}." if one.lines else ""
        # Names of metrics are long, and this is the line that matters most.
        yield _Line(_one_line(f"{text}{f' {shown}.' if shown else ''}{where}", 2 * _LINE_CHARACTERS), index, "bounds")


def _rules(rules: Sequence[RuleFinding]) -> Iterator[_Line]:
    ordered = sorted(rules, key=lambda rule: -(rule.speedup_percent or 0.0))
    yield from _lines(map(_rule, ordered), "rules", 1)


def _rule(rule: RuleFinding) -> str:
    return f"- {_name(rule.kernel)}{_gain(rule.speedup_percent)}: {rule.rule}: {_one_line(rule.text, 200)}"


def _gain(percent: float | None) -> str:
    """A profiler's own estimate of what mending it may bring."""
    return "" if not percent else f" ({percent:.3g} % of the kernel's time)"


def _hot(profile: Profile, found: Sequence[Diagnosis]) -> Iterator[_Line]:
    """By kernel, the one first in which most time goes: the lines that show its bound and the hottest of all, by their
    share."""
    weight = {one.kernel: one.share or 0.0 for one in found}
    telling = [line for one in found for line in one.lines[:2]]
    hottest = sorted(profile.lines, key=lambda line: -(line.share or 0.0) * weight.get(line.kernel, 1.0))
    chosen = list(dict.fromkeys([*telling, *hottest]))[:_SHOWN_LINES]
    kernels = sorted(dict.fromkeys(line.kernel for line in chosen), key=lambda name: -weight.get(name, 0.0))
    for kernel in kernels:
        lines = sorted((line for line in chosen if line.kernel == kernel), key=lambda line: -(line.share or 0.0))
        yield from _lines([f"In {_name(kernel)}:", *map(_hot_line, lines)], "hot lines", 1)


def _hot_line(line: HotLine) -> str:
    share = "" if line.share is None else f" {100 * line.share:.3g} % of samples"
    # Counts of memory traffic say more than samples by reason, and those more than all samples, which the share tells.
    telling = [figure for figure in line.figures if line.share is None or figure[0] != "samples"]
    telling.sort(key=lambda figure: figure[0].startswith(("stall", "Instructions")))
    told = ", ".join(map(_figure, telling[:_SHOWN_FIGURES]))
    return f"{line.file}:{line.line}{share} | {_one_line(line.source, _SOURCE_CHARACTERS)}" + (
        f" | {told}" * bool(told)
    )


def _facts(profile: Profile, own_share: float | None) -> Iterator[Figure]:
    """The call's figures, but for those that stand elsewhere: the device's, and own kernels' share of the time where
    the clock has told it."""
    elsewhere = {"l2_bytes", "speed_of_light_plain_fp32", *(["own_share"] if own_share is not None else [])}
    return (fact for fact in profile.facts if fact[0] not in elsewhere)


def _metrics(profile: Profile, kernel: ProfiledKernel, found: Sequence[Diagnosis]) -> Iterator[_Line]:
    """What neither the bounds nor the whole call say of the kernel that takes longest."""
    cited = {figure for one in found for figure in one.figures if one.kernel == kernel.function}
    rest = [metric for metric in telling_metrics(kernel) if metric not in {*cited, *profile.facts}]
    # What did not happen says least.
    rest.sort(key=lambda metric: metric[1] == 0.0)
    yield from _lines(map(_figure, rest), "metrics", 3, every=4)


def _resources(evaluation: Evaluation) -> Iterator[_Line]:
    told = sheets.render_resources(evaluation.build).splitlines()[1:]
    yield from _lines(told, "compiled kernels", 2)


def _memory(rounds: Sequence[Round]) -> Iterator[_Line]:
    yield from _lines(attempts.render(attempts.remember(rounds)), "earlier attempts", 1)


def _figure(figure: Figure) -> str:
    name, value, unit = figure
    return f"{name} {figures.show(value, unit)}"


def _name(kernel: str, limit: int = 1000) -> str:
    kept = kernel if len(kernel) <= limit else f"{kernel[: limit - 3]}..."
    return f"`{kept.replace('`', chr(39))}`"


def _one_line(text: str, limit: int) -> str:
    joined = " ".join(text.split())
    if len(joined) <= limit:
        return joined
    # Cut between words: half a number is another number.
    kept = joined[: limit - 3]
    return (kept.rpartition(" ")[0] if " " in kept else kept) + "..."


# -- its size ----------------------------------------------------------------------------------------------------


def _fitted(sections: Sequence[_Section], limit_tokens: int) -> Page:
    lines = [line for section in sections for line in section.lines]
    # The last of the least important goes first; a line is never cut in two.
    order = sorted(range(len(lines)), key=lambda index: (lines[index].rank, index))
    sizes = itertools.accumulate(estimate_tokens(lines[index].text) for index in order)
    hopeless = {index for index, size in zip(order, sizes, strict=True) if size > limit_tokens}
    alive = [index for index in order if index not in hopeless]
    dropped = [lines[index] for index in sorted(hopeless)]
    text = _text(sections, lines, set(alive), dropped)
    while estimate_tokens(text) > limit_tokens and alive:
        dropped.append(lines[alive.pop()])
        text = _text(sections, lines, set(alive), dropped)
    return Page(text, _left_out(dropped))


def _text(sections: Sequence[_Section], lines: Sequence[_Line], alive: set[int], dropped: Sequence[_Line]) -> str:
    parts: list[str] = []
    first = 0
    for section in sections:
        shown = [lines[index].text for index in range(first, first + len(section.lines)) if index in alive]
        first += len(section.lines)
        if shown:
            body = fence("\n".join(shown), "text") if section.fenced else "\n".join(shown)
            parts.append(f"{section.title}\n{body}" if section.title else body)
    if dropped:
        parts.append(f"Left out for want of room, some of: {_left_out(dropped)}.")
    return "\n\n".join(parts)


def _left_out(dropped: Sequence[_Line]) -> str:
    # Without counts: every number on the page stands in a record.
    return ", ".join(sorted({line.what for line in dropped}))
