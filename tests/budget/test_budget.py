"""Caps hold before money is spent, also for calls under way at once."""

from __future__ import annotations

import pytest

from pytest_cudaforge.budget import Caps, Ledger
from pytest_cudaforge.errors import BudgetExhausted
from pytest_cudaforge.records import Usage


def test_a_call_is_settled_at_its_real_price() -> None:
    ledger = Ledger(Caps(max_usd=1.0))
    account = ledger.account()
    with account.reserve(0.9) as reservation:
        reservation.settle(Usage(10, 10, 0, 0.2))
    assert (account.usd, ledger.usd, ledger.reserved_usd) == (0.2, 0.2, 0.0)
    with account.reserve(0.8):
        pass
    assert ledger.usd == 0.2, "a call that failed gives its room back"


def test_calls_under_way_at_once_cannot_pass_the_cap_together() -> None:
    ledger = Ledger(Caps(max_usd=1.0))
    first, second = ledger.account(), ledger.account()
    with first.reserve(0.6), pytest.raises(BudgetExhausted, match=r"max_usd: 0\.6000 of 1 USD"), second.reserve(0.6):
        pass
    with second.reserve(0.6):
        pass


def test_the_targets_own_cap_counts_what_an_earlier_run_spent() -> None:
    account = Ledger(Caps(max_usd_per_target=0.5)).account(spent_before_usd=0.45)
    with pytest.raises(BudgetExhausted, match="max_usd_per_target"), account.reserve(0.1):
        pass


def test_an_unknown_price_is_counted_as_such() -> None:
    ledger = Ledger(Caps(max_usd=0.0))
    with ledger.account().reserve(None) as reservation:
        reservation.settle(Usage(10, 10))
    assert ledger.unpriced_calls == 1


@pytest.mark.parametrize("name", ["max_minutes", "max_minutes_per_target"])
def test_minutes_end_it(name: str) -> None:
    now = [0.0]
    account = Ledger(Caps(**{name: 2.0}), clock=lambda: now[0]).account()
    account.check_time()
    now[0] = 121.0
    with pytest.raises(BudgetExhausted, match=f"{name}: 2.0 of 2 minutes are over"):
        account.check_time()
