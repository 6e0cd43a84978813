"""Forging for some of a target's workloads: which they are, and where nothing fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flow_records import make_facts, make_target

from pytest_cudaforge.errors import TargetError
from pytest_cudaforge.evaluation.workloads import matching
from pytest_cudaforge.publishing import variant_of
from pytest_cudaforge.records import TargetFacts


def _facts(root: Path) -> TargetFacts:
    facts = make_facts(make_target(root))
    return replace(facts, workloads=tuple(replace(facts.workloads[0], name=n) for n in ("half", "half-long", "long")))


@pytest.mark.parametrize(
    ("patterns", "names"),
    [(("half",), ["half"]), (("half*",), ["half", "half-long"]), (("long", "half"), ["half", "long"])],
)
def test_a_pattern_chooses_workloads(tmp_path: Path, patterns: tuple[str, ...], names: list[str]) -> None:
    chosen = matching(_facts(tmp_path), patterns)
    assert [workload.name for workload in chosen.workloads] == names and chosen.chosen


def test_all_of_them_are_no_choice(tmp_path: Path) -> None:
    facts = _facts(tmp_path)
    assert matching(facts, ("*",)) == matching(facts, None) == facts
    assert variant_of(facts) == ""
    assert variant_of(matching(facts, ("half", "long"))) == variant_of(matching(facts, ("long", "half")))
    assert variant_of(matching(facts, ("half",))) != variant_of(matching(facts, ("half*",)))


def test_a_pattern_that_fits_nothing_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no workload like bf16") as caught:
        matching(_facts(tmp_path), ("bf16",))
    assert "half, half-long, long" in str(caught.value)
