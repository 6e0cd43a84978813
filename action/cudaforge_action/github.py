"""GitHub as a host: what a step says to its runner. Its REST API is :mod:`cudaforge_action.api`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from cudaforge_action.context import github_context
from cudaforge_action.records import Annotation, Context
from cudaforge_action.workflow import Commands, append_summary, set_variable
from pytest_cudaforge.report.escaping import one_line, plain

__all__ = ["GitHubHost"]

# A check run's annotation, which these become: at most 255 characters of title and 64 KiB of message.
_MAX_TITLE = 255
_MAX_MESSAGE = 32_000


class GitHubHost:
    """A step of a workflow, on github.com or an Enterprise server."""

    def __init__(self, environ: Mapping[str, str], commands: Commands | None = None) -> None:
        self._environ = dict(environ)
        self._commands = commands or Commands()
        self._context = github_context(environ)

    @property
    def context(self) -> Context:
        return self._context

    def summary(self, markdown: str) -> None:
        append_summary(self._environ, markdown)

    def annotate(self, annotations: Sequence[Annotation]) -> None:
        for one in annotations:
            self._commands.issue(
                one.level,
                plain(one.message)[:_MAX_MESSAGE],
                file=plain(one.path),
                line=one.line if one.line > 0 and one.path else "",
                title=one_line(plain(one.title), _MAX_TITLE),
            )

    def output(self, name: str, value: str) -> None:
        set_variable(self._environ, "GITHUB_OUTPUT", name, value)

    def mask(self, value: str) -> None:
        # The log is read by lines: a key of several is masked line by line as well.
        for part in dict.fromkeys((value.strip(), *(line.strip() for line in value.splitlines()))):
            if part:
                self._commands.issue("add-mask", part)

    @contextmanager
    def group(self, title: str) -> Iterator[None]:
        self._commands.issue("group", one_line(plain(title), _MAX_TITLE))
        try:
            yield
        finally:
            self._commands.issue("endgroup")

    def quoting(self) -> AbstractContextManager[None]:
        return self._commands.quoting()

    def notice(self, text: str) -> None:
        self._commands.issue("notice", plain(text)[:_MAX_MESSAGE])

    def warning(self, text: str) -> None:
        self._commands.issue("warning", plain(text)[:_MAX_MESSAGE])
