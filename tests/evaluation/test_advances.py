"""Calls before a later one: how many of them are made in time."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pytest_cudaforge.evaluation.advances import _one_thread_for  # noqa: E402


@pytest.mark.parametrize(("elements", "alone"), [(64, True), (1 << 20, False)])
def test_small_calls_wait_for_no_team_of_threads(elements: int, alone: bool) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError, match="in a call"), _one_thread_for({"0": torch.empty(elements), "1": 5}):
            assert torch.get_num_threads() == (1 if alone else 3)
            raise RuntimeError("in a call")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
