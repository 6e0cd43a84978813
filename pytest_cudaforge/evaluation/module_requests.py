"""What a supervisor asks of a module's worker, and how the worker answers: the words that both know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "ALONE",
    "ANSWERING",
    "ATTACH",
    "BROKEN",
    "BUILD_REFUSED",
    "CALL_ANOTHER",
    "COMPILED",
    "DETACH",
    "DEVICE_REFUSED",
    "LAUNCH_REFUSED",
    "NEEDS_BUILD",
    "OK",
    "PROFILE",
    "RELOAD",
    "RUN",
    "RUN_CHANGED",
    "RUN_FRESH",
    "RUN_KEPT",
    "RUN_MANY",
    "START",
    "TORCH_THREADS",
    "TURN",
    "ModuleRecipe",
    "NewInstance",
]

NewInstance = Literal["beside", "otherwise", "copy", "copy as old", "weights alone", "next", "alone"]
#: Those for which the instances before go first.
ALONE: frozenset[NewInstance] = frozenset({"weights alone", "next", "alone"})

#: Operations; those that a plan's worker knows, too, have its numbers.
START, ATTACH, DETACH, RELOAD, RUN, RUN_MANY, PROFILE, COMPILED = 1, 2, 3, 4, 5, 6, 8, 9
RUN_CHANGED, RUN_KEPT, TURN, RUN_FRESH, TORCH_THREADS, ANSWERING, CALL_ANOTHER = 10, 15, 16, 17, 20, 21, 22
#: How they end.
OK, LAUNCH_REFUSED, BROKEN, DEVICE_REFUSED, NEEDS_BUILD, BUILD_REFUSED = range(6)


@dataclass(frozen=True)
class ModuleRecipe:
    """How a worker makes the candidate. ``init`` is (args, kwargs) as plain data of :mod:`.initial`.

    ``mode`` "": as constructed. ``seed``: what the reference's constructor was seeded with. ``sabotage``: "" or what
    the functions of extensions do instead of their work (see :mod:`.extensions`). ``written``: paths of the state that
    the reference's forward writes, plain attributes among them.
    """

    file_name: str
    source: str
    init: Any
    mode: str
    precision: str
    seed: int
    threads: int
    sabotage: str = ""
    written: tuple[str, ...] = ()
