"""A machine without a CI service that we know: files beside the results, and remarks as a compiler writes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cudaforge_action.context import plain_context
from cudaforge_action.host import FOLDER
from cudaforge_action.records import Annotation, Context
from pytest_cudaforge import durable
from pytest_cudaforge.report.escaping import one_line, plain

__all__ = ["PlainHost"]


class PlainHost:
    """``summary.md`` and ``outputs.json`` in ``folder``; both begin anew with each process that writes them, but for
    the stages of ``mode: all`` (``goes_on``)."""

    def __init__(self, folder: Path = FOLDER, context: Context | None = None, *, goes_on: bool = False) -> None:
        self.folder = folder
        self._context = context or plain_context(Path.cwd())
        before = self._read("summary.md") if goes_on else ""
        self._summary = [before.rstrip()] if before else []
        self._outputs = _values(self._read("outputs.json")) if goes_on else {}

    @property
    def context(self) -> Context:
        return self._context

    def summary(self, markdown: str) -> None:
        self._summary.append(markdown.rstrip())
        self.write("summary.md", "\n\n".join(self._summary) + "\n")

    def annotate(self, annotations: Sequence[Annotation]) -> None:
        for one in annotations:
            line = f":{one.line}" if one.line > 0 else ""
            place = f"{one_line(plain(one.path), 500)}{line}: " if one.path else ""
            self._say(f"{place}{one.level}: {one_line(plain(one.title), 500)}: {plain(one.message)}")

    def output(self, name: str, value: str) -> None:
        self._outputs[name] = value
        self.write("outputs.json", json.dumps(self._outputs, indent=1, ensure_ascii=False) + "\n")

    def mask(self, value: str) -> None:
        """Nothing hides what a plain machine prints; nothing of ours prints a key."""

    @contextmanager
    def group(self, title: str) -> Iterator[None]:
        self._say(f"== {one_line(plain(title), 500)}")
        yield

    @contextmanager
    def quoting(self) -> Iterator[None]:
        """A terminal takes no commands of this kind."""
        yield

    def notice(self, text: str) -> None:
        self._say(f"notice: {plain(text)}")

    def warning(self, text: str) -> None:
        self._say(f"warning: {plain(text)}")

    def write(self, name: str, text: str) -> None:
        """A file of this run, in the folder. Raises OSError where it cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        durable.write_file(self.folder / name, text)

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text("utf-8", "replace")
        except OSError:
            return ""

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _values(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return (
        {str(name): value for name, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}
    )
