"""Mode ``report``: what a guard job found, as one comment on the pull request and as a status of its commit.

It holds a token that may write, and reads what a machine left that ran the code of a pull request. So the numbers of
pull request and commit are those of this job's own event, and all else is text to be shown. Needs no torch or pytest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cudaforge_action import guard_result, telling
from cudaforge_action.api import GitHub
from cudaforge_action.artifact import ArtifactError
from cudaforge_action.comment import Comments, MergeRequestComments, PullRequestComments, keep_one, marker
from cudaforge_action.guard_result import GuardResult
from cudaforge_action.host import Host
from cudaforge_action.inputs import Inputs
from cudaforge_action.merge_request import MergeRequestNotes
from cudaforge_action.records import Context
from cudaforge_action.rest import ApiError
from cudaforge_action.status import State, posted
from pytest_cudaforge.errors import UsageError

__all__ = ["run"]


def run(inputs: Inputs, host: Host) -> int:
    """Tell what the guard found; 1 where what it left cannot be read.

    Whatever the host refuses (a read-only token, a fork, no network) is a warning: the guard's own job has failed where
    something is wrong.
    """
    folder = _folder(inputs)
    try:
        result, status = guard_result.read(folder), 0
    except ArtifactError as error:
        if host.context.fork and not folder.exists():
            host.notice("nothing to report: the guard left no result of this head, which lies in a fork")
            return 0
        host.warning(str(error))
        result, status = guard_result.error_of(error), 1
    for what, step in _steps(inputs, host, result):
        try:
            step()
        except (ApiError, UsageError) as error:
            host.warning(f"{what} could not be written: {error}{_hint(error, host.context)}")
    return status


def _folder(inputs: Inputs) -> Path:
    return inputs.output / "guard"


def _steps(inputs: Inputs, host: Host, result: GuardResult) -> Sequence[tuple[str, Callable[[], None]]]:
    context = host.context
    if context.host == "plain":
        return [("the report", lambda: _print(inputs, host, result))]
    if not inputs.token:
        host.warning("there is neither a comment nor a status without the input token (github.token would do)")
        return []
    steps: list[tuple[str, Callable[[], None]]] = []
    if inputs.comment != "off" and context.number is not None:
        steps.append(("the comment", lambda: _comment(inputs, host, result)))
    if context.host == "github" and context.head_sha and inputs.status_context:
        steps.append(("the status", lambda: _status(inputs, host, result)))
    return steps


def _print(inputs: Inputs, host: Host, result: GuardResult) -> None:
    with host.quoting():
        sys.stdout.write(_text(inputs, host.context, result))
        sys.stdout.flush()


# -- the comment -------------------------------------------------------------------------------------------------------


def _comment(inputs: Inputs, host: Host, result: GuardResult) -> None:
    context = host.context
    if context.host == "github" and _is_outdated(inputs, context):
        host.notice("the pull request has a newer commit: its comment is left to that one's run")
        return
    written = keep_one(
        _comments(inputs, context), _text(inputs, context, result), news=telling.is_news(result, inputs.comment)
    )
    told = {"none": "nothing to tell, so that none was written", "unchanged": "it says so already"}
    host.notice(f"the comment: {told.get(written.operation, written.operation)}")
    if written.url:
        host.output("comment-url", written.url)


def _comments(inputs: Inputs, context: Context) -> Comments:
    assert context.number is not None
    mark = _marker(inputs, context)
    if context.host == "gitlab":
        return MergeRequestComments(MergeRequestNotes(context, inputs.token), mark)
    return PullRequestComments(_api(inputs, context), context.number, mark)


def _text(inputs: Inputs, context: Context, result: GuardResult) -> str:
    folder = inputs.working_directory.as_posix()
    title = "Forged kernels" + (f" in {folder}" if folder != "." else "")
    title += f" ({inputs.status_context})" if inputs.status_context != Inputs("report").status_context else ""
    sha, url = context.head_sha, context.run_url
    return telling.comment(result, marker=_marker(inputs, context), title=title, sha=sha, run_url=url)


def _marker(inputs: Inputs, context: Context) -> str:
    """Two workflows, two folders of a repository, or two kinds of runner have a comment each."""
    return marker(context.workflow, inputs.working_directory.as_posix(), inputs.status_context)


def _is_outdated(inputs: Inputs, context: Context) -> bool:
    """Was the pull request's head pushed anew while this run went on?"""
    pull = _api(inputs, context).get(f"pulls/{context.number}")
    head = pull.get("head") if isinstance(pull, dict) else None
    sha = head.get("sha") if isinstance(head, dict) else None
    return bool(sha and context.head_sha and sha != context.head_sha)


# -- the status --------------------------------------------------------------------------------------------------------


def _status(inputs: Inputs, host: Host, result: GuardResult) -> None:
    context = host.context
    said = posted(
        _api(inputs, context),
        context.head_sha,
        state_of(result),
        inputs.status_context,
        telling.headline(result),
        context.run_url,
    )
    host.notice(f"the status {inputs.status_context}: {'posted' if said else 'it says so already'}")


def state_of(result: GuardResult) -> State:
    """Green only for what passed; what is undecided fails where the guard's own job does."""
    if result.outcome == "error":
        return "error"
    fails = result.outcome in ("failed", "regression") or result.run.status != 0
    return "failure" if fails else "success"


def _api(inputs: Inputs, context: Context) -> GitHub:
    return GitHub(context.api_url, inputs.token, context.repository)


def _hint(error: ApiError | UsageError, context: Context) -> str:
    """What is missing, where a token is told that it may not."""
    if not isinstance(error, ApiError) or error.status not in (401, 403, 404):
        return ""
    if context.host == "gitlab":
        return "; notes need a project access token with scope api"
    if context.fork:
        return "; pull requests from forks get a read-only token: report from a workflow_run workflow"
    return "; the job needs `permissions: {pull-requests: write, statuses: write}`"
