"""Plain `pytest` on forged kernels in every state, for real; one repo, run as it is and with `--forge-strict`."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import case_repo
import pytest
from forge_repo import pytest_in

from pytest_cudaforge.runtime.manifest import Manifest


@dataclass(frozen=True)
class Run:
    """What one run said: outcome and text by item id, properties by item id, all that was printed."""

    outcomes: dict[str, tuple[str, str]]
    properties: dict[str, dict[str, str]]
    output: str

    def of(self, name: str, workload: str = "default") -> tuple[str, str]:
        return self.outcomes[f"{name}/case[{workload}]"]


def _run(folder: Path, *options: str) -> Run:
    done = pytest_in(folder, "--junit-xml=junit.xml", "-p", "no:cacheprovider", *options)
    outcomes, properties = {}, {}
    for case in ElementTree.parse(folder / "junit.xml").iter("testcase"):
        # forged.Fine.cpu.plan.py
        parts = (case.get("classname") or "").split(".")
        key = f"{parts[1] if len(parts) > 1 else parts[0]}/{case.get('name')}"
        found = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcomes[key] = ("passed", "") if found is None else (found.tag, f"{found.get('message')}\n{found.text}")
        properties[key] = {p.get("name") or "": p.get("value") or "" for p in case.iter("property")}
    return Run(outcomes, properties, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    case_repo.write(folder)
    return folder


@pytest.fixture(scope="module")
def plain(repo: Path) -> Run:
    return _run(repo, "-v", "-rs")


#: Whatever production has no use for: skipped, or failed where nothing may be skipped.
UNVERIFIED = {
    "Changed": "layers.py::Changed has changed since its kernel was verified",
    "Gone": "layers.py::Vanished is gone: layers.py holds no such target",
    "Moved": "old.py is gone, the file of old.py::Moved",
    "OldTorch": "layers.py::OldTorch: its kernel was verified with torch 1.13.1+cpu, here is torch",
    "Elsewhere": "this kernel was made for sm_42",
}


@pytest.fixture(scope="module")
def strict(repo: Path) -> Run:
    """Only what is decided without a child: the others cost seconds."""
    return _run(repo, "--forge-strict", "-k", " or ".join([*UNVERIFIED, "Tampered", "Missing"]))


def test_each_workload_is_a_case_of_its_own(plain: Run) -> None:
    assert plain.of("Fine") == plain.of("Fine", "wide") == ("passed", ""), plain.output
    assert "forged/Fine/cpu/plan.py::case[wide] PASSED" in plain.output


def test_properties_of_a_case(plain: Run) -> None:
    found = plain.properties["Fine/case[wide]"]
    assert found.pop("isolation") in "ABC"
    expected = {"target": "layers.py::Fine", "workload": "wide", "language": "cpp", "arch": "cpu", "status": "PASSED"}
    assert found == expected
    assert plain.properties["Changed/case[default]"]["status"] == "stale"


@pytest.mark.parametrize("name", UNVERIFIED)
def test_what_cannot_be_verified_is_skipped_or_strictly_failed(name: str, plain: Run, strict: Run) -> None:
    outcome, text = plain.of(name)
    assert outcome == "skipped" and UNVERIFIED[name] in text
    assert f"SKIPPED [1] forged/{name}" in plain.output, "at the kernel, not at a line of the plugin"
    outcome, text = strict.of(name)
    assert outcome == "failure" and UNVERIFIED[name] in text and "--forge-strict" in text


def test_a_workload_that_the_target_lost_or_draws_otherwise(plain: Run) -> None:
    outcome, text = plain.of("Renamed", "narrow")
    assert outcome == "skipped" and "has no workload 'narrow' any more" in text
    outcome, text = plain.of("Redrawn")
    assert outcome == "skipped" and "[4, 32] strides [32, 1], found float32 [4, 64] strides [64, 1]" in text


def test_a_workload_that_came_later_is_warned_of(plain: Run) -> None:
    assert plain.of("Grown")[0] == "passed"
    assert "layers.py::Grown: its kernel has no verdict on 'wide'; forge again" in plain.output


def test_two_kernels_share_the_workloads_of_a_target(plain: Run) -> None:
    assert plain.of("Shared") == plain.of("Shared", "wide") == ("passed", "")
    assert "forged/Shared/cpu-wide/plan.py::case[wide] PASSED" in plain.output
    assert "layers.py::Shared: its kernel has no verdict" not in plain.output


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Tampered", "kernel.cpp: differs from what was verified"), ("Missing", "kernel.cpp: cannot be read")],
)
def test_a_kernel_that_nobody_verified_always_fails(name: str, reason: str, plain: Run, strict: Run) -> None:
    for run in (plain, strict):
        outcome, text = run.of(name)
        assert outcome == "failure" and reason in text and "restore it from git" in text
    assert "Traceback" not in plain.output + strict.output


def test_a_wrong_kernel_fails(plain: Run) -> None:
    outcome, text = plain.of("Wrong")
    assert outcome == "failure" and "INCORRECT_NUMERICAL" in text


def test_a_kernel_that_is_used_where_it_fails_is_told(plain: Run) -> None:
    outcome, text = plain.of("Wider")
    assert outcome == "failure" and "lets it be used for other sizes than 64, where it fails" in text


def test_what_is_not_run_costs_no_child(repo: Path) -> None:
    deselected = pytest_in(repo, "-p", "no:cacheprovider", "-m", "not cudaforge").stdout
    assert "1 passed, 16 deselected" in deselected and "CHILDREN 0\n" in deselected
    listed = pytest_in(repo, "-p", "no:cacheprovider", "--collect-only", "-q", "-k", "cpp and Fine and wide").stdout
    assert "::case[wide]" in listed and "1/17 tests collected" in listed and "CHILDREN 0\n" in listed


def test_a_manifest_of_a_newer_format_is_an_error_with_its_name(tmp_path: Path) -> None:
    known = case_repo.targets(tmp_path, "Fine")
    file = tmp_path / "forged" / "manifest.json"
    Manifest((case_repo.entry(tmp_path, known["Fine"]),)).write(file)
    file.write_text(file.read_text().replace('"format": 1', '"format": 99'))
    done = pytest_in(tmp_path)
    assert "1 error" in done.stdout and "manifest.json: format 99\n" in done.stdout, done.stdout
    assert "use the version of pytest-cudaforge that wrote it" in done.stdout and "Traceback" not in done.stdout


# -- ends ----------------------------------------------------------------------------------------------------------


def _committed(folder: Path, *names: str) -> None:
    known = case_repo.targets(folder, *names, wide=("Added",))
    entries = tuple(case_repo.entry(folder, known[name]) for name in names)
    Manifest(entries).write(folder / "forged" / "manifest.json")


def _started(folder: Path, *options: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "pytest", "-v", "-p", "no:hypothesispytest", "-p", "no:anyio", *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # What a shell starts in the background ignores Ctrl-C, and so would all that these tests start.
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        argv, cwd=folder, env=environment, text=True, start_new_session=True, preexec_fn=heard, **out
    )


def test_ctrl_c_while_others_are_under_way(tmp_path: Path) -> None:
    """And, on the way, that a workload without a verdict is strictly a failure."""
    _committed(tmp_path, "Added", "Fine1", "Fine2", "Fine3", "Fine4", "Fine5")
    process = _started(tmp_path, "--forge-strict")
    assert process.stdout is not None
    while "case[default]" not in (line := process.stdout.readline()):
        assert line, "it ended before the first case"
    children = _descendants(process.pid)
    os.kill(process.pid, signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=60) == pytest.ExitCode.INTERRUPTED and "KeyboardInterrupt" in rest, rest
    assert "Added/cpu/plan.py::case[default] FAILED" in line and "no verdict on 'wide'" in rest
    assert children and not _left(children)


def test_a_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    _committed(tmp_path, "Fine1")
    process = _started(tmp_path)
    deadline = time.monotonic() + 60
    while not (children := _descendants(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert children and not _left(children)


def _left(children: list[int]) -> list[int]:
    """Those that still run after a generous while."""
    deadline = time.monotonic() + 60
    while (left := [pid for pid in children if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _descendants(pid: int) -> list[int]:
    found, pending = [], [pid]
    while pending:
        one = pending.pop()
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                pending += [int(word) for word in task.read_text().split()]
            except OSError:
                continue
        found.append(one)
    return found[1:]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
