"""Integers from a wide range: alike in their low bits, or next to each other."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaforge.evaluation.identifiers import identifiers_of  # noqa: E402


def _draws(high: int, low: int = 0, dtype: Any = torch.int64) -> list[dict[str, Any]]:
    def draw() -> dict[str, Any]:
        ids = torch.randint(low, high, (300,), dtype=dtype)
        return {"ids": ids, "asked": torch.cat((ids[:50], ids[:50])), "x": torch.randn(3), "few": torch.arange(9)}

    return [draw() for _ in range(8)]


@pytest.mark.parametrize(("low", "high", "dtype"), [(0, 1 << 40, torch.int64), (-(1 << 30), 1 << 30, torch.int32)])
def test_what_is_equal_or_ordered_stays_so(low: int, high: int, dtype: Any) -> None:
    draws = _draws(high, low, dtype)
    found = identifiers_of(draws)
    assert found is not None and set(found.of) == {"ids", "asked"}
    for family in ("aligned", "close"):
        leaves = dict(draws[0])
        found.put(family, leaves)
        ids, asked = leaves["ids"], leaves["asked"]
        assert ids.dtype == dtype and low <= int(ids.min()) and int(ids.max()) < high
        assert torch.equal(ids[:50], asked[:50]) and torch.equal(asked[:50], asked[50:])
        order = draws[0]["ids"].argsort()
        assert bool((ids[order].diff() >= 0).all()) and len(ids.unique()) > 200
        assert torch.equal(leaves["few"], draws[0]["few"]) and leaves["x"] is draws[0]["x"]
        if family == "aligned":
            assert not bool((ids % found.step).any())
        else:
            assert int(ids.max()) - int(ids.min()) < 300 * 64


def test_classes_places_and_lengths_are_left_alone() -> None:
    assert identifiers_of(_draws(50_000)) is None and identifiers_of([{}]) is None
    empty = {"ids": torch.zeros(0, dtype=torch.int64)}
    assert identifiers_of([empty]) is None
