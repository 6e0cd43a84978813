"""Probes with other sizes: none that leaves integers pointing behind a dimension, none that ends the evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from judged_targets import find

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation import verification
from pytest_cudaforge.evaluation.oracle import OracleClient
from pytest_cudaforge.evaluation.variants import OTHER, apply_variant, fixed_names, neighbour_names

TARGETS = """
import torch
from pytest_cudaforge import forge_target

def classes():
    return [torch.randn(64, 16), torch.randint(0, 16, (64,))]

@forge_target(inputs=classes)
def loss(x, classes):
    return torch.nn.functional.cross_entropy(x, classes)

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

@forge_target(inputs=lambda: [torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(6, 5)])
def mixed(image, weight, right):
    return torch.nn.functional.conv2d(image, weight) @ right
"""


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
    ("integers", "names"),
    [
        (torch.randint(0, 16, (64,)), ["size 64 -> 63", "size 64 -> 131"]),  # class numbers: the classes stay
        (torch.tensor([0, 1, 15] * 21 + [0]), ["size 64 -> 63", "size 64 -> 131"]),
        (torch.arange(64), ["size 16 -> 15", "size 16 -> 83"]),  # places in the batch, or anything else of 64
        (
            torch.full((64,), 5000),
            ["size 64 -> 63", "size 16 -> 15", "size 64 -> 131"],
        ),  # tokens of a vocabulary: neither dimension
        (torch.zeros(0, dtype=torch.int64), ["size 64 -> 63", "size 16 -> 15", "size 64 -> 131"]),
        (torch.ones(64, dtype=torch.bool), ["size 64 -> 63", "size 16 -> 15", "size 64 -> 131"]),
    ],
)
def test_sizes_that_integers_may_point_into_are_left_alone(integers: torch.Tensor, names: list[str]) -> None:
    assert list(neighbour_names((torch.randn(64, 16), integers), {})) == names


def test_class_numbers_stay_below_the_number_of_classes(oracle: OracleClient, repo: Path) -> None:
    names = [name for name, _ in oracle.variants(find(repo, "::loss"), "default")]
    assert names == ["strided", "size 64 -> 63", "size 64 -> 131"]


def test_a_size_that_costs_the_device_costs_its_probe_only(oracle: OracleClient, repo: Path) -> None:
    oracle.request("hello")
    before = oracle.pid
    assert [name for name, _ in oracle.variants(find(repo, "::square_only"), "default")] == ["strided"]
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


def test_where_any_size_is_promised_every_size_grows() -> None:
    assert [n for n in neighbour_names((torch.randn(64, 16),), {}, dynamic=True) if n.endswith(("131", "83"))] == [
        "size 64 -> 131",
        "size 16 -> 83",
    ]


def test_an_input_that_is_always_the_same_gets_other_values() -> None:
    mask = torch.ones(3, 5, dtype=torch.bool).tril(1)
    calls = [((torch.randn(3, 5),), {"mask": mask, "scale": torch.ones(4), "count": 3}) for _ in range(2)]
    assert list(fixed_names(*calls)) == [f"{OTHER}kw.mask"]
    (x,), kwargs = apply_variant(f"{OTHER}kw.mask", *calls[0])
    assert torch.equal(x, calls[0][0][0])
    assert torch.equal(kwargs["mask"].sum(1), mask.sum(1)) and not torch.equal(kwargs["mask"], mask)


def test_the_supervisor_knows_variants_of_other_values_by_the_same_name() -> None:
    assert verification._OTHER == OTHER
