"""Probes with other sizes: none that leaves integers pointing behind a dimension, none that ends the evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from judged_targets import find

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation import probes, variants
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.variants import (
    APART,
    EXPANDED,
    IN_FRONT,
    LEFT,
    MIXED,
    ORDER,
    OTHER,
    OUTER,
    OVERLAPPING,
    PARTED,
    STRIDED,
    TALL,
    TINY,
    apart_names,
    apply_variant,
    fixed_names,
    front_names,
    further_names,
    grown_size,
    left_names,
    long_names,
    mixed_names,
    neighbour_names,
    order_names,
    outer_names,
    parted_names,
    plane_names,
    rounder_names,
    single_names,
    smaller_tall,
    strided_names,
    tall_names,
    tiny_names,
    twins_of,
    usual_names,
    vast_names,
    vaster_names,
    wide_names,
)

TARGETS = """
import torch
from pytest_cudaforge import forge_target

def classes():
    return [torch.randn(64, 16), torch.randint(0, 16, (64,))]

@forge_target(inputs=classes)
def loss(x, classes):
    return torch.nn.functional.cross_entropy(x, classes)

@forge_target(inputs=lambda: [torch.randn(6, 8), torch.randn(6, 8)], strides="any")
def read_anyhow(x, state):
    return x + state

@forge_target(inputs=lambda: [torch.randn(6, 8), torch.randn(6, 8)], strides="any")
def written_anyhow(x, state):
    return state.add_(x)

@forge_target(inputs=lambda: [torch.randn(6, 8)])
def square_only(x):
    if x.shape != (6, 8):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")
    return x + 1

@forge_target(inputs=lambda: [torch.randn(6, 8)])
def lost_device(x):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

@forge_target(inputs=lambda: [torch.randn(6, 8)])
def lost_within(x):
    try:
        raise RuntimeError("CUDA error: unspecified launch failure")
    except RuntimeError as error:
        raise ValueError("no luck") from error

@forge_target(inputs=lambda: [torch.randn(6, 8)])
def honest(x):
    return x + 1

@forge_target(inputs=lambda: [torch.randn(3, 48)])
def in_eights(x):
    return x.view(3, -1, 8).sum(-1)

@forge_target(inputs=lambda: [torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(6, 5)])
def mixed(image, weight, right):
    return torch.nn.functional.conv2d(image, weight) @ right
"""


def _sizes(*tensors: torch.Tensor, dynamic: bool = False) -> list[tuple[int, int]]:
    """(old, new) of the variants' names, in their order."""
    names = neighbour_names(tensors, {}, dynamic)
    return [tuple(map(int, re.findall(r"\d+", name))) for name in names]  # type: ignore[misc]


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repo")
    (root / "targets.py").write_text(TARGETS)
    return root


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OracleClient]:
    with OracleClient(cache_dir=tmp_path_factory.mktemp("cache")) as client:
        yield client


@pytest.mark.parametrize(
    ("integers", "changed"),
    [
        (torch.randint(0, 16, (64,)), {64}),  # class numbers: the classes stay
        (torch.tensor([0, 1, 15] * 21 + [0]), {64}),
        (torch.arange(64), {16}),  # places in the batch, or anything else of 64
        (torch.full((64,), 5000), {64, 16}),  # tokens of a vocabulary: neither dimension
        (torch.zeros(0, dtype=torch.int64), {64, 16}),
        (torch.ones(64, dtype=torch.bool), {64, 16}),
    ],
)
def test_sizes_that_integers_may_point_into_are_left_alone(integers: torch.Tensor, changed: set[int]) -> None:
    assert {old for old, _ in _sizes(torch.randn(64, 16), integers)} == changed


def test_class_numbers_stay_below_the_number_of_classes(oracle: OracleClient, repo: Path) -> None:
    names = [name for name, _ in oracle.variants(find(repo, "::loss"), "default")]
    assert names[0] == STRIDED and {"size 64 -> 63", "size 64 -> 131"} < set(names)
    assert not [name for name in names if "size 16" in name]


@pytest.mark.parametrize(("name", "shared"), [("::read_anyhow", True), ("::written_anyhow", False)])
def test_what_forward_writes_shares_no_memory_with_itself(
    oracle: OracleClient, repo: Path, name: str, shared: bool
) -> None:
    """Whatever strides are promised: what would be left in one element that is two is nobody's to say."""
    names = [found for found, _ in oracle.variants(find(repo, name), "default")]
    assert STRIDED in names
    assert any(found.startswith((EXPANDED, OVERLAPPING)) for found in names) is shared


def test_a_size_that_costs_the_device_costs_its_probe_only(oracle: OracleClient, repo: Path) -> None:
    oracle.request("hello")
    before = oracle.pid
    names = [name for name, _ in oracle.variants(find(repo, "::square_only"), "default")]
    assert names and all(name.startswith(STRIDED) for name in names)
    assert oracle.pid != before


@pytest.mark.parametrize("name", ["::lost_device", "::lost_within"])
def test_an_oracle_that_lost_its_device_says_so_once(oracle: OracleClient, repo: Path, name: str) -> None:
    oracle.request("hello")
    before, generation = oracle.pid, oracle.generation
    with pytest.raises(TargetError, match=r"(?s)its forward failed.*targets\.py"):
        oracle.facts(find(repo, name))
    assert oracle.pid is None
    assert oracle.facts(find(repo, "::honest")).workloads[0].output_bytes == 6 * 8 * 4
    assert oracle.pid not in (None, before) and oracle.generation == generation + 1


def test_convolutions_are_counted_apart(oracle: OracleClient, repo: Path) -> None:
    (workload,) = oracle.facts(find(repo, "::mixed")).workloads
    convolution, product = 2 * 4 * 36 * 27, 2 * 24 * 6 * 5
    assert (workload.flops, workload.convolution_flops) == (convolution + product, convolution)


def test_a_reference_that_takes_no_odd_sizes_is_tried_at_others(oracle: OracleClient, repo: Path) -> None:
    names = [name for name, _ in oracle.variants(find(repo, "::in_eights"), "default")]
    sizes = [tuple(map(int, re.findall(r"\d+", name))) for name in names if name.startswith("size 48 ")]
    assert sizes and all(new % 8 == 0 for _, new in sizes)
    assert {new > old for old, new in sizes} == {False, True}


@pytest.mark.parametrize("size", [2, 3, 48, 11264])
def test_rounder_sizes_stay_on_the_side_of_those_that_they_replace(size: int) -> None:
    for new in (size - 1, size + 400):
        found = [tuple(map(int, re.findall(r"\d+", name))) for name in rounder_names(f"size {size} -> {new}")]
        assert all(old == size and (other > size) == (new > size) and other % 2 == 0 for old, other in found)
        assert size < 4 or found


def test_where_any_size_is_promised_every_size_grows() -> None:
    found = set(_sizes(torch.randn(64, 16), dynamic=True))
    assert {(64, 131), (16, 83)} < found
    assert (16, 83) not in _sizes(torch.randn(64, 16))


@pytest.mark.parametrize("shape", [(33, 257), (64, 16), (2, 6, 40)])
def test_sizes_are_drawn_below_and_several_times_above(shape: tuple[int, ...]) -> None:
    drawn = [_sizes(torch.randn(shape)) for _ in range(20)]
    for size in shape:
        least = [next(new for old, new in found if old == size) for found in drawn]
        most = [max(new for old, new in found if old == size) for found in drawn]
        assert all(size // 2 <= new < size for new in least)
        assert all(4 * size < new and size + 99 < new <= max(16 * size, 2 * size + 200) for new in most)
        assert len(set(most)) > 1 and (size < 16 or len(set(least)) > 1)


def test_no_size_grows_to_a_call_that_costs_much() -> None:
    large = torch.empty(1024, 1024, device="meta")
    assert all(variants._elements([large], old, new) <= 2.5 * large.numel() for old, new in _sizes(large))
    matrices = [torch.empty(512, 512, device="meta")] * 2
    assert all(variants._elements(matrices, old, new) <= 2.5 * 512 * 1024 for old, new in _sizes(*matrices))


def test_a_grown_tensor_has_other_rows_in_each_part() -> None:
    x = torch.randn(7, 5)
    ((wider,), _), ((taller,), _) = (apply_variant(name, (x,), {}) for name in ("size 5 -> 17", "size 7 -> 20"))
    assert wider.shape == (7, 17) and taller.shape == (20, 5)
    assert torch.equal(wider[:, :5], x) and torch.equal(taller[:7], x)
    assert not torch.equal(wider.amax(1), x.amax(1)) and set(wider.flatten().tolist()) == set(x.flatten().tolist())
    assert not torch.equal(taller[7:14], x)


def test_strides_come_in_several_patterns_with_the_same_values() -> None:
    x, flag = torch.randn(6, 8), torch.tensor(True)
    patterns = set()
    for name in strided_names():
        (strided, alone), _ = apply_variant(name, (x, flag), {})
        assert torch.equal(strided, x) and alone is flag and not strided.is_contiguous()
        patterns.add((strided.stride(0) == 1, strided.stride(1) == 1))
    assert patterns == {(True, False), (False, False), (False, True)}


def test_an_input_that_is_always_the_same_gets_other_values() -> None:
    mask = torch.ones(3, 5, dtype=torch.bool).tril(1)
    calls = [((torch.randn(3, 5),), {"mask": mask, "scale": torch.ones(4), "count": 3}) for _ in range(2)]
    assert list(fixed_names(*calls)) == [f"{OTHER}kw.mask"]
    (x,), kwargs = apply_variant(f"{OTHER}kw.mask", *calls[0])
    assert torch.equal(x, calls[0][0][0])
    assert torch.equal(kwargs["mask"].sum(1), mask.sum(1)) and not torch.equal(kwargs["mask"], mask)


def test_entries_of_the_outermost_dimension_lie_apart() -> None:
    maps, rows = torch.randn(3, 5, 4, 6), torch.randn(7, 8)
    plain, last = outer_names((maps, rows), {})
    assert plain.startswith("strided outer ") and last.endswith(", channels last")
    for name, inner, by in ((plain, (24, 6, 1), 24), (last, (1, 30, 5), 30)):
        (changed, same), _ = apply_variant(name, (maps, rows), {})
        assert torch.equal(changed, maps) and same is rows
        assert changed.stride()[1:] == inner and changed.stride(0) > 120 and changed.stride(0) % by == 0
    assert not list(outer_names((rows, torch.randn(1, 5, 6)), {}))


@pytest.mark.parametrize("shape", [(20, 257), (4096, 4097)])
def test_each_remainder_is_left_once(shape: tuple[int, int]) -> None:
    call = (torch.randn(shape), torch.randn(shape[1]))
    names = list(left_names(call, {}, set(shape)))
    changes = [{int(old): int(new) for old, new in re.findall(r"(\d+) -> (\d+)", name)} for name in names]
    assert len(names) >= 28 and all(name.startswith("left ") for name in names)  # two sizes never become one
    for size in shape:
        assert len({change[size] % 32 for change in changes}) == len(changes)
    assert all(change[shape[0]] * change[shape[1]] <= 1 << 18 for change in changes)
    assert list(apply_variant(names[0], call, {})[0][0].shape) == [changes[0][size] for size in shape]
    assert not list(left_names(call, {}, ()))


def test_sizes_beside_ones_that_stay_are_not_tried_in_numbers() -> None:
    assert not list(left_names((torch.randn(1, 20, 1 << 14),), {}, {20}))


def test_the_supervisor_knows_variants_by_the_same_names() -> None:
    assert (probes._OTHER, probes._STRIDED) == (OTHER, STRIDED)
    assert (IN_FRONT, OUTER, ORDER, TINY, TALL, MIXED, *PARTED) == probes._IF_TAKEN
    assert (probes._APART, probes._LEFT) == (APART, LEFT)
    assert all(probes._SIZE.fullmatch(name) for name in neighbour_names((torch.randn(6, 8),), {}))


def test_heads_and_positions_as_behind_a_transpose() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert list(front_names((x,), {})) == [IN_FRONT] and not list(front_names((x[0, 0],), {}))
    (swapped,), _ = apply_variant(IN_FRONT, (x,), {})
    assert torch.equal(swapped, x) and swapped.stride() == (60, 5, 15, 1)


def _in_memory(tensor: torch.Tensor) -> list[int]:
    wide = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    return sorted(wide, key=lambda dim: -tensor.stride(dim))


def test_dimensions_lie_in_an_order_that_no_memory_format_has() -> None:
    x, y, flat, alone = torch.randn(2, 3, 4, 5), torch.randn(4, 6, 7), torch.randn(3, 1, 4), torch.randn(2, 4, 1, 3)
    found, padded = set(), set()
    for _ in range(40):
        for name in order_names((x, y, flat, alone), {}, True):
            changed, _ = apply_variant(name, (x, y, flat, alone), {})
            assert all(map(torch.equal, changed, (x, y, flat, alone))) and changed[2] is flat
            orders = [_in_memory(changed[place]) for place in (0, 1, 3)]
            assert all((order[-1] == 1) == name.endswith("second innermost") for order in orders)
            assert not changed[0].is_contiguous(memory_format=torch.channels_last)
            assert orders[0] not in ([0, 1, 2, 3], [0, 2, 3, 1]) and orders[1] not in ([0, 1, 2], [0, 2, 1])
            assert orders[2] not in ([0, 1, 3], [0, 3, 1])
            found.add(tuple(orders[0]))
            padded.add(max(changed[0].stride()) > 60)
            again, _ = apply_variant(name, (x, y, flat, alone), {})
            assert [t.stride() for t in again] == [t.stride() for t in changed]
    assert len(found) > 12 and padded == {True, False}
    assert [name.endswith("second innermost") for name in order_names((x,), {}, False)] == [True]
    assert not list(order_names((flat, torch.randn(5, 6)), {}, True))


def test_all_sizes_become_tiny_at_once_or_one_by_one() -> None:
    x, bias = torch.randn(64, 480, 3), torch.randn(480)
    together, *singly = tiny_names((x, bias), {})
    (small, less), _ = apply_variant(together, (x, bias), {})
    assert small.shape[0] <= 8 and 30 <= small.shape[1] <= 60 and small.shape[2] == 3
    assert less.shape == (small.shape[1],) and small.is_contiguous()
    assert [apply_variant(name, (x, bias), {})[0][0].shape[2] for name in singly] == [3, 3]
    assert [name.count("->") for name in singly] == [1, 1]


def test_there_may_be_more_rows_than_blocks_in_a_grids_second_dimension() -> None:
    x, bias = torch.randn(512, 480, 3), torch.randn(480)
    (rows, _), (cols, _), *_ = tall_names((x, bias), {})
    (high, less), _ = apply_variant(rows, (x, bias), {})
    assert high.shape[0] > 65_535 and high.shape[1] == less.shape[0] < 10 and high.shape[2] == 3
    (wide, more), _ = apply_variant(cols, (x, bias), {})
    assert wide.shape[0] < 10 and wide.shape[1] == more.shape[0] > 65_535
    # Where the reference takes no other width than its weights' own: as drawn, as long as there is room.
    (_, alone), _ = tall_names((torch.randn(512, 1024),), {})
    ((whole,), _) = apply_variant(alone, (torch.randn(512, 1024),), {})
    assert whole.shape[0] > 65_535 and whole.shape[1] == 1024
    # Nor is a call made that is far larger than those drawn.
    assert not list(tall_names((torch.randn(2, 3, 4, 5, 6, 7, 8, 9),), {}))


def test_no_size_shrinks_to_the_one_that_grows() -> None:
    """A batch of 3 and 517 rows: both became 70001, 69 GiB of them."""
    x = torch.empty(3, 517, 64)
    for _ in range(12):
        for name in (names[0] for names in tall_names((x,), {})):
            ((changed,), _) = apply_variant(name, (x,), {})
            assert sorted(changed.shape)[1] < 10, name


def test_rows_need_not_be_as_long_as_there_are_rows() -> None:
    scores, scale = torch.randn(4, 64, 64), torch.randn(64)
    shapes = [apply_variant(name, (scores, scale), {})[0] for name in parted_names((scores, scale), {})]
    (longer, less), (wider, same) = shapes
    assert longer.shape[:2] == (4, 64) and longer.shape[2] == less.shape[0] < 64
    assert wider.shape[2] == 64 > wider.shape[1] and same.shape == (64,)
    assert not list(parted_names((torch.randn(4, 64),), {}))
    far = [
        apply_variant(name, (torch.randn(3, 12, 12),), {})[0][0]
        for name in parted_names((torch.randn(3, 12, 12),), {}, dynamic=True)
    ][2:]
    assert far[0].shape[2] > 60 > far[0].shape[1] == 12 and far[1].shape[1] > 60 > far[1].shape[2] == 12


def test_all_sizes_change_at_once_that_are_free_to() -> None:
    x, w = torch.randn(3, 12, 10), torch.randn(10, 7)
    for name in mixed_names((x, w), {}, {3, 12}):
        (changed, same), _ = apply_variant(name, (x, w), {})
        assert changed.shape[0] != 3 and changed.shape[1] != 12 and changed.shape[2] == 10 and same.shape == w.shape
        assert min(changed.shape) >= 5 and len(set(changed.shape)) == 3
    assert not list(mixed_names((x, w), {}, {3}))


def test_more_elements_than_numbers_of_few_bits_count() -> None:
    x, w = torch.randn(3, 12, 10), torch.randn(10, 7)
    found = [list(vast_names((x, w), {})) for _ in range(40)]
    assert {len(names) for names in found} == {1, 2}  # now and then many more first
    for names in found:
        (most, *_, least) = (grown_size(name) * 120 / (1 << 24) for name in (*names, names[-1]))
        assert 1.0 < least < 1.2 and (len(names) == 1 or 1.8 < most < 3.0)
    ((many, _), _) = apply_variant(found[0][-1], (x, w), {})
    assert many.numel() > 1 << 24 and many.shape[1:] == (12, 10)
    *_, square = vast_names((torch.randn(20, 20), torch.randn(20)), {})
    assert 1.0 < grown_size(square) ** 2 / (1 << 24) < 1.2
    (vaster,) = vaster_names((x, w), {})
    assert 6 << 24 <= grown_size(vaster) * 120 < 8 << 24


def test_two_lengths_grow_beyond_what_a_product_has_room_for() -> None:
    x, y = torch.randn(4, 1500), torch.randn(4, 1600)
    for name in long_names((x, y), {}):
        ((longer, other), _) = apply_variant(name, (x, y), {})
        assert longer.shape[1] * other.shape[1] > 1 << 32 and longer.shape[0] == other.shape[0] <= 9
        assert longer.shape[1] != other.shape[1]
    assert len(list(long_names((x, y), {}))) == 2
    assert not list(long_names((x, torch.randn(8, 1500)), {})) and not list(long_names((x,), {}))
    assert not list(long_names((torch.randn(50, 400), torch.randn(400, 60)), {}))  # as many columns as rows


def test_pictures_become_large_in_both_directions() -> None:
    x, w = torch.randn(2, 32, 48, 64), torch.randn(32)
    (name,) = plane_names((x, w), {})
    ((large, same), _) = apply_variant(name, (x, w), {})
    assert 1.4 * 2**22 < large.numel() < 2**23 and same.shape == w.shape
    assert large.shape[:2] == (1, 32) and abs(large.shape[3] / large.shape[2] - 4 / 3) < 0.01
    (square,) = plane_names((torch.randn(1, 8, 256, 256),), {})
    assert re.fullmatch(r"tall 256 -> \d+", square)
    (small,) = plane_names((torch.randn(1, 3, 8, 10),), {})
    assert 60 < grown_size(small) <= 160
    for shape in ((4, 8, 64), (2, 3, 2000, 1500)):  # no pictures, large ones
        assert not list(plane_names((torch.empty(shape),), {}))


def test_logits_come_with_as_many_columns_as_models_have_words() -> None:
    logits, bias = torch.randn(32, 512), torch.randn(512)
    for _ in range(20):
        (name,) = usual_names((logits, bias), {})
        rows, words = map(int, re.findall(r"-> (\d+)", name))
        assert words >= 32_000 and 1 << 24 < rows * words < 3 << 24
        # How long these take is told by fewer columns.
        assert smaller_tall(name) == [f"tall 32 -> {rows}, 512 -> {fewer}" for fewer in (1024, 4096)]
        assert grown_size(name) == words
    assert not list(usual_names((bias,), {})) and not list(usual_names((torch.randn(4, 8), torch.randn(4, 8)), {}))


def test_pictures_come_in_both_aspects() -> None:
    x = torch.randn(3, 4, 12, 10)
    *_, low, high, few, many = [
        apply_variant(name, (x,), {})[0][0].shape for name in mixed_names((x,), {}, {3, 4, 12, 10})
    ]
    assert low[:2] == high[:2] == (3, 4) and 12 < low[2] < low[3] and 12 < high[3] < high[2]
    # Two sizes before the last one are no other than these.
    assert few[0] == many[0] == 3 and few[3] == many[3] == 10 and 12 < few[1] < few[2] and 12 < many[2] < many[1]
    # None that becomes another one of the sizes, none where sizes are equal, or may not change.
    assert not list(mixed_names((torch.randn(12, 12),), {}, {12}))
    assert all("10 ->" not in name for name in mixed_names((x,), {}, {3, 4, 12}))


def test_what_is_in_order_stays_so_as_it_grows() -> None:
    offsets, edges, values = torch.tensor([0, 3, 3, 9, 20]), torch.linspace(-1, 1, 5), torch.tensor([3.0, 1, 2, 5, 4])
    (more, wider, others), _ = apply_variant("size 5 -> 40", (offsets, edges, values), {})
    assert len(more) == 40 and bool((more.diff() >= 0).all()) and set(more.tolist()) == {0, 3, 9, 20}
    assert bool((wider.diff() >= 0).all()) and not bool((others.diff() >= 0).all())
    assert more[0] == 0


def test_sizes_that_several_tensors_have_come_apart() -> None:
    queries, keys, mask = torch.randn(24, 16), torch.randn(24, 16), torch.ones(24, 24)
    by_size = [list(names) for names in apart_names((queries, keys), {"mask": mask})]
    assert [len(names) for names in by_size] == [2**4 - 2, 2**2 - 2]
    (fewer,) = [name for name in by_size[0] if name.endswith("at 1[0], kw.mask[1]")]
    (q, k), kwargs = apply_variant(fewer, (queries, keys), {"mask": mask})
    assert q.shape == (24, 16) and 12 <= k.shape[0] == kwargs["mask"].shape[1] < 24 == kwargs["mask"].shape[0]
    assert torch.equal(k, keys[: k.shape[0]])
    # One tensor's own are for others, and of many places there are too many choices.
    assert not list(apart_names((torch.randn(24, 24),), {}))
    assert not list(apart_names(tuple(torch.randn(24) for _ in range(6)), {}))


def test_where_any_strides_are_promised_one_may_be_zero() -> None:
    assert EXPANDED in strided_names(True) and EXPANDED not in strided_names()
    assert not any(name.startswith((EXPANDED, OVERLAPPING)) for name in strided_names(True, shared=False))
    x, flat, one = torch.randn(4, 5), torch.randn(6), torch.randn(())
    (changed, row, same), _ = apply_variant(EXPANDED, (x, flat, one), {})
    assert changed.shape == x.shape and changed.stride() == (0, 1) and torch.equal(changed[3], x[0])
    assert row.shape == flat.shape and row.stride() == (0,) and same is one


def test_where_any_strides_are_promised_rows_may_overlap() -> None:
    (name,) = [name for name in strided_names(True) if name.startswith(OVERLAPPING)]
    assert not any(name.startswith(OVERLAPPING) for name in strided_names())
    x, rows, flat, places = torch.randn(2, 4, 5), torch.randn(4, 5).softmax(-1), torch.randn(6), torch.arange(8)
    (changed, same, one, whole), _ = apply_variant(name, (x, rows, flat, places), {})
    step = changed.stride()[1]
    assert changed.shape == x.shape and 0 < step < 5 and changed.stride() == (3 * step + 5, step, 1)
    assert torch.equal(changed[0].flatten()[:5], x[0].flatten()[:5]) and torch.equal(
        changed[:, 1, 0], changed[:, 0, step]
    )
    assert same is rows and one is flat and whole is places


def test_what_integers_point_into_grows_and_they_point_further() -> None:
    table, places = torch.randn(20, 4), torch.tensor([0, 3, 3, 12, 19])
    (name,) = further_names((table, places), {})
    (grown, further), _ = apply_variant(name, (table, places), {})
    new = len(grown)
    assert new > 300 and torch.equal(grown[:20], table)
    assert further.tolist() == [0, 3, 3, new - 8, new - 1]


def test_a_size_that_comes_down_to_few_has_a_twin_that_does_not() -> None:
    assert twins_of("size 24 -> 23") == twins_of("size 24 -> 90") == twins_of("strided") == []
    (twin,) = twins_of("size 2 -> 1")
    assert re.fullmatch(r"size 2 -> (6|8|10|12)", twin)
    first, second = twins_of("tiny 300 -> 26, 24 -> 1, 12 -> 2")
    assert re.fullmatch(r"tiny 300 -> 26, 24 -> (6|8|10), 12 -> 2", first)
    assert re.fullmatch(r"tiny 300 -> 26, 24 -> 1, 12 -> (6|8|10)", second)
    # They may be larger than what was drawn.
    x = torch.randn(3, 5, 2)
    for name in ("size 2 -> 6", "tiny 2 -> 6", "tall 2 -> 6", "only last 2 -> 6"):
        ((changed,), _) = apply_variant(name, (x,), {})
        assert changed.shape == (3, 5, 6) and torch.equal(changed[..., :2], x), name


def test_one_sample_is_a_size_too() -> None:
    x, bias = torch.randn(64, 480), torch.randn(480)
    assert list(single_names((x, bias), {})) == ["tiny 64 -> 1"]
    assert list(single_names((x, bias), {}, True)) == ["tiny 64 -> 1", "tiny 480 -> 1"]
    (one, same), _ = apply_variant("tiny 64 -> 1", (x, bias), {})
    assert one.shape == (1, 480) and same.shape == (480,)


def test_there_are_sizes_between_far_and_tall() -> None:
    (name,) = wide_names((torch.randn(64, 480), torch.randn(480)), {})
    (rows, bias), _ = apply_variant(name, (torch.randn(64, 480), torch.randn(480)), {})
    assert 1500 <= rows.shape[0] <= 60_000 and 16 <= rows.shape[1] < 48 and bias.shape == rows.shape[1:]


def test_how_long_many_rows_take_is_told_by_fewer() -> None:
    assert smaller_tall("tall 64 -> 140000, 480 -> 6") == [
        "tall 64 -> 1024, 480 -> 6",
        "tall 64 -> 4096, 480 -> 6",
    ]
    assert smaller_tall("tall 5000 -> 140000") == smaller_tall("size 64 -> 791") == []
    assert grown_size("tall 64 -> 140000, 480 -> 6") == 140_000
