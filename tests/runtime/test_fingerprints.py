"""What tells a module's buffers from those a kernel was verified with."""

from __future__ import annotations

import pytest
import torch

from pytest_cudaforge.facts import from_json, to_json
from pytest_cudaforge.runtime.fingerprints import Fingerprint, fingerprint_of, is_alike


def _angles(base: float = 10000.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(512, dtype=dtype)[:, None] * base ** (-torch.arange(0, 64, 2, dtype=dtype) / 64)


def _causal(size: int = 64) -> torch.Tensor:
    return torch.full((size, size), float("-inf")).triu(1)


def _one_changed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[5, 21] = value
    return changed


ALIKE = {
    "itself": (_causal(), _causal().clone()),
    "strides": (_angles(), _angles().t().contiguous().t()),
    "another machine's rounding": (_angles().cos(), _angles(dtype=torch.float64).cos().float()),
    "no element": (torch.empty(0, 3), torch.empty(0, 3)),
    "one number": (torch.tensor(0.125), torch.tensor(0.125)),
    "zeros": (torch.zeros(4), -torch.zeros(4)),
    "bits": (torch.tensor([True, False]), torch.tensor([True, False])),
    "half": (_angles().cos().half(), _angles().cos().half()),
}
OTHER = {
    "base": (_angles().cos(), _angles(base=500000.0).cos()),
    "one element of a table": (_angles().cos(), _one_changed(_angles().cos(), 2.0)),
    "one infinity": (_causal(), _one_changed(_causal(), 0.0)),
    "nothing for an infinity": (_causal(), torch.zeros(64, 64)),
    "infinity and NaN": (_causal(), _causal().nan_to_num(neginf=float("nan"))),
    "sign": (_angles().cos(), -_angles().cos()),
    "order": (torch.arange(100.0), torch.arange(100.0).flip(0)),
    "one bit": (torch.zeros(64, 64, dtype=torch.bool), _one_changed(torch.zeros(64, 64, dtype=torch.bool), True)),
    "integers": (torch.arange(9), torch.arange(9).roll(1)),
    "shape": (torch.ones(4, 6), torch.ones(6, 4)),
    "longer": (_causal(64), _causal(65)),
    "zero": (torch.zeros(4), torch.full((4,), 1e-30)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_alike(name: str) -> None:
    then, now = ALIKE[name]
    assert is_alike(now, fingerprint_of(then))


@pytest.mark.parametrize("name", OTHER)
def test_other(name: str) -> None:
    then, now = OTHER[name]
    assert not is_alike(now, fingerprint_of(then))
    assert not is_alike(then, fingerprint_of(now))


def test_it_is_plain_data() -> None:
    found = fingerprint_of(_causal())
    assert from_json(Fingerprint, to_json(found)) == found


def test_signs_are_as_good_as_drawn() -> None:
    """Which place has which sign, for each sum: half of them each, and any two sums agree on half."""
    count = 4096
    one_each = torch.eye(count, dtype=torch.float32)
    signs = torch.tensor([fingerprint_of(one_each[place])[2][1:] for place in range(0, count, 8)])
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    together = signs.t() @ signs / len(signs)
    assert (together - torch.eye(len(together))).abs().max() < 0.2
    assert signs.mean(0).abs().max() < 0.2
