"""Integers as large as drawn everywhere at once, and where none may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from pytest_cudaforge.evaluation.extremes import Extremes, extremes_of

Make = Callable[[torch.Generator], Mapping[str, object]]


def _draws(make: Make, count: int = 64) -> Iterator[Mapping[str, object]]:
    for seed in range(count):
        yield make(torch.Generator().manual_seed(seed))


def _of(most: int, *shape: int) -> Make:
    return lambda generator: {
        "0": torch.randint(0, most, shape, generator=generator),
        "1": torch.randint(-9, 10, shape, generator=generator, dtype=torch.int32),
        "2": torch.randn(shape),
    }


def test_all_integers_are_as_large_as_they_come() -> None:
    make = _of(1000, 2, 80)
    found = extremes_of(_draws(make))
    assert found is not None and set(found.of) == {"0", "1"}
    leaves = dict(make(torch.Generator().manual_seed(99)))
    floats = leaves["2"]
    found.put("highest", leaves, torch.Generator())
    codes, signed = leaves["0"], leaves["1"]
    assert isinstance(codes, torch.Tensor) and isinstance(signed, torch.Tensor)
    assert int(codes.min()) > 850 and int(signed.min()) > 6 and signed.dtype == torch.int32 and leaves["2"] is floats
    found.put("lowest", leaves, torch.Generator())
    assert int(leaves["0"].max()) < 150 and int(leaves["1"].max()) < -6  # type: ignore[attr-defined]


def test_one_number_is_at_most_places_where_it_may_stand() -> None:
    make = _of(1000, 2, 400)
    found = extremes_of(_draws(make))
    assert found is not None
    leaves = dict(make(torch.Generator().manual_seed(99)))
    found.put("frequent", leaves, torch.Generator().manual_seed(1))
    now = leaves["0"]
    assert isinstance(now, torch.Tensor)
    _, counts = now.unique(return_counts=True)  # type: ignore[no-untyped-call]
    assert 650 < int(counts.max()) < 780 and len(counts) > 30


def test_no_number_stands_where_it_never_did() -> None:
    most, least = torch.tensor([[9, 5, 9]] * 200), torch.tensor([[0, 3, 0]] * 200)
    extremes, leaves = Extremes({"0": (most, least)}), {"0": torch.tensor([[8, 4, 8]] * 200)}
    extremes.put("frequent", leaves, torch.Generator().manual_seed(3))
    assert bool(((leaves["0"] <= most) & (leaves["0"] >= least)).all())


@pytest.mark.parametrize("shape", [(), (0,), (1,)])
def test_a_number_alone_or_none_may_be_a_size_or_a_choice(shape: tuple[int, ...]) -> None:
    """How many tokens counted, in the backward of a loss."""
    assert extremes_of(_draws(_of(1000, *shape))) is None
    beside = _of(1000, *shape)
    assert extremes_of(_draws(lambda generator: {**_of(50, 2, 80)(generator), "3": beside(generator)["0"]})) is None


def test_of_many_numbers_each_row_and_column_keeps_its_range() -> None:
    def make(generator: torch.Generator) -> Mapping[str, object]:
        ranges = torch.tensor([10, 100_000]).repeat(500)
        drawn = (torch.rand((1000, 1000), generator=generator) * ranges).long()
        drawn[7] = drawn[7].clamp(max=4)  # a row of few
        return {"0": drawn}

    draws = 0

    def counted() -> Iterator[Mapping[str, object]]:
        nonlocal draws
        for leaves in _draws(make):
            draws += 1
            yield leaves

    found = extremes_of(counted())
    assert found is not None and draws < 5
    most = found.of["0"][0]
    assert int(most[:, ::2].max()) == 9 and int(most[7].max()) == 4
    others = [row for row in range(1000) if row != 7]
    assert int(most[others, 1::2].min()) > 95_000


@pytest.mark.parametrize(
    "make",
    [
        lambda g: {"0": torch.randn(64)},
        lambda g: {"0": torch.randint(0, 9, (64,), generator=g), "1": torch.rand(64, generator=g) < 0.5},
        lambda g: {"0": torch.randint(0, 9, (64,), generator=g), "1": torch.randint(0, 9, (3,), generator=g)},
        lambda g: {"0": torch.randint(0, 900, (64,), generator=g).sort().values},
        lambda g: {"0": torch.randperm(64, generator=g)},
        lambda g: {"0": (drawn := torch.randint(0, 90, (64,), generator=g)), "1": drawn.sort().values},
        lambda g: {"0": (drawn := torch.randint(0, 90, (64,), generator=g)), "1": 90 - drawn},
        lambda g: {"0": (drawn := torch.randint(0, 90, (64,), generator=g)), "1": drawn % 7},
        lambda g: {"0": torch.randint(0, 9, (64,), generator=g), "1": torch.arange(64)},
        lambda g: {"0": torch.bincount(torch.randint(0, 40, (320,), generator=g), minlength=40)},
    ],
    ids=[
        "no integers",
        "a mask",
        "sizes",
        "sorted",
        "places",
        "an order",
        "of one sum",
        "a code",
        "constant",
        "counts",
    ],
)
def test_where_more_may_follow_from_them_none_change(make: Make) -> None:
    assert extremes_of(_draws(make)) is None


def test_variants_of_other_shapes_stay_as_they_are() -> None:
    found = extremes_of(_draws(_of(1000, 2, 80)))
    assert found is not None
    leaves = {"0": torch.full((2, 81), 5), "1": torch.full((2, 80), 5)}
    found.put("highest", leaves, torch.Generator())
    assert int(leaves["1"].max()) == 5


def test_two_inputs_are_as_far_from_each_other_as_they_come() -> None:
    make = _of(1000, 40, 8)
    found = extremes_of(_draws(make))
    assert found is not None and found.families[-1] == "opposed"
    leaves = dict(make(torch.Generator().manual_seed(99)))
    found.put("opposed", leaves, torch.Generator().manual_seed(1))
    (most, least), (other_most, other_least) = found.of["0"], found.of["1"]
    codes, signed = leaves["0"], leaves["1"]
    assert isinstance(codes, torch.Tensor) and isinstance(signed, torch.Tensor)
    upper, lower = ((codes == all_).all(-1) for all_ in (most, least))
    assert bool((upper ^ lower).all()) and 10 < int(upper.sum()) < 30
    assert torch.equal((signed == other_least).all(-1), upper) and torch.equal((signed == other_most).all(-1), lower)
    alone = extremes_of(_draws(lambda generator: {"0": make(generator)["0"]}))
    assert alone is not None and "opposed" not in alone.families
