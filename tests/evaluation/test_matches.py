"""Rows of integers that another tensor has, and which tensors may."""

from __future__ import annotations

import torch

from pytest_cudaforge.evaluation.matches import matches_of, matching


def test_rows_are_those_of_what_is_known() -> None:
    codes, items = torch.randint(0, 16, (40, 64)), torch.randint(0, 16, (9, 64))
    leaves = {"0": codes, "1": torch.randn(40, 64)}
    matching(leaves, {"items": items}, torch.Generator().manual_seed(1))
    now = leaves["0"]
    alike = (now[:, None] == items).double().mean(-1).amax(-1)
    assert 10 < int((alike == 1).sum()) + int(((alike > 0.9) & (alike < 1)).sum()) < 30
    assert bool((alike == 1).any()) and bool(((alike > 0.9) & (alike < 1)).any())
    assert bool(((now == codes).all(-1) | (alike > 0.9)).all())
    assert codes is not now and list(leaves) == ["0", "1"]


def test_who_has_no_such_rows_has_no_matches() -> None:
    codes = torch.randint(0, 16, (40, 64))
    for other in (codes.int(), codes[:, :32], codes + 1, codes[0], codes.float()):
        assert not matches_of({"0": codes}, {"other": other})
    assert set(matches_of({"0": codes, "1": codes.flip(0)}, {})) == {"1"}
    assert not matches_of({"0": codes[:, :4], "1": codes[:, :4], "2": 3}, {})
