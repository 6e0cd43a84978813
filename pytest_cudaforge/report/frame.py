"""What every page of ours stands in: one file that needs nothing else, and whose own policy refuses scripts and
requests, so that a hole in the escaping would still do nothing."""

from __future__ import annotations

import importlib.resources

from pytest_cudaforge.report import svg
from pytest_cudaforge.report.markup import Markup, Part, tag

__all__ = ["framed"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def framed(title: str, told: str, main: Markup, footer: Part) -> str:
    """A whole document: ``title`` above ``told`` (one line on what there is to see), ``main`` and ``footer``."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(svg.COLOURS + svg.SHAPES + _style())),
    )
    header = tag("header", tag("h1", title), tag("p", told, class_="faint"))
    body = tag("body", header, main, tag("footer", footer))
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def _style() -> str:
    return importlib.resources.files("pytest_cudaforge.report").joinpath("page.css").read_text(encoding="utf-8")
