"""What a kernel left unwritten is told by what the buffer held before, for every dtype and both patterns."""

from __future__ import annotations

import pytest
import torch

from pytest_cudaforge.evaluation.cases import _PATTERNS
from pytest_cudaforge.evaluation.poison import POISON, ZONES, unwritten
from pytest_cudaforge.evaluation.regions import Header, RedZones

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int16]
DTYPES += [torch.bool, torch.uint8, torch.float8_e4m3fn]


def _filled(reference: torch.Tensor, rows: slice, poison: int) -> torch.Tensor:
    candidate = reference.clone()
    raw = candidate.view(torch.uint8)
    raw[rows] = poison
    return candidate


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_left_as_they_were_are_counted(dtype: torch.dtype, poison: int) -> None:
    reference = torch.arange(12).remainder(2).reshape(4, 3).to(dtype)
    (found,) = unwritten("out", _filled(reference, slice(2, 4), poison), reference, poison, "rows from 2 to the end")
    assert found.detail.startswith("never written: 6 of 12 elements still hold what was there before the call")
    assert (found.index, found.pattern) == ((2, 0), "rows from 2 to the end")
    assert found.kind == ("values" if dtype.is_floating_point or dtype.is_complex else "integer")
    assert ("NaN" in found.detail) == (dtype.is_floating_point and poison == 0xFF)


def test_a_value_that_was_meant_is_not_called_unwritten() -> None:
    reference = torch.tensor([[1, -1, 3, 4]])
    assert unwritten("out", torch.tensor([[1, -1, 3, 5]]), reference, 0xFF) == []
    assert unwritten("out", torch.tensor([[-1, -1, 3, 5]]), reference, 0xFF) == []
    assert unwritten("out", reference.float(), reference, 0xFF) == []
    nan = torch.full((4,), float("nan"))
    assert unwritten("out", nan, torch.ones(4), 0xFF) == []


def test_one_element_and_none() -> None:
    reference = torch.tensor(3.0)
    candidate = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    (found,) = unwritten("out", candidate, reference, 0xFF)
    assert found.index == ()
    assert unwritten("out", torch.empty(0), torch.empty(0), 0xFF) == []


def test_trials_use_every_pattern() -> None:
    assert len(ZONES) == _PATTERNS and len(ZONES) % len(POISON) == 0


@pytest.mark.parametrize("kind", ["heap", "mapped"])
def test_before_a_buffer_lies_what_malloc_writes_there(kind: Header) -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    zones = RedZones(memory, [(0, 256), (356, 156), (912, 112)], [(256, 100), (512, 400)])
    zones.write(kind)
    assert not zones.changed() and bool((memory[256:356] == 0).all()) and bool((memory[912:] == 0xFF).all())
    sizes = [int(memory[at - 8 : at].view(torch.int64)) for at in (256, 512)]
    assert sizes == ([112 | 1, 416 | 1] if kind == "heap" else [4048 | 2] * 2)
    memory[255] = 7
    assert zones.changed() == [0]
