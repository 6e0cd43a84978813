"""What a target's inputs are like, decided per input: honest ones keep their meaning, generic ones are redrawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.evaluation.domain import Domain
from pytest_cudaforge.evaluation.occasions import OCCASIONS
from pytest_cudaforge.evaluation.subject import Subject

MANY = (
    "shifted",
    "large",
    "integer",
    "lowered",
    "sparse",
    "rectified",
    "spiked",
    "combed",
    "tails",
    "faint",
    "faded",
    "bumped",
    "uniform",
)
#: A bump reaches no further than a spike does in half precision.
HALF = tuple(family for family in MANY if family != "bumped")
GENERIC = (*MANY, "alike", "levels", "biased", "deep", "empty")
#: Where scores are weighed by exponentials.
SCORED = (*MANY, "alike", "levels", "biased", "climbing", "deep", "empty")
#: Where the answer to zeros is zero nothing says how far off it may be.
ZERO = (*MANY, "alike", "levels", "biased", "deep")
UNIT = ("shifted", "sparse", "floor", "ceiling")

TARGETS = """
import torch
from torch import nn
from torch.nn import functional as F
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(64, 32)])
def gaussian(x):
    return x * 2

@forge_target(inputs=lambda: [2 * torch.rand(64, 32) - 1])
def flat(x):
    return x * 2

@forge_target(inputs=lambda: [torch.rand(8, 32)])
def logarithm(x):
    return torch.log(x + 1e-6)

@forge_target(inputs=lambda: [torch.rand(8, 32), torch.rand(8, 32)])
def root_beside_a_product(x, scale):
    return x.sqrt() * scale

@forge_target(inputs=lambda: [torch.rand(8, 32), torch.rand(8, 32)])
def binary_cross_entropy(p, target):
    return F.binary_cross_entropy(p, target)

@forge_target(inputs=lambda: [torch.rand(8, 32).softmax(-1), torch.rand(8, 32).softmax(-1)])
def kl_divergence(p, q):
    return F.kl_div(p.log(), q, reduction="batchmean")

@forge_target(inputs=lambda: [torch.rand(32, 8), torch.randint(0, 8, (32,))])
def cross_entropy(x, labels):
    return F.cross_entropy(x, labels)

@forge_target(inputs=lambda: [torch.randn(32, 8), torch.randn(32, 8), torch.ones(32)])
def cosine_loss(x, y, target):
    return F.cosine_embedding_loss(x, y, target)

@forge_target(inputs=lambda: [torch.rand(32), torch.randint(0, 2, (32,)).float() * 2 - 1])
def hinge(x, sign):
    return (1 - x * sign).clamp(min=0).mean()

@forge_target(inputs=lambda: [torch.randn(32, 8), torch.randint(0, 32, (5,)).float()])
def float_indices(x, rows):
    return x[rows.long()]

@forge_target(inputs=lambda: [torch.randn(16, 8), torch.randint(1, 8, (16,)).float()])
def mean_of_lengths(x, lengths):
    keep = torch.arange(8) < lengths[:, None]
    return (x * keep).sum(-1) / lengths

@forge_target(inputs=lambda: [torch.rand(32, 32).tril(), torch.rand(32, 32).tril()])
def triangular(a, b):
    return (a @ b).tril()

@forge_target(inputs=lambda: [torch.rand(16), torch.rand(8, 16)])
def bucket(edges_like, x):
    return edges_like[(x * 16).long()]

@forge_target(inputs=lambda: [torch.randn(8, 32)])
def naive_softmax(x):
    e = x.exp()
    return e / e.sum(-1, keepdim=True)

@forge_target(inputs=lambda: [torch.randn(40, 200)])
def nucleus(x):
    p, places = x.softmax(-1).sort(-1, descending=True)
    gone = p.cumsum(-1) - p > 0.9
    return x.masked_fill(torch.zeros_like(gone).scatter(1, places, gone), 0.0)

@forge_target(inputs=lambda: [torch.randn(40, 200)])
def leaky(x):
    return torch.where(x.sum(-1, keepdim=True) > 0, x, x * 0.1)

@forge_target(inputs=lambda: [torch.randn(8, 32)])
def single_only(x):
    assert x.dtype == torch.float32
    return x.sigmoid() * 2 + 1

@forge_target(inputs=lambda: [torch.randn(8, 32)])
def single_only_choice(x):
    assert x.dtype == torch.float32
    return torch.where(x > 0.5, x, x * 0.1) + 1, x.argmax(-1)

@forge_target(inputs=lambda: [torch.randn(8, 32)])
def stable_softmax(x):
    return x.softmax(-1)

@forge_target(inputs=lambda: [torch.randn(8, 32).half()])
def half_softmax(x):
    return x.softmax(-1)

@forge_target(inputs=lambda: [torch.randn(8, 32).half()])
def half_square(x):
    return x * x

@forge_target(inputs=lambda: [torch.randn(8, 32)])
def small_values_only(x):
    if x.abs().max() > 20:
        raise ValueError("values must be small")
    return x * 2

@forge_target(inputs=lambda: [torch.randn(8, 32)])
def largest(x):
    return x.argmax(-1)

@forge_target(inputs=lambda: [torch.randn(8, 32)])
def farthest(x):
    return x.abs().max(-1)

@forge_target(inputs=lambda: [torch.randn(8, 32)])
def largest_two(x):
    return x.topk(2, -1).indices

@forge_target(inputs=lambda: [torch.randn(40, 32)])
def largest_probability(x):
    return x.softmax(-1).argmax(-1)

@forge_target(inputs=lambda: [torch.randn(40, 32)])
def levels(x):
    return torch.round(x / (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-8)).to(torch.int8)

@forge_target(inputs=lambda: [torch.randn(24, 32)])
def unit_rows(x):
    return x / x.norm(dim=-1, keepdim=True)

@forge_target(inputs=lambda: [torch.randn(8, 32)], index_outputs=["out.1"])
def declared_indices(x):
    return x.topk(3, -1)

@forge_target(inputs=lambda: [torch.randn(8, 32)], distributions="drawn")
def restricted(x):
    return x * 2

@forge_target(inputs=lambda: [torch.randn(40, 32)])
def sixteenths(x):
    return torch.round(x * 16).clamp(-128, 127).to(torch.int8)

@forge_target(inputs=lambda: [torch.randn(40, 32)])
def thirds(x):
    return torch.floor(x / 0.3).to(torch.int32)

@forge_target(inputs=lambda: [torch.randn(40, 32)])
def above_their_mean(x):
    return (x > x.mean()).int()

def _beside_edges():
    return [torch.randn(24, 32), torch.randn(31).sort().values]

@forge_target(inputs=_beside_edges)
def buckets(x, edges):
    return torch.bucketize(x, edges)

@forge_target(inputs=_beside_edges)
def order_beside_edges(x, edges):
    return x.argsort(-1)

@forge_target(inputs=_beside_edges)
def counts_beside_edges(x, edges):
    return torch.bucketize(x, edges).sum(-1)

@forge_target(inputs=lambda: [torch.randn(24, 32)])
class Binned(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.linspace(-2, 2, 17))

    def forward(self, x):
        return torch.bucketize(x, self.edges), x * 2
@forge_target(inputs=lambda: {"x": torch.randn(8, 4), "many": [torch.rand(4), {"deep": torch.rand(4)}]})
def nested(x, many):
    return x * many[0] * many[1]["deep"]

@forge_target(inputs=lambda: [torch.randn(8), torch.randn(8), torch.randn(8)])
def any_number(first, *others):
    return first + sum(others)
"""

NO_TIES = ("shifted", "large", "lowered", "sparse", "spiked", "combed", "tails")
#: Where what is rounded, or looked up, is a value as it is.
OF_A_GRID = (*MANY[:5], "spiked", "combed", "tails", "small", "faded", "bumped", "uniform")
#: Of equal ones the first is it.
CHOSEN = (*NO_TIES, "small", "faded", "bumped", "uniform", "ties", "levels", "biased", "ordered")
EXPECTED = {
    "logarithm": ({"0": "unit"}, UNIT),
    "root_beside_a_product": ({"0": "unit", "1": "generic"}, (*ZERO, "floor", "ceiling")),
    "binary_cross_entropy": ({"0": "unit", "1": "unit"}, UNIT),
    "kl_divergence": ({"0": "shares", "1": "shares"}, ("certain",)),
    "cross_entropy": (
        {"0": "generic", "1": "classes"},
        (*SCORED, "absent", "runs", "highest", "lowest", "frequent", "agreeing"),
    ),
    "cosine_loss": ({"0": "generic", "1": "generic", "2": "drawn"}, (*GENERIC[:-2], "near", *GENERIC[-2:])),
    "hinge": ({"0": "generic", "1": "drawn"}, GENERIC),
    "float_indices": ({"0": "generic", "1": "drawn"}, ZERO),
    "mean_of_lengths": ({"0": "generic", "1": "drawn"}, ZERO),
    "triangular": ({"0": "drawn", "1": "drawn"}, ()),
    "bucket": ({"0": "generic", "1": "unit"}, (*ZERO, "floor")),
    # The reference overflows on large values: a kernel that subtracts the maximum would be called wrong there.
    "naive_softmax": ({"0": "generic"}, ("integer", "sparse", "rectified", *MANY[7:], "alike", "biased", "empty")),
    "stable_softmax": ({"0": "generic"}, SCORED),
    # Equal probabilities add up to the limit, and rounding decides; so it does on which of them comes first.
    "nucleus": (
        {"0": "generic"},
        (*NO_TIES, "bumped", "uniform", "levels", "biased", "ordered", "leading", "climbing", "near", "deep"),
    ),
    "leaky": ({"0": "generic"}, ZERO),
    "half_softmax": ({"0": "generic"}, (*HALF, "peaks", "alike", "levels", "hoisted", "biased", "climbing", "empty")),
    # It overflows itself.
    # What is beyond fp16 is so for every kernel.
    "half_square": ({"0": "generic"}, (*HALF, "peaks", "alike", "levels", "hoisted", "biased")),
    "small_values_only": (
        {"0": "generic"},
        (
            "integer",
            "sparse",
            "rectified",
            "combed",
            "tails",
            "faint",
            "faded",
            "uniform",
            "alike",
            "biased",
            "ordered",
            "leading",
            "parted",
        ),
    ),
    # Exact integers tie: only declared indices are compared by what they point at.
    "largest": ({"0": "generic"}, (*CHOSEN, "leading", "parted", "deep")),
    "farthest": ({"0": "generic"}, (*CHOSEN, "leading", "parted", "deep")),
    # Of equal values any may be among the largest two.
    "largest_two": (
        {"0": "generic"},
        (*NO_TIES, "small", "faded", "bumped", "uniform", "levels", "biased", "ordered", "leading", "parted", "deep"),
    ),
    # Small values round to equal probabilities, but not in fp64.
    "largest_probability": (
        {"0": "generic"},
        (*NO_TIES, "faded", "bumped", "uniform", "levels", "biased", "ordered", "leading", "climbing", "deep"),
    ),
    "levels": (
        {"0": "generic"},
        (*NO_TIES, "small", "faded", "bumped", "uniform", "levels", "biased", "ordered", "deep", "halves 254"),
    ),
    # Rows without any length are NaN.
    "unit_rows": ({"0": "generic"}, (*MANY[:9], "small", *MANY[10:], "alike", "levels", "biased", "deep")),
    "declared_indices": ({"0": "generic"}, (*ZERO[:-1], "ordered", "leading", "parted", "deep")),
    # Halves are halves in any order of operations where none of them rounds.
    "sixteenths": (
        {"0": "generic"},
        (*OF_A_GRID, "levels", "biased", "deep", "halves 254"),
    ),
    "thirds": ({"0": "generic"}, (*NO_TIES, "small", "faded", "bumped", "uniform", "levels", "biased", "deep")),
    "above_their_mean": (
        {"0": "generic"},
        (*NO_TIES, "small", "faded", "bumped", "uniform", "levels", "biased", "deep"),
    ),
    # A place is no side: of two equal values either may come first.
    "buckets": (
        {"0": "generic", "1": "sorted"},
        (*OF_A_GRID, "edges", "levels", "biased", "deep", "skewed"),
    ),
    "order_beside_edges": (
        {"0": "generic", "1": "sorted"},
        (
            *NO_TIES,
            "small",
            "faded",
            "bumped",
            "uniform",
            "levels",
            "biased",
            "ordered",
            "leading",
            "parted",
            "deep",
            "skewed",
        ),
    ),
    "counts_beside_edges": (
        {"0": "generic", "1": "sorted"},
        (*NO_TIES, "small", "faded", "bumped", "uniform", "levels", "biased", "deep", "skewed"),
    ),
    "Binned": (
        {"0": "generic"},
        (*OF_A_GRID, "edges", "levels", "biased", "deep"),
    ),
    "restricted": ({"0": "generic"}, ()),
    "nested": ({"kw.x": "generic", "kw.many.0": "generic", "kw.many.1.deep": "generic"}, ZERO),
    "any_number": ({"0": "generic", "1": "generic", "2": "generic"}, ZERO),
}


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Domain]:
    root = tmp_path_factory.mktemp("domains")
    (root / "targets.py").write_text(TARGETS)
    found = {target.qualname: target for target in discover([Path(root)], root).targets}
    return lambda name: Subject(found[name], "cpu").domain


@pytest.mark.parametrize("name", list(EXPECTED))
def test_inputs_keep_their_meaning_each_by_itself(domain: Callable[[str], Domain], name: str) -> None:
    found = domain(name)
    others = ("normal", *OCCASIONS, "grouped", "below", "above", "tiny", "unbiased")  # chance decides, or the next test
    families = tuple(family for family in found.families("default") if family not in others)
    assert (found.structures("default"), families) == EXPECTED[name]


#: What each is for is said by ``families_of``.
WEIGHED = ("cross_entropy", "naive_softmax", "stable_softmax", "nucleus", "half_softmax", "largest_probability")
HOMOGENEOUS = (
    *("root_beside_a_product", "float_indices", "mean_of_lengths", "bucket", "leaky", "small_values_only", "farthest"),
    *("declared_indices", "nested", "any_number"),
)


def test_groups_sides_and_next_to_nothing_where_they_tell_something(domain: Callable[[str], Domain]) -> None:
    drawn = {name: set(domain(name).families("default")) for name in EXPECTED}
    assert {name for name, families in drawn.items() if "grouped" in families} == set(WEIGHED)
    assert {name for name, families in drawn.items() if {"below", "above"} & families} == {"nucleus"}
    assert {name for name, families in drawn.items() if "tiny" in families} == set(HOMOGENEOUS)


def test_what_is_drawn_from_a_normal_distribution_is_not_drawn_from_one_again(
    domain: Callable[[str], Domain],
) -> None:
    drawn = {name: "normal" in domain(name).families("default") for name in ("gaussian", "flat", "stable_softmax")}
    assert drawn == {"gaussian": False, "flat": True, "stable_softmax": True}  # of few values nobody knows


def test_a_big_call_asks_for_the_families_that_show_most(domain: Callable[[str], Domain]) -> None:
    assert domain("stable_softmax").families("default", 3) == ("shifted", "large", "integer")
    assert domain("naive_softmax").families("default", 3) == ("integer", "sparse", "rectified")


@pytest.mark.parametrize("name", ["single_only", "single_only_choice"])
def test_a_reference_that_refuses_fp64_loses_those_families_alone_that_ask_it(
    domain: Callable[[str], Domain], name: str
) -> None:
    families = domain(name).families("default")
    assert {"shifted", "large", "sparse"} <= set(families)
    assert not {"empty", "ties"} & set(families)


def test_out_of_range_values_may_be_kept_away_from_the_reference(domain: Callable[[str], Domain]) -> None:
    found = domain("hinge")
    assert found.structures("default", widen=False) == {"0": "unit", "1": "drawn"}
    assert found.families("default") == UNIT
