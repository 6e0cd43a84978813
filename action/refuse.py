"""The first step of ``action.yml``: before anything is installed or run, may this run be at all?

Needs a bare Python: what decides is :func:`cudaforge_action.context.refuse_unsafe`, read from the action's own folder.
Hands on ``run``: "true", or "false" where the run is to be skipped without an error.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

OLDEST = (3, 10)
SOURCE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Asked:
    """The inputs that decide; the others are read later, where PyYAML is."""

    mode: str
    allow_pull_request_target: bool
    fork_heads: str


def main() -> int:
    if sys.version_info < OLDEST:
        version = ".".join(str(part) for part in sys.version_info[:3])
        return failed(
            f"{sys.executable} is Python {version}%0A  expected: Python 3.10 or newer%0A"
            "  to do: set the input python, or run actions/setup-python before this action"
        )
    sys.path[:0] = [str(SOURCE), str(SOURCE / "action")]
    from cudaforge_action.context import github_context, refuse_unsafe
    from cudaforge_action.workflow import Commands, set_variable

    from pytest_cudaforge.errors import ForgeError

    commands = Commands()
    try:
        reason = refuse_unsafe(github_context(os.environ), asked())  # type: ignore[arg-type]
        set_variable(os.environ, "GITHUB_OUTPUT", "run", "false" if reason else "true")
    except ForgeError as error:
        commands.issue("error", str(error), title="pytest-cudaforge")
        return 2
    if reason:
        commands.issue("notice", f"nothing was done: {reason}")
    return 0


def asked() -> Asked:
    """Anything but the words that allow something is a no."""
    return Asked(
        mode=os.environ.get("INPUT_MODE", "").strip(),
        allow_pull_request_target=os.environ.get("INPUT_ALLOW_PULL_REQUEST_TARGET", "").strip().lower() == "true",
        fork_heads=os.environ.get("INPUT_FORK_HEADS", "").strip(),
    )


def failed(text: str) -> int:
    print(f"::error::pytest-cudaforge: {text}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
