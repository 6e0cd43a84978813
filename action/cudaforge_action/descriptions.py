"""What each input is, in a sentence: what ``--help``, ``action.yml`` and its README say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["DESCRIPTIONS", "MODE_DESCRIPTIONS"]

MODE_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "guard": "pytest --forge-guard: are forged kernels still right, and as fast as promised?",
    "report": "tell what guard left: a comment and a status, on a plain machine the terminal",
    "plan": "which targets are worth forging; plan/plan.json, the matrix of a workflow",
    "forge": "pytest --forge on one shard of the plan (--shard); the only one that needs a model's key",
    "verify": "build what was forged from its source and judge it anew; refuses keys and tokens",
    "publish": "push what was verified to a branch of its own; on GitHub with its pull request and status",
    "all": "plan, forge, verify and publish, one after the other on this machine",
}

DESCRIPTIONS: Final[Mapping[str, str]] = {
    "mode": "What to do: `guard`, `report`, `plan`, `forge`, `verify`, `publish` or `all`",
    "token": (
        "What comments, statuses, branches and pull requests are written with; only `report` and "
        "`publish` see it. A GitHub App's token lets workflows run on the pull request"
    ),
    "working_directory": "The folder of the project, from the checkout's top",
    "python": "The Python that has your torch; by default `python3`",
    "paths": "What to collect, as on pytest's command line; by default everything",
    "pytest_args": "Further arguments of pytest, split as a shell would; nothing is expanded",
    "device": "`cpu` or `cuda`; by default what the runner has",
    "base": (
        "The branch to guard against and to open the pull request into; by default the pull request's "
        "base, else the branch of the run (publish) or the default one (guard)"
    ),
    "comment": (
        "When `report` writes its one comment: `auto` (from the first news on), `changes`, `failures` or `off`"
    ),
    "status_context": "The name of the commit status",
    "inconclusive": "What an undecided race is: `neutral` or `fail`",
    "strict": "Fail on what could not be checked (`--forge-strict`)",
    "history": "The file of measurements that is read and added to (`--forge-history`)",
    "fork_heads": (
        "Pull requests from forks, whose code would run on your machine: `refuse`, `skip`, or `run` where "
        "each job's machine is thrown away"
    ),
    "allow_pull_request_target": "Do not refuse `pull_request_target`, whose jobs hold your secrets",
    "runners": (
        "The machines to forge on, as YAML: a list of `{labels: [self-hosted, h200], device: cuda, arch: "
        "sm_90, shards: 4}`"
    ),
    "targets": (
        "Look at these alone: ids, names or patterns, one a line or separated by commas; forged is what of them "
        "is new, stale or thin"
    ),
    "max_shards": "The most jobs in the matrix, up to 256",
    "min_headroom": "A kernel with less speedup over its faster baseline than this is forged anew",
    "rounds": "Rounds of the loop per target; by default as configured",
    "max_usd": "What the models may cost in each forge job; by default as configured",
    "shard": "The job's own entry of the matrix, as `plan` wrote it (`matrix.shard`)",
    "quiet_minutes": (
        "For how many minutes in all `verify` may wait for other work on its machine to end, to race anew what that "
        "disturbed"
    ),
    "needs": (
        "What the job before says of itself, `toJSON(needs.guard)` for `report` and `toJSON(needs.verify)` for "
        "`publish`: what that job does not vouch for by its output `digests` is not believed to be its result"
    ),
    "branch": "The branch that is rebuilt from the base and pushed on a difference",
    "branch_suffix": "Text after the branch's name: one branch and pull request for each set of targets",
    "title": "The pull request's title",
    "commit_message": "The commit's message",
    "committer": "Whose commits they are: `Name <address>`",
    "labels": "Labels of the pull request, separated by commas or lines",
    "reviewers": "Reviewers, likewise",
    "team_reviewers": "Teams that are asked for a review, likewise; needs more than the default token",
    "assignees": "Assignees, likewise",
    "draft": "Open the pull request as a draft",
    "delete_branch": "Close the pull request and remove its branch when nothing is left to publish",
    "output_dir": "Where results lie, below the working directory",
    "artifacts": (
        "Hand results on as workflow artifacts (`cudaforge-…`): `auto`, or `off` where you do it, as on "
        "an Enterprise Server: put what earlier jobs left into output-dir"
    ),
}
"""By the name of the field."""
