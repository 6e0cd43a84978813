"""``python -m cudaforge_action MODE`` (also ``cudaforge-ci``): one mode, its exit status, and one clear error if any.

A mode's module is imported when it is asked for: plan, report and publish load no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from cudaforge_action.context import refuse_unsafe
from cudaforge_action.environment import key_names, token_names
from cudaforge_action.host import Host, host_of
from cudaforge_action.inputs import Inputs, read
from cudaforge_action.plain import PlainHost
from cudaforge_action.records import Annotation
from pytest_cudaforge.config import ForgeConfig
from pytest_cudaforge.errors import ForgeError

__all__ = ["main", "show"]

USAGE_EXIT = 2
SHORTEST_SECRET = 8


class _Mode(Protocol):
    def run(self, inputs: Inputs, host: Host) -> int: ...


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """The exit status: the mode's own, and 2 for a wrong input or situation (or a bug), which is shown as an error."""
    environ = os.environ if environ is None else environ
    # Until the host is known, errors go where a plain machine's go.
    host: Host = PlainHost()
    try:
        host = host_of(environ)
        inputs = read(environ, sys.argv[1:] if argv is None else argv)
        for secret in _secrets(environ):
            host.mask(secret)
        return _run(inputs, host_of(environ, inputs.output))
    except ForgeError as error:
        show(host, str(error))
    # The outermost frame: whatever is not foreseen must still end as one readable line and the status of an error.
    except Exception as error:  # noqa: BLE001
        with host.quoting():
            traceback.print_exc()
        show(host, f"{type(error).__name__}: {error}\n  to do: please report this with the log")
    return USAGE_EXIT


def _run(inputs: Inputs, host: Host) -> int:
    if reason := refuse_unsafe(host.context, inputs):
        host.notice(f"nothing was done: {reason}")
        return 0
    mode = cast(_Mode, importlib.import_module(f"cudaforge_action.{inputs.mode}"))
    return mode.run(inputs, host)


def _secrets(environ: Mapping[str, str]) -> list[str]:
    """Values that must not stand in a log. Such a short one as "none" would make of every log a row of stars."""
    names = (*token_names(environ), *key_names(environ, ForgeConfig()))
    return list(dict.fromkeys(environ[name].strip() for name in names if len(environ[name].strip()) >= SHORTEST_SECRET))


def show(host: Host, text: str) -> None:
    """One error in the log and on the run's page."""
    host.annotate([Annotation("error", "pytest-cudaforge", text)])


if __name__ == "__main__":
    sys.exit(main())
