"""Mode publish: what was verified onto a branch, and a pull request for it. The only job that holds a write token.

It runs no code of the repo, of candidates or of a model, and needs neither torch nor a GPU. Every step can be the last:
a run that dies half way leaves what the next one goes on from.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cudaforge_action import body, pull_request, status
from cudaforge_action.api import ApiError, GitHub
from cudaforge_action.artifact import read_json, refuse_links
from cudaforge_action.branch import (
    Base,
    Branch,
    Built,
    Kernel,
    Key,
    Plan,
    Refused,
    base_of,
    branch_of,
    built,
    planned,
    trailers,
)
from cudaforge_action.harvest import Harvest, harvest
from cudaforge_action.host import Host, log
from cudaforge_action.inputs import Inputs
from cudaforge_action.merged import write_merged
from cudaforge_action.plan import PLAN_FILE
from cudaforge_action.project import project_at
from cudaforge_action.pull_request import Opened, Wanted
from cudaforge_action.records import Context
from cudaforge_action.remote import Identity, Remote, opened
from cudaforge_action.shards import ShardError, check_name
from pytest_cudaforge.errors import UsageError
from pytest_cudaforge.report import files
from pytest_cudaforge.report.escaping import one_line, plain
from pytest_cudaforge.report.markdown import escape, unlinked

__all__ = ["check_target", "run"]

_MOST_LINES = 100
#: As many as GitHub shows of a step.
_MOST_WARNINGS = 10
_MOST_PLAN_BYTES = 64 << 20
_CLOSED = (
    "Nothing is left to propose: each of these kernels has been merged, replaced, or was verified for a module that "
    "has changed since. The next run that forges something opens a new pull request."
)


@dataclass(frozen=True)
class _Result:
    """What became of the branch. ``head``: its tip afterwards, "" where there is none."""

    base: Base
    branch: Branch
    plan: Plan
    built: Built
    head: str
    told: Mapping[str, str]


def check_target(inputs: Inputs, context: Context) -> None:
    """Raises UsageError where :func:`run` would not know where to publish: to be told before anything is spent."""
    _url(inputs, context)
    _base_ref(inputs, context)


def run(inputs: Inputs, host: Host) -> int:
    """The exit status. Raises PublishError, ApiError and UsageError, whose messages say what to do."""
    _refuse_checked_in(inputs)
    vouched = inputs.needs.digests if inputs.needs is not None else None
    found = harvest(inputs.output, _expected(inputs.output), vouched)
    _merge(inputs, host, found)
    for name, why in found.lost.items():
        host.warning(f"shard {name} is not in this publish: {one_line(plain(why), 500)}")
    context = host.context
    with opened(_url(inputs, context), _token(inputs, context)) as remote:
        result = _to_branch(inputs, context, remote, found)
        _warn_of_refused(host, (*found.refused, *result.plan.refused))
        if context.host == "github":
            pull = _on_github(inputs, host, remote, result)
        else:
            pull = _elsewhere(context, remote, result)
    for text in pull.warnings:
        host.warning(text)
    _tell(inputs, host, found, result, pull)
    return 0


def _refuse_checked_in(inputs: Inputs) -> None:
    """What is checked in is of whoever wrote the commit: nobody verified it. Raises UsageError."""
    refuse_links(inputs.output)
    if found := _asked(inputs, "--literal-pathspecs", "ls-files", "--", inputs.output_dir.as_posix()):
        raise UsageError(
            f"{inputs.output.as_posix()} holds files that are checked in: {one_line(found, 200)}",
            expected="only what the jobs of this run left there",
            remedy="git rm them, or choose another output-dir",
        )


def _warn_of_refused(host: Host, refused: Sequence[Refused]) -> None:
    for one in refused[:_MOST_WARNINGS]:
        host.warning(f"{one.target} ({one.language}) is not published: {one_line(plain(one.why), 500)}")
    if len(refused) > _MOST_WARNINGS:
        host.warning(f"{len(refused) - _MOST_WARNINGS} more kernels are not published: the summary says why")


# -- where -------------------------------------------------------------------------------------------------------------


def _url(inputs: Inputs, context: Context) -> str:
    if context.server_url and context.repository:
        return f"{context.server_url}/{context.repository}.git"
    if url := _asked(inputs, "remote", "get-url", "--push", "origin"):
        return url
    raise UsageError(
        "there is no repository to publish to",
        expected="a CI service that names one, or a checkout with a remote called origin",
        remedy="run inside a clone: git remote add origin URL",
    )


def _asked(inputs: Inputs, *question: str) -> str:
    """What git says of the checkout, "" where it says nothing."""
    from git import CommandError
    from git.cmd import Git

    try:
        return str(Git(os.path.abspath(inputs.working_directory)).execute(["git", *question]))
    except (CommandError, OSError):
        return ""


def _token(inputs: Inputs, context: Context) -> str:
    if not inputs.token and context.host != "plain":
        raise UsageError(
            "there is no token to publish with",
            expected="the input token, with `permissions: contents: write, pull-requests: write, statuses: write`",
            remedy="give `token: ${{ github.token }}` (or an App's), on other services CUDAFORGE_TOKEN",
        )
    return inputs.token


def _base_ref(inputs: Inputs, context: Context) -> str:
    """The branch that pull requests go into: the input, a pull request's own base, or what the run is about."""
    given = inputs.base.removeprefix("refs/heads/").removeprefix("origin/")
    ref = context.ref.removeprefix("refs/heads/")
    on_branch = ref if context.ref and not ref.startswith("refs/") else ""
    found = given or context.base_ref or on_branch or context.default_branch
    if not found and context.host == "plain":
        found = _asked(inputs, "symbolic-ref", "--short", "--quiet", "HEAD")
    if not found:
        raise UsageError("the base branch cannot be told", expected="the input base", remedy="name one: base: main")
    return found


def _prefix(inputs: Inputs) -> str:
    """Where ids start (pytest's rootdir), below the repo's top: known from the checkout, where there is one."""
    folder = Path(os.path.abspath(inputs.working_directory))
    top = next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)
    if top is None:
        # Nothing is checked out; the input is where it would lie.
        return "" if inputs.working_directory.is_absolute() else inputs.working_directory.as_posix()
    root = project_at(folder, os.environ, inputs.paths).root if folder.is_dir() else folder
    return (root if root.is_relative_to(top) else folder).relative_to(top).as_posix()


# -- the branch --------------------------------------------------------------------------------------------------------


def _to_branch(inputs: Inputs, context: Context, remote: Remote, found: Harvest) -> _Result:
    name, ref = inputs.head_branch, _base_ref(inputs, context)
    if name in (ref, context.default_branch):
        raise UsageError(
            f"the branch for forged kernels is {name!r}, which pull requests go into",
            expected="a branch of its own, rebuilt at each run",
            remedy="give another one with the input branch",
        )
    remote.tips(ref, name)
    given = {kernel.entry.path for kernel in found.kernels}
    base = _base(inputs, remote, ref, given)
    branch = branch_of(remote, name, base)
    if others := {kernel.entry.path for kernel in branch.kernels} - given:
        base = _base(inputs, remote, ref, given | others)
    strays = _strays(remote, ref, found)
    plan = planned(base, branch, [kernel for kernel in found.kernels if kernel.entry.key not in strays])
    plan = dataclasses.replace(plan, refused=(*plan.refused, *strays.values()))
    if branch.foreign:
        return _Result(base, branch, plan, Built("keep", branch.tip or ""), branch.tip or "", {})
    message = inputs.commit_message or _message(plan.kernels)
    done = built(remote, base, branch, plan, message, _identity(inputs), _trailers(context, found))
    if done.action == "push":
        remote.push(done.sha, name, branch.tip)
    head = done.sha if done.action == "push" else branch.tip if done.action == "keep" else ""
    told = trailers(remote.message(done.sha)) if done.sha else {}
    return _Result(base, branch, plan, done, head or "", told)


def _strays(remote: Remote, ref: str, found: Harvest) -> dict[Key, Refused]:
    """Kernels that were verified at a commit which is not on the base: settings, imports and allowances of a branch
    that nobody merged are no measure for it. A verify job that could not ask git names no commit."""
    shards = [shard for shard in found.verified.values() if shard.files]
    commits = {shard.shard.commit for shard in shards if shard.shard.commit}
    elsewhere = {sha for sha in commits if not remote.holds(ref, sha)}
    return {
        kernel.entry.key: Refused(
            kernel.target,
            kernel.language,
            f"it was verified at {shard.shard.commit[:12]}, which is not on {ref}: run the workflow on {ref}, or name "
            "the branch that it ran on with the input base",
        )
        for shard in shards
        if shard.shard.commit in elsewhere
        for kernel in shard.shard.kernels
        if kernel.entry is not None
    }


def _base(inputs: Inputs, remote: Remote, ref: str, given: set[str]) -> Base:
    return base_of(remote, ref, _prefix(inputs), paths=inputs.paths, given=sorted(given), environ=_settings())


def _settings() -> dict[str, str]:
    """Of the environment only where kernels lie: the rest is about forging."""
    return {name: value for name, value in os.environ.items() if name == "CUDAFORGE_FORGE_DIR"}


def _identity(inputs: Inputs) -> Identity:
    name, _, email = inputs.committer.rstrip(">").rpartition(" <")
    return Identity(name, email)


def _message(kernels: Sequence[Kernel]) -> str:
    """For people; a squash merge makes it the base's. Paths are text of others: they mention and close nothing."""
    lines = [f"feat: {body.title(kernels)[0].lower()}{body.title(kernels)[1:]}", ""] if kernels else ["feat: forge"]
    for kernel in kernels[:_MOST_LINES]:
        entry = kernel.entry
        lines.append(_inert(f"- {one_line(plain(entry.target), 200)} ({entry.language}, {entry.arch})"))
    rest = len(kernels) - _MOST_LINES
    return "\n".join([*lines, *([f"- and {rest} more"] if rest > 0 else [])])


def _trailers(context: Context, found: Harvest) -> dict[str, str]:
    usd = found.usd
    return {
        "Cudaforge-Version": importlib.metadata.version("pytest-cudaforge"),
        "Cudaforge-Run": context.run_url,
        "Cudaforge-Verified-On": _plain("; ".join(found.machines)),
        "Cudaforge-Models": _plain(", ".join(found.models)),
        "Cudaforge-Cost": "" if usd is None else f"${usd:.4f}",
        "Cudaforge-Lost": _plain(", ".join(found.lost)),
    }


def _plain(text: str) -> str:
    return _inert(one_line(plain(text), 500))


def _inert(text: str) -> str:
    """For a commit's message: it mentions nobody, and is no "[skip ci]", with which no workflow would look at the
    branch (https://docs.github.com/actions/how-tos/manage-workflow-runs/skip-workflow-runs)."""
    return unlinked(text).replace("[", "[\u200b")


# -- the pull request --------------------------------------------------------------------------------------------------


def _on_github(inputs: Inputs, host: Host, remote: Remote, result: _Result) -> Opened:
    context = host.context
    api = GitHub(context.api_url, inputs.token, context.repository)
    if result.branch.foreign:
        return _left_alone(api, result)
    if result.built.action == "nothing":
        return _closed(inputs, api, remote, result)
    wanted = Wanted(
        branch=result.branch.name,
        base=result.base.ref,
        title=inputs.title or body.title(result.plan.kernels),
        body=body.body(result.plan.kernels, _facts(context, result)),
        labels=inputs.labels,
        reviewers=inputs.reviewers,
        team_reviewers=inputs.team_reviewers,
        assignees=inputs.assignees,
        draft=inputs.draft,
    )
    pull = pull_request.opened(api, wanted, result.head, pushed=result.built.action == "push")
    _post_status(inputs, host, api, result)
    return pull


def _facts(context: Context, result: _Result) -> body.Facts:
    return body.Facts(
        result.base.ref,
        result.branch.name,
        result.base.forge_dir,
        context.server_url,
        context.repository,
        result.told,
    )


def _left_alone(api: GitHub, result: _Result) -> Opened:
    """Somebody else's commits are on the branch. They are worth more than ours, which can be made again."""
    pull = pull_request.open_pull(api, result.branch.name, result.base.ref)
    number, url = (pull["number"], str(pull.get("html_url", ""))) if pull is not None else (None, "")
    news = len(result.plan.fresh)
    text = (
        f"the branch {result.branch.name} was left as it is: {result.branch.foreign}. "
        f"Not published: {news} newly verified kernel{'' if news == 1 else 's'}. To do: merge or close its pull "
        "request and delete the branch, then run publish again; or give another branch with the input branch-suffix"
    )
    return Opened("none", number, url, (text,))


def _closed(inputs: Inputs, api: GitHub, remote: Remote, result: _Result) -> Opened:
    """Nothing is left: no pull request, and no branch. Each step is done only where it is still to be done."""
    pull = pull_request.open_pull(api, result.branch.name)
    warning = pull_request.close(api, pull, _CLOSED) if pull is not None else ""
    if result.branch.tip is not None and inputs.delete_branch:
        remote.delete(result.branch.name, result.branch.tip)
    elif pull is None:
        return Opened("none")
    number, url = (pull["number"], str(pull.get("html_url", ""))) if pull is not None else (None, "")
    return Opened("closed", number, url, (warning,) if warning else ())


def _post_status(inputs: Inputs, host: Host, api: GitHub, result: _Result) -> None:
    text = body.headline(result.plan.kernels)
    try:
        status.posted(api, result.head, "success", inputs.status_context, text, host.context.run_url)
    except ApiError as error:
        host.warning(f"no status could be posted on the branch's commit: {error.reason}. It needs `statuses: write`")


def _elsewhere(context: Context, remote: Remote, result: _Result) -> Opened:
    """A host whose pull requests are opened by people."""
    name = result.branch.name
    if result.branch.foreign:
        return Opened("none", warnings=(f"the branch {name} was left as it is: {result.branch.foreign}",))
    if result.built.action == "nothing":
        if result.branch.tip is None:
            return Opened("none")
        remote.delete(name, result.branch.tip)
        return Opened("closed")
    return Opened("pushed" if result.built.action == "push" else "none", url="")


# -- what is told ------------------------------------------------------------------------------------------------------


def _compare_url(context: Context, result: _Result) -> str:
    if not result.head or not context.server_url:
        return ""
    if context.host == "gitlab":
        return f"{context.server_url}/{context.repository}/-/compare/{result.base.ref}...{result.branch.name}"
    return pull_request.compare_url(context.server_url, context.repository, result.base.ref, result.branch.name)


def _tell(inputs: Inputs, host: Host, found: Harvest, result: _Result, pull: Opened) -> None:
    kernels, usd = () if result.branch.foreign else result.plan.kernels, found.usd
    best = body.best_speedup(kernels)
    compare = _compare_url(host.context, result)
    outputs = {
        "operation": pull.operation,
        "pull-request-number": "" if pull.number is None else str(pull.number),
        "pull-request-url": pull.url,
        "pull-request-head-sha": result.head,
        "branch": result.branch.name if result.head else "",
        "compare-url": compare,
        "kernels": str(len(kernels)),
        "best-speedup": "" if best is None else f"{best:.2f}",
        "spent-usd": "" if usd is None else f"{usd:.4f}",
    }
    for name, value in outputs.items():
        host.output(name, value)
    if pull.operation == "pushed" and compare:
        host.notice(f"open the pull request by hand: {compare}")
    text = _summary(host.context, found, result, pull, compare, kernels)
    host.summary(text)
    log(host, _said(result, pull, compare, kernels))
    files.write(inputs.output / "published" / "summary.md", text, "summary.md")


_SAID = {
    "created": "opened a pull request",
    "updated": "brought the pull request up to date",
    "closed": "nothing is left to propose: closed the pull request and removed the branch",
    "none": "nothing was to be done",
    "pushed": "pushed the branch",
}


def _said(result: _Result, pull: Opened, compare: str, kernels: Sequence[Kernel]) -> list[str]:
    where = pull.url or (compare if pull.operation == "pushed" else "")
    held = f"{result.branch.name} at {result.head[:9]} brings {len(kernels)} kernel{'s' if len(kernels) != 1 else ''}"
    return [f"{_SAID[pull.operation]}{': ' + where if where else ''}", *([held] if kernels else [])]


def _summary(
    context: Context, found: Harvest, result: _Result, pull: Opened, compare: str, kernels: Sequence[Kernel]
) -> str:
    where = pull.url or (compare if pull.operation == "pushed" else "")
    shown = f" ([{'#' + str(pull.number) if pull.number is not None else 'compare'}]({where}))" if where else ""
    parts = [f"# Forged kernels: {_SAID[pull.operation]}{shown}"]
    parts += ["\n".join(f"- ⚠️ {escape(text)}" for text in pull.warnings)] if pull.warnings else []
    lost = [f"- shard {escape(name)}: {escape(one_line(why, 300))}" for name, why in found.lost.items()]
    parts += _listed("Lost shards", lost)
    parts += _listed("Not published", _refusals((*found.refused, *result.plan.refused)))
    parts += _listed("Taken off the branch", _refusals(result.plan.dropped))
    parts += [body.body(kernels, _facts(context, result))] if kernels else []
    return "\n\n".join(parts) + "\n"


def _refusals(refused: Sequence[Refused]) -> list[str]:
    return [
        f"- {escape(one_line(one.target, 200))} ({escape(one.language)}): {escape(one.why[:300])}" for one in refused
    ]


def _listed(heading: str, lines: Sequence[str]) -> list[str]:
    more = [f"- and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    return [f"## {heading}\n\n" + "\n".join([*lines[:_MOST_LINES], *more])] if lines else []


# -- what is kept ------------------------------------------------------------------------------------------------------


def _expected(folder: Path) -> tuple[str, ...] | None:
    """The names of the shards that were planned, None where no plan was handed on: nothing but names is taken of it."""
    try:
        plan = read_json(folder / "plan" / PLAN_FILE, _MOST_PLAN_BYTES)
        return tuple(check_name(shard["name"]) for shard in plan["shards"])
    except (ShardError, KeyError, TypeError):
        return None


def _merge(inputs: Inputs, host: Host, found: Harvest) -> None:
    """One document, one page, one history for the whole workflow."""
    folder = inputs.output / "published"
    histories = [inputs.history_file] if inputs.history_file is not None else []
    for note in write_merged(folder, found, histories):
        host.warning(one_line(plain(note), 500))
    if (folder / "report.html").is_file():
        host.output("report-html", (inputs.output / "published/report.html").as_posix())
