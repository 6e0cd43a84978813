"""Pictures of a run as SVG: speedup by round, bars, the roofline. No library, no script, no network; a few kB each.

Every mark has a shape or a word beside its colour; the colours are those of Okabe and Ito, told apart by the
colour-blind. A picture stands alone (in a pull request) or inside the page, whose colours it then takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_cudaforge.report.escaping import one_line
from pytest_cudaforge.report.markup import Markup, Part, joined, tag
from pytest_cudaforge.report.rows import RoundRow
from pytest_cudaforge.report.standings import Standing

__all__ = ["COLOURS", "Bar", "Picture", "bars", "rooflines", "rounds", "stacked", "standing_bars"]

#: Custom properties, light and dark; the page declares the same ones.
COLOURS = """
:root { --ground: #ffffff; --ink: #1c2024; --faint: #59636e; --rule: #d5dae0; --one: #0072b2; --two: #b65300;
  --good: #007a5a; --bad: #b3261e; --library: #8a6d00; --soft: #f4f6f8; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e6e9ec; --faint: #9aa4ae; --rule: #3a4149;
  --one: #56b4e9; --two: #f0a05a; --good: #3fc49a; --bad: #ff8a80; --library: #e0c04c; --soft: #1d2125; } }
"""
#: What the shapes look like; the same inside the page and alone.
SHAPES = """
.pic { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink); }
.pic .faint { fill: var(--faint); } .pic .grid { stroke: var(--rule); stroke-width: 1; fill: none; }
.pic .axis { stroke: var(--faint); stroke-width: 1; fill: none; } .pic .limit { stroke: var(--ink); stroke-width: 1.5;
  stroke-dasharray: 5 3; fill: none; } .pic .best { stroke: var(--good); stroke-width: 1.5; fill: none;
  stroke-dasharray: 2 3; } .pic .line-one { stroke: var(--one); stroke-width: 2; fill: none; } .pic .line-two {
  stroke: var(--two); stroke-width: 2; fill: none; } .pic .one { fill: var(--one); } .pic .two { fill: var(--two); }
.pic .good { fill: var(--good); } .pic .library { fill: var(--library); } .pic .cross { stroke: var(--bad);
  stroke-width: 2.5; fill: none; } .pic .bad { fill: var(--bad); } .pic .end { text-anchor: end; }
.pic .mid { text-anchor: middle; } .pic .ground { fill: var(--ground); } .pic .strong { font-weight: 600; }
"""


@dataclass(frozen=True)
class Picture:
    """``body``: elements inside a box of ``width`` by ``height`` pixels. ``title`` says in words what is to be seen."""

    title: str
    width: int
    height: int
    body: Markup

    def inline(self) -> Markup:
        """For the page, which has the style."""
        return tag("svg", tag("title", self.title), self.body, **self._attributes())

    def standalone(self) -> str:
        """A file of its own, on a ground of its own: a viewer's page may be light or dark."""
        style = tag("style", Markup(COLOURS + SHAPES))
        ground = tag("rect", width=self.width, height=self.height, class_="ground")
        svg = tag("svg", tag("title", self.title), style, ground, self.body, **self._attributes())
        return svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + "\n"

    def _attributes(self) -> dict[str, str | int]:
        box = f"0 0 {self.width} {self.height}"
        return {"viewBox": box, "width": self.width, "height": self.height, "class_": "pic", "role": "img"}


def stacked(title: str, parts: Iterable[tuple[str, Picture | None]]) -> Picture | None:
    """One picture of several, each below its heading; None where there is none."""
    shown = [(heading, picture) for heading, picture in parts if picture is not None]
    body, y, width = [], 0, 0
    for heading, picture in shown:
        body.append(tag("text", heading, x=4, y=y + 18, class_="strong"))
        body.append(tag("g", picture.body, transform=f"translate(0,{y + 28})"))
        y, width = y + 28 + picture.height + 10, max(width, picture.width)
    return Picture(title, width, y, joined(body)) if shown else None


# -- speedup by round ------------------------------------------------------------------------------------------------

_LEFT, _TOP, _PLOT_HEIGHT, _FAILURE_LANE = 52, 34, 180, 26
_MAX_STEP, _MIN_WIDTH, _MAX_WIDTH = 64, 460, 860


def rounds(lines: Sequence[RoundRow], winner: int | None = None) -> Picture | None:
    """Speedup over eager and over ``torch.compile`` by round, with the best so far; failures are crosses in a lane
    below. None without rounds."""
    if not lines:
        return None
    step = max(14.0, min(_MAX_STEP, (_MAX_WIDTH - _LEFT - 30) / len(lines)))
    width = max(_MIN_WIDTH, round(_LEFT + step * len(lines) + 20))
    values = [value for line in lines for value in (line.speedup_eager, line.speedup_compile) if value]
    scale = _LogScale.over([*values, 1.0], _TOP + _PLOT_HEIGHT, _TOP)
    places = {line.number: _LEFT + step * (index + 0.5) for index, line in enumerate(lines)}
    body = joined(
        _legend(any(line.speedup_compile for line in lines), any(not _timed(line) for line in lines)),
        _speedup_grid(scale, width),
        _best_so_far(lines, places, scale),
        _series(lines, places, scale, "compile"),
        _series(lines, places, scale, "eager"),
        _round_axis(lines, places, step, winner),
    )
    height = _TOP + _PLOT_HEIGHT + _FAILURE_LANE + 40
    return Picture("Speedup by round: " + _told(lines), width, height, body)


def _timed(line: RoundRow) -> bool:
    return line.speedup_eager is not None


def _told(lines: Sequence[RoundRow]) -> str:
    """The picture in words, for those who cannot see it."""
    said = [f"{line.number} {_times(line.speedup_eager) if line.speedup_eager else line.status}" for line in lines]
    return ", ".join(said)


def _legend(compiled: bool, failed: bool) -> Markup:
    entries: list[tuple[Markup, str]] = [(_dot(0, 0), "vs eager")]
    entries += [(_square(0, 0), "vs torch.compile")] if compiled else []
    entries += [(tag("line", x1=-7, y1=0, x2=7, y2=0, class_="best"), "best so far")]
    entries += [(_cross(0, 0), "failed")] if failed else []
    parts, left = [], _LEFT
    for mark, text in entries:
        parts.append(tag("g", mark, tag("text", text, x=11, y=4), transform=f"translate({left + 8},12)"))
        left += 34 + round(6.3 * len(text))
    return joined(parts)


def _speedup_grid(scale: _LogScale, width: int) -> Markup:
    parts = []
    for value in scale.ticks():
        y = scale.at(value)
        parts.append(tag("line", x1=_LEFT, y1=y, x2=width - 8, y2=y, class_="limit" if value == 1 else "grid"))
        parts.append(tag("text", f"{value:g}×", x=_LEFT - 8, y=y + 4, class_="end faint"))
    return joined(parts)


def _best_so_far(lines: Sequence[RoundRow], places: dict[int, float], scale: _LogScale) -> Markup | None:
    best, points = 0.0, []
    for line in lines:
        before, best = best, max(best, line.speedup_eager or 0.0)
        if best:
            points += [f"{places[line.number]:.1f},{scale.at(before):.1f}"] if before else []
            points.append(f"{places[line.number]:.1f},{scale.at(best):.1f}")
    return tag("polyline", points=" ".join(points), class_="best") if len(points) > 1 else None


def _series(lines: Sequence[RoundRow], places: dict[int, float], scale: _LogScale, baseline: str) -> Markup:
    parts = []
    for line in lines:
        value = line.speedup_eager if baseline == "eager" else line.speedup_compile
        if value:
            told = tag("title", f"round {line.number}: {_times(value)} vs {baseline}")
            shape = _dot if baseline == "eager" else _square
            parts.append(tag("g", told, shape(places[line.number], scale.at(value))))
    return joined(parts)


def _round_axis(lines: Sequence[RoundRow], places: dict[int, float], step: float, winner: int | None) -> Markup:
    bottom = _TOP + _PLOT_HEIGHT
    lane, parts = bottom + _FAILURE_LANE - 8, []
    every = max(1, math.ceil(22 / step))
    for index, line in enumerate(lines):
        x = places[line.number]
        if not _timed(line):
            told = f"round {line.number}: {line.status}" + (f": {one_line(line.note, 120)}" if line.note else "")
            parts.append(tag("g", tag("title", told), _cross(x, lane)))
        if index % every == 0 or line.number == winner:
            text, style = (f"{line.number}★", "mid strong") if line.number == winner else (str(line.number), "mid")
            parts.append(tag("text", text, x=x, y=lane + 22, class_=style))
    parts.append(tag("text", "round", x=_LEFT - 8, y=lane + 22, class_="end faint"))
    return joined(parts)


def _dot(x: float, y: float) -> Markup:
    return tag("circle", cx=x, cy=y, r=5, class_="one")


def _square(x: float, y: float) -> Markup:
    return tag("rect", x=x - 4, y=y - 4, width=8, height=8, class_="two")


def _cross(x: float, y: float) -> Markup:
    return tag("path", d=f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", class_="cross")


def _times(value: float) -> str:
    return f"{value:.2f}×"


# -- bars ------------------------------------------------------------------------------------------------------------

_BAR_HEIGHT, _BAR_WIDTH, _LABEL_LETTERS = 22, 330, 34


@dataclass(frozen=True)
class Bar:
    """``value`` and the limit are in the same unit; ``shade``: one, two, good or library; ``text`` follows the bar."""

    label: str
    value: float
    text: str
    shade: str = "one"
    group: str = ""


def bars(title: str, entries: Sequence[Bar], *, limits: Iterable[tuple[float, str]] = ()) -> Picture | None:
    """Horizontal bars from zero, headed by group; ``limits`` are (value, word) drawn across. None without bars."""
    if not entries:
        return None
    marks = list(limits)
    longest = max([entry.value for entry in entries] + [value for value, _ in marks]) or 1.0
    labels = [one_line(entry.label, _LABEL_LETTERS) for entry in entries]
    left, y, parts, group = 16 + round(6.6 * max(map(len, labels))), 24 if marks else 6, [], ""
    top = y
    for entry, label in zip(entries, labels, strict=True):
        if entry.group != group:
            group, y = entry.group, y + 20
            parts.append(tag("text", one_line(group, 70), x=4, y=y - 6, class_="strong"))
        width = max(1.0, _BAR_WIDTH * entry.value / longest)
        parts.append(
            tag(
                "g",
                tag("title", f"{entry.label}: {entry.text}"),
                tag("text", label, x=left - 8, y=y + 15, class_="end"),
                tag("rect", x=left, y=y + 3, width=width, height=_BAR_HEIGHT - 8, class_=entry.shade),
                tag("text", entry.text, x=left + width + 6, y=y + 15),
            )
        )
        y += _BAR_HEIGHT
    for value, word in marks:
        x = left + _BAR_WIDTH * value / longest
        parts.append(tag("line", x1=x, y1=top - 4, x2=x, y2=y, class_="limit"))
        parts.append(tag("text", word, x=x, y=top - 8, class_="mid faint"))
    room = 14 + max(round(6.4 * len(entry.text)) for entry in entries)
    return Picture(title, left + _BAR_WIDTH + room, y + 6, joined(parts))


def standing_bars(entries: Sequence[Standing]) -> Picture | None:
    """Percent of the speed of light by party and workload. None where no roofline is known."""
    shades = {"eager": "library", "compile": "two"}
    several = len({entry.workload for entry in entries}) > 1
    shown = [
        Bar(
            entry.party,
            entry.sol_percent,
            f"{entry.sol_percent:.0f} %" + (" (over the roofline)" if entry.sol_percent > 105 else ""),
            shades.get(entry.party, "one"),
            entry.workload if several else "",
        )
        for entry in entries
    ]
    return bars("Percent of the speed of light", shown, limits=[(100.0, "speed of light")])


# -- the roofline ----------------------------------------------------------------------------------------------------

_ROOF_WIDTH, _ROOF_HEIGHT, _ROOF_LEFT, _ROOF_TOP = 460, 240, 62, 26


def rooflines(
    entries: Sequence[Standing], bandwidth_bytes_per_s: float | None, peaks: Sequence[tuple[str, float]]
) -> Picture | None:
    """FLOP/s over FLOPs per byte, both logarithmic, under the device's ceilings. None where no workload has FLOPs that
    are counted (products and convolutions), or no bandwidth is known."""
    points = [entry for entry in entries if entry.flops and entry.min_bytes]
    roofs = [(name, peak) for name, peak in peaks if peak > 0]
    if not points or not bandwidth_bytes_per_s:
        return None
    speeds = [entry.flops / entry.time_ns * 1e9 for entry in points]
    intensities = [entry.flops / entry.min_bytes for entry in points]
    ridges = [peak / bandwidth_bytes_per_s for _, peak in roofs]
    right, bottom = _ROOF_LEFT + _ROOF_WIDTH, _ROOF_TOP + _ROOF_HEIGHT
    x = _LogScale.over([*(min(intensities) / 4, max(intensities) * 4), *ridges], _ROOF_LEFT, right, base=10)
    slope = [bandwidth_bytes_per_s * value for value in intensities]
    y = _LogScale.over([*(min(speeds) / 2, max(speeds)), *slope, *(peak for _, peak in roofs)], bottom, _ROOF_TOP, 10)
    body = joined(
        _decades(x, y),
        _roof(x, y, bandwidth_bytes_per_s, roofs),
        _roof_points(points, x, y),
        tag("text", "FLOPs per byte", x=right, y=bottom + 32, class_="end faint"),
        tag("text", "FLOP/s", x=_ROOF_LEFT, y=12, class_="mid faint"),
    )
    return Picture("Roofline: FLOP/s over FLOPs per byte", right + 110, bottom + 40, body)


def _decades(x: _LogScale, y: _LogScale) -> Markup:
    parts = []
    for value in x.ticks():
        at = x.at(value)
        parts.append(tag("line", x1=at, y1=y.start, x2=at, y2=y.end, class_="grid"))
        parts.append(tag("text", _si(value), x=at, y=y.start + 16, class_="mid faint"))
    for value in y.ticks():
        at = y.at(value)
        parts.append(tag("line", x1=x.start, y1=at, x2=x.end, y2=at, class_="grid"))
        parts.append(tag("text", _si(value), x=x.start - 6, y=at + 4, class_="end faint"))
    return joined(parts)


def _roof(x: _LogScale, y: _LogScale, bandwidth: float, roofs: Sequence[tuple[str, float]]) -> Markup:
    highest = max((peak for _, peak in roofs), default=bandwidth * x.highest)
    low, high = max(x.lowest, y.lowest / bandwidth), min(x.highest, highest / bandwidth)
    parts: list[Part] = []
    if low < high:
        ends = {"x1": x.at(low), "y1": y.at(low * bandwidth), "x2": x.at(high), "y2": y.at(high * bandwidth)}
        parts.append(tag("line", tag("title", f"memory: {_si(bandwidth)}B/s"), class_="limit", **ends))
    for name, peak in roofs:
        start = min(max(peak / bandwidth, x.lowest), x.highest)
        parts.append(tag("line", x1=x.at(start), y1=y.at(peak), x2=x.end, y2=y.at(peak), class_="limit"))
        parts.append(tag("text", f"{name} {_si(peak)}FLOP/s", x=x.end + 4, y=y.at(peak) + 4, class_="faint"))
    return joined(parts)


def _roof_points(points: Sequence[Standing], x: _LogScale, y: _LogScale) -> Markup:
    """Marks where they belong, names beside them and never on one another."""
    parts: list[Markup] = []
    lowest: dict[float, float] = {}
    for entry in sorted(points, key=lambda point: point.time_ns):
        speed, intensity = entry.flops / entry.time_ns * 1e9, entry.flops / entry.min_bytes
        at_x, at_y = x.at(intensity), y.at(speed)
        name_y = max(at_y + 4, lowest.get(intensity, 0.0) + 13)
        lowest[intensity] = name_y
        shape = {"eager": _triangle, "compile": _square}.get(entry.party, _dot)
        told = f"{entry.workload}, {entry.party}: {_si(speed)}FLOP/s, {entry.sol_percent:.0f} % of the speed of light"
        parts.append(tag("g", tag("title", told), shape(at_x, at_y), tag("text", entry.party, x=at_x + 10, y=name_y)))
    return joined(parts)


def _triangle(x: float, y: float) -> Markup:
    return tag("path", d=f"M{x:.1f} {y - 5:.1f}l5 9h-10z", class_="library")


def _si(value: float) -> str:
    """``1.5 T``, ``20 G``, ``0.1``: with the space that a unit follows."""
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {letter}"
    return f"{value:.3g} "


# -- scales ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LogScale:
    """Values from ``lowest`` to ``highest`` onto pixels from ``start`` to ``end``."""

    lowest: float
    highest: float
    start: float
    end: float
    base: int

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, base: int = 2) -> _LogScale:
        """The smallest one whose ends are powers of ``base`` and that holds all values, at least one step."""
        given = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
        low = math.floor(math.log(min(given), base) + 1e-9)
        high = max(low + 1, math.ceil(math.log(max(given), base) - 1e-9))
        return cls(float(base) ** low, float(base) ** high, start, end, base)

    def at(self, value: float) -> float:
        share = math.log(max(value, self.lowest) / self.lowest) / math.log(self.highest / self.lowest)
        return self.start + (self.end - self.start) * min(share, 1.0)

    def ticks(self) -> list[float]:
        """Powers of the base; about eight of them at most."""
        low, high = round(math.log(self.lowest, self.base)), round(math.log(self.highest, self.base))
        every = max(1, math.ceil((high - low) / 8))
        marks = {float(self.base) ** power for power in range(low, high + 1) if power % every == 0}
        return sorted(marks | ({1.0} if low <= 0 <= high else set()))
