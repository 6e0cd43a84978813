"""Honest modules of many kinds are accepted, on a CPU."""

from __future__ import annotations

import pytest
from honest_cases import HonestCase, honest_cases
from honest_evaluators import Opened, opened, require_accepted

__all__ = ["opened"]


@pytest.mark.parametrize("case", honest_cases("module"), ids=lambda case: case.name)
def test_an_honest_module_is_accepted(case: HonestCase, opened: Opened) -> None:
    require_accepted(case, opened)
