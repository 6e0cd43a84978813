"""Where a run stands, read from the environment that the host sets and from the event's own file.

Of an event, names and titles are text of strangers: nothing here is used as a path, a command or markup. What decides
(number, sha, fork) is checked for its shape, and what is missing counts as the less trusted case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudaforge_action.records import Context
from pytest_cudaforge.errors import UsageError

if TYPE_CHECKING:
    from cudaforge_action.inputs import Inputs

__all__ = ["RUNS_CODE", "github_context", "gitlab_context", "plain_context", "refuse_unsafe"]

#: The modes that run code of what is checked out.
RUNS_CODE = frozenset({"guard", "forge", "verify", "all"})

_SHA = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_ZEROS = re.compile(r"0+")


def github_context(environ: Mapping[str, str]) -> Context:
    """From ``GITHUB_*`` and the file of the event.

    https://docs.github.com/actions/reference/variables-reference and
    https://docs.github.com/webhooks/webhook-events-and-payloads. Raises :class:`UsageError` where the event's file is
    not readable JSON.
    """
    event = _event(environ.get("GITHUB_EVENT_PATH", ""))
    name = environ.get("GITHUB_EVENT_NAME", "")
    repository = environ.get("GITHUB_REPOSITORY", "")
    server = environ.get("GITHUB_SERVER_URL", "").rstrip("/") or "https://github.com"
    run_id = environ.get("GITHUB_RUN_ID", "")
    pull = _pull(name, event, repository)
    return Context(
        host="github",
        workspace=Path(environ.get("GITHUB_WORKSPACE") or Path.cwd()),
        event=name,
        repository=repository,
        sha=environ.get("GITHUB_SHA", ""),
        head_sha=pull.head_sha or environ.get("GITHUB_SHA", ""),
        ref=environ.get("GITHUB_REF", ""),
        base_ref=environ.get("GITHUB_BASE_REF", "") or pull.base_ref,
        default_branch=_text(event, "repository", "default_branch") or _scheduled_branch(name, environ),
        number=pull.number,
        fork=pull.fork,
        label=_text(event, "label", "name") if event.get("action") == "labeled" else "",
        api_url=environ.get("GITHUB_API_URL", "").rstrip("/") or "https://api.github.com",
        server_url=server,
        run_url=f"{server}/{repository}/actions/runs/{run_id}" if run_id and repository else "",
        run_id=run_id,
        run_attempt=environ.get("GITHUB_RUN_ATTEMPT", ""),
        workflow=environ.get("GITHUB_WORKFLOW", ""),
    )


def gitlab_context(environ: Mapping[str, str]) -> Context:
    """From GitLab's predefined variables: https://docs.gitlab.com/ci/variables/predefined_variables/.

    ``repository`` is the project that a merge request goes into, which is not where its pipeline runs when its head
    lies in a fork (that is, in another project).
    """
    number = environ.get("CI_MERGE_REQUEST_IID", "")
    source = environ.get("CI_MERGE_REQUEST_SOURCE_PROJECT_ID", "")
    # On pipelines of merged results CI_COMMIT_SHA is a commit of GitLab's own; the head is named beside it.
    head = environ.get("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA", "")
    sha = environ.get("CI_COMMIT_SHA", "")
    return Context(
        host="gitlab",
        workspace=Path(environ.get("CI_PROJECT_DIR") or Path.cwd()),
        event=environ.get("CI_PIPELINE_SOURCE", ""),
        repository=environ.get("CI_MERGE_REQUEST_PROJECT_PATH", "") or environ.get("CI_PROJECT_PATH", ""),
        sha=sha,
        head_sha=head if _SHA.fullmatch(head) and not _ZEROS.fullmatch(head) else sha,
        ref=environ.get("CI_COMMIT_REF_NAME", ""),
        base_ref=environ.get("CI_MERGE_REQUEST_TARGET_BRANCH_NAME", ""),
        default_branch=environ.get("CI_DEFAULT_BRANCH", ""),
        number=int(number) if number.isascii() and number.isdigit() else None,
        fork=bool(number) and (not source or source != environ.get("CI_MERGE_REQUEST_PROJECT_ID", "")),
        api_url=environ.get("CI_API_V4_URL", "").rstrip("/"),
        server_url=environ.get("CI_SERVER_URL", "").rstrip("/"),
        run_url=environ.get("CI_JOB_URL", "") or environ.get("CI_PIPELINE_URL", ""),
        run_id=environ.get("CI_PIPELINE_ID", ""),
        run_attempt="",
    )


def plain_context(cwd: Path) -> Context:
    """A machine that is no CI service: the repository as it lies there."""
    return Context(host="plain", workspace=cwd)


def refuse_unsafe(context: Context, inputs: Inputs) -> str:
    """Why this run is to be skipped, "" where it may go on.

    Raises :class:`UsageError` for ``pull_request_target``, whose jobs hold the repository's secrets while a pull
    request names what is checked out, unless ``allow-pull-request-target`` says otherwise; and for a mode that runs
    code (:data:`RUNS_CODE`) on a head from a fork, unless ``fork-heads`` says ``skip`` or ``run``: a self-hosted runner
    keeps what a stranger's code leaves on it.
    """
    if context.event == "pull_request_target" and not inputs.allow_pull_request_target:
        raise UsageError(
            "this workflow runs on pull_request_target: code of any pull request would run beside the repo's secrets",
            expected="on: pull_request",
            remedy="use pull_request, or set allow-pull-request-target: true where nothing of the head is checked out",
        )
    if not context.fork or inputs.mode not in RUNS_CODE or inputs.fork_heads == "run":
        return ""
    where = "the head of this pull request lies in a fork"
    if context.event == "issue_comment":
        where = "a comment does not say whether its pull request's head lies in a fork"
    if inputs.fork_heads == "skip":
        return f"{where}, and fork-heads is skip"
    raise UsageError(
        f"{where}: mode {inputs.mode} would run a stranger's code on this runner",
        expected="a head in this repository, or runners that are thrown away after each job",
        remedy="set fork-heads: skip to leave such runs out, or fork-heads: run where the runner is ephemeral",
    )


# -- the event ---------------------------------------------------------------------------------------------------------


class _Pull:
    """What an event says of a pull request."""

    def __init__(self, number: object = None, head_sha: str = "", base_ref: str = "", fork: bool = False) -> None:
        self.number = number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None
        self.head_sha = head_sha if _SHA.fullmatch(head_sha) else ""
        self.base_ref = base_ref.removeprefix("refs/heads/")
        self.fork = fork


def _pull(name: str, event: Mapping[str, Any], repository: str) -> _Pull:
    if isinstance(pull := event.get("pull_request"), dict):
        head = _text(pull, "head", "repo", "full_name")
        # A deleted fork has no repository any more: "" is not ours either.
        fork = head.lower() != (_text(pull, "base", "repo", "full_name") or repository).lower()
        return _Pull(pull.get("number"), _text(pull, "head", "sha"), _text(pull, "base", "ref"), fork)
    if name == "workflow_run" and isinstance(run := event.get("workflow_run"), dict):
        head = _text(run, "head_repository", "full_name")
        # Empty for heads in forks: https://docs.github.com/webhooks/webhook-events-and-payloads#workflow_run.
        pulls = [entry for entry in run.get("pull_requests") or () if isinstance(entry, dict)]
        one = pulls[0] if len(pulls) == 1 else {}
        return _Pull(
            one.get("number"), _text(run, "head_sha"), _text(one, "base", "ref"), head.lower() != repository.lower()
        )
    if name == "merge_group":
        return _Pull(None, _text(event, "merge_group", "head_sha"), _text(event, "merge_group", "base_ref"))
    issue = event.get("issue")
    if name == "issue_comment" and isinstance(issue, dict) and "pull_request" in issue:
        # The event does not say where the head lies, and such workflows usually check it out: as from a fork.
        return _Pull(issue.get("number"), fork=True)
    return _Pull()


def _event(path: str) -> Mapping[str, Any]:
    if not path:
        return {}
    try:
        event = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError):
        event = None
    if not isinstance(event, dict):
        raise UsageError(
            f"GITHUB_EVENT_PATH names no event: {path}", expected="the JSON file that GitHub's runner writes"
        )
    return event


def _scheduled_branch(name: str, environ: Mapping[str, str]) -> str:
    """Events that only ever run on the default branch may come without the repository."""
    return environ.get("GITHUB_REF_NAME", "") if name == "schedule" else ""


def _text(value: Any, *keys: str) -> str:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
