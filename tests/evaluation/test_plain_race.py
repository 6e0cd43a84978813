"""Plain modules against their merge base, on the CPU: real processes, and slowdowns of which no luck decides."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from known_ceilings import cache_with_ceilings

from pytest_cudaforge.discovery import discover
from pytest_cudaforge.errors import ConfigError, TargetError
from pytest_cudaforge.evaluation.evaluator import Evaluator, EvaluatorSettings
from pytest_cudaforge.records import Race, Target, from_json, to_json

LAYERS = """
import torch
from torch import nn

from pack import ops
from pytest_cudaforge import forge_target


def rows(count):
    return lambda: [torch.randn(count, 32)]


@forge_target(guard=True, grad=True, init=lambda: [32], {inputs})
class Scale(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features))
        {more}

    def forward(self, x):
        return ops.scaled(x, self.weight)
"""
SCALED = "def scaled(x, weight):\n    return x * weight\n"
#: Twelve times the calls, and so a result that rounding tells apart from the other within the tolerance.
SLOW = """
def scaled(x, weight):
    for _ in range(12):
        y = (x / 3) * (weight * 3)
    return y
"""


def version(root: Path, text: str = SCALED, *, inputs: str = "inputs=rows(8)", more: str = "pass") -> Target:
    """``Scale`` in a checkout of its own, in a package whose name both versions have; its ``ops.py`` has ``text``."""
    package = root / "src" / "pack"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text(LAYERS.format(inputs=inputs, more=more))
    (package / "ops.py").write_text(text)
    return discover([root], root).targets[0]


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Evaluator]:
    cache = cache_with_ceilings(tmp_path_factory.mktemp("cache"))
    with Evaluator(EvaluatorSettings(cache_dir=cache, lock_dir=cache)) as opened:
        yield opened


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return version(tmp_path_factory.mktemp("base") / "repo")


def race(evaluator: Evaluator, head: Target, base: Target) -> tuple[Race, ...]:
    return evaluator.race_modules(head, base, processes=1, budget_s=0.05)


def slowdown(found: Race) -> float:
    return statistics.median(dict(block.ns)["candidate"] / dict(block.ns)["base"] for block in found.blocks)


def test_a_slowdown_in_an_imported_file_shows_with_its_gradients(
    evaluator: Evaluator, base: Target, tmp_path: Path
) -> None:
    races = evaluator.race_modules(version(tmp_path / "head", SLOW), base, processes=2, budget_s=0.1)

    assert [(one.workload, one.what, one.clock) for one in races] == [
        ("default", "forward", "supervisor"),
        ("default", "backward", "supervisor"),
    ]
    for found in races:
        assert {block.process for block in found.blocks} == {0, 1}
        assert all([party for party, _ in block.ns] == ["candidate", "base"] for block in found.blocks)
        assert slowdown(found) > 1.5
        # Same values in, and the same results within the tolerance: nothing to note.
        assert not found.notes
        assert from_json(Race, to_json(found)) == found
    assert [name for name, _ in races[0].spent] == ["starting", "facts", "values", "blocks"]


def test_values_are_the_merge_base_s_and_other_results_are_a_note(
    evaluator: Evaluator, base: Target, tmp_path: Path
) -> None:
    """Inputs and weights that the head draws otherwise are replaced; then only what it computes makes a difference."""
    drawn = "inputs=lambda: [torch.rand(8, 32)]"
    other = version(tmp_path / "drawn", inputs=drawn, more="nn.init.normal_(self.weight)")
    forward, _ = race(evaluator, other, base)
    assert forward.blocks
    assert forward.notes == (
        "weights and inputs of the merge base's version were given to the other, which makes others",
    )

    changed = version(tmp_path / "changed", SCALED.replace("x * weight", "x * weight + 1"))
    forward, _ = race(evaluator, changed, base)
    assert forward.blocks
    assert forward.notes[0].startswith("results changed beyond the tolerance: out")


def test_another_workload_is_not_compared(evaluator: Evaluator, tmp_path: Path) -> None:
    before = version(tmp_path / "base", inputs="workloads={'same': rows(8), 'wide': rows(8)}")
    now = version(tmp_path / "head", inputs="workloads={'same': rows(8), 'wide': rows(16), 'new': rows(8)}")

    found = {(one.workload, one.what): one for one in race(evaluator, now, before)}
    assert found["same", "forward"].blocks
    wide, new = found["wide", "backward"], found["new", "forward"]
    assert not wide.blocks and "float32[8, 32] at the merge base, 0: float32[16, 32] now" in wide.disturbed
    assert not new.blocks and "new since the merge base" in new.disturbed
    with pytest.raises(ConfigError, match="no workload 'narrow'"):
        evaluator.race_modules(now, before, workloads=["narrow"])


def test_a_base_that_does_not_run_is_said_and_a_head_that_does_not_is_an_error(
    evaluator: Evaluator, base: Target, tmp_path: Path
) -> None:
    broken = version(tmp_path / "broken", "from nowhere import scaled\n")
    (found,) = race(evaluator, base, broken)
    assert (found.workload, found.blocks) == ("", ())
    assert "the version at the merge base cannot be run here" in found.disturbed and "nowhere" in found.disturbed

    with pytest.raises(TargetError, match="nowhere"):
        race(evaluator, broken, base)
    # One that takes its process with it.
    fatal = version(tmp_path / "fatal", "import os\nos._exit(3)\n")
    with pytest.raises(TargetError, match="ended the process"):
        race(evaluator, fatal, base)


def test_a_guard_that_is_no_literal_is_asked_of_the_file_itself(evaluator: Evaluator, tmp_path: Path) -> None:
    path = tmp_path / "layers.py"
    path.write_text(
        "from pytest_cudaforge import forge_target\nYES, NO = True, False\n"
        "@forge_target(guard=YES)\ndef yes(x):\n    return x\n\n@forge_target(guard=NO)\ndef no(x):\n    return x\n"
    )
    yes, no = discover([path], tmp_path).targets
    assert yes.guard is no.guard is None
    assert evaluator.guarded(yes) and not evaluator.guarded(no)


def test_an_editable_install_of_the_head_is_not_what_the_base_imports(tmp_path: Path) -> None:
    """The environment knows the head's checkout; the other version's process finds its own files all the same."""
    for name in ("head", "base"):
        package = tmp_path / name / "src" / "pack"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"NAME = {name!r}\n")
        (package / "ops.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / "single.py").write_text(f"NAME = {name!r}\n")
    program = (
        "import sys; from pytest_cudaforge.evaluation.relocation import relocate; "
        f"relocate({str(tmp_path / 'head')!r}, {str(tmp_path / 'base')!r}, '', ''); "
        "import pack.ops, single, json; print(pack.NAME, pack.ops.NAME, single.NAME, json.__name__)"
    )
    paths = os.pathsep.join([*(str(tmp_path / "head" / part) for part in ("src", "")), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["base", "base", "base", "json"], done.stderr


def test_a_package_that_is_installed_and_checked_out_is_named(tmp_path: Path) -> None:
    site = tmp_path / "site-packages" / "pack"
    checked_out = tmp_path / "repo" / "src" / "pack"
    for folder in (site, checked_out):
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
    program = (
        f"import sys; sys.path.insert(0, {str(site.parent)!r}); import pack; "
        "from pytest_cudaforge.evaluation.relocation import installed_copies; "
        f"print(installed_copies({str(tmp_path / 'repo')!r}, {str(tmp_path / 'repo')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "['pack']", done.stderr
