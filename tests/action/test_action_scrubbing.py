"""What a process that runs code of others finds in its environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cudaforge_action.scrubbing import scrubbed

KEPT = {
    "PATH": "/bin",
    "HOME": "/root",
    "CUDA_VISIBLE_DEVICES": "0",
    "GITHUB_BASE_REF": "main",
    "GITHUB_ACTIONS": "true",
    "CI_PROJECT_DIR": "/builds",
    "HTTPS_PROXY": "http://proxy:3128",
    "KEYBOARD": "de",
    "PYTEST_ADDOPTS": "-q",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "GITHUB_TOKEN",
            "GH_TOKEN",
            "CUDAFORGE_TOKEN",
            "INPUT_TOKEN",
            "INPUT_TITLE",
            "CI_JOB_TOKEN",
            "OPENAI_API_KEY",
        ),
        *("ACTIONS_ID_TOKEN_REQUEST_URL", "ACTIONS_RUNTIME_URL", "ACTIONS_RESULTS_URL", "ACTIONS_CACHE_URL"),
        *("GITHUB_ENV", "GITHUB_PATH", "GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "AWS_SECRET_ACCESS_KEY", "my_password"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "GIT_ASKPASS", "CI_REPOSITORY_URL", "npm_config__auth"),
    ],
)
def test_secrets_and_the_runners_files_are_gone(name: str) -> None:
    assert scrubbed({**KEPT, name: "secret"}) == KEPT


def test_a_password_in_an_address_is_a_secret_and_a_key_may_be_kept() -> None:
    assert scrubbed({"PIP_INDEX_URL": "https://me:secret@index.example/simple"}) == {}
    assert scrubbed({"MY_LLM_KEY": "k", "GH_TOKEN": "t"}, keep={"MY_LLM_KEY"}) == {"MY_LLM_KEY": "k"}


def test_git_keeps_its_settings_and_loses_its_token(tmp_path: Path) -> None:
    given = {
        "GIT_CONFIG_COUNT": "3",
        "GIT_CONFIG_KEY_0": "http.https://github.com/.extraheader",
        "GIT_CONFIG_VALUE_0": "AUTHORIZATION: basic c2VjcmV0",
        "GIT_CONFIG_KEY_1": "safe.directory",
        "GIT_CONFIG_VALUE_1": "/somewhere",
        "GIT_CONFIG_KEY_2": "credential.helper",
        "GIT_CONFIG_VALUE_2": "store",
    }
    own = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}
    argv = ["git", "config", "--list"]
    told = subprocess.run(argv, env=scrubbed(own | given), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == ["safe.directory=/somewhere"]
