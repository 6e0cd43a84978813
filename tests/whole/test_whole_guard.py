"""`pytest --forge-guard` as a pull request meets it, with real builds and races: what it does where nothing can be
decided, on a runner that may not decide, and when it is told to end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import guard_repo
import pytest
from forge_repo import pytest_in
from guard_repo import Repo, kernel, layer

from pytest_cudaforge import calibration
from pytest_cudaforge.calibration import Calibration, Trial
from pytest_cudaforge.hardware import detect
from pytest_cudaforge.machine import describe
from pytest_cudaforge.records import TimedBlock

#: So much more work that no load of the machine hides it, where anything is decided at all.
SLOWER = 40


def repo_with(root: Path, base: dict[str, str], head: dict[str, str], *, target: str = "Norm") -> Repo:
    """A pull request that replaces one kernel by another."""
    made = guard_repo.repo(root)
    made.write({"cudaforge.yaml": "trials: 1\ntiming_budget_s: 0.1\n"})
    made.layers([layer(target)])
    made.publish(target, base)
    made.commit("feat: a kernel")
    made.git("checkout", "-q", "-b", "work")
    made.publish(target, head)
    made.commit("perf: another kernel")
    return made


def guarded(repo: Repo, *options: str, cache: Path | None = None) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The run, and its record of the one race."""
    where = {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    # One thread: others would wait for each other on a busy machine.
    done = pytest_in(repo.root, "--forge-guard", "--forge-json=../guard.json", *options, OMP_NUM_THREADS="1", **where)
    records = json.loads((repo.root.parent / "guard.json").read_text())["guard"]["records"]
    return done, next(record for record in records if record["raced"])


# -- a merge base that no longer builds ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbuilt(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    gone = kernel()
    gone["kernel.cpp"] = "#include <a_header_that_is_gone.h>\n" + gone["kernel.cpp"]
    return repo_with(tmp_path_factory.mktemp("unbuilt") / "repo", gone, kernel())


def test_a_merge_base_that_no_longer_builds_leaves_it_undecided_and_says_so(unbuilt: Repo) -> None:
    done, record = guarded(unbuilt)
    assert done.returncode == 0, done.stdout + done.stderr
    assert record["outcome"] == "inconclusive", record
    assert record["reason"].startswith("not held against its version at the merge base: ")
    assert "a_header_that_is_gone.h" in record["text"] + "".join(record["notes"]), record
    assert "1 passed, 1 inconclusive" in done.stdout, done.stdout
    assert "the version at the merge base cannot be built any" in done.stdout


@pytest.mark.parametrize("given", ["option", "setting at the merge base"])
def test_who_wants_it_fails_what_was_not_decided(unbuilt: Repo, given: str, tmp_path: Path) -> None:
    option = ["--forge-guard-inconclusive", "fail"]
    if given != "option":
        option = []
        unbuilt.git("checkout", "-q", "main")
        unbuilt.write({"cudaforge.yaml": "trials: 1\ntiming_budget_s: 0.1\nguard: {inconclusive: fail}\n"})
        unbuilt.commit("chore: what is not decided fails")
        unbuilt.git("checkout", "-q", "work")
        unbuilt.git("rebase", "-q", "main")
    done, record = guarded(unbuilt, *option)
    assert record["outcome"] == "inconclusive", record
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "not held against its version at the merge base" in done.stdout


# -- an unfit runner -----------------------------------------------------------------------------------------------


def unfit_runner(cache: Path) -> Path:
    """The user's cache of a machine on which `cudaforge calibrate` saw a false alarm."""
    blocks = tuple(TimedBlock(place % 3, (("candidate", 1.5e5), ("base", 1e5))) for place in range(18))
    alarm = Trial("100us", 0.0, "regression", "supervisor", (blocks, blocks), seconds=1.0, day="2026-11-21")
    facts = detect("cpu")
    found = Calibration(describe(facts), "cpu", (alarm,), (0, 1000))
    assert not found.fit
    calibration.store(found, cache / "cudaforge")
    return cache


def test_an_unfit_runner_never_fails(tmp_path: Path) -> None:
    repo = repo_with(tmp_path / "repo", kernel(), kernel(turns=SLOWER))
    cache = unfit_runner(tmp_path / "cache")
    for _ in range(3):
        # Not even where what is not decided fails: this was decided, by a runner whose word does not count.
        done, record = guarded(repo, "--forge-guard-inconclusive", "fail", cache=cache)
        if record["outcome"] != "inconclusive":
            break
    else:
        pytest.skip(f"others kept the machine busy, three times nothing was decided: {record['reason']}")
    assert record["outcome"] == "unfit", record
    assert record["reason"].startswith("this runner is unfit and decides nothing: ")
    assert done.returncode == 0 and "1 passed, 1 unfit" in done.stdout, done.stdout + done.stderr
    assert "UNFIT: its regressions fail no build" in done.stdout
    (against,) = [finding for finding in record["findings"] if finding["question"] == "base"]
    assert against["outcome"] == "regression" and against["slowdown"]["speedup"] > 5


# -- SIGTERM -------------------------------------------------------------------------------------------------------


def test_sigterm_takes_the_worktree_along(tmp_path: Path) -> None:
    """A CI system's cancel, while something is raced: what it leaves would stay until the next run's sweep."""
    repo = guard_repo.repo(tmp_path / "repo")
    repo.layers([layer("Norm", options="guard=True")])
    repo.commit("feat: a module")
    repo.git("checkout", "-q", "-b", "work")
    repo.write({"layers.py": "import time\n" + (repo.root / "layers.py").read_text() + "\ntime.sleep(300)\n"})
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--forge-guard", "--junit-xml=../junit.xml"]
    argv.append("--forge-json=../guard.json")
    with subprocess.Popen(argv, cwd=repo.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        folders, children = _worktrees(repo), _children(process.pid)
        while (len(folders) < 2 or not children) and process.poll() is None:
            time.sleep(0.05)
            folders, children = _worktrees(repo), _children(process.pid)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "ended by SIGTERM" in output and "INTERNALERROR" not in output and "Traceback" not in output, output
    assert len(folders) == 2 and _worktrees(repo) == folders[:1], "it is not registered any more"
    assert not Path(folders[1]).parent.exists(), "and its files are gone"
    assert repo.git("status", "--porcelain") == "M layers.py"
    assert (tmp_path / "junit.xml").is_file(), "pytest ended its session"
    assert json.loads((tmp_path / "guard.json").read_text())["guard"]["base_sha"], "and what was known is told"
    deadline = time.monotonic() + 10
    while children and time.monotonic() < deadline:
        children = [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not children, "no child goes on"


def _worktrees(repo: Repo) -> list[str]:
    lines = repo.git("worktree", "list", "--porcelain").splitlines()
    return [line.removeprefix("worktree ") for line in lines if line.startswith("worktree ")]


def _children(pid: int) -> list[str]:
    """Processes in which a version of the module is, or will be."""
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [one for one in found if b"pytest_cudaforge.evaluation" in Path(f"/proc/{one}/cmdline").read_bytes()]
    except OSError:
        return []
