"""Which circumstances concern which candidates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_cudaforge.evaluation.checks import CHECKS, checks_for


def _names(module: bool, kind: str, mutates: bool = False, big: bool = False) -> list[str]:
    product: Any = SimpleNamespace(traced=SimpleNamespace(main=SimpleNamespace(steps=() if module else ("launch",))))
    return [check.name for check in checks_for(product, kind, mutates=mutates, big=big)]


def test_names_are_told_apart() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("module", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_call_of_gigabytes_is_looked_at_for_what_it_leaves_alone(module: bool, kind: str) -> None:
    assert _names(module, kind, big=True) == ["left behind", "left running"]


def test_plans_and_modules_have_checks_of_their_own() -> None:
    assert {"beside", "thread counts", "aged", "guarded"} <= set(_names(False, "cpu"))
    assert not {"beside", "aged", "crowded"} & set(_names(True, "cpu"))
    assert {"thread counts", "in another thread"} <= set(_names(True, "cpu"))
    assert {"crowded", "aged", "edges"} <= set(_names(False, "cuda"))
    assert {"kept answers", "instances", "shortcuts", "still written"} <= set(_names(True, "cuda"))
    assert not {"kept answers", "instances", "shortcuts", "still written"} & set(_names(False, "cuda"))


def test_where_the_reference_writes_values_many_calls_are_judged_as_well() -> None:
    assert "beside" in _names(False, "cpu", mutates=True)
    assert {"repeated", "changed", "in a row", "aged"} <= set(_names(False, "cpu", mutates=True))
    assert {"instances", "weights one by one", "kept answers"} <= set(_names(True, "cpu", mutates=True))
    assert {"later calls", "sealed", "guarded", "thread counts"} <= set(_names(False, "cpu", mutates=True))


def test_a_configuration_of_the_compiler_has_no_code_of_its_own() -> None:
    product: Any = SimpleNamespace(traced=SimpleNamespace(main=SimpleNamespace(steps=())))
    found = checks_for(product, "cuda", mutates=False, big=False, own_code=False)
    names = {check.name for check in found}
    assert {"repeated", "kept answers", "changed", "left behind"} <= names
    assert not names & {"in another thread", "in training", "inference mode", "instances", "after an empty call"}
