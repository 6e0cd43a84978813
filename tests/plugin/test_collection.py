"""What `pytest --forge` and plain `pytest` collect; nothing is forged here."""

from __future__ import annotations

import subprocess
import sys

import pytest

LAYERS = """
import torch
from torch import nn
from pytest_cudaforge import forge_target

@forge_target(inputs=lambda: [torch.randn(4, 8)])
class RMSNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

class Outer:
    @forge_target(inputs=lambda: [torch.randn(4, 8)])
    class Inner(nn.Module):
        def forward(self, x):
            return x + 1
"""
BROKEN = """
from pytest_cudaforge import forge_target

@forge_target
class Plain: ...

@forge_target
class Twice(Base): ...

@forge_target
class Twice(Base): ...

@forge_target(inptus=list)
class Typo(Base): ...
"""
NEVER_IMPORTED = "raise SystemExit('this file was imported')\n"
XDIST = pytest.mark.parametrize("xdist", [(), ("-n", "2")], ids=["alone", "xdist"])


@pytest.fixture
def repo(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repo with targets in a package, its own tests, and files that must not be imported."""
    pytester.makeini("[pytest]\ntestpaths = tests\n")
    package = pytester.mkpydir("pkg")
    (package / "__init__.py").write_text(NEVER_IMPORTED)
    (package / "layers.py").write_text(NEVER_IMPORTED + LAYERS)
    tests = pytester.mkdir("tests")
    (tests / "test_own.py").write_text("def test_own(): pass\n")
    return pytester


def collected(repo: pytest.Pytester, *options: str) -> list[str]:
    result = repo.runpytest_inprocess("--collect-only", "-q", *options)
    return [line for line in result.outlines if "::" in line]


BOTH = ["pkg/layers.py::RMSNorm::forge", "pkg/layers.py::Outer.Inner::forge"]


def test_forge_collects_forge_items_only(repo: pytest.Pytester) -> None:
    (repo.path / "tests" / "test_own.py").write_text(NEVER_IMPORTED)
    assert collected(repo, "--forge") == BOTH


def test_plain_pytest_collects_no_forge_item(repo: pytest.Pytester) -> None:
    assert collected(repo) == ["tests/test_own.py::test_own"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("pkg",), BOTH),
        (("pkg/layers.py",), BOTH),
        (("pkg/layers.py::RMSNorm",), BOTH[:1]),
        (("pkg/layers.py::RMSNorm::forge",), BOTH[:1]),
        (("pkg/layers.py::Outer.Inner",), BOTH[1:]),
        (("pkg", "pkg/layers.py"), BOTH),
        (("tests",), []),
        (("-k", "RMSNorm"), BOTH[:1]),
        (("-k", "not inner"), BOTH[:1]),
        (("-m", "cudaforge"), BOTH),
        (("-m", "not cudaforge"), []),
        (("--ignore", "pkg/layers.py"), []),
        (("--deselect", "pkg/layers.py::RMSNorm"), BOTH[1:]),
    ],
)
def test_selection(repo: pytest.Pytester, arguments: tuple[str, ...], expected: list[str]) -> None:
    assert collected(repo, "--forge", *arguments) == expected


def test_from_a_subfolder_ids_stay_relative_to_rootdir(repo: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo.path / "pkg")
    assert collected(repo, "--forge") == BOTH
    assert collected(repo, "--forge", "layers.py::RMSNorm") == BOTH[:1]


def test_forge_paths_of_the_ini_file(repo: pytest.Pytester) -> None:
    other = repo.mkdir("other")
    (other / "more.py").write_text(LAYERS)
    repo.makeini("[pytest]\nforge_paths = other\n")
    assert collected(repo, "--forge") == [line.replace("pkg/layers", "other/more") for line in BOTH]
    assert collected(repo, "--forge", "pkg") == BOTH


def test_forge_paths_of_the_configuration(repo: pytest.Pytester) -> None:
    other = repo.mkdir("other")
    (other / "more.py").write_text(LAYERS)
    (repo.path / "cudaforge.yaml").write_text("forge_paths: [other]\n")
    assert collected(repo, "--forge") == [line.replace("pkg/layers", "other/more") for line in BOTH]


def test_a_symbolic_link_as_rootdir(repo: pytest.Pytester) -> None:
    link = repo.path.parent / (repo.path.name + "-link")
    link.symlink_to(repo.path)
    result = repo.run(
        sys.executable, "-m", "pytest", "--forge", "--collect-only", "-q", "--rootdir", link, link / "pkg"
    )
    assert [line for line in result.outlines if "::" in line] == BOTH


def test_package_names(repo: pytest.Pytester) -> None:
    result = repo.runpytest_subprocess("--forge", "--collect-only", "-q", "-o", "pythonpath=.", "--pyargs", "pkg")
    assert [line for line in result.outlines if "::" in line] == BOTH


def test_unknown_names_and_paths(repo: pytest.Pytester) -> None:
    result = repo.runpytest_inprocess("--forge", "pkg/layers.py::Nothing")
    result.stderr.fnmatch_lines(["*not found: *pkg/layers.py::Nothing*"])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert repo.runpytest_inprocess("--forge", "nowhere").ret == pytest.ExitCode.USAGE_ERROR


def test_no_target_at_all(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_own(): pass")
    assert pytester.runpytest_inprocess("--forge").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_kernelbench_file_given(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(swish="class Model(M): ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n")
    assert collected(pytester, "--forge", "swish.py") == ["swish.py::Model::forge"]
    assert collected(pytester, "--forge") == []


def test_switched_off(repo: pytest.Pytester) -> None:
    result = repo.runpytest_subprocess("-p", "no:cudaforge", "--forge")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*unrecognized arguments: --forge*"])


@XDIST
def test_problems_are_failing_items(pytester: pytest.Pytester, xdist: tuple[str, ...]) -> None:
    pytester.makepyfile(broken=BROKEN, syntax="from pytest_cudaforge import forge_target\ndef (:")
    result = pytester.runpytest_subprocess("--forge", "-v", *xdist)
    result.assert_outcomes(failed=4)
    output = result.stdout.str()
    for line in (
        "broken.py:4: Plain is not an nn.Module",
        "broken.py:7: Twice is marked more than once (lines 7, 10)",
        "did you mean 'inputs'?",
        "syntax.py:2: not valid Python",
    ):
        assert line in output
    assert "Traceback" not in output and "items.py" not in output
    for name in ("broken.py::Plain::forge", "broken.py::Twice::forge", "syntax.py::forge"):
        assert name in output


def test_first_failure_stops_and_last_failed_comes_back(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(broken=BROKEN)
    pytester.runpytest_inprocess("--forge", "-x").assert_outcomes(failed=1)
    result = pytester.runpytest_inprocess("--forge", "--lf", "-v")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["broken.py::Plain::forge FAILED*"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--forge-rounds", "many"), "rounds"),
        (("--forge-device", "tpu"), "device"),
        (("--forge-config", "nowhere.yaml"), "nowhere.yaml does not exist"),
        (("--forge-isolation", "maybe"), "isolation"),
        (("--forge-profile", "sometimes"), "profile"),
        (("--forge-max-usd", "-1"), "max_usd"),
    ],
)
def test_wrong_settings_are_usage_errors(repo: pytest.Pytester, options: tuple[str, ...], message: str) -> None:
    result = repo.runpytest_inprocess("--forge", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str() and "Traceback" not in result.stderr.str()


def test_a_configuration_is_looked_for_where_its_path_was_typed(repo: pytest.Pytester) -> None:
    """Not beside the targets, where the search for the nearest one begins."""
    (repo.path / "my.yaml").write_text("rounds: none of them\n")
    result = repo.runpytest_inprocess("--forge", "--forge-config", "my.yaml", "pkg/layers.py")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "my.yaml" in result.stderr.str() and "does not exist" not in result.stderr.str()
    assert "rounds" in result.stderr.str()


def test_marker_is_registered(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_inprocess("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.cudaforge:*"])


def test_plain_pytest_imports_next_to_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_light="""
        import sys
        def test_light():
            ours = {name for name in sys.modules if name.startswith("pytest_cudaforge")}
            assert ours == {"pytest_cudaforge", "pytest_cudaforge.plugin"}
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_importing_the_plugin_is_light() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import pytest_cudaforge.plugin\n"
        "heavy = {'torch', 'openai', 'yaml', 'asyncio', 'rich', 'numpy'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_configuration_nearest_to_the_paths_given(repo: pytest.Pytester) -> None:
    (repo.path / "pkg" / "cudaforge.yaml").write_text("rounds: none\n")
    result = repo.runpytest_subprocess("--forge", "--collect-only", "-q", "pkg/layers.py")
    result.stderr.fnmatch_lines(["*pkg/cudaforge.yaml:1*"])


@pytest.mark.parametrize("option", ["--forge-json", "--forge-html"])
@pytest.mark.parametrize("place", ["pkg", "pkg/layers.py/out"])
def test_a_report_that_cannot_be_written_is_said_before_the_work(
    repo: pytest.Pytester, option: str, place: str
) -> None:
    result = repo.runpytest_inprocess("--forge", option, place)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{option}: *{place} cannot be written*"])
