"""Structure of inputs, redraws that keep it, weights that keep theirs; the fp64 mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_cudaforge.evaluation.correctness import Rule, judge_output
from pytest_cudaforge.evaluation.domain import redraw_leaves
from pytest_cudaforge.evaluation.exchanges import (
    exchangeable,
    exchanged,
    exchanged_integers,
    exchanged_together,
    with_values_of,
)
from pytest_cudaforge.evaluation.precision import Fp64Mode, precision_flags
from pytest_cudaforge.evaluation.redraw import FAMILIES, SHORTCUTS, families_of, redraw
from pytest_cudaforge.evaluation.structures import Structure, ordered_values, structure_of, structures_of
from pytest_cudaforge.evaluation.variants import apply_variant, neighbour_names
from pytest_cudaforge.evaluation.weights import (
    HABITS,
    exchange_weights,
    exchangeable_weights,
    move_weights,
    rerandomise,
)


def _two(make: object) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    first = make()  # type: ignore[operator]
    torch.manual_seed(2)
    return first, make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("make", "structure"),
    [
        (lambda: torch.randn(32, 32), "generic"),
        (lambda: torch.randn(32, 32).bfloat16(), "generic"),
        (lambda: torch.rand(32, 32), "unit"),
        (lambda: torch.softmax(torch.randn(32, 32), -1), "shares"),
        (lambda: torch.log_softmax(3 * torch.randn(32, 32), -1), "logarithms"),
        (lambda: torch.randn(32, 32).tril(), "drawn"),
        (lambda: torch.randn(32, 32).sort(-1).values, "drawn"),
        (lambda: torch.randn(32, 32).abs() * 3, "signed"),
        (lambda: -torch.rand(32, 32) - 4, "signed"),
        (lambda: torch.randn(32, 32, dtype=torch.complex64), "generic"),
        (lambda: torch.polar(torch.ones(32, 8), torch.randn(32, 8)), "drawn"),
        (lambda: torch.randint(0, 9, (32, 32)).float(), "drawn"),
        (lambda: torch.randint(0, 9, (32, 32)), "classes"),
        (lambda: (lambda a: a + a.T)(torch.randn(32, 32)), "drawn"),
        (lambda: torch.randn(64).sort().values, "sorted"),
        (lambda: torch.randn(64).sort(descending=True).values, "sorted"),
        (lambda: torch.randn(64).sort().values.bfloat16(), "drawn"),
        (lambda: torch.linspace(-1, 1, 64), "drawn"),
        (lambda: torch.full((4, 4), float("-inf")).triu(1) + torch.randn(4, 4), "drawn"),
        (lambda: torch.randn(0, 4), "drawn"),
        (lambda: torch.randn(6, 32, 8).softmax(1), "drawn"),
        (lambda: nn.functional.normalize(torch.randn(32, 16)), "drawn"),
        (lambda: torch.linalg.qr(torch.randn(24, 24)).Q, "drawn"),
        (lambda: (lambda a: a @ a.mT + torch.eye(12))(torch.randn(3, 12, 12)), "drawn"),
        (lambda: (lambda a: a - a.mT)(torch.randn(12, 12)), "drawn"),
        (lambda: torch.eye(16)[torch.randperm(16)], "drawn"),
        (lambda: nn.functional.one_hot(torch.randint(0, 5, (32,)), 5).float(), "drawn"),
        (lambda: torch.randint(0, 2, (32,)).float() * 2 - 1, "drawn"),
        (lambda: (torch.rand(32, 32) > 0.5).float(), "drawn"),
        (lambda: torch.randn(64, 64).fill_diagonal_(0), "drawn"),
        (lambda: nn.functional.pad(torch.randn(1200, 4), (0, 0, 0, 1)), "drawn"),
        (lambda: torch.randn(40, 8, 2).sort(0).values, "drawn"),
        (lambda: (torch.randn(100, 100) * 4).round() / 4, "drawn"),
        (lambda: torch.randn(()).expand(8, 8).clone(), "drawn"),
        (lambda: torch.randn(int(torch.randint(2, 99, ())), 3), "drawn"),
        (lambda: torch.randint(0, 6, (8, 32)), "classes"),
        (lambda: torch.randint(0, 6, (64,)).sort().values, "classes"),
        (lambda: torch.arange(64) // 8, "drawn"),
        (lambda: torch.stack([torch.randperm(8)[:2] for _ in range(64)]), "drawn"),
        (lambda: torch.randint(0, 2, (64,)), "drawn"),
        (lambda: torch.randint(0, 1000, (64,)), "drawn"),
        (lambda: torch.randn(64, 8).masked_fill(torch.rand(64, 8) < 0.3, float("nan")), "gaps"),
        (lambda: torch.full((8, 8), float("nan")).tril(-1) + torch.randn(8, 8), "gaps"),
        (lambda: torch.rand(300, 300).bfloat16(), "unit"),
        (lambda: torch.randn(300, 300).half(), "generic"),
        (lambda: torch.randn(4096, 64) / 8, "generic"),
        (lambda: torch.rand(64, 64) * 2 - 1, "generic"),
        (lambda: torch.randn(2, 2), "generic"),
        (lambda: torch.rand(3, 5, 7) * torch.rand(()), "unit"),
    ],
)
def test_structure_is_seen_from_two_draws(make: object, structure: str) -> None:
    assert structure_of(*_two(make)) == structure


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "ranked"])
def test_redraws_keep_shape_dtype_and_layout(family: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        drawn = torch.randn(32, 64).to(dtype).t()
        again = redraw(family, drawn, "generic", torch.Generator().manual_seed(3))
        assert (again.shape, again.dtype, again.stride()) == (drawn.shape, dtype, drawn.stride())
        assert bool(again.isfinite().all())
        assert not torch.equal(again, drawn)


@pytest.mark.parametrize("drawn", [torch.randn(2, 3, 512).transpose(1, 2), torch.rand(512, 4)])
def test_ranked_rows_follow_those_near_them(drawn: torch.Tensor) -> None:
    ranked = redraw("ranked", drawn, "generic", torch.Generator().manual_seed(3))
    assert ranked.stride() == drawn.stride() and not torch.equal(ranked, drawn)
    assert torch.equal(ranked.sort(-2).values, drawn.sort(-2).values)
    rows, places = (one.reshape(-1, one.shape[-1]).unique(dim=0) for one in (ranked, drawn))
    assert torch.equal(rows, places)
    steps = ranked.diff(dim=-2).abs().flatten(0, -2)
    assert float(steps.median(0).values.min()) < 0.1 * float(drawn.diff(dim=-2).abs().median())
    wide = torch.randn(512, 9)
    assert redraw("ranked", wide, "generic", torch.Generator()) is wide  # rows of features


def test_families_reach_where_the_draw_does_not() -> None:
    drawn = torch.rand(64, 256) * 1e-3

    def values(family: str) -> torch.Tensor:
        return redraw(family, drawn, "generic", torch.Generator().manual_seed(3))

    assert bool((values("shifted") > 0).all())
    rows, columns = ((values("lowered") < 0).all(dim) for dim in (1, 0))
    assert int(rows.sum()) == 32 and int(columns.sum()) == 64
    assert bool((values("lowered")[~rows][:, ~columns] > 0).all())
    tails = values("tails")
    assert 3 < float(tails.std()) < 4
    zeros = tails[tails == 0]
    assert 0.005 < zeros.signbit().sum() / tails.numel() < 0.02
    assert 0.005 < (~zeros.signbit()).sum() / tails.numel() < 0.02


@pytest.mark.parametrize("shape", [(6, 5, 4, 3), (2, 2, 2, 2), (4, 1, 9), (1, 3, 5), (64,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_along_every_dimension_some_lie_below_zero_as_a_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    lowered = redraw("lowered", torch.randn(shape).to(dtype), "generic", torch.Generator().manual_seed(3)) < 0
    if len(shape) == 1 or shape[0] == 1:
        assert bool(lowered.all()) == (dtype == torch.float32)
        return
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    assert all(bool(lowered.movedim(dim, 0).flatten(1).all(1).any()) for dim in wide) and not bool(lowered.all())


@pytest.mark.parametrize("shape", [(200_003,), (300, 667), (2, 3, 40_000), (1,), (2, 2)])
def test_sparse_values_are_far_out_at_either_end(shape: tuple[int, ...]) -> None:
    drawn = torch.randn(shape) * 1e-3
    one, other = (redraw("sparse", drawn, "generic", torch.Generator().manual_seed(seed)) for seed in (3, 4))
    ends = torch.cat([one.flatten()[:3], one.flatten()[-3:]]).abs() / float(drawn.std() if drawn.numel() > 1 else 1e-3)
    assert bool((ends > (2 if drawn.numel() < 100_000 else 4)).all()) or drawn.numel() == 1
    assert bool((one != other).flatten()[-3:].all())
    rows = (one.abs() > 1.9e-3).reshape(-1, shape[-1])[:, -1].float().mean()
    assert shape != (300, 667) or 0.15 < float(rows) < 0.4


@pytest.mark.parametrize("shape", [(64, 1024), (8, 6, 24, 32)])
def test_the_first_sparse_value_outweighs_the_others_here_and_there(shape: tuple[int, ...]) -> None:
    sparse = redraw("sparse", torch.randn(shape), "generic", torch.Generator().manual_seed(3))
    for dim in range(1, len(shape)):
        rows = sparse.flatten(0, dim - 1).flatten(1)
        share = rows[:, 0].square() / rows[:, 1:].square().sum(1)
        least = 0.05 if rows.shape[1] > 200 else 0.5  # two standard deviations are much among few
        assert 0.05 < float((share > least).float().mean()) < 0.5


def test_a_variance_relative_to_the_first_value_is_told_by_sparse_values() -> None:
    def normed(x: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        # As a kernel adds up: in lanes.
        lanes = moved.reshape(len(x), 32, -1).transpose(0, 1).cumsum(2)[..., -1], moved.square()
        mean, square = lanes[0].sum(0) / x.shape[1], lanes[1].reshape(len(x), 32, -1).sum(2).sum(1) / x.shape[1]
        return (moved - mean[:, None]) * torch.rsqrt(square - mean * mean + 1e-5)[:, None]

    drawn, generator = torch.randn(64, 1024), torch.Generator().manual_seed(3)
    for family, seen in (("normal", False), ("shifted", False), ("sparse", True)):
        x = redraw(family, drawn, "generic", generator)
        right, exact = (torch.layer_norm(v, (1024,), None, None, 1e-5) for v in (x, x.double()))
        judged = judge_output("out", normed(x, x - x[:, :1]), right, exact, Rule(1024))
        assert bool(judged.mismatches) == seen, family


def test_some_classes_are_absent_and_none_is_new() -> None:
    drawn, generator = torch.randint(-3, 17, (3000,)).sort().values, torch.Generator().manual_seed(3)
    absent = [redraw("absent", drawn, "classes", generator) for _ in range(40)]
    assert all(set(left.unique().tolist()) < set(drawn.unique().tolist()) for left in absent)
    assert all(bool((left.diff() >= 0).all()) and left.dtype == drawn.dtype for left in absent)
    kept = {int(drawn.mode().values), 16}
    assert all(kept <= set(left.tolist()) for left in absent)
    ever_absent = torch.cat([drawn.unique()[~torch.isin(drawn.unique(), left)] for left in absent])
    assert set(ever_absent.tolist()) == set(range(-3, 17)) - kept
    assert redraw("normal", drawn, "classes", generator) is drawn


def test_what_another_input_may_follow_from_is_left_as_drawn() -> None:
    def draw() -> dict[str, torch.Tensor]:
        gaps = torch.randn(16, 8).masked_fill(torch.rand(16, 8) < 0.3, float("nan"))
        return {"gaps": gaps, "classes": torch.randint(0, 6, (64,)), "x": torch.randn(16, 8), "scale": torch.rand(())}

    def found(**more: Callable[[], torch.Tensor]) -> tuple[str, str]:
        one, other = ({**draw(), **{name: make() for name, make in more.items()}} for _ in range(2))
        structures = structures_of(one, other)
        return structures["gaps"], structures["classes"]

    assert found() == ("gaps", "classes")
    assert found(mask=lambda: torch.rand(16, 8) > 0.5) == ("drawn", "classes")
    assert found(sizes=lambda: torch.randint(1, 9, (6,))) == ("gaps", "drawn")


@pytest.mark.parametrize("shape", [(40, 30), (5, 6, 7), (1, 50)])
def test_rows_and_columns_without_any_value(shape: tuple[int, ...]) -> None:
    drawn = torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, float("nan"))
    missing = redraw("missing", drawn, "gaps", torch.Generator().manual_seed(3)).isnan()
    wide = [dim for dim, size in enumerate(shape) if size > 1 and size < drawn.numel()]
    assert all(bool(missing.movedim(dim, 0).flatten(1).all(1).any()) for dim in wide)
    assert bool(missing[drawn.isnan()].all()) and not bool(missing.all())


def test_equal_zeros_of_both_signs_are_the_largest_or_the_smallest_here_and_there() -> None:
    tied = redraw("ties", torch.randn(60, 50), "generic", torch.Generator().manual_seed(3))
    zeros, signed = (tied == 0).sum(1), ((tied == 0) & tied.signbit()).sum(1)
    extreme = (tied.amax(1) == 0) & (signed > 0) & (signed < zeros), (tied.amin(1) == 0) & (signed > 0)
    assert all(10 < int(found.sum()) < 30 for found in extreme)
    assert 3 < len(tied.unique()) <= 2 * 7


@pytest.mark.parametrize("left_out", [slice(0, -3), slice(0, -1), slice(1, None)])
def test_a_long_mean_shows_an_end_that_is_left_out(left_out: slice) -> None:
    generator, drawn = torch.Generator().manual_seed(3), torch.randn(200_003)
    for family, seen in (("normal", False), ("sparse", True)):
        x = redraw(family, drawn, "generic", generator).square()
        part = x[left_out].sum() / len(x)
        judged = judge_output("out", part, x.mean(), x.double().mean(), Rule(len(x)))
        assert bool(judged.mismatches) == seen


def test_shortcuts_leave_nothing_out_of_bounds_or_of_two_signs() -> None:
    drawn, shared = torch.randn(64, 96), torch.Generator().manual_seed(3)
    calm, raised, sunk = (redraw(family, drawn, "generic", shared) for family in SHORTCUTS)
    assert float(calm.abs().max()) < 0.1
    assert bool((raised >= 0).all()) and bool((sunk <= 0).all())
    unit = redraw("calm", torch.rand(64, 96), "unit", shared)
    assert float(unit.min()) >= 0 and float(unit.max()) <= 0.01


def test_an_input_of_one_element_is_redrawn_to_a_number() -> None:
    for family in FAMILIES:
        again = redraw(family, torch.randn(1), "generic", torch.Generator().manual_seed(3))
        assert bool(again.isfinite().all())


def test_unit_inputs_stay_in_their_range_and_structured_ones_as_drawn() -> None:
    unit = torch.rand(64, 64)
    for family in FAMILIES:
        again = redraw(family, unit, "unit", torch.Generator().manual_seed(3))
        assert 0 <= float(again.min()) <= float(again.max()) <= 1
    assert redraw("large", unit, "drawn", torch.Generator()) is unit


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=True)
        self.tied = self.linear.weight
        self.norm = nn.BatchNorm1d(64)
        self.mask = nn.Parameter(torch.ones(8, 8).tril() * 0.5)
        self.steps = nn.Parameter(torch.arange(4), requires_grad=False)


def test_weights_change_but_keep_their_nature() -> None:
    net = _Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    rerandomise(net, 5)
    assert net.tied is net.linear.weight
    assert not torch.equal(net.linear.weight, before["linear.weight"])
    assert 0.5 < float(net.linear.weight.std() / before["linear.weight"].std()) < 2
    assert bool((net.norm.weight > 0).all()) and not torch.equal(net.norm.weight, before["norm.weight"])
    assert not torch.equal(net.norm.bias, before["norm.bias"])
    assert bool((net.mask[before["mask"] == 0] == 0).all())
    assert torch.equal(net.steps, before["steps"])
    assert bool((net.norm.running_var > 0).all()) and not torch.equal(net.norm.running_var, before["norm.running_var"])
    assert net.norm.num_batches_tracked == 0


def test_fp64_mode_ignores_down_casts_inside() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        h = x.to(torch.float32)
        table = torch.full((8,), 0.1, dtype=torch.float32)
        return (h.half().float() * table).sum(-1).to(x.dtype)

    x = torch.randn(4, 8, dtype=torch.float64)
    with Fp64Mode() as mode:
        got = forward(x)
    assert got.dtype == torch.float64
    assert torch.allclose(got, x.sum(-1) * 0.1, rtol=1e-14)
    assert (mode.reduction, mode.partial) == (8, False)


def test_fp64_mode_counts_the_inner_length_of_products() -> None:
    with Fp64Mode() as mode:
        torch.nn.functional.linear(torch.randn(3, 96), torch.randn(5, 96), torch.randn(5))
    assert mode.reduction == 96


def test_fp64_mode_leaves_in_place_targets_their_identity() -> None:
    x = torch.randn(4, dtype=torch.float64)
    want = x * 3
    with Fp64Mode():
        x.mul_(torch.tensor(3.0))
    assert torch.equal(x, want)


def test_precision_flags_are_put_back() -> None:
    before = torch.backends.cudnn.allow_tf32
    with precision_flags("fp32"):
        assert not torch.backends.cudnn.allow_tf32
    with precision_flags("default"):
        assert torch.backends.cudnn.allow_tf32 == before
    assert torch.backends.cudnn.allow_tf32 == before


def test_variants_change_layout_or_size_only() -> None:
    x, mask = torch.randn(6, 8), torch.ones(6, dtype=torch.bool)
    (strided, flags), _ = apply_variant("strided", (x, mask), {})
    assert torch.equal(strided, x) and not strided.is_contiguous()
    assert torch.equal(flags, mask) and flags.stride() == (2,)
    (smaller, fewer), kwargs = apply_variant("size 6 -> 5", (x, mask), {"n": 6})
    assert (tuple(smaller.shape), tuple(fewer.shape), kwargs) == ((5, 8), (5,), {"n": 6})
    assert {"size 6 -> 5", "size 8 -> 7", "size 6 -> 73"} < set(neighbour_names((x, mask), {}))


@pytest.mark.parametrize(
    ("shape", "faint"),
    [((24, 64), (4,)), ((2, 6, 64), (6, 2)), ((1, 2, 64), (0, 1)), ((1, 64), (0,)), ((64,), (0,))],
)
def test_faint_entries_vanish_beside_others_that_do_not(shape: tuple[int, ...], faint: tuple[int, ...]) -> None:
    """Whole leading entries, or those of the first two dimensions; the first one always."""
    found = set()
    for seed in range(8):
        again = redraw("faint", torch.randn(shape), "generic", torch.Generator().manual_seed(seed))
        sizes = again.reshape(-1, 64).square().mean(1).sqrt()
        vanished = sizes < 0.02
        assert float(sizes.max()) > 0.5 and bool(vanished[0]) == bool(vanished.any())
        found.add(int(vanished.sum()))
    assert found == set(faint)


def test_half_of_the_faint_entries_are_faint_in_all_inputs_of_a_call() -> None:
    structures: dict[str, Structure] = {"0": "generic", "1": "generic", "2": "generic"}
    leaves: dict[str, Any] = {"0": torch.randn(48, 8), "1": torch.randn(48, 3, 4), "2": torch.randn(20, 8)}
    redraw_leaves(leaves, structures, "faint", torch.Generator().manual_seed(5))
    sizes = [leaf.flatten(1).square().mean(1).sqrt() for leaf in leaves.values()]
    faint = [size < 0.03 for size in sizes]
    assert [int(mask.sum()) for mask in faint] == [8, 8, 3]
    both = faint[0] & faint[1]
    assert 4 <= int(both.sum()) < 8
    assert int(((sizes[0] + sizes[1]) < 1e-3).sum()) >= 2  # and alike in size
    assert int(((sizes[0] > 0) & (sizes[0] < 5e-9)).sum()) == 1


def test_values_of_sorted_tensors_lie_in_the_others() -> None:
    x, edges = torch.randn(32, 6, 40).transpose(1, 2), torch.randn(31).sort().values
    found = ordered_values([x, edges, torch.arange(9), torch.full((9,), float("inf")), 3, torch.randn(30)])
    assert len(found) == 1 and found[0] is edges
    mixed = with_values_of(x, [edges, torch.arange(9.0).double()], torch.Generator().manual_seed(1))
    changed = mixed != x
    assert mixed.stride() == x.stride() and bool(torch.isin(mixed[changed], edges).all())
    assert 0.04 < float(changed.float().mean()) < 0.09
    assert with_values_of(x.half(), [edges], torch.Generator()).equal(x.half())


def _rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def test_faint_entries_show_another_small_constant() -> None:
    drawn = torch.randn(16, 64)
    for family in FAMILIES[:-1]:
        x = redraw(family, drawn, "generic", torch.Generator().manual_seed(3)).double()
        apart = (_rms_norm(x, 1e-5) - _rms_norm(x, 1e-6)).square().mean().sqrt()
        assert (float(apart) > 1e-3) == (family in ("faint", "small"))
        assert bool(_rms_norm(x, 0.0).isnan().any()) == (family in ("faint", "padded"))


@pytest.mark.parametrize("dims", [(1,), (2,), (3,), (0, 2, 3), (0, 1, 2), (0,)])
def test_whatever_a_norm_runs_over_some_of_it_fades(dims: tuple[int, ...]) -> None:
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(3, 16, 20, 24, generator=generator)
        x = redraw("faded", drawn, "generic", generator).double()
        one, other = (x * (x.square().mean(dims, keepdim=True) + eps).rsqrt() for eps in (1e-5, 1e-8))
        assert float((one - other).abs().max()) > 1e-2
        assert float((x.abs() > 0.01).double().mean()) > 0.5


@pytest.mark.parametrize(("habits", "turned"), [((), 0), (("turned",), 1)])
def test_gains_are_turned_where_the_reference_bears_it(habits: tuple[str, ...], turned: int) -> None:
    net, generator = torch.nn.Module(), torch.Generator().manual_seed(1)
    net.gain = torch.nn.Parameter(torch.rand(64, generator=generator) + 0.5)
    net.scale = torch.nn.Parameter(torch.ones(1))
    net.plain = torch.nn.Parameter(torch.randn(64, generator=generator))
    before = {path: parameter.detach().clone() for path, parameter in net.named_parameters()}
    move_weights(net, 3, "turned", habits=habits)
    for path, parameter in net.named_parameters():
        changed = parameter.detach() != before[path]
        assert bool(changed.any()) == (path == "plain" or (path == "gain" and bool(turned)))
        assert parameter.detach().abs().equal(before[path].abs())


def test_a_few_elements_of_weights_change_places() -> None:
    net = torch.nn.Module()
    net.plain = torch.nn.Parameter(torch.randn(40, 50))
    net.tied = net.plain
    net.kept = torch.nn.Parameter(torch.randn(40, 50))
    net.masked = torch.nn.Parameter(torch.randn(40, 40).tril())
    net.eight_bits = torch.nn.Parameter(torch.rand(40, 50).add(1).to(torch.float8_e4m3fn), requires_grad=False)
    net.complex = torch.nn.Parameter(torch.randn(40, 50, dtype=torch.complex64))
    net.whole = torch.nn.Parameter(torch.arange(9), requires_grad=False)
    net.empty = torch.nn.Parameter(torch.empty(0))
    before = {name: tensor.detach().clone() for name, tensor in net.named_parameters()}
    exchange_weights(net, 3, ("kept",))
    changed = {n: int((t.detach().cfloat() != before[n].cfloat()).sum()) for n, t in net.named_parameters()}
    assert 0 < changed.pop("plain") <= 8 and 0 < changed.pop("eight_bits") <= 8
    assert set(changed.values()) == {0}
    assert torch.equal(net.plain.flatten().sort().values, before["plain"].flatten().sort().values)
    assert net.tied is net.plain


def test_integers_in_no_order_change_places() -> None:
    ids = torch.randint(0, 50, (20, 30))
    ids[:, 25:] = 0  # padding
    seven = torch.where(ids == 7, 0, ids)
    assert exchangeable(torch.randint(0, 50, (20, 30)))
    changed = exchanged_integers(seven, torch.Generator().manual_seed(3))
    assert 0 < int((changed != seven).sum()) <= 32
    assert torch.equal(changed.flatten().sort().values, seven.flatten().sort().values)
    assert bool((changed[:, 25:] == 0).all())


def test_rows_without_a_number_twice_stay_so() -> None:
    orders = torch.rand(20, 30).argsort(-1)
    changed = exchanged_integers(orders, torch.Generator().manual_seed(3))
    assert not torch.equal(changed, orders) and torch.equal(changed.sort(-1).values, orders.sort(-1).values)


@pytest.mark.parametrize("turned", [True, False])
def test_ends_of_edges_change_places_with_others(turned: bool) -> None:
    # Of one draw in ten an edge would be there twice, or lead to where it begins: then all stays as it is.
    edges = torch.randint(0, 400, (2, 300), generator=torch.Generator().manual_seed(1))
    edges[:, edges[0] == edges[1]] = torch.tensor([[3], [4]])
    leaf = edges.T.contiguous() if turned else edges
    assert exchangeable(leaf)
    changed = exchanged_integers(leaf, torch.Generator().manual_seed(3))
    assert changed.is_contiguous() and changed.shape == leaf.shape
    now = changed.T if turned else changed
    assert 0 < int((now != edges).sum()) <= 64 and bool((now[0] != now[1]).all())
    assert torch.equal(now.sort(-1).values, edges.sort(-1).values)


def test_the_rows_of_a_small_batch_change_places_each_within_its_own() -> None:
    tokens = torch.randint(0, 50_000, (4, 512))
    tokens[:, 500:] = 0  # padding
    changed = exchanged_integers(tokens, torch.Generator().manual_seed(3))
    assert exchangeable(tokens) and torch.equal(changed.sort(-1).values, tokens.sort(-1).values)
    assert 0 < int((changed != tokens).sum()) <= 32 and bool((changed[:, 500:] == 0).all())


@pytest.mark.parametrize("apart", [True, False])
def test_edges_come_in_another_order_and_are_the_same_ones(apart: bool) -> None:
    edges = torch.randint(0, 50, (2, 300))
    edges[:, 280:] = 50  # padding
    leaves = {"a": edges[0], "b": edges[1]} if apart else {"ab": edges}
    beside = {"strength": torch.randn(300), "few": torch.randint(0, 9, (6,)), "long": torch.randint(0, 9, (300, 40))}
    changed = exchanged_together({**beside, **leaves}, torch.Generator().manual_seed(3))
    assert set(changed) == set(leaves)
    now = torch.stack([changed["a"], changed["b"]]) if apart else changed["ab"]
    assert 0 < int((now != edges).any(0).sum()) <= 32 and torch.equal(now[:, 280:], edges[:, 280:])
    assert sorted(map(tuple, now.T.tolist())) == sorted(map(tuple, edges.T.tolist()))


@pytest.mark.parametrize(
    "kept",
    [
        {"a": torch.arange(300), "b": torch.randint(0, 9, (300,))},
        {"a": torch.randint(0, 9, (20,)), "b": torch.randint(0, 9, (20,))},
        {"x": torch.randn(300)},
        {},
    ],
)
def test_what_follows_an_order_is_not_exchanged_together(kept: dict[str, torch.Tensor]) -> None:
    assert exchanged_together(kept, torch.Generator().manual_seed(3)) == {}


@pytest.mark.parametrize(
    "ordered",
    [
        torch.arange(400).reshape(20, 20),
        torch.randint(0, 99, (400,)).sort().values,
        torch.stack([torch.randint(0, 99, (200,)).sort().values, torch.randint(0, 99, (200,))]),  # a graph's edges
        torch.randint(0, 99, (1, 20)).expand(20, 20),  # positions of a batch
        torch.randint(0, 99, (200, 2)).cumsum(1),  # from one to the next
        torch.stack([torch.randint(0, 999, (200,)), torch.randint(1, 9, (200,))], 1),  # a start and a length
        torch.randint(0, 99, (7,)),
        torch.randint(0, 2, (400,)).bool(),
        torch.randn(400),
    ],
)
def test_what_has_an_order_keeps_it(ordered: torch.Tensor) -> None:
    assert not exchangeable(ordered)


def test_running_variances_are_large_and_small() -> None:
    norm = nn.BatchNorm1d(400)
    rerandomise(norm, 3)
    on = norm.running_var[norm.running_var > 0]
    assert len(on) >= 399 and 0.13 < float(on.min()) < 0.2 and 5 < float(on.max()) < 7.5


def test_of_some_seeds_weights_are_as_trained_ones() -> None:
    """A few are far larger than the others, and a small gain has grown; of the other seeds nothing is."""
    kinds = set()
    for seed in range(24):
        net = torch.nn.Linear(256, 256)
        net.gain = torch.nn.Parameter(torch.full((8,), 1e-4))
        spread = float(net.weight.detach().std())
        rerandomise(net, seed)
        outlying = float(net.weight.detach().abs().max()) > 12 * spread
        grown = float(net.gain.detach().min()) > 0.01
        assert outlying == grown
        assert float(net.gain.detach().min()) > 0
        kinds.add(outlying)
    assert kinds == {False, True}


def test_habits_of_trained_weights() -> None:
    """Some gains of many are negative, or zero, some rows are zero; no single ones, and none that nobody asked for."""
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    net.exponent = nn.Parameter(torch.full((1,), 3.0))
    rerandomise(net, 1, HABITS, trained=True)
    negative = int((net[1].weight < 0).sum())
    empty = int((net[0].weight == 0).all(-1).sum())
    assert 0 < negative < 32 and 0 < empty < 16
    assert float(net.exponent.detach()) > 0
    assert all(0 < int((vector == 0).sum()) < 16 for vector in (net[1].weight, net[1].bias, net[0].bias))
    for habits, trained in ((HABITS, False), ((), True)):
        rerandomise(net[1], 1, habits, trained=trained)
        other = nn.Linear(64, 64)
        rerandomise(other, 1, habits, trained=trained)
        assert not bool((other.weight == 0).all(-1).any())
    gains = nn.BatchNorm1d(64)
    rerandomise(gains, 1, ("pruned",), trained=True)
    assert bool((gains.weight > 0).all())


@pytest.mark.parametrize("sign", [1, -1])
def test_values_of_one_sign_keep_their_range(sign: int) -> None:
    drawn, generator = sign * (torch.rand(64, 32) * 250 + 5), torch.Generator().manual_seed(1)
    low, high = float(drawn.min()), float(drawn.max())
    level, peaked, other = (redraw(family, drawn, "signed", generator) for family in ("shifted", "sparse", "large"))
    assert torch.equal(other, drawn)
    for found in (level, peaked):
        assert low <= float(found.min()) and float(found.max()) <= high and not torch.equal(found, drawn)
    assert float(level.abs().mean()) > 200 * float(level.std())
    far = max(low, high, key=abs)
    flat = peaked.flatten().abs()
    assert flat[0] == flat[-1] == abs(far) and float(flat[3:-3].max()) < 1.2 * min(abs(low), abs(high))


def test_rows_begin_alike_or_with_zeros() -> None:
    drawn = torch.randn(6, 40, 16)
    found = [redraw("alike", drawn, "generic", torch.Generator().manual_seed(seed), seed) for seed in range(8)]
    by_row = [
        one for one in found if any(bool((row[:8] == 0).all() and (row[8:] != 0).all()) for row in one.flatten(0, 1))
    ]
    by_sample = [one for one in found if any(bool((sample.flatten()[:320] == 0).all()) for sample in one)]
    assert by_row and by_sample
    rows = by_row[0].flatten(0, 1)
    assert int((rows[1:, :8] == rows[:-1, :8]).all(1).sum()) > 10 and len(rows.unique(dim=0)) == len(rows)
    ordered = rows.sort(-1).values
    assert int((ordered[1:] == ordered[:-1]).all(1).sum()) > 20  # the same numbers in another order
    assert float(redraw("empty", drawn, "generic", torch.Generator()).abs().max()) == 0


def test_one_row_stands_out_from_rows_that_are_nearly_alike_and_is_the_same_in_all_inputs() -> None:
    places, leads = set(), list[float]()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        shapes = (5, 1, 32), (5, 64, 32), (5, 64, 32)
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        query, keys, values = (redraw("sinks", one, "generic", generator, seed) for one in drawn)
        far = [(rows - rows.median(-2, keepdim=True).values).norm(dim=-1).argmax(-1) for rows in (keys, values)]
        assert len({*far[0].tolist(), *far[1].tolist()}) == 1
        others = keys[:, [place for place in range(64) if place != int(far[0][0])]]
        assert float(others.std(-2).max()) < 0.2 < 0.5 < float(others.std())
        scores = (query * keys).sum(-1) * 32**-0.5
        best = scores.topk(2).values
        places.add(int(far[0][0]))
        leads += (best[:, 0] - best[:, 1]).tolist()
    # Leads of any size up to some tens, so that none is far from one that somebody takes for enough.
    assert len(places) > 10 and sum(14 < lead < 17 for lead in leads) > 2 and max(leads) > 24
    assert redraw("sinks", torch.randn(7), "generic", torch.Generator(), 1).shape == (7,)


def test_complex_numbers_are_redrawn_by_their_parts() -> None:
    drawn = torch.randn(8, 16, dtype=torch.complex64).transpose(0, 1)
    found = redraw("large", drawn, "generic", torch.Generator().manual_seed(1))
    assert found.dtype == drawn.dtype and found.shape == drawn.shape
    assert 30 < float(torch.view_as_real(found).std()) < 300
    changed = exchanged(drawn, torch.Generator().manual_seed(1)) != drawn
    assert 2 <= int(changed.sum()) <= 8


def test_trained_gains_have_outliers_and_weights_holes() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    rerandomise(net, 3, ("thinned",), trained=True)
    assert 0.06 < float((net[0].weight == 0).float().mean()) < 0.2
    assert float(net[1].weight.max()) > 8 and float(net[1].weight.median()) < 2
    assert set(exchangeable_weights(net, ())) == {"0.bias", "1.weight", "1.bias"}
    constructed = dict(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).named_parameters())
    assert "0.weight" in exchangeable_weights(net, (), constructed)


def test_a_mask_that_something_else_may_follow_from_stays_as_drawn() -> None:
    def drawn(seed: int) -> dict[str, Any]:
        mask = torch.rand(8, 24, generator=torch.Generator().manual_seed(seed)) < 0.5
        scores = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))
        return {"mask": mask, "other": ~mask, "scores": scores, "barred": scores.masked_fill(mask, float("-inf"))}

    def found(*names: str) -> dict[str, Structure]:
        return structures_of(*({name: drawn(seed)[name] for name in names} for seed in (1, 2)))

    assert found("mask", "scores") == {"mask": "mask", "scores": "generic"}
    assert found("mask", "other") == {"mask": "drawn", "other": "drawn"}
    assert found("barred") == {"barred": "barred"}
    assert found("mask", "barred") == {"mask": "drawn", "barred": "drawn"}


def test_a_mask_that_is_always_the_same_has_no_rows_shut() -> None:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    added = torch.zeros(8, 8).masked_fill(~mask, float("-inf"))
    assert structures_of({"0": mask}, {"0": mask.clone()}) == {"0": "pattern"}
    assert structures_of({"0": added}, {"0": added.clone()}) == {"0": "pattern"}
    assert structures_of({"0": mask, "1": added}, {"0": mask, "1": added}) == {"0": "drawn", "1": "drawn"}
    assert structures_of({"0": mask | True}, {"0": mask | True}) == {"0": "drawn"}
    assert "open" in families_of(["pattern"]) and "shut" not in families_of(["pattern"])


def test_rows_of_a_mask_and_of_scores_are_shut_as_a_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(16, 24, generator=generator) < 0.5
    shut, opened = (redraw(family, mask, "mask", generator) for family in ("shut", "open"))
    assert bool((~shut).all(-1).any()) and not bool((~shut).all()) and bool(opened[0].all()) and not bool(opened.all())
    scores = torch.randn(16, 24).masked_fill(mask, float("-inf"))
    assert bool((redraw("shut", scores, "barred", generator) == float("-inf")).all(-1).any())
    bare = redraw("open", scores, "barred", generator)
    assert bool(bare[0].isfinite().all()) and bool(bare.isinf().any()) and torch.equal(bare[~mask], scores[~mask])
    assert redraw("shut", mask[0], "mask", generator) is mask[0] or torch.equal(
        redraw("shut", mask[0], "mask", generator), mask[0]
    )


@pytest.mark.parametrize("size", [1, 3, 64, 4096])
def test_rectified_rows_are_mostly_zeros_and_never_wholly(size: int) -> None:
    drawn, generator = torch.randn(32, size), torch.Generator().manual_seed(1)
    found = redraw("rectified", drawn, "generic", generator)
    zeros = (found == 0).sum(-1)
    assert int(zeros.max()) < size and bool((zeros > 0).any()) is (size > 1)
    assert int((zeros > 0).sum()) <= 8


def test_skewed_values_keep_their_ends_and_their_order_and_lie_ever_less_dense() -> None:
    rising = torch.randn(400).sort().values
    for drawn in (rising, rising.flip(0)):
        found = redraw("skewed", drawn, "sorted", torch.Generator())
        gaps = found.diff().abs().sort(descending=bool(drawn[0] > drawn[-1])).values
        assert torch.equal(found[[0, -1]], drawn[[0, -1]]) and torch.equal(found.diff().sign(), drawn.diff().sign())
        assert torch.equal(gaps, found.diff().abs()) and float(gaps.max() / gaps.min()) > 1000


def test_the_order_of_values_may_be_another_inputs_as_well() -> None:
    values, places = torch.randn(64).sort()
    other, others = torch.randn(64).sort()
    assert structures_of({"0": values, "1": places}, {"0": other, "1": others})["0"] == "drawn"
    assert structures_of({"0": values}, {"0": other})["0"] == "sorted"


def test_spiked_rows_have_one_value_that_is_out_and_two_reach_as_far_as_any() -> None:
    generator = torch.Generator().manual_seed(3)
    found = redraw("spiked", torch.randn(400, 64), "generic", generator)
    places = found.abs().argmax(1)
    assert len(places.unique()) > 40  # type: ignore[no-untyped-call]
    far = found.abs().amax(1)
    assert float(far.max()) > 90 and float(far.min()) < 6 and float(found.min()) < -90
    one = redraw("spiked", torch.randn(64), "generic", generator)
    assert float(one.max()) > 70 and float(one.min()) < -70
    assert redraw("spiked", torch.randn(()), "generic", generator).dim() == 0


def test_combed_rows_have_large_values_at_equal_distances() -> None:
    found = redraw("combed", torch.randn(600, 256), "generic", torch.Generator().manual_seed(3))
    every_other, eighth = found[:, ::2].abs().amax(1), found[:, ::8].abs().amax(1)
    between = torch.ones(256, dtype=torch.bool)
    between[::8] = False
    assert bool((every_other < 0.1 * found.abs().amax(1)).any())  # a sample sees nothing of it
    assert bool((found[:, between].abs().amax(1) < 0.3 * eighth).any())  # or all of it
    assert redraw("combed", torch.randn(()), "generic", torch.Generator()).dim() == 0
    assert redraw("combed", torch.randn(3, 1), "generic", torch.Generator()).shape == (3, 1)


def test_runs_repeat_what_was_drawn_and_keep_its_order() -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, 40, (20, 30))
    found = redraw("runs", drawn, "classes", generator)
    flat = found.flatten()
    assert 0.4 < float((flat[1:] == flat[:-1]).double().mean()) < 0.8 and found.shape == drawn.shape
    assert set(flat.tolist()) <= set(drawn.flatten().tolist())
    rising = redraw("runs", drawn.flatten().sort().values, "classes", generator)
    assert bool((rising.diff() >= 0).all())


def test_masks_begin_late_beside_values_far_from_zero() -> None:
    generator = torch.Generator().manual_seed(1)
    mask, series = torch.arange(64) < torch.full((16, 1), 48), torch.randn(16, 64, generator=generator)
    late, far = (redraw("afar", drawn, kind, generator) for drawn, kind in ((mask, "mask"), (series, "generic")))  # type: ignore[arg-type]
    begun = late.to(torch.int8).argmax(-1)
    assert bool((begun > 0).any()) and bool(late.any()) and not bool((late & ~mask).any())
    assert float(far.mean().abs()) > 100 * float(series.std()) and 0.5 < float(far.std() / series.std()) < 2
    assert "afar" in families_of(["mask", "generic"]) and "afar" in families_of(["barred", "generic"])
    assert "afar" not in families_of(["mask"]) and "afar" not in families_of(["generic"])
