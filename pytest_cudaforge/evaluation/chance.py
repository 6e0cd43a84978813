"""Where a verdict's chances come from: seeds, orders, places, sizes. Nobody can foresee them, unless a test says which.

Every draw in the supervisor and in the oracle is one of ``CHANCE``. The oracle's follow from a number that comes with
each request, so that a run that follows a seed has the same values time and again, in both processes.
"""

from __future__ import annotations

from random import Random, SystemRandom
from typing import Any

__all__ = ["CHANCE", "SEED_BITS", "Chance"]

#: Of a seed of drawn values.
SEED_BITS = 62


class Chance(Random):
    """Draws from the system's own source, or what follows from a seed (:meth:`follow`)."""

    def __init__(self) -> None:
        self._followed: int | str | None = None
        self._source: Random | None = SystemRandom()
        super().__init__()

    def follow(self, seed: int | str | None) -> None:
        """From now on all draws follow from ``seed``; None: from nothing that anybody knows."""
        # Made when it is first asked: most requests of the oracle draw nothing, and some are timed.
        self._followed, self._source = seed, None

    def fresh_seed(self) -> int:
        """A seed of drawn values, of :data:`SEED_BITS` bits."""
        return self.getrandbits(SEED_BITS)

    def random(self) -> float:
        return self._drawn_from().random()

    def getrandbits(self, k: int, /) -> int:
        return self._drawn_from().getrandbits(k)

    def seed(self, *_: Any, **__: Any) -> None:
        """Nothing: whoever wants to know what comes says so (:meth:`follow`)."""

    def _drawn_from(self) -> Random:
        if self._source is None:
            self._source = SystemRandom() if self._followed is None else Random(self._followed)
        return self._source


#: One for the whole process.
CHANCE = Chance()
