"""What a candidate's own code raised, as its author is to read it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_cudaforge.evaluation.extensions import NEVER
from pytest_cudaforge.evaluation.module_gradients import NoGradients
from pytest_cudaforge.evaluation.module_requests import LAUNCH_REFUSED, NEEDS_BUILD

__all__ = ["CandidateError", "CandidateFile", "short"]

_MAX_FRAMES = 8
_MAX_ERROR_CHARS = 4000


class CandidateError(Exception):
    """The candidate's own code raised; the text shows its own frames. ``status`` is what to answer."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


class CandidateFile:
    """The file that a candidate's code is in; ``path``: where it lies in the sandbox."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def guarded(self, status: int, doing: str, action: Callable[[], Any]) -> Any:
        """``action`` of the candidate's; what it raises becomes an answer with its own frames."""
        try:
            return action()
        except CandidateError:
            raise
        except NEVER:
            raise CandidateError(NEEDS_BUILD, "") from None
        except NoGradients as error:
            raise CandidateError(LAUNCH_REFUSED, str(error)) from None
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise CandidateError(status, f"{doing} failed\n{self.own_frames(error)}") from error

    def own_frames(self, error: BaseException) -> str:
        lines = []
        if isinstance(error, SyntaxError) and error.filename == str(self.path):
            text = (error.text or "").strip()
            return f"{self.path.name}:{error.lineno}: {text}\nSyntaxError: {error.msg}"
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(self.path):
                lines.append(f"{self.path.name}:{frame.lineno} in {frame.name}: {(frame.line or '').strip()}")
        return "\n".join([*lines[-_MAX_FRAMES:], _message(error), *_advice(error)])


def _message(error: BaseException) -> str:
    """The candidate's exception in words, whatever its ``__str__`` does: no line of it passes for a verdict's own, nor
    for a command to the runner of a CI job."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return text[:_MAX_ERROR_CHARS].replace("\n", "\n| ")


def _advice(error: BaseException) -> tuple[str, ...]:
    """What to do where the sandbox let no compiler start: torch.compile on a CPU calls one in the first forward."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PermissionError) and "Inductor" in type(error).__name__:
            return (
                "  expected: no code that a C++ compiler builds in forward (torch.compile's on a CPU): none can start",
                "  to do: write the C++ with load_inline, which is built outside, or a launch plan",
            )
        cause = cause.__cause__ or cause.__context__
    return ()


def short(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)[:200]
