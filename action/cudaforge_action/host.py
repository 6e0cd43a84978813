"""The CI service that a run stands in, as the modes see it: one Protocol, three implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from cudaforge_action.records import Annotation, Context
from pytest_cudaforge.report.escaping import one_line, plain

__all__ = ["FOLDER", "GOES_ON", "Host", "host_of", "log"]

_MOST_LINES = 50

#: Where results lie where nobody says otherwise (the default of the input ``output-dir``).
FOLDER = Path(".cudaforge/action")
#: Set for a process that is one stage of a run of several: what earlier stages said stays.
GOES_ON = "FORGE_ACTION_GOES_ON"


class Host(Protocol):
    """What a mode may tell its CI service without any token. Text is shown, never obeyed."""

    @property
    def context(self) -> Context: ...

    def summary(self, markdown: str) -> None:
        """Add to the page of this run. ``markdown`` is rendered: text of others in it must be escaped already."""

    def annotate(self, annotations: Sequence[Annotation]) -> None:
        """Remarks on lines of the change. GitHub shows ten of a level and step: the worst come first."""

    def output(self, name: str, value: str) -> None:
        """Hand a value to later steps or jobs."""

    def mask(self, value: str) -> None:
        """Show ``***`` instead of this value in the log from now on, where the service can."""

    def group(self, title: str) -> AbstractContextManager[None]:
        """Fold the log of this block under a title."""

    def quoting(self) -> AbstractContextManager[None]:
        """Print what others wrote in here (pytest's output, a model's text): nothing of it is a command."""

    def notice(self, text: str) -> None: ...

    def warning(self, text: str) -> None: ...


def host_of(environ: Mapping[str, str], folder: Path = FOLDER) -> Host:
    """GitHub, GitLab, or a plain machine. ``folder``: where hosts without a page of their own leave summary and
    outputs. Raises :class:`~pytest_cudaforge.errors.UsageError` where GitHub's event cannot be read."""
    if environ.get("GITHUB_ACTIONS") == "true":
        from cudaforge_action.github import GitHubHost

        return GitHubHost(environ)
    if environ.get("GITLAB_CI") == "true":
        from cudaforge_action.gitlab import GitLabHost

        return GitLabHost(environ, folder, goes_on=GOES_ON in environ)
    from cudaforge_action.plain import PlainHost

    return PlainHost(folder, goes_on=GOES_ON in environ)


def log(host: Host, lines: Sequence[str]) -> None:
    """Say it in the log as well, for who does not open the summary; a terminal has nothing else."""
    more = [f"and {len(lines) - _MOST_LINES} more, in the summary"] if len(lines) > _MOST_LINES else []
    with host.quoting():
        for line in [*lines[:_MOST_LINES], *more]:
            print(one_line(plain(line), 500), flush=True)
