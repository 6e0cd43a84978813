"""What a pull request with forged kernels says, written from its commit alone.

The same commit has the same text, whichever run writes it: a run that dies between push and pull request is finished by
the next one, and a run without news has nothing to write. All text that models, candidates and tools had a say in comes
from ``report.md``, where :mod:`pytest_cudaforge.report.markdown` has escaped it, or is escaped here; it is taken over
in whole sections, never cut inside.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from cudaforge_action.branch import Kernel
from cudaforge_action.pull_request import MAX_BODY
from pytest_cudaforge.records import CaseResult, Evaluation, Timing, from_json
from pytest_cudaforge.report import amounts
from pytest_cudaforge.report.escaping import one_line, xml
from pytest_cudaforge.report.markdown import escape, fence, table, unlinked
from pytest_cudaforge.report.rows import geometric_mean

__all__ = ["Facts", "best_speedup", "body", "headline", "sections", "title", "verdict_of"]

#: The most that the table of all kernels may take, so that the best ones can be told at length.
_TABLE_SHARE = 0.4
#: Below this a kernel's part would be torn to nothing.
_LEAST_PART = 1_200
_LONGEST_ID = 160
#: In the order of what a reviewer asks; what does not fit is left out from the end.
_SECTIONS = (
    "Speed", "Accuracy", "Profile", "What the Judge said", "Provenance", "Cost", "Speed of light", "Isolation",
    "Kernels", "Rounds",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What the kernels do not say themselves. ``trailers``: those of the commit that holds them."""

    base: str
    branch: str
    forge_dir: str
    server_url: str = ""
    repository: str = ""
    trailers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Story:
    kernel: Kernel
    verdict: Evaluation | None
    sections: Mapping[str, str]

    @property
    def speedup(self) -> float | None:
        return _speedup(self.kernel, self.verdict)


# -- in a few words ----------------------------------------------------------------------------------------------------


def verdict_of(kernel: Kernel) -> Evaluation | None:
    """The verdict that lies beside a kernel; None where it cannot be read (any more)."""
    try:
        verdict: Evaluation = from_json(Evaluation, json.loads(kernel.files.get("evaluation.json", b"")))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return verdict


def _speedup(kernel: Kernel, verdict: Evaluation | None) -> float | None:
    if verdict is not None and verdict.timing is not None:
        return verdict.timing.speedup_eager
    known = [one.speedup_eager for one in kernel.entry.workloads if one.speedup_eager]
    return geometric_mean(known)


def best_speedup(kernels: Sequence[Kernel]) -> float | None:
    """The largest speedup over eager."""
    return max(filter(None, (_speedup(kernel, verdict_of(kernel)) for kernel in kernels)), default=None)


def headline(kernels: Sequence[Kernel]) -> str:
    """``3 kernels verified, best 2.1x``, for a commit's status."""
    best = best_speedup(kernels)
    return f"{_count(kernels)} verified" + (f", best {best:.1f}x" if best is not None else "")


def title(kernels: Sequence[Kernel]) -> str:
    """The pull request's title where the user gives none."""
    best = best_speedup(kernels)
    name = kernels[0].entry.qualname if len(kernels) == 1 else _count(kernels)
    text = f"Forge {name}" + (f": {'up to ' if len(kernels) > 1 else ''}{best:.2f}× vs eager" if best else "")
    return unlinked(one_line(text, 200))


def _count(kernels: Sequence[Kernel]) -> str:
    return f"{len(kernels)} kernel" + ("" if len(kernels) == 1 else "s")


# -- the whole ---------------------------------------------------------------------------------------------------------


def body(kernels: Sequence[Kernel], facts: Facts, room: int = MAX_BODY - 100) -> str:
    """The text, at most ``room`` characters."""
    stories = [_Story(kernel, verdict_of(kernel), sections(_report(kernel))) for kernel in kernels]
    stories.sort(key=lambda story: (-(story.speedup or 0.0), story.kernel.entry.key))
    top, end = [_intro(stories), _lost(facts)], [_again(stories), _rollback(facts), _provenance(facts)]
    top, end = [part for part in top if part], [part for part in end if part]
    left = room - sum(_length(part) + 2 for part in (*top, *end))
    overview = _overview(stories, facts, int(left * _TABLE_SHARE))
    details = _details(stories, facts, left - _length(overview) - 2)
    return "\n\n".join([*top, overview, *details, *end])


def _length(text: str) -> int:
    # Hosts differ in what they count as one character; none counts more than this.
    return len(text.encode("utf-16-le", "replace")) // 2


def _report(kernel: Kernel) -> str:
    return kernel.files.get("report.md", b"").decode("utf-8", "replace")


def sections(text: str) -> dict[str, str]:
    """The sections of a ``report.md`` by their headings. A heading inside a code block is none: build logs are others'
    text."""
    found: dict[str, list[str]] = {}
    heading, fenced = "", ""
    for line in text.split("\n"):
        mark = re.match(r"`{3,}", line)
        if fenced:
            fenced = "" if mark and line.strip("`") == "" and len(line) >= len(fenced) else fenced
        elif mark:
            fenced = mark.group()
        elif line.startswith("## "):
            heading = line[3:].strip()
            continue
        if heading:
            found.setdefault(heading, []).append(line)
    return {name: "\n".join(lines).strip() for name, lines in found.items()}


def _intro(stories: Sequence[_Story]) -> str:
    best = max((story.speedup or 0.0 for story in stories), default=0.0)
    targets = len({story.kernel.entry.target for story in stories})
    text = f"{len(stories)} forged kernel{'s' if len(stories) > 1 else ''} for {targets} "
    text += f"target{'s' if targets > 1 else ''}" + (f", the best **{best:.2f}×** as fast as eager" if best else "")
    return (
        f"{text}. Each was rebuilt from its source, checked and timed by a job that held neither a key nor a token; "
        "only what passed there is in this branch."
    )


def _overview(stories: Sequence[_Story], facts: Facts, room: int) -> str:
    header = ("target", "for", "eager", "kernel", "vs eager", "vs compile", "error (allowed)", "isolation", "roofline")
    lines: list[tuple[str, ...]] = []
    left = room - _length(table(header, ())) - 200
    for story in stories:
        line = _line(story)
        left -= sum(_length(cell) + 3 for cell in line) + 3
        if left < 0:
            break
        lines.append(line)
    rest = len(stories) - len(lines)
    more = f"\n\n{rest} more are in `{facts.forge_dir}/manifest.json`." if rest else ""
    text = "Speedups are baseline ÷ kernel with their 99 % interval; error is the largest ratio to the reference's own."
    return f"## Before and after\n\n{text}\n\n{table(header, lines)}{more}"


def _line(story: _Story) -> tuple[str, ...]:
    entry, verdict = story.kernel.entry, story.verdict
    timing = verdict.timing if verdict is not None else None
    only = timing.workloads[0] if timing is not None and len(timing.workloads) == 1 else None
    return (
        escape(one_line(entry.target, _LONGEST_ID)),
        escape(", ".join(filter(None, (entry.language, entry.arch, entry.variant)))),
        amounts.median(only.eager) if only else "",
        amounts.median(only.candidate) if only else "",
        _interval(timing, "eager") or amounts.times(story.speedup),
        _interval(timing, "compile"),
        _accuracy(verdict),
        escape(entry.isolation),
        _roofline(timing),
    )


def _interval(timing: Timing | None, baseline: str) -> str:
    """Of one workload its interval; of several the mean and between which bounds all of their intervals lie."""
    found = [getattr(one, f"vs_{baseline}") for one in timing.workloads] if timing is not None else []
    ratios = [one for one in found if one is not None]
    mean = getattr(timing, f"speedup_{baseline}") if timing is not None else None
    if not ratios or len(ratios) < len(found) or mean is None:
        return ""
    if len(ratios) == 1:
        return amounts.interval(ratios[0])
    low, high = min(one.low for one in ratios), max(one.high for one in ratios)
    return f"{mean:.2f}× ({low:.2f}–{high:.2f}, {len(ratios)} workloads)"


def _accuracy(verdict: Evaluation | None) -> str:
    found = verdict.verification if verdict is not None else None
    if found is None:
        return ""
    if found.worst_ratio is None:
        return f"exact ({found.oracle})"
    known: list[CaseResult] = [case for case in found.cases if case.error_ratio is not None]
    worst = max(known, key=lambda case: case.error_ratio or 0.0, default=None)
    allowed = f"{worst.bound:.3g}, " if worst is not None and worst.bound is not None else ""
    return f"{found.worst_ratio:.3g} ({allowed}{found.oracle})"


def _roofline(timing: Timing | None) -> str:
    timed = timing.workloads if timing is not None else ()
    shares = [one.roofline_ns / one.candidate.median_ns for one in timed if one.roofline_ns and one.candidate.median_ns]
    mean = geometric_mean(shares) if len(shares) == len(timed) else None
    return "" if mean is None else f"{mean:.0%}"


# -- kernel by kernel --------------------------------------------------------------------------------------------------


def _details(stories: Sequence[_Story], facts: Facts, room: int) -> list[str]:
    """The best first, each within its share of what is left: what a short one does not use is the next one's."""
    parts: list[str] = []
    heading = "## Kernel by kernel"
    left = room - _length(heading) - 200
    for number, story in enumerate(stories):
        share = max(left // (len(stories) - number), 3 * _LEAST_PART)
        if left < _LEAST_PART:
            break
        part = _part(story, facts, min(share, left) - 2)
        if not part:
            break
        parts.append(part)
        left -= _length(part) + 2
    rest = len(stories) - len(parts)
    more = f"{rest} more: see `report.md` in each kernel's folder below `{facts.forge_dir}`." if rest else ""
    return [heading, *parts, *([more] if more else [])] if parts else []


def _part(story: _Story, facts: Facts, room: int) -> str:
    entry = story.kernel.entry
    name = _inert(f"{one_line(entry.target, _LONGEST_ID)} ({entry.language}, {entry.arch})")
    end = f"{_source_link(story, facts)}\n\n</details>"
    begin = f"<details><summary>{name}</summary>"
    left = room - _length(begin) - _length(end) - 200
    parts, missing = [], []
    for heading in _SECTIONS:
        if not (text := story.sections.get(heading, "")):
            continue
        part = f"#### {heading}\n\n{text}"
        if _length(part) + 2 > left:
            missing.append(heading)
            continue
        parts.append(part)
        left -= _length(part) + 2
    note = [f"Too long to be shown here: {', '.join(missing).lower()}."] if missing else []
    text = "\n\n".join([begin, *parts, *note, end])
    return text if _length(text) <= room else ""


def _inert(text: str) -> str:
    """Between HTML's own tags, where hosts differ in how much Markdown they still see."""
    return re.sub(r"[\[\]`*_|~\\]", lambda found: f"&#x{ord(found[0]):x};", unlinked(xml(text)))


def _source_link(story: _Story, facts: Facts) -> str:
    path = f"{facts.forge_dir}/{story.kernel.entry.directory}"
    if not facts.server_url or not facts.repository:
        return f"Source and whole report: `{path}`"
    url = f"{facts.server_url}/{facts.repository}/tree/{quote(facts.branch)}/{quote(path)}"
    return f"[Source and whole report]({url})"


# -- what to do --------------------------------------------------------------------------------------------------------


def _lost(facts: Facts) -> str:
    lost = facts.trailers.get("Cudaforge-Lost", "")
    if not lost:
        return ""
    return f"> [!WARNING]\n> Without a result in the run that made this commit, and not in it: {escape(lost)}."


def _again(stories: Sequence[_Story]) -> str:
    entry = stories[0].kernel.entry if stories else None
    lines = ["pytest                       # every committed kernel against its reference", "pytest --forge-guard"]
    if entry is not None:
        lines.append(f"pytest --forge {shlex.quote(one_line(entry.target, 500) + '::forge')}")
    return "## How to run it again\n\n" + fence("\n".join(lines), "bash")


def _rollback(facts: Facts) -> str:
    return (
        "## How to roll back\n\n"
        f"Close this pull request and delete `{facts.branch}`: nothing else was changed. Once it is merged, revert the "
        f"commit; or take single kernels away by deleting their entries in `{facts.forge_dir}/manifest.json` and their "
        "folders. `pytest_cudaforge.apply` runs the reference wherever it finds no kernel."
    )


def _provenance(facts: Facts) -> str:
    lines = []
    for name, told in (
        ("built on", "Cudaforge-Base"),
        ("forged with", "Cudaforge-Models"),
        ("verified on", "Cudaforge-Verified-On"),
        ("cost of the run", "Cudaforge-Cost"),
        ("pytest-cudaforge", "Cudaforge-Version"),
    ):
        if value := facts.trailers.get(told, ""):
            lines.append(f"- {name}: {escape(one_line(value, 500))}")
    run = facts.trailers.get("Cudaforge-Run", "")
    if facts.server_url and run.startswith(f"{facts.server_url}/") and re.fullmatch(r"[\w:/.-]+", run):
        lines.append(f"- [the run that made this commit]({run}): reports and profiles are among its artifacts")
    return "## Provenance\n\n" + "\n".join(lines) if lines else ""
