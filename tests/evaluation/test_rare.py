"""Integers that draws show now and then: the ends of their range, and repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaforge.evaluation.rare import (  # noqa: E402
    OverwritingMode,
    Rare,
    named_integers,
    rare_draws_of,
    rarities_of,
    sizes_near,
)

Make = Callable[[torch.Generator], Mapping[str, object]]


def _draws(make: Make, count: int = 600) -> Iterator[Mapping[str, object]]:
    for seed in range(count):
        yield make(torch.Generator().manual_seed(seed))


def _integers(low: int, high: int, *shape: int) -> Make:
    return lambda generator: {"0": torch.randn(4), "1": torch.randint(low, high, shape, generator=generator)}


def _put(rare: Rare, kind: str, leaf: torch.Tensor, seed: int = 1) -> torch.Tensor:
    leaves: dict[str, object] = {"1": leaf}
    rare.put(kind, leaves, torch.Generator().manual_seed(seed))
    found = leaves["1"]
    assert isinstance(found, torch.Tensor) and found.dtype == leaf.dtype and found.shape == leaf.shape
    return found


def test_lengths_come_to_both_ends_of_what_was_drawn_and_nothing_else_changes() -> None:
    rare = rarities_of(_draws(_integers(1, 301, 6)))
    assert rare is not None and rare.kinds == ("ends", "repeats", "neighbours")
    assert (rare.least[0], rare.most[0]) == (1, 300)
    drawn = torch.full((6,), 50)
    found = _put(rare, "ends", drawn)
    assert sorted(found.tolist()) == [1, 50, 50, 50, 50, 300]
    assert torch.equal(_put(rare, "ends", torch.tensor([1, 2, 3, 300, 5, 6])), torch.tensor([1, 2, 3, 300, 5, 6]))


def test_a_number_stands_where_it_was_drawn() -> None:
    """The second column goes further than the first one may."""

    def make(generator: torch.Generator) -> Mapping[str, object]:
        low, high = (torch.randint(0, most, (4, 1), generator=generator) for most in (100, 1000))
        return {"1": torch.cat([low, high], 1)}

    rare = rarities_of(_draws(make))
    assert rare is not None
    for kind in rare.kinds:
        found = _put(rare, kind, torch.full((4, 2), 99))
        assert int(found[:, 0].max()) < 100 and int(found[:, 1].max()) < 1000


def test_places_repeat_as_they_did_in_one_draw_or_another() -> None:
    rare = rarities_of(_draws(_integers(0, 6000, 16)))
    assert rare is not None and "repeats" in rare.kinds
    drawn = torch.arange(16) * 7
    found = _put(rare, "repeats", drawn)
    assert len(found.unique()) < 16 and len({tuple(_put(rare, "repeats", drawn, s).tolist()) for s in range(8)}) > 1


def test_neighbours_are_alike_where_they_were_in_one_draw_or_another() -> None:
    """In long rows any number comes twice; side by side it does so now and then."""
    rare = rarities_of(_draws(_integers(0, 1000, 2, 80)))
    assert rare is not None and rare.kinds == ("ends", "neighbours")
    drawn = torch.arange(160).reshape(2, 80) * 3 + 1
    found = _put(rare, "neighbours", drawn)
    assert 8 < int((found.diff(dim=-1) == 0).sum()) < 64


def test_what_is_usual_is_not_rare() -> None:
    assert rarities_of(_draws(_integers(0, 10, 200))) is None
    assert rarities_of(_draws(_integers(0, 2, 200))) is None
    permuted = rarities_of(_draws(lambda generator: {"1": torch.randperm(64, generator=generator)}))
    assert permuted is None


def test_what_the_target_names_stands_where_less_stood_and_more() -> None:
    def make(generator: torch.Generator) -> Mapping[str, object]:
        low, high = (torch.randint(0, most, (4, 1), generator=generator) for most in (100, 1000))
        return {"1": torch.cat([low, high], 1)}

    rare = rarities_of(_draws(make), {500, 700, 1000, -1})
    assert rare is not None and "named" in rare.kinds and [number for number, _ in rare.named] == [500, 700]
    found = _put(rare, "named", torch.full((4, 2), 99))
    assert int(found[:, 0].max()) < 100 and {500, 700} & set(found[:, 1].tolist())


def test_nothing_is_put_where_nothing_was_ever_near() -> None:
    """Labels, and what a loss ignores: -1 (a dimension, in its code) is none of them, and ends a GPU's context."""

    def make(generator: torch.Generator) -> Mapping[str, object]:
        labels = torch.randint(0, 8192, (64,), generator=generator)
        ignored = torch.rand(64, generator=generator) < 0.1
        return {"1": labels.masked_fill(ignored, -100)}

    rare = rarities_of(_draws(make), {-1, 4096, -100})
    assert rare is not None and [number for number, _ in rare.named] == [4096]


def test_a_target_names_what_its_code_and_its_modules_hold() -> None:
    function = make_namespace("def function(x):\n    return x.where(x != 1234, LIMIT)\n")["function"]
    assert {1234, 77} <= named_integers(None, function)
    module = torch.nn.Sequential(torch.nn.Embedding(50, 4, padding_idx=31))
    assert 31 in named_integers(module, None)


def make_namespace(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"LIMIT": 77}
    exec(text, names)
    return names


@pytest.mark.parametrize(
    "make",
    [
        lambda generator: {"0": torch.randn(4)},
        lambda generator: {"0": torch.randint(0, 900, (6,), generator=generator), "1": torch.ones(6).long()},
        lambda generator: {"0": torch.randint(0, 900, (6,), generator=generator), "1": torch.ones(6).bool()},
        lambda generator: {"0": torch.ones(6).bool()},
        lambda generator: {"0": torch.tensor([1, 500, 7])},
        lambda generator: {"0": torch.tensor([(n := int(torch.randint(900, (1,), generator=generator))), 900 - n])},
    ],
    ids=["no integers", "two of them", "beside a mask", "a mask", "always the same", "of one sum"],
)
def test_nothing_changes_from_which_more_may_follow(make: Make) -> None:
    assert rarities_of(_draws(make)) is None


def test_sorted_rows_stay_sorted() -> None:
    def make(generator: torch.Generator) -> Mapping[str, object]:
        return {"1": torch.randint(0, 5000, (16,), generator=generator).sort().values}

    rare = rarities_of(_draws(make))
    assert rare is not None and rare.kinds == ("ends",)
    found = _put(rare, "ends", torch.arange(16) * 11 + 700)
    assert bool((found.diff() >= 0).all()) and found[0] == rare.least[0] and found[-1] == rare.most[0]


def test_a_variant_of_another_shape_stays_as_it_is() -> None:
    rare = rarities_of(_draws(_integers(1, 301, 6)))
    assert rare is not None
    assert torch.equal(_put(rare, "ends", torch.full((7,), 50)), torch.full((7,), 50))


def test_who_writes_two_values_to_one_place_is_known() -> None:
    def overwrites(run: Callable[[torch.Tensor, torch.Tensor], object]) -> bool:
        watch = OverwritingMode()
        with watch:
            run(torch.zeros(8), torch.tensor([1, 1, 2]))
        return watch.found

    values = torch.ones(3)
    assert overwrites(lambda x, at: x.scatter(0, at, values))
    assert overwrites(lambda x, at: x.index_copy_(0, at, values))
    assert overwrites(lambda x, at: x.index_put_((at,), values))
    assert not overwrites(lambda x, at: x.index_put_((at,), values, accumulate=True))
    assert not overwrites(lambda x, at: x.scatter(0, at, 1.0))
    assert not overwrites(lambda x, at: x.scatter_add(0, at, values))
    assert not overwrites(lambda x, at: x.index_add_(0, at, values))


def test_of_several_tensors_of_integers_a_rare_draw_is_taken_as_it_is() -> None:
    def make(generator: torch.Generator) -> Mapping[str, object]:
        lengths = torch.randint(1, 400, (5,), generator=generator)
        ids = torch.randint(0, 3000, (5, 8), generator=generator)
        return {"0": ids, "1": lengths, "2": torch.arange(9) < 4}

    drawn = dict(enumerate(_draws(make)))
    found = rare_draws_of(drawn.items())
    assert 4 <= len(found) <= 6
    for rare in found.values():
        which, path = rare.what.split(" ")[0], rare.what.split(" ")[-1]
        tensors = [leaf for leaf in (drawn[seed][path] for seed in rare.seeds) if isinstance(leaf, torch.Tensor)]
        every = torch.stack([leaf for leaf in (one[path] for one in drawn.values()) if isinstance(leaf, torch.Tensor)])
        if "side by side" in rare.what:
            assert rare.repeats and all(bool((leaf.diff(dim=-1) == 0).any()) for leaf in tensors)
        elif rare.repeats:
            assert all(
                any(len(row.unique()) < len(row) for row in leaf.reshape(-1, leaf.shape[-1])) for leaf in tensors
            )
        else:
            end = every.min() if which == "least" else every.max()
            assert all(bool((leaf == end).any()) for leaf in tensors)
    assert rare_draws_of((n, {"0": leaves["0"]}) for n, leaves in drawn.items()) == {}


def test_sizes_their_halves_and_their_neighbours_are_known() -> None:
    assert sizes_near({"0": torch.zeros(2, 301), "1": torch.zeros(2), "2": 3}) == {149, 150, 151, 300, 301, 302}
