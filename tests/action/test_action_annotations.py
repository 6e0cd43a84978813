"""Where the guard's remarks stand, and that the worst of them are shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import guard_records as made
import pytest
from cudaforge_action.annotations import Places, limited, remarks
from cudaforge_action.guard_result import GuardResult
from cudaforge_action.records import GuardRun
from guard_records import ABSENT, ODD, SAME, SLOW, STALE, WRONG, result

from pytest_cudaforge.guarded import Change


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A checkout with a target each, below a folder of its own."""
    top = tmp_path / "repo"
    (top / "pkg/forged/slow-3f9a1c/cpu").mkdir(parents=True)
    (top / "pkg/layers.py").write_text("\n\n" + made.LAYERS.format(name="Slow"))
    (top / "pkg/forged/slow-3f9a1c/cpu/plan.py").write_text("pass\n")
    (top / "cudaforge.yaml").write_text("trials: 1\n")
    (tmp_path / "outside.py").write_text(made.LAYERS.format(name="Slow"))
    return top


def test_a_remark_stands_on_the_targets_line_wherever_rootdir_is(repo: Path) -> None:
    assert Places(repo, repo / "pkg").of(SLOW) == ("pkg/layers.py", 8)
    # Rootdir above: ids count from there, a target's own from the folder that its kernels lie in.
    there = replace(SLOW, id=f"pkg/{SLOW.id}")
    assert Places(repo, repo).of(there) == ("pkg/layers.py", 8)
    assert Places(repo, repo / "pkg").of(replace(there, target="pkg/layers.py::Slow")) == ("pkg/layers.py", 8)


def test_without_a_target_it_stands_on_the_kernel_and_without_that_nowhere(repo: Path) -> None:
    assert Places(repo, repo / "pkg").of(replace(SLOW, target="layers.py::Gone")) == (
        "pkg/forged/slow-3f9a1c/cpu/plan.py",
        1,
    )
    assert Places(repo, repo).of(WRONG) == ("", 0)


@pytest.mark.parametrize(
    "name", ["../outside.py", "/etc/passwd", "a\0b", "x" * 5_000, "", made.HOSTILE, "pkg/../../outside.py", "link.py"]
)
def test_nothing_leads_out_of_the_checkout(repo: Path, name: str) -> None:
    (repo / "link.py").symlink_to(repo.parent / "outside.py")
    astray = replace(SLOW, id=f"{name}::guard[default]", target=f"{name}::Slow")
    assert Places(repo, repo).of(astray) == ("", 0)


def test_levels_and_what_is_worth_a_remark(repo: Path) -> None:
    changes = (Change("cudaforge.yaml", "trials", "5", "1"), Change("conftest.py", "its text", "a", "b", True))
    told = result(SAME, ABSENT, STALE, ODD, SLOW, WRONG, status=1, changes=changes, removed=("layers.py::Gone",))
    found = remarks(told, Places(repo, repo / "pkg"))
    assert [(one.level, one.title.partition(":")[0], one.path) for one in found] == [
        ("error", "Forged kernel is wrong", ""),
        ("error", "Slower than before", "pkg/layers.py"),
        ("warning", "Could not be decided", ""),
        ("notice", "Not checked", ""),
        ("notice", "2 not checked", ""),
        ("warning", "Removed kernels", ""),
        ("notice", "The guard goes by the merge base", "cudaforge.yaml"),
        ("notice", "Changed beside the kernels", ""),
    ]
    assert "layers.py::Slow [default]" in found[1].title and "25.0 % slower" in found[1].message
    (blind,) = remarks(result(ABSENT), Places(repo, repo))
    assert (blind.level, blind.title) == ("warning", "Nothing was checked") and "no GPU is here" in blind.message
    strict = remarks(result(ODD, strict=True, status=1), Places(repo, repo))
    assert [one.level for one in strict] == ["error"]


def test_an_error_is_the_first_remark(repo: Path) -> None:
    (one,) = remarks(GuardResult(GuardRun("error", 4, error="x" * 9_999 + "fetch-depth: 0")), Places(repo, repo))
    assert one.level == "error" and one.message.endswith("fetch-depth: 0") and len(one.message) < 4_000


def test_ten_of_a_level_with_the_worst_and_how_many_more(repo: Path) -> None:
    told = made.hostile(100)
    shown = limited(remarks(told, Places(repo, repo)), "the summary")
    assert [one.level for one in shown] == ["error"] * 9 + ["warning"] * 9 + ["notice"]
    assert shown[0].title.startswith("Forged kernel is wrong") and shown[8].title == "and 42 more"
    assert "see the summary" in shown[8].message and all(len(one.message) < 4_000 for one in shown)
    assert len(limited(remarks(result(WRONG, status=1), Places(repo, repo)), "x")) == 1
