"""A commit's status: how a pull request shows what was checked where no workflow of its own ran.

A pull request that was opened with a workflow's default token triggers no workflows:
https://docs.github.com/actions/concepts/security/github_token#when-github_token-triggers-workflow-runs.
Statuses: https://docs.github.com/rest/commits/statuses (at most 1000 of a commit and context).
"""

from __future__ import annotations

from typing import Literal

from cudaforge_action.api import GitHub
from pytest_cudaforge.report.escaping import one_line, plain

__all__ = ["MAX_DESCRIPTION", "State", "posted"]

State = Literal["error", "failure", "pending", "success"]
#: GitHub refuses a longer one.
MAX_DESCRIPTION = 140


def posted(api: GitHub, sha: str, state: State, context: str, description: str, target_url: str = "") -> bool:
    """Post it where the newest status of that context says something else; was it posted?

    The page that it leads to makes no difference: another run with the same result is no news. Raises
    :class:`~cudaforge_action.api.ApiError`; a caller makes that a warning.
    """
    text = one_line(plain(description), MAX_DESCRIPTION)
    for one in api.paginate(f"commits/{sha}/statuses"):
        # Newest first.
        if isinstance(one, dict) and str(one.get("context", "")).lower() == context.lower():
            if (one.get("state"), one.get("description")) == (state, text):
                return False
            break
    body = {"state": state, "context": context, "description": text}
    api.post(f"statuses/{sha}", {**body, **({"target_url": target_url} if target_url else {})}, lag=True)
    return True
