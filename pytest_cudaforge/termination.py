"""SIGTERM as an orderly end: by itself it ends a process at once, with whatever that has put on the disk."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["EXIT_STATUS", "Terminated", "orderly_end", "undisturbed"]

#: What a shell says of a process that SIGTERM ended.
EXIT_STATUS = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM came. Whoever cleans up after Ctrl-C cleans up after this, too."""


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM raises :class:`Terminated` in the main thread, once; others that follow are ignored meanwhile.

    Where somebody else handles or ignores it already, and in other threads, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        signal.signal(number, signal.SIG_IGN)
        raise Terminated

    signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Neither Ctrl-C nor SIGTERM interrupts who cleans up here, nor the programs that do it, which inherit this."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
