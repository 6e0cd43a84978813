"""A compiler configuration in production: the target's own forward, compiled by torch with the options that won."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pytest_cudaforge.runtime.configuration import FILE_NAME, GRAPHS, compiled, parse
from pytest_cudaforge.runtime.manifest import Entry

__all__ = ["Configured"]


class Configured:
    """One entry of the manifest; ``reference`` is the class's own forward, or the function.

    Nothing is compiled before the first call, which takes seconds then. Raises BuildFailure for options that are none.
    """

    def __init__(
        self, entry: Entry, directory: Path, sources: Mapping[str, str], reference: Callable[..., Any]
    ) -> None:
        self.entry, self.directory = entry, directory
        self.configuration = parse(sources[FILE_NAME])
        self._graphs = bool(dict(self.configuration.options).get(GRAPHS))
        self._reference = reference
        self._run: Callable[..., Any] | None = None
        self._thread = 0

    def begin_anew(self) -> None:
        """As after a fork."""
        self._run, self._thread = None, 0

    def obstacle(self) -> str:
        """Why this call cannot go there now; "" where it can."""
        if not self._graphs:
            return ""
        if torch.cuda.is_current_stream_capturing():
            return "its CUDA graph cannot be part of another one's capture"
        if self._thread not in (0, threading.get_ident()):
            return "its CUDA graph belongs to the thread that called it first"
        return ""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The compiled forward. Raises BuildFailure, and what torch.compile and forward itself raise."""
        if self._run is None:
            self._run, self._thread = compiled(self._reference, self.configuration), threading.get_ident()
        return self._run(*args, **kwargs)
