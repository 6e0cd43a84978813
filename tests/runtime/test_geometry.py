"""Views as arithmetic, against torch itself over random shapes and chains of views."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pytest_cudaforge.errors import PlanError
from pytest_cudaforge.runtime import geometry
from pytest_cudaforge.runtime.geometry import Layout

Step = tuple[Callable[[torch.Tensor], Any], Callable[[Layout], Any]]


def layout_of(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def view_step(pick: random.Random, tensor: torch.Tensor) -> Step:
    sizes, left = [], tensor.numel()
    while left > 1 and len(sizes) < 4:
        sizes.append(pick.choice([d for d in range(1, left + 1) if left % d == 0]))
        left //= sizes[-1]
    sizes.append(left)
    if pick.random() < 0.4:
        sizes[pick.randrange(len(sizes))] = -1
    return (lambda t: t.view(sizes)), (lambda a: geometry.viewed(a, tuple(sizes), "view"))


def index_step(pick: random.Random, tensor: torch.Tensor) -> Step:
    def part() -> Any:
        bound = slice(pick.choice([None, -2, 0, 1, 5]), pick.choice([None, -1, 2, 9]), pick.choice([None, 1, 2, 3]))
        return pick.choice([None, pick.randint(-3, 3), bound, slice(None)])

    parts = [part() for _ in range(pick.randint(0, tensor.dim() + 1))]
    if pick.random() < 0.4:
        parts.insert(pick.randint(0, len(parts)), Ellipsis)
    key = tuple(parts)
    return (lambda t: t[key]), (lambda a: geometry.indexed(a, key))


def expand_step(pick: random.Random, tensor: torch.Tensor) -> Step:
    sizes = [
        pick.choice([-1, 2, 3]) if size == 1 or pick.random() < 0.2 else pick.choice([-1, size])
        for size in tensor.shape
    ]
    sizes = [2] * pick.randint(0, 1) + sizes
    return (lambda t: t.expand(sizes)), (lambda a: geometry.expanded(a, tuple(sizes)))


def dims_step(pick: random.Random, tensor: torch.Tensor) -> Step:
    rank = tensor.dim()
    a, b, c = pick.randint(-rank - 1, rank), pick.randint(-rank - 1, rank), pick.randint(1, 4)
    order = pick.sample(range(rank), rank)
    steps: list[Step] = [
        (lambda t: t.transpose(a, b), lambda x: geometry.transposed(x, a, b)),
        (lambda t: t.permute(order), lambda x: geometry.permuted(x, tuple(order))),
        (lambda t: t.squeeze(), lambda x: geometry.squeezed(x, None)),
        (lambda t: t.squeeze(a), lambda x: geometry.squeezed(x, (a,))),
        (lambda t: t.unsqueeze(a), lambda x: geometry.unsqueezed(x, a)),
        (lambda t: t.view(t.flatten(a, b).shape), lambda x: geometry.flattened(x, a, b)),
        (lambda t: t.narrow(a, b, c), lambda x: geometry.narrowed(x, a, b, c)),
        (lambda t: t.split(c, a)[-1], lambda x: geometry.split(x, c, a)[-1]),
        (lambda t: t.chunk(c, a)[-1], lambda x: geometry.chunked(x, c, a)[-1]),
    ]
    return pick.choice(steps)


def attempt(action: Callable[[Any], Any], value: Any, errors: tuple[type[Exception], ...]) -> Any:
    try:
        return action(value)
    except errors:
        return None


@pytest.mark.parametrize("seed", range(8))
def test_every_view_is_torchs(seed: int) -> None:
    pick = random.Random(seed)
    checked = 0
    for trial in range(250):
        sizes = [1, 2, 3, 4, 6, 0] if trial % 5 == 0 else [1, 2, 3, 4, 6]
        tensor = torch.empty([pick.choice(sizes) for _ in range(pick.randint(0, 4))])
        for _ in range(pick.randint(1, 4)):
            torchs, ours = pick.choice([view_step, index_step, expand_step, dims_step, dims_step])(pick, tensor)
            expected = attempt(torchs, tensor, (RuntimeError, IndexError, ValueError))
            found = attempt(ours, layout_of(tensor), (PlanError,))
            assert (expected is None) == (found is None), (layout_of(tensor), expected, found)
            if expected is None:
                continue
            checked += 1
            assert found.shape == tuple(expected.shape)
            if expected.numel():
                assert found.offset == expected.storage_offset()
                for mine, theirs, size in zip(found.strides, expected.stride(), found.shape, strict=True):
                    assert mine == theirs or size == 1  # the stride of a dimension of one element means nothing
            tensor = expected if expected.numel() <= 5000 else tensor
    assert checked > 200


def test_contiguity_is_torchs() -> None:
    pick = random.Random(3)
    for _ in range(500):
        shape = [pick.choice([0, 1, 2, 3]) for _ in range(pick.randint(0, 4))]
        tensor = torch.empty(shape).permute(pick.sample(range(len(shape)), len(shape)))
        assert layout_of(tensor).contiguous == tensor.is_contiguous()
