"""Elements of HTML and SVG as values: a string that is put into one is escaped unless it is an element itself.

So nothing that a model wrote can become markup by being forgotten: there is no place where a template takes raw text.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytest_cudaforge.report.escaping import xml

__all__ = ["Markup", "Part", "joined", "tag"]

#: Elements that HTML closes by itself, and those of SVG that never hold anything.
_EMPTY = frozenset({"meta", "br", "hr", "img", "rect", "line", "circle", "path", "polyline", "polygon"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Part = Markup | str | int | float | None


def tag(name: str, /, *children: Part | Iterable[Part], **attributes: str | int | float | bool | None) -> Markup:
    """One element. ``class_`` is ``class``, other underscores are hyphens; an attribute that is None or False is left
    out, one that is True has no value. Floats lose what no screen could show."""
    inside = joined(*children)
    opened = name + "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _EMPTY and not inside:
        return Markup(f"<{opened}/>")
    return Markup(f"<{opened}>{inside}</{name}>")


def joined(*children: Part | Iterable[Part]) -> Markup:
    """The children one after another, text escaped; iterables are taken apart, None is nothing."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, (str, int, float)):
            parts.append(xml(_text(child)))
        else:
            parts.append(joined(*child))
    return Markup("".join(parts))


def _attribute(key: str, value: str | int | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    # SVG's own attributes are written as they are (viewBox), HTML's with hyphens.
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{xml(_text(value))}"'


def _text(value: str | int | float) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
