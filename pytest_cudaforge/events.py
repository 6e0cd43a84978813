"""What the flow tells whoever watches it: a live table, plain lines, a test. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["EventKind", "ForgeEvent", "Observer", "Silent"]

#: note: something to read · waiting: another run holds the target · headroom: before the first call ·
#: round: one begins · profiling · asked, replied: a model · evaluating, evaluated · finished: a round · selecting ·
#: done: a target · stopping: the whole session, after Ctrl-C or with -x
EventKind = Literal[
    "note",
    "waiting",
    "headroom",
    "round",
    "profiling",
    "asked",
    "replied",
    "evaluating",
    "evaluated",
    "finished",
    "selecting",
    "done",
    "stopping",
]


@dataclass(frozen=True)
class ForgeEvent:
    """``target`` "" and ``language`` "": about the session. ``round`` 0: before the first.

    ``status`` is an evaluation's status or, with kind ``done``, the outcome. ``speedup`` is this round's and ``best``
    the best so far, both against the faster baseline. ``usd`` is what the target has cost so far (replies of unknown
    price not counted).
    """

    target: str
    kind: EventKind
    language: str = ""
    round: int = 0
    status: str = ""
    speedup: float | None = None
    best: float | None = None
    usd: float = 0.0
    text: str = ""


class Observer(Protocol):
    """Called in the thread of the event loop; it must return quickly and not raise."""

    def on_event(self, event: ForgeEvent) -> None: ...


class Silent:
    """Watches nothing."""

    def on_event(self, event: ForgeEvent) -> None:
        del event
