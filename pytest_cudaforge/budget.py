"""Caps on money and minutes, per target and in all: reserved before a call, settled after it.

Reserving is what keeps calls of different targets that are under way at once from passing a cap together. One event
loop uses a ledger; it is not meant for threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pytest_cudaforge.errors import BudgetExhausted
from pytest_cudaforge.records import Usage

__all__ = ["Account", "Caps", "Ledger", "Reservation"]


@dataclass(frozen=True)
class Caps:
    """None: no cap."""

    max_usd_per_target: float | None = None
    max_usd: float | None = None
    max_minutes_per_target: float | None = None
    max_minutes: float | None = None


class Ledger:
    """What one session spends. ``usd`` are settled costs of this session, ``reserved_usd`` those under way."""

    def __init__(self, caps: Caps, clock: Callable[[], float] = time.monotonic) -> None:
        self.caps = caps
        self.clock = clock
        self.started_s = clock()
        self.usd = 0.0
        self.reserved_usd = 0.0
        self.unpriced_calls = 0

    def account(self, spent_before_usd: float = 0.0) -> Account:
        """A target's own account. What an earlier, interrupted run spent on it counts against the target's cap."""
        return Account(self, spent_before_usd)


@dataclass
class Reservation:
    """Room kept for one call. ``settle`` with what it really cost; without it the room is given back."""

    usd: float
    settled: Usage | None = field(default=None)

    def settle(self, usage: Usage) -> None:
        self.settled = usage


class Account:
    """One target's spending, inside the session's ledger."""

    def __init__(self, ledger: Ledger, spent_before_usd: float) -> None:
        self._ledger = ledger
        self._started_s = ledger.clock()
        self.usd = spent_before_usd
        self.reserved_usd = 0.0

    @contextlib.contextmanager
    def reserve(self, usd: float | None) -> Iterator[Reservation]:
        """Keep room for a call of at most ``usd`` (None: its price is unknown, only its tokens are counted).

        Raises :class:`BudgetExhausted` where a cap would be passed, before anything is spent.
        """
        self.check_time()
        wanted = usd or 0.0
        self._check_money(wanted)
        reservation = Reservation(wanted)
        self.reserved_usd += wanted
        self._ledger.reserved_usd += wanted
        try:
            yield reservation
        finally:
            self.reserved_usd -= wanted
            self._ledger.reserved_usd -= wanted
            self._settle(reservation.settled)

    def check_time(self) -> None:
        """Raises :class:`BudgetExhausted` where the minutes of the target or of the session are over."""
        caps, now_s = self._ledger.caps, self._ledger.clock()
        _check_minutes("max_minutes_per_target", caps.max_minutes_per_target, now_s - self._started_s)
        _check_minutes("max_minutes", caps.max_minutes, now_s - self._ledger.started_s)

    def _check_money(self, wanted: float) -> None:
        caps = self._ledger.caps
        _check_usd("max_usd_per_target", caps.max_usd_per_target, self.usd + self.reserved_usd, wanted)
        _check_usd("max_usd", caps.max_usd, self._ledger.usd + self._ledger.reserved_usd, wanted)

    def _settle(self, usage: Usage | None) -> None:
        if usage is None:
            return
        if usage.usd is None:
            self._ledger.unpriced_calls += 1
            return
        self.usd += usage.usd
        self._ledger.usd += usage.usd


def _check_minutes(name: str, cap: float | None, elapsed_s: float) -> None:
    if cap is not None and elapsed_s >= cap * 60:
        raise BudgetExhausted(
            f"{name}: {elapsed_s / 60:.1f} of {cap:g} minutes are over",
            remedy=f"raise {name}, or run again: finished rounds are kept",
        )


def _check_usd(name: str, cap: float | None, committed: float, wanted: float) -> None:
    # A free call (replayed, local, of unknown price) passes as long as the cap is not yet overdrawn.
    if cap is None or committed + wanted <= cap:
        return
    raise BudgetExhausted(
        f"{name}: {committed:.4f} of {cap:g} USD are spent or reserved, the next call may cost {wanted:.4f}",
        remedy=f"raise {name}, or run again with a higher one: finished rounds are kept",
    )
