"""What hardly ever comes together in a call, and the draws that show it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaforge.evaluation.occasions import (  # noqa: E402
    WitnessMode,
    agreeing,
    decisions_of,
    may_have_occasions,
    meetings_of,
    occasional_draws,
)


def _shown(leaves: dict[str, object]) -> set[str]:
    return {what for what, seen in meetings_of(leaves).items() if seen}


def test_integers_meet_in_a_row_at_a_place_and_as_multiples() -> None:
    labels, samples = torch.tensor([3, 5, 7]), torch.tensor([[1, 2], [5, 9], [3, 4]])
    assert _shown({"0": labels, "1": samples}) == {
        "0 and 1 have a number in common",
        "0 and 1 have a number in common in one row",
    }
    assert "0 and 1 have a number in common in one row" not in _shown({"0": labels, "1": samples.roll(2, 0)})
    assert "0 and 1 are multiples, the second one of the other" in _shown({"0": labels, "1": torch.tensor([4, 9, 14])})
    assert not _shown({"0": labels, "1": torch.tensor([0, 0, 0])})


def test_edges_masks_and_infinities_meet() -> None:
    edges, values = torch.linspace(-1, 1, 9), torch.randn(40)
    assert not _shown({"0": edges, "1": values})
    assert _shown({"0": edges, "1": torch.cat([values, edges[3:4]])}) == {"0 and 1 have a number in common"}
    assert not _shown({"0": values, "1": values + 0})  # nobody's edges: floats meet by chance
    none, some = torch.full((4,), -torch.inf), torch.tensor([0.0, 1.0, -torch.inf, 2.0])
    assert _shown({"0": none, "1": some}) == {"0 and 1 are both infinite"}
    first, second = torch.tensor([True, False]), torch.tensor([True, True])
    assert _shown({"0": first, "1": second}) == {"0 and 1 are both true"}
    assert may_have_occasions({"0": edges, "1": values}) and may_have_occasions({"0": some})
    assert not may_have_occasions({"0": values, "1": torch.randn(3, 4), "2": 5})


def test_labels_are_what_the_scores_say_but_for_what_is_ignored() -> None:
    scores, labels = torch.randn(64, 10, 5), torch.randint(0, 10, (64, 5))
    labels[0] = -100
    (found,) = agreeing({"0": scores, "1": labels}, torch.Generator().manual_seed(1)).values()
    changed = found != labels
    assert 60 < int(changed.sum()) < 220 and not bool(changed[0].any())
    assert torch.equal(found[changed], scores.argmax(1)[changed])
    freed = agreeing({"0": scores, "1": labels}, torch.Generator().manual_seed(1), ["0"])
    ahead = freed["0"] - scores
    assert torch.equal(freed["1"], found) and 30 < int((ahead > 0).sum()) < 110 and 15 < float(ahead.max()) <= 20.01
    assert torch.equal(freed["0"].argmax(1), scores.argmax(1)) and not bool((ahead < 0).any())
    assert not agreeing({"0": scores, "1": labels, "2": labels}, torch.Generator())
    assert not agreeing({"0": scores, "1": labels + 9}, torch.Generator())  # they point elsewhere
    assert not agreeing({"0": scores, "1": labels[:3]}, torch.Generator())


def test_groups_of_rows_are_no_labels_of_features_and_no_label_is_beyond_those_that_were_drawn() -> None:
    rows, groups = torch.randn(4096, 768), torch.randint(0, 8, (4096,))
    assert not agreeing({"0": rows, "1": groups}, torch.Generator())
    assert not agreeing({"0": torch.randn(400, 16), "1": torch.randint(0, 12, (400,))}, torch.Generator())
    some = {"0": torch.randn(512, 12), "1": torch.randint(2, 12, (512,))}
    assert not agreeing({**some, "1": some["1"].sort().values}, torch.Generator())
    (found,) = agreeing(some, torch.Generator().manual_seed(1)).values()
    assert not torch.equal(found, some["1"]) and int(found.min()) >= 2 and int(found.max()) <= 11


def test_a_witness_sees_what_integers_decide_and_what_is_infinite_and_nothing_that_rounding_may() -> None:
    x, n = torch.tensor([1.0, torch.inf]), torch.tensor([1, 2])
    with WitnessMode() as watch:
        x.isinf(), n == 2, n > 5, x > 0
    assert watch.found == [(True, False), (True, False), (False, False)]
    shown = decisions_of(watch.found, {"out": torch.tensor([0, 3])})
    assert shown["decision 1 is true somewhere"] and not shown["decision 2 is true somewhere"]
    assert shown["zero in out"] and not shown["infinity in out"]


def test_draws_are_kept_that_show_what_few_do_and_the_rarest_come_first() -> None:
    draws = [
        (seed, {"a": seed % 10 == 0, "b": seed == 7, "always": True, "half": seed % 2 == 0}) for seed in range(100)
    ]
    found = list(occasional_draws(draws).values())
    assert [one.what for one in found] == ["b", "a", "a", "a", "a", "a"]
    assert found[0].seeds == (7,) and found[1].seeds == (0, 50)
    assert sorted(seed for one in found[1:] for seed in one.seeds) == list(range(0, 100, 10))
    assert not occasional_draws([])
