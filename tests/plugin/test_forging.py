"""`pytest --forge` and the cases it leaves, for real: oracle, compiler, sandbox, clock; only the model is scripted."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import fastjsonschema
import forge_repo
import pytest
from forge_repo import pytest_in
from quietness import Quietness

from pytest_cudaforge.items import verdict_of
from pytest_cudaforge.records import Outcome, Trace
from pytest_cudaforge.report import schema


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory, quietness: Quietness) -> tuple[Path, str]:
    """A repo after one `pytest --forge`, and what that printed."""
    folder = forge_repo.write(tmp_path_factory.mktemp("forged"), raises=True)
    with quietness.alone():
        return folder, forge_repo.forge(folder)


@pytest.fixture
def repo(forged: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of the forged repo, without the target that cannot be forged."""
    folder = tmp_path / "repo"
    shutil.copytree(forged[0], folder)
    (folder / "raises.py").unlink()
    return folder


@pytest.fixture
def case(repo: Path) -> str:
    return forge_repo.case_in(repo)


def test_one_is_forged_and_the_broken_one_fails_alone(forged: tuple[Path, str]) -> None:
    folder, output = forged
    assert "1 failed, 1 passed" in output, output
    assert "layers.py::PeakNorm" in output and "forged" in output
    assert "drawing inputs of workload 'default' failed" in output and "ZeroDivisionError" in output
    assert (folder / "forged" / "manifest.json").is_file()


def test_plain_lines_where_there_is_no_terminal(forged: tuple[Path, str]) -> None:
    assert "layers.py::PeakNorm [cpp] round 1 finished: BUILD_ERROR" in forged[1]
    assert "round 2 finished: PASSED" in forged[1]
    assert "\x1b[" not in forged[1]


def test_the_summary_has_speedups_rounds_cost_and_files(forged: tuple[Path, str]) -> None:
    _, _, summary = forged[1].partition("forged kernels")
    wanted = ("vs eager", "vs compile", "$0.03", "/cpu/", "manifest.json", "geomean", "1 of 2 targets forged")
    for text in wanted:
        assert text in summary


def test_the_pytest_process_imported_neither_torch_nor_targets(forged: tuple[Path, str]) -> None:
    assert "IMPORTED []" in forged[1]


def test_no_process_is_left_behind(forged: tuple[Path, str]) -> None:
    needle = str(forged[0]).encode()
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if needle in _bytes(path)]
    assert not left


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_junit_properties(forged: tuple[Path, str]) -> None:
    cases = {case.get("classname"): case for case in ElementTree.parse(forged[0] / "junit.xml").iter("testcase")}
    found = {entry.get("name"): entry.get("value") or "" for entry in cases["layers.PeakNorm"].iter("property")}
    assert found.keys() >= {"status", "speedup_eager", "speedup_compile", "rounds", "usd", "files", "isolation"}
    assert (found["status"], found["rounds"]) == ("forged", "2")
    assert float(found["speedup_eager"]) > 0


def test_json_report(forged: tuple[Path, str]) -> None:
    data = json.loads((forged[0] / "out" / "report.json").read_text())
    outcomes = {target["target"]: target["outcome"] for target in data["targets"]}
    assert outcomes == {"layers.py::PeakNorm": "forged", "raises.py::Raises": "error"}
    fastjsonschema.compile(schema.shipped())(data)
    assert data["environment"]["python"]


def test_the_page_of_the_run(forged: tuple[Path, str]) -> None:
    assert "report: .cudaforge/report.html" in forged[1]
    page = (forged[0] / ".cudaforge" / "report.html").read_text(encoding="utf-8")
    assert "layers.py::PeakNorm" in page and " of 2 targets forged" in page and "drawing inputs of workload" in page


# -- plain pytest --------------------------------------------------------------------------------------------------


def test_plain_pytest_runs_own_tests_and_cases(repo: Path, case: str) -> None:
    done = pytest_in(repo, "-v", "-rA")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert case in done.stdout and "workload default:" in done.stdout and "IMPORTED []" in done.stdout


def test_a_case_by_its_id(repo: Path, case: str) -> None:
    done = pytest_in(repo, "--collect-only", "-q", case)
    assert case in done.stdout and "1 test collected" in done.stdout, done.stdout + done.stderr


def test_only_cases_by_marker(repo: Path, case: str) -> None:
    done = pytest_in(repo, "--collect-only", "-q", "-m", "cudaforge")
    assert case in done.stdout and "test_own" not in done.stdout


def test_naming_a_test_file_never_runs_cases(repo: Path) -> None:
    done = pytest_in(repo, "--collect-only", "-q", "-o", "forge_cases=true", "test_own.py")
    assert "::case" not in done.stdout and "1 test collected" in done.stdout


def test_forge_cases_adds_them_beside_testpaths(repo: Path, case: str) -> None:
    (repo / "tests").mkdir()
    (repo / "test_own.py").rename(repo / "tests" / "test_own.py")
    options = ("--collect-only", "-q", "-o", "testpaths=tests")
    assert "::case" not in pytest_in(repo, *options).stdout
    found = pytest_in(repo, *options, "-o", "forge_cases=true").stdout
    assert case in found and "tests/test_own.py::test_own" in found


def test_forge_dir_and_forge_cases_of_the_configuration(repo: Path, case: str) -> None:
    (repo / "forged").rename(repo / "kernels")
    (repo / "tests").mkdir()
    options = ("--collect-only", "-q")
    assert "::case" not in pytest_in(repo, *options).stdout
    (repo / "cudaforge.yaml").write_text("forge_dir: kernels\n")
    moved = case.replace("forged/", "kernels/")
    assert moved in pytest_in(repo, *options).stdout
    assert "::case" not in pytest_in(repo, *options, "-o", "testpaths=tests").stdout
    (repo / "cudaforge.yaml").write_text("forge_dir: kernels\nforge_cases: true\n")
    assert moved in pytest_in(repo, *options, "-o", "testpaths=tests").stdout
    (repo / "cudaforge.yaml").write_text("forge_cases: maybe\n")
    broken = pytest_in(repo, *options)
    assert broken.returncode == pytest.ExitCode.USAGE_ERROR and "forge_cases" in broken.stderr


def test_forged_files_are_never_collected_as_python(repo: Path) -> None:
    (plan,) = repo.glob("forged/*/cpu/plan.py")
    plan.write_text("raise SystemExit('imported')\n")
    done = pytest_in(repo, "--collect-only", "-q", "-o", "python_files=*.py", "forged")
    assert "1 test collected" in done.stdout and "imported" not in done.stdout + done.stderr


def test_a_torn_manifest_is_an_error_with_its_name(repo: Path) -> None:
    manifest = repo / "forged" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    done = pytest_in(repo)
    assert "manifest.json" in done.stdout and "1 error" in done.stdout and "Traceback" not in done.stdout


# -- more of --forge -----------------------------------------------------------------------------------------------


def test_only_selected_targets_are_forged(repo: Path) -> None:
    (repo / "raises.py").write_text(forge_repo.RAISES)
    done = pytest_in(repo, "--forge", "-k", "Raises")
    assert "1 failed" in done.stdout and "PeakNorm" not in done.stdout


def test_the_first_failure_cancels_the_rest(tmp_path: Path) -> None:
    folder = forge_repo.write(tmp_path)
    (folder / "a_raises.py").write_text(forge_repo.RAISES)
    done = pytest_in(folder, "--forge", "-x", CUDAFORGE_CONCURRENCY="1")
    assert "1 failed" in done.stdout and "cancelled" in done.stdout, done.stdout
    assert not (folder / "forged").exists()


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    folder = forge_repo.write(tmp_path, raises=True)
    before = sorted(path.name for path in folder.iterdir())
    done = pytest_in(folder, "--forge", "--forge-dry-run", "-p", "no:cacheprovider", PYTHONDONTWRITEBYTECODE="1")
    assert "first prompt about" in done.stdout and "1 failed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="asks for a GPU where there is none")
def test_a_missing_device_fails_the_items_with_its_remedy(tmp_path: Path) -> None:
    done = pytest_in(forge_repo.write(tmp_path), "--forge", "--forge-device", "cuda")
    assert "1 failed" in done.stdout and "Traceback" not in done.stdout, done.stdout + done.stderr
    assert "cuda" in done.stdout and "to do:" in done.stdout and "INTERNALERROR" not in done.stdout + done.stderr


@pytest.mark.parametrize("xdist", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_setting_that_only_the_session_refuses_is_a_usage_error(tmp_path: Path, xdist: tuple[str, ...]) -> None:
    folder = forge_repo.write(tmp_path)
    (folder / "cudaforge.yaml").write_text(forge_repo.SETTINGS + "languages: [cuda]\n")
    done = pytest_in(folder, "--forge", *xdist)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "languages: cuda cannot run on" in done.stderr and "INTERNALERROR" not in done.stdout + done.stderr


def test_no_key_is_said_once_and_clearly(tmp_path: Path) -> None:
    folder = forge_repo.write(tmp_path)
    (folder / "cudaforge.yaml").write_text("device: cpu\nchat:\n  coder: {provider: openai, model: gpt-5}\n")
    done = pytest_in(folder, "--forge", OPENAI_API_KEY="")
    assert "OPENAI_API_KEY" in done.stdout + done.stderr and "Traceback" not in done.stdout + done.stderr
    assert done.returncode != 0


# -- outcomes ------------------------------------------------------------------------------------------------------


OUTCOMES: list[tuple[tuple[Outcome, ...], str, str]] = [
    (("forged",), "passed", "passed"),
    (("kept_reference",), "passed", "failed"),
    (("failed",), "failed", "failed"),
    (("error",), "failed", "failed"),
    (("pending",), "skipped", "failed"),
    (("skipped",), "skipped", "failed"),
    (("cancelled",), "skipped", "failed"),
    (("failed", "forged"), "passed", "passed"),
    (("skipped", "error"), "failed", "failed"),
]


@pytest.mark.parametrize(("outcomes", "normal", "strict"), OUTCOMES)
def test_how_outcomes_are_reported(outcomes: tuple[Outcome, ...], normal: str, strict: str) -> None:
    traces = [Trace("a.py::A", "cpp", outcome, "") for outcome in outcomes]
    assert (verdict_of(traces, strict=False), verdict_of(traces, strict=True)) == (normal, strict)
