"""Which environment variables hold a token or a key, and what a process that runs code of others may be given.

A write token goes to nobody that this package starts; a model's key goes to ``pytest --forge`` alone. Names are
recognised by what CI services and providers call them, and by their ending.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pytest_cudaforge.config import ForgeConfig

__all__ = ["bare", "key_names", "settings_of", "sparing", "token_names"]

#: Those that act on a repository or on a CI service.
_TOKENS: Final = frozenset(
    [
        *("INPUT_TOKEN", "CUDAFORGE_TOKEN", "GITHUB_TOKEN", "GH_TOKEN", "GITHUB_PAT", "GH_PAT", "GH_ENTERPRISE_TOKEN"),
        *("GITHUB_ENTERPRISE_TOKEN", "ACTIONS_RUNTIME_TOKEN", "ACTIONS_ID_TOKEN_REQUEST_TOKEN"),
        *("GITLAB_TOKEN", "GL_TOKEN", "GITLAB_PRIVATE_TOKEN", "PRIVATE_TOKEN"),
    ]
)
#: Ways to a credential that lies elsewhere: not refused (a person's machine has them), and not passed on.
_WAYS: Final = frozenset(["SSH_AUTH_SOCK", "GIT_ASKPASS", "SSH_ASKPASS", "GIT_CONFIG_PARAMETERS"])
#: GitLab gives these to every job, whether it wants them or not.
#: https://docs.gitlab.com/ci/variables/predefined_variables/
_IN_EVERY_JOB: Final = re.compile(
    r"CI_(?:JOB_TOKEN|JOB_JWT\w*|BUILD_TOKEN|REGISTRY_PASSWORD|DEPLOY_PASSWORD|DEPENDENCY_PROXY_PASSWORD"
    r"|REPOSITORY_URL|RUNNER_SHORT_TOKEN)"
)
#: A header for git, as actions/checkout and publishing pass it.
_GIT_CONFIG: Final = re.compile(r"GIT_CONFIG_(?:COUNT|KEY_\d+|VALUE_\d+)")
_SECRETIVE: Final = re.compile(
    r"(?:^|_)(?:TOKEN|API_?KEY|SECRET|SECRET_?KEY|ACCESS_?KEY|PRIVATE_?KEY|PASSWORD|PASSWD|CREDENTIALS?|PAT)$",
    re.IGNORECASE,
)
#: Files through which a step speaks to the runner; what a repo's code wrote there would be obeyed.
_RUNNER_FILES: Final = ("GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_STATE", "GITHUB_STEP_SUMMARY")
_PASSED: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TMPDIR|TEMP|TMP|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|CC|CXX"
    r"|LC_\w+|XDG_\w+|PYTHON(?:PATH|HOME|UTF8|IOENCODING|HASHSEED|DONTWRITEBYTECODE|NOUSERSITE)"
    r"|CUDA_\w+|NVIDIA_\w+|NCCL_\w+|TORCH\w*|TRITON_\w+|OMP_\w+|MKL_\w+|KMP_\w+|OPENBLAS_\w+|HF_HOME|HF_HUB_OFFLINE|CUDAFORGE_\w+"
)


def token_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that hold something to write to a repository with, or may; in order. Empty ones hold nothing."""
    return tuple(sorted(name for name, value in environ.items() if value.strip() and _is_token(name, value)))


def key_names(environ: Mapping[str, str], settings: ForgeConfig) -> tuple[str, ...]:
    """Variables that hold a model's key as the settings name it, or anything else that is called a secret."""
    named = {settings.chat.coder.api_key_env, settings.chat.judge.api_key_env, *settings.chat.command.env}
    named |= {"OPENAI_API_KEY"}
    secret = (name for name, value in environ.items() if value.strip() and (name in named or _SECRETIVE.search(name)))
    return tuple(sorted(name for name in secret if not _is_withheld(name, environ[name])))


def sparing(environ: Mapping[str, str]) -> dict[str, str]:
    """For ``pytest --forge``: without tokens and the runner's own files; a model's key stays."""
    return {
        name: value
        for name, value in environ.items()
        if not (_is_withheld(name, value) or name in _RUNNER_FILES or name.startswith("INPUT_"))
    }


def bare(environ: Mapping[str, str]) -> dict[str, str]:
    """For who evaluates: what finds the toolchain, the device and the caches, and nothing that is called a secret."""
    return {
        name: value
        for name, value in environ.items()
        if _PASSED.fullmatch(name) and not (_is_withheld(name, value) or _SECRETIVE.search(name))
    }


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of our name that are no settings of pytest_cudaforge."""
    return {name: value for name, value in environ.items() if name != "CUDAFORGE_TOKEN"}


def _is_token(name: str, value: str) -> bool:
    return name.upper() in _TOKENS or (_GIT_CONFIG.fullmatch(name) is not None and "authorization" in value.lower())


def _is_withheld(name: str, value: str) -> bool:
    ways = name.upper() in _WAYS or _GIT_CONFIG.fullmatch(name) or _IN_EVERY_JOB.fullmatch(name)
    return bool(ways) or _is_token(name, value)
