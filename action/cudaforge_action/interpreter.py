"""The Python that runs the repository's modules: the input ``python``, or the one that this package runs in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from cudaforge_action.inputs import Inputs
from cudaforge_action.scrubbing import scrubbed
from pytest_cudaforge.errors import UsageError

__all__ = ["interpreter"]

_EXPECTED = "a Python that has this package and torch"
_NO_TORCH = 3
_PROBE = f"import importlib.util, sys; sys.exit({_NO_TORCH} if importlib.util.find_spec('torch') is None else 0)"


def interpreter(inputs: Inputs) -> str:
    """Its path. Raises UsageError where it cannot be run or has no torch: later on that looks like a crash of the
    kernels' own."""
    found = shutil.which(inputs.python or sys.executable)
    if found is None:
        raise UsageError(
            f"input python: {inputs.python!r} cannot be run", expected=_EXPECTED, remedy="mend the input python"
        )
    # Seen from here; what is run with it starts elsewhere. Not a link's end: a virtual environment's Python is a link.
    path = os.path.abspath(found)
    argv, environ = [path, "-c", _PROBE], scrubbed(os.environ)
    done = subprocess.run(argv, cwd="/", env=environ, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == _NO_TORCH:
        raise UsageError(
            f"{path} has no torch, and mode {inputs.mode} runs the repository's modules",
            expected=_EXPECTED,
            remedy="install torch and pytest-cudaforge there, or name another one with the input python",
        )
    return path
