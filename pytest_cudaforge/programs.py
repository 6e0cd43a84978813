"""Foreign programs (compilers' tools, profilers) in a session of their own, with a time limit that ends all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["end_in_time"]


def end_in_time(
    argv: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float, *, output: str = "output.txt"
) -> int | None:
    """Run a program in ``folder``, its words into ``output`` there; its exit status, None where it had to be killed.

    Whatever it started and left behind in its session ends with it. Raises OSError where it cannot be started.
    """
    with open(folder / output, "wb") as words:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
