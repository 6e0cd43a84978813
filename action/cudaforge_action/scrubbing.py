"""The environment of a process that runs code of others: without tokens, keys, and the runner's own files.

This stops accidents (a log that prints its environment) and what looks only there. It is no wall: code of the same user
can look for a token elsewhere on the machine, which is why jobs that run candidates are given none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

__all__ = ["scrubbed"]

#: Parts of names, between underscores, that secrets have.
_SECRET = re.compile(
    r"(^|_)(TOKENS?|KEYS?|APIKEY|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|PAT|CREDENTIALS?|AUTH|JWT|COOKIE)(_|$)",
    re.IGNORECASE,
)
#: An action's inputs; services of the runner (its cache, its identity tokens, where it takes artifacts); the files by
#: which a step sets variables, outputs and paths of later steps; what git and ssh would ask for a password.
_OURS = re.compile(
    r"INPUT_|ACTIONS_(RUNTIME|RESULTS|CACHE|ID)_|GITHUB_(OUTPUT|ENV|PATH|STATE|STEP_SUMMARY)$|GIT_(SSH_)?ASKPASS$|SSH_"
    r"|CI_(JOB_JWT|BUILD|REPOSITORY_URL|REGISTRY_|DEPENDENCY_PROXY_|DEPLOY_)"
)
#: ``https://user:password@host``, as package indexes and proxies are given.
_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@]*:[^/\s@]+@", re.IGNORECASE)
_GIT_SECRET = re.compile(r"^http\.|^credential|^url\.|extraheader", re.IGNORECASE)


def scrubbed(environ: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """``environ`` without what is, or by its name may be, a secret. ``keep``: names that stay (the key that a forge job
    is given for its model)."""
    left = {name: value for name, value in environ.items() if name in keep or not _is_secret(name, value)}
    return left | dict(_git_settings(environ))


def _is_secret(name: str, value: str) -> bool:
    return bool(_OURS.match(name) or name.startswith("GIT_CONFIG_") or _SECRET.search(name) or _PASSWORD.match(value))


def _git_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Git's settings in the environment without those that hold tokens: a container's ``safe.directory`` stays.

    https://git-scm.com/docs/git-config#Documentation/git-config.txt-GITCONFIGCOUNT
    """
    given = environ.get("GIT_CONFIG_COUNT", "")
    count = int(given) if given.isascii() and given.isdigit() and len(given) < 4 else 0
    pairs = [
        (environ.get(f"GIT_CONFIG_KEY_{at}", ""), environ.get(f"GIT_CONFIG_VALUE_{at}", "")) for at in range(count)
    ]
    kept = [(key, value) for key, value in pairs if key and not _GIT_SECRET.search(key)]
    if kept:
        yield "GIT_CONFIG_COUNT", str(len(kept))
    for at, (key, value) in enumerate(kept):
        yield f"GIT_CONFIG_KEY_{at}", key
        yield f"GIT_CONFIG_VALUE_{at}", value
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_NOSYSTEM"):
        if name in environ:
            yield name, environ[name]
