"""Which environment variables hold a token or a key: what a job must not have, and what ``pytest --forge`` is given.

A write token goes to nobody that this package starts; a model's key goes to ``pytest --forge`` alone. Everybody else
gets what :func:`~cudaforge_action.scrubbing.scrubbed` leaves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from cudaforge_action.scrubbing import scrubbed
from pytest_cudaforge.config import ForgeConfig

__all__ = ["for_forging", "key_names", "settings_of", "token_names"]

#: Those that act on a repository or on a CI service.
_TOKENS: Final = frozenset(
    [
        *("INPUT_TOKEN", "CUDAFORGE_TOKEN", "GITHUB_TOKEN", "GH_TOKEN", "GITHUB_PAT", "GH_PAT", "GH_ENTERPRISE_TOKEN"),
        *("GITHUB_ENTERPRISE_TOKEN", "ACTIONS_RUNTIME_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"),
        *("GITLAB_TOKEN", "GL_TOKEN", "GITLAB_PRIVATE_TOKEN", "PRIVATE_TOKEN", "CI_JOB_TOKEN", "CI_BUILD_TOKEN"),
    ]
)
#: GitLab gives these to every job, whether it wants them or not: they are left out, but nobody can be asked to.
#: https://docs.gitlab.com/ci/variables/predefined_variables/
_IN_EVERY_JOB: Final = re.compile(r"CI_\w+")
_KEY: Final = re.compile(
    r"(?:^|_)(?:TOKEN|API_?KEY|SECRET|SECRET_?KEY|ACCESS_?KEY|PRIVATE_?KEY|PASSWORD|PASSWD|CREDENTIALS|PAT)$", re.I
)
_GIT_HEADER: Final = re.compile(r"GIT_CONFIG_(?:VALUE_\d+|PARAMETERS)")


def token_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that hold what a repository may be written with, in order; an empty one holds nothing."""
    found = (name for name, value in environ.items() if value.strip() and _is_token(name, value))
    return tuple(sorted(name for name in found if not _IN_EVERY_JOB.fullmatch(name)))


def key_names(environ: Mapping[str, str], settings: ForgeConfig) -> tuple[str, ...]:
    """Variables that hold a model's key as the settings name it, or what is called a secret otherwise, in order."""
    found = (name for name, value in environ.items() if value.strip() and not _is_token(name, value))
    secret = (name for name in found if name in _named_keys(settings) or _KEY.search(name))
    return tuple(sorted(name for name in secret if not _IN_EVERY_JOB.fullmatch(name)))


def for_forging(environ: Mapping[str, str], settings: ForgeConfig) -> dict[str, str]:
    """For ``pytest --forge``: the keys and the proxy that lead to a model stay; tokens, and the files by which a step
    speaks to later ones, do not."""
    # A provider of the user's own may want any of them.
    keys = {*key_names(environ, settings), *_named_keys(settings)}
    proxies = {name for name in environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")}
    return scrubbed(environ, keep={name for name in keys | proxies if not name.startswith(("INPUT_", "ACTIONS_"))})


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the variable of our name that is no setting of pytest_cudaforge."""
    return {name: value for name, value in environ.items() if name != "CUDAFORGE_TOKEN"}


def _named_keys(settings: ForgeConfig) -> set[str]:
    named = {"OPENAI_API_KEY", settings.chat.coder.api_key_env, settings.chat.judge.api_key_env}
    # Nobody's configuration makes a model's key of a write token.
    return {name for name in named | set(settings.chat.command.env) if name.upper() not in _TOKENS}


def _is_token(name: str, value: str) -> bool:
    return name.upper() in _TOKENS or (_GIT_HEADER.fullmatch(name) is not None and "authorization" in value.lower())
