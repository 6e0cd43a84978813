"""Small pieces of the page: tables, tiles, badges, folded blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_cudaforge.report.markup import Markup, Part, tag
from pytest_cudaforge.report.svg import Picture

__all__ = ["badge", "bullets", "cut", "definitions", "figure", "folded", "meter", "table", "tiles"]

_MAX_LINES, _MAX_LETTERS = 400, 40_000


def table(header: Sequence[str], cells: Iterable[Sequence[Part]], *, best: int | None = None) -> Markup:
    """A table; below a heading that begins with ``>`` are numbers, with ``~`` running text, else short words. ``best``
    is the row set off from the others."""
    kinds = [{">": "n", "~": "text"}.get(name[:1]) for name in header]
    head = [tag("th", name.lstrip(">~"), class_=kind, scope="col") for name, kind in zip(header, kinds, strict=True)]
    body = [
        tag(
            "tr",
            [tag("td", cell, class_=kind) for cell, kind in zip(line, kinds, strict=True)],
            class_="best" if index == best else None,
        )
        for index, line in enumerate(cells)
    ]
    return tag("div", tag("table", tag("thead", tag("tr", head)), tag("tbody", body)), class_="wide")


def tiles(shown: Iterable[tuple[str, str]]) -> Markup:
    """Big figures with a word below; those without a figure are left out."""
    return tag(
        "div", [tag("div", tag("b", value), tag("span", word)) for value, word in shown if value], class_="tiles"
    )


def badge(text: str, shade: str) -> Markup:
    """``shade``: good, bad or calm; the word says the same."""
    return tag("span", text, class_=f"badge {shade}")


def bullets(lines: Iterable[Part]) -> Markup | None:
    told = [tag("li", line) for line in lines]
    return tag("ul", told) if told else None


def definitions(told: Iterable[tuple[str, str]]) -> Markup | None:
    """Names with their values; those without a value are left out."""
    parts = [part for name, value in told if value for part in (tag("dt", name), tag("dd", value))]
    return tag("dl", parts) if parts else None


def figure(picture: Picture | None, caption: str) -> Markup | None:
    return tag("figure", picture.inline(), tag("figcaption", caption)) if picture is not None else None


def folded(summary: Part, *inside: Part | Iterable[Part], shown: bool = False) -> Markup:
    """What few readers want to see; opens without a script."""
    return tag("details", tag("summary", summary), *inside, open=shown)


def cut(text: str) -> str:
    """The beginning of a long text: a page for many targets must stay one that opens at once."""
    lines = text.splitlines()
    kept = "\n".join(lines[:_MAX_LINES])[:_MAX_LETTERS]
    return kept if len(kept) >= len(text.rstrip("\n")) else kept + "\n… (the whole text lies in the run directory)"


def meter(share: float) -> Markup:
    """A small bar of what is used up of an allowance; over it, in another colour and full."""
    width = min(max(share, 0.0), 1.0)
    return tag("span", tag("i", style=f"width:{100 * width:.0f}%"), class_="meter over" if share > 1 else "meter")
