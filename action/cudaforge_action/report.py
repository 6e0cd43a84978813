"""Mode ``report``: what a guard job found, as one comment on the pull request and as a status of its commit.

It holds a token that may write, and reads what a machine left that ran the code of a pull request. So the numbers of
pull request and commit are those of this job's own event, and all else is text to be shown. Needs no torch or pytest.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cudaforge_action import guard_result, telling
from cudaforge_action.api import GitHub
from cudaforge_action.artifact import ArtifactError, refuse
from cudaforge_action.comment import Comments, MergeRequestComments, PullRequestComments, keep_one, marker
from cudaforge_action.guard_result import GuardResult
from cudaforge_action.host import Host
from cudaforge_action.inputs import Inputs
from cudaforge_action.merge_request import MergeRequestNotes, inert
from cudaforge_action.rest import ApiError
from cudaforge_action.status import State, posted
from pytest_cudaforge.errors import UsageError

__all__ = ["run", "state_of"]

#: Of all telling, with every attempt and every pause, however dead the host is: nobody waits long for a comment, the
#: next run writes it, and a guard job shall cost no more than 30 s beyond what it measures.
TELLING_S = 25.0


def run(
    inputs: Inputs, host: Host, *, sleep: Callable[[float], None] = time.sleep, telling_s: float = TELLING_S
) -> int:
    """Tell what the guard found, within ``telling_s``; 1 where what it left cannot be read.

    Whatever the host refuses (a read-only token, a fork, no network) is a warning: the guard's own job has failed where
    something is wrong. Raises UsageError on a plain machine where no guard ran.
    """
    folder = inputs.output / "guard"
    try:
        result, status = _left(inputs, folder), 0
    except ArtifactError as error:
        if host.context.fork and not folder.exists():
            host.notice("nothing to report: the guard left no result of this head, which lies in a fork")
            return 0
        if host.context.host == "plain" and not folder.exists():
            missing = f"{folder} is not there"
            raise UsageError(missing, expected="what mode guard leaves", remedy="run mode guard first") from None
        host.warning(str(error))
        result, status = guard_result.error_of(error), 1
    _Report(inputs, host, result, sleep, time.monotonic() + telling_s).tell()
    return status


def _left(inputs: Inputs, folder: Path) -> GuardResult:
    """What the guard's job left. Raises :class:`~cudaforge_action.artifact.ArtifactError` for good news that it does
    not vouch for: an artifact outlives the attempt that made it, and a job that failed early made none."""
    needs = inputs.needs
    vouched = needs.digests.get(guard_result.VOUCHED) if needs is not None else None
    if vouched is not None and guard_result.digest(folder) != vouched:
        raise refuse(folder, "is not what the guard job says that it left")
    result = guard_result.read(folder)
    if needs is None or state_of(result) != "success":
        return result
    if vouched is None:
        raise refuse(folder, f"is not vouched for by the guard job, which ended with {needs.result[:20]!r}")
    if needs.result != "success":
        raise refuse(folder, f"says that all is well, but the guard job ended with {needs.result[:20]!r}")
    return result


def state_of(result: GuardResult) -> State:
    """Green only for what passed; what is undecided fails where the guard's own job does."""
    if result.outcome == "error":
        return "error"
    fails = result.outcome in ("failed", "regression") or result.run.status != 0
    return "failure" if fails else "success"


@dataclass
class _Report:
    """``ends``: when all telling has to be over, by ``time.monotonic``."""

    inputs: Inputs
    host: Host
    result: GuardResult
    sleep: Callable[[float], None]
    ends: float
    _step_ends: float = 0.0

    def tell(self) -> None:
        steps = list(self._steps())
        for done, (what, step) in enumerate(steps):
            # A comment that hangs leaves the status its share.
            now = time.monotonic()
            self._step_ends = now + (self.ends - now) / (len(steps) - done)
            try:
                step()
            except (ApiError, UsageError) as error:
                self.host.warning(f"{what} could not be written: {error}{self._hint(error)}")

    def _steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        context = self.host.context
        if context.host == "plain":
            yield "the report", self._print
        elif not self.inputs.token:
            self.host.warning("without the input token (github.token would do) there is neither comment nor status")
        else:
            if self.inputs.comment != "off" and (context.number is not None or context.event == "workflow_run"):
                yield "the comment", self._comment
            if context.host == "github" and self._sha and self.inputs.status_context:
                yield "the status", self._status

    @property
    def _sha(self) -> str:
        """The commit that was guarded; "" where the event does not tell (a comment's is the default branch's)."""
        context = self.host.context
        return "" if context.event == "issue_comment" else context.head_sha

    def _print(self) -> None:
        with self.host.quoting():
            sys.stdout.write(self._text())
            sys.stdout.flush()

    # -- the comment ---------------------------------------------------------------------------------------------------

    def _comment(self) -> None:
        number = self._number()
        if number is None:
            self.host.notice("the comment: no open pull request has this commit as its head")
            return
        if self._is_outdated(number):
            self.host.notice("the pull request has a newer commit: its comment is left to that one's run")
            return
        news = telling.is_news(self.result, self.inputs.comment)
        written = keep_one(self._comments(number), self._text(), news=news)
        told = {"none": "nothing to tell, so that none was written", "unchanged": "it says so already"}
        self.host.notice(f"the comment: {told.get(written.operation, written.operation)}")
        if written.url:
            self.host.output("comment-url", written.url)

    def _number(self) -> int | None:
        """Of the pull request; a ``workflow_run`` is not told that of a head in a fork, which is looked for."""
        context = self.host.context
        if context.number is not None or not self._sha:
            return context.number
        listed = self._api().paginate("pulls", state="open", sort="updated", direction="desc")
        for pull in itertools.islice(listed, 1_000):
            head = pull.get("head") if isinstance(pull, dict) else None
            if isinstance(head, dict) and head.get("sha") == self._sha:
                return int(pull["number"])
        return None

    def _comments(self, number: int) -> Comments:
        context = self.host.context
        if context.host == "gitlab":
            notes = MergeRequestNotes(context, self.inputs.token, sleep=self.sleep, ends=self._step_ends)
            return MergeRequestComments(notes, self._marker)
        return PullRequestComments(self._api(), number, self._marker)

    def _text(self) -> str:
        folder = self.inputs.working_directory.as_posix()
        title = "Forged kernels" + (f" in {folder}" if folder != "." else "")
        if self.inputs.status_context != Inputs("report").status_context:
            title += f" ({self.inputs.status_context})"
        context = self.host.context
        text = telling.comment(self.result, marker=self._marker, title=title, sha=self._sha, run_url=context.run_url)
        # As it will be stored, or it would differ from what is there at every run.
        return inert(text) if context.host == "gitlab" else text

    @property
    def _marker(self) -> str:
        """Two workflows, two folders of a repository, and two kinds of runner have a comment each."""
        folder = self.inputs.working_directory.as_posix()
        return marker(self.host.context.workflow, folder, self.inputs.status_context)

    def _is_outdated(self, number: int) -> bool:
        """Was the pull request's head pushed anew while this run went on?"""
        if self.host.context.host != "github" or not self._sha:
            return False
        pull = self._api().get(f"pulls/{number}")
        head = pull.get("head") if isinstance(pull, dict) else None
        sha = head.get("sha") if isinstance(head, dict) else None
        return bool(sha) and sha != self._sha

    # -- the status ----------------------------------------------------------------------------------------------------

    def _status(self) -> None:
        context, name = self.host.context, self.inputs.status_context
        state, told = state_of(self.result), telling.headline(self.result)
        said = posted(self._api(), self._sha, state, name, told, context.run_url)
        self.host.notice(f"the status {name}: {'posted' if said else 'it says so already'}")

    def _api(self) -> GitHub:
        context = self.host.context
        token, repository = self.inputs.token, context.repository
        return GitHub(context.api_url, token, repository, sleep=self.sleep, ends=self._step_ends)

    def _hint(self, error: ApiError | UsageError) -> str:
        """What is missing, where a token is told that it may not."""
        if not isinstance(error, ApiError) or error.status not in (401, 403, 404):
            return ""
        if self.host.context.host == "gitlab":
            return "; notes need a project access token with scope api"
        if self.host.context.fork:
            return "; pull requests from forks get a read-only token: report from a workflow_run workflow"
        return "; the job needs `permissions: {pull-requests: write, statuses: write}`"
