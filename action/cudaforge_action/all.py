"""``mode: all``: plan, forge, verify and publish in one job, for small repositories, GitLab, and a plain machine.

Each is a process of its own that is given no more than it needs: a model's key to forge, the token to publish.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from cudaforge_action.environment import key_names, token_names
from cudaforge_action.host import GOES_ON, Host
from cudaforge_action.inputs import Inputs, Runner, as_environ
from cudaforge_action.plan import planned_shards
from cudaforge_action.project import project_at
from cudaforge_action.publish import check_target
from cudaforge_action.scrubbing import scrubbed

__all__ = ["GIVEN_UP", "run"]

GIVEN_UP = (
    "one job does it all. What that gives up: forging and verifying are on the machine, under the user and in the job "
    "that hold the key and, before or after, the token; environments are scrubbed, but code that breaks out of its "
    "sandbox could look for them, and could change what is verified and published. Nothing runs in parallel. Use the "
    "workflow with jobs of their own (examples/workflows/nightly-forge.yml) where that matters"
)
_HERE = "this machine"
#: How the runner's own files are called; a mode speaks through them, whatever it starts does not.
_SPEAKS_THROUGH = ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")
#: Imports nothing that lies in the checkout.
_ENTRY = (
    "import sys; sys.path[:] = [at for at in sys.path if at]; "
    "from cudaforge_action.__main__ import main; sys.exit(main())"
)


def run(inputs: Inputs, host: Host) -> int:
    """The first exit status that is not 0, or 0. Later stages run all the same: what was forged is worth publishing.

    Without a token (but on a plain machine, where git's own credentials do) nothing is published: ``action.yml`` does
    that in a step of its own. Raises UsageError as the modes do, and where it could not be published: before anything
    is spent.
    """
    publishes = bool(inputs.token) or host.context.host == "plain"
    if publishes:
        check_target(inputs, host.context)
    host.warning(GIVEN_UP)
    for left in ("forged", "verified", "published", "plan"):
        shutil.rmtree(inputs.output / left, ignore_errors=True)
    here = (Runner(labels=(_HERE,), device=inputs.device),)
    statuses = [_stage("plan", replace(inputs, runners=here, max_shards=1), host)]
    if statuses[0] == 0:
        for shard in planned_shards(inputs.output / "plan"):
            statuses.append(_stage("forge", replace(inputs, shard=shard), host))
            statuses.append(_stage("verify", replace(inputs, shard=shard), host))
        if publishes:
            statuses.append(_stage("publish", inputs, host))
        else:
            host.notice("not published here: this process was given no token")
    return next((status for status in statuses if status), 0)


def _stage(mode: str, inputs: Inputs, host: Host) -> int:
    """One mode in a process of its own, which speaks for itself. Its exit status."""
    token = inputs.token if mode == "publish" else ""
    environ = environment(mode, os.environ, inputs) | as_environ(replace(inputs, mode=mode, token=token))
    if mode != "plan":
        environ[GOES_ON] = "1"
    print(f"== {mode}", flush=True)
    process = subprocess.Popen([sys.executable, "-c", _ENTRY], env=environ, stdin=subprocess.DEVNULL)
    with process, _passing_on(process):
        status = process.wait()
    if status:
        host.warning(f"mode {mode} ended with status {status}")
    return status


def environment(mode: str, environ: Mapping[str, str], inputs: Inputs) -> dict[str, str]:
    """What a stage is given beside its inputs: no token, and a model's key where it is to forge."""
    settings = project_at(inputs.working_directory, environ).settings
    keep = key_names(environ, settings) if mode == "forge" else ()
    left = scrubbed(environ, keep)
    secret = {*token_names(environ), *(() if mode == "forge" else key_names(environ, settings))}
    spoken = {name: environ[name] for name in _SPEAKS_THROUGH if name in environ}
    return {name: value for name, value in left.items() if name not in secret} | spoken


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """A job that is cancelled asks this process to end; the stage writes what it has when it is asked."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
