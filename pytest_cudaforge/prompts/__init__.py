"""The prompts: markdown templates beside this file, rendered strictly.

``$name`` is a place to fill (``$$`` a dollar sign). A place without a value, or a value without a place, is an error
in this package and raises ``ValueError``: a prompt with a hole in it costs money and says nothing.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
import string

__all__ = ["fence", "places", "render", "template"]


@functools.cache
def template(name: str) -> string.Template:
    """The template ``<name>.md``."""
    text = importlib.resources.files(__name__).joinpath(f"{name}.md").read_text(encoding="utf-8")
    return string.Template(text)


def places(name: str) -> frozenset[str]:
    """The names a template wants."""
    wanted = template(name)
    return frozenset(
        found.group("named") or found.group("braced")
        for found in wanted.pattern.finditer(wanted.template)
        if found.group("named") or found.group("braced")
    )


def render(name: str, /, **values: str) -> str:
    """Fill a template. A place that stands alone on its line and is given as "" goes, with the blank line after it."""
    wanted = places(name)
    if wanted != set(values):
        missing, unused = sorted(wanted - set(values)), sorted(set(values) - wanted)
        raise ValueError(f"prompt {name}.md: no value for {missing or 'nothing'}, no place for {unused or 'nothing'}")
    text = template(name).template
    for place, value in values.items():
        if not value:
            text = re.sub(rf"^\${place}\n\n?", "", text, flags=re.MULTILINE)
    return string.Template(text).substitute(values).strip("\n") + "\n"


def fence(text: str, info: str = "") -> str:
    """``text`` as a fenced block that nothing inside can close: its fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    mark = "`" * max(3, longest + 1)
    body = text.rstrip("\n")
    return f"{mark}{info}\n{body}\n{mark}"
