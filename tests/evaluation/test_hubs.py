"""Sorted labels of which one has nearly all places, and what are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from pytest_cudaforge.evaluation.hubs import Hubs, hubs_of

Make = Callable[[torch.Generator], Mapping[str, object]]


def _draws(make: Make, count: int = 20) -> Iterator[Mapping[str, object]]:
    for seed in range(count):
        yield make(torch.Generator().manual_seed(seed))


def _labels(generator: torch.Generator, *shape: int, most: int = 64) -> torch.Tensor:
    return torch.randint(0, most, shape, generator=generator).sort(-1).values


def _graph(generator: torch.Generator) -> dict[str, object]:
    return {"0": torch.randn(4096, 4), "1": _labels(generator, 4096)}


def test_one_graph_has_nearly_all_nodes_and_none_is_lost() -> None:
    assert hubs_of(_draws(_graph)) == Hubs("1")
    leaves = _graph(torch.Generator().manual_seed(99))
    before, nodes = leaves["1"], leaves["0"]
    Hubs("1").put(leaves, torch.Generator().manual_seed(3))
    after = leaves["1"]
    assert isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    labels, counts = after.unique(return_counts=True)  # type: ignore[no-untyped-call]
    assert torch.equal(labels, before.unique())  # type: ignore[no-untyped-call]
    assert sorted(counts.tolist())[-2:] == [1, 4096 - 63]
    assert bool((after.diff() >= 0).all()) and after.dtype == before.dtype and leaves["0"] is nodes


def test_each_row_has_one_of_its_own() -> None:
    make: Make = lambda generator: {"0": _labels(generator, 3, 512, most=32).int()}  # noqa: E731
    assert hubs_of(_draws(make)) == Hubs("0")
    leaves = dict(make(torch.Generator().manual_seed(99)))
    Hubs("0").put(leaves, torch.Generator().manual_seed(3))
    after = leaves["0"]
    assert isinstance(after, torch.Tensor) and after.dtype == torch.int32 and after.shape == (3, 512)
    hubs = {int(row.mode().values) for row in after}
    assert bool((after.diff(dim=-1) >= 0).all()) and len(hubs) > 1


NO_LABELS: dict[str, Make] = {
    "in no order": lambda g: {"0": torch.randint(0, 64, (4096,), generator=g)},
    "ends of segments": lambda g: {"0": torch.randint(1, 9, (500,), generator=g).cumsum(0)},
    "all the same": lambda g: {"0": torch.full((4096,), 7)},
    "few": lambda g: {"0": _labels(g, 4, most=2)},
    "counted by another one": lambda g: {"0": _labels(g, 4096), "1": torch.randint(0, 64, (64,), generator=g)},
    "a mask": lambda g: {"0": (_labels(g, 4096) > 30)},
    "floats": lambda g: {"0": _labels(g, 4096).float()},
    "one number": lambda g: {"0": torch.randint(0, 64, (), generator=g)},
    "none": lambda g: {"0": torch.zeros(0, dtype=torch.int64)},
}


@pytest.mark.parametrize("name", NO_LABELS)
def test_what_is_no_sorted_label(name: str) -> None:
    assert hubs_of(_draws(NO_LABELS[name])) is None


def test_a_call_whose_labels_are_none_stays_as_it_is() -> None:
    leaves: dict[str, object] = {"1": torch.tensor([3, 1, 2] * 50)}
    before = leaves["1"]
    Hubs("1").put(leaves, torch.Generator())
    assert leaves["1"] is before
