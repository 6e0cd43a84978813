"""Values that a family makes, and weights that training makes: that they are what the family's description says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pytest_cudaforge.evaluation.absences import LACKING
from pytest_cudaforge.evaluation.exchanges import exchanged_mask, near_rows, trail
from pytest_cudaforge.evaluation.redraw import redraw
from pytest_cudaforge.evaluation.sealing import sealed
from pytest_cudaforge.evaluation.weights import device_of, rerandomise


def _generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_rows_that_are_two_heaps() -> None:
    found = redraw("parted", torch.randn(64, 1024), "generic", _generator())
    upper = (found > 0).float().mean(-1)
    assert not bool((found.abs() < 0.1).float().mean() > 0.01)  # nothing lies between them
    assert float(upper.min()) < 0.1 and float(upper.max()) > 0.9  # each row has a share of its own


@pytest.mark.parametrize("shape", [(), (7,), (48, 64), (4, 200, 48), (2, 8, 128, 64), (0, 3)])
def test_levels_behind_a_bias(shape: tuple[int, ...]) -> None:
    seen = set()
    for seed in range(24):
        found = redraw("biased", 2 * torch.randn(shape), "generic", _generator(seed), shared=seed)
        assert found.shape == shape
        for dim, size in enumerate(shape) if found.numel() and len(shape) > 1 else ():
            means = found.mean(dim) / found.std()  # of what has one level, far from zero now and then
            if size >= 48 and float(means.abs().max()) > 0.8:
                seen.add(dim)
                assert float(means.abs().max()) < 3.5
    assert len(shape) < 2 or 0 in shape or len(shape) - 2 in seen


def test_rows_that_climb() -> None:
    found = redraw("climbing", torch.randn(96, 2048), "generic", _generator())
    assert bool((found >= 0).all()) and bool((found.amin(-1) == 0).all())
    rising, falling = ((found.diff(dim=-1) * side >= 0).all(-1) for side in (1, -1))
    assert int(rising.sum()) > 16 and int(falling.sum()) > 16 and int((rising | falling).sum()) < 90
    steps = found[rising].diff(dim=-1).amax(-1)
    assert bool(((found.amax(-1) > 88)[rising] & (steps < 16)).any())  # exp overflows, and no step tells of it


@pytest.mark.parametrize("by_columns", [False, True])
def test_a_mask_keeps_what_its_rows_or_its_columns_come_to(by_columns: bool) -> None:
    mask = torch.ones(48, 64, dtype=torch.bool).tril()
    found = exchanged_mask(mask, _generator(), by_columns=by_columns)
    assert 2 <= int((found != mask).sum()) <= 8
    kept, others = (0, 1) if by_columns else (1, 0)
    assert torch.equal(found.sum(kept), mask.sum(kept)) and not torch.equal(found.sum(others), mask.sum(others))


def test_a_mask_whose_rows_are_all_of_one_kind_is_exchanged_anywhere() -> None:
    mask = torch.zeros(16, 8, dtype=torch.bool)
    mask[::2] = True
    found = exchanged_mask(mask, _generator())
    assert int(found.sum()) == int(mask.sum()) and not torch.equal(found, mask)


def test_half_of_the_rows_lie_beside_others() -> None:
    rows, codes = torch.randn(400, 32), 3 * torch.randn(24, 32)
    found = near_rows(rows.mT.contiguous().mT, [codes], _generator())
    distances = torch.cdist(found.double(), codes.double()).amin(-1) / math.sqrt(32) / 3
    assert 150 < int((distances < 0.02).sum()) < 250 and float(distances.min()) > 5e-5
    assert found.stride() == (1, 400)


def test_rows_beside_the_row_before() -> None:
    found = trail(torch.randn(8, 50, 3), _generator()).view(-1, 3)
    steps, spread = found.diff(dim=0).norm(dim=-1), float(found.std(0).max())
    assert float(steps.max()) < 0.1 and float(steps.min()) > 0 and spread < 1


def test_of_some_rows_of_probabilities_one_is_certain() -> None:
    drawn = torch.randn(64, 8).softmax(-1)
    drawn[:, 3] = 0.0  # where nothing may be
    found = LACKING["shares", "certain"](drawn, _generator())
    sure = found.amax(-1) == 1
    assert bool(sure[0]) and 1 < int(sure.sum()) < 24
    assert torch.equal(found[~sure], drawn[~sure]) and float(found[:, 3].max()) == 0.0


def test_logarithms_of_probabilities_stay_some() -> None:
    drawn = (3 * torch.randn(64, 8)).log_softmax(-1)
    found = LACKING["logarithms", "certain"](drawn, _generator())
    assert torch.allclose(found.exp().sum(-1), torch.ones(64)) and float(found.amax(-1).exp().median()) > 0.999


def test_gains_fade_and_stay_what_they_are() -> None:
    norm = nn.LayerNorm(256)
    rerandomise(norm, 1, ("faded", "muted"), trained=True)
    small = (norm.weight.detach().abs() < 2e-3) & (norm.weight.detach() != 0)
    assert 4 < int(small.sum()) < 40 and bool((norm.weight.detach() >= 0).all())
    assert 4 < int((norm.weight.detach() == 0).sum()) < 40  # both habits are worn, whichever comes first


def test_some_of_a_vector_that_differs_stray() -> None:
    """Not of what is positive, which may be a rate, and not of what is all the same."""
    module = nn.ParameterDict(
        {"decay": torch.linspace(-2, 1, 16), "rate": torch.linspace(1, 2, 16), "gain": torch.ones(16)}
    )
    rerandomise(module, 1, ("strayed",), trained=True)
    far = {name: float((weights.detach() - weights.detach().median()).abs().max()) for name, weights in module.items()}
    assert 3.0 < far["decay"] < 20.0 and far["rate"] < 2.5 and far["gain"] < 2.5


def test_statistics_alone_say_where_a_module_lies() -> None:
    """Else their draws would be asked of a generator for another device."""
    statistics = nn.BatchNorm1d(4, affine=False, device="meta")
    assert device_of(statistics) == torch.device("meta") and device_of(nn.ReLU()) == torch.device("cpu")


def test_sealed_weights_are_read_and_come_back() -> None:
    layer = nn.Linear(33, 65).requires_grad_(False)
    transposed = nn.Buffer(torch.randn(5, 7).mT)
    weights = [*layer.parameters(), layer.weight, transposed, torch.empty(0)]
    places, versions = [w.data_ptr() for w in weights], [w._version for w in weights]
    x = torch.randn(4, 33)
    expected, copy = layer(x), transposed.clone()
    with sealed(weights):
        assert torch.allclose(layer(x), expected) and torch.equal(transposed, copy)
        assert transposed.stride() == (1, 7) and layer.weight.data_ptr() != places[0]
        view = layer.weight[0]
    assert [w.data_ptr() for w in weights] == places and [w._version for w in weights] == versions
    assert torch.equal(view, layer.weight[0])  # who kept a view may read it, and write it
    view.zero_()
    with pytest.raises(ZeroDivisionError), sealed(weights):
        raise ZeroDivisionError
    assert [w.data_ptr() for w in weights] == places


def test_weights_have_gaps_of_one_kind_at_most() -> None:
    """Rows that are zero for a while, rows in front or at the end, sides of filters; none where nothing is told."""
    kinds = set()
    for seed in range(40):
        module = nn.ParameterDict({"taps": torch.randn(16, 64), "filters": torch.randn(16, 1, 7, 7)})
        rerandomise(module, seed, ("blank", "delayed", "framed"), trained=True)
        for weights in (module["taps"].detach(), module["filters"].detach()):
            zero = weights == 0
            rows = zero.flatten(1).all(1)
            framed = zero.dim() == 4 and bool((zero.flatten(1).any(1) & zero[:, 0, 0].all(-1) & ~rows).any())
            kinds.add("blank" if bool(rows.any()) else "framed" if framed else "delayed" if bool(zero.any()) else "")
            if bool(rows.any()):
                assert bool(rows[0]) != bool(rows[-1]) and int(rows.long().diff().abs().sum()) == 1
            assert not bool(zero.all())
    assert kinds == {"blank", "delayed", "framed", ""}


def test_sides_of_a_filter_are_zero_and_its_middle_is_not() -> None:
    conv = nn.Conv2d(4, 32, (5, 1), bias=False)
    rerandomise(conv, 1, ("framed",), trained=True)
    zero = (conv.weight.detach() == 0).squeeze(-1).all(1)
    some = zero.any(1)
    assert 0 < int(some.sum()) < 32 and not bool(zero[:, 2].any())
    assert bool((zero[some][:, 0] & zero[some][:, -1]).all())


def test_bytes_at_one_end_lie_together_in_parts() -> None:
    drawn = torch.randint(0, 256, (300, 400), dtype=torch.uint8)
    plain = 0
    for seed in range(12):
        found = LACKING["bytes", "extremes"](drawn, torch.Generator().manual_seed(seed))
        assert found.dtype == torch.uint8 and set(found.unique().tolist()) <= {0, 255}
        same = (found[1:, 1:] == found[:-1, :-1]) & (found[1:, 1:] == found[1:, :-1])
        plain += float(same.float().mean()) > 0.4
    assert 6 < plain <= 12


def test_filters_are_nearly_a_column_times_a_row() -> None:
    conv = nn.Conv2d(4, 64, 5, bias=False)
    spread = float(conv.weight.detach().std())
    rerandomise(conv, 1, ("leaning",), trained=True)
    sizes = torch.linalg.svdvals(conv.weight.detach())
    near = sizes[..., 1] < 0.05 * sizes[..., 0]
    assert 10 < int(near.all(1).sum()) < 40 and bool((sizes[..., 1] > 0).all())
    assert 0.5 < float(conv.weight.detach().std()) / spread < 2
