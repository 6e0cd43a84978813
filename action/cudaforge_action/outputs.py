"""Every output of every mode: what ``Host.output`` may be told, and what ``action.yml`` and its README list.

Names are those of create-pull-request where it has the same thing. A mode gives what it knows; the rest stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["OUTPUTS"]

OUTPUTS: Final[Mapping[str, Mapping[str, str]]] = {
    "guard": {
        "outcome": "the worst of all answers: `pass`, `regression`, `failed`, `error` and so on",
        "regressions": "how many kernels or modules became slower",
        "failed": "how many are wrong",
        "inconclusive": "how many races were undecided",
        "checked": "how many cases have an answer",
        "not-checked": "how many could not be checked on this runner",
        "report-html": "the page of the run, from the checkout's top",
        "report-json": "the same for programs",
        "junit-xml": "the same as JUnit",
        "digests": "the SHA-256 of what the job leaves, by name: for the input `needs` of the next job",
    },
    "report": {
        "comment-url": "the sticky comment, where there is one",
    },
    "plan": {
        "matrix": "the jobs as JSON for `strategy.matrix`, through `fromJSON`: `shard`, `name` and `runs-on` of each",
        "shards": "how many shards there are; a job over the matrix needs `if:` with `!= '0'`",
        "targets": "how many targets are to be forged",
    },
    "forge": {
        "forged": "how many kernels won, by the forge job's own account",
        "spent-usd": "what the models cost; empty where no price is known",
        "best-speedup": "the largest speedup over eager",
        "report-html": "the page of the run",
    },
    "verify": {
        "verified": "how many kernels were rebuilt from source, are right and faster",
        "best-speedup": "the largest speedup over eager",
        "digests": "the same, by shard",
    },
    "publish": {
        "operation": "`created`, `updated`, `closed`, `pushed` (no pull request could be opened) or `none`",
        "pull-request-number": "the pull request's number",
        "pull-request-url": "its page",
        "pull-request-head-sha": "the commit on its branch",
        "branch": "the branch that was pushed",
        "compare-url": "the page that opens the pull request by hand, where Actions may not open any",
        "kernels": "how many kernels the branch brings",
        "best-speedup": "the largest verified speedup over eager",
        "spent-usd": "what the models cost in this run; empty where no price is known",
        "report-html": "the page of the run",
    },
}
"""By mode. Mode ``all`` gives those of plan, forge, verify and publish."""
